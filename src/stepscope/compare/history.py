"""The step time of runs of the same program over time, and where it changed.

Places are proposed by optimal partitioning (Jackson et al. 2005) of the logarithms of the runs'
mean step times: different means before and after a place must explain more of the squared deviations than
`PENALTY` x noise^2 x ln(runs), where the noise is taken from the differences of neighbouring runs. A proposed place
becomes a change only where the runs before and after it (up to the next change) differ by `compare_samples`, with the
confidence `CONFIDENCE`: the place was chosen by looking at the same data, so more is asked than of a comparison that
was planned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.compare.statistics import SampleComparison, compare_samples, warm_up

Source: TypeAlias = Literal["unprofiled", "profiled"]
SOURCES: Final[tuple[Source, ...]] = ("unprofiled", "profiled")
"""Where step times come from, the better first: steps without a profiler, steps in traces."""

PENALTY: Final = 4.0
CONFIDENCE: Final = 0.99
FEWEST_RUNS: Final = 4
"""Runs of which a change can be told: two before and two after."""
_FEWEST_A_SIDE: Final = 2
_SMALLEST_NOISE: Final = 1e-4
_PROPOSED: Final = 50
"""Places that are looked at, those that explain most."""
_RESAMPLES: Final = 999
_NORMAL_MEDIAN: Final = 0.6745

Numbers: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TimedRun:
    """A run as its folder tells of it.

    Attributes:
        name: of the run.
        series: name of the series it belongs to.
        place: the folder it ran in; "" where it is not known.
        started_unix_s: wall-clock time.
        steps_ns: by source, the nanoseconds of its consecutive steps, the first ones among them.
        settings: what it ran with and on, by name.
        problem: why it has no step times; None where it has.
    """

    name: str
    series: str
    place: str
    started_unix_s: float
    steps_ns: Mapping[Source, Sequence[float]]
    settings: Mapping[str, str]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class PlacedRun:
    """A run of a series.

    Attributes:
        step_ns: its mean step after the warm-up, in nanoseconds.
        low_ns, high_ns: the mean's interval; None with fewer than two steps.
        steps: how many were counted.
        dropped: how many steps of the warm-up were not.
    """

    name: str
    started_unix_s: float
    step_ns: float
    low_ns: float | None
    high_ns: float | None
    steps: int
    dropped: int
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Change:
    """A place where the step time changed.

    Attributes:
        position: of the first run after it in the series.
        comparison: of the runs since the change before and those up to the change after; confidence CONFIDENCE.
        differences: settings of the last run before and the first one after that are not the same: name, before, after.
    """

    position: int
    comparison: SampleComparison
    differences: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A run that is not in a series, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class RunSeries:
    """Runs of the same program, the earliest first.

    Attributes:
        name, place: of the series.
        source: where all its step times come from.
        runs: at least one.
        changes: in order of time.
        doubtful: places that looked like a change, and were not shown to be one.
        smallest_detectable: the smallest change in the middle of the series that these runs could have shown, as a
            share; None where there are too few, or where a change was shown.
        latest: the latest run beside those since the last change, where they differ; one run is not yet a change.
        left_out: runs of the series without such step times.
    """

    name: str
    place: str
    source: Source
    runs: tuple[PlacedRun, ...]
    changes: tuple[Change, ...]
    doubtful: int
    smallest_detectable: float | None
    latest: SampleComparison | None
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True)
class History:
    """Every series, the one with the latest run first, and the runs that belong to none."""

    series: tuple[RunSeries, ...]
    left_out: tuple[LeftOut, ...]


def run_history(runs: Sequence[TimedRun], source: Source | None = None, *, last: int = 0) -> History:
    """The series of these runs, and where their step time changed.

    Args:
        runs: in any order.
        source: where step times are to come from; None for the one that most runs of a series have, of equals the
            better. Times of different sources are never mixed in a series.
        last: only so many runs of a series, the latest with step times; 0 for all.
    """
    groups: defaultdict[tuple[str, str], list[TimedRun]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run.started_unix_s, run.name)):
        groups[run.series, run.place].append(run)
    series, left_out = [], []
    for group in groups.values():
        chosen = source or _best_source(group)
        group = _latest_runs(group, chosen, last)
        of_group = [LeftOut(run.name, _why_not(run, chosen)) for run in group if not run.steps_ns.get(chosen)]
        counted = [run for run in group if run.steps_ns.get(chosen)]
        if counted:
            series.append(_series(counted, chosen, of_group))
        else:
            left_out += of_group
    series.sort(key=lambda each: (-each.runs[-1].started_unix_s, each.name))
    return History(tuple(series), tuple(left_out))


def _latest_runs(runs: list[TimedRun], source: Source, last: int) -> list[TimedRun]:
    counted = [position for position, run in enumerate(runs) if run.steps_ns.get(source)]
    return runs[counted[-last] :] if 0 < last < len(counted) else runs


def _best_source(runs: Sequence[TimedRun]) -> Source:
    return max(SOURCES, key=lambda source: sum(bool(run.steps_ns.get(source)) for run in runs))


def _why_not(run: TimedRun, source: Source) -> str:
    if run.problem is not None:
        return run.problem
    if source == "unprofiled":
        return "it has only steps that were slowed down by the profiler; --steps profiled shows those of all runs"
    return "no step of it was recorded with the profiler"


def _series(runs: Sequence[TimedRun], source: Source, left_out: Sequence[LeftOut]) -> RunSeries:
    placed, steady = zip(*(_placed(run, source) for run in runs), strict=True)
    changes, doubtful = _changes(placed, steady)
    since = steady[changes[-1].position if changes else 0 :]
    return RunSeries(
        name=runs[0].series,
        place=runs[0].place,
        source=source,
        runs=placed,
        changes=changes,
        doubtful=doubtful,
        smallest_detectable=None if changes else _smallest_detectable(steady),
        latest=_latest(since),
        left_out=tuple(left_out),
    )


def _placed(run: TimedRun, source: Source) -> tuple[PlacedRun, Sequence[float]]:
    """The run in its series, and its steady steps."""
    steps = run.steps_ns[source]
    dropped = warm_up(steps).dropped if source == "unprofiled" else 0  # recordings begin when the program is warm
    steady = steps[dropped:]
    # Beside itself: the interval of its own mean.
    alone = compare_samples([steady], [], resamples=0)
    placed = PlacedRun(
        name=run.name,
        started_unix_s=run.started_unix_s,
        step_ns=float(np.mean(steady)),
        low_ns=alone.before_low_ns,
        high_ns=alone.before_high_ns,
        steps=len(steady),
        dropped=dropped,
        settings=run.settings,
    )
    return placed, steady


def _changes(runs: Sequence[PlacedRun], steady: Sequence[Sequence[float]]) -> tuple[tuple[Change, ...], int]:
    """The changes that the runs beside them show, and how many more places were proposed.

    The least certain place is dropped first, since its runs then belong to its neighbours.
    """
    places = proposed = _proposed_places([run.step_ns for run in runs])
    known: dict[tuple[int, int, int], SampleComparison] = {}

    def compared(before: int, place: int, after: int) -> SampleComparison:
        key = (before, place, after)
        if key not in known:
            known[key] = _compare(steady[before:place], steady[place:after])
        return known[key]

    while places:
        found = _between(places, len(runs), compared)
        unsure = [place for place in places if found[place].verdict == "no difference shown"]
        if not unsure:
            return tuple(Change(place, found[place], _differences(runs, place)) for place in places), len(
                proposed
            ) - len(places)
        weakest = min(unsure, key=lambda place: abs(found[place].change or 0.0))
        places = [place for place in places if place != weakest]
    return (), len(proposed)


def _between(
    places: Sequence[int], count: int, compared: Callable[[int, int, int], SampleComparison]
) -> dict[int, SampleComparison]:
    bounds = [0, *places, count]
    return {place: compared(bounds[at], place, bounds[at + 2]) for at, place in enumerate(places)}


def _proposed_places(means_ns: Sequence[float]) -> list[int]:
    """Where different means explain the runs best: positions of the first run after each place."""
    if len(means_ns) < FEWEST_RUNS:
        return []
    signal = np.log(np.maximum(np.asarray(means_ns, np.float64), 1.0))
    noise = max(_noise(signal), _SMALLEST_NOISE)
    penalty = PENALTY * noise**2 * np.log(len(signal))
    places = best_places(signal, penalty)
    return places if len(places) <= _PROPOSED else best_places(signal, 0.0, parts=_PROPOSED + 1)


def best_places(signal: Numbers, penalty: float, parts: int | None = None) -> list[int]:
    """Where to part a signal so that squared deviations from each part's mean, plus a penalty a part, are least.

    Optimal partitioning (Jackson et al. 2005): the best parting of the first n values follows from those of fewer.

    Args:
        parts: exactly how many; None for as many as pay.

    Returns:
        The first position after each place, in order; no part is shorter than two values.
    """
    count = len(signal)
    centred = signal - signal.mean()
    sums, squares = (np.concatenate([[0.0], np.cumsum(values)]) for values in (centred, centred**2))
    rows = 1 if parts is None else parts + 1  # with a given number, row k is of k parts
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


def _noise(signal: Numbers) -> float:
    """How much neighbouring runs differ by chance: a standard deviation that a few changes do not move."""
    return float(np.median(np.abs(np.diff(signal)))) / _NORMAL_MEDIAN / 2**0.5


def _compare(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> SampleComparison:
    return compare_samples(before, after, confidence=CONFIDENCE, resamples=_RESAMPLES)


def _smallest_detectable(steady: Sequence[Sequence[float]]) -> float | None:
    if len(steady) < FEWEST_RUNS:
        return None
    half = len(steady) // 2
    return _compare(steady[:half], steady[half:]).smallest_detectable


def _latest(steady: Sequence[Sequence[float]]) -> SampleComparison | None:
    """The last of these runs beside the others, where it differs from them."""
    if len(steady) < FEWEST_RUNS:
        return None
    found = _compare(steady[:-1], steady[-1:])
    return None if found.verdict == "no difference shown" else found


def _differences(runs: Sequence[PlacedRun], place: int) -> tuple[tuple[str, str, str], ...]:
    """What `run.json` holds that the last run before and the first one after do not share."""
    before, after = runs[place - 1].settings, runs[place].settings
    found = []
    for name in dict.fromkeys([*before, *after]):
        values = before.get(name, ""), after.get(name, "")
        if values[0] != values[1]:
            found.append((name, *(_different_words(*values) if name == "command" else values)))
    return tuple(found)


def _different_words(before: str, after: str) -> tuple[str, str]:
    """Two command lines without the words at their beginning and end that are the same."""
    first, second = before.split(), after.split()
    least = min(len(first), len(second))
    head = next((at for at in range(least) if first[at] != second[at]), least)
    tail = next((at for at in range(least - head) if first[-1 - at] != second[-1 - at]), least - head)
    if head + tail == 0 or not (first and second):
        return before, after
    marks = "... " if head else "", " ..." if tail else ""
    # One word more at the left, most often the option whose value differs.
    parts = [" ".join(words[max(head - 1, 0) : len(words) - tail]) for words in (first, second)]
    return f"{marks[0]}{parts[0]}{marks[1]}", f"{marks[0]}{parts[1]}{marks[1]}"


HISTORY_SCHEMA: Final[dict[str, type[pl.DataType] | pl.DataType]] = {
    "run": pl.String,
    "started": pl.String,  # wall clock, UTC
    "step_ns": pl.Float64,  # mean of the steps after the warm-up
    "low_ns": pl.Float64,  # the mean's interval
    "high_ns": pl.Float64,
    "steps": pl.Int64,
    "change_share": pl.Float64,  # where a change lies: of the runs from here on against those before
    "git_commit": pl.String,
    "device": pl.String,
    "series": pl.String,
    "place": pl.String,  # the folder it ran in
    "source": pl.String,  # "unprofiled" or "profiled"
    "change_low_share": pl.Float64,
    "change_high_share": pl.Float64,
    "differs": pl.List(pl.String),  # settings that changed with it
    "left_out": pl.String,  # why it is not in the series
}


def history_table(history: History) -> pl.DataFrame:
    """Columns as in HISTORY_SCHEMA; series by series, the earliest run first."""
    rows = [row for series in history.series for row in _rows(series)]
    rows += [_left_out(each) for each in history.left_out]
    return pl.DataFrame(rows, schema=HISTORY_SCHEMA, orient="row")


def series_table(series: RunSeries) -> pl.DataFrame:
    """The runs of one series; columns as in HISTORY_SCHEMA."""
    return pl.DataFrame(list(_rows(series)), schema=HISTORY_SCHEMA, orient="row")


def moment(unix_s: float) -> str:
    """A wall-clock time, such as "2026-01-02 12:00:30 UTC"; empty where it is none that a calendar knows."""
    try:
        return f"{datetime.fromtimestamp(unix_s, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, OSError, ValueError):
        return ""


def difference_words(name: str, before: str, after: str) -> str:
    """A setting that differs, such as "version of torch: 2.12.0 -> 2.13.0"."""
    return f"{name}: {before or 'not there'} -> {after or 'not there'}"


def _rows(series: RunSeries) -> Iterator[dict[str, Any]]:
    changes = {change.position: change for change in series.changes}
    for position, run in enumerate(series.runs):
        yield {
            "run": run.name,
            "started": moment(run.started_unix_s),
            "step_ns": run.step_ns,
            "low_ns": run.low_ns,
            "high_ns": run.high_ns,
            "steps": run.steps,
            "git_commit": run.settings.get("git commit"),
            "device": run.settings.get("device"),
            "series": series.name,
            "place": series.place,
            "source": series.source,
            **_change(changes.get(position)),
        }
    for each in series.left_out:
        yield {**_left_out(each), "series": series.name, "place": series.place}


def _change(change: Change | None) -> dict[str, Any]:
    if change is None:
        return {}
    return {
        "change_share": change.comparison.change,
        "change_low_share": change.comparison.change_low,
        "change_high_share": change.comparison.change_high,
        "differs": [difference_words(*each) for each in change.differences],
    }


def _left_out(run: LeftOut) -> dict[str, Any]:
    return {"run": run.name, "left_out": run.why}
