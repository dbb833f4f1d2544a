"""Timed runs of commands in alternation, until it is known well enough which is faster.

<folder>/<label>-<round>/output.log                  what the program printed
<folder>/<label>-<round>/rank<R>/steps-<P>.json      when its steps ended (`stepscope.record.bench_steps`)
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Final, Literal, TypeAlias

import msgspec

from stepscope.compare.statistics import SampleComparison, WarmUp, compare_samples, joint_confidence, warm_up
from stepscope.errors import UsageError
from stepscope.files import converted, private_file, readable, say_changed
from stepscope.machine.observed import LoadMeter
from stepscope.record.apply import applied_outcomes
from stepscope.record.apply.flags import Outcome
from stepscope.record.bench_steps import PREFIX
from stepscope.record.launch import command_of, environment_of
from stepscope.record.manifest import RunManifest, without_secrets
from stepscope.record.run_folder import RunFolder
from stepscope.record.run_process import RUN, RunOptions
from stepscope.threads import handled

TAIL_LINES: Final = 12
_TAIL_BYTES: Final = 64 * 1024
_POLL_S: Final = 1.0  # polling interval; long, so that polling does not disturb the steps
_ENDED_POLL_S: Final = 0.02
_LEAVING_S: Final = 1.0  # how long child processes may outlive the program before they are ended
GRACE_S: Final = 30.0  # how long a program may take to end after its last step
_ENDING: Final = (("SIGINT", 5.0), ("SIGTERM", 10.0), ("SIGKILL", 10.0))
"""Signals to end a program with, and the seconds after each; a launcher passes the first two on to its workers."""
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=", re.ASCII)


@dataclass(frozen=True, slots=True)
class BenchCommand:
    label: str  # "A", "B" and so on
    text: str  # as the user wrote it
    words: tuple[str, ...]  # argument list
    variables: Mapping[str, str]  # environment variables, as in "OMP_NUM_THREADS=1 python train.py"
    apply: tuple[str, ...] = ()  # remedies to apply; see `stepscope.record.apply`

    @classmethod
    def parse(cls, label: str, text: str) -> BenchCommand:
        """Split a command as a shell would, without running a shell: leading variables are allowed, pipes are not.

        Raises:
            UsageError: unmatched quotes, or the program does not exist.
        """
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"command {label}, {text}: {str(error).lower()}") from error
        count = next((number for number, word in enumerate(words) if not _ASSIGNMENT.match(word)), len(words))
        if count == len(words):
            raise UsageError(f"command {label} is empty: give each command as one quoted argument, 'python train.py'")
        variables = dict(word.split("=", 1) for word in words[:count])
        try:
            return cls(label, text, tuple(command_of(words[count:])), variables)
        except UsageError as error:
            raise UsageError(f"command {label}, {text}: {error}") from error

    @property
    def shown(self) -> str:
        """The command with possible secrets replaced by ***, and its applied remedies."""
        words = shlex.split(self.text)
        shown = without_secrets(words)
        text = self.text
        if shown != words:
            text = " ".join(word if "***" in word else shlex.quote(word) for word in shown)
        return f"{text}  (applied: {', '.join(self.apply)})" if self.apply else text


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a program ended: `exit_code` is 128 + N for signal N."""

    exit_code: int
    seconds: float
    was_ended: bool  # whether stepscope ended it: it took too long, or did not exit after its steps


def run_logged(
    words: tuple[str, ...],
    environment: Mapping[str, str],
    log: Path | None,
    *,
    limit_s: float,
    is_done: Callable[[], bool],
) -> ProgramEnd:
    """Run a program and end every process that it started, also when an exception such as Ctrl-C interrupts.

    Args:
        environment: must have the run folder in STEPSCOPE_RUN, which identifies all processes that the program started.
        log: output file; None for standard error. Standard input is empty.
        limit_s: seconds after which it is ended.
        is_done: polled; true once the steps are done and the program should end within `GRACE_S`.

    Raises:
        UsageError: the program cannot be started, or the log cannot be written.
    """
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            output = stack.enter_context(private_file(log).open("wb")) if log is not None else sys.stderr.fileno()
            child = subprocess.Popen(
                words,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if log is not None else output,
                start_new_session=True,  # Ctrl-C reaches stepscope alone, which then ends the program
            )
        except OSError as error:
            raise UsageError(f"{words[0]} cannot be started: {error.strerror}") from error
        try:
            was_ended = not _ends_by_itself(child, begun + limit_s, is_done)
        finally:
            end_programs(child, environment[RUN])
    code = child.wait()
    return ProgramEnd(128 - code if code < 0 else code, time.monotonic() - begun, was_ended)


