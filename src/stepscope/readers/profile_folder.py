"""Folders that JAX, PyTorch/XLA and TensorBoard write profiles into: LOGDIR/plugins/profile/RUN/HOST.xplane.pb."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

SUFFIXES: Final = (".xplane.pb", ".xplane.pb.gz", ".xplane.pb.zst")
_RUNS: Final = ("plugins", "profile")
_TWIN: Final = ".trace.json.gz"
_NUMBERS: Final = re.compile(r"(\d+)")


def profile_files(folder: Path) -> list[Path]:
    """The profiles of the latest run below a folder, one a host, or of the run whose folder it is; empty for none.

    Args:
        folder: the directory that was given to the profiler, its folder of all runs, or a run's.
    """
    place = Path(os.path.abspath(folder))
    if place.parts[-3:-1] == _RUNS:
        return _hosts(folder)
    runs = folder if place.parts[-2:] == _RUNS else folder.joinpath(*_RUNS)
    names = sorted(child.name for child in _children(runs) if child.is_dir())
    return next((found for name in reversed(names) if (found := _hosts(runs / name))), [])


def place_among_hosts(path: Path) -> tuple[int, int] | None:
    """Which of a run's hosts a profile is of, from 0 on, and how many there are; None where it is alone.

    Only in a folder of the profiler's own: elsewhere profiles that lie side by side need not be of one run.
    """
    run = Path(os.path.abspath(path)).parent
    if not path.name.endswith(SUFFIXES) or run.parts[-3:-1] != _RUNS:
        return None
    hosts = [each.name for each in _hosts(run)]
    return (hosts.index(path.name), len(hosts)) if len(hosts) > 1 and path.name in hosts else None


def without_twins(files: list[Path]) -> list[Path]:
    """The files without what XLA writes of a profile a second time: HOST.trace.json.gz beside HOST.xplane.pb."""
    stems = {str(file)[: -len(suffix)] for file in files for suffix in SUFFIXES if file.name.endswith(suffix)}
    return [file for file in files if not any(str(file) == stem + _TWIN for stem in stems)]


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
