"""What commands share about remedies that are applied to a program as it starts."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from stepscope.commands.read.diagnose import parsed_share
from stepscope.commands.shared import output
from stepscope.errors import UsageError
from stepscope.report.format import printable, share

if TYPE_CHECKING:
    from stepscope.compare import SampleComparison
    from stepscope.record.run_folder import RunFolder


LIST: Final = ["list"]
"""What `--apply` has where the user asks which flags there are."""
_WIDEST_FLAG: Final = 24
_NARROWEST_HELP: Final = 40


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


def show_list() -> int:
    """Print every flag that `--apply` takes, and what it does."""
    from stepscope.record.apply import all_flags

    indent = 2 + max(len(flag.shown) for flag in all_flags() if len(flag.shown) < _WIDEST_FLAG)
    width = max(output.width() - indent, _NARROWEST_HELP)
    text = ""
    for flag in all_flags():
        first, *rest = textwrap.wrap(flag.help, width)
        name = flag.shown.ljust(indent) if len(flag.shown) < indent else f"{flag.shown}\n{' ' * indent}"
        text += f"{name}{first}\n" + "".join(f"{' ' * indent}{line}\n" for line in rest)
    output.print_text(text)
    return 0


def say_applied(words: Sequence[str], folder: RunFolder) -> list[dict[str, Any]]:
    """Print what became of them in a run that has ended; returns it for `run.json`."""
    from stepscope.record.apply import applied_outcomes

    found = applied_outcomes(words, folder)
    for outcome in found:
        print(f"stepscope: {printable(outcome.text)}")
    return [outcome.to_json() for outcome in found]


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


def add_slower_option(group: argparse._ArgumentGroup) -> None:
    """Add --fail-if-slower to a command's arguments."""
    group.add_argument(
        "--fail-if-slower",
        metavar="SHARE",
        type=parsed_share,
        help="exit 1 where steps are shown to be slower than the first, by at least this much, such as 3%%",
    )


def judged(limit: float | None, comparisons: Iterable[tuple[str, SampleComparison]]) -> int:
    """The exit code under --fail-if-slower, with what broke the limit on standard error.

    Args:
        limit: a share of the first one's step; None where the option was not given.
        comparisons: what is compared with the first, by name.
    """
    if limit is None:
        return 0
    slower = [(name, found) for name, found in comparisons if found.is_slower_by(limit)]
    for name, found in slower:
        longer = share(found.change or 0.0)
        print(f"stepscope: {printable(name)} is slower by {longer}, --fail-if-slower {share(limit)}", file=sys.stderr)
    return 1 if slower else 0
