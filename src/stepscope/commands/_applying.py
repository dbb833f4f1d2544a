"""What commands share about remedies that are applied to a program as it starts."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from stepscope.commands import _output
from stepscope.report.format import printable

if TYPE_CHECKING:
    from stepscope.capture.run_folder import RunFolder

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
    from stepscope.capture.applying import environment_of, parse_applications

    words = parse_applications(",".join(lists))
    environment_of(words, os.environ)  # what is missing is said before anything starts
    return words


def show_list() -> int:
    """Print every flag that `--apply` takes, and what it does."""
    from stepscope.capture.applying import all_flags

    indent = 2 + max(len(flag.shown) for flag in all_flags() if len(flag.shown) < _WIDEST_FLAG)
    width = max(_output.width() - indent, _NARROWEST_HELP)
    text = ""
    for flag in all_flags():
        first, *rest = textwrap.wrap(flag.help, width)
        name = flag.shown.ljust(indent) if len(flag.shown) < indent else f"{flag.shown}\n{' ' * indent}"
        text += f"{name}{first}\n" + "".join(f"{' ' * indent}{line}\n" for line in rest)
    _output.print_text(text)
    return 0


def say_applied(words: Sequence[str], folder: RunFolder) -> list[dict[str, Any]]:
    """Print what became of them in a run that has ended; returns it for `run.json`."""
    from stepscope.capture.applying import applied_outcomes

    found = applied_outcomes(words, folder)
    for outcome in found:
        print(f"stepscope: {printable(outcome.text)}")
    return [outcome.to_json() for outcome in found]
