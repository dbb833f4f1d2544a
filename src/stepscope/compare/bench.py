"""Commands run in turn, their steps timed, until it is known well enough which is faster.

<folder>/<label>-<round>/output.log                  what the program printed
<folder>/<label>-<round>/rank<R>/steps-<P>.json      when its steps ended (`stepscope.record.bench_steps`)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal, TypeAlias

from stepscope.compare.bench_programs import BenchCommand, ProgramEnd, Record, job_ends_ns, read_records, run_logged
from stepscope.compare.statistics import SampleComparison, WarmUp, compare_samples, joint_confidence, warm_up
from stepscope.machine.observed import Machine
from stepscope.record.apply import applied_outcomes
from stepscope.record.apply.flags import Outcome
from stepscope.record.launch import environment_of
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder
from stepscope.record.run_process import RunOptions

try:
    import resource
except ImportError:  # not on Windows, where there is no /proc/stat either
    resource = None  # type: ignore[assignment]


class LoadMeter:
    """Counts, from its making on, the processor time of the whole machine and that of this process and its children."""

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine = machine or Machine()
        self._begun_s = time.monotonic()
        self._machine_s = _machine_seconds(self._machine)
        self._own_s = _own_seconds()

    def other_cores(self) -> float | None:
        """Cores that others kept busy since, on average; None where the system does not say.

        Children count when they have ended and been waited for.
        """
        seconds, machine_s, own_s = time.monotonic() - self._begun_s, _machine_seconds(self._machine), _own_seconds()
        if self._machine_s is None or machine_s is None or self._own_s is None or own_s is None or seconds <= 0:
            return None
        return max(machine_s - self._machine_s - (own_s - self._own_s), 0.0) / seconds


def _machine_seconds(machine: Machine) -> float | None:
    """Seconds that all cores together were busy, without what a hypervisor took."""
    try:
        words = (machine.read("proc/stat") or "").splitlines()[0].split()
        user, nice, system, _, _, irq, soft = map(int, words[1:8])
        return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")
    except (ValueError, IndexError, AttributeError):
        return None


def _own_seconds() -> float | None:
    if resource is None:
        return None
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


Stop: TypeAlias = Literal["precision", "rounds", "budget", "interrupted", "failed"]

FEWEST_ROUNDS: Final = 2
"""So that each command comes first once."""
FEWEST_STEPS: Final = 2
CONFIDENCE: Final = 0.95
LOG: Final = "output.log"


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """How long and how carefully is measured.

    Attributes:
        steps: steps to time in a run, those of its warm-up among them; the program is ended after them.
        precision: half the width of the interval of each change, as a share of the first command's step, at which
            it is precise enough.
        budget_s: seconds after which no further round begins; the first two always do.
        rounds: at most so many; None leaves that to the budget.
        quiet: keep each rank to its own cores, and collect no garbage.
        seed: for the random generators of a quiet machine; None leaves them alone.
        show_output: let the programs write on standard error instead of into logs.
        losses: also keep the losses, and fix the random generators by `seed` where it is given, from the import of
            torch on (`stepscope.record.bench_steps`).
    """

    steps: int = 50
    precision: float = 0.01
    budget_s: float = 600.0
    rounds: int | None = None
    quiet: bool = False
    seed: int | None = None
    show_output: bool = False
    losses: bool = False

    def confidence(self, commands: int) -> float:
        """Of each interval, so that all of them together hold with `CONFIDENCE` (Bonferroni)."""
        return joint_confidence(CONFIDENCE, commands - 1)


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One run of one command.

    Attributes:
        label, round: of the command, and in which round, from 1.
        folder: the run's own.
        step_ns: every step that was timed, in order; of several ranks, from the last rank's end of a step to the
            last rank's end of the next.
        warm_up: how many of them do not count.
        source: what showed where steps end: "explicit", "optimizer", "loader" or "forward".
        clock: "device" where the times are those at which an accelerator came to the end of each step, else "host".
        ranks: processes whose steps these are.
        complete: whether it took as many steps as it was to.
        seconds: from the start of the program to its end.
        other_cores: cores that others kept busy meanwhile; None where unknown.
        own_profiler: whether the program used torch.profiler itself.
        said: about the quiet machine, a sentence each.
        losses: of the first rank, one for each backward pass; empty where they were not to be kept.
        applied: what became of the remedies that were to be applied.
    """

    label: str
    round: int
    folder: Path
    step_ns: tuple[int, ...]
    warm_up: WarmUp
    source: str
    clock: str
    ranks: int
    complete: bool
    seconds: float
    other_cores: float | None = None
    own_profiler: bool = False
    said: tuple[str, ...] = ()
    losses: tuple[float, ...] = ()
    applied: tuple[Outcome, ...] = ()

    @property
    def steady_ns(self) -> tuple[int, ...]:
        """The steps that count."""
        return self.step_ns[self.warm_up.dropped :]


