"""Comparing samples of step times: exact on small ones, and honest over many simulated programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from stepscope.compare import SampleComparison, compare_samples
from stepscope.compare.statistics import joint_confidence
from stepscope.compare.trace_record import far_edges

MS = 1_000_000


def steps(
    generator: np.random.Generator,
    count: int,
    *,
    mean: float = 100 * MS,
    spread: float = 0.03,
    correlation: float = 0.0,
    outliers: float = 0.0,
) -> npt.NDArray[np.float64]:
    """Step times of an autoregressive process, of which a share takes three times as long."""
    shocks = generator.normal(size=count + 30)
    values = np.zeros(count + 30)
    values[0] = shocks[0]
    for number in range(1, count + 30):
        values[number] = correlation * values[number - 1] + np.sqrt(1 - correlation**2) * shocks[number]
    longer = 1 + 2 * (generator.random(count) < outliers)
    return mean * (1 + spread * values[30:]) * longer


def verdicts(
    trials: int, sample: Callable[[np.random.Generator], list[object]], change: float = 1.0
) -> list[SampleComparison]:
    generator = np.random.default_rng(20)
    found = []
    for _ in range(trials):
        before = sample(generator)
        after = [np.asarray(run) * change for run in sample(generator)]
        found.append(compare_samples(before, after, resamples=199))  # type: ignore[arg-type]
    return found


def covered(found: list[SampleComparison], truth: float) -> float:
    return sum(
        each.change_low is not None and each.change_high is not None and each.change_low <= truth <= each.change_high
        for each in found
    ) / len(found)


def shown(found: list[SampleComparison]) -> float:
    return sum(each.is_shown for each in found) / len(found)


def test_nothing_at_all() -> None:
    found = compare_samples([], [])

    assert found == SampleComparison(
        None, None, None, None, None, None, None, None, None, "too few steps", None, 0, 0, 0, 0, 0.95,
        (
            "No step before: at least two are needed to show a difference.",
            "No step after: at least two are needed to show a difference.",
        ),
    )  # fmt: skip


def test_one_step_a_side_has_means_and_no_interval() -> None:
    found = compare_samples([[100.0]], [[150.0], []])

    assert (found.before_ns, found.after_ns, found.change) == (100.0, 150.0, 0.5)
    assert (found.change_low, found.change_high, found.smallest_detectable) == (None, None, None)
    assert (found.before_low_ns, found.after_high_ns) == (None, None)
    assert found.verdict == "too few steps"
    assert found.after_runs == 1
    assert found.caveats[:2] == (
        "Only one step before: at least two are needed to show a difference.",
        "Only one step after: at least two are needed to show a difference.",
    )


def test_steps_that_would_not_show_twice_as_long_are_too_few() -> None:
    wild = compare_samples([[100, 180, 60]], [[100, 60, 170]])
    more = compare_samples([[100, 180, 60] * 20], [[100, 60, 170] * 20])

    assert (wild.verdict, more.verdict) == ("too few steps", "no difference shown")
    assert wild.smallest_detectable is not None
    assert wild.smallest_detectable >= 1


def test_the_same_steps_show_no_difference() -> None:
    found = compare_samples([[100, 102, 98, 101, 99]], [[100, 102, 98, 101, 99]])

    assert found.verdict == "no difference shown"
    assert found.change == 0.0
    assert found.change_low is not None
    assert found.change_high is not None
    assert found.change_low < 0 < found.change_high


def test_a_machine_without_noise_shows_every_difference() -> None:
    found = compare_samples([[100, 100, 100]], [[101, 101, 101]])

    assert found.verdict == "slower"
    assert found.change == pytest.approx(0.01)
    assert (found.change_low, found.change_high) == (pytest.approx(0.01), pytest.approx(0.01))
    assert found.smallest_detectable == 0.0


@pytest.mark.parametrize(
    ("before", "after", "least", "is_slower"),
    [
        ([100, 100, 100], [110, 110, 110], 0.1, True),
        ([100, 100, 100], [110, 110, 110], 0.0, True),
        ([100, 100, 100], [110, 110, 110], 0.11, False),  # slower is shown, but by less
        ([100, 100, 100], [90, 90, 90], 0.0, False),
        ([100, 100, 100], [100, 100, 100], 0.0, False),
        ([100, 20, 180], [150, 60, 240], 0.1, False),  # half as long again, which may be chance
        ([100], [200], 0.1, False),
        ([0, 0], [1, 1], 0.1, False),
    ],
)
def test_slower_by_a_share(before: list[float], after: list[float], least: float, is_slower: bool) -> None:
    assert compare_samples([before], [after]).is_slower_by(least) is is_slower


def test_several_intervals_hold_together() -> None:
    assert joint_confidence(0.95, 1) == 0.95
    assert joint_confidence(0.95, 5) == pytest.approx(0.99)
    assert joint_confidence(0.95, 0) == 0.95


def test_steps_that_take_no_time_have_no_change() -> None:
    found = compare_samples([[0, 0, 0]], [[1, 1, 1]])

    assert (found.before_ns, found.change, found.verdict) == (0.0, None, "no difference shown")


@pytest.mark.parametrize("wrong", [[-1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_what_is_no_time_is_refused(wrong: list[float]) -> None:
    with pytest.raises(ValueError, match="finite number of nanoseconds"):
        compare_samples([wrong], [[1.0, 2.0]])


def test_a_confidence_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1, not 95"):
        compare_samples([[1.0, 2.0]], [[1.0, 2.0]], confidence=95)


def test_the_interval_of_few_runs_is_students() -> None:
    """Given runs whose steps all take the same time, only the runs' means tell."""
    before, after = [[98.0] * 4, [102.0] * 4], [[118.0] * 4, [122.0] * 4]

    found = compare_samples(before, after)

    error = 2.0  # standard deviation sqrt(8), over sqrt(2)
    reach = stats.t.ppf(0.975, 1) * error
    assert found.before_low_ns == pytest.approx(100 - reach)
    assert found.before_high_ns == pytest.approx(100 + reach)
    parts = ((error / 100) ** 2, (error / 120) ** 2)
    freedom = sum(parts) ** 2 / (parts[0] ** 2 + parts[1] ** 2)
    of_change = stats.t.ppf(0.975, freedom) * sum(parts) ** 0.5
    assert found.change_low == pytest.approx(1.2 * np.exp(-of_change) - 1)
    assert found.change_high == pytest.approx(1.2 * np.exp(of_change) - 1)
    assert found.smallest_detectable == pytest.approx(
        np.exp((stats.t.ppf(0.975, freedom) + stats.t.ppf(0.8, freedom)) * sum(parts) ** 0.5) - 1
    )
    assert found.caveats == ("Few runs: 2 before and 2 after. More runs narrow the interval.",)


