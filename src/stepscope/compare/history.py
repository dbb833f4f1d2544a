"""Step times of a program's runs over time, and where they changed.

Places are proposed by optimal partitioning (Jackson et al. 2005) of the logarithms of the runs' mean step times:
different means before and after a place must explain more of the squared deviations than `PENALTY` x noise^2 x
ln(runs), with the noise estimated from the differences of neighbouring runs. A proposed place becomes a change only
where the runs before and after it (up to the next change) differ by `compare_samples` with the confidence `CONFIDENCE`,
which is high because the place was chosen from the same data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.compare.statistics import SampleComparison, compare_samples, warm_up

Source: TypeAlias = Literal["unprofiled", "profiled"]
SOURCES: Final[tuple[Source, ...]] = ("unprofiled", "profiled")
"""Sources of step times, best first: steps without a profiler, steps in traces."""

PENALTY: Final = 4.0
CONFIDENCE: Final = 0.99
FEWEST_RUNS: Final = 4  # runs needed to detect a change: two before and two after
_FEWEST_A_SIDE: Final = 2
_SMALLEST_NOISE: Final = 1e-4
_PROPOSED: Final = 50  # most change points to examine
_RESAMPLES: Final = 999
_NORMAL_MEDIAN: Final = 0.6745


@dataclass(frozen=True, slots=True)
class TimedRun:
    """A run as described by its folder.

    Attributes:
        steps_ns: nanoseconds of consecutive steps by source, including the first ones.
    """

    name: str
    series: str  # name of its series
    place: str  # folder that it ran in; "" where unknown
    started_unix_s: float  # wall-clock time
    steps_ns: Mapping[Source, Sequence[float]]
    settings: Mapping[str, str]  # software, hardware and options, by name
    problem: str | None = None  # why it has no step times; None if it has some


@dataclass(frozen=True, slots=True)
class PlacedRun:
    """A run as part of a series."""

    name: str
    started_unix_s: float
    step_ns: float  # mean step after the warm-up, nanoseconds
    low_ns: float | None
    high_ns: float | None  # low_ns, high_ns: interval of the mean; None with fewer than two steps
    steps: int
    dropped: int  # steps: counted steps; dropped: warm-up steps
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Change:
    """A point where the step time changed.

    Attributes:
        comparison: the runs since the previous change against those up to the next one; confidence CONFIDENCE.
        differences: settings that differ between the run before and the run after: name, before, after.
    """

    position: int  # index in the series of the first run after it
    comparison: SampleComparison
    differences: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class LeftOut:
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class RunSeries:
    """Runs of the same program, earliest first.

    Attributes:
        smallest_detectable: smallest change in the middle of the series that these runs could have shown, as a share;
            None with too few runs, or if a change was found.
        latest: the latest run compared with those since the last change, if they differ; a single run is not yet a
            change.
    """

    name: str
    place: str
    source: Source  # source of all its step times
    runs: tuple[PlacedRun, ...]  # at least one
    changes: tuple[Change, ...]  # in order of time
    doubtful: int  # change points that were proposed but not confirmed
    smallest_detectable: float | None
    latest: SampleComparison | None
    left_out: tuple[LeftOut, ...]  # runs without step times from this source


@dataclass(frozen=True, slots=True)
class History:
    """All series, the one with the latest run first, and runs that belong to none."""

    series: tuple[RunSeries, ...]
    left_out: tuple[LeftOut, ...]


def run_history(runs: Sequence[TimedRun], source: Source | None = None, *, last: int = 0) -> History:
    """Group runs into series, and find where their step time changed.

    Args:
        runs: in any order.
        source: source of step times; None for the one that most runs of a series have, the better on a tie. A series
            never mixes sources.
        last: use only this many latest runs with step times per series; 0 for all.
    """
    groups: defaultdict[tuple[str, str], list[TimedRun]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run.started_unix_s, run.name)):
        groups[run.series, run.place].append(run)
    series, left_out = [], []
    for group in groups.values():
        chosen = source or _best_source(group)
        with_times = [position for position, run in enumerate(group) if run.steps_ns.get(chosen)]
        if 0 < last < len(with_times):
            group = group[with_times[-last] :]
        of_group = [LeftOut(run.name, _why_not(run, chosen)) for run in group if not run.steps_ns.get(chosen)]
        if with_times:
            series.append(_series([run for run in group if run.steps_ns.get(chosen)], chosen, of_group))
        else:
            left_out += of_group
    series.sort(key=lambda each: (-each.runs[-1].started_unix_s, each.name))
    return History(tuple(series), tuple(left_out))


def _best_source(runs: Sequence[TimedRun]) -> Source:
    return max(SOURCES, key=lambda source: sum(bool(run.steps_ns.get(source)) for run in runs))


def _why_not(run: TimedRun, source: Source) -> str:
    if run.problem is not None:
        return run.problem
    if source == "unprofiled":
        return "it has only steps that the profiler slowed down; --steps profiled shows those of all runs"
    return "none of its steps was recorded with the profiler"


def _series(runs: Sequence[TimedRun], source: Source, left_out: Sequence[LeftOut]) -> RunSeries:
    placed, steady = zip(*(_placed(run, source) for run in runs), strict=True)
    changes, doubtful = _changes(placed, steady)
    since = steady[changes[-1].position if changes else 0 :]
    half = len(steady) // 2
    enough = len(steady) >= FEWEST_RUNS and not changes
    latest = _compare(since[:-1], since[-1:]) if len(since) >= FEWEST_RUNS else None
    return RunSeries(
        name=runs[0].series,
        place=runs[0].place,
        source=source,
        runs=placed,
        changes=changes,
        doubtful=doubtful,
        smallest_detectable=_compare(steady[:half], steady[half:]).smallest_detectable if enough else None,
        latest=latest if latest is not None and latest.is_shown else None,
        left_out=tuple(left_out),
    )


def _placed(run: TimedRun, source: Source) -> tuple[PlacedRun, Sequence[float]]:
    steps = run.steps_ns[source]
    dropped = warm_up(steps).dropped if source == "unprofiled" else 0  # recordings begin when the program is warm
    steady = steps[dropped:]
    interval = compare_samples([steady], [], resamples=0)
    low, high, mean = interval.before_low_ns, interval.before_high_ns, float(np.mean(steady))
    placed = PlacedRun(run.name, run.started_unix_s, mean, low, high, len(steady), dropped, run.settings)
    return placed, steady


def _compare(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> SampleComparison:
    return compare_samples(before, after, confidence=CONFIDENCE, resamples=_RESAMPLES)


def _changes(runs: Sequence[PlacedRun], steady: Sequence[Sequence[float]]) -> tuple[tuple[Change, ...], int]:
    """Proposed change points that the runs on both sides confirm, and the number not confirmed.

    The least certain point is dropped first, since its runs then belong to its neighbours.
    """

    @cache
    def compared(before: int, place: int, after: int) -> SampleComparison:
        return _compare(steady[before:place], steady[place:after])

    places = proposed = proposed_places([run.step_ns for run in runs])
    while True:
        bounds = [0, *places, len(runs)]
        found = {place: compared(bounds[at], place, bounds[at + 2]) for at, place in enumerate(places)}
        unsure = [place for place in places if not found[place].is_shown]
        if not unsure:
            changes = tuple(Change(place, found[place], _differences(runs, place)) for place in places)
            return changes, len(proposed) - len(places)
        weakest = min(unsure, key=lambda place: abs(found[place].change or 0.0))
        places = [place for place in places if place != weakest]


def proposed_places(means_ns: Sequence[float]) -> list[int]:
    """Best change points of the series: indices of the first run after each."""
    if len(means_ns) < FEWEST_RUNS:
        return []
    signal = np.log(np.maximum(np.asarray(means_ns, np.float64), 1.0))
    # Standard deviation from neighbouring runs, which a few changes do not affect.
    noise = max(float(np.median(np.abs(np.diff(signal)))) / _NORMAL_MEDIAN / 2**0.5, _SMALLEST_NOISE)
    places = best_places(signal, PENALTY * noise**2 * float(np.log(len(signal))))
    return places if len(places) <= _PROPOSED else best_places(signal, 0.0, parts=_PROPOSED + 1)


def best_places(signal: npt.NDArray[np.float64], penalty: float, parts: int | None = None) -> list[int]:
    """Cut a signal so that squared deviations from each part's mean, plus a penalty per part, are minimal.

    Optimal partitioning (Jackson et al. 2005): the best cuts of the first n values follow from those of fewer.

    Args:
        parts: exact number of parts; None for the optimal number.

    Returns:
        The first position after each cut, in order; no part is shorter than two values.
    """
    count = len(signal)
    centred = signal - signal.mean()
    sums, squares = (np.concatenate([[0.0], np.cumsum(values)]) for values in (centred, centred**2))
    rows = 1 if parts is None else parts + 1  # with a given number, row k is for k parts
    best = np.full((rows, count + 1), np.inf)
    best[0, 0] = 0.0
    sources = np.zeros((rows, count + 1), np.int64)
    for last in range(_FEWEST_A_SIDE, count + 1):
        first = np.arange(last - _FEWEST_A_SIDE + 1)
        cost = squares[last] - squares[first] - (sums[last] - sums[first]) ** 2 / (last - first) + penalty
        totals = best[:, first] + cost
        chosen = totals.argmin(axis=1)
        into = slice(None) if parts is None else slice(1, None)
        source = chosen if parts is None else chosen[:-1]
        sources[into, last] = source
        best[into, last] = totals[np.arange(len(source)), source]
    places, at, row = [], count, rows - 1
    while (at := int(sources[row, at])) > 0:
        places.append(at)
        row = max(row - 1, 0)
    return places[::-1]


def _differences(runs: Sequence[PlacedRun], place: int) -> tuple[tuple[str, str, str], ...]:
    before, after = runs[place - 1].settings, runs[place].settings
    values = {name: (before.get(name, ""), after.get(name, "")) for name in dict.fromkeys([*before, *after])}
    return tuple(
        (name, *(_different_words(old, new) if name == "command" else (old, new)))
        for name, (old, new) in values.items()
        if old != new
    )


def _different_words(before: str, after: str) -> tuple[str, str]:
    """Two command lines without their common words at the beginning and the end."""
    first, second = before.split(), after.split()
    least = min(len(first), len(second))
    head = next((at for at in range(least) if first[at] != second[at]), least)
    tail = next((at for at in range(least - head) if first[-1 - at] != second[-1 - at]), least - head)
    if head + tail == 0 or not (first and second):
        return before, after
    marks = "... " if head else "", " ..." if tail else ""
    # Keep one more word on the left, most often the option whose value differs.
    parts = [" ".join(words[max(head - 1, 0) : len(words) - tail]) for words in (first, second)]
    return f"{marks[0]}{parts[0]}{marks[1]}", f"{marks[0]}{parts[1]}{marks[1]}"


HISTORY_SCHEMA: Final[dict[str, type[pl.DataType] | pl.DataType]] = {
    "run": pl.String,
    "started": pl.String,  # wall clock, UTC
    "step_ns": pl.Float64,  # mean step after the warm-up
    "low_ns": pl.Float64,  # interval of the mean
    "high_ns": pl.Float64,
    "steps": pl.Int64,
    "change_share": pl.Float64,  # at a change: the runs from here on against those before
    "git_commit": pl.String,
    "device": pl.String,
    "series": pl.String,
    "place": pl.String,  # folder that it ran in
    "source": pl.String,  # "unprofiled" or "profiled"
    "change_low_share": pl.Float64,
    "change_high_share": pl.Float64,
    "differs": pl.List(pl.String),  # settings that changed with it
    "left_out": pl.String,  # why it is not in the series
}


def history_table(history: History) -> pl.DataFrame:
    """Columns as in HISTORY_SCHEMA; series by series, earliest run first."""
    rows = [row for series in history.series for row in _rows(series)]
    rows += [{"run": each.name, "left_out": each.why} for each in history.left_out]
    return pl.DataFrame(rows, schema=HISTORY_SCHEMA, orient="row")


def series_table(series: RunSeries) -> pl.DataFrame:
    """The runs of one series; columns as in HISTORY_SCHEMA."""
    return pl.DataFrame(list(_rows(series)), schema=HISTORY_SCHEMA, orient="row")


def moment(unix_s: float) -> str:
    """Format a wall-clock time, such as "2026-01-02 12:00:30 UTC"; empty for a time outside the calendar."""
    try:
        return f"{datetime.fromtimestamp(unix_s, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, OSError, ValueError):
        return ""


def difference_words(name: str, before: str, after: str) -> str:
    """Describe a setting that differs, such as "version of torch: 2.12.0 -> 2.13.0"."""
    return f"{name}: {before or 'absent'} -> {after or 'absent'}"


def _rows(series: RunSeries) -> Iterator[dict[str, Any]]:
    place = {"series": series.name, "place": series.place}
    changes = {change.position: change for change in series.changes}
    for position, run in enumerate(series.runs):
        row = {name: getattr(run, name) for name in ("step_ns", "low_ns", "high_ns", "steps")}
        row |= {"run": run.name, "started": moment(run.started_unix_s), "source": series.source, **place}
        row |= {"git_commit": run.settings.get("git commit"), "device": run.settings.get("device")}
        if (change := changes.get(position)) is not None:
            row |= {"change_share": change.comparison.change}
            row |= {
                "change_low_share": change.comparison.change_low,
                "change_high_share": change.comparison.change_high,
            }
            row |= {"differs": [difference_words(*each) for each in change.differences]}
        yield row
    for each in series.left_out:
        yield {"run": each.name, "left_out": each.why, **place}
