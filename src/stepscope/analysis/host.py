"""Activity of each host thread over time, with its cause.

All slices of a thread (annotations, frames, operators, launches) form one tree. At any time the innermost open slice
describes the thread; its cause is that of the innermost enclosing slice whose name implies one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.steps import once_table, step_table
from stepscope.trace import Trace, Window
from stepscope.trace.naming import DEFAULT_USER_CODE, HOST_BACKEND, LAZY_EXECUTION, UserCode, cause_of_name
from stepscope.trace.nesting import Rows, at, by_value, enclosing, inherit, nullable, open_after, parents
from stepscope.trace.window import IntervalSet, Times, union

CAUSES: Final[dict[str, str]] = {
    "input": "the host was loading data",
    "synchronisation": "the host waited for a value from the device, or for the device to finish",
    "graph_tracing": "the host ran the program only to record the graph of what to compute",
    "step_marker": "the host prepared a recorded graph at a step marker, before it runs",
    "compilation": "code was being compiled",
    "host_to_device_copy": "the host was copying data to the device",
    "allocation": "device memory was being allocated or freed",
    "garbage_collection": "Python was collecting garbage",
    "checkpoint": "a checkpoint was being saved or loaded",
    "logging": "the host was logging, printing or writing files",
    "communication": "the host waited for other ranks",
    "optimizer": "the host was preparing the optimizer's work",
    "python": "the host was running Python code between operators",
    "dispatch": "the host was inside operators, too slow to launch work (launch-bound)",
    "once": "the host did one-off work, such as first launches and initialisation",
    "profiler_overhead": "the profiler itself was working",
    "dependency": "launched work waited for another queue",
    "launch_latency": "launched work had not yet reached the device",
    "untraced": "nothing was recorded on the host thread",
    "unknown": "the trace does not show what the work that followed was waiting for",
}
"""Cause -> its meaning. Those before "dependency" are the host's; "compute" is added for host time."""

DEVICE_CAUSES: Final = ("dependency", "launch_latency", "unknown")


TABLES: Final = ("annotations", "frames", "operators", "launches")
"""Tables that slices come from; of slices with equal times, the one from the earlier table is the outer one."""

CAUSE_CODES: Final = {cause: code for code, cause in enumerate(CAUSES)}
CAUSE_TYPE: Final = pl.Enum(list(CAUSES))
_CAUSE_NAMES: Final = pl.Series(list(CAUSES), dtype=CAUSE_TYPE)
_BEGINNING: Final = np.iinfo(np.int64).min
_ANNOTATION, _FRAME, _OPERATOR, _LAUNCH = range(4)


