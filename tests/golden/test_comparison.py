"""Comparisons of real traces, held against sums that are computed here from the events themselves."""

from __future__ import annotations

import gzip
import json
import os
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from stepscope.compare import Comparison, compare_traces
from stepscope.report.comparison_words import where_sentences
from tests.golden.opened import opened

pytestmark = pytest.mark.traces

PAIRS = [
    ("v100_resnet50_workers0", "v100_resnet50_workers4"),
    ("cpu_gpt2_per_token_loss", "cpu_gpt2_batched_loss"),
    ("v100_dlrm_rank1of2", "a100_ddp_rank3of8"),
    ("mi250_toy_train", "mi300x_compiled_triton"),
    ("no_rank_no_device", "mi210_gpu_events_only"),
    ("rtx2080ti_resnet", "h100_owlv2"),
]


def place(name: str) -> Path:
    path = Path(os.environ.get("STEPSCOPE_TRACES", "")) / "kineto" / f"{name}.json.gz"
    if not path.is_file():
        pytest.skip("STEPSCOPE_TRACES does not name the folder of real traces")
    return path


def compared(before: str, after: str, *, all_steps: bool = False) -> Comparison:
    return compare_traces(opened(place(before)), opened(place(after)), all_steps=all_steps)


def busy_ns(name: str) -> tuple[int, int, int]:
    """Number of steps, their length, and when the device worked in them, from the file's events alone."""
    events: list[dict[str, Any]] = json.loads(gzip.decompress(place(name).read_bytes()), parse_float=Decimal)[
        "traceEvents"
    ]
    complete = [event for event in events if event.get("ph") == "X"]
    steps = [event for event in complete if str(event["name"]).startswith("ProfilerStep#")]
    begin = min(event["ts"] for event in steps)
    end = max(event["ts"] + event["dur"] for event in steps)
    kinds = {"kernel", "memcpy", "memset"}
    work = [event for event in complete if str(event.get("cat", "")).lower().removeprefix("gpu_") in kinds]
    total, reached = Decimal(0), begin
    for event in sorted(work, key=lambda event: event["ts"]):
        start, stop = max(event["ts"], reached), min(event["ts"] + event["dur"], end)
        total += max(stop - start, Decimal(0))
        reached = max(reached, stop)
    return len(steps), int((end - begin) * 1000), int(total * 1000)


@pytest.mark.parametrize("all_steps", [True, False])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_the_causes_add_up_to_the_difference(pair: tuple[str, str], all_steps: bool) -> None:
    found = compared(*pair, all_steps=all_steps)

    assert found.causes["before_total_ns"].sum() == found.before.total_ns
    assert found.causes["after_total_ns"].sum() == found.after.total_ns
    counts = found.before.step_count, found.after.step_count
    rows = found.causes.select("before_total_ns", "after_total_ns").iter_rows()
    difference = sum(Fraction(after, counts[1]) - Fraction(before, counts[0]) for before, after in rows)
    assert difference == Fraction(found.after.total_ns, counts[1]) - Fraction(found.before.total_ns, counts[0])


@pytest.mark.parametrize("name", ["v100_resnet50_workers0", "cpu_gpt2_batched_loss", "rtx2080ti_resnet"])
def test_a_trace_does_not_differ_from_itself(name: str) -> None:
    found = compared(name, name)

    assert found.samples.verdict == "no difference shown"
    assert found.samples.change == 0
    for table in (found.causes, found.operators, found.kernels, found.lines, found.modules):
        assert set(table["match"]) <= {"same"}
        assert set(table["difference_ns"]) <= {0.0}
    assert where_sentences(found) == ["No cause of busy or idle time differs by 1 % of a step or more."]


def test_the_data_loader_makes_the_difference_of_the_resnets() -> None:
    """Given a recording whose first step waited and whose last holds the profiler's stop: 160 and 206 ms."""
    found = compared("v100_resnet50_workers0", "v100_resnet50_workers4")

    assert found.samples.verdict == "faster"
    assert found.samples.change == pytest.approx(-0.2994, abs=1e-4)
    assert found.before.left_out == ()
    assert [(step.edge, step.index, step.duration_ns) for step in found.after.left_out] == [
        ("first", 16, 160_142_000),
        ("last", 21, 206_514_000),
    ]
    sentences = where_sentences(found)
    assert "58.7 ms less idle time in which the host was loading data (input)" in sentences[0]
    assert "resnet50_profiler_api.py:42 <module>" in sentences[1]


def test_the_sums_of_all_steps_are_those_of_the_file() -> None:
    found = compared("v100_resnet50_workers0", "v100_resnet50_workers4", all_steps=True)

    steps, total, busy = busy_ns("v100_resnet50_workers0")
    after_steps, after_total, after_busy = busy_ns("v100_resnet50_workers4")
    assert (found.before.step_count, found.before.total_ns) == (steps, total)
    assert (found.after.step_count, found.after.total_ns) == (after_steps, after_total)
    work = found.causes.filter(kind="busy")
    assert (work["before_total_ns"].sum(), work["after_total_ns"].sum()) == (busy, after_busy)
    top = found.causes.row(0, named=True)
    assert (top["kind"], top["name"]) == ("idle", "input")
    assert top["before_ns"] > 57e6 > 1e6 > top["after_ns"]
    sentences = where_sentences(found)
    assert "idle time in which the host was loading data (input)" in sentences[0]
    assert "resnet50_profiler_api.py:42 <module>" in sentences[1]


def test_the_loop_over_tokens_is_what_went_from_the_gpt2() -> None:
    found = compared("cpu_gpt2_per_token_loss", "cpu_gpt2_batched_loss")

    assert found.samples.verdict == "faster"
    first = found.lines.row(0, named=True)
    assert (first["file"], first["function"], first["match"]) == ("naive_gpt2.py", "naive_loss", "only before")
    sentences = " ".join(where_sentences(found))
    assert "naive_gpt2.py:62 naive_loss, 406.5 ms a step, is there only before" in sentences
    assert "naive_gpt2.py:68 fixed_loss, 7.5 ms, only after" in sentences
    fill = found.operators.row(0, named=True)
    assert (fill["name"], fill["match"], fill["before_calls"], fill["after_calls"]) == (
        "aten::fill_",
        "other shapes",
        64,
        1,
    )
    gone = found.operators.filter(match="only before")["name"].to_list()
    assert "aten::select_backward" in gone
