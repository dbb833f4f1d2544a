"""One step of a search: decide from the trials alone what to do next, and measure it as `stepscope bench` does."""

from __future__ import annotations

import os
import platform
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal, Protocol, TypeAlias

from stepscope.compare.bench import (
    Bench,
    BenchCommand,
    BenchFailure,
    BenchRun,
    BenchSettings,
    end_leftovers,
    last_lines,
    measure_round,
    stop_of,
)
from stepscope.errors import UsageError
from stepscope.record.apply import applied_outcomes, environment_of, parse_applications
from stepscope.record.apply.flags import Outcome as AppliedOutcome
from stepscope.record.run_folder import RunFolder
from stepscope.tune.study import held
from stepscope.tune.trials import (
    LEAST_GAIN,
    TOLERANCES,
    Configuration,
    LossCheck,
    Measured,
    Proposal,
    Space,
    Trial,
    compare_losses,
)

Phase: TypeAlias = Literal["screen", "combine", "refine", "simplify", "proof", "done"]

MOST_REFINEMENTS: Final = 8
PATIENCE: Final = 4
"""Refinement ends after this many in a row that are not shown to help."""
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
        proposals: what nobody has measured or is measuring, the most useful first; empty while others measure what
            the next step depends on, and in "refine", where a sampler makes them.
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
        """The proposals that nobody has measured or is measuring."""
        return tuple(each for each in proposals if each not in self._taken)

    def refinements(self) -> list[Trial]:
        return [each for each in self.trials if each.proposal.purpose == "refine" and each.state != "running"]


