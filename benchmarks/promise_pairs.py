"""Pairs of a promised and a measured saving, and how they are printed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.zoo.promise import CONFIDENCES, Promise

GOAL = 0.15
KINDS = ("real", "zoo", "naive", "simulated")
Times = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Pair:
    """A program with a fault and without it.

    Attributes:
        kind: one of KINDS.
        rules: those that should find the fault.
        promise: what they promise; None where they are silent.
        measured_share: what the step lost, as a share of it; None where it was not measured.
        times_ns: the timings: "fault" and "clean"; empty where none were needed.
        note: what else is to be known.
    """

    name: str
    kind: str
    rules: tuple[str, ...]
    promise: Promise | None
    measured_share: float | None
    times_ns: Times = field(default_factory=dict)
    note: str = ""

    @property
    def error(self) -> float | None:
        """How far the promised share of the step is from the measured one, relative to it."""
        return None if self.promise is None else self._error_of(self.promise.share)

    @property
    def attributed_error(self) -> float | None:
        """The same of what the findings cost, added up."""
        return None if self.promise is None else self._error_of(self.promise.attributed_share)

    @property
    def is_replayed(self) -> bool:
        """Whether the promise comes from a replay."""
        return self.promise is not None and self.promise.saving_from == "replayed"

    @property
    def noise(self) -> float | None:
        """By how much the timings' least values are unsure, as a share of the step; None where that is unknown."""
        if not self.times_ns or min(map(len, self.times_ns.values())) < 2:
            return None
        unsure = sum(sorted(taken)[1] - min(taken) for taken in self.times_ns.values())
        return unsure / min(self.times_ns["fault"])

    def _error_of(self, share: float) -> float | None:
        if not self.measured_share or self.measured_share <= 0:
            return None
        return abs(share - self.measured_share) / self.measured_share


def told(pair: Pair) -> str:
    """One pair in a line."""
    promised = "-" if pair.promise is None else f"{pair.promise.share:.1%} {pair.promise.saving_from}"
    if pair.promise is not None and pair.promise.findings > 1:
        promised += f" ({pair.promise.findings} findings)"
    beside = ""
    if pair.is_replayed and pair.promise is not None:
        beside = f"; attributed {pair.promise.attributed_share:.1%}, error {percent(pair.attributed_error)}"
    noise = "" if pair.noise is None else f", noise {pair.noise:.1%}"
    note = f" ({pair.note})" if pair.note else ""
    return (
        f"{pair.name}: {', '.join(pair.rules)}: promised {promised}, measured {percent(pair.measured_share, 1)}{noise}"
        f", error {percent(pair.error)} ({points(pair)} points){beside}{note}"
    )


def percent(share: float | None, digits: int = 0) -> str:
    """A share in percent."""
    return "-" if share is None else f"{share:.{digits}%}"


def points(pair: Pair) -> str:
    """By how many points of the step too much was promised."""
    if pair.promise is None or pair.measured_share is None:
        return "-"
    return f"{100 * (pair.promise.share - pair.measured_share):+.1f}"


def table(pairs: Iterable[Pair]) -> str:
    """Each pair in a row, in Markdown."""
    rows = ["| pair | rule | promised | measured | error | points of the step | by adding up, error | noise |"]
    rows.append("|---|---|---:|---:|---:|---:|---:|---:|")
    for pair in pairs:
        promised = "-" if pair.promise is None else f"{pair.promise.share:.1%}"
        if pair.promise is not None and not pair.is_replayed:
            promised += " (added up)"
        beside = "-"
        if pair.is_replayed and pair.promise is not None:
            beside = f"{pair.promise.attributed_share:.1%}, {percent(pair.attributed_error)}"
        cells = [pair.name, ", ".join(f"`{rule}`" for rule in pair.rules), promised, percent(pair.measured_share, 1)]
        cells += [percent(pair.error), points(pair), beside, percent(pair.noise, 1)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def summary(pairs: Sequence[Pair]) -> str:
    """Medians and quartiles, a sentence in each line, as a list in Markdown."""
    counted = [pair for pair in pairs if pair.error is not None]
    replayed = [pair for pair in counted if pair.is_replayed]
    rest = [pair for pair in counted if not pair.is_replayed]
    nearer = sum((pair.error or 0) <= (pair.attributed_error or 0) for pair in replayed)
    kinds = {kind: [pair.error for pair in counted if pair.kind == kind] for kind in KINDS}
    sentences = [
        f"Median error of {len(counted)} promised savings: {spread([pair.error for pair in counted])} "
        f"(goal: at most {GOAL:.0%}).",
        *(f"{kind}, {len(errors)}: {spread(errors)}." for kind, errors in kinds.items() if errors),
        f"Of the {len(replayed)} that were replayed: {spread([pair.error for pair in replayed])}; the same by adding "
        f"up durations: {spread([pair.attributed_error for pair in replayed])}; the replay was as near or nearer in "
        f"{nearer}.",
        f"Of the {len(rest)} that were added up: {spread([pair.error for pair in rest])}.",
    ]
    silent = [pair.name for pair in pairs if pair.promise is None]
    gainless = [pair.name for pair in pairs if pair.promise is not None and pair.error is None]
    if silent:
        sentences.append(f"Nothing was promised for {', '.join(silent)}.")
    if gainless:
        sentences.append(f"Nothing was gained, so that there is no error, in {', '.join(gainless)}.")
    return "\n".join(f"- {sentence}" for sentence in sentences)


def by_confidence(pairs: Sequence[Pair]) -> str:
    """What promises of each confidence were worth: how many were kept to 10 and 25 %, in Markdown."""
    columns = ("promises", "median error", "within 10 %", "within 25 %", "median points of the step off", "rules")
    rows = [f"| confidence | {' | '.join(columns)} |", "|---|---:|---:|---:|---:|---:|---|"]
    for confidence in CONFIDENCES:
        mine = [pair for pair in pairs if pair.promise is not None and pair.promise.confidence == confidence]
        mine = [pair for pair in mine if pair.measured_share is not None]
        if mine:
            rows.append(f"| {confidence} | {' | '.join(_worth(mine))} |")
    return "\n".join(rows)


def _worth(pairs: Sequence[Pair]) -> list[str]:
    """The cells of one confidence; a promise where nothing was gained is kept in no bound."""
    errors = [math.inf if pair.error is None else pair.error for pair in pairs]
    off = [abs(100 * (pair.promise.share - (pair.measured_share or 0))) for pair in pairs if pair.promise is not None]
    within = [f"{sum(error <= bound for error in errors) / len(errors):.0%}" for bound in (0.1, 0.25)]
    rules = sorted({rule for pair in pairs for rule in pair.rules})
    return [
        str(len(pairs)), percent(statistics.median(errors), 1), *within, f"{statistics.median(off):.1f}",
        ", ".join(f"`{rule}`" for rule in rules),
    ]  # fmt: skip


def spread(values: Sequence[float | None]) -> str:
    """The median and the quartiles."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return "none"
    if len(known) < 2:
        return f"{known[0]:.1%}"
    low, middle, high = statistics.quantiles(known, method="inclusive")
    return f"{middle:.1%} (quartiles {low:.1%} and {high:.1%})"
