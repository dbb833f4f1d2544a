"""Run the user's program as a child process that records itself.

The child has the same terminal, working directory and arguments. Its environment has three more variables: the run
folder, the recording options, and a folder in PYTHONPATH through which its Python processes load stepscope.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from stepscope.errors import UsageError
from stepscope.files import read_kept, with_checksum
from stepscope.record.run_folder import RunFolder, write_json
from stepscope.record.run_process import RUN, RUN_OPTIONS, RunOptions
from stepscope.threads import handled

_PATH_FOLDER: Final = Path(__file__).resolve().parent / "bootstrap_path"
SILENT: Final = "6"
"""The level at which torch's profiler writes nothing to stderr."""
_LONGEST_WAIT_S: Final = 1.0
_FORWARDED: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_FROM_TERMINAL: Final = ("SIGINT", "SIGQUIT", "SIGHUP")


def command_of(program: Sequence[str]) -> list[str]:
    """Return the command to start: a script or `-m module` with this Python, anything else unchanged.

    Raises UsageError if the script or program does not exist.
    """
    if not program:
        raise UsageError("say what to run: stepscope run train.py, or stepscope run torchrun train.py")
    first = program[0]
    if first == "-m":
        if len(program) < 2:
            raise UsageError("-m needs the name of a module: stepscope run -m package.train")
        return [sys.executable, *program]
    if first.endswith((".py", ".pyc")) or os.path.isdir(first):
        if not os.path.exists(first):
            raise UsageError(f"there is no script {first}")
        return [sys.executable, *program]
    if shutil.which(first) is None:
        raise UsageError(f"there is no program {first}; a Python script's name ends in .py")
    return list(program)


def environment_of(folder: RunFolder, options: RunOptions, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a program that records itself into that folder.

    Raises UsageError if a remedy needs something before the program starts that is missing.
    """
    if options.apply:
        from stepscope.record import apply

        environment = apply.environment_of(options.apply, environment)
    paths = [str(_PATH_FOLDER), *filter(None, [environment.get("PYTHONPATH")])]
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(paths),
        "KINETO_LOG_LEVEL": environment.get("KINETO_LOG_LEVEL", SILENT),  # otherwise the profiler writes to stderr
        RUN: str(folder.path),
        RUN_OPTIONS: json.dumps(options.to_json()),
    }


def run_program(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the program to its end, forwarding signals; return its exit code, 128 + N if signal N ended it.

    Raises UsageError if it cannot be started.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with _signals_to_hand_on() as adopt:
        try:
            child = subprocess.Popen(command, env=dict(environment))
        except OSError as error:
            raise UsageError(f"{command[0]} cannot be started: {error.strerror}") from error
        adopt(child)
        code = _exit_code(child)
    return 128 - code if code < 0 else code


def _exit_code(child: subprocess.Popen[bytes]) -> int:
    """Wait for the exit code; a signal just before the wait is forwarded during it, not after the end."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(timeout=_LONGEST_WAIT_S)


@contextlib.contextmanager
def _signals_to_hand_on() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Forward signals to the adopted child; signals that arrive before the adoption are sent then."""
    children: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def adopt(child: subprocess.Popen[bytes]) -> None:
        children.append(child)
        for number in early:
            child.send_signal(number)

    def hand_on(number: int, frame: FrameType | None) -> None:
        if signal.Signals(number).name in _FROM_TERMINAL and _is_foreground():
            return  # typed at the terminal, which has sent it to the child too
        if not children:
            early.append(number)
        for child in children:
            child.send_signal(number)

    with handled(hand_on, *_FORWARDED):  # what this process ignores, the child ignores too
        yield adopt


def _is_foreground() -> bool:
    """Whether the terminal sends Ctrl-C to this process as well as to the child."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


NAME: Final = "batch-sizes.json"
INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class BatchRun:
    """A run at one batch size: how the program ended, and its traces as paths below the run's folder."""

    batch_size: int
    exit_code: int
    traces: tuple[str, ...]

    @property
    def first_ranks_last(self) -> str:
        """Return the trace that counts: the first rank's last one, whose steps are the least likely to be guessed."""
        rank = self.traces[0].split("/")[0]
        return [trace for trace in self.traces if trace.split("/")[0] == rank][-1]


def with_batch_size(command: Sequence[str], flag: str, batch_size: int) -> list[str]:
    """Append the batch size to the command: "--flag 8", or "flag=8" if the flag ends in "="."""
    if flag.endswith("="):
        return [*command, f"{flag}{batch_size}"]
    option = flag if flag.startswith("-") else f"--{flag}"
    return [*command, option, str(batch_size)]


def record_sizes(
    command: Sequence[str],
    flag: str,
    sizes: Sequence[int],
    folder: RunFolder,
    environment: Mapping[str, str],
    run_program: Callable[[Sequence[str], Mapping[str, str]], int],
    say: Callable[[str], None],
) -> list[BatchRun]:
    """Run the program once for each size; a failed size does not lose the others.

    Args:
        run_program: runs a command to its end and returns its exit code.
        say: called with progress messages and errors.
    """
    runs: list[BatchRun] = []
    for batch_size in sizes:
        before = set(folder.traces())
        say(f"batch size {batch_size}")
        code = run_program(with_batch_size(command, flag, batch_size), environment)
        made = [path.relative_to(folder.path).as_posix() for path in folder.traces() if path not in before]
        runs.append(BatchRun(batch_size, code, tuple(made)))
        write_json(folder.path / NAME, with_checksum({"runs": [asdict(run) for run in runs]}))
        if code == INTERRUPTED:
            break
        if not made:
            ended = f"ended with exit code {code}" if code else "ended"
            say(f"batch size {batch_size}: the program {ended} before steps were recorded")
        elif code:
            say(f"batch size {batch_size}: the program ended with exit code {code} after steps were recorded")
    return runs


def read_runs(folder: Path) -> list[BatchRun]:
    """Read what `record_sizes` wrote into a run's folder; empty if there is no such file.

    Raises UsageError if the file is damaged.
    """
    path = folder / NAME
    if not path.exists():
        return []
    content = read_kept(path, only_whole=True)
    try:
        return [
            BatchRun(int(each["batch_size"]), int(each["exit_code"]), tuple(map(str, each["traces"])))
            for each in content["runs"]
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is damaged: it does not say what was recorded for each size") from error
