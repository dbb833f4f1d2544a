"""Files that are written atomically, read only if small, stored with a checksum, and converted to typed records."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import stat
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from stepscope.errors import UsageError

_T = TypeVar("_T")
_LONGEST_BYTES: Final = 200
"""Bytes of the original name kept in the temporary file's name, since file names are limited to 255."""


def cache_folder() -> Path:
    """Return STEPSCOPE_CACHE_DIR, or stepscope's folder in the user's cache folder."""
    import platformdirs

    return Path(os.environ.get("STEPSCOPE_CACHE_DIR") or platformdirs.user_cache_dir("stepscope", appauthor=False))


PACKAGE: Final = str(Path(__file__).parent)
LIBRARIES: Final = tuple(sorted({sysconfig.get_path(each) for each in ("stdlib", "platstdlib", "purelib", "platlib")}))


@cache
def package_state() -> list[tuple[int, int]]:
    """Times and sizes of stepscope's own files, and the time of the folders that have its libraries."""
    found = []
    for folder in (PACKAGE, *(LIBRARIES if PACKAGE not in LIBRARIES else ())):
        state = os.stat(folder)
        found.append((state.st_mtime_ns, 0))
    for folder, folders, files in os.walk(PACKAGE):
        folders[:] = sorted(each for each in folders if each != "__pycache__")
        for state in (os.stat(os.path.join(folder, each)) for each in sorted(files)):
            found.append((state.st_mtime_ns, state.st_size))
    return found


def _keep_newest(folder: Path, most_bytes: int) -> None:
    """Remove the oldest files of a folder that has more than these bytes."""
    with os.scandir(folder) as files:
        found = sorted(((each.stat().st_mtime, each.stat().st_size, each.path) for each in files), reverse=True)
    taken = 0
    for _, amount, path in found:
        taken += amount
        if taken > most_bytes:
            os.unlink(path)