@dataclass(frozen=True, slots=True)
class BenchFailure:
    """Why it could not go on.

    Attributes:
        label, round: the command that failed, and when.
        sentence: what happened.
        log: its output; None where it was shown, or is of no use.
    """

    label: str
    round: int
    sentence: str
    log: Path | None = None


@dataclass
class Bench:
    """What was measured so far.

    Attributes:
        commands: the first is the one that the others are compared with.
        runs: in the order in which they ran.
        stop: why no more were made; None while it goes on.
        failure: where that is because a command failed.
        seconds: since the beginning.
    """

    commands: tuple[BenchCommand, ...]
    settings: BenchSettings
    folder: Path
    runs: list[BenchRun] = field(default_factory=list)
    stop: Stop | None = None
    failure: BenchFailure | None = None
    seconds: float = 0.0

    @property
    def rounds(self) -> int:
        """Rounds in which every command ran."""
        return len(self.runs) // len(self.commands)

    def runs_of(self, label: str) -> list[BenchRun]:
        """The runs of one command, in order."""
        return [run for run in self.runs if run.label == label]

    def comparisons(self, rounds: int | None = None) -> list[tuple[BenchCommand, SampleComparison]]:
        """Each command but the first, compared with the first; `rounds` leaves later ones out."""
        confidence = self.settings.confidence(len(self.commands))
        steps = {
            command.label: [
                run.steady_ns for run in self.runs_of(command.label) if rounds is None or run.round <= rounds
            ]
            for command in self.commands
        }
        before = steps[self.commands[0].label]
        return [
            (command, compare_samples(before, steps[command.label], confidence=confidence))
            for command in self.commands[1:]
        ]


def order_of(count: int, round_number: int) -> list[int]:
    """Which command comes when in a round, from 1: A B, B A, B A, A B and so on.

    Each second round is the one before it the other way round, so that what drifts evenly hits all alike; each pair
    of rounds begins with another command.
    """
    pair, is_second = divmod(round_number - 1, 2)
    turned = [(place + pair) % count for place in range(count)]
    return turned[::-1] if is_second else turned


def measure(bench: Bench, tell: Callable[[BenchRun], None]) -> None:
    """Run the commands in turn until the settings say that it is enough, or one fails, or Ctrl-C comes.

    All of it stands in `bench` then, `stop` among it; nothing is raised for a program that fails.

    Args:
        tell: is told of each run.

    Raises:
        UsageError: a program cannot be started, or the folder cannot be written.
    """
    try:
        while bench.stop is None:
            measure_round(bench, tell)
            bench.stop = bench.stop or stop_of(bench)
    except KeyboardInterrupt:
        bench.stop = "interrupted"


def measure_round(bench: Bench, tell: Callable[[BenchRun], None]) -> None:
    """Run each command once more; where one fails, that stands in `bench.stop` and `bench.failure`.

    Raises:
        UsageError: a program cannot be started, or the folder cannot be written.
        KeyboardInterrupt: Ctrl-C came; the runs before stand in `bench`.
    """
    begun_s = time.monotonic() - bench.seconds
    number = bench.rounds + 1
    try:
        for place in order_of(len(bench.commands), number):
            run = _run(bench, bench.commands[place], number)
            bench.seconds = time.monotonic() - begun_s
            if isinstance(run, BenchFailure):
                bench.stop, bench.failure = "failed", run
                return
            bench.runs.append(run)
            tell(run)
    finally:
        bench.seconds = time.monotonic() - begun_s


