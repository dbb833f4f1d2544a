"""Where the steps' time goes, line by line: the device's time, or without a device the main thread's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.attribution import SourcePlace
from stepscope.analysis.host import TABLES
from stepscope.analysis.idle import clipped
from stepscope.analysis.module_paths import PHASES
from stepscope.analysis.rows import at
from stepscope.diagnosis.finding import Location
from stepscope.diagnosis.lines.visits import Visits
from stepscope.diagnosis.view import View
from stepscope.trace.nesting import Rows
from stepscope.whatif import Change
from stepscope.whatif.changes import fewer_works, joined, scaled_host_time, together

_COSTS: Final[dict[str, type[pl.DataType]]] = {
    "place": pl.Int64,  # index into the attribution's places, -1 for none
    "phase": pl.Int64,  # index into PHASES
    "lane": pl.Int32,
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "in_operator": pl.Boolean,
}

SHOWN: Final = 0.05
"""Share of the steps from which a line is costly."""
MOST_SHOWN: Final = 6
_HALF: Final = 0.5


@dataclass(frozen=True, slots=True)
class LineCost:
    """One line's part of the steps' time.

    Attributes:
        number: index into the attribution's places.
        ns, backward_ns, outside_ns: over the span; of the backward of its operators, and outside of operators.
        runs: how often a step comes to the line, None where lines were not recorded.
    """

    number: int
    place: SourcePlace
    ns: int
    backward_ns: int
    outside_ns: int
    runs: float | None


@dataclass(frozen=True, slots=True)
class LineShare:
    """A costly line that no finding explains; information, not a fault.

    Attributes:
        share: of the step on its critical path, 0 to 1.
        backward_share: part of the line's time that is the backward of its operators, 0 to 1.
        runs: how often a step comes to the line; None if unknown.
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
            .agg(ns.sum().alias("ns"), ns.filter(backward).sum().alias("backward"),
                 ns.filter(~pl.col("in_operator")).sum().alias("outside"))
            .sort(["ns", "place"], descending=[True, False])
        )  # fmt: skip
        places = self.view.attribution.places
        return [
            LineCost(number, places[number], ns, backward, outside, self.runs.get(number))
            for number, ns, backward, outside in sums.iter_rows()
        ]

    @cached_property
    def runs(self) -> dict[int, float]:
        """How often a step comes to each line, by number; the main thread's recorded lines count."""
        lines = self.view.trace.lines.with_columns(place=pl.Series(self.view.attribution.line_place, dtype=pl.Int64))
        mine = self.view.begin_in_span(lines.filter(pl.col("lane") == pl.lit(self.view.lane, pl.Int32)))
        counts = mine[Visits(mine).rows].filter(pl.col("place") >= 0).group_by("place").len()
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
        """The change that scales these lines' time on the host, and the number of their works on the device."""
        host = self.host.filter(pl.col("place").is_in(pl.Series(numbers, dtype=pl.Int64).implode()))
        starts = host["start_ns"].to_numpy()
        times = joined(host["lane"].to_numpy(), starts, starts + host["duration_ns"].to_numpy())
        works = np.flatnonzero(np.isin(self.view.attribution.work_place, numbers))
        return together(scaled_host_time(*times, factor), fewer_works(works, factor))

    def unexplained(self, explained: Mapping[tuple[str, int], int]) -> list[LineShare]:
        """The lines that take at least SHOWN of the steps and of which findings explain less than half.

        Args:
            explained: nanoseconds over the span that findings save, by file and line.
        """
        view, result = self.view, []
        for line in self.lines[:MOST_SHOWN]:
            place, share = line.place, view.share(line.ns)
            if share < SHOWN or explained.get((place.file, place.line), 0) >= _HALF * line.ns:
                continue
            faster = 0.0
            if view.experiment.why_not is None:
                faster = view.saved_ns(self.scaled(np.array([line.number], np.int64), _HALF)) / view.step_ns
            backward = line.backward_ns / max(line.ns, 1)
            result.append(LineShare(place.file, place.line, place.function, share, backward, line.runs, faster))
        return result

    def placed(self, pieces: pl.DataFrame) -> pl.DataFrame:
        """Pieces of host time by the line of their operator, or else by the line that the thread was at."""
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


def lines_at(view: View, intervals: pl.DataFrame) -> tuple[Location, ...]:
    """The lines of the main thread when these intervals began, weighted by their length."""
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
