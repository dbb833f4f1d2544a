"""# What it finds
Steps in which the program keeps asking the driver for memory instead of reusing the memory it already holds.

# Why it costs time
PyTorch keeps freed memory and reuses it without calling the driver. When it cannot, `cudaMalloc` takes about a
millisecond, and `cudaFree` first waits until the device has finished all work. Steady steps need neither call.

# How it is measured
Idle time of the device while a host thread was in the driver's memory calls (`cudaMalloc`, `cudaFree`, `cudaHostAlloc`
and similar) during the steps. Without steps, memory that is asked for and never given back does not count. Where a step
both frees and requests memory, the allocator had run out, returned its cached blocks and tried again.

# Known false positives
Recordings of a program's first steps, in which the allocator gets the memory that later steps reuse.

# What to do
Call no `empty_cache()` in the loop, use few different batch shapes, set `expandable_segments`, and use less memory when
close to the limit. Allocate pinned host memory once, or let the loader do it (`pin_memory=True`).

# Reference
msprof-analyze reports 10 ms or more in the driver's memory calls; `torch.cuda.memory_stats()["num_alloc_retries"]`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.blocks import allocator_table
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.whatif.changes import scaled_cause

_HOST: Final = r"(?i)host|pinned|register"
_GIVES_BACK: Final = r"(?i)free|unmap|release"


def check(view: View, limits: Limits) -> Answers:
    if view.device is None:
        return
    waiting = view.pieces.filter((pl.col("cause") == "allocation") & pl.col("gap").is_not_null())
    calls = allocator_table(view.trace, view.span, view.step_count)
    if calls.is_empty():
        return
    given_back = int(calls.filter(pl.col("name").str.contains(_GIVES_BACK))["calls"].sum())
    asked = int(calls["calls"].sum()) - given_back
    if not given_back and not view.complete_steps.height:  # memory asked for once and kept: nothing repeats
        return
    retries = min(_between(view), asked) / view.step_count
    in_steps = _steps_with_calls(view)
    yield Found(
        _title(view, asked, given_back, is_retried=retries >= 1),
        int(waiting["duration_ns"].sum()),
        basis="idle time of the device during the driver's calls for memory",
        confidence="medium" if in_steps > 1 else "low",
        figures=[
            view.count_per_step("calls that ask for memory,", asked),
            view.count_per_step("calls that give memory back,", given_back),
            view.count_per_step("of them before others ask for it again,", _between(view)),
            Figure(f"the host's time in them, {view.per}", int(calls["total_ns"].sum()) // view.step_count, "ns"),
            *([Figure("steps with such calls", in_steps, "count")] if view.complete_steps.height else []),
        ],
        intervals=view.longest(waiting, str(calls["name"][0])),
        remedy=_remedy(view, calls, retries),
        where=view.locations(waiting),
        change=scaled_cause("allocation", 0.0),
    )


def _between(view: View) -> int:
    """How often memory is given back to the driver before it is requested again."""
    calls = view.begin_in_span(view.trace.launches.filter(pl.col("kind") == "allocate")).sort("start_ns")
    gives = calls["name"].str.contains(_GIVES_BACK).to_numpy()
    asks = np.flatnonzero(~gives)
    return int(gives[: asks[-1]].sum()) if len(asks) else 0


def _title(view: View, asked: int, given_back: int, *, is_retried: bool) -> str:
    times = _times(view, asked or given_back)
    if not asked:
        return f"memory is given back to the driver {times}"
    return f"the driver is asked for memory {times}{', and gives memory back in between' if is_retried else ''}"


def _times(view: View, count: int) -> str:
    each = count / view.step_count
    times = "once" if each == 1 else f"{each:,.3g} times"
    return f"{times} {view.a_step}" if view.complete_steps.height else times


def _steps_with_calls(view: View) -> int:
    calls = view.trace.launches.filter(pl.col("kind") == "allocate")["start_ns"].to_numpy()
    steps = view.complete_steps.sort("start_ns")
    start = steps["start_ns"].to_numpy()
    if not len(start):
        return 1
    at = np.searchsorted(start, calls, side="right") - 1
    inside = (at >= 0) & (calls < (start + steps["duration_ns"].to_numpy())[np.maximum(at, 0)])
    return len(np.unique(at[inside]))


def _remedy(view: View, calls: pl.DataFrame, retries: float) -> Remedy:
    if calls["name"].str.contains(_HOST).fill_null(False)[0]:
        return Remedy(
            "The steps allocate pinned memory anew: make the buffer once and fill it, or let the loader pin batches.",
            "buffer = torch.empty(shape, pin_memory=True)   # before the loop\n"
            "buffer.copy_(batch)                            # in it",
        )
    if retries >= 1:
        return Remedy(
            f"Memory is given back and requested again: do not call {view.torch_device}.empty_cache() in the loop. "
            "Without such calls, the allocator may have run out: use less memory, or let its segments grow.",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py   # and no empty_cache() in the loop",
        )
    return Remedy(
        "The allocator's pool grows or shrinks while the program works: let segments grow; and where the sizes of "
        "batches differ, round them up to a few, so that old blocks fit.",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py",
    )


RULE: Final = Rule(
    id="allocator-retries",
    title="The driver is asked for memory during the steps",
    thresholds={
        "share": Threshold(0.01, "share", "share of the {period} that the device waits for the allocator"),
    },
    check=check,
)
