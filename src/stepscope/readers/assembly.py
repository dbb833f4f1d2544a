"""Build the tables of a trace from gathered rows: shift times to zero, sort, nest, link, and write in parts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.errors import NoStepMarksError, UsageError
from stepscope.readers import event_names
from stepscope.readers.source import current
from stepscope.trace.model import StoreWriter
from stepscope.trace.nesting import innermost_at, parents
from stepscope.trace.tables import SCHEMAS, conform, rows_frame
from stepscope.trace.window import StepRange, Window

MEMORY_BYTES: Final = 32 * 2**20


class Spill:
    """Rows of several tables in the order they were added; `take` returns a table and forgets it."""

    def __init__(self, directory: Path, memory_bytes: int | None = None) -> None:
        self._directory = directory
        self._limit = MEMORY_BYTES if memory_bytes is None else memory_bytes
        self._held: defaultdict[str, list[pl.DataFrame]] = defaultdict(list)
        self._files: defaultdict[str, list[Path]] = defaultdict(list)
        self._size = 0

    def add(self, batch: dict[str, pl.DataFrame]) -> None:
        budget = current()
        for table, frame in batch.items():
            budget.spend("rows", frame.height)
            self._held[table].append(frame)
            self._size += int(frame.estimated_size())
        budget.tick()
        if self._size > self._limit:
            self._write()

    def flush(self) -> None:
        """Write all rows to disk if some already are, since tables are taken one at a time from here on."""
        if self._files:
            self._write()

    def _write(self) -> None:
        for table, frames in self._held.items():
            path = self._directory / f"spill-{table}-{len(self._files[table]):05}.arrow"
            _concatenated(frames).write_ipc(path, compression="uncompressed")
            self._files[table].append(path)
        self._held.clear()
        self._size = 0

    def take(self, table: str) -> pl.DataFrame | None:
        """Return and forget all rows of a table; None if there were none."""
        frames = [pl.scan_ipc(path).collect() for path in self._files.pop(table, [])]
        frames += self._held.pop(table, [])
        return _concatenated(frames) if frames else None

    def clean(self) -> None:
        for path in self._directory.glob("spill-*.arrow"):
            path.unlink()


def _concatenated(frames: list[pl.DataFrame]) -> pl.DataFrame:
    """Concatenate the frames; a column that a frame lacks is null there."""
    return pl.concat(frames, how="diagonal")


_NOT_JSON: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)


class Codes(dict[Any, int]):
    """Assigns numbers to keys in order of first use."""

    def __missing__(self, key: Any) -> int:
        code = self[key] = len(self)
        return code


class _RawCodes(dict[bytes, "int | None"]):
    def __init__(self, codes: Codes) -> None:
        super().__init__({b"null": None})
        self._codes = codes

    def __missing__(self, raw: bytes) -> int:
        code = self[raw] = self._codes[one_spacing(raw).decode("utf-8", "replace")]
        return code


def one_spacing(raw: bytes) -> bytes:
    """Normalise JSON text to one space after each comma and colon, since profilers format shapes differently."""
    try:
        return msgspec.json.format(raw, indent=0)
    except _NOT_JSON:
        return raw


class StringPool:
    """A pool of distinct strings, referred to by index."""

    def __init__(self) -> None:
        self._codes = Codes()
        self._raw_codes = _RawCodes(self._codes)

    def codes(self, strings: Sequence[str]) -> pl.Series:
        """Return the index of each string (UInt32)."""
        known = self._codes
        current().require("strings", len(known))
        return pl.Series([known[string] for string in strings], dtype=pl.UInt32)

    def optional_codes(self, strings: Sequence[Any]) -> pl.Series:
        """Return the index of each string or integer, null for None (UInt32)."""
        return pl.Series(self.numbers(strings), dtype=pl.UInt32)

    def numbers(self, strings: Iterable[Any], missing: int | None = None) -> list[Any]:
        """Return the index of each string or integer, `missing` for None."""
        known = self._codes
        current().require("strings", len(known))
        return [missing if s is None else known[str(s)] for s in strings]

    def raw_codes(self, raws: Sequence[Any]) -> pl.Series:
        """Return the index of each JSON text, null for JSON's null (UInt32)."""
        return pl.Series(self.raw_numbers(raws), dtype=pl.UInt32)

    def raw_numbers(self, raws: Sequence[Any]) -> list[Any]:
        known = self._raw_codes
        return [known[raw] for raw in map(bytes, raws)]

    def strings(self) -> pl.Series:
        current().require("strings", len(self._codes))
        return pl.Series([str(key) for key in self._codes], dtype=pl.String)


