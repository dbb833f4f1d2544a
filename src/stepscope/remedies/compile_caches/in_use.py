"""Which files of a folder some process has open or has loaded, as Linux tells in /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_PROCESSES: Final = Path("/proc")
_MOST_OF_A_MAP: Final = 64 * 2**20


def open_files(folder: Path) -> set[str]:
    """Real paths below the folder that a process has open or mapped, as far as this user may see.

    Empty where there is no /proc, as on macOS: there only what was used recently counts as in use.
    """
    root = os.path.realpath(folder)
    found: set[str] = set()
    try:
        processes = [name for name in os.listdir(_PROCESSES) if name.isdigit()]
    except OSError:
        return found
    for process in processes:
        found |= _opened(_PROCESSES / process / "fd", root)
        found |= _mapped(_PROCESSES / process / "maps", root)
    return found


def _opened(descriptors: Path, root: str) -> set[str]:
    found = set()
    try:
        for descriptor in os.listdir(descriptors):
            try:
                target = os.readlink(descriptors / descriptor)
            except OSError:
                continue
            if _is_below(target, root):
                found.add(target)
    except OSError:
        pass
    return found


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
