"""The timeline: lanes of nested slices with an exact level of detail; a window of any trace is a few thousand numbers.

In a row, slices are disjoint and sorted. A slice at least as wide as a pixel holds the boundary of a pixel, so one
search for the boundaries finds all of those; narrower ones are told by the time that they cover in each pixel, from
running sums. A window thus costs O(width log n) for each row, at any zoom, and nothing is sampled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.host import TABLES as HOST_TABLES
from stepscope.analysis.host import host_time
from stepscope.analysis.step_view import StepView
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows, at, depths, parents
from stepscope.trace.window import Times

MOST_SLICES: Final = 20_000
"""A window with no more slices than this holds all of them, one by one."""
LONGEST: Final = 400
"""Longest name in a window, in UTF-16 units: a C++ kernel name can have tens of thousands."""
_HASHED: Final = 10_000
WIDTHS: Final = (1, 8192)
_MARKS_KEPT: Final = 4
LOADER_WORKER: Final = re.compile(r"pt_data_worker|pt_data_pin|data_?loader|loader worker", re.IGNORECASE)

TABLES: Final = (
    "annotations",
    "modules",
    "frames",
    "operators",
    "launches",
    "device_work",
    "synchronisations",
    "lines",
)
"""Tables of slices. Of slices with equal times, those of the earlier table are the outer ones."""
KIND_OF: Final = {
    "annotations": "annotation",
    "modules": "module",
    "frames": "frame",
    "operators": "operator",
    "launches": "launch",
    "synchronisations": "wait",
    "lines": "line",
}
WORK_KINDS: Final = ("compute", "copy_in", "copy_out", "copy_on_device", "set", "communication", "other")
KINDS: Final = (*KIND_OF.values(), *WORK_KINDS)
_BESIDE: Final = {"annotations": "marks: ", "synchronisations": "waits: ", "lines": "lines: "}
"""Tables whose slices do not nest with the others of their lane, and have one beside it; annotations: see `_marks`."""

LaneKind: TypeAlias = Literal["host", "worker", "queue", "path", "memory", "counter", "other"]
Json: TypeAlias = dict[str, Any]


@lru_cache(maxsize=16384)
def value_of(name: str) -> str:
    """A name as the page refers to it: long ones become their beginning and a hash, as in web/src/selection.ts."""
    if len(name) <= LONGEST // 2:
        return name
    units = np.frombuffer(name.encode("utf-16-le", "surrogatepass"), "<u2")
    if len(units) <= LONGEST:
        return name
    number = 5381 ^ len(units)
    for unit in units[:_HASHED].tolist():
        number = (number * 33 ^ unit) & 0xFFFFFFFF
    start = units[:100].tobytes().decode("utf-16-le", "surrogatepass")
    return f"{start}…{np.base_repr(number, 36).lower()}"


class Detail(NamedTuple):
    """What a row shows in a window.

    Attributes:
        rows: the slices to draw one by one, in order.
        busy: nanoseconds of each pixel that all other slices cover; empty if there are none.
    """

    rows: Rows
    busy: Times


@dataclass(frozen=True)
class Row:
    """Disjoint slices sorted by start: arrays of shape (n,) in nanoseconds, perhaps in a file.

    Attributes:
        before: the sum of the durations before each slice, up to a constant; shape (n,).
    """

    start: Times
    duration: Times
    before: Times

    @classmethod
    def of(cls, start: Times, duration: Times) -> Row:
        return cls(start, duration, np.cumsum(duration) - duration)

    def covered_until(self, times: Times) -> Times:
        """The time that the slices cover before each of these times, up to a constant; their shape."""
        return self._covered(times, np.searchsorted(self.start, times, side="right") - 1)

    def _covered(self, times: Times, found: Rows) -> Times:
        last = np.maximum(found, 0)
        inside = np.minimum(self.duration[last], times - self.start[last])
        covered: Times = np.where(found >= 0, self.before[last] + inside, self.before[:1].sum())
        return covered

    def touching(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        """First and last (excluded) of the slices in a window; those without a length count where they begin."""
        first, last = (int(each) for each in np.searchsorted(self.start, [start_ns, end_ns], side="left"))
        if first and self.start[first - 1] + self.duration[first - 1] > start_ns:
            first -= 1
        return first, last

    def whole(self, edges: Times) -> Detail:
        """All slices of a window."""
        return Detail(np.arange(*self.touching(int(edges[0]), int(edges[-1]))), np.zeros(0, np.int64))

    def detail(self, edges: Times) -> Detail:
        """The slices at least as wide as the widest pixel, and the time of each pixel that the others cover.

        Args:
            edges: boundaries of the pixels, in order, shape (width + 1,).
        """
        if not len(self.start):
            return Detail(np.zeros(0, np.int64), np.zeros(0, np.int64))
        pixel = max(int(np.diff(edges).max()), 1)
        found = np.searchsorted(self.start, edges, side="right") - 1
        rows = found[np.append(True, found[1:] != found[:-1])]
        rows = rows[rows >= 0]
        start, duration = self.start[rows], self.duration[rows]
        rows = rows[(duration >= pixel) & (start < edges[-1]) & (start + duration > edges[0])]
        busy = np.diff(self._covered(edges, found))
        if len(rows):
            busy -= np.diff(Row.of(self.start[rows], self.duration[rows]).covered_until(edges))
        return Detail(rows, busy if busy.any() else np.zeros(0, np.int64))


def pixel_edges(start_ns: int, end_ns: int, width: int) -> Times:
    """Boundaries of the pixels of a window, shape (width + 1,)."""
    length = end_ns - start_ns
    return start_ns + np.array([length * number // width for number in range(width + 1)], np.int64)


@dataclass(frozen=True)
class Lane:
    """A host thread, a queue, or what lies beside one.

    Attributes:
        rows: the first and the last (excluded) slice of each row, by depth, in the index's arrays.
        around: names of frames open during the whole lane, outermost first; they have no row.
    """

    id: str
    label: str
    kind: LaneKind
    device: str
    rows: tuple[tuple[int, int], ...]
    around: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slices:
    """All slices by lane, depth and start: arrays of shape (n,)."""

    start: Times
    duration: Times
    before: Times  # sum of the durations before each
    name: npt.NDArray[np.int32]  # index into `names`
    kind: npt.NDArray[np.int8]  # index into KINDS
    table: npt.NDArray[np.int8]  # index into TABLES
    row: npt.NDArray[np.uint32]  # row in that table
    names: pl.Series
    lanes: tuple[Lane, ...]

    def part(self, first: int, last: int) -> Row:
        return Row(self.start[first:last], self.duration[first:last], self.before[first:last])


def slices_of(trace: Trace, main: int | None) -> Slices:
    """Build the slices of a trace; `main` is the lane of the main thread."""
    columns, names = _columns(trace)
    lane, start, duration = (
        columns["lane"].to_numpy(),
        columns["start_ns"].to_numpy(),
        columns["duration_ns"].to_numpy(),
    )
    position = _positions(trace, columns, main)
    parent = parents(lane, start, duration)
    marks = _marks(columns, parent)
    if len(marks):
        lane = lane.copy()
        lane[marks] += (1 + list(_BESIDE).index("annotations")) * trace.lanes.height
        parent = parents(lane, start, duration)
    depth = depths(parent).astype(np.int32)
    key = position[lane].astype(np.int64) << 32 | depth
    order = np.lexsort((start, key))
    key, duration = key[order], duration[order]
    sums = np.cumsum(duration)
    result = Slices(
        start=start[order],
        duration=duration,
        before=sums - duration,
        name=columns["name"].to_numpy()[order],
        kind=columns["kind"].to_numpy()[order],
        table=columns["table"].to_numpy()[order],
        row=columns["row"].to_numpy()[order],
        names=names,
        lanes=(),
    )
    return _with_lanes(trace, result, key, position, main)


def _columns(trace: Trace) -> tuple[pl.DataFrame, pl.Series]:
    """The slices of all tables with numbers instead of words, in the order of TABLES; and the names."""
    count = trace.lanes.height
    parts = []
    for number, table in enumerate(TABLES):
        beside = 0 if table == "annotations" or table not in _BESIDE else list(_BESIDE).index(table) + 1
        kind = pl.lit(KINDS.index(KIND_OF[table])) if table in KIND_OF else _work_kind()
        parts.append(
            trace.table(table)
            .with_row_index("row")
            .select(
                (pl.col("lane") + beside * count).cast(pl.Int32),
                "start_ns",
                "duration_ns",
                pl.col("name").fill_null(""),
                kind.cast(pl.Int8).alias("kind"),
                pl.lit(number, pl.Int8).alias("table"),
                "row",
                is_step=pl.col("step").is_not_null() if table == "annotations" else pl.lit(False),
            )
        )
    columns = pl.concat(parts)
    names = columns["name"].unique(maintain_order=True)
    coded = columns["name"].cast(pl.Enum(names)).to_physical().cast(pl.Int32)
    return columns.with_columns(coded.alias("name")), names


def _marks(columns: pl.DataFrame, parent: Rows) -> Rows:
    """Annotations that outlive what they began in, such as a step that begins inside of the profiler's own frames.

    Nested in those, all that is in them would be as deep; so they, and the steps of their thread, have a lane beside.
    """
    start, duration = columns["start_ns"].to_numpy(), columns["duration_ns"].to_numpy()
    lane, is_mark = columns["lane"].to_numpy(), columns["table"].to_numpy() == TABLES.index("annotations")
    rows = np.flatnonzero(is_mark & (parent >= 0))
    around = parent[rows]
    crossing = rows[start[rows] + duration[rows] // 2 > start[around] + duration[around]]
    steps = np.flatnonzero(columns["is_step"].to_numpy() & is_mark)
    return np.union1d(crossing, steps[np.isin(lane[steps], lane[crossing])])


def _work_kind() -> pl.Expr:
    codes = {kind: KINDS.index(kind) for kind in WORK_KINDS}
    return pl.col("kind").replace_strict(codes, default=codes["other"], return_dtype=pl.Int8)


def _positions(trace: Trace, columns: pl.DataFrame, main: int | None) -> Rows:
    """Place of each lane in the timeline: the main thread, other threads by their work, workers, queues, the rest.

    A lane's waits and lines come before it; they have the numbers of lanes after all others.
    """
    works = pl.col("table").is_in([TABLES.index("operators"), TABLES.index("launches")])
    busy = columns.filter(works).group_by("lane").agg(ns=pl.col("duration_ns").sum())
    order = (
        trace.lanes.join(busy, on="lane", how="left")
        .with_columns(kind=_lane_kind(), ns=pl.col("ns").fill_null(0), is_main=pl.col("lane") == pl.lit(main, pl.Int32))
        .with_columns(rank=pl.col("kind").replace_strict(dict(zip(_ORDER, range(len(_ORDER)), strict=True))))
        .with_columns(device=pl.when(pl.col("kind") == "queue").then("device"))
        .sort("is_main", "rank", "device", "ns", "lane", descending=[True, False, False, True, False], nulls_last=True)
    )["lane"].to_numpy()
    count, beside = len(order), len(_BESIDE) + 1
    position = np.zeros(count * beside, np.int64)
    for number in range(beside):
        position[order + number * count] = np.arange(count) * beside + (number or beside) - 1
    return position


_ORDER: Final[tuple[LaneKind, ...]] = ("host", "worker", "queue", "other")


def _lane_kind() -> pl.Expr:
    words = pl.concat_str([pl.col("name").fill_null(""), pl.col("process_name").fill_null("")], separator=" ")
    is_worker = words.str.contains(f"(?i){LOADER_WORKER.pattern}")
    return (
        pl.when((pl.col("kind") == "host_thread") & is_worker)
        .then(pl.lit("worker"))
        .when(pl.col("kind") == "host_thread")
        .then(pl.lit("host"))
        .when((pl.col("kind") == "queue") | pl.col("device").is_not_null())
        .then(pl.lit("queue"))
        .otherwise(pl.lit("other"))
    )


def _with_lanes(trace: Trace, slices: Slices, key: Rows, position: Rows, main: int | None) -> Slices:
    """Add the lanes, by the place and depth of each slice."""
    bounds = [0, *(np.flatnonzero(key[1:] != key[:-1]) + 1).tolist(), len(key)] if len(key) else [0]
    rows: dict[int, list[tuple[int, int]]] = {}
    for first, last in pairwise(bounds):
        rows.setdefault(int(key[first]) >> 32, []).append((first, last))
    number_at = np.argsort(position)
    described = trace.lanes.with_columns(shown_as=_lane_kind()).rows(named=True)
    processes = {row["process"] for row in described if row["kind"] == "host_thread"}
    prefixes = ["", *_BESIDE.values()]
    lanes = []
    for place, bounds_of_rows in rows.items():
        beside, number = divmod(int(number_at[place]), len(described))
        row = described[number]
        alone = not any(number_at[other] % len(described) == number for other in rows if other != place)
        label = _label(row, len(processes) > 1)
        if number == main and "main" not in label.lower():
            label = f"main {label}" if label.startswith("thread") else f"main: {label}"
        label = label if alone else prefixes[beside] + label
        kept, around = _without_frames_around(slices, bounds_of_rows)
        lanes.append(Lane(f"{number}.{beside}", label, row["shown_as"], row["device"] or "", kept, around))
    return Slices(**{**vars(slices), "lanes": tuple(lanes)})


def _label(row: Json, several_processes: bool) -> str:
    name = (row["name"] or "").strip()
    if row["kind"] != "host_thread":
        return name or f"queue {row['queue'] or row['lane']}"
    label = name or f"thread {row['thread'] or row['lane']}"
    process = f"{row['process_name'] or 'process'} {row['process'] or ''}".strip()
    return f"{label} ({process})" if several_processes and process not in label else label


def _without_frames_around(
    slices: Slices, rows: list[tuple[int, int]]
) -> tuple[tuple[tuple[int, int], ...], tuple[str, ...]]:
    """Leave out the rows of frames that hold all that the lane has, but the innermost: forty rows show nothing."""
    frame = KINDS.index("frame")
    ends = max(int(slices.start[last - 1] + slices.duration[last - 1]) for _, last in rows)
    around = []
    for first, last in rows:
        holds = last - first == 1 and slices.kind[first] == frame
        if not holds or int(slices.start[first] + slices.duration[first]) < ends:
            break
        around.append(first)
    names = tuple(value_of(slices.names[int(slices.name[first])]) for first in around[:-1])
    return tuple(rows[len(names) :]), names


@dataclass(frozen=True)
class Series:
    """Values over time, such as allocated memory: arrays of shape (n,)."""

    id: str
    label: str
    kind: Literal["memory", "counter"]
    device: str
    unit: str
    time: Times
    value: npt.NDArray[np.float64]

    def window(self, edges: Times) -> Json:
        """The values in a window, the last one before it first; or the least and the largest of each pixel."""
        lane: Json = {"id": self.id, "label": self.label, "kind": self.kind, "device": self.device, "rows": []}
        first, last = (int(each) for each in np.searchsorted(self.time, edges[[0, -1]], side="right"))
        first = max(first - 1, 0)
        about = {"unit": self.unit, "least": float(self.value.min()), "most": float(self.value.max())}
        if last - first <= 2 * len(edges):
            points = {"start": self.time[first:last].tolist(), "value": self.value[first:last].tolist()}
            return {**lane, "values": {**about, **points, "low": [], "high": []}}
        at = np.maximum(np.searchsorted(self.time, edges, side="right") - 1, 0)
        # A pixel's values are those from the one that holds when it begins to the last one in it.
        held = self.value[: at[-1] + 1]
        low, high = (
            extreme(extreme.reduceat(held, at[:-1]), self.value[at[1:]]) for extreme in (np.minimum, np.maximum)
        )
        return {**lane, "values": {**about, "start": [], "value": [], "low": low.tolist(), "high": high.tolist()}}


def series_of(trace: Trace) -> list[Series]:
    """Memory of each device and all counters."""
    found = []
    for column, what in (("total_allocated", "allocated"), ("total_reserved", "reserved")):
        known = trace.memory.filter(pl.col(column).is_not_null()).sort("device", "start_ns", maintain_order=True)
        for (device,), rows in known.group_by("device", maintain_order=True):
            label = f"memory {what} ({'CPU' if device == 'cpu' else f'device {device}'})"
            points = rows["start_ns"].to_numpy(), rows[column].cast(pl.Float64).to_numpy()
            if points[1].any():
                found.append(Series(f"memory.{what}.{device}", label, "memory", str(device or ""), "bytes", *points))
    keys = ["lane", "name", "series"]
    counted = trace.counters.filter(pl.col("value").is_finite()).sort(*keys, "start_ns", maintain_order=True)
    for (lane, name, series), rows in counted.group_by(keys, maintain_order=True):
        label = " ".join(str(word) for word in dict.fromkeys((name, series)) if word)
        points = rows["start_ns"].to_numpy(), rows["value"].to_numpy()
        found.append(Series(f"counter.{lane}.{name}.{series}", label, "counter", "", "", *points))
    return found


@dataclass(frozen=True)
class Gaps:
    """Idle time of one device, or of the main thread, by cause."""

    device: str
    pieces: pl.DataFrame  # start_ns, duration_ns, cause, trigger

    @cached_property
    def by_cause(self) -> dict[str, tuple[Row, list[str | None]]]:
        found = {}
        for (cause,), rows in self.pieces.group_by("cause", maintain_order=True):
            row = Row.of(rows["start_ns"].to_numpy(), rows["duration_ns"].to_numpy())
            found[str(cause)] = (row, rows["trigger"].to_list())
        return found

    def window(self, edges: Times, names: dict[str, int]) -> Json:
        """The gaps of a window, in order; a gap without a trigger has -1."""
        found: list[tuple[int, int, int, int]] = []
        busy = {}
        whole = self.count(edges) <= MOST_SLICES // 4
        for cause, (row, triggers) in self.by_cause.items():
            detail = row.whole(edges) if whole else row.detail(edges)
            if len(detail.busy):
                busy[cause] = detail.busy.tolist()
            number = names.setdefault(cause, len(names))
            for index in detail.rows.tolist():
                trigger = triggers[index]
                told = -1 if trigger is None else names.setdefault(value_of(trigger), len(names))
                found.append((int(row.start[index]), int(row.duration[index]), number, told))
        start, duration, causes, triggers_ = (
            (list(each) for each in zip(*sorted(found), strict=True)) if found else ([],) * 4
        )
        return {
            "device": self.device,
            "start": start,
            "duration": duration,
            "cause": causes,
            "trigger": triggers_,
            "busy": busy,
        }

    def count(self, edges: Times) -> int:
        bounds = (row.touching(int(edges[0]), int(edges[-1])) for row, _ in self.by_cause.values())
        return sum(last - first for first, last in bounds)


def merged_gaps(idle: pl.DataFrame) -> pl.DataFrame:
    """Idle pieces by device and start, those that touch and have the same cause and trigger made one."""
    start, end = pl.col("start_ns"), pl.col("start_ns") + pl.col("duration_ns")
    keys = ["device", "cause", "trigger"]
    rows = idle.filter(pl.col("duration_ns") > 0).select(*keys, start, end.alias("end_ns")).sort("device", "start_ns")
    same = pl.struct(keys).rle_id().alias("run")
    breaks = (start != pl.col("end_ns").shift()).fill_null(False).cum_sum().alias("piece")
    whole = rows.with_columns(same, breaks).group_by("run", "piece", maintain_order=True)
    merged = whole.agg(*(pl.col(key).first() for key in keys), start.min(), pl.col("end_ns").max())
    return merged.select(*keys, start, duration_ns=pl.col("end_ns") - start)


class Marked:
    """Some of the slices, by row."""

    def __init__(self, slices: Slices, chosen: npt.NDArray[np.bool_]) -> None:
        self.slices, self.chosen = slices, chosen
        self._rows: dict[int, Row] = {}

    def row(self, first: int, last: int) -> Row:
        """Those of a row."""
        if first not in self._rows:
            mine = first + np.flatnonzero(self.chosen[first:last])
            self._rows[first] = Row.of(self.slices.start[mine], self.slices.duration[mine])
        return self._rows[first]


class TimelineIndex:
    """All that the timeline of one trace is drawn from, each part built when it is first needed."""

    def __init__(self, view: StepView) -> None:
        self.view = view
        self.trace = view.trace

    @cached_property
    def slices(self) -> Slices:
        return slices_of(self.trace, self.view.lane)

    @cached_property
    def host_kinds(self) -> Rows:
        """Index into KINDS of each of the tables of `HostActivity`."""
        return np.array([KINDS.index(KIND_OF[table]) for table in HOST_TABLES])

    @cached_property
    def host_names(self) -> Rows:
        """Index into the slices' names of each slice of the view's activity."""
        names: Rows = self.view.activity.name.fill_null("").cast(pl.Enum(self.slices.names)).to_physical().to_numpy()
        return names.astype(np.int64)

    @cached_property
    def series(self) -> list[Series]:
        return series_of(self.trace)

    @cached_property
    def gaps(self) -> list[Gaps]:
        """Idle time of each device; without a device, the main thread's time apart from computing."""
        idle = self.view.idle
        if not self.trace.working_devices:
            pieces = host_time(self.trace, activity=self.view.activity).filter(pl.col("cause") != "compute")
            idle = pieces.with_columns(device=pl.lit(""), trigger=pl.lit(None, pl.String))
        parts = merged_gaps(idle).partition_by("device", as_dict=True, maintain_order=True)
        return [Gaps(str(device), pieces) for (device,), pieces in parts.items()]

    @cached_property
    def path(self) -> pl.DataFrame:
        """The critical path of the steps."""
        from stepscope.whatif import Experiment
        from stepscope.whatif.critical_path import critical_path

        return critical_path(Experiment(self.view))

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """Start and end of all that was recorded."""
        slices, times = self.slices, [each.time for each in self.series]
        ends = [int(self.slices.start[last - 1] + slices.duration[last - 1]) for _, last in self._rows()]
        starts = [int(slices.start[first]) for first, _ in self._rows()] + [int(each[0]) for each in times]
        last = max(ends + [int(each[-1]) for each in times], default=1)
        return min(starts, default=0), max(last, min(starts, default=0) + 1)

    def _rows(self) -> Iterator[tuple[int, int]]:
        return (bounds for lane in self.slices.lanes for bounds in lane.rows)

    def window(
        self,
        start_ns: int | None = None,
        end_ns: int | None = None,
        width: int = 1000,
        *,
        path: bool = False,
        mark: str = "",
    ) -> Json:
        """The document `Timeline` of web/src/schema.ts: what a window of this width in pixels shows.

        Args:
            path: with a lane of the critical path.
            mark: what to point out, such as "operator:aten::mm" or "line:train.py:12"; several in as many lines.
        """
        first, last = self.bounds
        start = first if start_ns is None else start_ns
        end = max(last if end_ns is None else end_ns, start + 1)
        edges = pixel_edges(start, end, min(max(width, WIDTHS[0]), WIDTHS[1]))
        document = _Document(self.slices, edges, self._is_whole(edges), self.marked(mark) if mark else None)
        lanes = [document.lane(lane) for lane in self.slices.lanes]
        if path:
            lanes.insert(0, document.path(self.path))
        return {
            "start": start,
            "end": end,
            "first": first,
            "last": last,
            "width": len(edges) - 1,
            "whole": document.whole,
            "lanes": lanes + [series.window(edges) for series in self.series],
            "steps": self._steps(start, end),
            "gaps": [gaps.window(edges, document.names) for gaps in self.gaps],
            "names": list(document.names),
        }

    def marked(self, mark: str) -> Marked:
        """The slices that a choice on the page is about; the last few are kept."""
        if mark not in self._marked:
            if len(self._marked) >= _MARKS_KEPT:
                del self._marked[next(iter(self._marked))]
            self._marked[mark] = Marked(self.slices, self._slices_of(mark))
        return self._marked[mark]

    @cached_property
    def _marked(self) -> dict[str, Marked]:
        return {}

    def _slices_of(self, mark: str) -> npt.NDArray[np.bool_]:
        """Whether each slice has one of these names, or belongs to one of these lines or modules."""
        slices = self.slices
        result = np.zeros(len(slices.start), np.bool_)
        for each in mark.split("\n"):
            kind, _, value = each.partition(":")
            if kind in ("operator", "kernel"):
                kinds = [KINDS.index(word) for word in (("operator",) if kind == "operator" else WORK_KINDS)]
                named = np.array([value_of(name) == value for name in slices.names.to_list()], np.bool_)
                result |= named[slices.name] & np.isin(slices.kind, kinds)
            elif kind in ("line", "module"):
                result |= self._belonging(kind, value)
        return result

    def _belonging(self, kind: str, value: str) -> npt.NDArray[np.bool_]:
        view, slices = self.view, self.slices
        about = view.attribution
        if kind == "line":
            those = [
                number for number, each in enumerate(about.places) if value_of(f"{each.file}:{each.line}") == value
            ]
            host, work = about.place, about.work_place
        else:
            inside = f"{value}."
            those = [number for number, each in enumerate(about.modules) if each == value or each.startswith(inside)]
            host, work = about.module, about.work_module
        result = np.zeros(len(slices.start), np.bool_)
        for table in (*HOST_TABLES, "device_work"):
            of_row = work if table == "device_work" else at(host, view.activity.slices_of(table))
            here = slices.table == TABLES.index(table)
            result[here] = np.isin(of_row[slices.row[here].astype(np.int64)], those)
        return result

    def _is_whole(self, edges: Times) -> bool:
        count = 0
        for first, last in self._rows():
            low, high = self.slices.part(first, last).touching(int(edges[0]), int(edges[-1]))
            count += high - low
            if count > MOST_SLICES:
                return False
        return True

    def _steps(self, start: int, end: int) -> dict[str, list[int]]:
        inside = (pl.col("start_ns") < end) & (pl.col("start_ns") + pl.col("duration_ns") > start)
        steps = self.view.steps.filter(inside)
        return {
            "index": steps["index"].to_list(),
            "start": steps["start_ns"].to_list(),
            "duration": steps["duration_ns"].to_list(),
        }


