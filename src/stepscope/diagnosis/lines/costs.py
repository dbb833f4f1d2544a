"""Where the steps' time goes, line by line: the device's time, or without a device the main thread's.

A visit is one stay of a thread at a line, including the calls made there, and knows the line that called it. Counts of
visits also show which loops of the user's source ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.attribution import SourcePlace
from stepscope.analysis.host import TABLES
from stepscope.analysis.idle import clipped
from stepscope.analysis.module_paths import PHASES
from stepscope.diagnosis.finding import Location
from stepscope.diagnosis.view import View, once
from stepscope.trace.nesting import Rows, at
from stepscope.trace.program_facts import FunctionFacts, LoopFacts
from stepscope.trace.window import Times
from stepscope.whatif import Change
from stepscope.whatif.changes import fewer_works, joined, scaled_host_time, together


@dataclass
class _Open:
    """A running function, with the visit of its current line."""

    function: int
    visit: int


class Visits:
    """The visits of one thread to lines, in order.

    When a thread returns to the line at which it left a function, that visit continues. Functions that were open
    before the first line are unknown: code that does not begin at a function's first seen line returns to one of them.
    Each row of a one-line function is a visit, because a return to it looks like a call.

    Args:
        lines: rows of `lines` of one thread in order; columns file, function, line, start_ns, duration_ns.

    Attributes:
        rows: the row that began each visit.
        parents: each visit's calling visit, -1 if unknown.
    """

    def __init__(self, lines: pl.DataFrame) -> None:
        self._lines = lines
        self._starts = lines["start_ns"].to_numpy()
        self._ends = self._starts + lines["duration_ns"].to_numpy()
        self._rows: list[int] = []
        self._parents: list[int] = []
        self._last: list[int] = []  # the last row of each visit or of what it called
        self._follow()
        self.rows: Rows = np.array(self._rows, np.int64)
        self.parents: Rows = np.array(self._parents, np.int64)

    @cached_property
    def starts(self) -> Times:
        starts: Times = self._starts[self.rows]
        return starts

    @cached_property
    def ends(self) -> Times:
        """When the thread left each visit."""
        ends: Times = self._ends[np.array(self._last, np.int64)]
        return ends

    def place(self, visit: int) -> tuple[str, int, str]:
        row = self._lines.row(int(self.rows[visit]), named=True)
        return row["file"], row["line"], row["function"]

    def at(self, time_ns: int) -> int:
        """The innermost visit at a time, -1 before the first."""
        row = int(np.searchsorted(self._starts, time_ns, side="right")) - 1
        return self._visit_of_row[row] if row >= 0 else -1

    def holds(self, visit: int, times: Times) -> bool:
        """Whether a visit contains one of these sorted times."""
        first = int(np.searchsorted(times, self.starts[visit]))
        return first < len(times) and bool(times[first] < self.ends[visit])

    def outermost(self, visit: int, without: Times) -> int:
        """The outermost visit around this one (or itself) that contains none of these sorted times.

        Stops where two one-line functions seem to call each other: one of them only continues after its call.
        """
        while (parent := int(self.parents[visit])) >= 0 and not self.holds(parent, without):
            if self._is_same_function(visit, int(self.parents[parent])):
                break
            visit = parent
        return visit

    def _is_same_function(self, visit: int, other: int) -> bool:
        return other >= 0 and self.place(visit)[::2] == self.place(other)[::2]

    def _follow(self) -> None:
        codes = self._lines.select("line", code=pl.struct("file", "function").rank("dense"))
        codes = codes.with_columns(first=pl.col("line").min().over("code"), last=pl.col("line").max().over("code"))
        self._visit_of_row: list[int] = []
        running: list[_Open] = []
        left_at: dict[int, int] = {}
        for row, (line, function, first, last) in enumerate(codes.select("line", "code", "first", "last").iter_rows()):
            names = [each.function for each in running]
            if function in names[:-1] and first < last and left_at.get(function) == line:
                self._close(running, names.index(function) + 1, row)
            elif names and function == names[-1]:
                self._begin(row, running[:-1])
                self._close(running, len(running) - 1, row)
                running.append(_Open(function, len(self._rows) - 1))
            elif names and line != first:
                self._close(running, 0, row)
                self._begin(row, [])
                running.append(_Open(function, len(self._rows) - 1))
            else:
                self._begin(row, running)
                running.append(_Open(function, len(self._rows) - 1))
            left_at[function] = line
            self._visit_of_row.append(running[-1].visit)
        self._close(running, 0, self._lines.height)

    def _begin(self, row: int, around: list[_Open]) -> None:
        self._rows.append(row)
        self._parents.append(around[-1].visit if around else -1)
        self._last.append(row)

    def _close(self, running: list[_Open], kept: int, row: int) -> None:
        for each in running[kept:]:
            self._last[each.visit] = row - 1
        del running[kept:]


@once
def main_visits(view: View) -> Visits:
    """The main thread's visits to lines in the span."""
    return Visits(view.begin_in_span(view.trace.lines.filter(pl.col("lane") == pl.lit(view.lane, pl.Int32))))


