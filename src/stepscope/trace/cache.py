"""Traces that were read once, kept under a hash of their content.

    ROOT/<key>/store.json, *.parquet   a store (`stepscope.trace.store`)
    ROOT/<key>/contents.json           its files' checksums, by which a damaged store is recognised
    ROOT/.partial-*                    a store being written or removed; swept away when a day old
    ROOT/limit.json                    the size limit, where the user set one

Any number of processes may use one cache. A store appears under its key complete or not at all, by a rename. Whoever
reads or writes a store holds a shared lock on its directory, and only what can be locked exclusively is removed. A
directory's modification time says when the store was last used.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
import platformdirs

from stepscope.errors import CacheError, UnreadableTraceError
from stepscope.files import private_folder, whole_file, with_checksum
from stepscope.trace.metadata import Metadata, TraceWarning
from stepscope.trace.model import Trace
from stepscope.trace.store import metadata_of, open_kept, open_unsealed
from stepscope.trace.store_writing import VERSION, StoreWriter, disk_errors, seal, to_disk

try:
    import fcntl
except ImportError:  # Windows, where nobody can remove what another process has open
    fcntl = None  # type: ignore[assignment]

Build: TypeAlias = Callable[[StoreWriter], tuple[Metadata, tuple[TraceWarning, ...]]]

READER_VERSION: Final = 8
"""Raised whenever a reader makes other tables of the same file, so that older stores are not used."""
DEFAULT_LIMIT_BYTES: Final = 10 * 2**30

_DAY_S: Final = 86_400
_UNLOCKED_GRACE_S: Final = 3_600
"""Without locks, what was used this recently is taken to be open."""
_HASH_CHUNK_BYTES: Final = 1 << 20
_PARTIAL: Final = ".partial-"
_LIMIT: Final = "limit_bytes"
_TEMPORARY: Final = "stepscope-store-"
_ABANDONED_AFTER_S: Final = 60
_KEY: Final = re.compile(r"[0-9a-f]{64}")
_log = logging.getLogger("stepscope.cache")


def default_root() -> Path:
    """The folder of the cache: `traces` in STEPSCOPE_CACHE_DIR, or in the user's cache folder."""
    parent = os.environ.get("STEPSCOPE_CACHE_DIR") or platformdirs.user_cache_dir("stepscope", appauthor=False)
    return Path(parent) / "traces"


def content_key(path: str | Path, variant: str = "") -> str:
    """SHA-256 of a file's bytes, the versions of reader and store, and `variant`, such as a window.

    Raises:
        UnreadableTraceError: the file cannot be read.
    """
    digest = hashlib.sha256(f"{READER_VERSION}/{VERSION}/{variant}/".encode())
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise UnreadableTraceError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def temporary_store(build: Build) -> Trace:
    """The trace that `build` writes into the system's temporary folder; removed with the trace. Raises CacheError."""
    try:
        _sweep_temporary()
        directory = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
        with _removed_on_error(directory):
            hold = _Hold(directory)
            _write(directory, build)
            return open_unsealed(directory, _Temporary(directory, hold))
    except OSError as error:
        folder = tempfile.gettempdir()
        raise CacheError(
            f"the folder for temporary files, {folder}, cannot hold the trace's tables: {error.strerror}; "
            "TMPDIR names another one"
        ) from error


