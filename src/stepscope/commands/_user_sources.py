"""The user's source files that a trace names, read for diffs: only what is surely one of theirs."""

from __future__ import annotations

import io
import os
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from stepscope.diagnosis.diffs import UserSource

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
