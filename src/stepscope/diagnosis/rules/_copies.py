"""Copies between host and device, as operators of the program, and what the device loses around them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.device_time import busy_intervals
from stepscope.analysis.host import DEVICE_CAUSES, TABLES
from stepscope.analysis.roofline import device_peaks
from stepscope.analysis.work import VIEWS, base_name
from stepscope.diagnosis.finding import Evidence, Figure, Finding, Location, Remedy
from stepscope.diagnosis.rules._called import outermost_in_order
from stepscope.diagnosis.view import View
from stepscope.trace.evidence import Fallback, Tally, Trigger
from stepscope.trace.naming import cause_of_name
from stepscope.trace.nesting import Rows, inherit
from stepscope.whatif import Change
from stepscope.whatif.changes import scaled_slices, scaled_work, together

SHORT_KERNEL_NS: Final = 5_000
"""What making a tensor on the device takes at most: a kernel that fills a megabyte, or the gap of a launch."""
COPY_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "row": pl.Int64,  # the outermost operator that copies
    "launch": pl.Int64,
    "lane": pl.Int32,
    "start_ns": pl.Int64,  # of the operator
    "end_ns": pl.Int64,  # of the operator, or of the copy where that ends later
    "direction": pl.String,  # copy_in or copy_out
    "bytes": pl.Int64,
    "copy_ns": pl.Int64,  # the device's time for it
    "step": pl.Int64,
}


def copies(view: View) -> pl.DataFrame:
    """The span's copies in order of time; columns as in COPY_SCHEMA. Copies that no operator made are left out."""
    work = view.work.filter(pl.col("kind").is_in(["copy_in", "copy_out"]) & pl.col("launch").is_not_null())
    if work.is_empty() or view.trace.operators.is_empty():
        return pl.DataFrame(schema=dict(COPY_SCHEMA))
    launch = work["launch"].to_numpy().astype(np.int64)
    operator = view.trace.launches["operator"].cast(pl.Int64).fill_null(-1).to_numpy()[launch]
    row = np.where(operator >= 0, outermost_of(view)[np.maximum(operator, 0)], -1)
    start = view.trace.operators["start_ns"].to_numpy()[np.maximum(row, 0)]
    end = start + view.trace.operators["duration_ns"].to_numpy()[np.maximum(row, 0)]
    frame = pl.DataFrame(
        {
            "row": row,
            "launch": launch,
            "lane": view.trace.launches["lane"].to_numpy()[launch],
            "start_ns": start,
            "end_ns": np.maximum(end, (work["start_ns"] + work["duration_ns"]).to_numpy()),
            "direction": work["kind"],
            "bytes": work["bytes"],
            "copy_ns": work["duration_ns"],
            "step": np.searchsorted(view.steps["start_ns"].to_numpy(), start, side="right"),
        },
        schema=dict(COPY_SCHEMA),
    )
    return frame.filter(pl.col("row") >= 0).sort("start_ns", "launch")


def outermost_of(view: View) -> Rows:
    """For each operator, the outermost one around it or itself."""
    parent = view.trace.operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    own = np.where(parent < 0, np.arange(len(parent)), -1)
    return inherit(own, parent)


def work_of(view: View, launches: Sequence[int]) -> Rows:
    """Rows of `device_work` of these calls."""
    mine = view.trace.device_work["launch"].is_in(pl.Series(launches, dtype=pl.UInt32).implode())
    return np.flatnonzero(mine.fill_null(False).to_numpy())


def lost_ns(view: View, starts: Sequence[int], ends: Sequence[int], launches: Sequence[int]) -> int:
    """The device's idle time in these stretches and that which these calls caused later, and its time for them alone.

    Args:
        starts, ends: stretches of the host's time, apart from each other and in order.
        launches: the copying calls; idle time while one of them waited, or in the refill after it, is theirs.
    """
    pieces = view.pieces
    begin = pieces["start_ns"].to_numpy()
    position = np.searchsorted(np.array(starts, np.int64), begin, side="right") - 1
    inside = (position >= 0) & (begin < np.array(ends, np.int64)[np.maximum(position, 0)]) if len(starts) else begin < 0
    operator = view.trace.launches["operator"].cast(pl.Int64).fill_null(-1)
    calls = view.trace.launches.with_row_index("launch").filter(
        operator.is_in(operator.gather(list(launches)).implode()) & (operator >= 0)
    )
    caused = pieces["trigger_launch"].is_in(calls["launch"].implode()).fill_null(False).to_numpy()
    return int(pieces["duration_ns"].to_numpy()[inside | caused].sum())


