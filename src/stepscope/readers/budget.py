"""Resource limits for reading a file: one budget for every reader, so that no file can exhaust the machine.

    budget = Budget.of(name)         when a file is opened; `current()` returns it anywhere below
    budget.spend("rows", 1000)       counts, and rejects the file above the limit
    budget.tick()                    rejects it after a minute without progress, or when memory runs short

Every rejection is a `TooLargeError` that names the option to raise the limit.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepscope.errors import TooLargeError, UsageError

VARIABLE: Final = "STEPSCOPE_LIMITS"
"""Environment variable with limits in the form of --limit, separated by commas."""
_LOOK_S: Final = 0.25
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_MEMORY_SHARE: Final = 0.8


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit: what it bounds, its default, and how to format an amount."""

    what: str
    default: Callable[[], float]
    shown: Callable[[float], str]


def _plain(amount: float) -> str:
    return f"{amount:,.0f}"


def _bytes(amount: float) -> str:
    return f"{amount / 2**30:,.3g} GiB"


def memory_limit() -> float:
    """Return the bytes this process may use: a share of the machine's or, if less, of the control group's memory."""
    found = [float(2**50)]
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not available on every system
        found.append(float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdecimal():
            found.append(float(text))
    return _MEMORY_SHARE * min(found)


LIMITS: Final[Mapping[str, Limit]] = {
    "bytes": Limit("bytes of content, unpacked", lambda: 256 * 2.0**30, _bytes),
    "ratio": Limit("times its packed size", lambda: 150, _plain),  # real traces shrink 10 to 40 times
    "rows": Limit("rows", lambda: 500e6, _plain),
    "values": Limit("lists, dictionaries and named values", lambda: 40e6, _plain),
    "strings": Limit("different texts", lambda: 50e6, _plain),
    "names": Limit("names in the tables of an XLA profile", lambda: 4e6, _plain),
    "lines": Limit(
        "lines of events in an XLA profile", lambda: 50_000, _plain
    ),  # one per thread and stream: usually a few hundred
    "depth": Limit("levels of nesting", lambda: 1000, _plain),
    "idle": Limit("seconds of reading in which nothing came of it", lambda: 60, _plain),
    "memory": Limit("of memory", memory_limit, _bytes),
}
"""Limits by the name that --limit accepts."""
RATIO_FROM_BYTES: Final = 2**28
"""Unpacked size in bytes below which the ratio is not checked."""


class Budget:
    """The remaining budget for one file; `limits` override the defaults by name."""

    def __init__(self, name: str, limits: Mapping[str, float] | None = None) -> None:
        chosen = limits or {}
        self._name = name
        self._limits = {key: chosen.get(key, limit.default()) for key, limit in LIMITS.items()}
        self._spent = dict.fromkeys(LIMITS, 0)
        self._has_moved = False
        self._progress_s = self._looked_s = time.monotonic()

    @classmethod
    def of(cls, name: str) -> Budget:
        """Create a budget with the environment's limits and make it the `current` one.

        Raises UsageError for unknown limits.
        """
        budget = cls(name, parse_limits(os.environ.get(VARIABLE, "")))
        _current.set(budget)
        return budget

    def spend(self, kind: str, amount: int) -> None:
        """Count `amount` more; raise TooLargeError above the limit. Everything except bytes counts as progress."""
        self._spent[kind] = spent = self._spent[kind] + amount
        if spent > self._limits[kind]:
            self._refuse(kind)
        if kind != "bytes" and amount:
            self._has_moved = True

    def require(self, kind: str, amount: float) -> None:
        """Raise TooLargeError if `amount` is above the limit."""
        if amount > self._limits[kind]:
            self._refuse(kind)

    def unpack(self, size: int, packed: int) -> None:
        """Count `size` unpacked bytes, given that `packed` bytes were read in total so far.

        Raises TooLargeError if the size or the compression ratio is too high.
        """
        self.spend("bytes", size)
        unpacked = self._spent["bytes"]
        if unpacked > RATIO_FROM_BYTES and unpacked > self._limits["ratio"] * packed:
            self._refuse("ratio")
        self.tick()

    def tick(self) -> None:
        """Check elapsed time and memory, at most every quarter of a second.

        Raises TooLargeError if there was no progress or memory is above the limit.
        """
        now = time.monotonic()
        if now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        if self._has_moved:
            self._has_moved, self._progress_s = False, now
        self.require("idle", now - self._progress_s)
        self.require("memory", _resident_bytes())

    def _refuse(self, kind: str) -> None:
        limit = LIMITS[kind]
        least = self._limits[kind]
        verb = "needs" if kind in ("memory", "idle") else "unpacks to" if kind == "ratio" else "has"
        raise TooLargeError(
            f"{self._name} {verb} more than {limit.shown(least)}"
            f"{'' if kind == 'memory' else f' {limit.what}'}{' of memory' if kind == 'memory' else ''}, "
            f"which no trace should; --limit {kind}={_written(2 * least)} allows twice as much"
        )


_current: ContextVar[Budget | None] = ContextVar("stepscope_budget", default=None)


def current() -> Budget:
    """Return the budget of the file being read, or a default one."""
    found = _current.get()
    if found is None:
        found = Budget("the file")
        _current.set(found)
    return found


def parse_limits(text: str) -> dict[str, float]:
    """Parse limits such as "rows=1G,memory=40GiB"; raise UsageError for anything else."""
    found = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"([a-z]+)=([0-9]{1,15}(?:\.[0-9]{1,6})?)([a-zA-Z]{0,3})", word, re.ASCII)
        if match is None or match[1] not in LIMITS or match[3].lower() not in _UNITS:
            raise UsageError(f"{word!r} is no limit: write NAME=NUMBER, such as rows=1G; names are {', '.join(LIMITS)}")
        found[match[1]] = float(match[2]) * _UNITS[match[3].lower()]
    return found


def _written(amount: float) -> str:
    unit = next((name for name in ("tib", "gib") if amount >= 2**30 and amount % _UNITS[name] == 0), "")
    return f"{amount / _UNITS[unit]:.0f}{unit[:1].upper() + 'iB' if unit else ''}"


def _resident_bytes() -> float:
    """Returns 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return float(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, IndexError, ValueError):
        return 0.0
