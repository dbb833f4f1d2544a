"""Searches whose measurements follow from a table, so that the right answer is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stepscope.tune.next_trial import Outcome, plan
from stepscope.tune.trials import Configuration, Knob, LossCheck, Measured, Proposal, Space, Trial

STEP_NS = 100e6
EQUAL = LossCheck(True, 1e-7, 1e-4, "tolerance", 50)
DIFFERENT = LossCheck(False, 0.03, 1e-4, "tolerance", 50, "the losses differ")
HALF_WIDTH = 0.005


def space_of(*knobs: Knob) -> Space:
    return Space(tuple(knobs))


def measured(change: float, *, losses: LossCheck = EQUAL, half_width: float = HALF_WIDTH) -> Measured:
    low, high = change - half_width, change + half_width
    verdict = "faster" if high < 0 else "slower" if low > 0 else "no difference shown"
    return Measured(STEP_NS, STEP_NS * (1 + change), change, low, high, 0.95, verdict, 2, 80, losses)


@dataclass
class Truth:
    """A program whose step is the product of its settings' factors.

    Attributes:
        factors: by setting as it is shown; what is not named changes nothing.
        together: more factors, where both settings are there.
        failing: settings that fail, with the reason.
        wrong: settings whose losses differ.
        proposals: what was measured, in order.
    """

    factors: Mapping[str, float]
    together: Mapping[tuple[str, str], float] = field(default_factory=dict)
    failing: Mapping[str, str] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()
    proposals: list[Proposal] = field(default_factory=list)
    space: Space = field(default_factory=Space)
    before: Callable[[Proposal], None] = lambda proposal: None

    def __call__(self, proposal: Proposal, number: int, left_s: float) -> Outcome:
        self.before(proposal)
        self.proposals.append(proposal)
        settings = self._shown(proposal.configuration)
        for setting in settings:
            if setting in self.failing:
                return Outcome(reason=self.failing[setting])
        losses = DIFFERENT if set(settings) & set(self.wrong) else EQUAL
        change = self.step(proposal.configuration) / self.step(proposal.reference) - 1
        return Outcome(measured(change, losses=losses))

    def step(self, configuration: Configuration) -> float:
        """The step as a share of the unchanged program's."""
        settings = self._shown(configuration)
        found = 1.0
        for setting in settings:
            found *= self.factors.get(setting, 1.0)
        for pair, factor in self.together.items():
            found *= factor if set(pair) <= set(settings) else 1.0
        return found

    def _shown(self, configuration: Configuration) -> list[str]:
        return [self.space.knob(name).shown(value) for name, value in configuration.settings]


def searched(truth: Truth, space: Space, *, most: int = 200) -> tuple[Configuration, list[Trial]]:
    """The best and the trials of a search without refinements by a sampler."""
    truth.space = space
    trials: list[Trial] = []
    for number in range(most):
        step = plan(space, trials)
        if step.phase == "refine":
            step = plan(space, trials, hurry=True)
        if step.phase == "done":
            return step.best, trials
        outcome = truth(step.proposals[0], number, 1.0)
        state = "failed" if outcome.measured is None else "measured"
        trials.append(Trial(number, step.proposals[0], state, outcome.reason, outcome.measured))  # type: ignore[arg-type]
    raise AssertionError("the search does not end")
