"""Small diagnoses written by hand, for the tests of reports and commands."""

from typing import Any

import polars as pl

from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.diagnosis.finding import (
    DeviceSummary,
    Evidence,
    Figure,
    Finding,
    Interval,
    Location,
    NotAnswered,
    Once,
    Remedy,
    SetApart,
)
from stepscope.trace import Metadata, TraceWarning

STEPS = {"index": pl.Int64, "start_ns": pl.Int64, "duration_ns": pl.Int64, "complete": pl.Boolean}
IDLE = {"device": pl.String, "cause": pl.String, "trigger": pl.String, "ns": pl.Int64, "share": pl.Float64}
HOST = {"cause": pl.String, "ns": pl.Int64, "share": pl.Float64}

EMPTY: dict[str, Any] = {
    "metadata": Metadata(),
    "warnings": (),
    "step_source": "none",
    "steps": pl.DataFrame(schema=STEPS),
    "step_ns": 0,
    "step_count": 1,
    "devices": (),
    "idle": pl.DataFrame(schema=IDLE),
    "host": pl.DataFrame(schema=HOST),
    "operators": pl.DataFrame(schema={"name": pl.String}),
    "operator_count": 0,
    "kernels": pl.DataFrame(schema={"name": pl.String}),
    "kernel_count": 0,
    "findings": (),
    "hidden": 0,
    "not_answered": (),
}

INPUT_BOUND = Finding(
    rule="input-bound",
    title="The device waits 40.0 ms a step for the DataLoader",
    severity="high",
    saving_ns_per_step=40_000_000,
    saving_share=0.3325,
    saving_basis="the idle time with the cause input",
    confidence="high",
    evidence=Evidence((Figure("idle, input", 0.3325, "share", 0.05),), (Interval(5, 10, "a wait for a batch"),)),
    remedy=Remedy("Load batches in worker processes.", "loader = DataLoader(\n    dataset, num_workers=8\n)"),
    where=(
        Location(
            "/home/jane doe/project/train.py", 88, "main", 0.9, True, ("/home/jane doe/project/train.py:1 <module>",)
        ),
        Location("/opt/env/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 12, "__next__", 0.1),
    ),
)

HOSTILE_NOTE = Finding(
    rule="profiler-overhead",
    title="The profiler \x1b[31mitself [bold]took[/bold] 3 % | <b>of</b> the time @all",
    severity="note",
    saving_ns_per_step=0,
    saving_share=0.0,
    saving_basis="counted",
    confidence="low",
    evidence=Evidence(),
    remedy=Remedy("Record without stacks."),
)

FULL: dict[str, Any] = {
    "metadata": Metadata(
        path="/home/jane doe/runs/trace.json", format="kineto", events=10, rank=3, world_size=8, host="node7"
    ),
    "warnings": (TraceWarning("truncated", 1, "/home/jane doe/runs/trace.json ends early"),),
    "step_source": "annotation",
    "steps": pl.DataFrame([(1, 0, 120_300_000, True)], schema=STEPS, orient="row"),
    "step_ns": 120_300_000,
    "step_count": 10,
    "devices": (
        DeviceSummary(
            "0",
            "NVIDIA H100",
            1_203_000_000,
            635_000_000,
            568_000_000,
            600_000_000,
            9_000_000,
            8_000_000,
            7_000_000,
            6_000_000,
        ),
    ),
    "idle": pl.DataFrame(
        [
            ("0", "input", None, 400_000_000, 0.3325),
            ("0", "python", "cudaStreamSynchronize", 60_000_000, 0.0499),
            ("0", "python", None, 106_000_000, 0.0881),
            ("0", "launch_latency", None, 1_500_000, 0.00125),
            ("0", "unknown", None, 500_000, 0.000416),
        ],
        schema=IDLE,
        orient="row",
    ),
    "length_ns": 1_223_000_000,
    "mean_step_ns": 180_000_000,
    "median_step_ns": 100_000_000,
    "once": (
        Once(
            "first launch",
            "cudaLaunchKernel",
            15_000_000,
            1,
            (Location("/home/jane doe/project/train.py", 90, "main"),),
        ),
        Once("initialisation", "cublasCreate", 5_000_000, 3, ()),
    ),
    "set_apart": (SetApart(0, 780_000_000, "copy_in", 0.5),),
    "host": pl.DataFrame([("compute", 600_000_000, 0.6), ("input", 400_000_000, 0.4)], schema=HOST, orient="row"),
    "operators": pl.DataFrame(
        {"name": ["aten::mm", "aten::add"], "calls": [1000, 20], "host_self_ns": [50_000_000, 20_000]}
    ),
    "operator_count": 431,
    "kernels": pl.DataFrame({"name": ["gemm<a|b>"], "total_ns": [50_000_000], "share": [0.4], "precision": ["fp16"]}),
    "kernel_count": 1,
    "findings": (INPUT_BOUND, HOSTILE_NOTE),
    "hidden": 2,
    "not_answered": (
        NotAnswered("Is memory fragmented?", "No allocations were recorded.", "profile_memory=True", "memory"),
    ),
}


def empty(**changes: Any) -> Diagnosis:
    """The diagnosis of an empty trace, with changes."""
    return Diagnosis(**{**EMPTY, **changes})


def full(**changes: Any) -> Diagnosis:
    """A diagnosis with one of everything, with changes."""
    return Diagnosis(**{**FULL, **changes})
