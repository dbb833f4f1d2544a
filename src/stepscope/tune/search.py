"""The search: plan, take, measure, tell, until nothing is left to do or the time is over."""

from __future__ import annotations

import contextlib
import platform
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from stepscope.errors import UsageError
from stepscope.tune.knobs import ON, Configuration, Space
from stepscope.tune.measure import FEWEST_PROOF_ROUNDS, Measure, Outcome
from stepscope.tune.plan import Plan, choices, is_new, plan
from stepscope.tune.storage import held, import_optuna, is_alive, process_name
from stepscope.tune.trials import Measured, Proposal, Trial

if TYPE_CHECKING:
    import optuna


UNCHANGED: Final = "unchanged"
"""The value of a knob that is left as the program has it."""
_ON: Final = "on"
_SIGN_OF_LIFE_S: Final = 20.0
_SILENT_S: Final = 180.0
"""Seconds without a sign of life after which a process on another machine counts as ended."""
_MOST_ASKED: Final = 32
_PROGRAM: Final = "program"
_SPACE: Final = "space"


class TuneStudy:
    """The study of one program.

    Args:
        study: of Optuna; many processes may hold the same.
    """

    def __init__(self, study: optuna.Study) -> None:
        self._study = study
        self._owner = process_name()
        self._aside: frozenset[int] = frozenset()

    def check_program(self, program: Mapping[str, Any]) -> None:
        """Keep what is tuned, or see that it is the same as before.

        Raises:
            UsageError: the study is about another program, or the program was changed.
        """
        known = self._study.user_attrs.get(_PROGRAM)
        if known is None and self._study.get_trials(deepcopy=False):
            raise UsageError(f"the study {self._study.study_name} is not one of stepscope tune; take another name")
        if known is None:
            self._study.set_user_attr(_PROGRAM, dict(program))
            return
        if known.get("words") != list(program["words"]):
            words = " ".join(map(str, known.get("words", ())))
            raise UsageError(f"the study {self._study.study_name} is about another command, {words}")
        for name, value in program.items():
            if known.get(name) != value:
                raise UsageError(
                    f"the study {self._study.study_name} was begun with another {name}, and its trials cannot be "
                    "compared with new ones; --study with another name begins anew"
                )

    def space(self) -> Space | None:
        """What is searched; None where nobody has said so yet. Of several that processes wrote at once, the first."""
        found = sorted(name for name in self._study.user_attrs if name.startswith(_SPACE))
        with self._readable():
            return Space.from_json(self._study.user_attrs[found[0]]) if found else None

    def keep_space(self, space: Space) -> Space:
        """Keep what is searched; returns what everybody searches."""
        self._study.set_user_attr(f"{_SPACE} {time.time_ns()} {self._owner['process']}", space.to_json())
        return self.space() or space

    def trials(self) -> list[Trial]:
        """Those that were measured, that failed for a reason of their own, and that are being measured."""
        states = import_optuna().trial.TrialState
        found = []
        for frozen in self._study.get_trials(deepcopy=False):
            if "proposal" not in frozen.user_attrs or frozen.state is states.WAITING or frozen.number in self._aside:
                continue
            if frozen.state is states.RUNNING and self._is_lost(frozen.user_attrs):
                with contextlib.suppress(ValueError, RuntimeError):  # another process was first
                    self._study.tell(frozen.number, state=states.FAIL)
                continue
            outcome = frozen.user_attrs.get("outcome")
            if outcome is not None or frozen.state is states.RUNNING:
                with self._readable():
                    found.append(_trial(frozen.number, frozen.user_attrs))
        return found

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        """Turn what is wrong with the content of a study into one sentence."""
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            name = self._study.study_name
            raise UsageError(f"the study {name} is damaged, or of another version of stepscope: {error!r}") from error

    def set_unclear_proofs_aside(self) -> None:
        """Have proofs that show nothing, and contradict nothing, measured again: a search goes on, with new time."""
        proofs = [trial for trial in self.trials() if trial.proposal.purpose == "proof" and trial.state == "measured"]
        self._aside |= {trial.number for trial in proofs if trial.keeps_losses and not trial.is_shown}

    @contextlib.contextmanager
    def claimed(self, proposal: Proposal, space: Space) -> Iterator[Claim | None]:
        """Take a proposal, or another one that waits; None where another process was first.

        The claim is given back when the block ends without an outcome told, however that comes.
        """
        states = import_optuna().trial.TrialState
        ended = [trial for trial in self.trials() if trial.proposal.key == proposal.key]
        if ended:
            yield None
            return
        self._study.enqueue_trial(_params(space, proposal.configuration), user_attrs={"proposal": proposal.key})
        trial = self._study.ask(_distributions(space))
        key = trial.user_attrs.get("proposal")
        trial.set_user_attr("owner", {**self._owner, "alive_unix_s": time.time()})
        claim = None
        if key is not None and not self._is_taken(key, trial.number):
            claim = Claim(self._study, trial, Proposal.from_key(key))
        try:
            with _signs_of_life(trial, self._owner):
                yield claim
        finally:
            if claim is None or not claim.told:
                trial.set_user_attr("given_back", True)
                self._study.tell(trial, state=states.FAIL)

    def suggested(self, space: Space, chosen: Mapping[str, Sequence[str]], best: Configuration) -> Proposal | None:
        """A further combination that Optuna's TPE suggests from what was measured; None where there is nothing new."""
        optuna = import_optuna()
        names = {name: [UNCHANGED, *map(_named, values)] for name, values in chosen.items() if space.knob(name).values}
        trials = self.trials()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that several parameters at once are an experiment of Optuna's
            sampler = optuna.samplers.TPESampler(seed=len(trials), n_startup_trials=5, multivariate=True)
        advice = optuna.create_study(sampler=sampler)
        distributions = {name: optuna.distributions.CategoricalDistribution(values) for name, values in names.items()}
        for frozen in self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,)):
            params = {name: frozen.params.get(name, UNCHANGED) for name in names}
            if all(params[name] in names[name] for name in names):
                advice.add_trial(
                    optuna.trial.create_trial(params=params, distributions=distributions, value=frozen.value)
                )
        for _ in range(_MOST_ASKED):
            asked = advice.ask(distributions).params
            settings = {name: _value(value) for name, value in asked.items() if value != UNCHANGED}
            settings = {name: value for name, value in settings.items() if _has_what_it_needs(space, name, settings)}
            configuration = Configuration.of(settings)
            if is_new(space, trials, configuration):
                return Proposal("refine", configuration, best)
        return None

    def _is_taken(self, key: str, number: int) -> bool:
        """Whether a trial before this one measures the same."""
        return any(trial.proposal.key == key and trial.number < number for trial in self.trials())

    def _is_lost(self, attributes: Mapping[str, Any]) -> bool:
        owner = attributes.get("owner")
        if not isinstance(owner, Mapping):
            return False  # taken just now; where its process died then, the plan waits for nobody
        if owner.get("machine") == self._owner["machine"]:
            return not is_alive(owner)
        return time.time() - float(owner.get("alive_unix_s", 0.0)) > _SILENT_S