def _ends_by_itself(child: subprocess.Popen[bytes], deadline_s: float, is_done: Callable[[], bool]) -> bool:
    """Wait for the program to end; False if it has to be ended."""
    done = False
    while (left_s := deadline_s - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=min(_POLL_S, left_s))
            return True
        if not done and is_done():
            done, deadline_s = True, min(deadline_s, time.monotonic() + GRACE_S)
    return False


def end_programs(child: subprocess.Popen[bytes], run: str) -> None:
    """End a program and every process with its run folder in the environment; returns when they have ended."""
    sign = os.fsencode(f"{RUN}={run}") + b"\0"

    def alive() -> list[int]:
        own = [child.pid] if child.poll() is None else []
        return own + [process for process in _processes_with(sign) if process != child.pid]

    def are_gone(patience_s: float) -> bool:
        until = time.monotonic() + patience_s
        while alive():
            if time.monotonic() >= until:
                return False
            time.sleep(_ENDED_POLL_S)
        return True

    with _signals_held_back():
        if child.poll() is not None and are_gone(_LEAVING_S):
            return
        for name, patience_s in _ENDING:
            _signal(alive(), name)
            if are_gone(patience_s):
                return


def _signal(processes: Iterable[int], name: str) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, getattr(signal, name, signal.SIGTERM))


def end_leftovers(root: Path) -> None:
    """End the processes of runs below `root`, for a parent that was killed; needs /proc."""
    _signal(_processes_with(os.fsencode(f"{RUN}={root}{os.sep}")), "SIGKILL")


def _processes_with(sign: bytes) -> Iterator[int]:
    """Processes with a variable that begins with `sign`; empty if the system has no /proc."""
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc"):
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    if b"\0" + sign in b"\0" + Path(entry.path, "environ").read_bytes() + b"\0":
                        yield int(entry.name)


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Defer further Ctrl-C, so that a second one leaves no process behind."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    with handled(note, "SIGINT"):
        yield
    if came:
        raise KeyboardInterrupt


