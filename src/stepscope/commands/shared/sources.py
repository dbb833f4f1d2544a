"""Find and read the user's source files that a trace names."""

from __future__ import annotations

import io
import os
import tokenize
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.diagnosis.diffs import UserSource

LARGEST_BYTES: Final = 2**20
"""The largest file that is patched."""
LARGEST_SHOWN_BYTES: Final = 8 * 2**20
MOST_FILES: Final = 64
"""Most files read, since a trace can name any number."""
_INSTALLED: Final = ("site-packages", "dist-packages")
_ENDINGS: Final = (".py", ".pyi", ".pyx", ".pyw")


class UserSources:
    """Reads the files below and beside a folder, each once.

    Args:
        folder: the folder in which a patch will be applied.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = Path(os.path.realpath(folder))
        self._read: dict[str, UserSource | None] = {}

    def read(self, recorded: str) -> UserSource | None:
        """The file recorded under that name; None unless it is a regular Python text file of at most LARGEST_BYTES."""
        if recorded not in self._read:
            self._read[recorded] = _source(recorded, self._folder) if len(self._read) < MOST_FILES else None
        return self._read[recorded]


def _source(recorded: str, folder: Path) -> UserSource | None:
    from stepscope.diagnosis.diffs import UserSource

    if not recorded.endswith(".py") or any(part in _INSTALLED for part in Path(recorded).parts):
        return None
    try:
        place = Path(os.path.realpath(folder / recorded))
        data = _content(place, LARGEST_BYTES) if place.is_file() else None
        if data is None:
            return None
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        encoding = "utf-8" if encoding == "utf-8-sig" else encoding  # the byte order mark stays part of the text
        text = data.decode(encoding)
    except (OSError, SyntaxError, ValueError, LookupError):
        return None
    inside = place.is_relative_to(folder)
    path = place.relative_to(folder).as_posix() if inside else place.as_posix().lstrip("/")
    return UserSource(path, text, encoding, inside)


def _content(place: Path, largest: int) -> bytes | None:
    """The bytes of a text file; None if it is larger, or binary."""
    with place.open("rb") as file:
        data = file.read(largest + 1)
    return None if len(data) > largest or b"\0" in data else data


def recorded_file(wanted: str, recorded: Sequence[str]) -> str:
    """The recorded file that an argument means: the same file, or one whose path ends with it.

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
    """The path and lines of the source; None if it is not found.

    Below `root`, the longest existing tail of the recorded path is used.

    Raises:
        UsageError: `root` is no folder, or the file cannot be read or is not source text.
    """
    if root is not None and not os.path.isdir(root):
        raise UsageError(f"--source-root {root} is no folder")
    for place in _candidates(recorded, wanted, root):
        if os.path.isfile(place):  # False also for invalid file names
            return str(place), _lines(place)
    return None


def _candidates(recorded: str, wanted: str, root: str | None) -> list[Path]:
    if root is not None:
        parts = [part for part in PurePosixPath(recorded.replace("\\", "/")).parts if part not in ("/", "..")]
        return [Path(root, *parts[first:]) for first in range(len(parts))]
    # A path from the trace is opened only if it can be source text; a path from the user always.
    return [Path(wanted), *([Path(recorded)] if recorded.endswith(_ENDINGS) else [])]


def _lines(place: Path) -> list[str]:
    try:
        data = _content(place, LARGEST_SHOWN_BYTES)
    except OSError as error:
        raise UsageError(f"{place} cannot be read: {error.strerror}") from error
    if data is None:
        raise UsageError(f"{place} is no source text")
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
    except SyntaxError:
        encoding = "utf-8"
    return data.decode(encoding, "replace").splitlines()


def _is_link_to(file: str, real: str) -> bool:
    """Whether a recorded name leads to this file; False for invalid names, such as with a null character."""
    try:
        return file[:1] != "<" and os.path.realpath(file) == real
    except ValueError:
        return False


def _ends_with(path: str, ending: str) -> bool:
    whole = path.replace("\\", "/")
    part = ending.replace("\\", "/").removeprefix("./")
    return whole == part or whole.endswith(f"/{part}")