PART_ROWS: Final = 100_000
"""Rows per part, which bounds the memory."""
_SHORT_RUN: Final = 16
"""Average length of a sorted run from which merging the runs is faster than a full sort."""
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


def _rows_or_null(rows: npt.NDArray[np.int64]) -> pl.Series:
    found = pl.Series(rows.astype(np.uint32))
    return pl.select(pl.when(pl.Series(rows >= 0)).then(found)).to_series()


def parent_rows(frame: pl.DataFrame) -> pl.Series:
    """Return the row of the slice around each row, or null, piece by piece to bound memory."""
    lanes, starts, durations = _arrays(frame)
    result = np.full(len(lanes), -1, np.int64)
    for rows in _rows_of_lanes(lanes):
        for piece in _separate_pieces(rows, starts, durations):
            found = parents(lanes[piece], starts[piece], durations[piece])
            result[piece] = np.where(found >= 0, piece[found], -1)
    return _rows_or_null(result)


def _rows_of_lanes(lanes: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int64]]:
    small = len(lanes) > 0 and lanes.min() >= 0 and lanes.max() < 2**15
    order = np.argsort(lanes.astype(np.int16) if small else lanes, kind="stable")  # 16-bit keys sort five times faster
    ordered = lanes[order]
    return np.split(order, np.flatnonzero(ordered[1:] != ordered[:-1]) + 1)


def _separate_pieces(
    rows: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], durations: npt.NDArray[np.int64]
) -> list[npt.NDArray[np.int64]]:
    """Cut one lane's rows, sorted by start, into pieces of about PART_ROWS at points where no slice is open."""
    if len(rows) <= PART_ROWS:
        return [rows]
    start = starts[rows]
    open_until = durations[rows]
    open_until += start
    np.maximum.accumulate(open_until, out=open_until)
    gaps = np.flatnonzero(start[1:] > open_until[:-1]) + 1
    places = np.searchsorted(gaps, np.arange(PART_ROWS, len(rows), PART_ROWS))
    return np.split(rows, np.unique(gaps[places[places < len(gaps)]]))


def operator_rows(launches: pl.DataFrame, operators: pl.DataFrame) -> pl.Series:
    """Return the row of the innermost operator around each launch, or null."""
    asked_lanes, times, _ = _arrays(launches)
    lanes, starts, durations = _arrays(operators)
    parent = operators["parent"].to_numpy()  # float, NaN where null
    result = np.full(len(times), -1, np.int64)
    for lane in np.unique(asked_lanes):
        asked = np.flatnonzero(asked_lanes == lane)
        pieces = _separate_pieces(np.flatnonzero(lanes == lane), starts, durations)
        if not len(pieces[0]):
            continue
        piece_of = np.searchsorted([starts[piece[0]] for piece in pieces], times[asked], side="right") - 1
        for number, piece in enumerate(pieces):
            mine = asked[piece_of == number]
            around = parent[piece]
            inside = np.where(np.isnan(around), -1, np.searchsorted(piece, around))
            found = innermost_at(asked_lanes[mine], times[mine], lanes[piece], starts[piece], durations[piece], inside)
            result[mine] = np.where(found >= 0, piece[found], -1)
    return _rows_or_null(result)


def launch_rows(work: pl.DataFrame, launches: pl.DataFrame, flows: pl.DataFrame) -> pl.Series:
    """Return the row of each piece of device work's launch, by correlation number; else by flow, or external id."""
    if work["correlation"].null_count() < work.height:
        calls = (
            launches.lazy()
            .with_row_index("launch")
            .select("launch", "correlation", preferred=pl.col("kind").is_in(_LAUNCHING))
            .filter(pl.col("correlation").is_not_null())
            .sort("preferred", "launch", descending=[True, False])
            .unique("correlation", keep="first")
            .select("launch", "correlation")
        )
        return (
            work.lazy()
            .select("correlation")
            .join(calls, on="correlation", how="left", maintain_order="left")
            .collect()["launch"]
        )
    by_flow = _launch_by_flow(work, launches, flows) if flows.width else None
    if by_flow is not None and by_flow.null_count() < work.height:
        return by_flow
    return _launch_by_external_id(work, launches)