def last_lines(log: Path, count: int = TAIL_LINES) -> list[str]:
    """Last non-empty lines of a program's output, at most 200 characters each."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
        lines = file.read().decode("utf-8", "replace").splitlines()
        return [line.rstrip()[:200] for line in lines if line.strip()][-count:]
    return []


class Record(msgspec.Struct, frozen=True):
    """Record of one process; see `stepscope.record.bench_steps`."""

    rank: int
    world_size: int
    machine: str
    source: str
    clock: str
    complete: bool
    ends_ns: tuple[int, ...]
    own_profiler: bool
    said: tuple[str, ...]
    losses: tuple[float, ...] = ()


def read_records(folder: RunFolder) -> list[Record]:
    """Records of the ranks on the first machine, by rank: for each the process with the most steps.

    Clocks of several machines cannot be compared; all ranks take the same steps.
    """
    found: list[Record] = []
    for rank in folder.ranks():
        paths = sorted((folder.path / f"rank{rank}").glob(f"{PREFIX}*.json"))
        of_rank = [record for path in paths if (record := _record(path, rank)) is not None]
        if of_rank:
            found.append(max(of_rank, key=lambda record: len(record.ends_ns)))
    return [record for record in found if record.machine == found[0].machine]


def job_ends_ns(records: Sequence[Record]) -> list[int]:
    """Time at which each step had ended on every rank; as many steps as every rank took."""
    return [max(ends) for ends in zip(*(record.ends_ns for record in records), strict=False)]


def _record(path: Path, rank: int) -> Record | None:
    content = readable(path)
    try:
        return converted({**content, "rank": rank}, Record) if content else None
    except msgspec.ValidationError:
        say_changed(path)
        return None


Stop: TypeAlias = Literal["precision", "rounds", "budget", "interrupted", "failed"]

FEWEST_ROUNDS: Final = 2  # so that each command runs first once
FEWEST_STEPS: Final = 2
CONFIDENCE: Final = 0.95
LOG: Final = "output.log"


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """How long and how carefully to measure.

    Attributes:
        precision: half-width of each change's interval at which to stop, as a share of the first command's step.
        losses: also keep the losses, and seed the random generators with `seed` if given, from the import of torch on
            (`stepscope.record.bench_steps`).
    """

    steps: int = 50  # steps to time per run, including the warm-up; the program is ended after them
    precision: float = 0.01
    budget_s: float = 600.0  # no further round begins after these seconds; the first two always run
    rounds: int | None = None  # most rounds; None: only the budget limits them
    quiet: bool = False  # keep each rank on its own cores, and disable garbage collection
    seed: int | None = None  # seed for the random generators; None leaves them alone
    show_output: bool = False  # send the programs' output to standard error instead of logs
    losses: bool = False

    def confidence(self, commands: int) -> float:
        """Confidence of each interval such that all of them together hold with `CONFIDENCE` (Bonferroni)."""
        return joint_confidence(CONFIDENCE, commands - 1)


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One run of one command.

    Attributes:
        step_ns: every timed step, in order; with several ranks, from the last rank's end of a step to the last rank's
            end of the next.
    """

    label: str
    round: int  # from 1
    folder: Path
    step_ns: tuple[int, ...]
    warm_up: WarmUp  # number of steps that do not count
    source: str  # what marks the end of a step: "explicit", "optimizer", "loader" or "forward"
    clock: str  # "device" where an accelerator's time at the end of each step is used, else "host"
    ranks: int  # number of processes
    complete: bool  # whether it took as many steps as requested
    seconds: float  # the program's whole run
    other_cores: float | None = None  # cores that other processes kept busy; None where unknown
    own_profiler: bool = False  # whether the program used torch.profiler itself
    said: tuple[str, ...] = ()  # notes on quietening the machine, one sentence each
    losses: tuple[float, ...] = ()  # losses of the first rank, one per backward pass, if requested
    applied: tuple[Outcome, ...] = ()  # outcome of each requested remedy

    @property
    def steady_ns(self) -> tuple[int, ...]:
        """Steps after the warm-up."""
        return self.step_ns[self.warm_up.dropped :]


@dataclass(frozen=True, slots=True)
class BenchFailure:
    """Why measuring stopped: the failed command and round, what happened, and its output if that helps."""

    label: str
    round: int
    sentence: str
    log: Path | None = None


@dataclass
class Bench:
    commands: tuple[BenchCommand, ...]  # the others are compared with the first
    settings: BenchSettings
    folder: Path
    runs: list[BenchRun] = field(default_factory=list)  # in the order of execution
    stop: Stop | None = None  # why measuring ended; None while it runs
    failure: BenchFailure | None = None  # the failure, if a command failed
    seconds: float = 0.0  # since the beginning

    @property
    def rounds(self) -> int:
        """Number of rounds in which every command ran."""
        return len(self.runs) // len(self.commands)

    def runs_of(self, label: str) -> list[BenchRun]:
        return [run for run in self.runs if run.label == label]

    def comparisons(self, rounds: int | None = None) -> list[tuple[BenchCommand, SampleComparison]]:
        """Compare each further command with the first; `rounds` leaves later ones out."""
        confidence = self.settings.confidence(len(self.commands))
        before, *others = (
            [run.steady_ns for run in self.runs_of(command.label) if rounds is None or run.round <= rounds]
            for command in self.commands
        )
        return [
            (command, compare_samples(before, steps, confidence=confidence))
            for command, steps in zip(self.commands[1:], others, strict=True)
        ]


