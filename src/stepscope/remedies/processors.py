"""How many processors this process may use: by its affinity and by its control groups' limits. Needs no torch."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

_LONGEST: Final = 64 * 1024
"""Bytes read of a file of the kernel."""


def allowed_processors() -> set[int]:
    """The numbers of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def usable_processors(root: Path = Path("/")) -> int:
    """Processors (hardware threads) that this process may keep busy: its affinity, or its quota if that is less; >= 1.

    Args:
        root: where /proc and /sys are.
    """
    return _within_quota(len(allowed_processors()), root)


def usable_cores(root: Path = Path("/")) -> int:
    """The same in cores: processors that share one count once, where the system tells which do; at least 1."""
    siblings = set()
    for processor in allowed_processors():
        shared = _text(root / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
        siblings.add(shared or str(processor))
    return _within_quota(len(siblings), root)


def quota(root: Path = Path("/")) -> float | None:
    """Processors' worth of time that the control groups allow, such as 1.5; None where nothing limits it.

    Reads `cpu.max` (version 2) or `cpu.cfs_quota_us` (version 1) of the process's group and of all around it.
    """
    limits = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mounts = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            mounts = [f"sys/fs/cgroup/{controllers}", "sys/fs/cgroup/cpu"]
        else:
            continue
        # Inside a container the group's own path may lie above what is mounted: its root is asked, too.
        group = Path(path.lstrip("/"))
        for mount in mounts:
            limits += [_limit(root / mount / each) for each in (group, *group.parents)]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(group: Path) -> float | None:
    """One group's limit in processors."""
    words = (_text(group / "cpu.max") or "").split()
    if not words:
        words = [_text(group / "cpu.cfs_quota_us") or "", _text(group / "cpu.cfs_period_us") or ""]
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
        return None  # "max", or -1: no limit
    return int(words[0]) / int(words[1])


def _within_quota(count: int, root: Path) -> int:
    limit = quota(root)
    return max(count if limit is None else min(count, math.ceil(limit)), 1)


def _text(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_LONGEST).decode("ascii", "replace").strip()
    except OSError:
        return None
