"""A cache of parsed traces, stored under a hash of their content.

    ROOT/<key>/store.json, *.parquet   a store (`stepscope.trace.model`)
    ROOT/<key>/contents.json           checksums of its files, which reveal a damaged store
    ROOT/.partial-*                    a store being written or removed; deleted when a day old
    ROOT/key-of-*                      the key of a large file, until the file's size, times or place change
    ROOT/limit.json                    the size limit, if the user set one

Any number of processes may share a cache. A store appears under its key complete or not at all, by a rename. Readers
and writers of a store hold a shared lock on its directory, and only a directory that can be locked exclusively is
removed. A directory's modification time is the time the store was last used.
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
from typing import Any, Final, TypeAlias

import msgspec

from stepscope.errors import CacheError, UnreadableTraceError
from stepscope.files import (
    cache_folder,
    keep_limit,
    kept_limit,
    private_folder,
    to_disk,
    undone_on_error,
    whole_file,
    with_checksum,
)
from stepscope.trace.metadata import Metadata, TraceWarning
from stepscope.trace.model import VERSION, StoreWriter, Trace, disk_errors, metadata_of, open_kept, open_unsealed, seal

try:
    import fcntl
except ImportError:  # Windows, where files that another process has open cannot be removed
    fcntl = None  # type: ignore[assignment]

Build: TypeAlias = Callable[[StoreWriter], tuple[Metadata, tuple[TraceWarning, ...]]]

READER_VERSION: Final = 15
"""Incremented whenever a reader produces different tables from the same file, so that older stores are not used."""
DEFAULT_LIMIT_BYTES: Final = 10 * 2**30

_DAY_S: Final = 86_400
_UNLOCKED_GRACE_S: Final = 3_600
"""Without locks, stores used this recently are assumed to be open."""
_HASH_CHUNK_BYTES: Final = 1 << 20
_LARGE_BYTES: Final = 32 * 2**20
"""Size from which hashing a file takes a noticeable part of opening it."""
_SETTLED_NS: Final = 2_000_000_000
"""Age of a change after which another change gives a file another time."""
_KNOWN_FOR_S: Final = 30 * 86_400
_PARTIAL: Final = ".partial-"
_KNOWN: Final = "key-of-"
_TEMPORARY: Final = "stepscope-store-"
_ABANDONED_AFTER_S: Final = 60
_KEY: Final = re.compile(r"[0-9a-f]{64}")
_OTHERS_ADD: Final = 16
_room: dict[tuple[str, int], int] = {}
"""Bytes that a cache with a limit had room for at the last look, less what was added since."""
_log = logging.getLogger("stepscope.cache")


def default_root() -> Path:
    """Return the folder of traces in `cache_folder`."""
    return cache_folder() / "traces"


def content_key(path: str | Path, variant: str = "") -> str:
    """Return the SHA-256 of a file's bytes, the reader and store versions, and `variant`, such as a window.

    Raises UnreadableTraceError if the file cannot be read.
    """
    digest = hashlib.sha256(f"{READER_VERSION}/{VERSION}/{variant}/".encode())
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise UnreadableTraceError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _state(path: str | Path) -> tuple[int, int, int, int, int] | None:
    """Return a file's size, its times of change, and its place; None if it cannot be looked at."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_dev, found.st_ino


def temporary_store(build: Build) -> Trace:
    """Return the trace that `build` writes to a temporary folder, which is removed with the trace.

    Raises CacheError.
    """
    try:
        _sweep_temporary()
        directory = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
        with undone_on_error(lambda: shutil.rmtree(directory, ignore_errors=True)):
            hold = _Hold(directory)
            _write(directory, build)
            return open_unsealed(directory, _Temporary(directory, hold))
    except OSError as error:
        folder = tempfile.gettempdir()
        raise CacheError(
            f"the folder for temporary files, {folder}, cannot hold the trace's tables: {error.strerror}; "
            "set TMPDIR to use another one"
        ) from error


