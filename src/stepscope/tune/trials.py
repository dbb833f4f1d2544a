"""What a search wants measured, and what came of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Final, Literal, TypeAlias

from stepscope.tune.knobs import Configuration, Losses

TOLERANCES: Final[dict[Losses, float]] = {"reordered": 1e-4, "compiled": 1e-3, "tf32": 5e-3, "half": 2e-2}
"""Largest relative difference of a loss. Sums in another order differ by some 1e-7 in FP32, and training makes such
differences larger step by step. TF32 keeps 11 bits of each factor (5e-4), bf16 8 bits (4e-3)."""
NATURAL: Final = 2.0
_SMALL_LOSS: Final = 0.1
"""A loss below this share of the run's mean is compared as if it were that large: small losses end in noise."""


@dataclass(frozen=True, slots=True)
class LossCheck:
    """What a comparison of losses came to.

    Attributes:
        equal: whether they are as equal as is allowed; None where there were none to compare.
        largest: the largest relative difference; None where there were none to compare, or one is no number.
        allowed: the largest that is allowed.
        basis: what `allowed` is: the tolerance, the spread of the unchanged program's runs, or another seed's.
        compared: losses of a run.
        sentence: what is wrong, for people; "" where nothing is.
    """

    equal: bool | None
    largest: float | None = None
    allowed: float = 0.0
    basis: Literal["tolerance", "runs", "seed"] = "tolerance"
    compared: int = 0
    sentence: str = ""

    def to_json(self) -> dict[str, Any]:
        """For the study and reports."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> LossCheck:
        """The reverse of `to_json`."""
        return cls(**content)


def compare_losses(
    before: Sequence[Sequence[float]],
    after: Sequence[Sequence[float]],
    *,
    tolerance: float,
    seeded: Sequence[float] = (),
) -> LossCheck:
    """Compare the losses of an unchanged and a changed program.

    Args:
        before, after: for each run, the losses of its backward passes in order.
        tolerance: largest relative difference that is allowed in any case.
        seeded: losses of the unchanged program with another seed, for what draws other random numbers.
    """
    first, second = [run for run in before if run], [run for run in after if run]
    if not first and not second:
        return LossCheck(None, sentence="no backward pass was seen, so no losses could be compared")
    if not first or not second:
        return LossCheck(False, sentence="only one of the programs made backward passes")
    count = min(map(len, [*first, *second]))
    broken = next((step for step in range(count) if _is_broken(first, second, step)), None)
    if broken is not None:
        return LossCheck(False, None, tolerance, compared=count, sentence=f"loss {broken + 1} is no number any more")
    scale = _scale(first, count)
    largest = max(_difference(one, _mean(first, count), scale) for one in second)
    runs = NATURAL * max((_difference(one, other, scale) for one in first for other in first), default=0.0)
    seeds = _difference(seeded, _mean(first, count), scale) if seeded else 0.0
    if largest <= tolerance:
        return LossCheck(True, largest, tolerance, "tolerance", count)
    if largest <= runs:
        return LossCheck(True, largest, runs, "runs", count)
    if largest <= seeds:
        return LossCheck(True, largest, seeds, "seed", count)
    allowed = max(tolerance, runs, seeds)
    basis: Literal["tolerance", "runs", "seed"] = "tolerance"
    if allowed > tolerance:
        basis = "runs" if runs >= seeds else "seed"
    return LossCheck(False, largest, allowed, basis, count, "the losses differ")


def _is_broken(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], step: int) -> bool:
    """Whether a loss of the changed program is no number where the other's is one."""
    return all(math.isfinite(run[step]) for run in before) and not all(math.isfinite(run[step]) for run in after)


def _mean(runs: Sequence[Sequence[float]], count: int) -> list[float]:
    return [fmean(run[step] for run in runs) for step in range(count)]


def _scale(runs: Sequence[Sequence[float]], count: int) -> list[float]:
    """What the difference of each loss is divided by."""
    sizes = [abs(loss) for loss in _mean(runs, count)]
    finite = [size for size in sizes if math.isfinite(size)]
    least = _SMALL_LOSS * fmean(finite) if finite else 0.0
    return [max(size, least) for size in sizes]


