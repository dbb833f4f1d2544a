"""A window of a stored trace as a trace of its own, for which only the parts of tables that overlap it are read.

It has the rows that reading the file with the window gives: what overlaps it, device work launched in it, and the
launches of its device work. What rows refer to is that of the whole trace, as far as it is in the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import polars as pl

from stepscope.errors import NoStepMarksError, UsageError
from stepscope.trace.metadata import Metadata, TraceWarning
from stepscope.trace.model import Part, StoreWriter, Trace
from stepscope.trace.nesting import Nesting, Rows, nullable, row_numbers
from stepscope.trace.tables import SCHEMAS, empty
from stepscope.trace.window import StepRange, Window

_TIMES: Final = ("lane", "start_ns", "duration_ns")
_CUT_AT_THE_EDGES: Final = {"lines": ("start_ns", "lane"), "modules": ("start_ns", "duration_ns")}
"""Tables made of what was recorded beside the trace, and what they are sorted by."""
_BESIDE: Final = ("lanes", "links")
_BEFORE_LAUNCH: Final = "work_before_launch"
_OF_THE_WHOLE: Final = "unmatched_forward_backward"


def write_excerpt(
    trace: Trace, writer: StoreWriter, window: Window | None, steps: StepRange | None
) -> tuple[Metadata, tuple[TraceWarning, ...]]:
    """Write the tables of a window, or of steps; raise UsageError if the steps do not exist."""
    if steps is not None:
        window = window_of_steps(trace.scan("annotations").filter(pl.col("kind") == "host").collect(), steps)
    if window is None:
        raise ValueError("neither a window nor steps")
    early = _Excerpt(trace, writer, window).write()
    warnings = (replace(each, count=early) if each.kind == _BEFORE_LAUNCH else each for each in trace.warnings)
    kept = tuple(each for each in warnings if each.count and each.kind != _OF_THE_WHOLE)
    return replace(trace.metadata, window=window), kept


def window_of_steps(marks: pl.DataFrame, steps: StepRange) -> Window:
    """Return the window that spans these steps; raise UsageError if the trace has none of them.

    Args:
        marks: start_ns, duration_ns, step; null for what is no step.
    """
    marks = marks.filter(pl.col("step").is_not_null()) if marks.width else marks
    if not marks.height:
        raise NoStepMarksError("the trace has no step annotations to choose steps by: use a window of time instead")
    chosen = marks.filter(pl.col("step").is_between(steps.first, steps.last))
    if not chosen.height:
        numbers = marks["step"].to_list()
        have = f"it has steps {min(numbers)} to {max(numbers)}"
        raise UsageError(f"no step of the trace is in the requested range: {have}")
    ends = (chosen["start_ns"] + chosen["duration_ns"]).to_list()
    return Window(min(chosen["start_ns"].to_list()), max(ends))


_FEWEST_STEPS: Final = 3


def middle_of(trace: Trace, most_rows: int) -> tuple[Window, TraceWarning] | None:
    """Return the window of the steps in the middle that have about this many rows, and what is said of it.

    None if the whole trace has no more. Without step annotations it is the middle of the trace's time.
    """
    spans = [part.span for table in SCHEMAS if table not in _BESIDE for part in trace.parts(table)]
    rows = sum(span.rows for span in spans)
    if rows <= most_rows:
        return None
    marks = trace.annotations.filter((pl.col("kind") == "host") & pl.col("step").is_not_null())
    numbers = marks["step"].unique().sort()
    count = max(round(len(numbers) * most_rows / rows), _FEWEST_STEPS)
    if count >= len(numbers) > 0:
        return None
    if len(numbers):
        first = (len(numbers) - count) // 2
        window = window_of_steps(marks, StepRange(numbers[first], numbers[first + count - 1]))
        taken = f"steps {numbers[first]} to {numbers[first + count - 1]} of its {len(numbers):,}"
    else:
        start, end = min(span.first_ns for span in spans), max(max(span.end_ns, span.last_ns) for span in spans)
        left = round((end - start) * (1 - most_rows / rows) / 2)
        window = Window(start + left, end - left)
        taken = f"{window.duration_ns / 1e9:,.3g} of its {(end - start) / 1e9:,.3g} s"
    detail = f"the trace has {rows:,} rows: only {taken}, in the middle, were taken (--window 0: takes all)"
    return window, TraceWarning("middle_of_the_trace", 1, detail)


def is_inside(window: Window, columns: Sequence[str]) -> pl.Expr:
    """Whether a row of a table with these columns overlaps the window, or starts in it."""
    end = pl.col("start_ns") + (pl.col("duration_ns") if "duration_ns" in columns else 0)
    return (pl.col("start_ns") < window.end_ns) & ((end > window.start_ns) | (pl.col("start_ns") >= window.start_ns))


class _Excerpt:
    def __init__(self, trace: Trace, writer: StoreWriter, window: Window) -> None:
        self._trace = trace
        self._writer = writer
        self._window = window

    def write(self) -> int:
        """Write all tables, and return how many rows of device work start before their launch."""
        for table in ("annotations", "synchronisations", "counters", "memory"):
            self._copy(table)
        for table in _CUT_AT_THE_EDGES:
            self._copy_cut(table)
        frames = self._rows("frames", _TIMES)[1]
        self._copy("frames", parent=nullable(Nesting().add(*(frames[name].to_numpy() for name in _TIMES))))
        early = self._write_linked()
        lanes = self._trace.table("lanes")
        if lanes.height:
            self._writer.write_part("lanes", lanes)
        return early

    def _write_linked(self) -> int:
        launched = self._rows("launches", ("correlation",))[1]["correlation"].drop_nulls()
        work = self._rows("device_work", ("start_ns", "correlation", "launch"), launched)[1]
        worked = work["correlation"].drop_nulls()
        launch_rows, launches = self._rows("launches", _TIMES, worked)
        operator_rows, operators = self._rows("operators", _TIMES)
        nesting = Nesting()
        parents = nesting.add(*(operators[name].to_numpy() for name in _TIMES))
        around = nesting.innermost_at(launches["lane"].to_numpy(), launches["start_ns"].to_numpy())
        found = _places(launch_rows, row_numbers(work["launch"]))
        self._copy("operators", parent=nullable(parents))
        self._copy("launches", worked, operator=nullable(around))
        self._copy("device_work", launched, launch=nullable(found))
        self._write_links(operator_rows)
        known = found >= 0
        starts = work["start_ns"].to_numpy()[known]
        return int(np.count_nonzero(starts < launches["start_ns"].to_numpy()[found[known]]))

    def _write_links(self, operator_rows: Rows) -> None:
        links = self._trace.table("links")
        ends = [_places(operator_rows, row_numbers(links[name])) for name in ("source", "target")]
        links = links.with_columns(source=nullable(ends[0]), target=nullable(ends[1])).drop_nulls(["source", "target"])
        if links.height:
            self._writer.write_part("links", links)

    def _rows(self, table: str, columns: Sequence[str], numbers: pl.Series | None = None) -> tuple[Rows, pl.DataFrame]:
        """Return the numbers of the window's rows, and some of their columns."""
        needed = dict.fromkeys((*columns, "start_ns", "duration_ns", *(["correlation"] if numbers is not None else [])))
        places, frames = [np.zeros(0, np.int64)], [empty(table).select(columns)]
        for first, part in self._parts(table, numbers):
            frame = part.read(*needed)
            mask = frame.select(self._wanted(frame, numbers)).to_series()
            places.append(first + np.flatnonzero(mask.to_numpy()))
            frames.append(frame.filter(mask).select(columns))
        return np.concatenate(places), pl.concat(frames)

    def _copy(self, table: str, numbers: pl.Series | None = None, **columns: pl.Series) -> None:
        """Write the window's rows, with these columns in place of their own."""
        done = 0
        for _, part in self._parts(table, numbers):
            frame = part.read()
            frame = frame.filter(self._wanted(frame, numbers))
            own = [values.slice(done, frame.height).alias(name) for name, values in columns.items()]
            done += frame.height
            if frame.height:
                self._writer.write_part(table, frame.with_columns(own))

    def _copy_cut(self, table: str) -> None:
        """Write the window's rows without what lies outside of it."""
        parts = [part.read() for _, part in self._parts(table, None)]
        if not parts:
            return
        rows = pl.concat(parts)
        start = pl.col("start_ns").clip(self._window.start_ns, self._window.end_ns)
        end = (pl.col("start_ns") + pl.col("duration_ns")).clip(self._window.start_ns, self._window.end_ns)
        rows = rows.with_columns(start_ns=start, duration_ns=end - start).filter(pl.col("duration_ns") > 0)
        by = _CUT_AT_THE_EDGES[table]
        rows = rows.sort(by, descending=[name == "duration_ns" for name in by], maintain_order=True)
        if rows.height:
            self._writer.write_part(table, rows)

    def _parts(self, table: str, numbers: pl.Series | None) -> Iterator[tuple[int, Part]]:
        """Yield the parts that may have wanted rows, each with the number of its first row."""
        first = 0
        for part in self._trace.parts(table):
            span = part.span
            overlaps = span.first_ns < self._window.end_ns and self._window.start_ns <= max(span.end_ns, span.last_ns)
            if overlaps or (numbers is not None and _may_have(part, numbers)):
                yield first, part
            first += span.rows

    def _wanted(self, frame: pl.DataFrame, numbers: pl.Series | None) -> pl.Expr:
        inside = is_inside(self._window, frame.columns)
        return inside if numbers is None else inside | pl.col("correlation").is_in(numbers.implode())


def _may_have(part: Part, numbers: pl.Series) -> bool:
    """Whether rows of a part may have one of these correlation numbers."""
    least, most = part.span.correlations or (1, 0)
    return bool(numbers.is_between(least, most).any())


def _places(rows: Rows, wanted: Rows) -> Rows:
    """Return the places of row numbers in a sorted array, -1 for those that are not in it."""
    if not len(rows):
        return np.full(len(wanted), -1, np.int64)
    place = np.searchsorted(rows, wanted)
    place[place == len(rows)] = 0
    return np.where(rows[place] == wanted, place, -1)
