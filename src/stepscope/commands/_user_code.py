"""What every command that places costs in the user's code shares: which files are the user's."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.analysis.naming import UserCode


def add_user_code_options(parser: argparse.ArgumentParser) -> None:
    """--user-code and --not-user-code."""
    group = parser.add_argument_group("your code is what is no library's; patterns are folders, files or globs")
    group.add_argument(
        "--user-code",
        metavar="PATTERN",
        type=_pattern,
        action="append",
        default=[],
        help="also these, such as megatron or '*/site-packages/mine/*'; may be repeated",
    )
    group.add_argument(
        "--not-user-code",
        metavar="PATTERN",
        type=_pattern,
        action="append",
        default=[],
        help="not these, such as src/utils: what they do belongs to the line that called them; may be repeated",
    )


def user_code_from(arguments: argparse.Namespace) -> UserCode:
    """What the options and the environment say."""
    from stepscope.analysis.naming import UserCode

    always = UserCode.from_environment(os.environ)
    return UserCode((*always.also, *arguments.user_code), (*always.not_those, *arguments.not_user_code))


def _pattern(text: str) -> str:
    if not text.strip("/ "):
        raise argparse.ArgumentTypeError("the pattern of files is empty")
    return text
