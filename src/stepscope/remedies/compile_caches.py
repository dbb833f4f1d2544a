"""Compilers' cache folders: how large they are, and how to keep them below a limit.

    from stepscope.remedies.compile_caches import find_caches, evict, evict_in_background

    evict(find_caches()[0], limit_bytes=10 * 2**30)
    with evict_in_background(10 * 2**30):      # beside the training: looks after each write
        train()

Knows the caches of torch.compile (Inductor), Triton, XLA (JAX and PyTorch/XLA) and the recipes of Intel Gaudi, and
needs none of them installed, nor torch. An evicted entry is compiled again when it is needed; nothing else is lost.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from stepscope.remedies.attempts import in_background

__all__ = [
    "BackgroundEviction",
    "CompileCache",
    "Entry",
    "Eviction",
    "EvictionBusy",
    "entries_of",
    "evict",
    "evict_in_background",
    "find_caches",
    "hit_counts",
]

CacheKind: TypeAlias = Literal["inductor", "triton", "xla", "hpu"]
KINDS: Final[tuple[CacheKind, ...]] = get_args(CacheKind)
LIMIT: Final = "STEPSCOPE_COMPILE_CACHE_LIMIT"
"""Environment variable with the size limit of each cache, in bytes, unless the compiler has a setting of its own."""
_UNITS: Final = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS_OF_1024: Final = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True, slots=True)
class CompileCache:
    """One compiler's cache.

    Attributes:
        folder: may not exist yet.
        said_by: the environment variable that names the folder, or "default".
        limit_bytes: size limit, from the compiler's own setting or STEPSCOPE_COMPILE_CACHE_LIMIT; None without one.
    """

    kind: CacheKind
    folder: Path
    said_by: str
    limit_bytes: int | None = None


def find_caches(environment: Mapping[str, str] | None = None) -> list[CompileCache]:
    """List every cache that the environment names, or that is in its compiler's default place.

    Sources: PyTorch's torch/_inductor/runtime/cache_dir_utils.py (TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR), Triton's
    knobs (TRITON_HOME), JAX's persistent compilation cache (JAX_COMPILATION_CACHE_DIR,
    JAX_COMPILATION_CACHE_MAX_SIZE), PyTorch/XLA (XLA_PERSISTENT_CACHE_PATH) and Intel Gaudi's
    PT_HPU_RECIPE_CACHE_CONFIG=FOLDER,DELETE_AT_START,MEGABYTES.

    Args:
        environment: None for this process's variables.
    """
    variables = os.environ if environment is None else environment
    general = bytes_of(variables.get(LIMIT, "")) or None
    found: dict[Path, CompileCache] = {}
    for cache in _named(variables):
        limited = cache if cache.limit_bytes is not None else replace(cache, limit_bytes=general)
        found.setdefault(cache.folder.absolute(), limited)
    return [cache for cache in found.values() if cache.said_by != "default" or cache.folder.is_dir()]


def bytes_of(text: str) -> int | None:
    """Bytes from "10GiB", "500 MB", "4096" or "0"; None if the text is not a size."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([a-z]*)\s*", text.lower(), re.ASCII)
    unit = (_UNITS | _UNITS_OF_1024).get(match[2]) if match else None
    return int(float(match[1]) * unit) if match and unit else None


def size_in_bytes(text: str) -> int:
    """Bytes from "10GiB", "500 MB" or "4096". Raises ValueError if the text is not a size, or the size is 0."""
    found = bytes_of(text)
    if not found:
        raise ValueError(f"{text!r} is not a size above 0: write a number with MB, GB, MiB or GiB, such as 10GiB")
    return found


