"""What a comparison of two programs says, in plain words: the verdict, and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import polars as pl

from stepscope.compare.energy import EnergyComparison
from stepscope.compare.statistics import POWER, SampleComparison
from stepscope.report.energy_format import energy
from stepscope.report.format import count, duration, printable, share

_SAMPLE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "run": pl.String,
    "step_ns": pl.Float64,
    "low_ns": pl.Float64,
    "high_ns": pl.Float64,
    "steps": pl.Int64,
    "runs": pl.Int64,
}
_MANY_TIMES: Final = 9.0
"""A change from which on a time is told as so many times the other."""
_WORDS: Final = {"faster": "Faster", "slower": "Slower", "no difference shown": "No difference shown"}


def verdict_lines(samples: SampleComparison) -> list[str]:
    """The verdict with its interval, the smallest difference that could have been shown, and the caveats.

    A sentence each, the verdict first.
    """
    return [verdict_sentence(samples), *detectable_sentences(samples), *samples.caveats]


def verdict_sentence(samples: SampleComparison) -> str:
    """Such as "Slower: a step takes 11.0 ms instead of 10.0 ms, 10.0 % more (95 % interval: 9.0 % to 11.1 % more)."."""
    word = _WORDS[samples.verdict]
    if samples.before_ns is None or samples.after_ns is None:
        missing = [name for name, ns in (("before", samples.before_ns), ("after", samples.after_ns)) if ns is None]
        return f"{word}: there are no steps {' and '.join(missing)}."
    times = f"a step takes {duration(samples.after_ns)} instead of {duration(samples.before_ns)}"
    if samples.change is None:
        return f"{word}: {times}."
    if samples.change_low is None or samples.change_high is None:
        return f"{word}: {times}, {change_words(samples.change)}, and nothing tells how much of that is chance."
    interval = interval_words(samples.change_low, samples.change_high)
    return f"{word}: {times}, {change_words(samples.change)} ({share_of(samples.confidence)} interval: {interval})."


def detectable_sentences(samples: SampleComparison) -> list[str]:
    """What difference such data would have shown; nothing where that is unknown, or a larger one was shown."""
    least = samples.smallest_detectable
    if least is None:
        return []
    if least >= 1 and samples.verdict != "no difference shown":
        return []
    if least >= 1:
        return ["The steps vary so much that even a step twice as long might not have been shown."]
    often = f"{round(POWER * 5)} times out of 5"
    return [f"The smallest difference such data show {often} is {share(least)} of a step."]


def change_words(change: float) -> str:
    """A change as "21.8 % less", "3.0 % more" or "the same"."""
    if change == 0:
        return "the same"
    return f"{share(abs(change))} {'more' if change > 0 else 'less'}"


def interval_words(low: float, high: float) -> str:
    """An interval of changes: "20.1 % to 23.4 % less", "2.1 % less to 2.9 % more", "5.0 % less to 12 times as long"."""
    if high <= 0:
        return f"{share(-high)} to {share(-low)} less"
    most = f"{share(high)} more" if high < _MANY_TIMES else f"{count(round(1 + high))} times as long"
    if low >= 0:
        least = share(low) if high < _MANY_TIMES else f"{share(low)} more"
        return f"{least} to {most}"
    return f"{share(-low)} less to {most}"


def share_of(confidence: float) -> str:
    """A confidence as "95 %"."""
    return f"{count(round(confidence * 100, 2))} %"


def sample_table(
    samples: SampleComparison,
    names: tuple[str, str] = ("before", "after"),
    energies: Sequence[EnergyComparison] = (),
) -> pl.DataFrame:
    """One row a side: run, step_ns (mean), low_ns and high_ns (its interval), steps, runs; what energy was measured."""
    before = (samples.before_ns, samples.before_low_ns, samples.before_high_ns, samples.before_steps)
    after = (samples.after_ns, samples.after_low_ns, samples.after_high_ns, samples.after_steps)
    rows = [
        (printable(names[0]), *before, samples.before_runs),
        (printable(names[1]), *after, samples.after_runs),
    ]
    table = pl.DataFrame(rows, schema=dict(_SAMPLE_SCHEMA), orient="row")
    return table.with_columns(
        pl.Series(f"{each.kind}_energy", [energy((each.before_j,) * 2), energy((each.after_j,) * 2)])
        for each in energies
    )
