"""The search loop: plan, take a proposal, measure it, store the outcome, until nothing is left or time is up."""

from __future__ import annotations

import contextlib
import platform
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from stepscope.errors import UsageError
from stepscope.files import converted
from stepscope.tune.next_trial import FEWEST_PROOF_ROUNDS, Measure, Outcome, Plan, choices, is_new, plan
from stepscope.tune.study import BEAT_S, OWNER, SharedStudy, held, import_optuna
from stepscope.tune.trials import ON, Configuration, Measured, Proposal, Space, Trial

if TYPE_CHECKING:
    import optuna


UNCHANGED: Final = "unchanged"
"""The value of a knob that keeps the program's own setting."""
_ON: Final = "on"
_MOST_ASKED: Final = 32
_PROGRAM: Final = "program"
_SPACE: Final = "space"
_PROPOSAL: Final = "proposal"
_OUTCOME: Final = "outcome"


class TuneStudy(SharedStudy):
    def __init__(self, study: optuna.Study) -> None:
        super().__init__(study)
        self._aside: frozenset[int] = frozenset()

    def check_program(self, program: Mapping[str, Any]) -> None:
        """Store which program is tuned, or check that it is the same as before.

        Raises UsageError if the study is about another program, or the program was changed.
        """
        known, name = self.study.user_attrs.get(_PROGRAM), self.study.study_name
        if known is None:
            if self.study.get_trials(deepcopy=False):
                raise UsageError(f"stepscope tune did not create the study {name}; choose another name")
            self.study.set_user_attr(_PROGRAM, dict(program))
            return
        if known.get("words") != list(program["words"]):
            words = " ".join(map(str, known.get("words", ())))
            raise UsageError(f"the study {name} belongs to another command, {words}")
        changed = next((key for key, value in program.items() if known.get(key) != value), None)
        if changed is not None:
            raise UsageError(
                f"the study {name} was begun with another {changed}, so its trials cannot be compared with new ones; "
                "--study with another name starts anew"
            )

    def space(self) -> Space | None:
        """The search space; None if it is not yet stored. If several processes stored one at once, the first."""
        found = sorted(name for name in self.study.user_attrs if name.startswith(_SPACE))
        return self._read(self.study.user_attrs[found[0]], Space) if found else None

    def keep_space(self, space: Space) -> Space:
        """Store the search space; return the one that all processes use."""
        self.study.set_user_attr(f"{_SPACE} {time.time_ns()} {self.owner['process']}", msgspec.to_builtins(space))
        return self.space() or space

    def trials(self) -> list[Trial]:
        """Trials that were measured, failed for a reason of their own, or are being measured."""
        found = []
        for frozen in self.study.get_trials(deepcopy=False):
            attributes, is_running = frozen.user_attrs, frozen.state.name == "RUNNING"
            if _PROPOSAL not in attributes or frozen.state.name == "WAITING" or frozen.number in self._aside:
                continue
            if is_running and self.is_lost(frozen):
                with contextlib.suppress(ValueError, RuntimeError):  # another process was first
                    self.study.tell(frozen.number, state=import_optuna().trial.TrialState.FAIL)
            elif _OUTCOME in attributes or is_running:
                found.append(self._trial(frozen.number, attributes))
        return found

    def _trial(self, number: int, attributes: Mapping[str, Any]) -> Trial:
        try:
            proposal = Proposal.from_key(attributes[_PROPOSAL])
        except (TypeError, ValueError) as error:
            raise self._damaged(error) from error
        if _OUTCOME in attributes:
            return self._read(attributes[_OUTCOME], _Kept).trial(number, proposal)
        return Trial(number, proposal, "running", machine=str((attributes.get(OWNER) or {}).get("machine", "")))

    def _read(self, content: Any, kind: type[_Record]) -> _Record:
        try:
            return converted(content, kind)
        except msgspec.ValidationError as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> UsageError:
        name = self.study.study_name
        return UsageError(f"the study {name} is damaged, or from another version of stepscope: {error}")

    def set_unclear_proofs_aside(self) -> None:
        """Have inconclusive proofs that contradict nothing measured again: a search resumes, with new time."""
        proofs = [trial for trial in self.trials() if trial.proposal.purpose == "proof" and trial.state == "measured"]
        self._aside |= {trial.number for trial in proofs if trial.keeps_losses and not trial.is_shown}

    @contextlib.contextmanager
    def claimed(self, proposal: Proposal, space: Space) -> Iterator[Claim | None]:
        """Take a proposal, or another one that waits; None if another process was first.

        The claim is released when the block ends without an outcome, for whatever reason.
        """
        if self._is_known(proposal.key):
            yield None
            return
        parameters = _parameters(space, proposal.configuration)
        self.study.enqueue_trial(parameters, user_attrs={_PROPOSAL: proposal.key})
        trial = self.study.ask(_distributions({knob.name: knob.values for knob in space.knobs}))
        key = trial.user_attrs.get(_PROPOSAL)
        self.take(trial)
        claim = None
        if key is not None and not self._is_known(key, before=trial.number):
            claim = Claim(self, trial, Proposal.from_key(key))
        try:
            with self._beating(trial):
                yield claim
        finally:
            if claim is None or claim.trial is None:
                trial.set_user_attr("given_back", True)
                self.study.tell(trial, state=import_optuna().trial.TrialState.FAIL)

    @contextlib.contextmanager
    def _beating(self, trial: optuna.Trial) -> Iterator[None]:
        """Record now and then that this process is alive, for processes on other machines."""
        over = threading.Event()

        def note() -> None:
            while not over.wait(BEAT_S):
                with contextlib.suppress(UsageError):  # the database is busy or away: the next one may succeed
                    self.beat(trial)

        thread = threading.Thread(target=note, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def suggested(self, space: Space, chosen: Mapping[str, Sequence[str]], best: Configuration) -> Proposal | None:
        """A further combination that Optuna's TPE suggests from the measurements; None if there is nothing new."""
        optuna = import_optuna()
        trials = self.trials()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that multivariate sampling is experimental in Optuna
            sampler = optuna.samplers.TPESampler(seed=len(trials), n_startup_trials=5, multivariate=True)
        advice = optuna.create_study(sampler=sampler)
        distributions = _distributions(chosen)
        for frozen in self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,)):
            params = {name: frozen.params.get(name, UNCHANGED) for name in distributions}
            if all(params[name] in each.choices for name, each in distributions.items()):
                known = optuna.trial.create_trial(params=params, distributions=distributions, value=frozen.value)
                advice.add_trial(known)
        for _ in range(_MOST_ASKED):
            asked = advice.ask(distributions).params
            settings = {name: ON if value == _ON else value for name, value in asked.items() if value != UNCHANGED}
            needs = {name: space.knob(name).needs for name in settings}
            configuration = Configuration.of(
                {name: settings[name] for name, of in needs.items() if not of or settings.get(of) not in (None, "0")}
            )
            if is_new(space, trials, configuration):
                return Proposal("refine", configuration, best)
        return None

    def _is_known(self, key: str, before: float = float("inf")) -> bool:
        return any(trial.proposal.key == key and trial.number < before for trial in self.trials())