_AS_OFTEN: Final = 0.2
"""Largest relative difference between a loop's repetitions and the visits of its body's line."""


class SourceLoops:
    """The source loops that the view's program ran."""

    def __init__(self, view: View) -> None:
        self._loops: dict[str, list[LoopFacts]] = {}
        for loop in (each for each in view.program.loops if not each.is_comprehension):
            self._loops.setdefault(loop.file, []).append(loop)
        lines = view.trace.lines
        self._lines = lines.filter(pl.col("lane") == view.lane) if self._loops else lines.clear()
        self._starts = self._lines["start_ns"].to_numpy()
        self._latest = np.maximum.accumulate(self._starts + self._lines["duration_ns"].to_numpy())

    def between(self, begin_ns: int, end_ns: int, repetitions: int) -> list[tuple[LoopFacts, int]]:
        """Innermost source loops whose body ran this often in this time, the shortest first.

        Each comes with how often it was entered: between its first repetition and its last, its head is reached before
        every repetition but the first, and once more at the end of every turn but the last of a loop around it.
        """
        if not self._loops:
            return []
        first = np.searchsorted(self._latest, begin_ns, side="right")
        last = np.searchsorted(self._starts, end_ns)
        mine = self._lines[first:last].filter(pl.col("start_ns") + pl.col("duration_ns") > begin_ns)
        mine = mine[Visits(mine).rows]
        counts = {(file, line): count for file, line, count in mine.group_by("file", "line").len().iter_rows()}
        found: dict[LoopFacts, int] = {}
        for (file, line), count in counts.items():
            loops = self._loops.get(file, ())
            around = [each for each in loops if each.first <= line <= each.last]
            is_head = any(each.line == line < each.first for each in loops)
            if not around or is_head or abs(count - repetitions) > max(_AS_OFTEN * repetitions, 1):
                continue
            innermost = min(around, key=lambda each: each.last - each.first)
            heads = counts.get((file, innermost.line), 0)
            found[innermost] = max(heads - repetitions + 2, 1)
        return sorted(found.items(), key=lambda each: each[0].last - each[0].first)


def carried_by(loops: Iterable[tuple[LoopFacts, int]]) -> tuple[str, ...]:
    """Names that carry results between repetitions, in the innermost loop that has any."""
    return next((loop.carried for loop, _ in loops if loop.carried), ())


_COSTS: Final[dict[str, type[pl.DataType]]] = {
    "place": pl.Int64,  # index into the attribution's places, -1 for none
    "phase": pl.Int64,  # index into PHASES
    "lane": pl.Int32,
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "in_operator": pl.Boolean,
}

SHOWN: Final = 0.05
"""Smallest share of the steps that makes a line costly."""
MOST_SHOWN: Final = 6
_HALF: Final = 0.5


@dataclass(frozen=True, slots=True)
class LineCost:
    """One line's part of the steps' time.

    Attributes:
        number: index into the attribution's places.
        ns, backward_ns: time over the span: all, and in its operators' backward.
        runs: how often a step runs the line; None where lines were not recorded.
    """

    number: int
    place: SourcePlace
    ns: int
    backward_ns: int
    runs: float | None

    @property
    def in_most_steps(self) -> bool:
        """Whether at least half of the steps run the line, as far as is known."""
        return self.runs is None or self.runs >= _OFTEN


_OFTEN: Final = 0.5
"""Fewest runs per step that make a line part of each step."""


@dataclass(frozen=True, slots=True)
class LineShare:
    """A costly line that no finding explains; information, not a fault.

    Attributes:
        share: share of the step on its critical path, 0 to 1.
        backward_share: part of the line's time spent in its operators' backward, 0 to 1.
        runs: how often a step runs the line; None if unknown.
        faster_share: share of the step that would be saved if the line took half the time, by a replay; 0 without one.
    """

    file: str
    line: int
    function: str
    share: float
    backward_share: float
    runs: float | None
    faster_share: float


