"""Files that are written whole or not at all, read only while small, and kept with a checksum."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from stepscope.errors import UsageError

_LONGEST_BYTES: Final = 200
"""Of the name that is kept in that of the file which is being written: a name may have 255."""


@contextlib.contextmanager
def whole_file(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when the block ends well and leaves nothing where it does not.

    A file that is replaced hands its permissions on; the new one is never readable for more users than the old.

    Args:
        private: for its owner alone, whatever there was before.

    Raises:
        OSError: it cannot be written.
    """
    permissions = 0o600 if private else _permissions(path)
    short = os.fsdecode(os.fsencode(path.name)[:_LONGEST_BYTES])
    temporary = path.with_name(f".{short}-{os.urandom(4).hex()}.partial")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if permissions is None else 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        if permissions is not None:
            os.chmod(temporary, permissions)
        if private:
            _hand_over(temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def private_folder(path: Path, *, new: bool = False, tighten: bool = True) -> Path:
    """Make a folder, and those above it that are missing, for the owner alone.

    Args:
        new: whether it must not be there yet.
        tighten: take from others what they may do in one that is there and is this user's; False for a folder that the
            user named, which may hold other things.

    Returns:
        The path.

    Raises:
        FileExistsError: it is there, and `new`.
        OSError: it cannot be made.
    """
    missing = [path, *path.parents]
    missing = missing[: next((place for place, each in enumerate(missing) if each.exists()), len(missing))]
    if not missing and (new or not path.is_dir()):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    for each in reversed(missing):
        try:
            each.mkdir(0o700)
        except FileExistsError:  # another process was first
            if new and each == path:
                raise
        else:
            _hand_over(each)
    if tighten and not missing:
        make_private(path)
    return path


def private_file(path: Path) -> Path:
    """Make an empty file for its owner alone, or keep what is there: for what others write, such as SQLite, by name.

    SQLite gives the files that it makes beside a database that one's mode.

    Raises:
        OSError: it cannot be made.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600))
    except FileExistsError:
        make_private(path)
    else:
        _hand_over(path)
    return path


def make_private(path: Path) -> None:
    """Take from others what they may do with a file or folder of this user's; somebody else's stays as it is."""
    with contextlib.suppress(OSError):
        state = path.stat()
        if stat.S_IMODE(state.st_mode) & 0o077 and state.st_uid == getattr(os, "getuid", lambda: -1)():
            path.chmod(stat.S_IMODE(state.st_mode) & 0o700)


def _hand_over(path: Path) -> None:
    """Give what root has just made to the owner of the folder."""
    if getattr(os, "geteuid", lambda: -1)() == 0:
        with contextlib.suppress(OSError):
            owner = path.parent.stat()
            if owner.st_uid != 0:
                os.chown(path, owner.st_uid, owner.st_gid)


def _permissions(path: Path) -> int | None:
    """Those of the file that is replaced; None where there is none, and the user's mask decides."""
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        return None


def read_small(path: Path, largest_mib: int, why_not: str) -> bytes:
    """All that a file holds.

    Args:
        largest_mib: the most it may hold, in MiB.
        why_not: what is wrong with a larger one; stands behind "is larger than 1 MiB".

    Raises:
        UsageError: it cannot be read, or is larger.
    """
    try:
        with path.open("rb") as file:
            data = file.read(largest_mib * 2**20 + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > largest_mib * 2**20:
        raise UsageError(f"{path} is larger than {largest_mib} MiB{why_not}")
    return data


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
        say_passed_over(error)
        return {}


def say_passed_over(error: Exception) -> None:
    """Say that a file is not read, and why."""
    _log.warning("passed over: %s", error)


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
