"""Folders that JAX, PyTorch/XLA and TensorBoard write profiles into: LOGDIR/plugins/profile/RUN/HOST.xplane.pb."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

SUFFIXES: Final = (".xplane.pb", ".xplane.pb.gz", ".xplane.pb.zst")
_NUMBERS: Final = re.compile(r"(\d+)")


def profile_files(folder: Path) -> list[Path]:
    """The profiles of a run, one a host: of the folder itself, or of the latest run below it; empty for none.

    Args:
        folder: of one run, the folder of all runs, or the directory that was given to the profiler.
    """
    own = _hosts(folder)
    if own:
        return own
    for below in (folder / "plugins" / "profile", folder):
        runs = sorted((child for child in _children(below) if child.is_dir()), key=lambda child: child.name)
        for run in reversed(runs):
            found = _hosts(run)
            if found:
                return found
    return []


def place_among_hosts(path: Path) -> tuple[int, int] | None:
    """Which of a run's hosts a profile is of, from 0 on, and how many there are; None where it is alone."""
    if not path.name.endswith(SUFFIXES):
        return None
    hosts = [each.name for each in _hosts(path.parent)]
    return (hosts.index(path.name), len(hosts)) if len(hosts) > 1 and path.name in hosts else None


def _hosts(folder: Path) -> list[Path]:
    """The profiles in a folder, hosts 2 before hosts 10."""
    found = [child for child in _children(folder) if child.name.endswith(SUFFIXES) and child.is_file()]
    return sorted(found, key=_by_number)


def _by_number(path: Path) -> list[tuple[int, int, str]]:
    parts = _NUMBERS.split(path.name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
