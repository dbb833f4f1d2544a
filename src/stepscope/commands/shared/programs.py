"""Apply remedies to programs that commands start, and end those programs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import Final

from stepscope.commands.shared.output import say
from stepscope.errors import UsageError

INTERRUPTED: Final = 130
"""The exit code after Ctrl-C."""


def applications(lists: Sequence[str] | None) -> tuple[str, ...]:
    """The remedies of all `--apply` options together.

    Raises:
        UsageError: an option is invalid, or a remedy needs something that this machine lacks.
    """
    if lists is None:
        return ()
    from stepscope.record.apply import environment_of, parse_applications

    words = parse_applications(",".join(lists))
    environment_of(words, os.environ)  # report what is missing before anything starts
    return words


def allocator_variables(name: str | None, command: Sequence[str]) -> dict[str, str]:
    """Environment variables that start the command with that allocator; empty without a name.

    Warns on standard error if the command itself will not load it; its child processes may load it all the same.

    Raises:
        UsageError: the allocator is not installed, or cannot be loaded.
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