@dataclass(frozen=True)
class HostActivity:
    """Slices of all host threads as arrays of shape (n,), and the lanes' time lines."""

    lane: npt.NDArray[np.int32]
    start: Times  # nanoseconds
    end: Times  # nanoseconds
    name: pl.Series
    table: npt.NDArray[np.int8]  # index into TABLES
    row: Rows  # row in that table
    parent: Rows  # index of the innermost slice open when this one starts, -1 for none
    around: Rows  # index of the nearest enclosing slice that covers most of this one, -1 for none
    cause: npt.NDArray[np.int16]  # index into CAUSES for time in which the slice is the innermost one
    main_lanes: dict[str, int]  # process -> lane of its main thread, where known
    _trace: Trace
    user_code: UserCode = DEFAULT_USER_CODE  # which files are the user's
    _steps: pl.DataFrame | None = None  # as from `step_table`, if already known

    @cached_property
    def timelines(self) -> dict[int, Timeline]:
        result = {}
        for lane in np.unique(self.lane).tolist():
            mine = np.flatnonzero(self.lane == lane)
            times, innermost = open_after(mine, self.start, self.end, self.parent)
            result[lane] = Timeline(np.append(_BEGINNING, times), np.append(-1, innermost))
        return result

    @cached_property
    def line_timelines(self) -> dict[int, Timeline]:
        """Time line of each lane with recorded lines, over rows of `lines`."""
        lines = self._trace.lines
        lane, start = lines["lane"].to_numpy(), lines["start_ns"].to_numpy()
        end = start + lines["duration_ns"].to_numpy()
        result = {}
        for number in np.unique(lane).tolist():
            rows = np.flatnonzero(lane == number).astype(np.int64)
            result[number] = Timeline.of(start[rows], end[rows], rows)
        return result

    @cached_property
    def once(self) -> pl.DataFrame:
        """What host threads did once; see `stepscope.analysis.steps.once_table`."""
        return once_table(self._trace, step_table(self._trace) if self._steps is None else self._steps)

    @cached_property
    def _once(self) -> dict[int, Timeline]:
        return {int(str(lane)): Timeline.covered(covered_by(rows)) for (lane,), rows in self.once.group_by("lane")}

    def cut(self, lane: int, starts: Times, ends: Times) -> pl.DataFrame:
        """Cut intervals where the thread's activity changes, in order of interval and time.

        While no slice is open, the thread waits for a host-run collective if there is one; otherwise it runs Python if
        a line of the user's code is known.

        Returns:
            Columns interval (index of the interval), start, end, slice (the innermost open one, -1 for none),
            line (row in `lines` where no slice is open; -1 otherwise), cause (CAUSE_TYPE).
        """
        pieces = self._cut(lane, starts, ends)
        return recut(pieces, self._once[lane], "once") if lane in self._once else pieces

    def _cut(self, lane: int, starts: Times, ends: Times) -> pl.DataFrame:
        interval, start, end, slices = self.timelines.get(lane, _NOTHING).cut(starts, ends)
        columns = {"interval": interval, "start": start, "end": end, "slice": slices}
        cause = _CAUSE_NAMES.gather(self.cause_of(slices))
        pieces = pl.DataFrame(columns).with_columns(line=pl.lit(-1, pl.Int64), cause=cause)
        by_line, collectives = self.line_timelines.get(lane), self._host_collectives
        silent = pl.col("cause") == "untraced"
        if by_line is None and collectives is None:
            return pieces
        told = pieces.filter(silent)
        if by_line is not None:
            told = recut(told, by_line, "python", row="line")
        if collectives is not None:
            told = recut(told, collectives, "communication")
        return pl.concat([pieces.filter(~silent), told]).sort("interval", "start", maintain_order=True)

    @cached_property
    def _host_collectives(self) -> Timeline | None:
        """Times in which a host backend runs a collective on any thread; None if it never does."""
        running = self._trace.annotations.filter(pl.col("name").str.contains(HOST_BACKEND) & (pl.col("kind") == "host"))
        return Timeline.covered(covered_by(running)) if running.height else None

    @cached_property
    def user_frame(self) -> Rows:
        """For each slice the row in `frames` of the user's innermost frame around it, or itself; -1 for none."""
        own = np.full(len(self.row), -1, np.int64)
        frames = self._trace.frames
        if frames.height:
            files = frames["file"].unique()
            users = [file for file in files if file in self.user_code]
            is_user = frames["file"].is_in(users).fill_null(False).to_numpy()
            mine = self.table == _FRAME
            own[mine] = np.where(is_user[self.row[mine]], self.row[mine], -1)
        return inherit(own, self.around)

    def cause_of(self, slices: Rows) -> npt.NDArray[np.int16]:
        """Cause of each slice as the innermost of its thread, untraced for -1; shape (n,)."""
        cause = np.full(len(slices), CAUSE_CODES["untraced"], np.int16)
        cause[slices >= 0] = self.cause[slices[slices >= 0]]
        return cause

    def slices_of(self, table: str) -> Rows:
        """For each row of a table, the index of its slice, -1 where the row is on no host thread."""
        if table not in self._slices:  # rules request the slices of a few rows thousands of times
            found = np.full(self._trace.table(table).height, -1, np.int64)
            mine = np.flatnonzero(self.table == TABLES.index(table))
            found[self.row[mine]] = mine
            found.flags.writeable = False
            self._slices[table] = found
        return self._slices[table]

    def spread(self, table: str, values: Rows) -> Rows:
        """Map values of a table's rows to slices, -1 for slices of other tables; shape (n,)."""
        result = np.full(len(self.row), -1, np.int64)
        mine = np.flatnonzero(self.table == TABLES.index(table))
        result[mine] = values[self.row[mine]]
        return result

    def slice_index(self, table: pl.Series, row: pl.Series) -> Rows:
        """Slice indices by table name and row, -1 where either is null; shape (m,)."""
        result = np.full(len(table), -1, np.int64)
        for name in TABLES:
            mine = (table == name).fill_null(False).to_numpy()
            if mine.any():
                result[mine] = self.slices_of(name)[row.to_numpy()[mine].astype(np.int64)]
        return result

    def pieces(self, lane: int) -> pl.DataFrame:
        """All of a thread's time, in the columns of `cut`."""
        if lane not in self._pieces:
            times = self.timelines[lane].times
            self._pieces[lane] = self.cut(lane, times[1:2], times[-1:])
        return self._pieces[lane]

    @cached_property
    def _pieces(self) -> dict[int, pl.DataFrame]:
        return {}

    @cached_property
    def _slices(self) -> dict[str, Rows]:
        return {}