def order_of(count: int, round_number: int) -> list[int]:
    """Order of the commands in a round, from 1: A B, B A, B A, A B and so on.

    Each second round reverses the one before it, so that steady drift affects all commands equally; each pair of rounds
    begins with a different command.
    """
    pair, is_second = divmod(round_number - 1, 2)
    turned = [(place + pair) % count for place in range(count)]
    return turned[::-1] if is_second else turned


def measure(bench: Bench, tell: Callable[[BenchRun], None]) -> None:
    """Run the commands in alternation until the settings are met, one fails, or Ctrl-C; `tell` receives each run.

    The outcome is in `bench`, including `stop`; a failing program raises no exception.

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
    """Run each command once more; a failure sets `bench.stop` and `bench.failure`.

    Raises:
        UsageError: a program cannot be started, or the folder cannot be written.
        KeyboardInterrupt: on Ctrl-C; the runs before it are in `bench`.
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
    """Why no further round is needed, after a complete round; None to continue.

    The previous round must also have been precise enough: an interval can be narrow by chance, and stopping at the
    first narrow one makes intervals cover the truth less often than stated.
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
    if rounds < FEWEST_ROUNDS:
        return False
    found = [(each.change_low, each.change_high) for _, each in bench.comparisons(rounds)]
    return all(
        low is not None and high is not None and (high - low) / 2 <= bench.settings.precision for low, high in found
    )


def run_command(
    bench: Bench, command: BenchCommand, name: str, options: RunOptions, is_done: Callable[[RunFolder], bool]
) -> tuple[RunFolder, RunManifest, ProgramEnd]:
    """Run a command in a folder of its own with recording options, until `is_done` returns true for the folder.

    Raises:
        UsageError: the program cannot be started, or the folder cannot be written.
    """
    manifest = RunManifest.begin(command.words, time.time(), options=options.to_json(), redact=False)
    folder = RunFolder.create(bench.folder, f"{command.label}-{name}", manifest)
    end = run_logged(
        command.words,
        environment_of(folder, options, {**os.environ, **command.variables}),
        None if bench.settings.show_output else folder.path / LOG,
        limit_s=bench.settings.budget_s,
        is_done=lambda: is_done(folder),
    )
    return folder, manifest, end


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
    meter = LoadMeter()
    folder, _, end = run_command(bench, command, str(round_number), options, _is_complete)
    records = read_records(folder)
    ends_ns = job_ends_ns(records)
    step_ns = tuple(second - first for first, second in pairwise(ends_ns))
    complete = len(step_ns) >= settings.steps
    problem = None if complete else _problem(folder, end, len(ends_ns))
    if problem is not None:
        return BenchFailure(command.label, round_number, problem, None if settings.show_output else folder.path / LOG)
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


def _is_complete(folder: RunFolder) -> bool:
    complete = [record for record in read_records(folder) if record.complete]
    return bool(complete) and len(complete) >= complete[0].world_size


def _problem(folder: RunFolder, end: ProgramEnd, seen: int) -> str | None:
    """Why a run with too few steps cannot be used, as words that follow the command; None if it can."""
    if seen == 0:
        after = " before a step was seen"
    else:
        after = f" after {seen} step{'s' if seen > 1 else ''}"
    if end.exit_code != 0 and not end.was_ended:
        return f"failed with exit code {end.exit_code}{after}"
    if seen > FEWEST_STEPS:
        return None
    if end.was_ended:
        return f"was stopped after {end.seconds:.0f} s{after}; --budget gives it more time"
    if seen:
        return f"ended{after}; a comparison takes at least {FEWEST_STEPS + 1}"
    if not folder.was_seen("python"):
        return "ran no Python program that stepscope could reach; python -I and -S keep it out"
    why = "it did not import torch"
    if folder.was_seen("torch"):
        why = "no optimizer stepped, no DataLoader was iterated and no module was called repeatedly"
    return f"ended without a visible step: {why}; put the body of its loop into a block `with stepscope.step():`"
