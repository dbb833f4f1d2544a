"""The records of a search: knobs and their values, configurations, proposals, and outcomes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final, Literal, TypeAlias

from stepscope.errors import UsageError
from stepscope.files import shipped

Kind: TypeAlias = Literal["apply", "option", "variable"]
"""A word of `stepscope run --apply`, an option of the program, or a variable of its environment."""
Losses: TypeAlias = Literal["reordered", "compiled", "tf32", "half"]
"""How close the losses stay, closest first."""

ON: Final = ""
"""The value of a knob that is a switch."""
MOST_VALUES: Final = 16
_VARIABLE: Final = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)", re.ASCII)
_OPTION: Final = re.compile(r"-{0,2}[A-Za-z_][A-Za-z0-9_.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting to vary; leaving it unchanged is always one of the choices.

    Attributes:
        name: the `--apply` word, such as "workers"; an option as it is written, "--fused"; or a variable.
        values: possible values; "" is a switch that is on.
        losses: how close the losses stay.
        draws: whether other random numbers may be drawn, so that the losses are those of another seed.
        needs: another knob without which it changes nothing; "" without one.
        why: reason for the knob, in words.
        promised_ns: nanoseconds of a step that the finding promises to save; None without a promise.
        code: the remedy as code.
        diff: the change of the user's own lines.
    """

    name: str
    values: tuple[str, ...] = (ON,)
    kind: Kind = "apply"
    losses: Losses = "reordered"
    draws: bool = False
    needs: str = ""
    source: Literal["finding", "standard", "user"] = "standard"
    why: str = ""
    promised_ns: int | None = None
    code: str = ""
    diff: str = ""

    def shown(self, value: str) -> str:
        """The setting for display: "workers=4", "fuse-optimizer", "--loader-workers 4", "OMP_NUM_THREADS=1"."""
        return " ".join(self.words(value))

    def words(self, value: str) -> tuple[str, ...]:
        """Its form for `--apply`, for the program's arguments, or before the program."""
        if value == ON:
            return (self.name,)
        if self.kind == "option" and not self.name.endswith("="):
            return (self.name, value)
        return (f"{self.name.removesuffix('=')}={value}",)


@dataclass(frozen=True, slots=True, order=True)
class Configuration:
    """Values of knobs by name; knobs not listed keep the program's own setting."""

    settings: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> Configuration:
        return cls(tuple(sorted(settings.items())))

    def with_setting(self, name: str, value: str) -> Configuration:
        return Configuration.of({**dict(self.settings), name: value})

    def without(self, name: str) -> Configuration:
        return Configuration(tuple(pair for pair in self.settings if pair[0] != name))

    def value(self, name: str) -> str | None:
        """The value of a knob; None if it is unchanged."""
        return dict(self.settings).get(name)


@dataclass(frozen=True, slots=True)
class Space:
    """The search space.

    Attributes:
        knobs: the most promising first.
        said: what was left out and why, one sentence each.
    """

    knobs: tuple[Knob, ...] = ()
    said: tuple[str, ...] = ()

    def knob(self, name: str) -> Knob:
        """The knob of that name. Raises KeyError if there is none."""
        return {knob.name: knob for knob in self.knobs}[name]

    def shown(self, configuration: Configuration) -> str:
        known = {knob.name for knob in self.knobs}
        shown = (self.knob(name).shown(value) for name, value in configuration.settings if name in known)
        return ", ".join(shown) or "nothing"

    def apply_words(self, configuration: Configuration) -> tuple[str, ...]:
        return self._words(configuration, "apply")

    def arguments(self, configuration: Configuration) -> tuple[str, ...]:
        """Arguments to append to the program's own."""
        return self._words(configuration, "option")

    def variables(self, configuration: Configuration) -> dict[str, str]:
        """Variables to set in the program's environment."""
        return {name: value for name, value in configuration.settings if self.knob(name).kind == "variable"}

    def _words(self, configuration: Configuration, kind: Kind) -> tuple[str, ...]:
        chosen = ((self.knob(name), value) for name, value in configuration.settings)
        return tuple(word for knob, value in chosen if knob.kind == kind for word in knob.words(value))

    def losses_of(self, configuration: Configuration) -> tuple[Losses, bool]:
        """(the least close loss class of a configuration's knobs, whether any changes the random numbers)."""
        knobs = [self.knob(name) for name, _ in configuration.settings]
        order: tuple[Losses, ...] = ("reordered", "compiled", "tf32", "half")
        least: Losses = max((knob.losses for knob in knobs), key=order.index, default="reordered")
        return least, any(knob.draws for knob in knobs)


