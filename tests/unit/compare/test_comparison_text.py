"""The words of a comparison."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from stepscope.compare import SampleComparison, compare_samples
from stepscope.report.comparison import sample_table
from stepscope.report.comparison_words import detectable_sentences, verdict_sentence
from stepscope.report.format import change_words, interval_words

MEASURED: dict[str, Any] = {
    "before_ns": 120_300_000.0, "before_low_ns": 118_000_000.0, "before_high_ns": 122_000_000.0,
    "after_ns": 94_100_000.0, "after_low_ns": 93_000_000.0, "after_high_ns": 95_000_000.0,
    "change": -0.218, "change_low": -0.234, "change_high": -0.201, "verdict": "faster", "smallest_detectable": 0.021,
    "before_runs": 1, "after_runs": 2, "before_steps": 40, "after_steps": 80, "confidence": 0.95, "caveats": (),
}  # fmt: skip


def measured(**changes: Any) -> SampleComparison:
    return SampleComparison(**{**MEASURED, **changes})


def verdict_lines(samples: SampleComparison) -> list[str]:
    return [verdict_sentence(samples), *detectable_sentences(samples), *samples.caveats]


def test_no_steps() -> None:
    assert verdict_lines(compare_samples([], [])) == [
        "Too few steps: there are no steps before and after.",
        "No step before: at least two are needed to show a difference.",
        "No step after: at least two are needed to show a difference.",
    ]


def test_one_step() -> None:
    assert verdict_lines(compare_samples([[1000.0]], [[1500.0]]))[0] == (
        "Too few steps: a step takes 1.5 us instead of 1.0 us; how much of the difference is chance is unknown."
    )


def test_faster() -> None:
    assert verdict_lines(measured(caveats=("One run a side: careful.",))) == [
        "Faster: a step takes 94.1 ms instead of 120.3 ms, 21.8 % less (95 % interval: 20.1 % to 23.4 % less).",
        "The smallest difference such data show 4 times out of 5 is 2.1 % of a step.",
        "One run a side: careful.",
    ]


def test_no_difference() -> None:
    shown = measured(
        change=0.004, change_low=-0.021, change_high=0.029, verdict="no difference shown", confidence=0.999
    )

    assert verdict_lines(shown)[0] == (
        "No difference shown: a step takes 94.1 ms instead of 120.3 ms, 0.4 % more (99.9 % interval: 2.1 % less to "
        "2.9 % more)."
    )


def test_steps_that_vary_too_much() -> None:
    unshown = measured(smallest_detectable=7.0, verdict="too few steps")

    assert verdict_lines(measured(smallest_detectable=7.0))[1:] == []
    assert verdict_lines(unshown) == [
        "Too few steps: a step takes 94.1 ms instead of 120.3 ms, but the steps vary so much that even one twice as "
        "long might not have been shown."
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (0.0, "the same"),
        (0.00001, "<0.1 % more"),
        (-0.00001, "<0.1 % less"),
        (1.5, "150.0 % more"),
        (-0.5, "50.0 % less"),
    ],
)
def test_a_change_in_words(change: float, words: str) -> None:
    assert change_words(change) == words


def test_an_interval_in_words() -> None:
    assert interval_words(0.01, 0.05) == "1.0 % to 5.0 % more"
    assert interval_words(0.5, 91.76) == "50.0 % more to 93 times as long"
    assert interval_words(-0.999, 91.76) == "99.9 % less to 93 times as long"


def test_both_sides_as_a_table() -> None:
    table = sample_table(measured(), ("main\x1b[31m", "branch"))

    assert table.rows() == [
        ("main\x1b[31m", 120_300_000.0, 118_000_000.0, 122_000_000.0, 40, 1),
        ("branch", 94_100_000.0, 93_000_000.0, 95_000_000.0, 80, 2),
    ]
    assert isinstance(table, pl.DataFrame)