def plan(space: Space, trials: Sequence[Trial], *, hurry: bool = False) -> Plan:
    """Decide what to do next.

    Args:
        trials: all of the study, without those whose process ended before it stored an outcome.
        hurry: prove what is known by now, or else what looks best, and stop searching.
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
    if hurry and not best.settings:
        return _proof_of_promising(space, known)
    return _proof(best, known)


def _proof(best: Configuration, known: _Known) -> Plan:
    if not best.settings:
        return Plan("done", best)
    proposal = Proposal("proof", best)
    found = known.ended(proposal)
    return Plan("done", best, proof=found) if found is not None else Plan("proof", best, known.open([proposal]))


def _proof_of_promising(space: Space, known: _Known) -> Plan:
    """Prove the setting that looks best, where nothing is shown to help: fresh runs may show it."""
    promising = next((Configuration((setting,)) for setting in _by_gain(space, known)), Configuration())
    step = _proof(promising, known)
    is_shown = step.proof is not None and step.proof.is_shown
    return step if is_shown else replace(step, best=Configuration(), proof=None)


def _screens(space: Space) -> Iterator[Proposal]:
    """Every knob alone: the first value of each, then the second of each, and so on."""
    alone = [knob for knob in space.knobs if not knob.needs]
    for values in zip_longest(*[[(knob.name, value) for value in knob.values] for knob in alone]):
        for setting in values:
            if setting is not None:
                yield Proposal("screen", Configuration((setting,)))


def _combined(space: Space, known: _Known) -> tuple[Configuration, list[Proposal]]:
    """Combine what was shown to help, one by one; also return what to measure to know more."""
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
    """Settings without a gain alone that may show one now that the step is much shorter."""
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

    Also what to measure to know whether all of the last one is needed; None if that is known.
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


SCREEN_ROUNDS: Final = 2
MOST_ROUNDS: Final = 5
"""Most rounds of a combination: it ends earlier if the interval excludes 0, or the estimate is no gain."""
FEWEST_PROOF_ROUNDS: Final = 4
"""Applies even if no time is left: two runs per side show next to nothing."""
MOST_PROOF_ROUNDS: Final = 30
_HOPELESS: Final = 0.1
"""A configuration slower by more than this share after one round gets no second one."""
_LONGEST_FACTOR: Final = 10.0
_LONGEST_S: Final = 300.0
"""A run may take this factor of the reference's longest run and these seconds more, for instance to compile."""
_MEMORY: Final = re.compile(r"out of memory|OutOfMemoryError|MemoryError|cannot allocate memory", re.IGNORECASE)
UNCHECKED: Final = "it changes the results, and without a backward pass it is unknown by how much"
_CHANGES_RESULTS: Final = ("half", "tf32")
_KILLED: Final = ("exit code 137", "exit code 9")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of measuring a proposal.

    Attributes:
        measured: None if it failed.
        runs: each with "side" (A is the reference), "round", "step_ns", "dropped" and "losses".
        is_program: whether the program fails even without changes.
    """

    measured: Measured | None = None
    reason: str = ""
    runs: tuple[dict[str, Any], ...] = ()
    folder: str = ""
    is_program: bool = False


class Measure(Protocol):
    """Measures a proposal; `left_s` is the time left for everything still to be measured."""

    def __call__(self, proposal: Proposal, number: int, left_s: float) -> Outcome: ...


@dataclass
class BenchMeasure:
    """Measures with real runs of the program.

    Attributes:
        words: the command that is started.
        settings: steps, quiet machine, seed and precision of the proof.
        tolerance: allowed difference of the losses; None for each kind of change's own.
    """

    command: tuple[str, ...]
    words: tuple[str, ...]
    space: Space
    folder: Path
    settings: BenchSettings
    tolerance: float | None = None
    say: Callable[[Bench, BenchRun], None] = lambda bench, run: None
    _seeded: dict[Configuration, tuple[float, ...]] = field(default_factory=dict)
    _longest_s: float = 0.0

    def __call__(self, proposal: Proposal, number: int, left_s: float) -> Outcome:
        """Alternate runs of both sides until it is clear whether the configuration helps.

        Raises:
            UsageError: a program cannot be started, or the folder cannot be written.
            KeyboardInterrupt: on Ctrl-C.
        """
        bench = self._new_bench(proposal, number, left_s)
        try:
            environment_of(bench.commands[1].apply, os.environ)
        except UsageError as error:  # such as an allocator that is not installed here
            return Outcome(reason=str(error))
        with held(self.folder / f".measuring-{platform.node()}.lock"):
            end_leftovers(self.folder)  # left by a killed search: only this process measures this study on this machine
            return self._outcome_of(bench, proposal, left_s)

    def _outcome_of(self, bench: Bench, proposal: Proposal, left_s: float) -> Outcome:
        changed = tuple(set(proposal.configuration.settings) - set(proposal.reference.settings))
        while bench.stop is None:
            measure_round(bench, lambda run: self.say(bench, run))
            if bench.failure is not None:
                return self._failed(bench, bench.failure, proposal)
            if bench.rounds == 1:
                self._longest_s = max(self._longest_s, *(run.seconds for run in bench.runs_of("A")))
                why_not = self._why_not_applied(bench, Configuration(changed))
                if why_not:
                    return _outcome(bench, reason=why_not)
                losses = self._losses(bench, proposal)
                if losses.equal is False:
                    return _outcome(bench, self._measured(bench, losses), losses.sentence)
                if losses.equal is None and self.space.losses_of(proposal.configuration)[0] in _CHANGES_RESULTS:
                    return _outcome(bench, reason=UNCHECKED)
            if _is_enough(bench, proposal, left_s, is_promised=self._is_promised(changed)):
                break
        losses = self._losses(bench, proposal)
        return _outcome(bench, self._measured(bench, losses))

    def _is_promised(self, changed: Iterable[tuple[str, str]]) -> bool:
        return any(self.space.knob(name).promised_ns for name, _ in changed)

    def _new_bench(self, proposal: Proposal, number: int, left_s: float) -> Bench:
        settings = replace(self.settings, losses=True, budget_s=self._limit_s(left_s))
        if proposal.purpose == "proof":
            settings = replace(settings, rounds=MOST_PROOF_ROUNDS)
        folder = self.folder / "trials" / f"{number:03d}-{proposal.purpose}"
        commands = (self._bench_command("A", proposal.reference), self._bench_command("B", proposal.configuration))
        return Bench(commands, settings, folder)

    def _limit_s(self, left_s: float) -> float:
        if not self._longest_s:
            return max(left_s, _LONGEST_S)
        return max(min(left_s, _LONGEST_FACTOR * self._longest_s + _LONGEST_S), _LONGEST_FACTOR * self._longest_s)

    def _bench_command(self, label: str, configuration: Configuration) -> BenchCommand:
        arguments = self.space.arguments(configuration)
        variables = self.space.variables(configuration)
        text = shlex.join([*(f"{name}={value}" for name, value in variables.items()), *self.command, *arguments])
        words = (*self.words, *arguments)
        return BenchCommand(label, text, words, variables, self.space.apply_words(configuration))

    def _why_not_applied(self, bench: Bench, changed: Configuration) -> str:
        """Why a remedy was not applied in the first run; "" if all added ones were."""
        outcomes = _outcomes(bench, self.space.apply_words(changed))
        applied = {outcome.flag for outcome in outcomes if outcome.applied}
        missing = [outcome for outcome in outcomes if outcome.flag not in applied]
        return f"not applied: {missing[0].sentence}" if missing else ""

    def _losses(self, bench: Bench, proposal: Proposal) -> LossCheck:
        kind, draws = self.space.losses_of(proposal.configuration)
        tolerance = TOLERANCES[kind] if self.tolerance is None else self.tolerance
        before = [run.losses for run in bench.runs_of("A")]
        after = [run.losses for run in bench.runs_of("B")]
        found = compare_losses(before, after, tolerance=tolerance)
        if found.equal is False and found.largest is not None and draws:
            seeded = self._losses_of_another_seed(bench, proposal.reference)
            found = compare_losses(before, after, tolerance=tolerance, seeded=seeded)
        return found

    def _losses_of_another_seed(self, bench: Bench, reference: Configuration) -> tuple[float, ...]:
        """Losses of the reference; empty if that run fails."""
        if reference not in self._seeded:
            settings = replace(bench.settings, seed=(bench.settings.seed or 0) + 1)
            other = Bench((bench.commands[0],), settings, bench.folder / "another-seed")
            measure_round(other, lambda run: None)
            self._seeded[reference] = other.runs[0].losses if other.runs else ()
        return self._seeded[reference]

    def _measured(self, bench: Bench, losses: LossCheck) -> Measured:
        [(_, found)] = bench.comparisons()
        return Measured(
            before_ns=found.before_ns,
            after_ns=found.after_ns,
            change=found.change,
            change_low=found.change_low,
            change_high=found.change_high,
            confidence=found.confidence,
            verdict=found.verdict,
            rounds=bench.rounds,
            steps=found.after_steps,
            losses=losses,
            applied=tuple(outcome.text for outcome in _outcomes(bench, bench.commands[1].apply)),
            caveats=found.caveats,
            seconds=bench.seconds,
            other_cores=max((run.other_cores for run in bench.runs if run.other_cores is not None), default=None),
        )

    def _failed(self, bench: Bench, failure: BenchFailure, proposal: Proposal) -> Outcome:
        lines = last_lines(failure.log) if failure.log is not None else []
        reason = f"the program {failure.sentence}" + (f": {lines[-1].strip()}" if lines else "")
        if any(map(_MEMORY.search, lines)) or any(word in failure.sentence for word in _KILLED):
            reason = "out of memory"
        is_program = failure.label == "A" and not proposal.reference.settings
        if failure.label == "A":
            reason = f"its reference: {reason}"
        return _outcome(bench, reason=reason, is_program=is_program)


def _outcomes(bench: Bench, words: Sequence[str]) -> Sequence[AppliedOutcome]:
    """What the first changed run reported about these remedies."""
    return applied_outcomes(words, RunFolder(bench.runs_of("B")[0].folder)) if words else ()


def _is_enough(bench: Bench, proposal: Proposal, left_s: float, *, is_promised: bool = False) -> bool:
    """Whether the effect of the configuration is clear after a whole round.

    Args:
        is_promised: whether a finding promises a gain, so that more rounds are worth it until it shows.
    """
    if proposal.purpose == "proof":
        is_over = bench.seconds + bench.seconds / bench.rounds > left_s
        return bench.rounds >= FEWEST_PROOF_ROUNDS and (is_over or stop_of(bench) is not None)
    before, after = (fmean(fmean(run.steady_ns) for run in bench.runs_of(label)) for label in "AB")
    simplifies = proposal.purpose == "simplify"
    if not simplifies and after > before * (1 + _HOPELESS):
        return True
    if bench.rounds < SCREEN_ROUNDS:
        return False
    only_screened = proposal.purpose == "screen" and not is_promised
    if only_screened or bench.rounds >= MOST_ROUNDS or (after <= before) is simplifies:
        return True
    [(_, found)] = bench.comparisons()
    return found.is_shown


def _outcome(bench: Bench, measured: Measured | None = None, reason: str = "", *, is_program: bool = False) -> Outcome:
    runs = tuple(
        {
            "side": run.label,
            "round": run.round,
            "step_ns": list(run.step_ns),
            "dropped": run.warm_up.dropped,
            "losses": list(run.losses),
        }
        for run in bench.runs
    )
    return Outcome(measured, reason, runs, str(bench.folder), is_program)
