"""Join the source lines recorded beside a trace to the trace's operators.

A forward operator gets the line its thread was at when it began. A backward operator gets the line of the forward
operator that made its autograd node, found by their common sequence number and the thread of the forward call. If
Python code of the user ran inside the node, it gets that code's line instead.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import polars as pl

from stepscope.errors import UnreadableTraceError
from stepscope.trace.line_records import MODULE_LEFT, LineRecords, ThreadLines, lines_path, read_lines
from stepscope.trace.metadata import Metadata, TraceWarning
from stepscope.trace.model import StoreWriter
from stepscope.trace.naming import module_pattern
from stepscope.trace.nesting import Rows, inherit
from stepscope.trace.program_facts import ProgramFacts
from stepscope.trace.tables import conform, empty
from stepscope.trace.window import Window


def module_table(
    records: LineRecords, lane_of: dict[str, int], origin_ns: int, period: tuple[int, int], read: Window | None
) -> pl.DataFrame:
    """Return the table `modules`, cut to `read`, the part of the trace that was read.

    Args:
        origin_ns: wall clock at time 0 of the trace.
        period: start and end of the recording of calls; open calls end there.
    """
    begin, end = max(period[0], 0), max(period[1], 0)
    if read is not None:
        begin, end = max(begin, read.start_ns), min(end, read.end_ns)
    parts = [empty("modules")]
    for thread in records.threads:
        lane = lane_of.get(str(thread.thread))
        if lane is None or not thread.module_times:
            continue
        modules, starts, ends = _calls(thread, origin_ns, end)
        starts, ends = np.clip(starts, begin, end), np.clip(ends, begin, end)
        kept = (modules >= 0) & (modules < len(records.modules)) & (ends > starts)
        names = pl.Series(records.modules, dtype=pl.String).gather(modules[kept])
        columns = {
            "start_ns": starts[kept],
            "duration_ns": (ends - starts)[kept],
            "name": names,
            "evaluates": np.isin(modules[kept], records.evaluating),
        }
        parts.append(conform("modules", pl.DataFrame(columns).with_columns(lane=pl.lit(lane))))
    return pl.concat(parts).sort("start_ns", "duration_ns", descending=[False, True], maintain_order=True)


def _calls(thread: ThreadLines, origin_ns: int, end_ns: int) -> tuple[Rows, Rows, Rows]:
    times = np.frombuffer(thread.module_times, "<i8").astype(np.int64) - origin_ns
    noted = np.frombuffer(thread.modules, "<i4").astype(np.int64)
    ends = np.full(len(times), end_ns, np.int64)
    is_open: list[int] = []
    for position, module in enumerate(noted.tolist()):
        if module != MODULE_LEFT:
            is_open.append(position)
        elif is_open:
            ends[is_open.pop()] = times[position]
    began = noted != MODULE_LEFT
    return noted[began], times[began], ends[began]


_KEYS: Final = ("lane", "start_ns", "name", "parent", "sequence_number", "forward_thread")
_COMPILED: Final = r"^Torch-Compiled Region|^## Call CompiledFxGraph|^CompiledFunction"
_ENGINE: Final = "autograd::engine::"
_COMPILED_WARNING: Final = (
    "operators of compiled code have the line that called it: the compiler does not keep each operator's line"
)
_COST_WARNING: Final = (
    "the steps run so much Python code that recording its lines took about {:.0%} of the time: "
    "record without lines (lines=False, --no-lines) to see how long they take"
)
_NOTE_NS: Final = 300
"""Approximate cost of recording one line, measured by benchmarks/line_tracking.py."""
_NOTEWORTHY_SHARE: Final = 0.05
_NOWHERE: Final = -1
_DEEPEST: Final = 8
_NEVER: Final = np.iinfo(np.int64).min


def variant_of(path: str | Path) -> str:
    """Return a cache key for the lines beside a trace file, since they change what is read; "" without lines."""
    place = lines_path(path)
    try:
        return (
            hashlib.sha256(place.read_bytes()).hexdigest() if place.is_file() else ""
        )  # a named pipe would block forever
    except OSError:
        return ""


def join_lines(path: str | Path, writer: StoreWriter, metadata: Metadata) -> tuple[Metadata, tuple[TraceWarning, ...]]:
    """Add the lines beside the trace file, if any, to the operators in `writer`; return metadata and warnings."""
    if str(path) == "-" or not lines_path(path).is_file():
        return metadata, ()
    try:
        records = read_lines(lines_path(path))
    except UnreadableTraceError as error:
        return metadata, (TraceWarning("damaged_lines", 1, f"source lines were left out: {error}"),)
    return _joined(records, writer, metadata)


def _joined(records: LineRecords, writer: StoreWriter, metadata: Metadata) -> tuple[Metadata, tuple[TraceWarning, ...]]:
    warnings = [TraceWarning("lines", 1, records.problem)] if records.problem else []
    origin_ns = metadata.origin_unix_ns
    if origin_ns is None:
        unknown = "source lines were left out: the trace does not say when it was recorded"
        return metadata, (*warnings, TraceWarning("lines", 1, unknown))
    operators = writer.scan("operators").select(_KEYS).collect()
    lane_of = _lanes_of_threads(records, writer.scan("lanes").collect())
    notes = _notes_by_lane(records, lane_of, origin_ns)
    period = (records.start_unix_ns - origin_ns, records.end_unix_ns - origin_ns)
    cost = _NOTE_NS * sum(len(thread.times) // 8 for thread in records.threads) / max(1, period[1] - period[0])
    if cost > _NOTEWORTHY_SHARE:
        warnings.append(TraceWarning("lines_cost", 1, _COST_WARNING.format(min(cost, 1.0))))
    modules = module_table(records, lane_of, origin_ns, period, metadata.window)
    if modules.height:
        writer.write_part("modules", modules)
        metadata = _with_functions(metadata, records)
    found = _Join(operators, writer.scan("links").collect(), notes, period).locations()
    if (found >= 0).any():
        writer.change("operators", lambda part, first: part.with_columns(_columns(records, found, first, part.height)))
    if (found >= 0).any() or any((noted.locations >= 0).any() for noted in notes.values()):
        metadata = replace(metadata, recorded=(*(metadata.recorded or ()), "lines"))
        writer.write_part("lines", _line_table(records, notes, period, metadata))
        compiled = operators.filter(pl.col("name").str.contains(_COMPILED)).height
        if compiled:
            warnings.append(TraceWarning("compiled_lines", compiled, _COMPILED_WARNING))
    return metadata, tuple(warnings)


def _with_functions(metadata: Metadata, records: LineRecords) -> Metadata:
    known = zip(records.modules, records.module_functions, strict=False)
    functions = {module_pattern(name): function for name, function in known if function}
    if not functions:
        return metadata
    program = metadata.program or ProgramFacts()
    return replace(metadata, program=msgspec.structs.replace(program, module_functions=functions))


def _line_table(
    records: LineRecords, notes: dict[int, _Notes], period: tuple[int, int], metadata: Metadata
) -> pl.DataFrame:
    """Build the table `lines`: a line lasts until the thread's next one; equal successive lines are merged."""
    begin, end = max(period[0], 0), max(period[1], 0)
    if metadata.window is not None:
        begin, end = max(begin, metadata.window.start_ns), min(end, metadata.window.end_ns)
    parts = [empty("lines")]
    for lane, noted in notes.items():
        changes = np.flatnonzero(np.diff(noted.locations, prepend=_NOWHERE - 1))
        starts, places = noted.times[changes], noted.locations[changes]
        ends = np.clip(np.append(starts[1:], end), begin, end)
        starts = np.clip(starts, begin, end)
        kept = (places >= 0) & (ends > starts)
        frame = pl.DataFrame({"start_ns": starts, "duration_ns": ends - starts, "lane": np.full(len(starts), lane)})
        located = _columns(records, places, 0, len(places))
        frame = frame.with_columns(column.alias(column.name.removeprefix("source_")) for column in located)
        parts.append(conform("lines", frame.filter(pl.Series(kept))))
    whole = pl.concat(parts).sort("start_ns", "lane", maintain_order=True)
    return whole.with_columns(name=pl.format("{}({}): {}", "file", "line", "function"))