@contextlib.contextmanager
def whole_file(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` if the block succeeds and is removed otherwise.

    The new file keeps the permissions of the one it replaces, and is never readable for more users than that one.

    Args:
        private: readable for its owner only, whatever the old permissions.

    Raises OSError if it cannot be written.
    """
    permissions = 0o600 if private else _permissions(path)
    short = os.fsdecode(os.fsencode(path.name)[:_LONGEST_BYTES])
    temporary = path.with_name(f".{short}-{os.urandom(4).hex()}.partial")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if permissions is None else 0o600)
    with undone_on_error(lambda: _unlink(temporary)):
        with os.fdopen(handle, "wb") as file:
            yield file
        if permissions is not None:
            os.chmod(temporary, permissions)
        if private:
            _hand_over(temporary)
        os.replace(temporary, path)


_DIGEST: Final = 32


def keep_sealed(path: Path, data: bytes, most_bytes: int) -> None:
    """Write bytes behind their SHA-256 into a private folder, whose files are named by hashes; a full disk is no error.

    The newest files of the folder are kept, up to about `most_bytes`.
    """
    with contextlib.suppress(OSError):
        private_folder(path.parent)
        with whole_file(path, private=True) as file:
            file.write(hashlib.sha256(data).digest() + data)
        if path.name.startswith("0"):  # now and then, as it looks at all of them
            _keep_newest(path.parent, most_bytes)


def kept_sealed(path: Path) -> bytes | None:
    """The bytes that `keep_sealed` wrote; None if there is no such file, or it has changed since."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    kept = data[_DIGEST:]
    return kept if hashlib.sha256(kept).digest() == data[:_DIGEST] else None


@contextlib.contextmanager
def undone_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the block raises anything, including an interrupt."""
    with contextlib.ExitStack() as stack:
        stack.callback(undo)
        yield
        stack.pop_all()


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def private_folder(path: Path, *, new: bool = False, tighten: bool = True) -> Path:
    """Make a folder and its missing parents, for the owner only.

    Args:
        new: the folder must not exist yet.
        tighten: remove other users' permissions from an existing folder of this user; False for a folder that the user
            named, which may hold other things.

    Returns:
        The path.

    Raises:
        FileExistsError: it exists, and `new`.
        OSError: it cannot be made.
    """
    missing = [path, *path.parents]
    missing = missing[: next((place for place, each in enumerate(missing) if each.exists()), len(missing))]
    if not missing and (new or not path.is_dir()):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    for each in reversed(missing):
        try:
            each.mkdir(0o700)
        except FileExistsError:  # another process made it first
            if new and each == path:
                raise
        else:
            _hand_over(each)
    if tighten and not missing:
        make_private(path)
    return path


def private_file(path: Path) -> Path:
    """Make an empty file for its owner only, or keep an existing one, before a library such as SQLite opens it by name.

    SQLite gives the files beside a database the database's mode.

    Raises OSError if it cannot be made.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600))
    except FileExistsError:
        make_private(path)
    else:
        _hand_over(path)
    return path


def make_private(path: Path) -> None:
    """Remove other users' permissions from this user's file or folder; another user's is left unchanged."""
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
    """Return the permissions of the file to be replaced; None if there is none, so that the umask decides."""
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        return None


_BOM: Final = b"\xef\xbb\xbf"


def text_of(head: bytes) -> bytes:
    """Strip a byte-order mark and white space."""
    return head.lstrip().removeprefix(_BOM).lstrip()


def read_small(path: Path, largest_mib: int, why_not: str) -> bytes:
    """Read a whole file of limited size, without a byte-order mark at its beginning; its lines keep their numbers.

    Args:
        largest_mib: size limit in MiB.
        why_not: the reason that follows "is larger than 1 MiB" in the message.

    Raises UsageError if it cannot be read, or is larger.
    """
    try:
        with path.open("rb") as file:
            data = file.read(largest_mib * 2**20 + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > largest_mib * 2**20:
        raise UsageError(f"{path} is larger than {largest_mib} MiB{why_not}")
    text = text_of(data)
    return data[: len(data) - len(text)].replace(_BOM, b"") + text


LARGEST_MIB: Final = 64
_CHECKSUM: Final = "checksum"
_LIMIT: Final = "limit_bytes"
_LIMIT_FILE: Final = "limit.json"
_MOST_DIGITS: Final = 20
_LARGEST: Final = 2**63
"""Whole numbers fit the 64 bits of tables and databases."""
_log = logging.getLogger("stepscope.kept")


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Add the checksum that `read_kept` verifies."""
    return {**content, _CHECKSUM: _checksum(content)}


def keep_limit(folder: Path, limit_bytes: int) -> None:
    """Save how much a folder may hold in its `limit.json`; raises OSError if it cannot be written."""
    with whole_file(folder / _LIMIT_FILE, private=True) as file:
        file.write(json.dumps(with_checksum({_LIMIT: limit_bytes})).encode())


def kept_limit(folder: Path) -> int | None:
    """The bytes that a folder may hold; None if no limit was saved.

    Raises OSError or ValueError if it cannot be read, or has changed since it was written.
    """
    try:
        content = json.loads((folder / _LIMIT_FILE).read_bytes(), parse_int=_whole)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    limit_bytes = content.get(_LIMIT) if isinstance(content, dict) else None
    if type(limit_bytes) is not int or content != with_checksum({_LIMIT: limit_bytes}):
        raise ValueError("it has changed since it was written")
    return max(0, limit_bytes)


def read_kept(path: Path, *, only_whole: bool = False) -> dict[str, Any]:
    """Read the JSON object in a file; a wrong checksum is reported, and a missing one accepted.

    Args:
        only_whole: refuse a file that was changed, if it can be regenerated, or a part of it is of no use.

    Raises UsageError if it cannot be read, is larger than 64 MiB, or does not contain a JSON object.
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} cannot be read: it is not a file")
    data = read_small(path, LARGEST_MIB, ", more than any that stepscope writes")
    try:
        content = json.loads(data.decode(), parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {_reason(error)}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is damaged: it does not contain a JSON object")
    if _CHECKSUM in content and content.pop(_CHECKSUM) != _checksum(content):
        if only_whole:
            raise UsageError(f"{path} is damaged: it has changed since it was written")
        say_changed(path)
    return content


def readable(path: Path, *, only_whole: bool = False) -> dict[str, Any]:
    """Read the JSON object in a file; empty if the file is missing or, after a message, unreadable."""
    try:
        return read_kept(path, only_whole=only_whole) if path.exists() else {}
    except (UsageError, OSError) as error:
        say_passed_over(error)
        return {}


def say_passed_over(error: Exception) -> None:
    """Report that a file is ignored, and why."""
    _log.warning("skipped: %s", error)


def say_changed(path: Path) -> None:
    """Report that a file contains something that stepscope did not write, and that the rest of it is used."""
    _log.warning("%s has changed since it was written: its content may be wrong, and part of it is left out", path)


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS or not -_LARGEST <= (value := int(text)) < _LARGEST:
        raise ValueError("it contains a number that is too large")
    return value


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "its values are nested too deeply"
    return "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"it is not JSON: {error}"


def converted(value: Any, kind: type[_T]) -> _T:
    """Convert a value of a decoded file to a typed record with msgspec.

    Raises:
        msgspec.ValidationError: the value does not fit, holds half of a surrogate pair, or is nested too deeply.
    """
    import msgspec  # only where needed: recorded programs import this module

    try:
        return msgspec.convert(value, kind)
    except UnicodeEncodeError as error:
        raise msgspec.ValidationError(f"it contains text that is not Unicode: {error.object!r:.60}") from error
    except RecursionError as error:
        raise msgspec.ValidationError("its values are nested too deeply") from error


_CHUNK_BYTES: Final = 1 << 20


def checksum(path: Path) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def to_disk(path: Path) -> None:
    """Flush a file's content or a directory's entries to disk; Windows cannot flush directories."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def shipped_rows(table: str) -> list[list[str]]:
    """The rows of a table in TSV that ships with the package, of its folder `data`, without comments and header."""
    from importlib.resources import files

    text = files("stepscope").joinpath(f"data/{table}").read_text(encoding="utf-8")
    return [line.split("\t") for line in text.splitlines() if not line.startswith("#")][1:]


def shipped(table: str, kind: type[_T]) -> _T:
    """A table in TOML that ships with the package, of its folder `data`."""
    import msgspec

    return msgspec.convert(_shipped(table), kind)


@cache
def _shipped(table: str) -> Any:
    from importlib.resources import files

    import msgspec

    return msgspec.toml.decode(files("stepscope").joinpath(f"data/{table}").read_bytes())
