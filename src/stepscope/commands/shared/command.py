"""Define commands, and parse the arguments after a command's name."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from stepscope.errors import UsageError


@dataclass(frozen=True, slots=True)
class Command:
    """One command of `stepscope`.

    Attributes:
        name: the word typed on the command line.
        help: one sentence for the list of commands.
        prepare_parser: adds the command's arguments to its parser.
        run: runs the command and returns the exit code; imports heavy modules itself.
        examples: the end of the command's help: remarks, examples and any exit codes of its own.
    """

    name: str
    help: str
    prepare_parser: Callable[[CommandParser], None]
    run: Callable[[argparse.Namespace], int]
    examples: str = ""

    def run_with(self, words: Sequence[str]) -> int:
        """Run the command as if typed with these words, and return the exit code."""
        parser = CommandParser(prog=f"stepscope {self.name}")
        self.prepare_parser(parser)
        return self.run(parser.parse_args(words))


class CommandParser(argparse.ArgumentParser):
    """Raises `UsageError` instead of printing and exiting; options are never abbreviated.

    Attributes:
        late: the last, optional positional argument, which argparse does not find after options.
        program: the argument that takes another program's command line, hidden from argparse; it begins with the first
            word that is not an option, or with -m.
        of_program: an option whose value may be an option of that program, such as --knob --fused, which argparse would
            not accept as a value.
    """

    late: str = ""
    program: str = ""
    of_program: str = ""

    def __init__(self, **settings: Any) -> None:
        settings = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **settings}
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        """Raise argparse's complaint as a `UsageError`."""
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        guess = suggestion(wrong[1], re.findall(r"[\w-]+", wrong[2])) if wrong else ""
        raise UsageError(f"{message}{guess} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, after joining `of_program` and its value into one word."""
        if args is not None and self.of_program:
            args = self._joined(list(args))
        return super().parse_known_args(args, namespace)

    def _joined(self, words: list[str]) -> list[str]:
        found = []
        following = iter(words)
        for word in following:
            value = next(following, None) if word == self.of_program else None
            found.append(word if value is None else f"{word}={value}")
        return found

    def options(self) -> list[str]:
        """Every option this parser knows, such as "--top"."""
        return list(self._option_string_actions)

    def split_program(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Split the words into this parser's options and the program's command line after them."""
        position = 0
        while self.program and position < len(words):
            word = words[position]
            if word == "--":
                return words[:position], words[position + 1 :]
            if not word.startswith("-") or word == "-m":
                return words[:position], words[position:]
            action = self._option_string_actions.get(word)
            position += 2 if action is not None and action.nargs is None else 1
        return words, []

    def take_late(self, arguments: argparse.Namespace, rest: list[str]) -> list[str]:
        """Assign the first leftover word to the `late` argument, and return the remaining words."""
        if self.late and getattr(arguments, self.late) is None and rest and not rest[0].startswith("-"):
            setattr(arguments, self.late, rest[0])
            return rest[1:]
        return rest


def suggestion(word: str, known: Iterable[str]) -> str:
    """A question such as "; did you mean --top?", or "" if no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def unknown_command(word: str, known: Sequence[str]) -> UsageError:
    """The error for an unknown command: most often a typo, or a trace without a command."""
    if os.path.exists(word):
        return UsageError(f"{word!r} is no command; to explain a trace: stepscope diagnose {word}")
    guess = suggestion(word, known) or f"; the commands are {', '.join(known)}"
    return UsageError(f"{word!r} is no command{guess}")


def unknown_options(rest: Sequence[str], parser: CommandParser) -> UsageError:
    """The error for arguments that no parser took."""
    word = next((word for word in rest if word.startswith("-")), None)
    if word is None:
        return UsageError(f"{rest[0]!r} is one argument too many (see {parser.prog} --help)")
    option = word.split("=", 1)[0]
    return UsageError(f"there is no option {option}{suggestion(option, parser.options())} (see {parser.prog} --help)")
