"""JSON files that stepscope keeps, each with a checksum of its content, and reading them whatever has become of them.

What cannot be read is passed over, and of what was changed the rest is read: both are said in one sentence a file, as
warnings of the log "stepscope.kept", which the commands show. Imports only the standard library and what does too: the
processes of the user's program use it.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stepscope.errors import UsageError
from stepscope.small_files import read_small

LARGEST_MIB: Final = 64
_CHECKSUM: Final = "checksum"
_MOST_DIGITS: Final = 20
_LARGEST: Final = 2**63
"""Whole numbers fit the 64 bits of tables and databases."""
_log = logging.getLogger("stepscope.kept")


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file that `read_kept` compares with its checksum."""
    return {**content, _CHECKSUM: _checksum(content)}


def read_kept(path: Path, *, only_whole: bool = False) -> dict[str, Any]:
    """The object in a file; where its checksum is another one, that is said. A file without one is taken as it is.

    Args:
        only_whole: refuse one that was changed, for what can be made anew.

    Raises:
        UsageError: it cannot be read, is larger than 64 MiB, or holds no JSON object.
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} cannot be read: it is no file")
    data = read_small(path, LARGEST_MIB, ", more than any that stepscope writes")
    try:
        content = json.loads(data.decode(), parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {_reason(error)}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is damaged: it holds no JSON object")
    if _CHECKSUM in content and content.pop(_CHECKSUM) != _checksum(content):
        if only_whole:
            raise UsageError(f"{path} is damaged: it is not as it was written")
        say_changed(path)
    return content


def readable(path: Path, *, only_whole: bool = False) -> dict[str, Any]:
    """The object in a file; empty where there is none, or none that can be read, which is said."""
    try:
        return read_kept(path, only_whole=only_whole) if path.exists() else {}
    except (UsageError, OSError) as error:
        _log.warning("passed over: %s", error)
        return {}


def say_changed(path: Path) -> None:
    """Say that a file holds what stepscope did not write, and that the rest of it is read."""
    _log.warning("%s was changed since it was written: what it says may be wrong, and some of it is left out", path)


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS or not -_LARGEST <= (value := int(text)) < _LARGEST:
        raise ValueError("it holds a number that is larger than any")
    return value


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "its values are nested too deep"
    return "it is no UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"it is no JSON: {error}"
