"""Programs started by `stepscope bench`: output goes to a log, and all their processes end with them."""

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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec

from stepscope.errors import UsageError
from stepscope.files import private_file, readable, say_changed
from stepscope.machine.signals import handled
from stepscope.record.bench_steps import PREFIX
from stepscope.record.launch import command_of
from stepscope.record.manifest import without_secrets
from stepscope.record.run_folder import RunFolder
from stepscope.record.run_process import RUN
from stepscope.trace.conversion import converted

TAIL_LINES: Final = 12
_TAIL_BYTES: Final = 64 * 1024
_POLL_S: Final = 1.0  # interval for checking whether the steps are done; long, so that checking does not disturb them
_ENDED_POLL_S: Final = 0.02
_LEAVING_S: Final = 1.0  # how long child processes may outlive the program before they are ended
GRACE_S: Final = 30.0  # how long a program may take to end after its last step
_ENDING: Final = (("SIGINT", 5.0), ("SIGTERM", 10.0), ("SIGKILL", 10.0))
"""Signals to end a program with, and the seconds after each; a launcher passes the first two on to its workers."""
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=", re.ASCII)


@dataclass(frozen=True, slots=True)
class BenchCommand:
    """One of the compared commands."""

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