@dataclass(frozen=True, slots=True)
class Timeline:
    """One thread as consecutive segments: from `times[i]` to `times[i + 1]` the innermost slice is `slices[i]`.

    The first time is the least integer; slice -1 means that nothing is open.
    """

    times: Times
    slices: Rows

    @classmethod
    def of(cls, starts: Times, ends: Times, slices: Rows) -> Timeline:
        """Build a time line from disjoint slices in order of time; adjacent slices leave no gap."""
        times = np.append(_BEGINNING, np.column_stack([starts, ends]).ravel())
        inside = np.append(-1, np.column_stack([slices, np.full(len(slices), -1)]).ravel())
        last = np.append(times[1:] != times[:-1], True)
        return cls(times[last], inside[last])

    @classmethod
    def covered(cls, intervals: IntervalSet) -> Timeline:
        """Build a time line with slice 0 inside these intervals, -1 outside."""
        return cls.of(intervals.starts, intervals.ends, np.zeros(len(intervals.starts), np.int64))

    def at(self, times: Times) -> Rows:
        """Innermost slice at each time, -1 for none; shape (m,)."""
        return self.slices[np.maximum(np.searchsorted(self.times, times, side="right") - 1, 0)]

    def cut(self, starts: Times, ends: Times) -> tuple[Rows, Times, Times, Rows]:
        """Cut intervals where the innermost slice changes.

        Returns:
            For each piece, in order: index of its interval, start, end, innermost slice.
        """
        first = np.searchsorted(self.times, starts, side="right") - 1
        last = np.maximum(np.searchsorted(self.times, ends, side="left"), first + 1)
        counts = np.where(ends > starts, last - first, 0)
        interval = np.repeat(np.arange(len(starts)), counts)
        offset = np.arange(len(interval)) - np.repeat(np.cumsum(counts) - counts, counts)
        segment = first[interval] + offset
        following = np.append(self.times[1:], np.iinfo(np.int64).max)
        piece_start = np.maximum(self.times[segment], starts[interval])
        piece_end = np.minimum(following[segment], ends[interval])
        return interval, piece_start, piece_end, self.slices[segment]


_NOTHING: Final = Timeline(np.array([_BEGINNING], np.int64), np.array([-1], np.int64))
"""Time line of a lane without slices."""