_SMALLEST_BYTES: Final = 64
"""Less is a number that the program reads, not data that it works on."""
# fmt: off
_NO_WORK: Final = VIEWS | {
    "to", "_to_copy", "copy", "item", "empty", "empty_strided", "empty_like", "contiguous", "clone", "lift_fresh",
    "zeros", "ones", "full", "arange", "tensor", "scalar_tensor", "select", "slice",
}
# fmt: on
"""Operators between two copies that say nothing about the host's working on what was copied."""
_WORKING_SHARE: Final = 0.1
"""Of the time between two copies that operators on the host must take, or they are not what it is spent on."""


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """One copy to the host and the next one to the device on that thread.

    Attributes:
        start_ns, end_ns: from the first copy's operator to the end of the second.
        launches: of the two copies.
        bytes: that went out.
        returned_bytes: that came back.
        copy_ns: the device's time for both copies.
        on_host: rows of the operators between them that worked on the host.
        copying: rows of the copies' operators.
    """

    start_ns: int
    end_ns: int
    launches: tuple[int, int]
    bytes: int
    returned_bytes: int
    copy_ns: int
    on_host: tuple[int, ...]
    copying: tuple[int, int]


def round_trips(view: View) -> list[RoundTrip]:
    """Round trips in order of time. Loading data and what the optimizer does in between ends one."""
    found = copies(view)
    ordered, position = outermost_in_order(view)
    launching = np.zeros(view.trace.operators.height, np.bool_)
    launching[_launching_rows(view)] = True
    durations = view.trace.operators["duration_ns"].to_numpy()
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
                on_host = tuple(row for row in between.tolist() if _works_on_host(view, row, launching))
                worked = sum(durations[row] for row in on_host)
                on_host = on_host if worked >= _WORKING_SHARE * (copy["start_ns"] - out["start_ns"]) else ()
                # Other data that happens to be copied later is no return, unless the host made it of what went out.
                if copy["bytes"] == out["bytes"] or on_host:
                    trips.append(_trip(out, copy, on_host))
                out = None
    return trips


def _trip(out: dict[str, int], back: dict[str, int], on_host: tuple[int, ...]) -> RoundTrip:
    return RoundTrip(
        out["start_ns"],
        back["end_ns"],
        (out["launch"], back["launch"]),
        out["bytes"],
        back["bytes"],
        out["copy_ns"] + back["copy_ns"],
        on_host,
        (out["row"], back["row"]),
    )


def _launching_rows(view: View) -> Rows:
    """Operators that launched something, and those around them."""
    operators = view.trace.launches["operator"].drop_nulls().to_numpy().astype(np.int64)
    parent = view.trace.operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    rows = np.unique(operators)
    found = [rows]
    while (rows := np.unique(parent[rows][parent[rows] >= 0])).size:
        found.append(rows)
    return np.concatenate(found)


