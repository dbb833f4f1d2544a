"""Build the tables of a trace from gathered rows: shift times to zero, sort, nest, link, and write in parts."""

from __future__ import annotations

import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.readers.source import Background, current
from stepscope.trace import naming
from stepscope.trace.excerpt import is_inside, window_of_steps
from stepscope.trace.model import StoreWriter
from stepscope.trace.nesting import Nesting, Rows, at, nullable, row_numbers
from stepscope.trace.tables import SCHEMAS, conform, rows_frame
from stepscope.trace.window import StepRange, Window

MEMORY_BYTES: Final = 32 * 2**20
PART_ROWS: Final = 100_000
"""Rows per part, which bounds the memory."""
_SHORT_RUN: Final = 16
"""Average length of a sorted run from which merging the runs is faster than a full sort."""
_NONE: Final = pl.DataFrame()


class _Block(NamedTuple):
    """Rows of one table in time order, in memory or in the file.

    Attributes:
        first_ns, last_ns: starts of the first and the last row.
        rows: how many.
        held: the rows; None if they are in the file, in `size` bytes from `offset` on.
    """

    first_ns: int
    last_ns: int
    rows: int
    held: pl.DataFrame | None
    offset: int = 0
    size: int = 0


class Spill:
    """Rows of several tables, added in any order and taken in the order of time, piece by piece.

    Rows beyond MEMORY_BYTES are sorted and written to a file without a name in `directory`; `flush` ends adding.
    """

    def __init__(self, directory: Path, memory_bytes: int | None = None) -> None:
        self._directory = directory
        self._limit = MEMORY_BYTES if memory_bytes is None else memory_bytes
        self._held: defaultdict[str, list[pl.DataFrame]] = defaultdict(list)
        self._blocks: defaultdict[str, list[_Block]] = defaultdict(list)
        self._size = 0
        self._file: FileIO | None = None
        self._filled: set[tuple[str, str]] = set()

    def add(self, batch: dict[str, pl.DataFrame]) -> None:
        budget = current()
        for table, frame in batch.items():
            budget.spend("rows", frame.height)
            self._held[table].append(frame)
            self._size += int(frame.estimated_size())
        budget.tick()
        if self._size > self._limit:
            self._set_aside(*self._held, to_file=True)

    def flush(self) -> None:
        """Sort the rows that are in memory; write them to disk if others already are."""
        self._set_aside(*self._held, to_file=self._file is not None)

    def _set_aside(self, *tables: str, to_file: bool) -> None:
        for table in tables:
            frame = _concatenated(self._held.pop(table))
            self._size = max(0, self._size - int(frame.estimated_size()))
            if frame.height:
                self._filled.update((table, name) for name in frame.columns if frame[name].null_count() < frame.height)
                self._keep(table, frame if rows_are_sorted(frame) else in_order(frame), to_file=to_file)

    def _keep(self, table: str, frame: pl.DataFrame, *, to_file: bool) -> None:
        if to_file and self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0, dir=self._directory)  # noqa: SIM115 - `clean` closes it
        for part in frame.iter_slices(max(1, PART_ROWS // 4)):
            first_ns, last_ns = part["start_ns"][0], part["start_ns"][-1]
            if to_file and self._file is not None:
                offset = self._file.seek(0, os.SEEK_END)
                part.write_ipc_stream(self._file, compression="uncompressed")
                size = self._file.seek(0, os.SEEK_END) - offset
                self._blocks[table].append(_Block(first_ns, last_ns, part.height, None, offset, size))
            else:
                self._blocks[table].append(_Block(first_ns, last_ns, part.height, part))

    def _part(self, block: _Block, begin: int | None, end: int | None) -> pl.DataFrame:
        """Return the rows of a block that start in [begin, end)."""
        frame = block.held
        if frame is None:
            assert self._file is not None
            self._file.seek(block.offset)
            frame = pl.read_ipc_stream(self._file.read(block.size))
        start = frame["start_ns"]
        first = 0 if begin is None or begin <= block.first_ns else int(start.search_sorted(begin))
        last = block.rows if end is None or end > block.last_ns else int(start.search_sorted(end))
        return frame.slice(first, last - first)

    def has(self, table: str, column: str) -> bool:
        """Whether any row of a table has a value in this column."""
        return (table, column) in self._filled

    def bounds(self, *tables: str) -> list[int | None]:
        """Return times between which these tables have about PART_ROWS rows; None at both ends is unbounded."""
        bounds: list[int | None] = [None]
        rows = 0
        for first_ns, count in sorted((block.first_ns, block.rows) for each in tables for block in self._blocks[each]):
            if rows >= PART_ROWS and first_ns != bounds[-1]:
                bounds.append(first_ns)
                rows = 0
            rows += count
        return [*bounds, None]

    def between(self, table: str, begin: int | None, end: int | None) -> pl.DataFrame:
        """Return a table's rows that start in [begin, end), by start, longest first; without columns if it has none."""
        frames = [
            self._part(block, begin, end)
            for block in self._blocks[table]
            if (end is None or block.first_ns < end) and (begin is None or block.last_ns >= begin)
        ]
        if not frames:
            return _NONE
        frame = _concatenated(frames)
        return frame if len(frames) == 1 or rows_are_sorted(frame) else in_order(frame)

    def take(self, table: str) -> pl.DataFrame | None:
        """Remove a table's rows and return them in the order of `between`; None if it has none."""
        if table in self._held:
            self._set_aside(table, to_file=False)
        frame = self.between(table, None, None)
        self._blocks.pop(table, None)
        return frame if frame.width else None

    def clean(self) -> None:
        """Forget all rows, also those in the file."""
        self._blocks.clear()
        if self._file is not None:
            self._file.close()


def _concatenated(frames: list[pl.DataFrame]) -> pl.DataFrame:
    """Concatenate the frames; a column that a frame lacks is null there."""
    return pl.concat(frames, how="diagonal") if len(frames) > 1 else frames[0]


_LAUNCHING: Final = ("launch", "graph_launch", "copy", "set")


def rows_are_sorted(frame: pl.DataFrame) -> bool:
    if not frame["start_ns"].is_sorted():
        return False
    if "duration_ns" not in frame.columns:
        return True
    start, duration = frame["start_ns"].to_numpy(), frame["duration_ns"].to_numpy()
    return not bool(((start[1:] == start[:-1]) & (duration[1:] > duration[:-1])).any())


def in_order(frame: pl.DataFrame) -> pl.DataFrame:
    """Sort rows by start, longest slice first; column by column, so that only one column is in memory twice."""
    order = _order(frame)
    return pl.DataFrame([frame.drop_in_place(name).rechunk().gather(order) for name in frame.columns])


def _order(frame: pl.DataFrame) -> pl.Series:
    start = frame["start_ns"].to_numpy()
    if np.count_nonzero(start[1:] < start[:-1]) > len(start) // _SHORT_RUN:
        by = [name for name in ("start_ns", "duration_ns") if name in frame.columns]
        return frame.select(pl.arg_sort_by(by, descending=[False, True][: len(by)], maintain_order=True)).to_series()
    rows = np.argsort(start, kind="stable")  # a stable sort merges existing runs, such as one thread after another
    if "duration_ns" in frame.columns:
        start, duration = start[rows], frame["duration_ns"].to_numpy()[rows]
        tied = start[1:] == start[:-1]
        wrong = np.flatnonzero(tied & (duration[1:] > duration[:-1]))
        if wrong.size:
            group = np.append(0, np.cumsum(~tied))
            has_wrong = np.zeros(int(group[-1]) + 1, np.bool_)
            has_wrong[group[wrong]] = True
            places = np.flatnonzero(has_wrong[group])
            rows[places] = rows[places][np.lexsort((-duration[places], group[places]))]
    return pl.Series(rows.astype(np.uint32))


def _arrays(frame: pl.DataFrame) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return frame["lane"].to_numpy(), frame["start_ns"].to_numpy(), frame["duration_ns"].to_numpy()


class _Launches:
    """Finds the launch of each piece of device work: by correlation number; else by flow, or external id."""

    def __init__(self, *, by_correlation: bool) -> None:
        self._by_correlation = by_correlation
        self._parts: list[pl.DataFrame] = []
        self.count = 0

    def add(self, launches: pl.DataFrame) -> None:
        """Add the next rows of the table."""
        wanted = ["start_ns", *(["correlation"] if self._by_correlation else ["lane", "external_id"])]
        rows = launches.with_row_index("launch", self.count).select(
            "launch",
            *(name for name in wanted if name in launches.columns),
            preferred=pl.col("kind").is_in(_LAUNCHING),
        )
        self._parts.append(rows.drop_nulls("correlation") if self._by_correlation else rows)
        self.count += launches.height

    def finish(self, flows: pl.DataFrame, work: Iterable[pl.DataFrame]) -> None:
        """Prepare `of`.

        Args:
            work: all of the device work, used where it has no correlation numbers.
        """
        calls = pl.concat(self._parts, how="diagonal", rechunk=True)
        self._parts.clear()
        if self._by_correlation:
            self._index(*(calls[name].to_numpy() for name in ("correlation", "launch", "start_ns", "preferred")))
            return
        columns = ("lane", "start_ns", "external_id")
        parts = [part.select(name for name in columns if name in part.columns) for part in work]
        whole = pl.concat(parts, how="diagonal") if parts else _NONE
        found = _launch_by_flow(whole, calls, flows) if flows.width and whole.height else None
        if found is None or found.null_count() == whole.height:
            found = _launch_by_external_id(whole, calls)
        self._found = row_numbers(found)
        self._starts = calls["start_ns"].to_numpy()

    def _index(self, numbers: Rows, launches: Rows, starts: Rows, preferred: npt.NDArray[np.bool_]) -> None:
        """Sort by correlation number and keep one launch of each: the first that launches work, or the first."""
        order = np.argsort(numbers, kind="stable")
        numbers = numbers[order]
        first = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1])[: len(numbers)])
        if len(first) < len(numbers):
            place = np.arange(len(numbers))
            order = order[
                np.minimum.reduceat(np.where(preferred[order], place, place + len(order)), first) % len(order)
            ]
            numbers = numbers[first]
        self._numbers, self._launches, self._starts = numbers, launches[order].astype(np.int64), starts[order]

    def of(self, work: pl.DataFrame) -> tuple[Rows, int]:
        """Return the launch of the next rows of device work, -1 for none, and how many rows start before theirs."""
        if self._by_correlation:
            wanted = work["correlation"].fill_null(0).to_numpy()
            place = np.searchsorted(self._numbers, wanted)
            place[place == len(self._numbers)] = 0
            known = np.flatnonzero((at(self._numbers, place) == wanted) & work["correlation"].is_not_null().to_numpy())
            place = place[known]
            found = np.full(work.height, -1, np.int64)
            found[known] = self._launches[place]
        else:
            found, self._found = self._found[: work.height], self._found[work.height :]
            known = np.flatnonzero(found >= 0)
            place = found[known]
        return found, int(np.count_nonzero(work["start_ns"].to_numpy()[known] < self._starts[place]))


