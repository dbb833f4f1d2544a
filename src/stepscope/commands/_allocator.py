"""The option `--allocator`: which library a program gets its host memory from."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from stepscope.errors import UsageError
from stepscope.report.format import printable


def allocator_variables(name: str | None, command: Sequence[str]) -> dict[str, str]:
    """What the command's environment needs so that it starts with that allocator; nothing without a name.

    What is seen to start without it is told on standard error: what it starts itself may load the library all the same.

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
        print(f"stepscope: {printable(obstacle)}", file=sys.stderr, flush=True)
    return variables
