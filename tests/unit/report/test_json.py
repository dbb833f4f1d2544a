import json
import math

import polars as pl

import stepscope
from stepscope.diagnosis.finding import Together, Unreadable
from stepscope.report.document import json_bytes
from stepscope.trace import Metadata, Window
from tests.unit.hand_built import empty, full
from tests.unit.rendered import json_of, json_report

EMPTY_REPORT = {
    "schema": 1,
    "stepscope": stepscope.__version__,
    "headline": "No device was recorded; 0 ns recorded, without steps.",
    "trace": {
        "path": "",
        "format": "",
        "events": 0,
        "rank": None,
        "world_size": None,
        "origin_unix_ns": None,
        "host": None,
        "window": None,
        "warnings": [],
    },
    "devices": [],
    "summary": {"devices": [], "host": None},
    "steps": {
        "source": "none",
        "step_ns": 0,
        "unrecorded_ns": None,
        "job_step_ns": None,
        "count": 1,
        "typical_ns": 0,
        "mean_ns": 0,
        "median_ns": 0,
        "set_apart": [],
        "list": [],
    },
    "accounting": [],
    "lines": [],
    "busy": [],
    "once": [],
    "idle": [],
    "host": [],
    "operators": [],
    "operator_count": 0,
    "kernels": [],
    "kernel_count": 0,
    "findings": [],
    "findings_hidden": 0,
    "together": None,
    "afterwards": [],
    "not_answered": [],
}

FULL_REPORT = {
    "schema": 1,
    "stepscope": stepscope.__version__,
    "headline": "Rank 3, device 0 (NVIDIA H100): a step takes 100.0 ms (median of 10, mean 120.3 ms, "
    "annotated), busy 52.8 %, idle 47.2 %; biggest cause: the host was loading data (33.2 %).",
    "trace": {
        "path": "/home/jane doe/runs/trace.json",
        "format": "kineto",
        "events": 10,
        "rank": 3,
        "world_size": 8,
        "origin_unix_ns": None,
        "host": "node7",
        "window": None,
        "warnings": [{"kind": "truncated", "count": 1, "detail": "/home/jane doe/runs/trace.json ends early"}],
    },
    "devices": [
        {
            "device": "0",
            "name": "NVIDIA H100",
            "window_ns": 1_203_000_000,
            "busy_ns": 635_000_000,
            "idle_ns": 568_000_000,
            "compute_ns": 600_000_000,
            "communication_ns": 9_000_000,
            "copy_ns": 8_000_000,
            "exposed_communication_ns": 7_000_000,
            "exposed_copy_ns": 6_000_000,
        }
    ],
    "summary": {"devices": [], "host": None},
    "steps": {
        "source": "annotation",
        "step_ns": 120_300_000,
        "unrecorded_ns": None,
        "job_step_ns": None,
        "count": 10,
        "typical_ns": 100_000_000,
        "mean_ns": 180_000_000,
        "median_ns": 100_000_000,
        "set_apart": [{"index": 0, "duration_ns": 780_000_000, "what": "copy_in", "share": 0.5, "phase": ""}],
        "list": [{"index": 1, "start_ns": 0, "duration_ns": 120_300_000, "complete": True}],
    },
    "accounting": [],
    "lines": [],
    "busy": [],
    "once": [
        {
            "what": "first launch",
            "name": "cudaLaunchKernel",
            "ns": 15_000_000,
            "count": 1,
            "where": [
                {
                    "file": "/home/jane doe/project/train.py",
                    "line": 90,
                    "function": "main",
                    "share": 1.0,
                    "exact_line": False,
                    "call_path": [],
                    "inside": [],
                    "module": "",
                }
            ],
        },
        {"what": "initialisation", "name": "cublasCreate", "ns": 5_000_000, "count": 3, "where": []},
    ],
    "idle": [
        {"device": "0", "cause": "input", "trigger": None, "ns": 400_000_000, "share": 0.3325},
        {"device": "0", "cause": "python", "trigger": "cudaStreamSynchronize", "ns": 60_000_000, "share": 0.0499},
        {"device": "0", "cause": "python", "trigger": None, "ns": 106_000_000, "share": 0.0881},
        {"device": "0", "cause": "launch_latency", "trigger": None, "ns": 1_500_000, "share": 0.00125},
        {"device": "0", "cause": "unknown", "trigger": None, "ns": 500_000, "share": 0.000416},
    ],
    "host": [
        {"cause": "compute", "ns": 600_000_000, "share": 0.6},
        {"cause": "input", "ns": 400_000_000, "share": 0.4},
    ],
    "operators": [
        {"name": "aten::mm", "calls": 1000, "host_self_ns": 50_000_000},
        {"name": "aten::add", "calls": 20, "host_self_ns": 20_000},
    ],
    "operator_count": 431,
    "kernels": [{"name": "gemm<a|b>", "total_ns": 50_000_000, "share": 0.4, "precision": "fp16"}],
    "kernel_count": 1,
    "findings": [
        {
            "rule": "input-bound",
            "title": "The device waits 40.0 ms a step for the DataLoader",
            "severity": "high",
            "saving_ns_per_step": 40_000_000,
            "saving_share": 0.3325,
            "saving_basis": "the idle time with the cause input",
            "saving_from": "attributed",
            "confidence": "high",
            "ends_run_in_ns": None,
            "evidence": {
                "figures": [{"name": "idle, input", "value": 0.3325, "unit": "share", "threshold": 0.05}],
                "intervals": [{"start_ns": 5, "duration_ns": 10, "what": "a wait for a batch"}],
            },
            "where": [
                {
                    "file": "/home/jane doe/project/train.py",
                    "line": 88,
                    "function": "main",
                    "share": 0.9,
                    "exact_line": True,
                    "call_path": ["/home/jane doe/project/train.py:1 <module>"],
                    "inside": [],
                    "module": "",
                },
                {
                    "file": "/opt/env/lib/python3.11/site-packages/torch/utils/data/dataloader.py",
                    "line": 12,
                    "function": "__next__",
                    "share": 0.1,
                    "exact_line": False,
                    "call_path": [],
                    "inside": [],
                    "module": "",
                },
            ],
            "remedy": {
                "text": "Load batches in worker processes.",
                "code": "loader = DataLoader(\n    dataset, num_workers=8\n)",
                "apply": [],
                "diff": "",
            },
        },
        {
            "rule": "profiler-overhead",
            "title": "The profiler \x1b[31mitself [bold]took[/bold] 3 % | <b>of</b> the time @all",
            "severity": "note",
            "saving_ns_per_step": 0,
            "saving_share": 0.0,
            "saving_basis": "counted",
            "saving_from": "attributed",
            "confidence": "low",
            "ends_run_in_ns": None,
            "evidence": {"figures": [], "intervals": []},
            "where": [],
            "remedy": {"text": "Record without stacks.", "code": "", "apply": [], "diff": ""},
        },
    ],
    "findings_hidden": 2,
    "together": None,
    "afterwards": [],
    "not_answered": [
        {
            "question": "Is memory fragmented?",
            "why": "No allocations were recorded.",
            "how": "profile_memory=True",
            "rule": "memory",
            "rules": [],
        }
    ],
}