def _columns(records: LineRecords, found: Rows, first: int, count: int) -> list[pl.Series]:
    locations = pl.DataFrame(
        [(place.file, place.line, place.function) for place in records.locations],
        schema={"source_file": pl.String, "source_line": pl.Int32, "source_function": pl.String},
        orient="row",
    )
    rows = pl.Series(found[first : first + count])
    chosen = pl.select(pl.when(rows >= 0).then(rows).cast(pl.UInt32)).to_series()
    return [locations[name].gather(chosen).alias(name) for name in locations.columns]


@dataclass(frozen=True, slots=True)
class _Notes:
    """Where one thread was: at `locations[i]` from `times[i]` on. Shapes (n,)."""

    times: Rows
    locations: Rows

    def last_before(self, times: Rows) -> Rows:
        """Index of the last note at or before each time, -1 if none."""
        return np.searchsorted(self.times, times, side="right") - 1

    def location_at(self, times: Rows) -> Rows:
        """Location of the thread at each time, -1 if unknown or outside the user's code."""
        last = self.last_before(times)
        return np.where(last >= 0, self.locations[np.maximum(last, 0)], _NOWHERE)


def _lanes_of_threads(records: LineRecords, lanes: pl.DataFrame) -> dict[str, int]:
    threads = lanes.filter((pl.col("kind") == "host_thread") & (pl.col("process") == str(records.process)))
    return dict(zip(threads["thread"].to_list(), threads["lane"].to_list(), strict=True))