def covered_by(rows: pl.DataFrame) -> IntervalSet:
    """Union of these rows' times, by start_ns and duration_ns."""
    starts = rows["start_ns"].to_numpy()
    return union(starts, starts + rows["duration_ns"].to_numpy())


def recut(pieces: pl.DataFrame, timeline: Timeline, cause: str, row: str | None = None) -> pl.DataFrame:
    """Cut pieces of host time by another time line; pieces inside it get this cause, and its row in column `row`."""
    part, start, end, inside = timeline.cut(pieces["start"].to_numpy(), pieces["end"].to_numpy())
    new = pl.when(pl.Series(inside >= 0)).then(pl.lit(cause, CAUSE_TYPE)).otherwise("cause")
    cut = pieces[part].with_columns(pl.Series("start", start), pl.Series("end", end), cause=new)
    return cut if row is None else cut.with_columns(pl.Series(row, inside))


def host_activity(
    trace: Trace, user_code: UserCode = DEFAULT_USER_CODE, steps: pl.DataFrame | None = None
) -> HostActivity:
    """Build the slices of every host thread as one tree per thread, with causes.

    Args:
        steps: as from `step_table`, if already known.
    """
    threads = trace.lanes.filter(pl.col("kind") == "host_thread")["lane"].implode()
    parts = []
    for code, table in enumerate(TABLES):
        rows = trace.table(table).with_row_index("row")
        if table == "annotations":
            rows = rows.filter(pl.col("kind") == "host")
        rows = rows.filter(pl.col("lane").is_in(threads))
        parts.append(
            rows.select("lane", "start_ns", "duration_ns", "name", pl.col("row").cast(pl.Int64)).with_columns(
                table=pl.lit(code, pl.Int8)
            )
        )
    slices = pl.concat(parts)
    lane, start = slices["lane"].to_numpy(), slices["start_ns"].to_numpy()
    duration, table_codes = slices["duration_ns"].to_numpy(), slices["table"].to_numpy()
    parent = parents(lane, start, duration)
    around = enclosing(parent, start, duration)
    return HostActivity(
        lane=lane,
        start=start,
        end=start + duration,
        name=slices["name"],
        table=table_codes,
        row=slices["row"].to_numpy(),
        parent=parent,
        around=around,
        cause=_causes(trace, slices, table_codes, around),
        main_lanes=_main_lanes(trace),
        _trace=trace,
        user_code=user_code,
        _steps=steps,
    )


def slice_columns(activity: HostActivity, pieces: pl.DataFrame) -> list[pl.Series]:
    """Columns slice_table and slice_row of pieces of host time: the slice or else the line, null for neither."""
    slices, lines = pieces["slice"].to_numpy(), pieces["line"].to_numpy()
    table, row = np.full(len(slices), len(TABLES) + 1), np.full(len(slices), -1)
    table[slices >= 0], row[slices >= 0] = activity.table[slices[slices >= 0]], activity.row[slices[slices >= 0]]
    table[lines >= 0], row[lines >= 0] = len(TABLES), lines[lines >= 0]
    names = pl.Series("slice_table", [*TABLES, "lines", None], dtype=pl.String)
    return [names.gather(table), nullable(row).alias("slice_row")]


def _causes(trace: Trace, slices: pl.DataFrame, table: npt.NDArray[np.int8], around: Rows) -> npt.NDArray[np.int16]:
    own = by_value(slices["name"], lambda name: CAUSE_CODES.get(cause_of_name(name) or "", -1)).copy()
    launches = np.flatnonzero(table == _LAUNCH)
    own[launches] = _launch_causes(trace)[slices["row"].to_numpy()[launches]]
    lane, start = slices["lane"].to_numpy(), slices["start_ns"].to_numpy()
    ends = start + slices["duration_ns"].to_numpy()
    without_closures(trace, (lane, start, ends, around), own, CAUSE_CODES["optimizer"])
    definite = inherit(own, around)
    inside_operator = inherit(np.where((table == _OPERATOR) | (table == _LAUNCH), 1, -1), around) > 0
    inside_frame = inherit(np.where(table == _FRAME, 1, -1), around) > 0
    silent = np.where(_traces_graphs(slices, table, around), CAUSE_CODES["graph_tracing"], CAUSE_CODES["untraced"])
    fallback = np.where(inside_operator, CAUSE_CODES["dispatch"], np.where(inside_frame, CAUSE_CODES["python"], silent))
    return np.where(definite >= 0, definite, fallback).astype(np.int16)