def _launch_by_flow(work: pl.DataFrame, launches: pl.DataFrame, flows: pl.DataFrame) -> pl.Series:
    keys = ["lane", "start_ns"]
    calls = launches.lazy().select("launch", *keys)
    sources = flows.lazy().join(calls, on=keys).select("flow", "launch").unique("flow", keep="first")
    targets = (
        flows.lazy().select("flow", *keys).join(sources, on="flow").select(*keys, "launch").unique(keys, keep="first")
    )
    return work.lazy().select(keys).join(targets, on=keys, how="left", maintain_order="left").collect()["launch"]


def _launch_by_external_id(work: pl.DataFrame, launches: pl.DataFrame) -> pl.Series:
    """The launches with the same external id, in order, where as many works as launches have it."""
    if not {"external_id"} <= {*work.columns} & {*launches.columns}:
        return pl.Series([None] * work.height, dtype=pl.UInt32)
    known, place = pl.col("external_id").is_not_null(), pl.int_range(pl.len()).over("external_id")
    count = pl.len().over("external_id")
    calls = (
        launches.lazy().filter(known & pl.col("preferred")).select("launch", "external_id", place=place, count=count)
    )
    keyed = work.lazy().select("external_id", place=place, count=count)
    keys = ["external_id", "place", "count"]
    return keyed.join(calls, on=keys, how="left", maintain_order="left").collect()["launch"]


