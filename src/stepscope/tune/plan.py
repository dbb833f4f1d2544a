"""Decide what a search does next: a function of the trials alone.

So a search that was stopped, in any way, resumes where it was, and several processes that read the same trials make the
same plan and only have to take different parts of it.

1. Screening: each value of each knob alone against the unchanged program.
2. Combination: what may help, in the order of its gain, each on top of what was shown to help before; then settings
   that make sense only together with one of these, the other values of their knobs, and, once the step is at most half
   as long, what a longer step may have hidden. What is not shown to help is left out.
3. Refinement: further combinations, as a sampler suggests them from all trials (Optuna's TPE). One that is shown to
   help is measured without each setting that came with it, and keeps those that it is slower without.
4. Proof: the best against the unchanged program, in fresh runs. The best of many noisy measurements looks better than
   it is; only these runs count for the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, Literal, TypeAlias

from stepscope.errors import UsageError
from stepscope.record.apply import parse_applications
from stepscope.tune.trials import LEAST_GAIN, Configuration, Proposal, Space, Trial

Phase: TypeAlias = Literal["screen", "combine", "refine", "simplify", "proof", "done"]

MOST_REFINEMENTS: Final = 8
PATIENCE: Final = 4
"""Refinement ends after so many in a row that are not shown to help."""
_HIDDEN_UNTIL: Final = 0.5
"""Settings without a gain alone are retried once the best step is at most this share of the unchanged one."""
_HIDDEN_GAIN: Final = 0.05
"""They are retried if, by their interval, they may save this share of the best step."""
_HARMFUL: Final = -0.05
"""A setting whose gain alone is below this is not tried in combinations."""
_AHEAD: Final = 4
"""Combinations offered to idle processes before the outcome of earlier ones is known."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The next work of a search.

    Attributes:
        best: the configuration that is shown to help most so far; empty if none is.
        proposals: those that nobody has measured or is measuring, the most useful first; empty while others measure
            what the next step depends on, and in "refine", where a sampler makes them.
    """

    phase: Phase
    best: Configuration
    proposals: tuple[Proposal, ...] = ()
    proof: Trial | None = None


class _Known:
    def __init__(self, trials: Sequence[Trial]) -> None:
        self.trials = sorted(trials, key=lambda trial: trial.number)
        self._taken = {trial.proposal for trial in self.trials}
        self._ended = {trial.proposal: trial for trial in self.trials if trial.state != "running"}

    def ended(self, proposal: Proposal) -> Trial | None:
        return self._ended.get(proposal)

    def alone(self, name: str, value: str) -> Trial | None:
        """The trial of a setting alone against the unchanged program."""
        return self.ended(Proposal("screen", Configuration(((name, value),))))

    def open(self, proposals: Sequence[Proposal]) -> tuple[Proposal, ...]:
        """Those that nobody has measured or is measuring."""
        return tuple(each for each in proposals if each not in self._taken)

    def refinements(self) -> list[Trial]:
        return [each for each in self.trials if each.proposal.purpose == "refine" and each.state != "running"]


def plan(space: Space, trials: Sequence[Trial], *, hurry: bool = False) -> Plan:
    """Decide what to do next.

    Args:
        trials: all of the study, without those whose process ended before it stored an outcome.
        hurry: prove what is known by now, and search no further.
    """
    known = _Known(trials)
    screens = list(_screens(space))
    best, wanted = _combined(space, known)
    if not hurry:
        if any(known.ended(each) is None for each in screens):
            return Plan("screen", best, known.open(screens))
        if wanted:
            return Plan("combine", best, known.open(wanted))
    best, simpler = _refined(best, known)
    if not hurry and simpler is not None:
        return Plan("simplify", best, known.open([simpler]))
    if not hurry and _may_refine(space, known, best):
        return Plan("refine", best)
    return _proof(best, known)


def _proof(best: Configuration, known: _Known) -> Plan:
    if not best.settings:
        return Plan("done", best)
    proposal = Proposal("proof", best)
    found = known.ended(proposal)
    return Plan("done", best, proof=found) if found is not None else Plan("proof", best, known.open([proposal]))


def _screens(space: Space) -> Iterator[Proposal]:
    """Every knob alone: the first value of each, then the second of each, and so on."""
    alone = [knob for knob in space.knobs if not knob.needs]
    for values in zip_longest(*[[(knob.name, value) for value in knob.values] for knob in alone]):
        for setting in values:
            if setting is not None:
                yield Proposal("screen", Configuration((setting,)))


def _combined(space: Space, known: _Known) -> tuple[Configuration, list[Proposal]]:
    """Combine what was shown to help, one by one; also return what has to be measured to know more."""
    best, best_ns = Configuration(), float("inf")
    wanted: list[Proposal] = []

    def tried(candidate: Configuration) -> None:
        nonlocal best, best_ns
        if not _is_possible(space, candidate) or len(wanted) >= _AHEAD:
            return
        trial = None
        if not best.settings:  # screening was this very comparison; if it was unclear, measure again
            trial = known.ended(Proposal("screen", candidate))
            trial = trial if trial is not None and trial.is_shown else None
        proposal = Proposal("combine", candidate, best)
        trial = trial or known.ended(proposal)
        if trial is None:
            wanted.append(proposal)
        elif trial.is_shown and not wanted:  # the settings after an unknown one count only if that one does not help
            best = candidate
            best_ns = (trial.measured.after_ns if trial.measured is not None else None) or best_ns

    for name, value in _by_gain(space, known):
        if best.value(name) is None:
            tried(best.with_setting(name, value))
    for knob in space.knobs:
        if knob.needs and best.value(knob.needs) not in (None, "0"):
            for value in knob.values:
                tried(best.with_setting(knob.name, value))
    for name, chosen in best.settings:
        for value in space.knob(name).values:
            if value != chosen and value in _usable(space, known, name):
                tried(best.with_setting(name, value))
    for name, value in _hidden(space, known, best_ns):
        if best.value(name) is None:
            tried(best.with_setting(name, value))
    return best, wanted


def _hidden(space: Space, known: _Known, best_ns: float) -> Iterator[tuple[str, str]]:
    """Settings without a gain alone that may show one beside a step much shorter than the one they were tried on."""
    for knob in space.knobs:
        for value in knob.values:
            trial = known.alone(knob.name, value)
            if trial is None or trial.measured is None or trial.is_promising or not trial.keeps_losses:
                continue
            before_ns, change_low = trial.measured.before_ns, trial.measured.change_low
            if before_ns is None or change_low is None or best_ns > _HIDDEN_UNTIL * before_ns:
                continue
            if trial.measured.verdict != "slower" and -change_low * before_ns >= _HIDDEN_GAIN * best_ns:
                yield knob.name, value


def _by_gain(space: Space, known: _Known) -> list[tuple[str, str]]:
    """Settings that may help alone, the largest gain first."""
    settings = ((knob.name, value, known.alone(knob.name, value)) for knob in space.knobs for value in knob.values)
    found = [(-(trial.gain or 0.0), name, value) for name, value, trial in settings if trial and trial.is_promising]
    return [(name, value) for _, name, value in sorted(found)]


def _usable(space: Space, known: _Known, name: str) -> tuple[str, ...]:
    """The values of a knob that neither failed alone nor did much harm."""
    knob = space.knob(name)
    if knob.needs:
        return knob.values
    found = []
    for value in knob.values:
        trial = known.alone(name, value)
        if trial is not None and trial.keeps_losses and trial.gain is not None and trial.gain > _HARMFUL:
            found.append(value)
    return tuple(found)


def _is_possible(space: Space, configuration: Configuration) -> bool:
    words = space.apply_words(configuration)
    try:
        return not words or bool(parse_applications(",".join(words)))
    except UsageError:
        return False


def _refined(best: Configuration, known: _Known) -> tuple[Configuration, Proposal | None]:
    """The best with the refinements that were shown to help, in the order in which they were measured.

    Also what has to be measured to know whether all of the last one is needed; None if that is known.
    """
    for trial in known.refinements():
        if trial.is_shown and trial.proposal.reference == best:
            added = [name for name, value in trial.proposal.configuration.settings if best.value(name) != value]
            best = trial.proposal.configuration
            for name in added if len(added) > 1 else ():
                proposal = Proposal("simplify", best.without(name), best)
                found = known.ended(proposal)
                if found is None:
                    return best, proposal
                if found.keeps_losses and found.gain is not None and found.gain > -LEAST_GAIN:
                    best = proposal.configuration
    return best, None


def _may_refine(space: Space, known: _Known, best: Configuration) -> bool:
    """Whether to ask a sampler: something helps, there is more to combine, and patience is left."""
    tried = known.refinements()
    if not best.settings or len(tried) >= MOST_REFINEMENTS:
        return False
    if len(tried) >= PATIENCE and not any(trial.is_shown for trial in tried[-PATIENCE:]):
        return False
    return len(choices(space, [*known.trials], best)) > 1


def choices(space: Space, trials: Sequence[Trial], best: Configuration) -> dict[str, tuple[str, ...]]:
    """The knobs and values that refinements combine: those in the best, and those that did no harm alone."""
    known = _Known(trials)
    served = [knob for knob in space.knobs if not knob.needs or best.value(knob.needs) not in (None, "0")]
    usable = {knob.name: _usable(space, known, knob.name) for knob in served}
    return {name: values for name, values in usable.items() if values}


def is_new(space: Space, trials: Sequence[Trial], configuration: Configuration) -> bool:
    """Whether a refinement is possible and no trial has measured it."""
    if not configuration.settings or not _is_possible(space, configuration):
        return False
    return all(trial.proposal.configuration != configuration for trial in trials)