def _sweep_temporary() -> None:
    """Remove temporary stores of killed processes, which no process has locked."""
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
        bytes: size on disk.
        last_used_unix: seconds since 1970.
        path: the file it was first read from.
        format: format of that file.
    """

    key: str
    directory: Path
    bytes: int
    last_used_unix: float
    path: str
    format: str


class TraceCache:
    """A folder of trace stores with a size limit; the least recently used stores are removed first.

    Args:
        root: the folder, created on the first write; None for `default_root()`.
        limit_bytes: overrides the limit kept in the folder.
    """

    def __init__(self, root: str | Path | None = None, limit_bytes: int | None = None) -> None:
        self.root = default_root() if root is None else Path(root)
        self._limit_bytes = limit_bytes

    def key_of(self, path: str | Path, variant: str = "", least_bytes: int | None = None) -> str:
        """Return `content_key`; that of a large file is kept, and holds until its size, times or place change.

        Args:
            least_bytes: the size from which a file is large; smaller where many files are looked at together.

        Raises UnreadableTraceError if the file cannot be read.
        """
        state = _state(path)
        if state is None or state[0] < (_LARGE_BYTES if least_bytes is None else least_bytes):
            return content_key(path, variant)
        name = hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()
        here = [name, *map(str, state), f"{READER_VERSION}/{VERSION}/{variant}"]
        place = self.root / (_KNOWN + name)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = msgspec.json.decode(place.read_bytes(), type=dict[str, Any])
            known = {"file": here, "key": content["key"]}
            if content == with_checksum(known) and _KEY.fullmatch(known["key"]):
                return str(known["key"])
        key = content_key(path, variant)
        is_settled = time.time_ns() - max(state[1:3]) > _SETTLED_NS  # a later change has other times
        if is_settled and _state(path) == state:
            with contextlib.suppress(OSError), whole_file(self._made_root() / place.name, private=True) as file:
                file.write(msgspec.json.encode(with_checksum({"file": here, "key": key})))
        return key

    def excerpt(self, key: str, build: Build, cut: Callable[[Trace], Build]) -> Trace:
        """Return a temporary trace that `cut` writes from the stored one, written by `build` unless it exists.

        Of the store, only the files that `cut` reads are verified. A damaged one is removed and written again.
        """
        whole = self.lookup(key, lazily=True)
        if whole is not None:
            try:
                return temporary_store(cut(whole))
            except UnreadableTraceError as error:
                problem = str(error)
            del whole  # which holds the store; the error did so too
            self._remove_damaged(key, problem)
        return temporary_store(cut(self.add(key, build)))

    def lookup(self, key: str, *, lazily: bool = False) -> Trace | None:
        """Return the stored trace or None; its store is not removed while the trace lives.

        A damaged store is removed with a warning. The metadata have the path that was read first, which may differ from
        the path of the same content now.

        Args:
            lazily: verify files when they are read, which may raise UnreadableTraceError.
        """
        directory = self._directory(key)
        if not directory.exists():
            return None
        try:
            hold = _Hold(directory)
        except OSError:  # being removed, or unreadable
            return None
        try:
            trace = open_kept(directory, hold, key, lazily=lazily)
        except UnreadableTraceError as error:
            hold.release()
            self._remove_damaged(key, str(error))
            return None
        with contextlib.suppress(OSError):  # a cache that cannot be written can still be read
            os.utime(directory)
        return trace

    def add(self, key: str, build: Build) -> Trace:
        """Return the trace under `key`, written by `build` unless it exists.

        A store that exceeds the limit or cannot be written to the cache is kept only as long as the trace lives. If
        writing fails half-way, `build` is called again for the temporary folder.
        """
        found = self.lookup(key)
        if found is not None:
            return found
        try:
            self._sweep(older_than_s=_DAY_S)
            directory = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=self._made_root()))
            with undone_on_error(lambda: shutil.rmtree(directory, ignore_errors=True)):
                hold = _Hold(directory)
                _write(directory, build)
                seal(directory, key)
                return self._publish(key, directory, hold)
        except OSError as error:
            _log.info("the cache %s cannot be written (%s); using a temporary store", self.root, error.strerror)
            return temporary_store(build)

    def entries(self) -> list[CacheEntry]:
        """Return all stored traces, most recently used first."""
        found = [entry for directory in self._children() if (entry := _entry(directory)) is not None]
        return sorted(found, key=lambda entry: entry.last_used_unix, reverse=True)

    def clear(self) -> list[CacheEntry]:
        """Remove every store that no process has open, and return the removed entries.

        Raises CacheError if an unused entry cannot be removed.
        """
        removed = [entry for entry in self.entries() if self._remove(entry.directory, strict=True)]
        self._sweep(older_than_s=0 if fcntl else _DAY_S)
        return removed

    def limit(self) -> int:
        """Return the limit for the total size of all stores in bytes; 0 keeps nothing."""
        if self._limit_bytes is not None:
            return self._limit_bytes
        try:
            kept = kept_limit(self.root)
        except (OSError, ValueError):
            _log.warning(
                "%s does not contain a number of bytes; the limit of the cache is %d GiB",
                self.root / "limit.json",
                DEFAULT_LIMIT_BYTES >> 30,
            )
            return DEFAULT_LIMIT_BYTES
        return DEFAULT_LIMIT_BYTES if kept is None else kept

    def set_limit(self, limit_bytes: int) -> None:
        """Save a limit in the folder, and remove stores that exceed it.

        Raises CacheError if the folder cannot be written.
        """
        try:
            keep_limit(self._made_root(), limit_bytes)
        except OSError as error:
            raise CacheError(f"the cache {self.root} cannot be written: {error.strerror}") from error
        self._limit_bytes = None
        self._evict()

    def _remove_damaged(self, key: str, problem: str) -> None:
        _log.warning("%s; the trace is read again from its file", problem)
        self._remove(self._directory(key))

    def _directory(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"not a cache key: {key!r}")
        return self.root / key

    def _made_root(self) -> Path:
        return private_folder(self.root)

    def _children(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from (child for child in self.root.iterdir() if _KEY.fullmatch(child.name) and child.is_dir())

    def _publish(self, key: str, directory: Path, hold: _Hold) -> Trace:
        """Move a complete store to its place, unless it is too large or another process was faster."""
        if _size(directory) > self.limit():
            _log.info("the trace is larger than the cache's limit and is not kept")
            return open_unsealed(directory, _Temporary(directory, hold))
        for _ in range(2):  # again after a damaged entry was removed
            try:
                os.replace(directory, self._directory(key))
            except OSError:
                found = self.lookup(key)
                if found is not None:
                    shutil.rmtree(directory, ignore_errors=True)
                    return found
            else:
                to_disk(self.root)
                self._evict_after(_size(self._directory(key)))
                return open_unsealed(self._directory(key), hold)
        return open_unsealed(directory, _Temporary(directory, hold))

    def _evict_after(self, added: int) -> None:
        """Look whether the limit is exceeded, unless there was room for many times what was added since the last look.

        A look takes 0.1 s for 1,000 stores, and other processes add to them, too.
        """
        place = str(self.root), self.limit()
        _room[place] = _room.get(place, 0) - _OTHERS_ADD * added
        if _room[place] <= 0:
            self._evict()

    def _evict(self) -> None:
        entries = self.entries()
        excess = sum(entry.bytes for entry in entries) - self.limit()
        _room[str(self.root), self.limit()] = -excess
        for entry in reversed(entries):
            if excess <= 0:
                return
            if fcntl is None and time.time() - entry.last_used_unix < _UNLOCKED_GRACE_S:
                continue
            if self._remove(entry.directory):
                excess -= entry.bytes

    def _remove(self, directory: Path, *, strict: bool = False) -> bool:
        """Rename an unused entry, then delete it; False if it is in use."""
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
        known_for_s = _KNOWN_FOR_S if older_than_s else 0
        with contextlib.suppress(OSError):
            for known in list(self.root.glob(f"{_KNOWN}*")):
                with contextlib.suppress(OSError):
                    if time.time() - known.stat().st_mtime >= known_for_s:
                        known.unlink()
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
    """A shared lock on a store's directory, released with the last trace that uses it.

    Raises OSError if the directory is locked for removal or was just moved away.
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
    """A directory that is removed with the last trace that uses it, or when the process ends."""

    def __init__(self, directory: Path, hold: _Hold | None = None) -> None:
        self._hold = hold
        weakref.finalize(self, _remove_own, os.getpid(), directory)


def _remove_own(process: int, directory: Path) -> None:
    if os.getpid() == process:  # a forked child inherits the object, but not the directory
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _exclusively(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock on a directory; raise BlockingIOError if another process has a lock."""
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
    """Lock without waiting. File systems without locks are not locked; there, only the day-old rule protects stores."""
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        _log.debug("the cache's file system has no locks: %s", error)


def _write(directory: Path, build: Build) -> None:
    writer = StoreWriter(directory)
    with disk_errors():
        metadata, warnings = build(writer)
    writer.finish(metadata, warnings)


def _size(directory: Path) -> int:
    with os.scandir(directory) as files:
        return sum(file.stat().st_size for file in files)


def _entry(directory: Path) -> CacheEntry | None:
    try:
        used, amount = directory.stat().st_mtime, _size(directory)
    except OSError:
        return None
    try:
        metadata = metadata_of(directory)
    except UnreadableTraceError:  # list damaged entries too, so that they count and can be cleared
        metadata = Metadata()
    return CacheEntry(directory.name, directory, amount, used, metadata.path, metadata.format)