class LineCosts:
    """The cost of each line of the user's code in a view's span."""

    def __init__(self, view: View) -> None:
        self.view = view

    @cached_property
    def pieces(self) -> pl.DataFrame:
        """The time that counts, by line; columns as in _COSTS."""
        view = self.view
        placed = self.placed(view.pieces)
        if view.device is None:
            return placed
        work = view.work
        rows = work["row"].cast(pl.Int64).to_numpy()
        busy = clipped(work.select("start_ns", "duration_ns").with_row_index("number"), view.window)
        rows = rows[busy["number"].to_numpy()]
        computing = pl.DataFrame(
            {
                "place": view.attribution.work_place[rows],
                "phase": view.attribution.work_phase[rows].astype(np.int64),
                "lane": np.full(len(rows), -1, np.int32),
                "start_ns": busy["start_ns"],
                "duration_ns": busy["duration_ns"],
                "in_operator": np.ones(len(rows), np.bool_),
            },
            schema=dict(_COSTS),
        )
        return pl.concat([placed, computing])

    @cached_property
    def host(self) -> pl.DataFrame:
        """The main thread's time in the span, by line; columns as in _COSTS."""
        return self.pieces if self.view.device is None else self.placed(self.view.host_pieces)

    @cached_property
    def lines(self) -> list[LineCost]:
        """The lines of the user's code, costliest first."""
        ns = pl.col("duration_ns")
        backward = pl.col("phase") == PHASES.index("backward")
        sums = (
            self.pieces.filter(pl.col("place") >= 0)
            .group_by("place")
            .agg(ns.sum().alias("ns"), ns.filter(backward).sum().alias("backward"))
            .sort(["ns", "place"], descending=[True, False])
        )
        places = self.view.attribution.places
        return [
            LineCost(number, places[number], ns, backward, self.runs.get(number))
            for number, ns, backward in sums.iter_rows()
        ]

    @cached_property
    def runs(self) -> dict[int, float]:
        """How often a step runs each line, by number, from the main thread's recorded lines."""
        lines = self.view.trace.lines.with_columns(place=pl.Series(self.view.attribution.line_place, dtype=pl.Int64))
        mine = self.view.begin_in_span(lines.filter(pl.col("lane") == pl.lit(self.view.lane, pl.Int32)))
        counts = mine[main_visits(self.view).rows].filter(pl.col("place") >= 0).group_by("place").len()
        return {place: count / self.view.step_count for place, count in counts.iter_rows()}

    def locations(self, numbers: Rows, top: int = 3) -> tuple[Location, ...]:
        """These lines, the costliest first, each with its share of their cost."""
        wanted = set(numbers.tolist())
        mine = [line for line in self.lines if line.number in wanted][:top]
        total = max(sum(line.ns for line in self.lines if line.number in wanted), 1)
        return tuple(
            Location(line.place.file, line.place.line, line.place.function, line.ns / total, line.place.exact_line)
            for line in mine
        )

    def scaled(self, numbers: Rows, factor: float) -> Change:
        """The change that scales these lines' host time and the number of their device works."""
        host = self.host.filter(pl.col("place").is_in(pl.Series(numbers, dtype=pl.Int64).implode()))
        starts = host["start_ns"].to_numpy()
        times = joined(host["lane"].to_numpy(), starts, starts + host["duration_ns"].to_numpy())
        works = np.flatnonzero(np.isin(self.view.attribution.work_place, numbers))
        return together(scaled_host_time(*times, factor), fewer_works(works, factor))

    def placed(self, pieces: pl.DataFrame) -> pl.DataFrame:
        """Pieces of host time by the line of their operator, or else by the thread's current line."""
        attribution, activity = self.view.attribution, self.view.activity
        slices = pieces["slice"].to_numpy()
        in_operator = at(activity.table, slices) >= TABLES.index("operators")
        phase = np.where(slices >= 0, at(attribution.phase, slices), PHASES.index("other"))
        table = pieces.select(
            pl.Series("place", at(attribution.place, slices), dtype=pl.Int64),
            pl.Series("phase", phase, dtype=pl.Int64),
            pl.col("lane").cast(pl.Int32),
            "start_ns",
            "duration_ns",
            pl.Series("in_operator", in_operator, dtype=pl.Boolean),
        )
        parts = [table.filter("in_operator"), table.filter(pl.col("lane").is_null() & ~pl.col("in_operator"))]
        for (lane,), mine in table.filter(~pl.col("in_operator")).drop_nulls("lane").group_by("lane"):
            timeline = activity.line_timelines.get(int(str(lane)))
            if timeline is None:
                parts.append(mine)
                continue
            starts = mine["start_ns"].to_numpy()
            piece, begin, end, rows = timeline.cut(starts, starts + mine["duration_ns"].to_numpy())
            line = at(attribution.line_place, rows)
            cut = mine[piece].with_columns(
                place=pl.when(pl.Series(line >= 0)).then(pl.Series(line)).otherwise("place"),
                start_ns=pl.Series(begin),
                duration_ns=pl.Series(end - begin),
            )
            parts.append(cut)
        return pl.concat([part.cast(_COSTS) for part in parts])  # type: ignore[arg-type]