def test_a_single_run_is_taken_to_vary_like_the_many() -> None:
    """Given ten runs that differ by 5 % and a new one whose steps hardly vary, 3 % more are no difference."""
    generator = np.random.default_rng(3)
    before = [steps(generator, 20, mean=100 * MS * factor, spread=0.001) for factor in np.linspace(0.92, 1.08, 10)]
    after = [steps(generator, 20, mean=103 * MS, spread=0.001)]

    found = compare_samples(before, after)  # type: ignore[arg-type]

    assert found.verdict == "no difference shown"
    assert [each.split(";")[0] for each in found.caveats] == ["One side was run once"]
    slower = compare_samples(before, [run * 1.25 for run in after])  # type: ignore[misc,arg-type]
    assert slower.verdict == "slower"


def test_the_same_arguments_give_the_same_answer() -> None:
    generator = np.random.default_rng(1)
    before, after = steps(generator, 60), steps(generator, 60)

    first, second = (compare_samples([before], [after], seed=7) for _ in range(2))  # type: ignore[list-item]

    assert first == second
    assert dataclasses.asdict(compare_samples([before], [after], seed=8)) != dataclasses.asdict(first)  # type: ignore[list-item]


def test_what_stands_out_and_what_resembles_is_said() -> None:
    generator = np.random.default_rng(5)
    alike = steps(generator, 100, correlation=0.9)
    with_one_long = np.full(100, 100.0) + generator.normal(size=100)
    with_one_long[50] = 500.0

    found = compare_samples([alike], [with_one_long])  # type: ignore[list-item]

    assert found.caveats[0].startswith("Neighbouring steps before resemble each other: 100 steps are worth ")
    assert found.caveats[1].startswith("One step after takes more than 3 times the median, the longest 5.0 times;")
    assert found.caveats[2].startswith("One run per side:")


