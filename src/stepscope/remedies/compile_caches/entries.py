"""What a compile cache holds: its entries, each a thing that is of use only as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stepscope.remedies.compile_caches.places import CacheKind, CompileCache

TRASH: Final = ".stepscope-evicted-"
"""How a folder's name begins into which entries are moved before they are removed."""
LOCK: Final = "eviction.lock"
"""Held by the only process that evicts; Intel Gaudi's own eviction holds a file of this name."""
_DEEPEST: Final = 12
_INDUCTOR_FOLDERS: Final = ("fxgraph", "aotautograd")
_HEADERS: Final = "precompiled_headers"
_JAX_SUFFIXES: Final = ("-cache", "-atime")


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that a compiler made.

    Attributes:
        kind: of which compiler; Triton's kernels below Inductor's folder are Triton's.
        key: its name, unique in the cache.
        paths: the files and folders that make it up.
        bytes: of all files.
        made_unix: when the latest of them was written, seconds.
        used_unix: when one of them was last written or read, as the file system tells; seconds. A file system that
            notes no reading (noatime) tells when it was made; one with relatime is up to a day late.
    """

    kind: CacheKind
    key: str
    paths: tuple[Path, ...]
    bytes: int
    made_unix: float
    used_unix: float

    @property
    def was_read_again(self) -> bool:
        """Whether it was read some time after it was made, so that at least one compilation was spared."""
        return self.used_unix > self.made_unix + 1.0


@dataclass(slots=True)
class _Growing:
    """An entry while its files are found."""

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
    """What the cache holds, the one that was used longest ago first; empty where it is not there.

    What vanishes meanwhile, because another process evicts, is passed over. Links are not followed.
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
    """Graphs by folder, code by the name that its files share, Triton's kernels by folder."""
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
    """`fxgraph/ab/KEY/` and `aotautograd/KEY/`."""
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


def _triton(folder: Path) -> Iterator[tuple[CacheKind, str, Path]]:
    return _folders("triton", folder)


def _xla(folder: Path) -> Iterator[tuple[CacheKind, str, Path]]:
    """JAX's KEY-cache and KEY-atime belong together; PyTorch/XLA keeps one file an executable."""
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
    "triton": _triton,
    "xla": _xla,
    "hpu": _hpu,
}
"""Kind -> what finds the parts of its entries: of whom, of which entry, and where."""


def _children(folder: Path) -> list[os.DirEntry[str]]:
    """What lies in a folder, without locks and what is being removed; nothing where it is none."""
    try:
        with os.scandir(folder) as found:
            return [each for each in found if each.name != LOCK and not each.name.startswith(TRASH)]
    except OSError:
        return []


def _statuses(path: Path, deepest: int) -> Iterator[os.stat_result]:
    """Of the file, or of all files below the folder."""
    try:
        status = os.lstat(path)
    except OSError:
        return
    if not os.path.isdir(path) or os.path.islink(path):
        yield status
    elif deepest:
        for child in _children(path):
            yield from _statuses(Path(child.path), deepest - 1)