def without_closures(
    trace: Trace,
    slices: tuple[npt.NDArray[np.int32], Times, Times, Rows],
    own: npt.NDArray[np.signedinteger[Any]],
    optimizer: int,
) -> None:
    """Take this number from optimizer slices that run the backward pass; what follows the pass inside them gets it.

    An optimizer's step may call a closure that computes the loss and its gradients, as with Lightning.

    Args:
        slices: lane, start, end and nearest enclosing slice of each slice.
        own: number of each slice by its own name, -1 for none; changed in place.
    """
    lane, start, end, around = slices
    nodes = trace.operators.filter(pl.col("name").str.starts_with("autograd::engine")).sort("start_ns")
    steps = np.flatnonzero(own == optimizer)
    if nodes.is_empty() or not len(steps):
        return
    last = np.full(len(own), -1, np.int64)
    node_lane, begin = nodes["lane"].to_numpy(), nodes["start_ns"].to_numpy()
    finish = begin + nodes["duration_ns"].to_numpy()
    for number in np.unique(lane[steps]).tolist():
        mine, its = steps[lane[steps] == number], node_lane == number
        if not its.any():  # the engine has its own threads
            its = np.ones(len(its), np.bool_)
        first, after = (np.searchsorted(begin[its], times[mine]) for times in (start, end))
        runs = after > first
        last[mine[runs]] = np.maximum.accumulate(finish[its])[after[runs] - 1]
    follows = np.flatnonzero((at(last, around) >= 0) & (start >= at(last, around)) & (own < 0))
    own[last >= 0] = -1
    own[follows] = optimizer


def _traces_graphs(slices: pl.DataFrame, table: npt.NDArray[np.int8], around: Rows) -> npt.NDArray[np.bool_]:
    """Whether each slice lies inside a program mark on a thread that runs it lazily.

    There PyTorch/XLA only records the operator calls; a step marker then runs the graph.
    """
    lazy = slices.filter(pl.col("name").str.contains(LAZY_EXECUTION))["lane"].unique()
    if lazy.is_empty():
        return np.zeros(len(table), np.bool_)
    on_lazy = slices["lane"].is_in(lazy.implode()).to_numpy()
    return on_lazy & (inherit(np.where(table == _ANNOTATION, 1, -1), around) > 0)


def _launch_causes(trace: Trace) -> Rows:
    """Cause implied by each row of `launches`, -1 for none.

    A wait inside a host-to-device copy operator belongs to that copy.
    """
    copies = trace.device_work.filter(pl.col("kind").is_in(["copy_in", "copy_out"]) & pl.col("launch").is_not_null())
    directions = copies.group_by(pl.col("launch").alias("row")).agg(pl.col("kind").first().alias("direction"))
    calls = trace.launches.with_row_index("row").select("row", "kind", "operator")
    calls = calls.join(directions, on="row", how="left", maintain_order="left")
    into = calls.filter((pl.col("direction") == "copy_in") & pl.col("operator").is_not_null())["operator"]
    copying = pl.col("operator").is_in(into.unique().implode())
    kind, direction = pl.col("kind"), pl.col("direction")
    named = kind.replace_strict({"allocate": "allocation", "compile": "compilation"}, default=None)
    cause = (
        pl.when((direction == "copy_in") | ((kind == "synchronise") & copying.fill_null(False)))
        .then(pl.lit("host_to_device_copy"))
        .when((kind == "synchronise") | ((direction == "copy_out") & (kind == "copy")))
        .then(pl.lit("synchronisation"))
        .otherwise(named)
    )
    return by_value(calls.select(cause.alias("cause")), CAUSE_CODES.__getitem__)