def user_knob(text: str) -> Knob:
    """Parse a knob of the program's own, as `--knob` takes it.

    "--batched-loss" is a switch, "--loader-workers=0,2,4" an option with values, "data.workers=0,2" an argument of that
    form, "env:OMP_NUM_THREADS=1,2" a variable.

    Raises:
        UsageError: it is something else.
    """
    name, equals, listed = text.partition("=")
    variable = _VARIABLE.fullmatch(name)
    if variable is None and not _OPTION.fullmatch(name):
        raise UsageError(f"{text!r} is not a knob: write --knob --loader-workers=0,2,4 or --knob --fused-optimizer")
    values = tuple(dict.fromkeys(value.strip() for value in listed.split(","))) if equals else (ON,)
    if equals and "" in values:
        raise UsageError(f"{text!r} has an empty value: write --knob {name}=0,2,4")
    if len(values) > MOST_VALUES:
        raise UsageError(f"{text!r} has {len(values)} values; at most {MOST_VALUES} are tried")
    if variable is not None:
        if not equals:
            raise UsageError(f"{text!r} needs values: write --knob {name}=1,2")
        return Knob(variable[1], values, "variable", source="user", why="a knob of yours")
    if not name.startswith("-"):
        if not equals:
            raise UsageError(f"{text!r} is not a knob: an option begins with -, other arguments are written name=0,2")
        name = f"{name}="
    return Knob(name, values, "option", source="user", why="a knob of yours")


def named_once(knobs: Iterable[Knob]) -> list[Knob]:
    """Merge knobs of the same name: the values of all, the rest from the first."""
    found: dict[str, Knob] = {}
    for knob in knobs:
        first = found.get(knob.name)
        found[knob.name] = knob
        if first is not None:
            values = tuple(dict.fromkeys([*first.values, *knob.values]))
            filled = {name: getattr(first, name) or getattr(knob, name) for name in ("code", "diff", "needs")}
            found[knob.name] = replace(first, values=values, **filled)
    return list(found.values())


TOLERANCES: Final[dict[Losses, float]] = {"reordered": 1e-4, "compiled": 1e-3, "tf32": 5e-3, "half": 2e-2}
"""Largest relative difference of a loss. Sums in another order differ by some 1e-7 in FP32, and training makes such
differences larger step by step. TF32 keeps 11 bits of each factor (5e-4), bf16 8 bits (4e-3)."""
NATURAL: Final = 2.0
_SMALL_LOSS: Final = 0.1
"""A loss below this share of the run's mean is compared as if it were that large: small losses are noisy."""


@dataclass(frozen=True, slots=True)
class LossCheck:
    """The result of a comparison of losses.

    Attributes:
        equal: whether they are as equal as allowed; None if there were none to compare.
        largest: the largest relative difference; None if there were none to compare, or one is not finite.
        allowed: the largest allowed difference.
        basis: the source of `allowed`: the tolerance, the spread of the unchanged program's runs, or another seed's.
        compared: number of losses per run.
        sentence: the problem in words; "" without one.
    """

    equal: bool | None
    largest: float | None = None
    allowed: float = 0.0
    basis: Literal["tolerance", "runs", "seed"] = "tolerance"
    compared: int = 0
    sentence: str = ""


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
        seeded: losses of the unchanged program with another seed, for changes that draw other random numbers.
    """
    first, second = [run for run in before if run], [run for run in after if run]
    if not first and not second:
        return LossCheck(None, sentence="no backward pass was seen, so no losses could be compared")
    if not first or not second:
        return LossCheck(False, sentence="only one of the programs made backward passes")
    count = min(map(len, [*first, *second]))
    broken = next((step for step in range(count) if _is_broken(first, second, step)), None)
    if broken is not None:
        return LossCheck(False, None, tolerance, compared=count, sentence=f"loss {broken + 1} is no longer a number")
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
    """Whether a loss of the changed program is not finite where the other's is."""
    return all(math.isfinite(run[step]) for run in before) and not all(math.isfinite(run[step]) for run in after)