def _notes_by_lane(records: LineRecords, lane_of: dict[str, int], origin_ns: int) -> dict[int, _Notes]:
    parts: dict[int, list[_Notes]] = {}
    for thread in records.threads:
        lane = lane_of.get(str(thread.thread))
        if lane is not None and thread.times:
            times = np.frombuffer(thread.times, "<i8").astype(np.int64) - origin_ns
            locations = np.frombuffer(thread.locations, "<i4").astype(np.int64)
            known = (locations >= 0) & (locations < len(records.locations))
            parts.setdefault(lane, []).append(_Notes(times, np.where(known, locations, _NOWHERE)))
    return {lane: _merged(found) for lane, found in parts.items()}


def _merged(parts: list[_Notes]) -> _Notes:
    """Notes of threads that had the same number at different times, ordered by time."""
    times = np.concatenate([part.times for part in parts])
    order = np.argsort(times, kind="stable")
    return _Notes(times[order], np.concatenate([part.locations for part in parts])[order])


class _Join:
    """Finds the location of each operator.

    Args:
        operators: the columns _KEYS of all operators.
        period: start and end of the recording of lines; operators outside get no location.
    """

    def __init__(
        self, operators: pl.DataFrame, links: pl.DataFrame, notes: dict[int, _Notes], period: tuple[int, int]
    ) -> None:
        self._links = links
        self._notes = notes
        self._names = operators["name"]
        self._lane = operators["lane"].to_numpy()
        self._start = operators["start_ns"].to_numpy()
        self._parent = operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
        self._sequence = operators["sequence_number"].fill_null(-1).to_numpy()
        self._forward_thread = operators["forward_thread"].fill_null(0).to_numpy()
        self._is_inside = (self._start >= period[0]) & (self._start < period[1])

    def locations(self) -> Rows:
        """Index of each operator's location, -1 for none; shape (n,)."""
        own, since = self._where_the_thread_was()
        is_backward = (self._forward_thread > 0) & (self._sequence >= 0)
        rows = np.arange(len(self._lane))
        node = inherit(np.where(is_backward, rows, -1), self._parent)
        inside = np.flatnonzero(node >= 0)
        if not inside.size:
            return np.where(self._is_inside, self._or_of_the_caller(own), _NOWHERE)
        before = own[node[inside]]  # location of the thread when the node began
        in_users_code = (since[inside] >= self._start[node[inside]]) & (own[inside] != before) & (own[inside] >= 0)
        result = self._or_of_the_caller(own)
        by_forward = inside[~in_users_code]
        forward = self._forward_of()[node[by_forward]]
        # Nodes can be nested, as when a checkpoint recomputes its forward pass, and then need several passes.
        known = forward >= 0
        for _ in range(_DEEPEST):
            fresh = np.where(known, result[np.maximum(forward, 0)], result[by_forward])
            if (fresh == result[by_forward]).all():
                break
            result[by_forward] = fresh
        return np.where(self._is_inside, result, _NOWHERE)

    def _where_the_thread_was(self) -> tuple[Rows, Rows]:
        """Location of each operator's thread when it began, and the time the thread arrived there."""
        own = np.full(len(self._lane), _NOWHERE, np.int64)
        since = np.full(len(self._lane), _NEVER, np.int64)
        for lane, notes in self._notes.items():
            mine = np.flatnonzero(self._lane == lane)
            last = notes.last_before(self._start[mine])
            mine, last = mine[last >= 0], last[last >= 0]
            own[mine], since[mine] = notes.locations[last], notes.times[last]
        return own, since

    def _or_of_the_caller(self, own: Rows) -> Rows:
        """`own`, or the caller's line on the autograd engine's threads, which run none of the user's code."""
        engine = self._names.str.starts_with(_ENGINE).to_numpy()
        rows = np.arange(len(own))
        missing = np.flatnonzero((own < 0) & (inherit(np.where(engine, rows, -1), self._parent) >= 0))
        if not missing.size or not self._notes:
            return own
        busiest = max(self._notes, key=lambda lane: len(self._notes[lane].times))
        result: Rows = own.copy()
        result[missing] = self._notes[busiest].location_at(self._start[missing])
        return result

    def _forward_of(self) -> Rows:
        """For each backward operator, the row of the forward operator that made its node, -1 if unknown.

        If several forward operators have the node's sequence number, the last to begin made it, since the number is
        assigned when the node is made.
        """
        is_forward = (self._forward_thread == 0) & (self._sequence >= 0)
        is_backward = (self._forward_thread > 0) & (self._sequence >= 0)
        rows = pl.DataFrame(
            {"row": np.arange(len(self._lane)), "sequence": self._sequence, "start": self._start, "lane": self._lane}
        )
        made = rows.filter(pl.Series(is_forward)).sort("start", "row").unique(["lane", "sequence"], keep="last")
        asked = rows.with_columns(thread=pl.Series(self._forward_thread)).filter(pl.Series(is_backward))
        asked = asked.drop("lane").join(self._lanes_of_forward_threads(), on="thread", how="left")
        found = asked.join(made.select("lane", "sequence", forward="row"), on=["lane", "sequence"], how="inner")
        result = np.full(len(self._lane), -1, np.int64)
        result[found["row"].to_numpy()] = found["forward"].to_numpy()
        return result

    def _lanes_of_forward_threads(self) -> pl.DataFrame:
        """Columns thread, the profiler's thread number as in `forward_thread`, and lane."""
        ends = pl.DataFrame({"thread": self._forward_thread, "lane": self._lane})
        pairs = pl.DataFrame(
            {"thread": ends["thread"].gather(self._links["target"]), "lane": ends["lane"].gather(self._links["source"])}
        ).filter(pl.col("thread") > 0)
        linked = pairs.group_by("thread", "lane").len().sort("len", "lane", descending=[True, False])
        linked = linked.unique("thread", keep="first").select("thread", "lane")
        making = ends.filter(pl.Series((self._forward_thread == 0) & (self._sequence >= 0)))["lane"].unique()
        others = ends["thread"].unique()
        others = others.filter((others > 0) & ~others.is_in(linked["thread"].implode()))
        if len(making) == 1:  # only this thread can have made the nodes
            more = pl.DataFrame(
                {"thread": others, "lane": pl.repeat(making[0], len(others), dtype=pl.Int32, eager=True)}
            )
            linked = pl.concat([linked, more])
        return linked


