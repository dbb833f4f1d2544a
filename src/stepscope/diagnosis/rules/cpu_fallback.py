"""# What it finds
Operators that run on the CPU in the middle of a device's work.

# Why it costs time
The device must finish all earlier work, the data is copied to the host, the CPU works while the device idles, and the
result is copied back before the device can continue.

# How it is measured
In each step, a copy to the host, then operators that work on the host and launch nothing, then a copy to the device on
the same thread; or operators whose names show that they fell back to the CPU. The cost is the device's idle time from
the first copy to the end of the last and in the refill after them, and its time for the copies. The time the device
itself would need for the operators is not in the trace and is not subtracted.

Files beside the trace (`--fallback-log`, `--gaudi-metrics`, `--xla-metrics`, `--xla-debug-log`) name and count the
operators that the device could not run. Operators that appear in the trace are costed by their times there; for the
others a note gives the number of calls on the CPU and claims no saving.

# Known false positives
Work that the device cannot do. Do it for many steps at once, or while the device works on something else.

# What to do
Keep the tensors on the device, and replace the operator that falls back with one that the device supports.

# Reference
PyTorch documentation, `PYTORCH_ENABLE_MPS_FALLBACK`; Intel Gaudi documentation, "Placement of Ops on HPU"; PyTorch/XLA,
"Troubleshoot": `aten::` counters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.rule import (
    Answers,
    Figure,
    Found,
    Limits,
    Remedy,
    Rule,
    Threshold,
    View,
    note_from_files,
    rows_of,
)
from stepscope.diagnosis.rules._operators import cost_ns, round_trips, without_trips
from stepscope.trace.metadata import Fallback
from stepscope.trace.nesting import Rows, containing, row_numbers
from stepscope.whatif.changes import scaled_operators

_MOST_COUNTED: Final = 10
_MOST_NAMED: Final = 3
_FALLBACK: Final = r"(?i)_?cpu_?fallback"


def check(view: View, limits: Limits) -> Answers:
    trips = [trip for trip in round_trips(view) if trip.on_host] if view.device is not None else []
    cost = cost_ns(view, trips) if trips else 0
    fallen = _named(view)
    if len(fallen) and view.device is not None:
        cost = max(cost, view.cost_ns(fallen))
    if not limits.reached(cost):
        yield from _noted(view)
        return
    rows = np.array([row for trip in trips for row in trip.on_host] or fallen.tolist(), np.int64)
    durations = view.trace.operators["duration_ns"].to_numpy()[rows]
    names = view.trace.operators["name"].gather(rows).unique(maintain_order=True).to_list()
    yield Found(
        f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} on the CPU between two copies: the device waits "
        f"{len(trips) / view.step_count:,.3g} times {view.a_step}"
        if trips
        else f"{', '.join(names[:3])}: operators fall back to the CPU",
        cost,
        basis="the device's idle time from the copy to the host to the copy back and after it, and both copies",
        confidence="medium",
        figures=[
            view.count_per_step("round trips", len(trips)),
            view.ns_per_step("time of operators on the CPU", int(durations.sum())),
            view.bytes_per_step("bytes copied", sum(sum(trip.both("bytes")) for trip in trips)),
            *_counts(view),
        ],
        intervals=[trip.interval("on the CPU") for trip in trips[:3]],
        remedy=Remedy(
            "Keep the tensors on the device, and replace the operators that it cannot run.",
            "# instead of x.cpu() ... .to(device): the same operators on x itself\nresult = function(x)",
        ),
        where=view.at_operators(rows),
        change=without_trips(view, trips) if trips else scaled_operators(fallen, 0.0),
    )


def _named(view: View) -> Rows:
    """Operators that fell back to the CPU, by their names or by a file beside the trace.

    Operators from a file count only if they copy to the host. A file may name an operator without its overload, as
    aten::add for aten::add.out.
    """
    reported = {each.operator.partition(".")[0] for each in view.run_counts.fallbacks}
    names = view.operators["name"].unique().to_list()
    is_reported = pl.col("name").is_in([name for name in names if name.partition(".")[0] in reported])
    is_reported &= pl.col("row").is_in(pl.Series(_copying_out(view) if reported else []).cast(pl.Int64).implode())
    return rows_of(view.operators.filter(pl.col("name").str.contains(_FALLBACK) | is_reported))


def _copying_out(view: View) -> Rows:
    """Operators that copy to the host; calls of the same operator that stay on the device do not."""
    copies = view.trace.device_work.filter(pl.col("kind") == "copy_out")["launch"].drop_nulls()
    calls = row_numbers(view.trace.launches["operator"].gather(copies).drop_nulls())
    return np.flatnonzero(containing(calls, view.parents))


def _counts(view: View) -> list[Figure]:
    return [
        Figure(f"times {each.operator} ran on the CPU in the whole run", each.count, "count")
        for each in view.run_counts.fallbacks[:_MOST_COUNTED]
        if each.count is not None
    ]


def _noted(view: View) -> Iterator[Found]:
    """Fallbacks that only the files beside the trace report."""
    fallbacks = view.run_counts.fallbacks
    if not fallbacks:
        return
    times = sum(each.count or 0 for each in fallbacks)
    often = f" {times:,} times in the whole run" if times else ""
    verb = "runs" if len(fallbacks) == 1 else "run"
    title = (
        f"{_named_operators(fallbacks)} {verb} on the CPU{often}: "
        f"the device cannot run {'it' if verb == 'runs' else 'them'}"
    )
    remedy = Remedy(
        "Replace these operators, or the types of their inputs, with ones that the device can run; record a trace of "
        "steps in which they occur to see what they cost."
    )
    types = next((f" (with {each.types})" for each in fallbacks if each.types), "")
    yield note_from_files(title + types, _counts(view), remedy)


def _named_operators(fallbacks: Sequence[Fallback]) -> str:
    first = ", ".join(each.operator for each in fallbacks[:_MOST_NAMED])
    return first + (f" and {len(fallbacks) - _MOST_NAMED} others" if len(fallbacks) > _MOST_NAMED else "")


RULE: Final = Rule(
    id="cpu-fallback",
    title="Operators run on the CPU in the middle of the device's work",
    thresholds={"share": Threshold(0.02, "share", "share of the {period} lost around operators on the CPU")},
    check=check,
    replaces=("exposed-copy", "host-synchronisation", "python-in-step"),
    remedies={
        "hpu": Remedy(
            "See which operators the device cannot run, and replace them or the types of their inputs.",
            "LOG_LEVEL_PT_FALLBACK=1 ENABLE_CONSOLE=true python train.py 2> fallback.log\n"
            "stepscope diagnose TRACE --fallback-log fallback.log",
        ),
    },
)
