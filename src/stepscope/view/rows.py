"""Rows of nested slices: what the timeline draws of a trace, each row disjoint and sorted, in memory or in files.

In a row, a slice at least as wide as a pixel holds the boundary of a pixel, so one search for the boundaries finds all
of those; narrower ones are told by the time that they cover in each pixel, from running sums.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.trace import Trace
from stepscope.trace.model import Part
from stepscope.trace.nesting import Nesting, Rows, depths, parents
from stepscope.trace.window import Times

LONGEST: Final = 400
"""Longest name in a window, in UTF-16 units: a C++ kernel name can have tens of thousands."""
_HASHED: Final = 10_000
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
    columns = pl.concat([_columns(trace.table(table).with_row_index("row"), table, trace) for table in TABLES])
    names = columns["name"].unique(maintain_order=True)
    name = columns["name"].cast(pl.Enum(names)).to_physical().cast(pl.Int32)
    lane, start, duration = (columns[each].to_numpy() for each in ("lane", "start_ns", "duration_ns"))
    parent = parents(lane, start, duration)
    marks = _marks(columns, parent)
    if len(marks):
        lane = lane.copy()
        lane[marks] += _beside("annotations", trace)
        parent = parents(lane, start, duration)
    position = _positions(trace, _busy(columns), main)
    key = position[lane].astype(np.int64) << 32 | depths(parent)
    order = np.lexsort((start, key))
    key, duration = key[order], duration[order]
    sums = np.cumsum(duration)
    bounds = [0, *(np.flatnonzero(key[1:] != key[:-1]) + 1).tolist(), len(key)] if len(key) else [0]
    result = Slices(
        start=start[order],
        duration=duration,
        before=sums - duration,
        name=name.to_numpy()[order],
        kind=columns["kind"].to_numpy()[order],
        table=columns["table"].to_numpy()[order],
        row=columns["row"].to_numpy()[order],
        names=names,
        lanes=(),
    )
    rows = [(int(key[first]) >> 32, first, last) for first, last in pairwise(bounds)]
    return _with_lanes(trace, result, rows, position, main)


def _columns(rows: pl.DataFrame, table: str, trace: Trace) -> pl.DataFrame:
    """Slices of a table, which has the numbers of its rows, with numbers for table and kind."""
    kind = pl.lit(KINDS.index(KIND_OF[table])) if table in KIND_OF else _work_kind()
    return rows.select(
        (pl.col("lane") + (0 if table == "annotations" else _beside(table, trace))).cast(pl.Int32),
        "start_ns",
        "duration_ns",
        pl.col("name").fill_null(""),
        kind.cast(pl.Int8).alias("kind"),
        pl.lit(TABLES.index(table), pl.Int8).alias("table"),
        pl.col("row").cast(pl.UInt32),
        is_step=pl.col("step").is_not_null() if table == "annotations" else pl.lit(False),
    )


def _beside(table: str, trace: Trace) -> int:
    """What is added to the number of a lane for the one beside it, 0 for tables that nest with others."""
    return (list(_BESIDE).index(table) + 1) * trace.lanes.height if table in _BESIDE else 0


def _busy(columns: pl.DataFrame) -> pl.DataFrame:
    """Time of operators and launches by lane: columns lane, ns."""
    works = pl.col("table").is_in([TABLES.index("operators"), TABLES.index("launches")])
    return columns.filter(works).group_by("lane").agg(ns=pl.col("duration_ns").sum())


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


def _positions(trace: Trace, busy: pl.DataFrame, main: int | None) -> Rows:
    """Place of each lane in the timeline: the main thread, other threads by their work, workers, queues, the rest.

    A lane's marks, waits and lines come before it; they have the numbers of lanes after all others.
    """
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


def _with_lanes(
    trace: Trace, slices: Slices, found: list[tuple[int, int, int]], position: Rows, main: int | None
) -> Slices:
    """Add the lanes: of each row, by depth, the place of its lane, its first and its last (excluded) slice."""
    rows: dict[int, list[tuple[int, int]]] = {}
    for place, first, last in found:
        rows.setdefault(place, []).append((first, last))
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
    return replace(slices, lanes=tuple(lanes))


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


def slices_in_files(trace: Trace, main: int | None) -> Slices:
    """The same slices in files, built in memory that does not grow with the trace.

    Where there are Python frames, the steps of every thread have a lane beside it.
    """
    folder = tempfile.TemporaryDirectory(prefix="stepscope-timeline-")
    written = _Written(Path(folder.name), trace)
    has_frames = any(part.span.rows for part in trace.parts("frames"))
    for columns in _by_time(trace):
        written.add(columns, has_frames)
    position = _positions(trace, written.busy, main)
    slices, rows = written.sorted(position)
    folder.cleanup()  # the open files stay until nothing refers to them
    return _with_lanes(trace, slices, rows, position, main)


class _Source:
    """Rows of a table, read part by part."""

    def __init__(self, trace: Trace, table: str) -> None:
        self._trace, self._table = trace, table
        self._parts: list[Part] = [part for part in trace.parts(table) if part.span.rows][::-1]
        self._rows = 0
        self.waiting = _columns(trace.scan(table).head(0).collect().with_row_index("row"), table, trace)

    def read(self) -> None:
        """Read the next part."""
        rows = self._parts.pop().read("lane", "start_ns", "duration_ns", "name", *_MORE.get(self._table, ()))
        numbered = rows.with_row_index("row", self._rows)
        self._rows += rows.height
        self.waiting = pl.concat([self.waiting, _columns(numbered, self._table, self._trace)])

    @property
    def known_until(self) -> int:
        """All rows that start before have been read."""
        if not self._parts:
            return 2**63 - 1
        return int(self.waiting["start_ns"][-1]) if self.waiting.height else -1

    def take(self, before_ns: int) -> pl.DataFrame:
        count = int(np.searchsorted(self.waiting["start_ns"].to_numpy(), before_ns, side="left"))
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken


_MORE: Final = {"annotations": ("step",), "device_work": ("kind",)}
"""Columns of tables that the timeline needs besides those of all slices."""


def _by_time(trace: Trace) -> Iterator[pl.DataFrame]:
    """Slices of all tables, a stretch of time after another, in nesting order."""
    sources = [_Source(trace, table) for table in TABLES]
    until = -1
    while until < 2**63 - 1:
        behind = min(sources, key=lambda source: source.known_until)
        if behind.known_until < 2**63 - 1:
            behind.read()
        until = min(source.known_until for source in sources)
        columns = pl.concat([source.take(until) for source in sources])
        if columns.height:
            yield columns.sort("start_ns", "duration_ns", descending=[False, True], maintain_order=True)


class _Written:
    """Columns of slices in files, in order of time and later by row."""

    _TYPES: Final = {
        "start": np.int64,
        "duration": np.int64,
        "before": np.int64,
        "name": np.int32,
        "kind": np.int8,
        "table": np.int8,
        "row": np.uint32,
    }

    def __init__(self, folder: Path, trace: Trace) -> None:
        self._folder, self._trace = folder, trace
        self._files = {name: (folder / f"{name}.time").open("wb") for name in (*self._TYPES, "key") if name != "before"}
        self._nesting = Nesting()
        self._depths = (folder / "depths").open("wb")
        self._names: dict[str, int] = {}
        self._busy: list[pl.DataFrame] = []
        self._counts: dict[int, int] = {}

    @property
    def busy(self) -> pl.DataFrame:
        parts = pl.concat(self._busy) if self._busy else pl.DataFrame(schema={"lane": pl.Int32, "ns": pl.Int64})
        return parts.group_by("lane").agg(pl.col("ns").sum())

    def add(self, columns: pl.DataFrame, steps_beside: bool) -> None:
        """Add slices that all start after those added before."""
        self._busy.append(_busy(columns))
        if steps_beside:
            beside = pl.when("is_step").then(_beside("annotations", self._trace)).otherwise(0)
            columns = columns.with_columns(pl.col("lane") + beside.cast(pl.Int32))
        lane, start, duration = (columns[each].to_numpy() for each in ("lane", "start_ns", "duration_ns"))
        key = lane.astype(np.int64) << 32 | self._depth(self._nesting.add(lane, start, duration))
        for number, count in zip(*(each.tolist() for each in np.unique(key, return_counts=True)), strict=True):
            self._counts[number] = self._counts.get(number, 0) + count
        names = columns["name"].unique(maintain_order=True)
        codes = np.array([self._names.setdefault(name, len(self._names)) for name in names.to_list()], np.int32)
        name = codes[columns["name"].cast(pl.Enum(names)).to_physical().to_numpy()]
        arrays = {"start": start, "duration": duration, "name": name, "key": key}
        for each, file in self._files.items():
            file.write(arrays[each].tobytes() if each in arrays else columns[each].to_numpy().tobytes())

    def _depth(self, parent: Rows) -> Rows:
        """Depth of the slices added last; those of all before them are in a file."""
        first = self._nesting.count - len(parent)
        outside = (parent >= 0) & (parent < first)
        depth = (parent >= 0).astype(np.int64)
        if outside.any():
            before = np.memmap(self._folder / "depths", np.int32, "r", shape=(first,))
            depth[outside] += before[parent[outside]]
        depth = depths(np.where(parent >= first, parent - first, -1), depth)
        self._depths.write(depth.astype(np.int32).tobytes())
        self._depths.flush()
        return depth

    def sorted(self, position: Rows) -> tuple[Slices, list[tuple[int, int, int]]]:
        """All slices by row, and of each row the place of its lane, its first and its last (excluded) slice."""
        for file in (*self._files.values(), self._depths):
            file.close()
        keys = sorted(self._counts, key=lambda key: (position[key >> 32], key & 0xFFFFFFFF))
        total = sum(self._counts.values())
        by_row = {name: self._array(f"{name}.row", kind, total) for name, kind in self._TYPES.items()}
        by_time = {
            name: self._array(f"{name}.time", np.int64 if name == "key" else self._TYPES[name], total, "r")
            for name in self._files
        }
        ends: dict[int, int] = {}
        rows: list[tuple[int, int, int]] = []
        first = 0
        for number in keys:
            ends[number] = first
            rows.append((int(position[number >> 32]), first, first + self._counts[number]))
            first += self._counts[number]
        for begin in range(0, total, _CHUNK):
            part = slice(begin, begin + _CHUNK)
            key = by_time["key"][part]
            order = np.argsort(key, kind="stable")
            found = key[order]
            bounds = [0, *(np.flatnonzero(found[1:] != found[:-1]) + 1).tolist(), len(found)]
            for name, values in by_time.items():
                if name != "key":
                    ordered = values[part][order]
                    for low, high in pairwise(bounds):
                        place = ends[int(found[low])]
                        by_row[name][place : place + high - low] = ordered[low:high]
            for low, high in pairwise(bounds):
                ends[int(found[low])] += high - low
        _write_sums(by_row["duration"], by_row["before"])
        return Slices(**by_row, names=pl.Series(list(self._names), dtype=pl.String), lanes=()), rows

    def _array(self, name: str, kind: Any, total: int, mode: Literal["r", "w+"] = "w+") -> npt.NDArray[Any]:
        return np.memmap(self._folder / name, kind, mode, shape=(total,)) if total else np.zeros(0, kind)


_CHUNK: Final = 4_000_000


def _write_sums(duration: Times, before: Times) -> None:
    """Write the sum of the durations before each slice."""
    carried = 0
    for begin in range(0, len(duration), _CHUNK):
        part = duration[begin : begin + _CHUNK]
        sums = np.cumsum(part)
        before[begin : begin + _CHUNK] = sums - part + carried
        carried += int(sums[-1])