def _named(variables: Mapping[str, str]) -> Iterator[CompileCache]:
    defaults: tuple[tuple[CacheKind, str, Path], ...] = (
        ("inductor", "TORCHINDUCTOR_CACHE_DIR", Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"),
        ("triton", "TRITON_CACHE_DIR", Path(variables.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"),
    )
    for kind, variable, default in defaults:
        named = variables.get(variable)
        yield CompileCache(kind, Path(named or default), variable if named else "default")
    jax = variables.get("JAX_COMPILATION_CACHE_DIR")
    if jax and "://" not in jax:
        most = bytes_of(variables.get("JAX_COMPILATION_CACHE_MAX_SIZE", "")) or None
        yield CompileCache("xla", Path(jax), "JAX_COMPILATION_CACHE_DIR", most)
    torch_xla = variables.get("XLA_PERSISTENT_CACHE_PATH")
    if torch_xla:
        yield CompileCache("xla", Path(torch_xla), "XLA_PERSISTENT_CACHE_PATH")
    folder, _, rest = variables.get("PT_HPU_RECIPE_CACHE_CONFIG", "").partition(",")
    if folder:
        megabytes = rest.rpartition(",")[2].strip()
        most = int(megabytes) * 2**20 if re.fullmatch(r"[1-9][0-9]{0,9}", megabytes) else None
        yield CompileCache("hpu", Path(folder), "PT_HPU_RECIPE_CACHE_CONFIG", most)


def _user() -> str:
    """The user's name as PyTorch writes it in its folder's name."""
    try:
        name = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        name = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return re.sub(r'[\\/:*?"<>|]', "_", name)


TRASH: Final = ".stepscope-evicted-"
"""Prefix of the folders into which entries are moved before they are removed."""
LOCK: Final = "eviction.lock"
"""Held by the only process that evicts; Intel Gaudi's own eviction locks a file of this name."""
_DEEPEST: Final = 12
_INDUCTOR_FOLDERS: Final = ("fxgraph", "aotautograd")
_HEADERS: Final = "precompiled_headers"
_JAX_SUFFIXES: Final = ("-cache", "-atime")


@dataclass(frozen=True, slots=True)
class Entry:
    """One cached compilation.

    Attributes:
        kind: its compiler; Triton's kernels below Inductor's folder are Triton's.
        key: its name, unique in the cache.
        paths: the files and folders that make it up.
        bytes: total size of its files.
        made_unix: when the latest of its files was written, seconds.
        used_unix: when one of them was last written or read, seconds. On a file system that does not record reads
            (noatime) this is the time of writing; with relatime it is up to a day late.
    """

    kind: CacheKind
    key: str
    paths: tuple[Path, ...]
    bytes: int
    made_unix: float
    used_unix: float

    @property
    def was_read_again(self) -> bool:
        """Whether it was read some time after it was written, so that it saved at least one compilation."""
        return self.used_unix > self.made_unix + 1.0


@dataclass(slots=True)
class _Growing:
    """An entry while its files are being collected."""

    kind: CacheKind
    paths: list[Path] = field(default_factory=list)
    bytes: int = 0
    made_unix: float = 0.0
    used_unix: float = 0.0

    def add(self, path: Path) -> None:
        for status in _statuses(path, _DEEPEST):
            self.bytes += status.st_size
            self.made_unix = max(self.made_unix, status.st_mtime)
            self.used_unix = max(self.used_unix, status.st_mtime, status.st_atime)
        self.paths.append(path)


def entries_of(cache: CompileCache) -> list[Entry]:
    """List the cache's entries, least recently used first; empty if the folder does not exist.

    Files that vanish meanwhile, because another process evicts, are skipped. Links are not followed.
    """
    found: dict[str, _Growing] = {}
    for kind, key, path in _PARTS[cache.kind](cache.folder):
        found.setdefault(key, _Growing(kind)).add(path)
    entries = [
        Entry(each.kind, key, tuple(each.paths), each.bytes, each.made_unix, each.used_unix)
        for key, each in found.items()
        if each.made_unix
    ]
    return sorted(entries, key=lambda entry: (entry.used_unix, entry.key))


def _inductor(folder: Path) -> Iterator[tuple[CacheKind, str, Path]]:
    """Yield graphs by folder, code by the name that its files share, and Triton's kernels by folder."""
    for top in _children(folder):
        if not top.is_dir(follow_symlinks=False):
            continue
        if top.name == "triton":
            for device in _children(Path(top.path)):
                yield from _folders("triton", Path(device.path), f"triton/{device.name}/")
        elif top.name in _INDUCTOR_FOLDERS:
            yield from _graphs(Path(top.path))
        elif len(top.name) == 2 or top.name == _HEADERS:
            for file in _children(Path(top.path)):
                if file.is_file(follow_symlinks=False):
                    yield "inductor", f"{top.name}/{file.name.partition('.')[0]}", Path(file.path)


def _graphs(folder: Path) -> Iterator[tuple[CacheKind, str, Path]]:
    """Yield the folders `fxgraph/ab/KEY/` and `aotautograd/KEY/`."""
    for child in _children(folder):
        if not child.is_dir(follow_symlinks=False):
            continue
        if len(child.name) <= 3:
            yield from _folders("inductor", Path(child.path), f"{folder.name}/{child.name}/")
        else:
            yield "inductor", f"{folder.name}/{child.name}", Path(child.path)


def _folders(kind: CacheKind, folder: Path, before: str = "") -> Iterator[tuple[CacheKind, str, Path]]:
    for child in _children(folder):
        if child.is_dir(follow_symlinks=False):
            yield kind, before + child.name, Path(child.path)


def _xla(folder: Path) -> Iterator[tuple[CacheKind, str, Path]]:
    """Pair JAX's KEY-cache with its KEY-atime; PyTorch/XLA keeps one file per executable."""
    for child in _children(folder):
        key = next((child.name[: -len(end)] for end in _JAX_SUFFIXES if child.name.endswith(end)), child.name)
        if child.is_file(follow_symlinks=False) and not child.name.startswith("."):
            yield "xla", key, Path(child.path)


def _hpu(folder: Path) -> Iterator[tuple[CacheKind, str, Path]]:
    """A recipe's files share the name up to the first dot."""
    for child in _children(folder):
        if not child.name.startswith("."):
            yield "hpu", child.name.partition(".")[0], Path(child.path)


_PARTS: Final[Mapping[CacheKind, Callable[[Path], Iterator[tuple[CacheKind, str, Path]]]]] = {
    "inductor": _inductor,
    "triton": partial(_folders, "triton"),
    "xla": _xla,
    "hpu": _hpu,
}
"""Kind -> function that yields the parts of its entries: (compiler, key of the entry, path)."""


def _children(folder: Path) -> list[os.DirEntry[str]]:
    """List a folder without locks and without what is being removed; empty if it cannot be read."""
    try:
        with os.scandir(folder) as found:
            return [each for each in found if each.name != LOCK and not each.name.startswith(TRASH)]
    except OSError:
        return []


def _statuses(path: Path, deepest: int) -> Iterator[os.stat_result]:
    try:
        status = os.lstat(path)
    except OSError:
        return
    if not os.path.isdir(path) or os.path.islink(path):
        yield status
    elif deepest:
        for child in _children(path):
            yield from _statuses(Path(child.path), deepest - 1)


_COUNTERS: Final = (("inductor", "fxgraph_cache"), ("aot_autograd", "autograd_cache"))


def hit_counts() -> dict[str, tuple[int, int]]:
    """Hits and misses so far, by cache: "fxgraph_cache" (Inductor's graphs), "autograd_cache" (forward and backward).

    Empty if torch.compile was not used. On a hit in "autograd_cache", "fxgraph_cache" is not queried. Imports nothing.
    """
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    if not isinstance(counters, Mapping):
        return {}
    found = {}
    for group, name in _COUNTERS:
        counts = counters.get(group) or {}
        hits, misses = int(counts.get(f"{name}_hit", 0)), int(counts.get(f"{name}_miss", 0))
        if hits or misses:
            found[name] = (hits, misses)
    return found


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
            raise EvictionBusy(f"another process is evicting from {cache.folder}") from error
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
        raise ValueError(f"{cache.folder} is not a compile cache but a working folder: nothing is removed there")
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for each in found:
            if each.name in _OF_PEOPLE or each.name.endswith(_WRITTEN_BY_PEOPLE):
                raise ValueError(
                    f"{cache.folder} contains {each.name}: it is not a compile cache, and nothing is removed there"
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
    """Hold the exclusive lock on a file, which stays; raises BlockingIOError if another process holds it."""
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
        self._thread = threading.Thread(target=self._run_alone, name="stepscope-cache-eviction", daemon=True)
        self.evictions: list[tuple[CompileCache, Eviction]] = []

    def __enter__(self) -> BackgroundEviction:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """Make `run` return at its next look."""
        self._stop.set()

    def run(self) -> None:
        """Look repeatedly, in the calling thread, until `stop` is called."""
        while not self._stop.is_set():
            started = time.monotonic()
            self.look()
            spent = time.monotonic() - started
            self._stop.wait(max(self._look_s, _PAUSE_PER_LOOK * spent))

    @in_background
    def _run_alone(self) -> None:
        self.run()

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
    limit_bytes: int | None = None, caches: Sequence[CompileCache] | None = None, *, look_s: float = LOOK_S
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
