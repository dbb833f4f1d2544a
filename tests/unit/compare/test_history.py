"""Step times of runs over time: what is a series, and what is a change."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from stepscope.compare import history
from stepscope.compare.history import HISTORY_SCHEMA, Source, TimedRun, history_table, moment, run_history

MS = 1e6


def timed(
    number: int,
    step_ms: float,
    *,
    series: str = "train",
    place: str = "/home/alice/project",
    steps: int = 12,
    settings: Mapping[str, str] | None = None,
    source: Source = "unprofiled",
) -> TimedRun:
    """A run whose steps are all but equal."""
    times = [(step_ms + 0.01 * (at % 3 - 1)) * MS for at in range(steps)]
    return TimedRun(f"{series}-{number}", series, place, float(number), {source: times}, settings or {})


def row(*steps_ms: float) -> list[TimedRun]:
    return [timed(number, step_ms) for number, step_ms in enumerate(steps_ms)]


def test_no_runs_make_no_series() -> None:
    history = run_history([])
    assert (history.series, history.left_out) == ((), ())
    assert history_table(history).schema == HISTORY_SCHEMA


def test_a_series_is_a_name_in_a_folder_and_the_latest_comes_first() -> None:
    runs = [timed(1, 10), timed(2, 10, series="eval"), timed(3, 10, place="/home/bob/project"), timed(0, 10)]
    found = [(each.name, each.place, [run.name for run in each.runs]) for each in run_history(runs).series]
    assert found == [
        ("train", "/home/bob/project", ["train-3"]),
        ("eval", "/home/alice/project", ["eval-2"]),
        ("train", "/home/alice/project", ["train-0", "train-1"]),
    ]


def test_three_runs_show_no_change_however_much_they_differ() -> None:
    (series,) = run_history(row(10, 10, 30)).series
    assert (series.changes, series.doubtful, series.smallest_detectable, series.latest) == ((), 0, None, None)


def test_a_step_up_is_a_change_with_what_differs_there() -> None:
    before = {"command": "python train.py --workers 4 --epochs 3", "git commit": "aaa", "version of torch": "2.12"}
    after = {"command": "python train.py --workers 0 --epochs 3", "git commit": "bbb", "version of torch": "2.12"}
    levels = [10.0, 10.1, 9.9, 10.0, 12.0, 12.1, 11.9, 12.0]
    runs = [timed(at, ms, settings=before if at < 4 else after) for at, ms in enumerate(levels)]
    (series,) = run_history(runs).series
    (change,) = series.changes
    assert (change.position, change.comparison.verdict) == (4, "slower")
    assert change.comparison.change == pytest.approx(0.2, abs=1e-4)
    assert (change.comparison.before_runs, change.comparison.after_runs) == (4, 4)
    assert change.differences == (
        ("command", "... --workers 4 ...", "... --workers 0 ..."),
        ("git commit", "aaa", "bbb"),
    )
    assert (series.doubtful, series.smallest_detectable) == (0, None)


def test_up_and_down_are_two_changes() -> None:
    (series,) = run_history(row(10, 10.1, 9.9, 13, 13.1, 12.9, 13, 10, 9.9, 10.1)).series
    assert [(each.position, each.comparison.verdict) for each in series.changes] == [(3, "slower"), (7, "faster")]


def test_settings_that_come_and_go_differ() -> None:
    runs = [
        timed(at, 10 if at < 3 else 20, settings={"variable OMP_NUM_THREADS": "1"} if at >= 3 else {"device": "cpu"})
        for at in range(6)
    ]
    (change,) = run_history(runs).series[0].changes
    assert change.differences == (("device", "cpu", ""), ("variable OMP_NUM_THREADS", "", "1"))


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ("python train.py", "python train.py --fast", ("... train.py", "... train.py --fast")),
        ("a b c", "x b c", ("a ...", "x ...")),
        ("a b", "c d", ("a b", "c d")),
        ("python a.py", "python b.py", ("... python a.py", "... python b.py")),
    ],
)
def test_of_two_commands_the_words_that_differ_are_shown(before: str, after: str, shown: tuple[str, str]) -> None:
    settings = [{"command": before}] * 3 + [{"command": after}] * 3
    runs = [timed(at, 10 if at < 3 else 20, settings=settings[at]) for at in range(6)]
    assert run_history(runs).series[0].changes[0].differences == (("command", *shown),)


def test_one_slow_run_at_the_end_is_told_and_is_no_change() -> None:
    (series,) = run_history(row(10, 10.1, 9.9, 10, 10.05, 15)).series
    assert series.changes == ()
    assert series.latest is not None
    assert (series.latest.verdict, series.latest.after_runs) == ("slower", 1)


def test_one_slow_run_in_the_middle_is_no_change() -> None:
    (series,) = run_history(row(10, 10.1, 9.9, 10, 15, 10, 10.05, 9.95, 10)).series
    assert (series.changes, series.latest) == ((), None)


def test_runs_that_are_all_the_same_show_how_little_they_could_have_shown() -> None:
    (series,) = run_history(row(*[10.0] * 8)).series
    assert series.changes == ()
    assert series.smallest_detectable is not None
    assert series.smallest_detectable < 0.01


def drawn(generator: random.Random, levels: Sequence[float]) -> list[TimedRun]:
    """Runs that differ by 3 % from each other, of steps that differ by 5 %."""
    runs = []
    for number, level in enumerate(levels):
        mean = level * math.exp(generator.gauss(0, 0.03))
        times = [MS * mean * math.exp(generator.gauss(0, 0.05)) for _ in range(30)]
        runs.append(TimedRun(f"r-{number}", "r", "", float(number), {"unprofiled": times}, {}))
    return runs


def test_how_often_chance_is_taken_for_a_change_and_a_change_is_found() -> None:
    generator = random.Random(7)
    of_chance = [run_history(drawn(generator, [10.0] * 12)).series[0].changes for _ in range(60)]
    of_change = [run_history(drawn(generator, [10.0] * 8 + [12.0] * 8)).series[0].changes for _ in range(20)]
    assert sum(bool(changes) for changes in of_chance) == 1
    assert sum([change.position for change in changes] == [8] for changes in of_change) == 20


def test_sources_are_not_mixed_and_what_lacks_the_chosen_one_is_listed() -> None:
    runs = [*row(10, 10), timed(2, 14, source="profiled")]
    (series,) = run_history(runs).series
    assert (series.source, [run.name for run in series.runs]) == ("unprofiled", ["train-0", "train-1"])
    assert [run.name for run in series.left_out] == ["train-2"]
    assert "--steps profiled" in series.left_out[0].why

    (series,) = run_history(runs, "profiled").series
    assert (series.source, [run.name for run in series.runs]) == ("profiled", ["train-2"])
    assert [run.name for run in series.left_out] == ["train-0", "train-1"]


def test_runs_without_times_belong_to_no_series() -> None:
    history = run_history([TimedRun("train-1", "train", "", 1.0, {}, {}, "its folder is gone")])
    assert history.series == ()
    assert [(run.name, run.why) for run in history.left_out] == [("train-1", "its folder is gone")]


def test_the_last_runs_are_those_with_times() -> None:
    runs = [*row(10, 11, 12), TimedRun("train-9", "train", "/home/alice/project", 9.0, {}, {}, "cut off")]
    (series,) = run_history(runs, last=2).series
    assert [run.name for run in series.runs] == ["train-1", "train-2"]
    assert [run.name for run in series.left_out] == ["train-9"]


def test_the_warm_up_does_not_count() -> None:
    steps = [90 * MS, 50 * MS, *[10 * MS] * 30]
    (series,) = run_history([TimedRun("a", "a", "", 0.0, {"unprofiled": steps}, {})]).series
    (run,) = series.runs
    assert (run.step_ns, run.steps, run.dropped) == (10 * MS, 29, 3)  # looked at three by three


def test_the_table_has_a_row_for_every_run() -> None:
    runs = [*row(10, 10, 10, 20, 20, 20), TimedRun("gone", "gone", "", 7.0, {}, {}, "its folder is gone")]
    table = history_table(run_history(runs))
    assert table.schema == HISTORY_SCHEMA
    assert table["run"].to_list() == ["train-0", "train-1", "train-2", "train-3", "train-4", "train-5", "gone"]
    assert [None if share is None else round(share, 3) for share in table["change_share"]] == [
        *(None, None, None, 1.0, None, None, None)
    ]
    assert table["left_out"].to_list() == [None] * 6 + ["its folder is gone"]


def test_moments_that_no_calendar_knows_are_empty() -> None:
    assert [moment(0.0), moment(1e300), moment(float("nan"))] == ["1970-01-01 00:00:00 UTC", "", ""]


@pytest.mark.parametrize("seed", range(6))
def test_places_are_those_that_cost_least_of_all(seed: int) -> None:
    signal = np.random.default_rng(seed).normal(0, 1, 9) + np.repeat([0.0, 2.0, -1.0], 3)

    def cost(places: tuple[int, ...], penalty: float) -> float:
        return sum(float(((part - part.mean()) ** 2).sum()) + penalty for part in np.split(signal, places))

    possible = [
        places
        for count in range(5)
        for places in itertools.combinations(range(2, 8), count)
        if all(after - before >= 2 for before, after in itertools.pairwise((0, *places, 9)))
    ]
    in_three = [places for places in possible if len(places) == 2]

    assert history.best_places(signal, 1.5) == list(min(possible, key=lambda places: cost(places, 1.5)))
    assert history.best_places(signal, 0.0, parts=3) == list(min(in_three, key=lambda places: cost(places, 0.0)))