class _Document:
    """A window being written: its lanes, and the names that they refer to by number."""

    def __init__(self, slices: Slices, edges: Times, whole: bool, marked: Marked | None) -> None:
        self.slices, self.edges, self.whole, self.marked = slices, edges, whole, marked
        self.names: dict[str, int] = {}
        self._numbers = np.full(len(slices.names), -1, np.int64)  # of the slices' names
        self._kinds = np.array([self.names.setdefault(kind, len(self.names)) for kind in KINDS])
        self._tables = np.array([self.names.setdefault(table, len(self.names)) for table in TABLES])

    def lane(self, lane: Lane) -> Json:
        rows = [self._row(first, last) for first, last in lane.rows]
        about = {"id": lane.id, "label": lane.label, "kind": lane.kind, "device": lane.device}
        return {**about, "around": list(lane.around), "rows": rows}

    def _row(self, first: int, last: int) -> Json:
        part = self.slices.part(first, last)
        detail = part.whole(self.edges) if self.whole else part.detail(self.edges)
        shown = first + detail.rows
        pointed_out: Json = {}
        if self.marked is not None:
            narrow = np.zeros(0) if self.whole else self.marked.row(first, last).detail(self.edges).busy
            pointed_out = {"marked": self.marked.chosen[shown].astype(int).tolist(), "marked_busy": narrow.tolist()}
        return {
            **pointed_out,
            "start": self.slices.start[shown].tolist(),
            "duration": self.slices.duration[shown].tolist(),
            "name": self._named(self.slices.name[shown]),
            "kind": self._kinds[self.slices.kind[shown]].tolist(),
            "table": self._tables[self.slices.table[shown]].tolist(),
            "row": self.slices.row[shown].tolist(),
            "busy": detail.busy.tolist(),
        }

    def _named(self, codes: npt.NDArray[np.int32]) -> list[int]:
        new = np.unique(codes[self._numbers[codes] < 0])
        for code in new.tolist():
            self._numbers[code] = self.names.setdefault(value_of(self.slices.names[code]), len(self.names))
        return self._numbers[codes].tolist()  # type: ignore[no-any-return]

    def path(self, path: pl.DataFrame) -> Json:
        """The lane of the critical path: one row, whose kinds are causes for host time."""
        row = Row.of(path["start_ns"].to_numpy(), path["duration_ns"].to_numpy())
        whole = path.height <= MOST_SLICES // 4
        detail = row.whole(self.edges) if whole else row.detail(self.edges)
        shown = path[detail.rows]
        words = shown.select(
            pl.col("name").fill_null("").map_elements(value_of, return_dtype=pl.String),
            kind=pl.when(pl.col("kind") == "host").then(pl.col("cause").fill_null("unknown")).otherwise("kind"),
            table=pl.col("table").fill_null(""),
        )
        columns = {
            column: [self.names.setdefault(word, len(self.names)) for word in words[column].to_list()]
            for column in ("name", "kind", "table")
        }
        pieces = {
            "start": shown["start_ns"].to_list(),
            "duration": shown["duration_ns"].to_list(),
            **columns,
            "row": shown["row"].cast(pl.Int64).fill_null(-1).to_list(),
            "busy": detail.busy.tolist(),
        }
        return {"id": "path", "label": "critical path", "kind": "path", "device": "", "around": [], "rows": [pieces]}