class Claim:
    """A trial that this process measures.

    Attributes:
        proposal: what is to be measured.
        told: whether it was said what came of it.
    """

    def __init__(self, study: optuna.Study, trial: optuna.Trial, proposal: Proposal) -> None:
        self._study = study
        self._trial = trial
        self.proposal = proposal
        self.told = False

    @property
    def number(self) -> int:
        """Of the trial in the study."""
        return self._trial.number

    def tell(self, outcome: Outcome, *, reference: float = 1.0) -> Trial:
        """Keep what came of it.

        Args:
            reference: the step of the proposal's reference, as a share of the unchanged program's.
        """
        for run in outcome.runs:
            self._trial.set_user_attr(f"run {run['side']}-{run['round']}", run)
        measured = outcome.measured
        change = None if measured is None else measured.change
        failed = change is None
        content = {
            "state": "failed" if failed else "measured",
            "reason": outcome.reason or ("no steps were measured" if failed else ""),
            "measured": None if measured is None or failed else measured.to_json(),
            "machine": platform.node(),
            "folder": outcome.folder,
        }
        self._trial.set_user_attr("outcome", content)
        if change is None:
            self._study.tell(self._trial, state=import_optuna().trial.TrialState.FAIL)
        else:
            self._study.tell(self._trial, (1 + change) * reference)
        self.told = True
        return _trial(self.number, {"proposal": self.proposal.key, "outcome": content})


def _trial(number: int, attributes: Mapping[str, Any]) -> Trial:
    proposal = Proposal.from_key(attributes["proposal"])
    outcome = attributes.get("outcome")
    if outcome is None:
        owner = attributes.get("owner") or {}
        return Trial(number, proposal, "running", machine=str(owner.get("machine", "")))
    measured = outcome["measured"]
    return Trial(
        number,
        proposal,
        outcome["state"],
        str(outcome["reason"]),
        None if measured is None else Measured.from_json(measured),
        str(outcome["machine"]),
        str(outcome["folder"]),
    )


@contextlib.contextmanager
def _signs_of_life(trial: optuna.Trial, owner: Mapping[str, Any]) -> Iterator[None]:
    """Note now and then that this process is still there, for those on other machines."""
    over = threading.Event()

    def note() -> None:
        while not over.wait(_SIGN_OF_LIFE_S):
            with contextlib.suppress(Exception):  # the database is busy or away: the next sign may come through
                trial.set_user_attr("owner", {**owner, "alive_unix_s": time.time()})

    thread = threading.Thread(target=note, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _distributions(space: Space) -> dict[str, Any]:
    make: Callable[[list[str]], Any] = import_optuna().distributions.CategoricalDistribution
    return {knob.name: make([UNCHANGED, *map(_named, knob.values)]) for knob in space.knobs}


def _params(space: Space, configuration: Configuration) -> dict[str, str]:
    chosen = dict(configuration.settings)
    return {knob.name: _named(chosen[knob.name]) if knob.name in chosen else UNCHANGED for knob in space.knobs}


def _named(value: str) -> str:
    return _ON if value == ON else value


def _value(name: str) -> str:
    return ON if name == _ON else name


def _has_what_it_needs(space: Space, name: str, settings: Mapping[str, str]) -> bool:
    needs = space.knob(name).needs
    return not needs or settings.get(needs) not in (None, "0")


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