NAME: Final = "Garbage collection"
CALLED_NAME: Final = "Garbage collection (gc.collect)"


def join_pauses(writer: StoreWriter, metadata: Metadata) -> None:
    """Add the garbage collection pauses to the annotations in `writer`, each on the thread that it stopped."""
    pauses = _pauses(writer, metadata)
    if pauses.is_empty() or _are_there(writer):  # an exported trace already has them
        return
    rows = writer.scan("annotations").select(pl.len()).collect().item()
    if not rows:
        writer.write_part("annotations", pauses)
        return

    def merged(part: pl.DataFrame, first: int) -> pl.DataFrame:
        nonlocal pauses
        until = None if first + part.height >= rows or part.is_empty() else part["start_ns"][-1]
        mine = pauses if until is None else pauses.filter(pl.col("start_ns") < until)
        pauses = pauses.slice(mine.height)
        return pl.concat([part, mine]).sort("start_ns", maintain_order=True)

    writer.change("annotations", merged)


def _are_there(writer: StoreWriter) -> bool:
    named = writer.scan("annotations").filter(pl.col("name").is_in([NAME, CALLED_NAME]))
    return not named.head(1).collect().is_empty()


def _pauses(writer: StoreWriter, metadata: Metadata) -> pl.DataFrame:
    """Rows of `annotations` ordered by time, without those of threads that the trace lacks."""
    origin_ns = metadata.origin_unix_ns
    found = metadata.program.pauses if metadata.program is not None else ()
    if origin_ns is None or not found:
        return conform("annotations", pl.DataFrame())
    lanes = writer.scan("lanes").filter(pl.col("kind") == "host_thread").select("thread", "lane").collect()
    times = [(pause.start_unix_ns - origin_ns, pause.duration_ns) for pause in found]
    rows = pl.DataFrame(
        [
            (str(pause.thread), start, duration, CALLED_NAME if pause.called else NAME)
            for pause, (start, duration) in zip(found, times, strict=True)
            if 0 <= start < 2**62 and 0 <= duration < 2**62
        ],
        schema={"thread": pl.String, "start_ns": pl.Int64, "duration_ns": pl.Int64, "name": pl.String},
        orient="row",
    )
    window = metadata.window
    if window is not None:
        inside = (pl.col("start_ns") < window.end_ns) & (pl.col("start_ns") + pl.col("duration_ns") > window.start_ns)
        rows = rows.filter(inside)
    rows = rows.join(lanes.unique("thread", keep="first", maintain_order=True), on="thread", how="inner")
    return conform("annotations", rows.with_columns(kind=pl.lit("host")).sort("start_ns"))