def _mean(runs: Sequence[Sequence[float]], count: int) -> list[float]:
    return [fmean(run[step] for run in runs) for step in range(count)]


def _scale(runs: Sequence[Sequence[float]], count: int) -> list[float]:
    """The divisor for the difference of each loss."""
    sizes = [abs(loss) for loss in _mean(runs, count)]
    finite = [size for size in sizes if math.isfinite(size)]
    least = _SMALL_LOSS * fmean(finite) if finite else 0.0
    return [max(size, least) for size in sizes]


def _difference(run: Sequence[float], other: Sequence[float], scale: Sequence[float]) -> float:
    """The largest relative difference among the losses that are finite in both runs; 0.0 without any."""
    found = 0.0
    for one, two, size in zip(run, other, scale, strict=False):
        if math.isfinite(one) and math.isfinite(two) and size > 0:
            found = max(found, abs(one - two) / size)
    return found


Purpose: TypeAlias = Literal["screen", "combine", "refine", "simplify", "proof"]
"""Why a proposal is measured.

"screen": alone against the unchanged program; "combine": on top of what helps so far; "refine": a further combination
of knobs; "simplify": one of these without a setting; "proof": the best against the unchanged program, in fresh runs.
"""
State: TypeAlias = Literal["running", "measured", "failed"]

LEAST_GAIN: Final = 0.01
"""A smaller gain, as a share of a step, does not count: nobody changes a program for it."""


@dataclass(frozen=True, slots=True)
class Proposal:
    purpose: Purpose
    configuration: Configuration
    reference: Configuration = field(default_factory=Configuration)

    @property
    def key(self) -> str:
        """A text that identifies the proposal, read by `from_key`."""
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
        change: after_ns / before_ns - 1; None if undefined.
        change_low, change_high: its confidence interval; None without one.
        confidence: confidence of the interval.
        verdict: as in `SampleComparison`.
        rounds: number of rounds in which both ran.
        steps: number of the configuration's counted steps.
        applied: what the run reported about the remedies, a sentence each.
        caveats: what makes the figures less certain than they look.
        seconds: duration of the measurement.
        other_cores: cores that other programs kept busy meanwhile, the largest of all runs; None if unknown.
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


@dataclass(frozen=True, slots=True)
class Trial:
    """A proposal and its outcome.

    Attributes:
        number: its number in the study.
        state: "failed" is a result too: `reason` says why.
        measured: None if it failed, or still runs.
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
        """The share of the reference's step that is saved, negative if slower; None if not measured."""
        if self.measured is None or self.measured.change is None:
            return None
        return -self.measured.change

    @property
    def is_promising(self) -> bool:
        """Whether it may help: the estimate is a gain, and the losses are equal as far as they can be compared."""
        return self.gain is not None and self.gain >= LEAST_GAIN and self.keeps_losses

    @property
    def is_shown(self) -> bool:
        """Whether it is shown to help: the interval also excludes 0."""
        return self.is_promising and self.measured is not None and self.measured.verdict == "faster"

    @property
    def keeps_losses(self) -> bool:
        """Whether nothing is known to be wrong with its losses."""
        return self.measured is not None and self.measured.losses.equal is not False


def code_of(name: str, value: str) -> str:
    """The remedy of an `--apply` word as code; "" for an unknown word."""
    code = shipped("tune_code.toml", dict[str, str]).get(name, "")
    return code.format(word=name, value=value, quoted=f'"{value or "default"}"', number=value or 50)