def stop_of(bench: Bench) -> Stop | None:
    """Why there need not be another round, after a whole one.

    It must have been precise enough a round before too: an interval that is narrow once can be so by chance, and to
    stop at the first of these makes intervals that hold the truth less often than they promise.
    """
    settings = bench.settings
    if bench.rounds < FEWEST_ROUNDS:
        return None
    if all(_is_precise(bench, rounds) for rounds in (bench.rounds, bench.rounds - 1)):
        return "precision"
    if settings.rounds is not None and bench.rounds >= settings.rounds:
        return "rounds"
    return "budget" if bench.seconds + bench.seconds / bench.rounds > settings.budget_s else None


def _is_precise(bench: Bench, rounds: int) -> bool:
    """Whether these rounds alone tell every change precisely enough."""
    if rounds < FEWEST_ROUNDS:
        return False
    found = [(comparison.change_low, comparison.change_high) for _, comparison in bench.comparisons(rounds)]
    return all(
        low is not None and high is not None and (high - low) / 2 <= bench.settings.precision for low, high in found
    )


def _run(bench: Bench, command: BenchCommand, round_number: int) -> BenchRun | BenchFailure:
    settings = bench.settings
    options = RunOptions(
        steps=settings.steps,
        telemetry=False,
        quiet=settings.quiet,
        seed=settings.seed,
        measure=True,
        losses=settings.losses,
        apply=command.apply,
    )
    manifest = RunManifest.begin(command.words, time.time(), options=options.to_json(), redact=False)
    folder = RunFolder.create(bench.folder, f"{command.label}-{round_number}", manifest)
    log = None if settings.show_output else folder.path / LOG
    meter = LoadMeter()
    end = run_logged(
        command.words,
        environment_of(folder, options, {**os.environ, **command.variables}),
        log,
        limit_s=settings.budget_s,
        is_done=lambda: _all_complete(read_records(folder)),
    )
    records = read_records(folder)
    ends_ns = job_ends_ns(records)
    step_ns = tuple(second - first for first, second in pairwise(ends_ns))
    complete = len(step_ns) >= settings.steps
    problem = _problem(folder, end, len(ends_ns), complete, settings)
    if problem is not None:
        return BenchFailure(command.label, round_number, problem, log)
    first = records[0]
    return BenchRun(
        label=command.label,
        round=round_number,
        folder=folder.path,
        step_ns=step_ns,
        warm_up=warm_up(step_ns),
        source=first.source,
        clock=first.clock,
        ranks=len(records),
        complete=complete,
        seconds=end.seconds,
        other_cores=None if end.was_ended else meter.other_cores(),
        own_profiler=any(record.own_profiler for record in records),
        said=tuple(dict.fromkeys(sentence for record in records for sentence in record.said)),
        losses=first.losses,
        applied=tuple(applied_outcomes(command.apply, folder)),
    )


def _all_complete(records: Sequence[Record]) -> bool:
    complete = [record for record in records if record.complete]
    return bool(complete) and len(complete) >= complete[0].world_size


def _problem(folder: RunFolder, end: ProgramEnd, seen: int, complete: bool, settings: BenchSettings) -> str | None:
    """Why a run is of no use, in the words that follow the command; None where it is."""
    if complete:
        return None
    if end.exit_code != 0 and not end.was_ended:
        return f"failed with exit code {end.exit_code}{_how_many(seen)}"
    if seen > FEWEST_STEPS:
        return None
    if end.was_ended:
        return f"was ended after {end.seconds:.0f} s{_how_many(seen)}; --budget gives it more time"
    if seen:
        return f"ended{_how_many(seen)}; a comparison takes at least {FEWEST_STEPS + 1}"
    return "".join(_why_nothing(folder))


def _how_many(seen: int) -> str:
    if seen == 0:
        return " before a step was seen"
    return f" after {seen} step{'s' if seen > 1 else ''}"


def _why_nothing(folder: RunFolder) -> Iterator[str]:
    if not folder.was_seen("python"):
        yield "ran no Python program that stepscope could reach; python -I and -S keep it out"
        return
    yield "ended without a step that can be seen: "
    if folder.was_seen("torch"):
        yield "no optimizer stepped, no DataLoader was iterated and no module was called again and again"
    else:
        yield "it did not import torch"
    yield "; put the body of its loop into a block `with stepscope.step():`"
