"""How commands that start programs apply remedies to them, and end them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Final

from stepscope.commands.shared.output import say
from stepscope.errors import UsageError

INTERRUPTED: Final = 130
"""The exit code after Ctrl-C."""


def applications(lists: Sequence[str] | None) -> tuple[str, ...]:
    """The words of all `--apply` options together.

    Raises:
        UsageError: something in them is wrong, or is missing on this machine.
    """
    if lists is None:
        return ()
    from stepscope.record.apply import environment_of, parse_applications

    words = parse_applications(",".join(lists))
    environment_of(words, os.environ)  # what is missing is said before anything starts
    return words


def allocator_variables(name: str | None, command: Sequence[str]) -> dict[str, str]:
    """What the command's environment needs so that it starts with that allocator; nothing without a name.

    Says on standard error where the command is seen to start without it: what it starts may load the library all the
    same.

    Raises:
        UsageError: the allocator is not on the system, or cannot be loaded.
    """
    from stepscope.remedies.allocators import allocator_environment, loading_problem, preload_obstacle

    if name is None:
        return {}
    try:
        variables = allocator_environment(name, os.environ)
    except RuntimeError as error:
        raise UsageError(str(error)) from error
    problem = loading_problem(name, variables)
    if problem is not None:
        raise UsageError(problem)
    obstacle = preload_obstacle(shutil.which(command[0]) or command[0])
    if obstacle is not None:
        say(obstacle)
    return variables


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Take the signals that end a process as Ctrl-C, so that no program is left behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    with contextlib.ExitStack() as restored:
        for number in numbers:
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):  # ignored, as under nohup
                signal.signal(number, interrupt)
                restored.callback(signal.signal, number, handler)
        yield