def test_the_empty_diagnosis() -> None:
    assert json_report(empty()) == EMPTY_REPORT


def test_the_whole_report_survives_being_written() -> None:
    assert json.loads(json_bytes(json_report(full()))) == json_report(full()) == FULL_REPORT


def test_what_findings_save_together() -> None:
    assert json_report(full(together=Together(3, 49_323_000, 0.41, 0.63)))["together"] == {
        "count": 3,
        "saving_ns_per_step": 49_323_000,
        "share": 0.41,
        "sum_share": 0.63,
    }


def test_several_ranks_stand_in_one_report() -> None:
    assert json_of([empty(), full()]) == {
        "schema": 1,
        "stepscope": stepscope.__version__,
        "ranks": [EMPTY_REPORT, FULL_REPORT],
        "across_ranks": [],
        "job_steps": None,
        "exchanges": [],
        "clocks": [],
        "unreadable": [],
    }
    assert json_of([full()]) == {**FULL_REPORT, "unreadable": []}


def test_files_that_could_not_be_read_are_listed() -> None:
    unreadable = [Unreadable("/data/rank2.json", "/data/rank2.json is empty")]
    listed = [{"path": "/data/rank2.json", "reason": "/data/rank2.json is empty"}]
    assert json_of([full()], unreadable=unreadable)["unreadable"] == listed
    assert json_of([empty(), full()], unreadable=unreadable)["unreadable"] == listed


def test_findings_about_the_ranks_together_stand_beside_them() -> None:
    about = full().findings[0]

    assert json_of([empty(), full()], [about])["across_ranks"] == [FULL_REPORT["findings"][0]]


def test_numbers_without_a_value_are_null_and_nested_values_plain() -> None:
    report = json_report(
        empty(
            operators=pl.DataFrame({"name": ["a"], "share": [math.nan], "lines": [[1, 2]], "at": [{"x": math.inf}]}),
            metadata=Metadata(window=Window(1, 2)),
        )
    )
    assert report["operators"] == [{"name": "a", "share": None, "lines": [1, 2], "at": {"x": None}}]
    assert report["trace"]["window"] == {"start_ns": 1, "end_ns": 2}
    json.loads(json_bytes(report), parse_constant=lambda constant: 1 / 0)