def _launch_by_flow(work: pl.DataFrame, launches: pl.DataFrame, flows: pl.DataFrame) -> pl.Series:
    keys = ["lane", "start_ns"]
    calls = launches.lazy().with_row_index("launch").select("launch", *keys)
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
        launches.lazy()
        .with_row_index("launch")
        .filter(known & pl.col("kind").is_in(_LAUNCHING))
        .select("launch", "external_id", place=place, count=count)
    )
    keyed = work.lazy().select("external_id", place=place, count=count)
    keys = ["external_id", "place", "count"]
    return keyed.join(calls, on=keys, how="left", maintain_order="left").collect()["launch"]


_BY_NAME = " by name"
_LINKING = {"operators": ("sequence_number",), "launches": ("correlation",), "device_work": ("correlation",)}
"""Columns used to link rows; a file may lack them."""
_FRAME_COLUMNS = {"file": pl.String, "line": pl.Int32, "function": pl.String, "module": pl.String}


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
        self._own_steps = not event_names.are_steps_marked(strings)
        self._steps = steps
        self.window = window

    def write(self, lanes: Sequence[Mapping[str, Any]]) -> None:
        """Write all tables; raise UsageError if the requested steps do not exist."""
        annotations = self._take("annotations")
        if self._steps is not None:
            self.window = self._window_of_steps(annotations, self._steps)
        self._write_table("annotations", self._inside(annotations), self._describe_annotations)
        self._write_table("synchronisations", self._inside(self._take("synchronisations")))
        self._write_table("counters", self._inside(self._take("counters")))
        self._write_table("memory", self._inside(self._take("memory")))
        self._write_table("frames", self._inside(self._take("frames")), self._describe_frames)
        for table in ("lines", "modules"):
            self._write_table(table, self._inside(self._take(table)))
        self._write_launches_and_work()
        if lanes:
            self._writer.write_part("lanes", conform("lanes", pl.DataFrame(lanes, infer_schema_length=None)))

    def _take(self, table: str) -> pl.DataFrame:
        """Take a table's rows in their final order, with times relative to the start of the trace."""
        frame = self._spill.take(table)
        if frame is None:
            return pl.DataFrame()
        absent = [name for name in _LINKING.get(table, ()) if name not in frame.columns]
        frame = frame.with_columns(pl.lit(None, pl.Int64).alias(name) for name in absent)
        frame = frame.with_columns(pl.col("start_ns") - self._origin_ns)
        early = int((frame["start_ns"] < 0).sum())
        if early:  # instants and flows may precede the first slice
            self._damage["instant_before_start"] += early
            frame = frame.with_columns(pl.col("start_ns").clip(lower_bound=0))
        return frame if rows_are_sorted(frame) else in_order(frame)

    def _inside(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame.filter(self._is_inside(frame)) if self.window and frame.width else frame

    def _is_inside(self, frame: pl.DataFrame) -> pl.Expr:
        if self.window is None:
            return pl.lit(True)
        end = pl.col("start_ns") + (pl.col("duration_ns") if "duration_ns" in frame.columns else 0)
        return (pl.col("start_ns") < self.window.end_ns) & (
            (end > self.window.start_ns) | (pl.col("start_ns") >= self.window.start_ns)
        )

    def _window_of_steps(self, annotations: pl.DataFrame, steps: StepRange) -> Window:
        if annotations.width:
            described = self._describe_annotations(annotations).filter(
                (self._strings.gather(annotations["kind"]) == "host") & pl.col("step").is_not_null()
            )
            chosen = described.filter(pl.col("step").is_between(steps.first, steps.last))
            if chosen.height:
                end = (chosen["start_ns"] + chosen["duration_ns"]).max()
                return Window(int(chosen["start_ns"].min()), int(end))  # type: ignore[arg-type]
            if described.height:
                numbers = described["step"].to_list()
                have = f"it has steps {min(numbers)} to {max(numbers)}"
                raise UsageError(f"no step of the trace is in the requested range: {have}")
        raise NoStepMarksError("the trace has no step annotations to choose steps by: use a window of time instead")

    def _write_table(
        self, table: str, frame: pl.DataFrame, describe: Callable[[pl.DataFrame], pl.DataFrame] | None = None
    ) -> None:
        text_columns = [name for name, dtype in SCHEMAS[table].items() if dtype is pl.String]
        if frame.width and table in ("operators", "frames") and "parent" not in frame.columns:
            frame = frame.with_columns(parent=parent_rows(frame))
        for first in range(0, frame.height, PART_ROWS):
            part = frame.slice(first, PART_ROWS)
            if describe is not None:
                part = describe(part)
            coded = [name for name in text_columns if name in part.columns and part.schema[name] == pl.UInt32]
            part = part.with_columns([self._strings.gather(part[name]).alias(name) for name in coded])
            self._writer.write_part(table, self._named(table, conform(table, part)))

    def _named(self, table: str, part: pl.DataFrame) -> pl.DataFrame:
        fillings = {"name": "unnamed", **({"device": "unknown"} if table == "device_work" else {})}
        missing = [name for name in fillings if name in part.columns and part[name].null_count()]
        return part.with_columns(pl.col(name).fill_null(fillings[name]) for name in missing) if missing else part

    def _describe_annotations(self, part: pl.DataFrame) -> pl.DataFrame:
        own = self._own_steps
        return self._by_name(part, {"step": pl.Int64}, lambda name: (event_names.step_number(name, own=own),))

    def _describe_frames(self, part: pl.DataFrame) -> pl.DataFrame:
        return self._by_name(part, _FRAME_COLUMNS, event_names.frame)

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

    def _write_launches_and_work(self) -> None:
        flows = self._take("flows")
        operators = self._write_operators(flows)
        launches = self._with_launch_kind(self._take("launches"))
        work = self._take("device_work")
        if self.window and work.width:
            launched_inside = (
                self._inside(launches)["correlation"].drop_nulls() if launches.width else pl.Series([], dtype=pl.Int64)
            )
            work = work.filter(self._is_inside(work) | pl.col("correlation").is_in(launched_inside.implode()))
            if launches.width:
                of_work = work["correlation"].drop_nulls().implode()
                launches = launches.filter(self._is_inside(launches) | pl.col("correlation").is_in(of_work))
        else:
            launches = self._inside(launches)
        if operators.width and launches.width:
            launches = launches.with_columns(operator=operator_rows(launches, operators))
        del operators
        if work.width and launches.width:
            work = work.with_columns(launch=launch_rows(work, launches, flows))
            before = work["start_ns"] < launches["start_ns"].gather(work["launch"])
            self._damage["work_before_launch"] += int(before.sum() or 0)
        self._write_table("launches", launches)
        self._write_table("device_work", work)

    def _write_operators(self, flows: pl.DataFrame) -> pl.DataFrame:
        """Write operators and their links, and return the columns needed to place launches."""
        operators = self._inside(self._take("operators"))
        if not operators.width:
            return operators
        operators = operators.with_columns(parent=parent_rows(operators))
        self._write_table("operators", operators)
        operators = operators.select("lane", "start_ns", "duration_ns", "parent", "sequence_number")
        self._write_forward_backward(flows, operators)
        return operators

    def _with_launch_kind(self, launches: pl.DataFrame) -> pl.DataFrame:
        if not launches.width:
            return launches
        return self._by_name(launches, {"kind": pl.String}, lambda name: (event_names.launch_kind(name),))

    def _write_forward_backward(self, flows: pl.DataFrame, operators: pl.DataFrame) -> None:
        if not flows.width or not operators.width:
            return
        forward_backward = self._codes_of(event_names.FORWARD_BACKWARD_FLOWS)
        ends = flows.filter(pl.col("category").is_in(forward_backward)).drop("category")
        ends = ends.with_columns(end=self._strings.gather(ends["end"]))
        starting = operators.with_row_index("row").select("row", "lane", "start_ns", "sequence_number")
        starting = starting.filter(pl.col("start_ns").is_in(ends["start_ns"].implode()))
        rows = ends.join(starting, on=["lane", "start_ns"], how="inner")
        pairs = rows.filter(pl.col("end") == "source").join(
            rows.filter(pl.col("end") == "target"), on="flow", suffix="_target"
        )
        same = pl.col("sequence_number").eq_missing(pl.col("sequence_number_target"))
        pairs = pairs.sort(same, "row", "row_target", descending=[True, True, True]).unique("flow", keep="first")
        lost = ends.filter(pl.col("end") == "source")["flow"].n_unique() - pairs.height
        if lost > 0 and self.window is None:
            self._damage["unmatched_forward_backward"] += lost
        links = pairs.select(kind=pl.lit("forward_backward"), source="row", target="row_target").sort(
            "source", "target"
        )
        self._write_table("links", links)

    def _codes_of(self, words: Iterable[str]) -> list[int]:
        return (
            self._strings.to_frame("word")
            .with_row_index("code")
            .filter(pl.col("word").is_in(list(words)))["code"]
            .to_list()
        )
