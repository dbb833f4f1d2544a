"""Shared by rules about copies between host and device, including round trips through the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.work import VIEWS, base_name
from stepscope.diagnosis.finding import Interval
from stepscope.diagnosis.rules._operators import outermost_in_order
from stepscope.diagnosis.view import View
from stepscope.trace.nesting import Rows, containing, inherit, row_numbers
from stepscope.whatif import Change
from stepscope.whatif.changes import scaled_slices, scaled_work, together

SHORT_KERNEL_NS: Final = 5_000
"""Upper limit for creating a tensor on the device: a kernel that fills a megabyte, or a launch gap."""


def copies(view: View) -> pl.DataFrame:
    """The span's copies that operators made, in order of time.

    Columns row (the outermost operator that copies), launch, lane, start_ns (of the operator), end_ns (of the
    operator or of the copy, whichever ends later), direction (copy_in or copy_out), bytes, copy_ns (the device's
    time), step.
    """
    work = view.work.filter(pl.col("kind").is_in(["copy_in", "copy_out"]) & pl.col("launch").is_not_null())
    launch = work["launch"].to_numpy().astype(np.int64)
    row = np.append(outermost_of(view), -1)[view.launching[launch]]
    end_ns = pl.col("start_ns") + pl.col("duration_ns")
    found = work.select("bytes", direction="kind", copy_ns="duration_ns", end_ns=end_ns).with_columns(
        row=pl.Series(row, dtype=pl.Int64), launch=pl.Series(launch), lane=view.trace.launches["lane"].gather(launch)
    )
    found = found.filter(pl.col("row") >= 0)
    operators = view.trace.operators[found["row"]]
    start = operators["start_ns"]
    return found.with_columns(
        start_ns=start,
        end_ns=pl.max_horizontal("end_ns", start + operators["duration_ns"]),
        step=pl.Series(np.searchsorted(view.steps["start_ns"].to_numpy(), start.to_numpy(), side="right")),
    ).sort("start_ns", "launch")


def outermost_of(view: View) -> Rows:
    """For each operator, the row of the outermost operator around it, or its own row."""
    return inherit(np.where(view.parents < 0, np.arange(len(view.parents)), -1), view.parents)


def work_of(view: View, launches: Sequence[int]) -> Rows:
    """Rows of `device_work` of these calls."""
    mine = view.trace.device_work["launch"].is_in(pl.Series(launches, dtype=pl.UInt32).implode())
    return np.flatnonzero(mine.fill_null(False).to_numpy())


def lost_ns(view: View, starts: Sequence[int], ends: Sequence[int], launches: Sequence[int]) -> int:
    """The device's idle time in these stretches, and the idle time that these calls caused later.

    Args:
        starts, ends: disjoint stretches of the host's time, in order.
        launches: the copying calls; idle time while one of them waited, or in the refill after it, is charged to it.
    """
    pieces = view.pieces
    begin = pieces["start_ns"].to_numpy()
    position = np.searchsorted(np.array(starts, np.int64), begin, side="right") - 1
    inside = (position >= 0) & (begin < np.array(ends, np.int64)[np.maximum(position, 0)]) if len(starts) else begin < 0
    copying = view.launching[list(launches)]
    calls = np.flatnonzero(np.isin(view.launching, copying[copying >= 0])).astype(np.uint32)
    caused = pieces["trigger_launch"].is_in(pl.Series(calls).implode()).fill_null(False).to_numpy()
    return int(pieces["duration_ns"].to_numpy()[inside | caused].sum())


_SMALLEST_BYTES: Final = 64
"""Smaller copies are numbers that the program reads, not data that it works on."""


_NO_WORK: Final = VIEWS | {
    "to",
    "_to_copy",
    "copy",
    "item",
    "empty",
    "empty_strided",
    "empty_like",
    "contiguous",
    "clone",
    "lift_fresh",
    "zeros",
    "ones",
    "full",
    "arange",
    "tensor",
    "scalar_tensor",
    "select",
    "slice",
}
"""Operators between two copies that do not show that the host worked on the copied data."""


_WORKING_SHARE: Final = 0.1
"""Share of the time between two copies that operators on the host must take to count as its use."""


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """A copy to the host and the next copy to the device on the same thread.

    Attributes:
        out, back: rows of `copies`.
        on_host: rows of the operators between them that worked on the host.
    """

    out: dict[str, int]
    back: dict[str, int]
    on_host: tuple[int, ...]

    def both(self, column: str) -> tuple[int, int]:
        """Values of a column for the two copies."""
        return self.out[column], self.back[column]

    def interval(self, what: str) -> Interval:
        """The interval from the first copy's operator to the end of the second copy."""
        return Interval(self.out["start_ns"], self.back["end_ns"] - self.out["start_ns"], what)


def round_trips(view: View) -> list[RoundTrip]:
    """Round trips in order of time; data loading and the optimizer's operators end one."""
    found = copies(view)
    ordered, position = outermost_in_order(view)
    launching = containing(row_numbers(view.trace.launches["operator"].drop_nulls()), view.parents)
    names, durations = view.trace.operators["name"], view.trace.operators["duration_ns"].to_numpy()
    working = names.is_in(list(filter(_works_on_host, names.unique()))).to_numpy() & ~launching
    trips: list[RoundTrip] = []
    for _, mine in found.group_by("lane", "step", maintain_order=True):
        out: dict[str, int] | None = None
        for copy in mine.iter_rows(named=True):
            if (copy["bytes"] or 0) < _SMALLEST_BYTES:
                continue
            if copy["direction"] == "copy_out":
                out = copy
            elif out is not None:
                between = ordered[int(position[out["row"]]) + 1 : int(position[copy["row"]])]
                on_host = between[working[between]]
                if durations[on_host].sum() < _WORKING_SHARE * (copy["start_ns"] - out["start_ns"]):
                    on_host = on_host[:0]
                # A copy of a different size is no return trip, unless the host computed it from this data.
                if copy["bytes"] == out["bytes"] or len(on_host):
                    trips.append(RoundTrip(out, copy, tuple(on_host.tolist())))
                out = None
    return trips


def _works_on_host(name: str) -> bool:
    return base_name(name) not in _NO_WORK and name.startswith(("aten::", "torchvision::"))


def cost_ns(view: View, trips: list[RoundTrip]) -> int:
    """The device's idle time during the trips and after their waits, and its time for the copies."""
    launches = [launch for trip in trips for launch in trip.both("launch")]
    idle = lost_ns(view, [trip.out["start_ns"] for trip in trips], [trip.back["end_ns"] for trip in trips], launches)
    return idle + sum(sum(trip.both("copy_ns")) for trip in trips)


def without_trips(view: View, trips: list[RoundTrip]) -> Change:
    """Remove the copies and their waits; each operator that worked on the host becomes a short kernel."""
    rows = np.array([row for trip in trips for row in (*trip.both("row"), *trip.on_host)], np.int64)
    kernels = SHORT_KERNEL_NS * sum(len(trip.on_host) for trip in trips)
    left = kernels / max(sum(sum(trip.both("copy_ns")) for trip in trips), 1)
    work = work_of(view, [launch for trip in trips for launch in trip.both("launch")])
    return together(scaled_slices(view.slices_of_operators(rows), 0.0), scaled_work(work, min(left, 1.0)))
