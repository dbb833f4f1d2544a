"""Find compile caches and their entries, by the compilers' own environment variables and defaults."""

from __future__ import annotations

import getpass
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

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
        raise ValueError(f"{text!r} is no size above 0: write a number with MB, GB, MiB or GiB, such as 10GiB")
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
        kind: of which compiler; Triton's kernels below Inductor's folder are Triton's.
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