def _works_on_host(view: View, row: int, launching: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> bool:
    name = view.trace.operators["name"][row]
    return not launching[row] and base_name(name) not in _NO_WORK and name.startswith(("aten::", "torchvision::"))


def cost_ns(view: View, trips: list[RoundTrip]) -> int:
    """The device's idle time during the trips and after their waits, and its time for the copies."""
    launches = [launch for trip in trips for launch in trip.launches]
    idle = lost_ns(view, [trip.start_ns for trip in trips], [trip.end_ns for trip in trips], launches)
    return idle + sum(trip.copy_ns for trip in trips)


def without_trips(view: View, trips: list[RoundTrip]) -> Change:
    """The copies are gone, with their waits; what worked on the host is a short kernel of the device each."""
    rows = np.array([row for trip in trips for row in (*trip.copying, *trip.on_host)], np.int64)
    kernels = SHORT_KERNEL_NS * sum(len(trip.on_host) for trip in trips)
    left = kernels / max(sum(trip.copy_ns for trip in trips), 1)
    work = work_of(view, [launch for trip in trips for launch in trip.launches])
    return together(scaled_slices(view.slices_of_operators(rows), 0.0), scaled_work(work, min(left, 1.0)))


NO_SAVING: Final = "no saving: the files beside the trace count, and do not tell what the device waited for"
_MOST_PLACES: Final = 3
_MOST_NAMED: Final = 3


def figures_of(what: str, tally: Tally | None) -> tuple[Figure, ...]:
    """How often, how long together and how long at most; of the whole run."""
    if tally is None:
        return ()
    figures = [Figure(f"{what} in the whole run", tally.count, "count")]
    if tally.total_ns is not None:
        figures.append(Figure(f"time of all {what}", tally.total_ns, "ns"))
    if tally.longest_ns is not None:
        figures.append(Figure(f"longest of the {what}", tally.longest_ns, "ns"))
    return tuple(figures)


def places_of(view: View, triggers: Sequence[Trigger]) -> tuple[Location, ...]:
    """The lines of the user's code that triggered most."""
    counts: Counter[tuple[str, int, str]] = Counter()
    for trigger in triggers:
        own = next((frame for frame in trigger.frames if frame.file in view.user_code), None)
        if own is not None:
            counts[own.file, own.line, own.function] += trigger.count
    total = max(sum(trigger.count for trigger in triggers), 1)
    return tuple(
        Location(file, line, function, min(count / total, 1.0), exact_line=True)
        for (file, line, function), count in counts.most_common(_MOST_PLACES)
    )


def named(fallbacks: Sequence[Fallback]) -> str:
    """The most frequent operators, in words."""
    first = ", ".join(each.operator for each in fallbacks[:_MOST_NAMED])
    return first + (f" and {len(fallbacks) - _MOST_NAMED} others" if len(fallbacks) > _MOST_NAMED else "")


def note(
    view: View,
    rule: str,
    title: str,
    figures: Sequence[Figure],
    remedy: Remedy,
    where: tuple[Location, ...] = (),
) -> Finding:
    """What only the files tell: a note, which claims no saving."""
    found = view.finding(
        rule,
        title,
        0,
        basis=NO_SAVING,
        confidence="high",
        evidence=Evidence(tuple(figures)),
        remedy=remedy,
        where=where,
    )
    return replace(found, title=title, severity="note")


_SMALLEST_SHARE: Final = 0.02
_SIZES: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_TIMES: Final = ((86_400 * 10**9, "days"), (3_600 * 10**9, "hours"), (60 * 10**9, "minutes"), (10**9, "seconds"))


def size_in_words(bytes: float) -> str:
    """An amount of memory such as "1.5 GiB"."""
    unit, word = next((each for each in _SIZES if abs(bytes) >= each[0]), (1, "bytes"))
    return f"{bytes / unit:,.1f} {word}" if unit > 1 else f"{bytes:,.0f} bytes"


def time_in_words(ns: float) -> str:
    """A long time such as "3.2 hours"."""
    unit, word = next((each for each in _TIMES if ns >= each[0]), _TIMES[-1])
    return f"{ns / unit:,.1f} {word}"


def memory_locations(rows: pl.DataFrame, top: int = 3) -> tuple[Location, ...]:
    """The user's lines that allocated most of these bytes.

    Args:
        rows: columns file, line, function, exact_line and bytes; null where the place is unknown.
    """
    total = max(int(rows["bytes"].sum()), 1)
    lines = (
        rows.drop_nulls(["file", "line"])
        .group_by("file", "line", "function")
        .agg(pl.col("bytes").sum(), pl.col("exact_line").any())
        .filter(pl.col("bytes") >= _SMALLEST_SHARE * total)
        .sort(["bytes", "file", "line"], descending=[True, False, False])
        .head(top)
    )
    return tuple(
        Location(file, line, function or "", min(size / total, 1.0), bool(exact))
        for file, line, function, size, exact in lines.iter_rows()
    )


BACKWARD_NODE: Final = "autograd::engine::evaluate_function"
"""Beginning of what the engine calls a node's run. Values read right inside are not the program's: anomaly detection
asks whether they are NaN."""
_REDUCER: Final = r"^torch(\.|::)distributed(\.ddp\.|::)reducer::"
"""What DistributedDataParallel's reducer calls its own work."""
_NICE: Final = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)


def every_steps(cost_ns: int, length_ns: int, share: float) -> int:
    """The least handy number of steps between two logs at which they cost no more than this share of the rest."""
    wanted = math.ceil(cost_ns / (share * max(length_ns - cost_ns, 1)))
    return next((number for number in _NICE if number >= wanted), _NICE[-1])