class _ForwardBackward:
    """Finds the pairs of operators that the ends of flows lead to.

    Args:
        categories: of the flows that link forward to backward operators.
        source: how the end of a forward operator is named.
    """

    def __init__(self, categories: Sequence[int], source: Sequence[int]) -> None:
        self._categories = categories
        self._source = source
        self._ends: list[pl.DataFrame] = [pl.DataFrame(schema={**_END, "flow": pl.UInt32})]
        self._flows: list[pl.Series] = []

    def add(self, flows: pl.DataFrame, operators: pl.DataFrame, first: int) -> None:
        """Add the flows and operators of a span of time; `first` is the number of the first operator."""
        if not flows.width:
            return
        ends = flows.filter(pl.col("category").is_in(self._categories))
        ends = ends.select("lane", "start_ns", "flow", is_source=pl.col("end").is_in(self._source))
        self._flows.append(ends.filter("is_source")["flow"])
        if operators.width:
            starts = operators.with_row_index("row", first).select("row", "lane", "start_ns", "sequence_number")
            self._ends.append(ends.join(starts, on=["lane", "start_ns"]).select("flow", *_END))

    def links(self) -> tuple[pl.DataFrame, int]:
        """Return the table `links`, and how many flows lead to no pair."""
        ends = pl.concat(self._ends[1:] or self._ends)
        self._ends.clear()
        pieces = 1 + ends.height // _MOST_ENDS
        piece = pl.col("flow").hash() % pieces
        pairs = [self._pairs(ends.filter(piece == number) if pieces > 1 else ends) for number in range(pieces)]
        links = pl.concat(pairs).sort("source", "target")
        flows = pl.concat(self._flows).n_unique() if self._flows else 0
        return links, max(0, flows - links.height)

    @staticmethod
    def _pairs(ends: pl.DataFrame) -> pl.DataFrame:
        source = pl.col("is_source")
        pairs = ends.filter(source).join(ends.filter(~source), on="flow", suffix="_target")
        same = pl.col("sequence_number").eq_missing(pl.col("sequence_number_target"))
        pairs = pairs.sort(same, "row", "row_target", descending=[True, True, True]).unique("flow", keep="first")
        return pairs.select(kind=pl.lit("forward_backward"), source="row", target="row_target")


