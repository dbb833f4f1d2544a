"""Where results go: the terminal, a pipe, or a file that is written whole or not at all."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from stepscope.errors import UsageError
from stepscope.files import whole_file
from stepscope.report.format import printable

_PLAIN: Final = re.compile(r"([\n\t])")
_COLOURED: Final = re.compile(r"([\n\t]|\x1b\[[0-9;]*m)")
"""What a terminal gets as it is; the split of a text by it has what it matched at odd places."""
_PIPE_WIDTH: Final = 120
_LONGEST_NAME: Final = 50
_PLAIN_CHARACTERS: Final = str.maketrans({"█": "#", "…": "~", "●": "o", "│": "|", "┆": ":"})


def target(text: str) -> str:
    """Where to write, from the command line; an empty name is most often a variable that was never set."""
    if not text:
        raise argparse.ArgumentTypeError("the name of the file to write is empty")
    return text


def write_output(target: str, data: bytes | Iterable[bytes]) -> None:
    """Write bytes, or pieces of them, to standard output where the target is "-", else to a file, and say so.

    A file is written whole or not at all.
    """
    if target != "-":
        write_atomically(Path(target), data)
        print(f"stepscope: wrote {printable(target)}", file=sys.stderr)
        return
    with _to_standard_output():
        sys.stdout.flush()
        buffer = getattr(sys.stdout, "buffer", None)
        for piece in _pieces(data):
            shown = _for_terminal(piece.decode(errors="backslashreplace")) if sys.stdout.isatty() else None
            if buffer is None:
                sys.stdout.write(piece.decode() if shown is None else shown)
            else:
                buffer.write(piece if shown is None else shown.encode())
        if buffer is not None:
            buffer.flush()


def write_atomically(path: Path, data: bytes | Iterable[bytes], *, private: bool = False) -> None:
    """Write a file so that nobody ever sees half of it; links are followed, and permissions kept unless it is private.

    Raises:
        UsageError: the file cannot be written.
    """
    place = Path(os.path.realpath(path))
    try:
        if place.exists() and not place.is_file():  # /dev/null, a named pipe
            with place.open("wb") as file:
                file.writelines(_pieces(data))
            return
        with whole_file(place, private=private) as file:
            file.writelines(_pieces(data))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def write_folder(target: str, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder that takes its place when it is complete, and say so.

    Raises:
        UsageError: there is something at that place already, or it cannot be written.
    """
    place = Path(os.path.realpath(target))
    if target == "-":
        raise UsageError("a folder cannot go to standard output: name one to write")
    temporary = place.with_name(f".{place.name[:_LONGEST_NAME]}-{os.urandom(4).hex()}.partial")
    try:
        if place.exists() and not (place.is_dir() and not any(place.iterdir())):
            raise UsageError(f"{target} exists already: name a new or an empty folder")
        temporary.mkdir()
        write(temporary)
        if place.exists():
            place.rmdir()
        os.replace(temporary, place)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"stepscope: wrote {printable(target)}", file=sys.stderr)


def _pieces(data: bytes | Iterable[bytes]) -> Iterable[bytes]:
    return (data,) if isinstance(data, bytes) else data


def print_text(text: str) -> None:
    """Print a report; a terminal that lacks its characters gets plain ones."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_PLAIN_CHARACTERS).encode(encoding, "backslashreplace").decode(encoding)
    with _to_standard_output():
        sys.stdout.write(_for_terminal(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def _for_terminal(text: str) -> str:
    """The text without anything that a terminal obeys but line ends, tabs and, where there is colour, our own colours.

    Names are made printable where reports are made; this is for what goes to a terminal as it is, such as CSV.
    """
    kept = _COLOURED if colour() else _PLAIN
    return "".join(part if place % 2 else printable(part) for place, part in enumerate(kept.split(text)))


@contextlib.contextmanager
def _to_standard_output() -> Iterator[None]:
    """Turn a failure to write, such as on a full disk, into a `UsageError`; a closed pipe is no failure."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_standard_output()
        raise UsageError(f"standard output cannot be written: {error.strerror}") from error


def discard_standard_output() -> None:
    """Send what is still to be written to nowhere, so that the interpreter does not fail on it as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def width() -> int:
    """Columns of the terminal; COLUMNS overrides, and a pipe has 120."""
    return max(20, shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns if sys.stdout.isatty() else _columns())


def colour() -> bool:
    """Whether to colour: only on a terminal, and not where NO_COLOR (https://no-color.org) is set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _columns() -> int:
    try:
        return int(os.environ.get("COLUMNS", "")) or _PIPE_WIDTH
    except ValueError:
        return _PIPE_WIDTH


class CommandParser(argparse.ArgumentParser):
    """Raises `UsageError` instead of printing and exiting; options are never abbreviated.

    Attributes:
        late: the last positional argument where it may be left out; argparse does not find it behind options.
        program: the argument that gets another program's command line, which begins with the first word that is no
            option, or with -m, and which argparse must not see.
        of_program: an option whose value is an option of that program, such as --knob --fused; argparse would not take
            what begins with a dash for a value.
    """

    late: str = ""
    program: str = ""
    of_program: str = ""

    def __init__(self, **settings: Any) -> None:
        settings = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **settings}
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        """Turn argparse's complaint into a `UsageError`."""
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        guess = suggestion(wrong[1], re.findall(r"[\w-]+", wrong[2])) if wrong else ""
        raise UsageError(f"{message}{guess} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does it, with `of_program` and its value in one word."""
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
        """The words that are options of this parser, and the command line that follows them."""
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
        """Give the `late` argument what stood behind the options; returns what is still left over."""
        if self.late and getattr(arguments, self.late) is None and rest and not rest[0].startswith("-"):
            setattr(arguments, self.late, rest[0])
            return rest[1:]
        return rest


def suggestion(word: str, known: Iterable[str]) -> str:
    """A question such as "; did you mean --top?", or nothing where nothing is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def unknown_command(word: str, known: Sequence[str]) -> UsageError:
    """What to say of a first word that is no command: most often a typo, or a trace without a command."""
    if os.path.exists(word):
        return UsageError(f"{word!r} is no command; to explain a trace: stepscope diagnose {word}")
    guess = suggestion(word, known) or f"; the commands are {', '.join(known)}"
    return UsageError(f"{word!r} is no command{guess}")


def unknown_options(rest: Sequence[str], parser: CommandParser) -> UsageError:
    """What to say of arguments that no parser took."""
    word = next((word for word in rest if word.startswith("-")), None)
    if word is None:
        return UsageError(f"{rest[0]!r} is one argument too many (see {parser.prog} --help)")
    option = word.split("=", 1)[0]
    return UsageError(f"there is no option {option}{suggestion(option, parser.options())} (see {parser.prog} --help)")
