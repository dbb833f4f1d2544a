"""Running the user's program as a child that records itself, and otherwise as if it had been started without stepscope.

The child has the same terminal, working directory and arguments. Its environment has three variables more: where the
run folder is, what to record, and a folder in PYTHONPATH by which its Python processes find the way here.
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
from pathlib import Path
from types import FrameType
from typing import Final

from stepscope.capture.bootstrap import RUN, RUN_OPTIONS
from stepscope.capture.bootstrap_plan import RunOptions
from stepscope.capture.run_folder import RunFolder
from stepscope.errors import UsageError

_PATH_FOLDER: Final = Path(__file__).resolve().parent / "bootstrap_path"
_SILENT: Final = "6"
_LONGEST_WAIT_S: Final = 1.0
_FORWARDED: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_FROM_TERMINAL: Final = ("SIGINT", "SIGQUIT", "SIGHUP")


def command_of(program: Sequence[str]) -> list[str]:
    """The command to start: a script or `-m module` with this Python, anything else as it stands.

    Raises:
        UsageError: there is no such script or program.
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
    """The environment for a program that is to record itself into that folder.

    Raises:
        UsageError: something that is to be applied must be there before the program starts, and is not.
    """
    if options.apply:
        from stepscope.capture import applying

        environment = applying.environment_of(options.apply, environment)
    paths = [str(_PATH_FOLDER), *filter(None, [environment.get("PYTHONPATH")])]
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(paths),
        "KINETO_LOG_LEVEL": environment.get("KINETO_LOG_LEVEL", _SILENT),  # else the profiler writes on stderr
        RUN: str(folder.path),
        RUN_OPTIONS: json.dumps(options.to_json()),
    }


def run_program(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the program to its end, handing on signals; returns its exit code, 128 + N where signal N ended it.

    Raises:
        UsageError: it cannot be started.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with _signals_to_hand_on() as adopt:
        try:
            child = subprocess.Popen(command, env=dict(environment))
        except OSError as error:
            raise UsageError(f"{command[0]} cannot be started: {error.strerror}") from error
        adopt(child)
        code = _ended(child)
    return 128 - code if code < 0 else code


def _ended(child: subprocess.Popen[bytes]) -> int:
    """Its exit code; a signal that comes just before the wait begins is handed on a moment later, not after the end."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(timeout=_LONGEST_WAIT_S)


@contextlib.contextmanager
def _signals_to_hand_on() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Hand the signals that come meanwhile on to the child that is adopted; early ones wait for it."""
    children: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def adopt(child: subprocess.Popen[bytes]) -> None:
        children.append(child)
        for number in early:
            child.send_signal(number)

    def hand_on(number: int, frame: FrameType | None) -> None:
        if signal.Signals(number).name in _FROM_TERMINAL and _is_foreground():
            return  # typed at the terminal, which sent it to the child too
        if not children:
            early.append(number)
        for child in children:
            child.send_signal(number)

    numbers = [getattr(signal, name) for name in _FORWARDED if hasattr(signal, name)]
    before = {}
    for number in numbers:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):  # as under nohup: ignored by the child too
            before[number] = signal.signal(number, hand_on)
    try:
        yield adopt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_foreground() -> bool:
    """Whether a terminal sends what is typed at it to this process and the child alike."""
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