_END: Final = {"is_source": pl.Boolean, "row": pl.UInt32, "sequence_number": pl.Int64}
_MOST_ENDS: Final = 500_000
_BY_NAME = " by name"
_LINKING = {"operators": ("sequence_number",), "launches": ("correlation",), "device_work": ("correlation",)}
"""Columns used to link rows; a file may lack them."""
_FRAME_COLUMNS = {"file": pl.String, "line": pl.Int32, "function": pl.String, "module": pl.String}


def _nested(frame: pl.DataFrame, nesting: Nesting) -> pl.DataFrame:
    """Return the next rows of a table with their parents."""
    return frame.with_columns(parent=nullable(nesting.add(*_arrays(frame)))) if frame.height else frame


class Assembly:
    """Writes every table of one file; call `write` once, when all rows are in `spill`.

    Rows have the columns of the trace's tables. Times are on the file's clock, where the trace starts at `origin_ns`;
    text is given as indices into `strings`. Missing steps, frame parts and launch kinds are derived from the name. A
    table "flows" (flow, category, end: "source" or "target", lane, start_ns) links rows that have no correlation
    number.
    """

    def __init__(
        self,
        strings: pl.Series,
        spill: Spill,
        writer: StoreWriter,
        damage: Counter[str],
        origin_ns: int,
        window: Window | None,
        steps: StepRange | None,
    ) -> None:
        self._strings = strings
        self._spill = spill
        self._writer = writer
        self._damage = damage
        self._origin_ns = origin_ns
        self._own_steps = not naming.are_steps_marked(strings)
        self._steps = steps
        self.window = window

    def write(self, lanes: Sequence[Mapping[str, Any]]) -> None:
        """Write all tables; raise UsageError if the requested steps do not exist."""
        if self._steps is not None:
            self.window = self._window_of_steps(self._steps)
        with Background() as self._background:
            self._write_table("annotations", self._describe_annotations)
            for table in ("synchronisations", "counters", "memory", "lines", "modules"):
                self._write_table(table)
            self._write_frames()
            self._write_linked()
        if lanes:
            self._writer.write_part("lanes", conform("lanes", pl.DataFrame(lanes, infer_schema_length=None)))

    def _pieces(self, table: str) -> Iterator[pl.DataFrame]:
        for begin_ns, end_ns in pairwise(self._spill.bounds(table)):
            yield self._rows(table, begin_ns, end_ns)

    def _rows(self, table: str, begin_ns: int | None, end_ns: int | None) -> pl.DataFrame:
        """Return a span of a table's rows in their final order, with times relative to the start of the trace."""
        frame = self._spill.between(table, begin_ns, end_ns)
        if not frame.width:
            return frame
        absent = [name for name in _LINKING.get(table, ()) if name not in frame.columns]
        frame = frame.with_columns(pl.lit(None, pl.Int64).alias(name) for name in absent)
        frame = frame.with_columns(pl.col("start_ns") - self._origin_ns)
        early = int((frame["start_ns"] < 0).sum())
        if early:  # instants and flows may precede the first slice
            self._damage["instant_before_start"] += early
            frame = frame.with_columns(pl.col("start_ns").clip(lower_bound=0))
        return frame

    def _inside(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame.filter(self._is_inside(frame)) if self.window and frame.width else frame

    def _is_inside(self, frame: pl.DataFrame) -> pl.Expr:
        return pl.lit(True) if self.window is None else is_inside(self.window, frame.columns)

    def _window_of_steps(self, steps: StepRange) -> Window:
        marks = []
        for part in self._pieces("annotations"):
            if part.height:
                is_host = pl.Series("host", self._strings.gather(part["kind"]) == "host")
                marks.append(self._describe_annotations(part).filter(is_host))
        chosen = [part.select("start_ns", "duration_ns", "step") for part in marks]
        return window_of_steps(pl.concat(chosen) if chosen else _NONE, steps)

    def _write_table(self, table: str, describe: Callable[[pl.DataFrame], pl.DataFrame] | None = None) -> None:
        for rows in self._pieces(table):
            self._write_rows(table, self._inside(rows), describe)

    def _write_rows(
        self, table: str, frame: pl.DataFrame, describe: Callable[[pl.DataFrame], pl.DataFrame] | None = None
    ) -> None:
        for first in range(0, frame.height, PART_ROWS):
            self._background.run(partial(self._write_part, table, frame.slice(first, PART_ROWS), describe))

    def _write_part(
        self, table: str, part: pl.DataFrame, describe: Callable[[pl.DataFrame], pl.DataFrame] | None
    ) -> None:
        if describe is not None:
            part = describe(part)
        texts = [name for name, dtype in SCHEMAS[table].items() if dtype is pl.String]
        coded = [name for name in texts if name in part.columns and part.schema[name] == pl.UInt32]
        part = part.with_columns([self._strings.gather(part[name]).alias(name) for name in coded])
        self._writer.write_part(table, self._named(table, conform(table, part)))

    def _write_frames(self) -> None:
        nesting = Nesting()
        for rows in self._pieces("frames"):
            self._write_rows("frames", _nested(self._inside(rows), nesting), self._describe_frames)

    def _named(self, table: str, part: pl.DataFrame) -> pl.DataFrame:
        fillings = {"name": "unnamed", **({"device": "unknown"} if table == "device_work" else {})}
        missing = [name for name in fillings if name in part.columns and part[name].null_count()]
        return part.with_columns(pl.col(name).fill_null(fillings[name]) for name in missing) if missing else part

    def _describe_annotations(self, part: pl.DataFrame) -> pl.DataFrame:
        own = self._own_steps
        return self._by_name(part, {"step": pl.Int64}, lambda name: (naming.step_number(name, own=own),))

    def _describe_frames(self, part: pl.DataFrame) -> pl.DataFrame:
        return self._by_name(part, _FRAME_COLUMNS, naming.frame)

    def _by_name(
        self, part: pl.DataFrame, schema: dict[str, type[pl.DataType]], function: Callable[[str], tuple[object, ...]]
    ) -> pl.DataFrame:
        """Fill columns that the file does not give from the name; each distinct name is parsed once."""
        codes = part["name"].unique()
        rows = [function(name) for name in self._strings.gather(codes)]
        found = rows_frame(rows, schema).with_columns(name=codes)
        joined = part.join(found, on="name", how="left", maintain_order="left", suffix=_BY_NAME)
        given = [name for name in schema if name in part.columns]
        columns = [self._strings.gather(part[name]) if schema[name] is pl.String else part[name] for name in given]
        return joined.with_columns(
            pl.coalesce(column, pl.col(name + _BY_NAME)).alias(name)
            for name, column in zip(given, columns, strict=True)
        ).drop([name + _BY_NAME for name in given])

    def _write_linked(self) -> None:
        """Write operators, launches and device work, which refer to one another."""
        by_correlation = self._spill.has("device_work", "correlation")
        launches, operators = _Launches(by_correlation=by_correlation), Nesting()
        pairs = _ForwardBackward(self._codes_of(naming.FORWARD_BACKWARD_FLOWS), self._codes_of(["source"]))
        launched, worked = self._correlations_of_the_window()
        all_flows = []
        for begin_ns, end_ns in pairwise(self._spill.bounds("operators", "launches")):
            flows = self._rows("flows", begin_ns, end_ns)
            first, calls = operators.count, self._rows("operators", begin_ns, end_ns)
            calls = _nested(self._inside(calls), operators)
            pairs.add(flows, calls, first)
            self._write_rows("operators", calls)
            self._write_launches(self._rows("launches", begin_ns, end_ns), worked, operators, launches)
            if not by_correlation and flows.width:
                all_flows.append(flows)
        links, lost = pairs.links()
        if lost and self.window is None and operators.count:
            self._damage["unmatched_forward_backward"] += lost
        self._write_rows("links", links)
        self._write_work(launches, pl.concat(all_flows) if all_flows else _NONE, launched)

    def _correlations_of_the_window(self) -> tuple[pl.Series, pl.Series]:
        """Return the numbers of launches in the window, and those of device work in it or launched there."""
        launched, worked = ([pl.Series([], dtype=pl.Int64)] for _ in range(2))
        if self.window is not None:
            launched += [self._inside(part)["correlation"] for part in self._pieces("launches") if part.width]
            numbers = pl.concat(launched).drop_nulls()
            worked += [self._work(part, numbers)["correlation"] for part in self._pieces("device_work") if part.width]
            return numbers, pl.concat(worked).drop_nulls()
        return launched[0], worked[0]

    def _work(self, rows: pl.DataFrame, launched: pl.Series) -> pl.DataFrame:
        if self.window is None or not rows.width:
            return rows
        return rows.filter(self._is_inside(rows) | pl.col("correlation").is_in(launched.implode()))

    def _write_launches(self, rows: pl.DataFrame, worked: pl.Series, operators: Nesting, launches: _Launches) -> None:
        if self.window is not None and rows.width:
            rows = rows.filter(self._is_inside(rows) | pl.col("correlation").is_in(worked.implode()))
        if not rows.height:
            return
        rows = self._by_name(rows, {"kind": pl.String}, lambda name: (naming.launch_kind(name),))
        around = operators.innermost_at(rows["lane"].to_numpy(), rows["start_ns"].to_numpy())
        launches.add(rows)
        self._write_rows("launches", rows.with_columns(operator=nullable(around)))

    def _write_work(self, launches: _Launches, flows: pl.DataFrame, launched: pl.Series) -> None:
        if launches.count:
            launches.finish(flows, (self._work(rows, launched) for rows in self._pieces("device_work")))
        for rows in self._pieces("device_work"):
            work = self._work(rows, launched)
            if launches.count and work.height:
                found, before = launches.of(work)
                self._damage["work_before_launch"] += before
                work = work.with_columns(launch=nullable(found))
            self._write_rows("device_work", work)

    def _codes_of(self, words: Iterable[str]) -> list[int]:
        return (
            self._strings.to_frame("word")
            .with_row_index("code")
            .filter(pl.col("word").is_in(list(words)))["code"]
            .to_list()
        )
