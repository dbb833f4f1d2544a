"""Evict the least recently used entries of a compile cache until it is below its limit, in one process at a time."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepscope.remedies.compile_caches.entries import LOCK, TRASH, CompileCache, Entry, entries_of, find_caches

_PROCESSES: Final = Path("/proc")
_MOST_OF_A_MAP: Final = 64 * 2**20


def open_files(folder: Path) -> set[str]:
    """Real paths below the folder that a process has open or mapped, as far as this user may see.

    Empty without /proc, as on macOS: there, only recently used entries count as in use.
    """
    root = os.path.realpath(folder)
    found: set[str] = set()
    try:
        processes = [name for name in os.listdir(_PROCESSES) if name.isdecimal()]
    except OSError:
        return found
    for process in processes:
        found |= _opened(_PROCESSES / process / "fd", root)
        found |= _mapped(_PROCESSES / process / "maps", root)
    return found


def _opened(descriptors: Path, root: str) -> set[str]:
    targets: list[str] = []
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(descriptors):
            with contextlib.suppress(OSError):
                targets.append(os.readlink(descriptors / descriptor))
    return {target for target in targets if _is_below(target, root)}


def _mapped(maps: Path, root: str) -> set[str]:
    try:
        with maps.open("rb") as file:
            lines = file.read(_MOST_OF_A_MAP).splitlines()
    except OSError:
        return set()
    wanted = os.fsencode(root)
    names = (line.split(None, 5) for line in lines if wanted in line)
    paths = (os.fsdecode(parts[5]) for parts in names if len(parts) == 6)
    return {path for path in paths if _is_below(path, root)}


def _is_below(path: str, root: str) -> bool:
    return path.startswith(root + os.sep)


SHARE_KEPT: Final = 0.99
"""Share of the limit to keep: the size of files still being written is unknown (as Intel Gaudi's cache does)."""
RECENTLY_S: Final = 60.0
"""Entries written or read this recently count as in use, even if no process has them open."""

_OF_PEOPLE: Final = frozenset({".git", ".hg", ".svn", ".venv", ".ssh", ".bashrc", ".profile", ".config", "Makefile"})
_WRITTEN_BY_PEOPLE: Final = (
    *(".py", ".ipynb", ".md", ".txt", ".toml", ".yaml", ".yml", ".sh"),
    *(".tex", ".pdf", ".csv", ".pt"),
)
"""Suffixes of files that none of these compilers puts at the top of its cache."""


class EvictionBusy(RuntimeError):
    """Another process is evicting from the same cache."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """What one eviction did to a cache.

    Attributes:
        removed: the evicted entries.
        in_use: entries that were due but kept, because they are in use.
        before_bytes, after_bytes: size of all entries.
        limit_bytes: the requested limit.
    """

    removed: tuple[Entry, ...]
    in_use: tuple[Entry, ...]
    before_bytes: int
    after_bytes: int
    limit_bytes: int

    @property
    def is_below(self) -> bool:
        return self.after_bytes <= SHARE_KEPT * self.limit_bytes


def evict(cache: CompileCache, limit_bytes: int | None = None, *, recently_s: float = RECENTLY_S) -> Eviction:
    """Remove the least recently used entries until the rest is at most 0.99 of the limit.

    An entry is removed as a whole, atomically for other processes: its parts are first moved out of the cache. Entries
    stay if a process has them open or loaded, if Inductor's lock protects them, or if they were used in the last
    `recently_s` seconds.

    Args:
        limit_bytes: the most that the cache may hold; None for the cache's own limit.

    Raises:
        ValueError: there is no limit, it is not above 0, or the folder holds files that no compile cache has.
        EvictionBusy: another process is evicting from it.
        OSError: the folder cannot be written.
    """
    limit = cache.limit_bytes if limit_bytes is None else limit_bytes
    if limit is None or limit <= 0:
        raise ValueError(f"{cache.folder} has no limit: say how many bytes it may hold, more than 0")
    if not cache.folder.is_dir():
        return Eviction((), (), 0, 0, limit)
    refuse_other_folders(cache)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_locked(cache.folder / LOCK))
        except BlockingIOError as error:
            raise EvictionBusy(f"another process evicts from {cache.folder} now") from error
        _remove_trash(cache.folder)
        entries = entries_of(cache)
        before = sum(entry.bytes for entry in entries)
        most = int(SHARE_KEPT * limit)
        if before <= most:
            return Eviction((), (), before, before, limit)
        return _evicted(cache, entries, before, most, limit, recently_s)


def refuse_other_folders(cache: CompileCache) -> None:
    """Raise ValueError if a folder cannot be a compile cache: eviction would delete the user's files."""
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
    reals = map(os.path.realpath, entry.paths)
    return any(each == real or _is_below(each, real) for real in reals for each in opened)


def _moved(cache: CompileCache, entry: Entry, trash: Path, place: int) -> bool:
    """Move an entry's parts into the trash, under that number; False if its compiler's lock says it is in use."""
    lock = cache.folder / "locks" / f"{entry.key.rpartition('/')[2]}.lock"  # held while code of that key is compiled
    has_lock = cache.kind == "inductor" and lock.is_file()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_locked(lock) if has_lock else contextlib.nullcontext())
        except BlockingIOError:
            return False
        for number, path in enumerate(entry.paths):
            with contextlib.suppress(FileNotFoundError):  # its compiler removed it just now
                os.replace(path, trash / f"{place}-{number}")
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock on a file, which is not removed; raises BlockingIOError if another process holds it."""
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
    """Remove what a killed evictor left behind; no other evictor runs while the lock is held."""
    for name in os.listdir(folder):
        if name.startswith(TRASH):
            shutil.rmtree(folder / name, ignore_errors=True)


LOOK_S: Final = 5.0
_PAUSE_PER_LOOK: Final = 20.0
"""Looking at a large cache takes at most a twentieth of the time."""


class BackgroundEviction:
    """Keep caches below their limits in a `with` block; made by `evict_in_background`.

    Attributes:
        evictions: the evictions so far, each with its cache.
    """

    def __init__(
        self,
        caches: Sequence[tuple[CompileCache, int]],
        *,
        look_s: float = LOOK_S,
        recently_s: float = RECENTLY_S,
        tell: Callable[[CompileCache, Eviction], None] | None = None,
    ) -> None:
        for cache, _ in caches:
            refuse_other_folders(cache)
        self._caches = caches
        self._look_s, self._recently_s = look_s, recently_s
        self._tell = tell
        self._seen: dict[CompileCache, tuple[int, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.run, name="stepscope-cache-eviction", daemon=True)
        self.evictions: list[tuple[CompileCache, Eviction]] = []

    def __enter__(self) -> BackgroundEviction:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """Have `run` return at its next look."""
        self._stop.set()

    def run(self) -> None:
        """Look repeatedly, in the calling thread, until `stop` is called."""
        while not self._stop.is_set():
            begun = time.monotonic()
            self.look()
            spent = time.monotonic() - begun
            self._stop.wait(max(self._look_s, _PAUSE_PER_LOOK * spent))

    def look(self) -> None:
        """Evict from each cache that was written since the last look or was above its limit then."""
        for cache, limit in self._caches:
            entries = entries_of(cache)
            state = (sum(entry.bytes for entry in entries), max((entry.made_unix for entry in entries), default=0.0))
            if self._seen.get(cache) == state:
                continue
            with contextlib.suppress(
                EvictionBusy, OSError, ValueError
            ):  # another process evicts for all, or the next look tries again
                eviction = evict(cache, limit, recently_s=self._recently_s)
                if eviction.removed:
                    self.evictions.append((cache, eviction))
                    if self._tell is not None:
                        self._tell(cache, eviction)
                elif eviction.is_below:
                    self._seen[cache] = state


def evict_in_background(
    limit_bytes: int | None = None,
    caches: Sequence[CompileCache] | None = None,
    *,
    look_s: float = LOOK_S,
) -> BackgroundEviction:
    """Start a thread that keeps compile caches below a limit and evicts after each write; use it in a `with` block.

    Launches and compilations do not wait for it. Any number of processes may do this: one evicts at a time.

    Args:
        limit_bytes: for each cache; None for the cache's own limit.
        caches: None for those of this process's environment.
        look_s: seconds between two looks; a cache whose scan takes long is looked at less often.

    Raises:
        ValueError: a limit is not above 0, no cache has a limit, or a folder cannot be a compile cache.
    """
    if limit_bytes is not None and limit_bytes <= 0:
        raise ValueError(f"a cache's limit must be above 0 bytes, not {limit_bytes}")
    found = find_caches() if caches is None else caches
    limited = [(cache, limit) for cache in found if (limit := limit_bytes or cache.limit_bytes) is not None]
    if found and not limited:
        raise ValueError("no cache has a limit: say how many bytes each may hold")
    return BackgroundEviction(limited, look_s=look_s)