def _sweep_temporary() -> None:
    """Remove temporary stores whose processes were killed: those that nobody has locked."""
    if fcntl is None:
        return
    with contextlib.suppress(OSError):
        for leftover in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*"):
            with contextlib.suppress(OSError):
                state = leftover.lstat()
                is_ours = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()
                if is_ours and time.time() - state.st_mtime > _ABANDONED_AFTER_S:
                    with _exclusively(leftover):
                        shutil.rmtree(leftover, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One stored trace.

    Attributes:
        key: what it is stored under.
        directory: where.
        bytes: what it takes on disk.
        last_used_unix: seconds since 1970.
        path: the file it was first read from.
        format: that file's format.
    """

    key: str
    directory: Path
    bytes: int
    last_used_unix: float
    path: str
    format: str


class TraceCache:
    """A folder of trace stores with a limit on its size; the least recently used go first.

    Args:
        root: the folder; made when first written to. None for the user's own, `default_root()`.
        limit_bytes: overrides the limit kept in the folder.
    """

    def __init__(self, root: str | Path | None = None, limit_bytes: int | None = None) -> None:
        self.root = default_root() if root is None else Path(root)
        self._limit_bytes = limit_bytes

    def lookup(self, key: str) -> Trace | None:
        """The stored trace, which stays in place as long as it lives, or None; a damaged one is thrown away and told.

        Its metadata name the path that was read first, which need not be where the same content was found now.
        """
        directory = self._directory(key)
        if not directory.exists():
            return None
        try:
            hold = _Hold(directory)
        except OSError:  # being removed this moment, or not ours to read
            return None
        try:
            trace = open_kept(directory, hold, key)
        except UnreadableTraceError as error:
            hold.release()
            _log.warning("%s; the trace is read anew from its own file", error)
            self._remove(directory)
            return None
        with contextlib.suppress(OSError):  # a cache that cannot be written can still be read
            os.utime(directory)
        return trace

    def add(self, key: str, build: Build) -> Trace:
        """The trace under `key`, written by `build` unless it is there already.

        A store above the limit, or one that cannot be written here, is kept only as long as the trace lives; `build`
        is called a second time, into the system's folder for temporary files, when writing failed half-way.
        """
        found = self.lookup(key)
        if found is not None:
            return found
        try:
            self._sweep(older_than_s=_DAY_S)
            directory = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=self._made_root()))
            with _removed_on_error(directory):
                hold = _Hold(directory)
                _write(directory, build)
                seal(directory, key)
                return self._publish(key, directory, hold)
        except OSError as error:
            _log.info("the cache %s cannot be written (%s); using a temporary store", self.root, error.strerror)
            return temporary_store(build)

    def entries(self) -> list[CacheEntry]:
        """What is stored, the most recently used first."""
        found = [entry for directory in self._children() if (entry := _entry(directory)) is not None]
        return sorted(found, key=lambda entry: entry.last_used_unix, reverse=True)

    def clear(self) -> list[CacheEntry]:
        """Remove everything that no process has open; returns what was removed.

        Raises:
            CacheError: an entry cannot be removed, though nobody uses it.
        """
        removed = [entry for entry in self.entries() if self._remove(entry.directory, strict=True)]
        self._sweep(older_than_s=0 if fcntl else _DAY_S)
        return removed

    def limit(self) -> int:
        """The largest size of all stores together, in bytes; 0 keeps nothing."""
        if self._limit_bytes is not None:
            return self._limit_bytes
        place = self.root / "limit.json"
        try:
            return max(0, _limit_in(place.read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            return DEFAULT_LIMIT_BYTES
        except (OSError, ValueError, KeyError):
            _log.warning("%s holds no number of bytes; the cache keeps to %d GiB", place, DEFAULT_LIMIT_BYTES >> 30)
            return DEFAULT_LIMIT_BYTES

    def set_limit(self, limit_bytes: int) -> None:
        """Keep a limit in the folder, for every later use, and remove what exceeds it now.

        Raises:
            CacheError: the folder cannot be written.
        """
        try:
            with whole_file(self._made_root() / "limit.json", private=True) as file:
                file.write(msgspec.json.encode(with_checksum({_LIMIT: limit_bytes})))
        except OSError as error:
            raise CacheError(f"the cache {self.root} cannot be written: {error.strerror}") from error
        self._limit_bytes = None
        self._evict()

    def _directory(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"not a key of the cache: {key!r}")
        return self.root / key

    def _made_root(self) -> Path:
        return private_folder(self.root)

    def _children(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from (child for child in self.root.iterdir() if _KEY.fullmatch(child.name) and child.is_dir())

    def _publish(self, key: str, directory: Path, hold: _Hold) -> Trace:
        """Move a complete store to its place, unless it is too large or another process was first."""
        if _size(directory) > self.limit():
            _log.info("the trace is larger than the cache's limit and is not kept")
            return open_unsealed(directory, _Temporary(directory, hold))
        for _ in range(2):  # once more after a damaged entry was in the way
            try:
                os.replace(directory, self._directory(key))
            except OSError:
                found = self.lookup(key)
                if found is not None:
                    shutil.rmtree(directory, ignore_errors=True)
                    return found
            else:
                to_disk(self.root)
                self._evict()
                return open_unsealed(self._directory(key), hold)
        return open_unsealed(directory, _Temporary(directory, hold))

    def _evict(self) -> None:
        """Remove the least recently used until the limit is kept; what is open stays."""
        entries = self.entries()
        excess = sum(entry.bytes for entry in entries) - self.limit()
        for entry in reversed(entries):
            if excess <= 0:
                return
            if fcntl is None and time.time() - entry.last_used_unix < _UNLOCKED_GRACE_S:
                continue
            if self._remove(entry.directory):
                excess -= entry.bytes

    def _remove(self, directory: Path, *, strict: bool = False) -> bool:
        """Remove an entry that nobody uses: first out of sight, then from disk. False where it is in use."""
        try:
            with _exclusively(directory):
                doomed = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=self.root))
                os.replace(directory, doomed / directory.name)
        except (BlockingIOError, FileNotFoundError):
            return False
        except OSError as error:
            if strict:
                raise CacheError(f"{directory} cannot be removed: {error.strerror}") from error
            return False
        shutil.rmtree(doomed, ignore_errors=True)
        return True

    def _sweep(self, older_than_s: float) -> None:
        """Remove what processes that were killed have left behind."""
        with contextlib.suppress(OSError):
            for leftover in list(self.root.glob(f"{_PARTIAL}*")):
                with contextlib.suppress(OSError):
                    if time.time() - leftover.stat().st_mtime < older_than_s:
                        continue
                    if leftover.is_file():
                        leftover.unlink()
                        continue
                    with _exclusively(leftover):
                        shutil.rmtree(leftover, ignore_errors=True)


class _Hold:
    """A shared lock on a store's directory, given up with the last trace that uses it.

    Raises OSError where the directory is locked for removal or has just been moved away.
    """

    def __init__(self, directory: Path) -> None:
        if fcntl is None:
            return
        handle = os.open(directory, os.O_RDONLY)
        self._close = weakref.finalize(self, os.close, handle)
        try:
            _lock(handle, exclusive=False)
            if not os.path.samestat(os.fstat(handle), os.stat(directory)):
                raise FileNotFoundError(f"{directory} was replaced")
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        if fcntl is not None:
            self._close()


class _Temporary:
    """A directory that goes when the last trace that uses it does, or the process ends."""

    def __init__(self, directory: Path, hold: _Hold | None = None) -> None:
        self._hold = hold
        weakref.finalize(self, _remove_own, os.getpid(), directory)


def _remove_own(process: int, directory: Path) -> None:
    if os.getpid() == process:  # a forked child inherits the object, but not the directory
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _exclusively(directory: Path) -> Iterator[None]:
    """Hold the only lock on a directory; raises BlockingIOError where somebody else has one."""
    if fcntl is None:
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        _lock(handle, exclusive=True)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, *, exclusive: bool) -> None:
    """Lock without waiting. File systems that know no locks go without: there the day-old rule must do."""
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        _log.debug("the cache's file system has no locks: %s", error)


@contextlib.contextmanager
def _removed_on_error(directory: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _write(directory: Path, build: Build) -> None:
    writer = StoreWriter(directory)
    with disk_errors():
        metadata, warnings = build(writer)
    writer.finish(metadata, warnings)


def _size(directory: Path) -> int:
    with os.scandir(directory) as files:
        return sum(file.stat().st_size for file in files)


def _limit_in(data: bytes) -> int:
    """The bytes of a kept limit; raises ValueError or KeyError where it was damaged. Older files hold a bare number."""
    content: int | dict[str, int] = msgspec.json.decode(data, type=int | dict[str, int])
    if isinstance(content, int):
        return content
    limit_bytes = content[_LIMIT]
    if content != with_checksum({_LIMIT: limit_bytes}):
        raise ValueError("it is not as it was written")
    return limit_bytes


def _entry(directory: Path) -> CacheEntry | None:
    try:
        used, amount = directory.stat().st_mtime, _size(directory)
    except OSError:
        return None
    try:
        metadata = metadata_of(directory)
    except UnreadableTraceError:  # damaged: listed all the same, so that it counts and can be cleared
        metadata = Metadata()
    return CacheEntry(directory.name, directory, amount, used, metadata.path, metadata.format)