@pytest.mark.parametrize("count", [5, 10, 60])
@pytest.mark.parametrize(("correlation", "outliers"), [(0.0, 0.0), (0.4, 0.0), (0.0, 0.05), (0.4, 0.05)])
def test_the_same_program_is_seldom_called_faster_or_slower(count: int, correlation: float, outliers: float) -> None:
    found = verdicts(300, lambda generator: [steps(generator, count, correlation=correlation, outliers=outliers)])

    assert shown(found) <= 0.07
    assert covered(found, 0.0) >= 0.93


def without_edges(steps: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What counts of a recording's steps."""
    far = far_edges(steps.tolist())
    return steps[int("first" in far) : len(steps) - int("last" in far)]


@pytest.mark.parametrize("count", [5, 6, 10])
@pytest.mark.parametrize(
    ("spread", "correlation", "outliers"), [(0.03, 0.4, 0.0), (0.1, 0.0, 0.0), (0.1, 0.4, 0.0), (0.1, 0.0, 0.05)]
)
def test_leaving_out_edges_shows_no_difference_where_there_is_none(
    count: int, spread: float, correlation: float, outliers: float
) -> None:
    def sample(generator: np.random.Generator) -> list[object]:
        whole = steps(generator, count, spread=spread, correlation=correlation, outliers=outliers)
        return [without_edges(whole)]

    found = verdicts(300, sample)

    assert shown(found) <= 0.07
    assert covered(found, 0.0) >= 0.93


def test_a_real_difference_is_found_beside_a_cold_first_step_and_the_profilers_stop() -> None:
    """Given six recorded steps, of which the first takes 30 % longer and the last 70 %, on one side only."""
    generator = np.random.default_rng(4)
    found, with_all = [], []
    for _ in range(100):
        before, after = steps(generator, 6), 0.8 * steps(generator, 6)
        after[0] *= 1.3
        after[-1] *= 1.7
        found.append(compare_samples([without_edges(before)], [without_edges(after)]))  # type: ignore[list-item]
        with_all.append(compare_samples([before], [after]))  # type: ignore[list-item]

    assert sum(each.verdict == "faster" for each in found) / len(found) >= 0.8
    assert covered(found, -0.2) >= 0.92
    assert shown(with_all) <= 0.05


@pytest.mark.parametrize("runs", [2, 4])
def test_runs_that_differ_by_chance_are_not_called_faster_or_slower(runs: int) -> None:
    """Given runs that differ by 3 % from each other, far more than their steps' means could tell."""

    def sample(generator: np.random.Generator) -> list[object]:
        return [steps(generator, 30, mean=100 * MS * (1 + 0.03 * generator.normal()), spread=0.01) for _ in range(runs)]

    found = verdicts(300, sample)

    assert shown(found) <= 0.07
    assert covered(found, 0.0) >= 0.93


@pytest.mark.parametrize(("count", "correlation"), [(10, 0.0), (40, 0.3), (200, 0.5)])
def test_a_real_difference_is_found_and_covered(count: int, correlation: float) -> None:
    found = verdicts(150, lambda generator: [steps(generator, count, correlation=correlation)], change=0.8)

    assert covered(found, -0.2) >= 0.92
    assert sum(each.verdict == "faster" for each in found) / len(found) >= 0.9
    means = [each.before_low_ns <= 100 * MS <= each.before_high_ns for each in found]  # type: ignore[operator]
    assert sum(means) / len(means) >= 0.92


@pytest.mark.parametrize("count", [20])
def test_the_smallest_detectable_difference_would_have_been_shown(count: int) -> None:
    """Given a difference as large as most samples say they could show, four in five show it."""
    found = verdicts(200, lambda generator: [steps(generator, count)])
    typical = float(np.median([each.smallest_detectable for each in found]))  # type: ignore[arg-type]

    slower = verdicts(200, lambda generator: [steps(generator, count)], change=1 + typical)

    assert 0.7 <= shown(slower) <= 0.95