def _difference(run: Sequence[float], other: Sequence[float], scale: Sequence[float]) -> float:
    """The largest, of the losses that both have; what is no number on both sides does not differ."""
    found = 0.0
    for one, two, size in zip(run, other, scale, strict=False):
        if math.isfinite(one) and math.isfinite(two) and size > 0:
            found = max(found, abs(one - two) / size)
    return found


Purpose: TypeAlias = Literal["screen", "combine", "refine", "simplify", "proof"]
"""Why something is measured: alone against the program as it is; on top of what helps so far; further combinations of
knobs; one of these without a setting; and the best against the program as it is, afresh."""
State: TypeAlias = Literal["running", "measured", "failed"]

LEAST_GAIN: Final = 0.01
"""A gain smaller than this share of a step is none: nobody changes a program for it."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """One comparison that is to be measured.

    Attributes:
        configuration: what is to be tried.
        reference: what it is compared with.
    """

    purpose: Purpose
    configuration: Configuration
    reference: Configuration = field(default_factory=Configuration)

    @property
    def key(self) -> str:
        """One text for each proposal."""
        return json.dumps([self.purpose, self.reference.settings, self.configuration.settings])

    @classmethod
    def from_key(cls, key: str) -> Proposal:
        """The reverse of `key`."""
        purpose, reference, configuration = json.loads(key)
        return cls(purpose, Configuration.of(dict(configuration)), Configuration.of(dict(reference)))


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps of the configuration beside those of its reference.

    Attributes:
        before_ns, after_ns: the mean step of the reference and of the configuration; None without steps.
        change: after_ns / before_ns - 1; None where it is not defined.
        change_low, change_high: its interval; None where there is none.
        confidence: of the interval.
        verdict: "faster", "slower" or "no difference shown".
        rounds: in which both ran.
        steps: of the configuration, that counted.
        losses: how they compare.
        applied: what the run said of the remedies, a sentence each.
        caveats: what makes the figures less certain than they look.
        seconds: that the measurement took.
        other_cores: that others kept busy meanwhile, in the run with most; None where unknown.
    """

    before_ns: float | None
    after_ns: float | None
    change: float | None
    change_low: float | None
    change_high: float | None
    confidence: float
    verdict: str
    rounds: int
    steps: int
    losses: LossCheck
    applied: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    seconds: float = 0.0
    other_cores: float | None = None

    def to_json(self) -> dict[str, Any]:
        """For the study and reports."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Measured:
        """The reverse of `to_json`."""
        lists = {name: tuple(map(str, content[name])) for name in ("applied", "caveats")}
        return cls(**{**content, **lists, "losses": LossCheck.from_json(content["losses"])})


@dataclass(frozen=True, slots=True)
class Trial:
    """A proposal, and what came of it.

    Attributes:
        number: in the study.
        state: "failed" is a result too: it says why it cannot be had, in `reason`.
        reason: why it failed.
        measured: None where it failed, or still runs.
        machine: that measured it.
        folder: of its runs and their logs.
    """

    number: int
    proposal: Proposal
    state: State
    reason: str = ""
    measured: Measured | None = None
    machine: str = ""
    folder: str = ""

    @property
    def gain(self) -> float | None:
        """The share of the reference's step that is saved, negative where it is slower; None where not measured."""
        if self.measured is None or self.measured.change is None:
            return None
        return -self.measured.change

    @property
    def is_promising(self) -> bool:
        """Whether it may help: the estimate is a gain, and the losses are equal as far as they can be compared."""
        return self.gain is not None and self.gain >= LEAST_GAIN and self.keeps_losses

    @property
    def is_shown(self) -> bool:
        """Whether it is shown to help: the interval leaves 0 out too."""
        return self.is_promising and self.measured is not None and self.measured.verdict == "faster"

    @property
    def keeps_losses(self) -> bool:
        """Whether nothing is known to be wrong with its losses."""
        return self.measured is not None and self.measured.losses.equal is not False
