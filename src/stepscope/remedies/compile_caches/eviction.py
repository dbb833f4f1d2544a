"""Removing what was used longest ago from a compile cache until it is below its limit, by one process at a time."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepscope.remedies.compile_caches.entries import LOCK, TRASH, Entry, entries_of
from stepscope.remedies.compile_caches.in_use import open_files
from stepscope.remedies.compile_caches.places import CompileCache

SHARE_KEPT: Final = 0.99
"""Of the limit: what is being written is not known yet when others are evicted (as Intel Gaudi's cache does)."""
RECENTLY_S: Final = 60.0
"""What was written or read this recently is taken to be in use, although no process has it open just now."""

_OF_PEOPLE: Final = frozenset({".git", ".hg", ".svn", ".venv", ".ssh", ".bashrc", ".profile", ".config", "Makefile"})
_WRITTEN_BY_PEOPLE: Final = (
    ".py",
    ".ipynb",
    ".md",
    ".txt",
    ".toml",
    ".yaml",
    ".yml",
    ".sh",
    ".tex",
    ".pdf",
    ".csv",
    ".pt",
)
"""How files end that none of these compilers puts at the top of its cache."""


class EvictionBusy(RuntimeError):
    """Another process evicts from the same cache at this moment."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """What became of a cache.

    Attributes:
        removed: the entries that are gone.
        in_use: entries that would have been removed, had they not been in use.
        before_bytes, after_bytes: of all entries.
        limit_bytes: what was asked for.
    """

    removed: tuple[Entry, ...]
    in_use: tuple[Entry, ...]
    before_bytes: int
    after_bytes: int
    limit_bytes: int

    @property
    def is_below(self) -> bool:
        """Whether the cache is as small as it was to become."""
        return self.after_bytes <= SHARE_KEPT * self.limit_bytes


def evict(cache: CompileCache, limit_bytes: int | None = None, *, recently_s: float = RECENTLY_S) -> Eviction:
    """Remove entries, those used longest ago first, until the rest is at most 0.99 of the limit.

    An entry goes as a whole, and for other processes at one moment: its parts are moved out of the cache first. Left
    alone is what a process has open or loaded, what Inductor's lock of that entry protects, and what was used in the
    last `recently_s` seconds.

    Args:
        limit_bytes: the most that the cache may hold; its own limit where it is None.

    Raises:
        ValueError: there is no limit, it is not above 0, or the folder holds what no compile cache does.
        EvictionBusy: another process evicts from it now.
        OSError: the folder cannot be written.
    """
    limit = cache.limit_bytes if limit_bytes is None else limit_bytes
    if limit is None or limit <= 0:
        raise ValueError(f"{cache.folder} has no limit: say how many bytes it may hold, more than 0")
    if not cache.folder.is_dir():
        return Eviction((), (), 0, 0, limit)
    refuse_other_folders(cache)
    with _only_evictor(cache.folder):
        _remove_trash(cache.folder)
        entries = entries_of(cache)
        before = sum(entry.bytes for entry in entries)
        most = int(SHARE_KEPT * limit)
        if before <= most:
            return Eviction((), (), before, before, limit)
        return _evicted(cache, entries, before, most, limit, recently_s)


def refuse_other_folders(cache: CompileCache) -> None:
    """Raise ValueError where a folder is surely no compile cache: eviction would remove what somebody wrote.

    A recipe's or executable's file may have any name, so that only the rest of the folder tells.
    """
    folder = cache.folder.resolve()
    here = Path.cwd() if os.path.isdir(os.curdir) else None
    if folder in (Path.home().resolve(), Path(folder.anchor)) or (here is not None and here.is_relative_to(folder)):
        raise ValueError(f"{cache.folder} is no compile cache but a folder to work in: nothing is removed there")
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for each in found:
            if each.name in _OF_PEOPLE or each.name.endswith(_WRITTEN_BY_PEOPLE):
                raise ValueError(
                    f"{cache.folder} holds {each.name}: it is no compile cache, and nothing is removed there"
                )


def _evicted(
    cache: CompileCache, entries: list[Entry], before: int, most: int, limit: int, recently_s: float
) -> Eviction:
    opened = open_files(cache.folder)
    now, left = time.time(), before
    removed: list[Entry] = []
    kept: list[Entry] = []
    trash = Path(tempfile.mkdtemp(prefix=TRASH, dir=cache.folder))
    try:
        for place, entry in enumerate(entries):
            if left <= most:
                break
            if now - entry.used_unix < recently_s or _is_open(entry, opened) or not _moved(cache, entry, trash, place):
                kept.append(entry)
                continue
            left -= entry.bytes
            removed.append(entry)
    finally:
        shutil.rmtree(trash, ignore_errors=True)
    return Eviction(tuple(removed), tuple(kept), before, left, limit)


def _is_open(entry: Entry, opened: set[str]) -> bool:
    for path in entry.paths:
        real = os.path.realpath(path)
        if real in opened or any(each.startswith(real + os.sep) for each in opened):
            return True
    return False


def _moved(cache: CompileCache, entry: Entry, trash: Path, place: int) -> bool:
    """Move an entry's parts into the trash, under that number; False where its compiler's lock says it is in use."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_compilers_lock(cache, entry))
        except BlockingIOError:
            return False
        for number, path in enumerate(entry.paths):
            target = trash / f"{place}-{number}"
            with contextlib.suppress(FileNotFoundError):  # its compiler removed it just now
                os.replace(path, target)
    return True


@contextlib.contextmanager
def _compilers_lock(cache: CompileCache, entry: Entry) -> Iterator[None]:
    """Hold the lock that Inductor holds while it makes code or a graph of that key; raises BlockingIOError."""
    path = cache.folder / "locks" / f"{entry.key.rpartition('/')[2]}.lock"
    if cache.kind != "inductor" or not path.is_file():
        yield
        return
    with _locked(path):
        yield


@contextlib.contextmanager
def _only_evictor(folder: Path) -> Iterator[None]:
    try:
        with _locked(folder / LOCK):
            yield
    except BlockingIOError as error:
        raise EvictionBusy(f"another process evicts from {folder} now") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the only lock on a file, which stays; raises BlockingIOError where another process has it."""
    try:
        import fcntl
    except ImportError as error:
        raise OSError("this system has no flock, by which only one process evicts at a time") from error

    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _remove_trash(folder: Path) -> None:
    """What an evictor that was killed left behind; no other one lives while the lock is held."""
    for name in os.listdir(folder):
        if name.startswith(TRASH):
            shutil.rmtree(folder / name, ignore_errors=True)