def lines_that_call(view: View, *functions: str) -> set[tuple[str, int]]:
    """Files and lines whose statements call a function or method of these names, as far as their source is known."""
    return {
        (each.file, line)
        for each in view.program.operations
        for line, names in enumerate(each.names, 1)
        if not set(functions).isdisjoint(names.split())
    }


@once
def line_costs(view: View) -> LineCosts:
    """The cost of each line, computed once for all rules."""
    return LineCosts(view)


def unexplained(view: View, explained: Mapping[tuple[str, int], int]) -> list[LineShare]:
    """Lines that take at least SHOWN of the steps and that findings explain by less than half.

    Args:
        explained: nanoseconds over the span that findings save, by file and line.
    """
    result = []
    for line, share in view.earlier.value("costly lines", lambda: _costly(view)):
        place = line.place
        if explained.get((place.file, place.line), 0) >= _HALF * line.ns:
            continue
        faster = view.earlier.value(("half of a line", line.number), partial(_faster, view, line.number))
        backward = line.backward_ns / max(line.ns, 1)
        result.append(LineShare(place.file, place.line, place.function, share, backward, line.runs, faster))
    return result


def _costly(view: View) -> list[tuple[LineCost, float]]:
    shares = [(line, view.share(line.ns)) for line in line_costs(view).lines[:MOST_SHOWN]]
    return [(line, share) for line, share in shares if share >= SHOWN]


def _faster(view: View, number: int) -> float:
    """The share of the step that is saved if a line takes half its time, by a replay; 0 without one."""
    if view.experiment.why_not is not None:
        return 0.0
    return view.saved_ns(line_costs(view).scaled(np.array([number], np.int64), _HALF)) / view.step_ns


_BUILTIN: Final = frozenset(
    {"append", "dict", "enumerate", "extend", "float", "get", "int", "items", "len", "list", "range", "str", "super",
     "tuple", "zip", "add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "neg", "floor_divide", "remainder"}
)  # fmt: skip
"""Names in statements that say nothing about where the time goes."""


def calls_at(view: View, place: Location) -> tuple[str, ...]:
    """Names of the functions that the statement at a place calls, in order, as far as its source is known."""
    found = (each.names[place.line - 1].split() for each in view.program.operations
             if each.file == place.file and 0 < place.line <= len(each.names))  # fmt: skip
    return tuple(dict.fromkeys(name for names in found for name in names if name not in _BUILTIN and "=" not in name))


def settings_at(view: View, *functions: str, without: str = "") -> tuple[Location, ...]:
    """Where the user's code calls a function or class of these names, which is the line to change for its settings.

    Known for files of which a line ran in the steps.

    Args:
        without: an option ("fused=True") of statements that are left out.
    """
    lines = sorted(lines_that_call(view, *functions) - (lines_that_call(view, without) if without else set()))
    first = [(file, line) for file, line in lines if (file, line - 1) not in lines]  # of a statement over several lines
    around = [function_at(view.program.functions, line) for line in first]
    return tuple(
        Location(*line, function.name if function is not None else "<module>", 1.0, exact_line=True)
        for line, function in zip(first, around, strict=True)
    )


def function_at(functions: Iterable[FunctionFacts], line: tuple[str, int]) -> FunctionFacts | None:
    """The innermost of these functions of the source around a file's line."""
    around = [each for each in functions if each.file == line[0] and each.line <= line[1] <= each.last]
    return max(around, key=lambda each: each.line, default=None)


def lines_at(view: View, intervals: pl.DataFrame) -> tuple[Location, ...]:
    """The main thread's lines when these intervals began, weighted by length."""
    timeline = view.activity.line_timelines.get(-1 if view.lane is None else view.lane)
    if timeline is None:
        return ()
    place = at(view.attribution.line_place, timeline.at(intervals["start_ns"].to_numpy()))
    ns = intervals["duration_ns"].to_numpy().astype(np.float64)
    totals, total = np.bincount(place[place >= 0], ns[place >= 0]), max(float(ns.sum()), 1.0)
    order = np.argsort(-totals, kind="stable")[:3]
    return tuple(
        Location(place.file, place.line, place.function, float(ns / total), exact_line=True)
        for place, ns in ((view.attribution.places[number], totals[number]) for number in order.tolist())
        if ns > 0
    )
