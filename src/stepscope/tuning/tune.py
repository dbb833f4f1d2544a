"""The search: plan, take, measure, tell, until nothing is left to do or the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from stepscope.errors import UsageError
from stepscope.tuning.locks import held
from stepscope.tuning.tune_knobs import Configuration, Space
from stepscope.tuning.tune_measure import FEWEST_PROOF_ROUNDS, Measure
from stepscope.tuning.tune_plan import Plan, choices, plan
from stepscope.tuning.tune_study import TuneStudy
from stepscope.tuning.tune_trials import Proposal, Trial

Stop: TypeAlias = Literal["done", "budget", "interrupted"]

_PROOF_SHARE: Final = 0.2
"""Of the budget, kept for the proof; more where runs take long, but never more than half."""
_PROOF_RUNS: Final = 2 * FEWEST_PROOF_ROUNDS
_WAIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class TuneResult:
    """What a search came to.

    Attributes:
        space: what was searched.
        trials: in the order in which they were taken, those of other processes among them.
        best: the configuration that was shown to help most; empty where none was.
        proof: the fresh measurement of the best; None where there is none yet.
        stop: why the search ended; "done" where nothing is left to try.
        seconds: of this process.
    """

    space: Space
    trials: tuple[Trial, ...]
    best: Configuration
    proof: Trial | None
    stop: Stop
    seconds: float

    @property
    def is_proven(self) -> bool:
        """Whether fresh runs show that the best is faster and that its losses stay equal."""
        return self.proof is not None and self.proof.is_shown


@dataclass(frozen=True, slots=True)
class Search:
    """One process's part in a search.

    Attributes:
        study: that it shares with others.
        measure: measures a proposal.
        lock: the file that keeps two processes of a machine from measuring at the same time.
        budget_s: seconds after which no further trial begins.
        tell: is told of each trial, and of a proposal before it is measured.
        waiting: called where another process of this machine measures.
        pause_s: seconds between two trials, in which another process may take its turn.
    """

    study: TuneStudy
    space: Space
    measure: Measure
    lock: Path
    budget_s: float
    begins: Callable[[Proposal, Plan], None] = lambda proposal, step: None
    tell: Callable[[Trial], None] = lambda trial: None
    waiting: Callable[[], None] = lambda: None
    pause_s: float = 0.2

    def run(self) -> TuneResult:
        """Search until nothing is left to do, the budget is used up, or Ctrl-C comes.

        Raises:
            UsageError: the program fails as it is, or cannot be started.
        """
        begun_s = time.monotonic()
        self.study.set_unclear_proofs_aside()
        stop: Stop = "done"
        try:
            while self._step(self.budget_s - (time.monotonic() - begun_s)):
                pass
            if plan(self.space, self.study.trials()).phase not in ("done", "proof", "refine"):
                stop = "budget"
        except KeyboardInterrupt:
            stop = "interrupted"
        trials = self.study.trials()
        last = plan(self.space, trials, hurry=True)
        return TuneResult(self.space, tuple(trials), last.best, last.proof, stop, time.monotonic() - begun_s)

    def _step(self, left_s: float) -> bool:
        """Measure one proposal, or wait for others; returns whether the search goes on."""
        with held(self.lock, self.waiting):
            trials = self.study.trials()
            step = plan(self.space, trials, hurry=left_s < self._reserve_s(trials))
            if step.phase == "done" and step.proof is None and left_s > 0:  # nothing to keep time for a proof of
                step = plan(self.space, trials)
            proposal = step.proposals[0] if step.proposals else None
            if step.phase == "refine":
                proposal = self.study.suggested(self.space, choices(self.space, trials, step.best), step.best)
                if proposal is None:  # every combination is known
                    step = plan(self.space, trials, hurry=True)
                    proposal = step.proposals[0] if step.proposals else None
            if step.phase == "done":
                return False
            if proposal is not None:
                self._measured(proposal, step, trials, left_s)
        time.sleep(_WAIT_S if proposal is None else self.pause_s)
        return True

    def _measured(self, proposal: Proposal, step: Plan, trials: Sequence[Trial], left_s: float) -> None:
        with self.study.claimed(proposal, self.space) as claim:
            if claim is None:
                return
            self.begins(claim.proposal, step)
            outcome = self.measure(claim.proposal, claim.number, max(left_s, 1.0))
            if outcome.is_program and not any(trial.state == "measured" for trial in trials):
                raise UsageError(outcome.reason)
            self.tell(claim.tell(outcome, reference=share_of_unchanged(claim.proposal.reference, trials)))

    def _reserve_s(self, trials: Sequence[Trial]) -> float:
        """Seconds that the proof needs, as far as the trials tell."""
        runs = [
            trial.measured.seconds / (2 * trial.measured.rounds)
            for trial in trials
            if trial.measured is not None and trial.measured.rounds
        ]
        longest_s = _PROOF_RUNS * max(runs, default=0.0)
        return min(max(_PROOF_SHARE * self.budget_s, longest_s), self.budget_s / 2)


def share_of_unchanged(configuration: Configuration, trials: Sequence[Trial]) -> float:
    """A configuration's step as a share of the unchanged program's, from the measurements that led to it."""
    if not configuration.settings:
        return 1.0
    for trial in trials:
        measured = trial.measured
        if trial.proposal.configuration == configuration and measured is not None and measured.change is not None:
            return (1 + measured.change) * share_of_unchanged(trial.proposal.reference, trials)
    return 1.0