def reads_of_reducer(view: View) -> Rows:
    """The rows in `operators` of values that DistributedDataParallel reads, which are not the program's.

    Where it looks for unused parameters, it reads for each one whether any rank used it: `used[number].item()` on the
    line of the backward pass.
    """
    place = pl.format("{}:{}", "source_file", "source_line")
    operators = view.trace.operators.with_row_index("row").select(
        "row", "name", "lane", "start_ns", "parent", place=place
    )
    lines = operators.filter(pl.col("name").str.contains(_REDUCER))["place"].drop_nulls().unique()
    if lines.is_empty():
        return np.zeros(0, np.int64)
    outermost = operators.filter(pl.col("parent").is_null()).sort("lane", "start_ns", maintain_order=True)
    found = outermost.with_columns(before=pl.col("name").shift(1).over("lane")).filter(
        (pl.col("name") == "aten::item") & (pl.col("before") == "aten::select") & pl.col("place").is_in(lines.implode())
    )
    return found["row"].to_numpy().astype(np.int64)


def outermost_logging(view: View) -> Rows:
    """For each slice, the outermost logging call around it or itself, -1 for none."""
    activity = view.activity
    is_logging = np.zeros(len(activity.row), np.bool_)
    for code, table in enumerate(TABLES):
        names = view.trace.table(table)["name"]
        wanted = names.is_in([name for name in names.unique() if cause_of_name(name) == "logging"]).to_numpy()
        mine = np.flatnonzero(activity.table == code)
        is_logging[mine] = wanted[activity.row[mine]]
    inside = inherit(np.where(is_logging, 1, -1), activity.around) > 0
    around = activity.around
    is_inner = (around >= 0) & inside[np.maximum(around, 0)]
    rows = np.arange(len(inside))
    return inherit(np.where(is_logging & ~is_inner, rows, -1), around)


def decides(view: View) -> npt.NDArray[np.bool_]:
    """For each row of `view.work`, whether the step would end earlier if that work were shorter.

    Work that runs before a gap for which the host was late, without having waited for the device, decides nothing: the
    gap would only begin earlier. Shape (works,).
    """
    waited = (pl.col("cause") == "synchronisation") | (pl.col("trigger_launch").is_not_null() & ~pl.col("refill"))
    gaps = (
        view.idle.filter((pl.col("device") == view.device) & (pl.col("start_ns") < view.device_span.end_ns))
        .group_by("gap")
        .agg(
            start_ns=pl.col("start_ns").min(),
            waits=waited.fill_null(False).any() | pl.col("cause").is_in(DEVICE_CAUSES).all(),
        )
        .sort("start_ns")
    )
    ends = (view.work["start_ns"] + view.work["duration_ns"]).to_numpy()
    if gaps.is_empty():
        return np.ones(len(ends), np.bool_)
    following = np.searchsorted(gaps["start_ns"].to_numpy(), ends, side="left")
    waits = np.append(gaps["waits"].to_numpy(), True)  # after the last gap the step's end follows
    result: npt.NDArray[np.bool_] = waits[following]
    return result


def alone_share(view: View) -> float:
    """The device's busy time over the sum of its works' times: less than 1 where queues work at the same time."""
    total = int(view.work["duration_ns"].sum())
    busy = busy_intervals(view.work, view.device_span).total_ns
    return min(busy / total, 1.0) if total else 1.0


def multiprocessors(view: View) -> int | None:
    """How many the device has, as the trace or the table of devices says."""
    described = view.trace.metadata.devices
    counts = {one.multiprocessors for one in described if one.device == view.device} or {
        one.multiprocessors for one in described
    }
    if len(counts) == 1 and (known := counts.pop()):
        return known
    peaks = None if view.device is None else device_peaks(view.trace, view.device)
    return None if peaks is None else peaks.multiprocessors


def blocks(grids: pl.Series) -> Rows:
    """How many thread blocks a grid "x,y,z" has, -1 where it is not known; shape (n,)."""
    known: dict[str | None, int] = {None: -1}
    for grid in grids.unique().to_list():
        if grid is not None:
            known[grid] = _blocks(grid)
    return np.array([known[grid] for grid in grids.to_list()], np.int64)


def _blocks(grid: str) -> int:
    sizes = grid.strip("[]").split(",")
    if not sizes or not all(size.strip().isdigit() and len(size) < 12 for size in sizes):
        return -1
    return min(int(np.prod([float(size) for size in sizes])), 2**62)