def _main_lanes(trace: Trace) -> dict[str, int]:
    """Main thread of each process: the one with step annotations, else the framework's, else the process's first."""
    lanes = trace.lanes.filter(pl.col("kind") == "host_thread").select(
        "lane", "process", first=pl.col("thread") == pl.col("process")
    )
    marks = (
        trace.annotations.filter(pl.col("kind") == "host")
        .group_by("lane")
        .agg(steps=pl.col("step").is_not_null().sum(), marks=pl.col("name").str.contains("DataLoader|Optimizer").sum())
    )
    ranked = (
        lanes.join(marks, on="lane", how="left")
        .with_columns(pl.col("steps", "marks").fill_null(0), pl.col("first").fill_null(False))
        .filter((pl.col("steps") > 0) | (pl.col("marks") > 0) | pl.col("first"))
        .sort("steps", "marks", "first", "lane", descending=[True, True, True, False])
        .unique("process", keep="first", maintain_order=True)
    )
    return dict(zip(ranked["process"].to_list(), ranked["lane"].to_list(), strict=True))


XLA_THREADS: Final = r"^tf_XLA"
"""Threads on which XLA runs compiled code on the CPU; its other threads compile."""
XLA_EXECUTION: Final = r"^ThunkExecutor::Execute$"
WAITING: Final = ("synchronisation", "untraced", "dispatch")
"""Causes of a main thread that may be computing with XLA, or waiting for it."""
_PROFILER: Final = "PyTorch Profiler ("
"""Prefix of the name of a recording's span; a number follows."""

HOST_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "cause": pl.String,  # one of CAUSES, or "compute": inside an operator on a machine without a device
    "lane": pl.Int32,
    "slice_table": pl.String,
    "slice_row": pl.UInt32,
}


def main_lane(trace: Trace, activity: HostActivity) -> int | None:
    """Thread that drives the training: a process's main thread, else the one with the most operator time."""
    known = [lane for lane in activity.main_lanes.values() if lane in activity.timelines]
    if len(known) == 1:
        return known[0]
    busy = (
        trace.operators.group_by("lane")
        .agg(ns=pl.col("duration_ns").sum())
        .sort("ns", "lane", descending=[True, False])
    )
    if known:
        by_lane = dict(busy.iter_rows())
        return max(known, key=lambda lane: by_lane.get(lane, 0))
    busy = busy.filter(pl.col("lane").is_in(list(activity.timelines)))  # operators can be on a device's queue
    return int(busy["lane"][0]) if busy.height else next(iter(activity.timelines), None)


def host_window(trace: Trace, activity: HostActivity) -> Window:
    """Window from the main thread's first slice to its last one's end, within what was read; empty without a thread.

    It never extends past the end of PyTorch's profiler: an annotation open at that time, such as the optimizer's step
    whose end stops the profiler, ends only when the trace is written. It begins after the profiler's own start, if the
    profiler works before the thread's first operator or launch.
    """
    lane = main_lane(trace, activity)
    if lane is None:
        return Window(0, 0)
    times, read = activity.timelines[lane].times, trace.metadata.window or Window(0, 2**62)
    start_ns = max(int(times[1]), read.start_ns, _profiler_started_ns(trace, activity, lane))
    return Window(start_ns, max(min(int(times[-1]), read.end_ns, _profiler_end_ns(trace)), start_ns))