@dataclass(frozen=True, slots=True)
class _Kept:
    state: Literal["measured", "failed"]
    reason: str
    measured: Measured | None
    machine: str
    folder: str

    def trial(self, number: int, proposal: Proposal) -> Trial:
        return Trial(number, proposal, self.state, self.reason, self.measured, self.machine, self.folder)


_Record = TypeVar("_Record", Space, _Kept)


class Claim:
    """A proposal that this process measures, with its trial number.

    Attributes:
        trial: the outcome, once it is stored.
    """

    def __init__(self, study: TuneStudy, taken: optuna.Trial, proposal: Proposal) -> None:
        self._study, self._taken = study.study, taken
        self.number, self.proposal = taken.number, proposal
        self.trial: Trial | None = None

    def tell(self, outcome: Outcome, *, reference: float = 1.0) -> Trial:
        """Store the outcome.

        Args:
            reference: the step of the proposal's reference, as a share of the unchanged program's.
        """
        for run in outcome.runs:
            self._taken.set_user_attr(f"run {run['side']}-{run['round']}", run)
        measured, reason = outcome.measured, outcome.reason
        change = None if measured is None else measured.change
        if change is None:
            kept = _Kept("failed", reason or "no steps were measured", None, platform.node(), outcome.folder)
        else:
            kept = _Kept("measured", reason, measured, platform.node(), outcome.folder)
        self._taken.set_user_attr(_OUTCOME, msgspec.to_builtins(kept))
        if change is None:
            self._study.tell(self._taken, state=import_optuna().trial.TrialState.FAIL)
        else:
            self._study.tell(self._taken, (1 + change) * reference)
        self.trial = kept.trial(self.number, self.proposal)
        return self.trial


def _distributions(values: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    make: Callable[[list[str]], Any] = import_optuna().distributions.CategoricalDistribution
    return {name: make([UNCHANGED, *map(_named, those)]) for name, those in values.items()}


def _parameters(space: Space, configuration: Configuration) -> dict[str, str]:
    chosen = {name: _named(value) for name, value in configuration.settings}
    return {knob.name: chosen.get(knob.name, UNCHANGED) for knob in space.knobs}


def _named(value: str) -> str:
    return _ON if value == ON else value


Stop: TypeAlias = Literal["done", "budget", "interrupted"]

_PROOF_SHARE: Final = 0.2
"""Share of the budget reserved for the proof; more if runs take long, but never more than half."""
_PROOF_RUNS: Final = 2 * FEWEST_PROOF_ROUNDS
_WAIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class TuneResult:
    """The result of a search.

    Attributes:
        trials: in the order in which they were taken, including those of other processes.
        best: the configuration that was shown to help most; empty if none was.
        stop: why the search ended; "done" if nothing is left to try.
        seconds: spent in this process.
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
        lock: the file that keeps two processes of a machine from measuring at the same time.
        budget_s: seconds after which no further trial begins.
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
        """Search until nothing is left to do, the budget is used up, or Ctrl-C is pressed.

        Raises UsageError if the program fails even without changes, or cannot be started.
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
        """Measure one proposal, or wait for others; returns whether the search continues."""
        with held(self.lock, self.waiting):
            trials = self.study.trials()
            step = plan(self.space, trials, hurry=left_s < self._reserve_s(trials))
            if step.phase == "done" and step.proof is None and left_s > 0:  # nothing to prove
                step = plan(self.space, trials)
            proposal = step.proposals[0] if step.proposals else None
            if step.phase == "refine":
                proposal = self.study.suggested(self.space, choices(self.space, trials, step.best), step.best)
                if proposal is None:  # every combination has been measured
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
        """Estimate from the trials how many seconds the proof needs."""
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
