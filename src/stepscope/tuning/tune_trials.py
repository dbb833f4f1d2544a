"""What a search wants measured, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, TypeAlias

from stepscope.tuning.tune_knobs import Configuration
from stepscope.tuning.tune_losses import LossCheck

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