def _profiler_started_ns(trace: Trace, activity: HostActivity, lane: int) -> int:
    """When the profiler's last work before the thread's first operator or launch ended; 0 for none."""
    mine = activity.lane == lane
    works = mine & np.isin(activity.table, (_OPERATOR, _LAUNCH)) & (activity.cause != CAUSE_CODES["profiler_overhead"])
    first = int(activity.start[works].min(initial=2**62))
    recorded = trace.annotations.filter(pl.col("kind") == "overhead")
    overhead = (recorded["start_ns"] + recorded["duration_ns"]).to_numpy()
    ends = np.append(overhead, activity.end[mine & (activity.cause == CAUSE_CODES["profiler_overhead"])])
    return int(ends[ends <= first].max(initial=0)) if first < 2**62 else 0


def host_time(trace: Trace, *, window: Window | None = None, activity: HostActivity | None = None) -> pl.DataFrame:
    """List every piece of the main host thread's time with its cause.

    Returns:
        Columns as in HOST_SCHEMA, in order of time; the durations add up to the window, by default `host_window`.
    """
    activity = activity or host_activity(trace)
    lane = main_lane(trace, activity)
    if lane is None:
        return pl.DataFrame(schema=dict(HOST_SCHEMA))
    window = window or host_window(trace, activity)
    pieces = activity.cut(lane, np.array([window.start_ns]), np.array([window.end_ns]))
    frame = pieces.select(
        pl.col("start").alias("start_ns"),
        (pl.col("end") - pl.col("start")).alias("duration_ns"),
        pl.col("cause").cast(pl.String),
        pl.lit(lane).alias("lane"),
        *slice_columns(activity, pieces),
    )
    if trace.device_work.is_empty():
        frame = _with_computing(frame, _computing_elsewhere(trace))
    return frame.filter(pl.col("duration_ns") > 0).cast(HOST_SCHEMA)  # type: ignore[arg-type]


def _profiler_end_ns(trace: Trace) -> int:
    """End of PyTorch's profiler, from its own span; 2**62 without one."""
    names = pl.col("name").str.starts_with(_PROFILER)
    end = trace.annotations.filter(names).select((pl.col("start_ns") + pl.col("duration_ns")).max()).item()
    return 2**62 if end is None else int(end)


def _computing_elsewhere(trace: Trace) -> IntervalSet:
    """Times in which XLA ran compiled code on the CPU: mostly on its own threads, for which the main thread waits."""
    lanes = trace.lanes.filter(pl.col("name").str.contains(XLA_THREADS))["lane"]
    runs = pl.col("lane").is_in(lanes.implode()) | pl.col("name").str.contains(XLA_EXECUTION)
    return covered_by(trace.operators.filter(runs))


def _with_computing(frame: pl.DataFrame, elsewhere: IntervalSet) -> pl.DataFrame:
    """Adapt pieces to a machine without a device, where operators compute.

    With XLA, recorded execution and waits for it count as computing; other operators only prepare it.
    """
    if not len(elsewhere.starts):
        return frame.with_columns(pl.col("cause").replace({"dispatch": "compute"}))
    waits = pl.col("cause").is_in(WAITING)
    waiting = frame.filter(waits)
    starts = waiting["start_ns"].to_numpy()
    timeline = Timeline.covered(elsewhere)
    part, start, end, computes = timeline.cut(starts, starts + waiting["duration_ns"].to_numpy())
    cause = pl.when(pl.Series(computes >= 0)).then(pl.lit("compute")).otherwise("cause")
    cut = waiting[part].with_columns(start_ns=pl.Series(start), duration_ns=pl.Series(end - start), cause=cause)
    return pl.concat([frame.filter(~waits), cut]).sort("start_ns", maintain_order=True)


def host_summary(pieces: pl.DataFrame) -> pl.DataFrame:
    """Host time by cause: columns cause, ns, share (of the whole, 0 to 1), largest first."""
    total = pieces["duration_ns"].sum()
    return (
        pieces.group_by("cause")
        .agg(ns=pl.col("duration_ns").sum())
        .with_columns(share=pl.col("ns") / total if total else pl.lit(0.0))
        .sort("ns", "cause", descending=[True, False])
    )
