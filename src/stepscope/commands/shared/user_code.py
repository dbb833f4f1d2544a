"""What every command that places costs in the user's code shares: which files are the user's."""

from __future__ import annotations

import argparse
import io
import os
import tokenize
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.diagnosis.diffs import UserSource
    from stepscope.trace.naming import UserCode


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
    from stepscope.trace.naming import UserCode

    always = UserCode.from_environment(os.environ)
    return UserCode((*always.also, *arguments.user_code), (*always.not_those, *arguments.not_user_code))


def _pattern(text: str) -> str:
    if not text.strip("/ "):
        raise argparse.ArgumentTypeError("the pattern of files is empty")
    return text


LARGEST_BYTES: Final = 2**20
MOST_FILES: Final = 64
"""A trace can name any number of files."""
_INSTALLED: Final = ("site-packages", "dist-packages")


class UserSources:
    """Reads the files below and beside a folder, each once.

    Args:
        folder: the one that a patch will be applied in.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = Path(os.path.realpath(folder))
        self._read: dict[str, UserSource | None] = {}

    def read(self, recorded: str) -> UserSource | None:
        """The file of that name in a trace; None where it is no regular Python file of reasonable size, or no text."""
        if recorded not in self._read:
            self._read[recorded] = _source(recorded, self._folder) if len(self._read) < MOST_FILES else None
        return self._read[recorded]


def _source(recorded: str, folder: Path) -> UserSource | None:
    from stepscope.diagnosis.diffs import UserSource

    if not recorded.endswith(".py") or any(part in _INSTALLED for part in Path(recorded).parts):
        return None
    try:
        place = Path(os.path.realpath(folder / recorded))
        if not place.is_file():
            return None
        with place.open("rb") as file:
            data = file.read(LARGEST_BYTES + 1)
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        encoding = "utf-8" if encoding == "utf-8-sig" else encoding  # the mark stays part of the text
        text = data.decode(encoding)
    except (OSError, SyntaxError, ValueError, LookupError):
        return None
    if len(data) > LARGEST_BYTES or "\0" in text:
        return None
    inside = place.is_relative_to(folder)
    path = place.relative_to(folder).as_posix() if inside else place.as_posix()
    return UserSource(path if inside else path.lstrip("/"), text, encoding, inside)


LARGEST_SOURCE_BYTES: Final = 8 * 2**20
_ENDINGS: Final = (".py", ".pyi", ".pyx", ".pyw")


def recorded_file(wanted: str, recorded: Sequence[str]) -> str:
    """The recorded file that a word on the command line means: the same file, or one whose path ends like this.

    Raises:
        UsageError: none, or several.
    """
    real = os.path.realpath(wanted)
    same = [file for file in recorded if file in (wanted, real) or _is_link_to(file, real)]
    ending = [
        file for file in recorded if _ends_with(file, wanted) or (os.path.exists(real) and _ends_with(real, file))
    ]
    found = same or ending
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{wanted!r} may be {', '.join(sorted(found))}: name more of the path")
    few = ", ".join(recorded[:5]) + (f" and {len(recorded) - 5} more" if len(recorded) > 5 else "")
    raise UsageError(f"nothing in this trace was attributed to {wanted!r}; the files are: {few or 'none'}")


def source_lines(recorded: str, wanted: str, root: str | None) -> tuple[str, list[str]] | None:
    """Where the source is found, and its lines; None where it is not.

    Below `root`, as much of the end of the recorded path is looked for as is there.

    Raises:
        UsageError: `root` is no folder, or the file cannot be read or is no source text.
    """
    if root is not None and not os.path.isdir(root):
        raise UsageError(f"--source-root {root} is no folder")
    for place in _candidates(recorded, wanted, root):
        if os.path.isfile(place):  # False also for names that no file can have
            return str(place), _read(place)
    return None


def _candidates(recorded: str, wanted: str, root: str | None) -> list[Path]:
    if root is not None:
        parts = [part for part in PurePosixPath(recorded.replace("\\", "/")).parts if part not in ("/", "..")]
        return [Path(root, *parts[first:]) for first in range(len(parts))]
    # The trace's own word is followed only to what can be source text; the user's to anything.
    return [Path(wanted), *([Path(recorded)] if recorded.endswith(_ENDINGS) else [])]


def _read(place: Path) -> list[str]:
    try:
        with place.open("rb") as file:
            data = file.read(LARGEST_SOURCE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{place} cannot be read: {error.strerror}") from error
    if len(data) > LARGEST_SOURCE_BYTES or b"\0" in data:
        raise UsageError(f"{place} is no source text")
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
    except SyntaxError:
        encoding = "utf-8"
    return data.decode(encoding, "replace").splitlines()


def _is_link_to(file: str, real: str) -> bool:
    """Whether a recorded name leads to this file; one that no file can have, as with a null character, does not."""
    try:
        return file[:1] != "<" and os.path.realpath(file) == real
    except ValueError:
        return False


def _ends_with(path: str, ending: str) -> bool:
    whole = path.replace("\\", "/")
    part = ending.replace("\\", "/").removeprefix("./")
    return whole == part or whole.endswith(f"/{part}")
