"""Energy that counters measured over stretches of steps, as a run's folder keeps it.

Imports only the standard library: the recording process makes these records too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from stepscope.files import readable

FORMAT: Final = 1
_METHODS: Final = ("counter", "power samples")
_MOST: Final = 10_000
_LONGEST_TEXT: Final = 300

Kind: TypeAlias = Literal["gpu", "cpu", "dram"]
KINDS: Final[tuple[Kind, ...]] = ("gpu", "cpu", "dram")


@dataclass(frozen=True, slots=True)
class Counter:
    """What measured: a device, a processor package or the memory beside one.

    Attributes:
        kind: "gpu", "cpu" (a package) or "dram".
        device: its number, of a GPU as the process sees it.
        method: "counter" (of energy) or "power samples", which were integrated.
        identity: the same for the same hardware whoever measures it; None where nothing tells.
        name: of the hardware.
    """

    kind: Kind
    device: str
    method: str
    identity: str | None = None
    name: str | None = None

    @property
    def key(self) -> str:
        """By which windows name it, such as "gpu 0"."""
        return f"{self.kind} {self.device}"


@dataclass(frozen=True, slots=True)
class MissingCounter:
    """What gave no number, and why; `device` None where that holds for all of the kind."""

    kind: Kind
    device: str | None
    reason: str


@dataclass(slots=True)
class EnergyWindow:
    """Steps that followed each other, between two readings of the counters.

    Attributes:
        first_step: number of the first one.
        steps: how many.
        ns: how long they took together, nanoseconds.
        joules: by the counters' keys.
    """

    first_step: int
    steps: int
    ns: int
    joules: dict[str, float]


@dataclass(slots=True)
class EnergyRecord:
    """What one process measured.

    Attributes:
        machine: the same for all processes of a machine.
    """

    machine: str | None = None
    counters: list[Counter] = field(default_factory=list)
    windows: list[EnergyWindow] = field(default_factory=list)
    missing: list[MissingCounter] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Steps in all windows."""
        return sum(window.steps for window in self.windows)

    @property
    def step_ns(self) -> float | None:
        """The mean step; None without windows."""
        return sum(window.ns for window in self.windows) / self.steps if self.steps else None

    def step_joules(self, key: str) -> float | None:
        """Joules per step of one counter over all windows; None where one has no number of it."""
        found = self.window_joules(key)
        if not found:
            return None
        return math.fsum(window.joules[key] for window in self.windows) / self.steps

    def window_joules(self, key: str) -> list[float]:
        """Joules per step of one counter in each window; empty where one of them has no number of it."""
        if not all(key in window.joules for window in self.windows):
            return []
        return [window.joules[key] / window.steps for window in self.windows]

    def to_json(self) -> dict[str, Any]:
        """For the run folder."""
        return {
            "format": FORMAT,
            "machine": self.machine,
            "counters": [
                {"kind": one.kind, "device": one.device, "method": one.method, "id": one.identity, "name": one.name}
                for one in self.counters
            ],
            "windows": [
                {"first_step": one.first_step, "steps": one.steps, "ns": one.ns, "joules": one.joules}
                for one in self.windows
            ],
            "missing": [{"kind": one.kind, "device": one.device, "reason": one.reason} for one in self.missing],
        }

    @classmethod
    def from_json(cls, content: object) -> EnergyRecord | None:
        """The reverse of `to_json`, for a file that anyone may have written; None where the content is something else.

        What in it is not as expected is left out.
        """
        if not isinstance(content, Mapping) or content.get("format") != FORMAT:
            return None
        counters = [counter for each in _rows(content.get("counters")) if (counter := _counter(each))]
        known = {counter.key for counter in counters}
        windows = [window for each in _rows(content.get("windows")) if (window := _window(each, known))]
        missing = [lack for each in _rows(content.get("missing")) if (lack := _missing(each))]
        return cls(_text(content.get("machine")), list(dict.fromkeys(counters)), windows, missing)


def _rows(value: object) -> list[Mapping[str, Any]]:
    return [each for each in value[:_MOST] if isinstance(each, Mapping)] if isinstance(value, list) else []


def _counter(row: Mapping[str, Any]) -> Counter | None:
    kind, device, method = row.get("kind"), _text(row.get("device")), row.get("method")
    if kind not in KINDS or device is None or method not in _METHODS:
        return None
    return Counter(kind, device, method, _text(row.get("id")), _text(row.get("name")))


def _window(row: Mapping[str, Any], known: set[str]) -> EnergyWindow | None:
    numbers = [row.get(name) for name in ("first_step", "steps", "ns")]
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        return None
    first, steps, ns = numbers
    given = row.get("joules")
    if not steps or not ns or not isinstance(given, Mapping):
        return None
    joules = {
        key: float(value)
        for key, value in given.items()
        if key in known and type(value) in (int, float) and math.isfinite(value) and 0 < value < 1e15
    }
    return EnergyWindow(int(first or 0), int(steps), int(ns), joules)


def _missing(row: Mapping[str, Any]) -> MissingCounter | None:
    kind, reason = row.get("kind"), _text(row.get("reason"))
    if kind not in KINDS or reason is None:
        return None
    return MissingCounter(kind, _text(row.get("device")), reason)


def _text(value: object) -> str | None:
    return value[:_LONGEST_TEXT] if isinstance(value, str) and value else None


KEY: Final = "energy"
"""Under which a process leaves its record in the word that it leaves of its recording."""


def record_beside(trace: str | Path) -> EnergyRecord | None:
    """What the process measured that recorded this trace of a run's folder; None where it measured nothing."""
    path = Path(trace)
    for content in _recordings(path.parent):
        if content.get("trace") == path.name:
            return EnergyRecord.from_json(content.get(KEY))
    return None


def records_of(recordings: Sequence[object]) -> list[tuple[int | None, EnergyRecord]]:
    """Of what a run's processes left, by rank: what they measured."""
    found = []
    for content in recordings:
        if isinstance(content, Mapping) and (record := EnergyRecord.from_json(content.get(KEY))) is not None:
            rank = content.get("rank")
            found.append((rank if type(rank) is int else None, record))
    return found


def step_energies(runs: Sequence[Sequence[object]]) -> dict[str, list[list[float]]]:
    """Of several runs of one program, by "gpu", "cpu" and "dram": joules a step of each window, of all ranks together.

    Args:
        runs: for each run what its processes left. Every device counts once. Of ranks that measured a different number
            of windows, those that all have count; a run without a number has no windows.
    """
    return {kind: [_windows(run, kind) for run in runs] for kind in KINDS}


def _windows(recordings: Sequence[object], kind: str) -> list[float]:
    columns: dict[str, list[float]] = {}
    for _, record in records_of(recordings):
        for counter in record.counters:
            identity = counter.identity or f"{record.machine} {counter.key}"
            if counter.kind == kind and identity not in columns:
                columns[identity] = record.window_joules(counter.key)
    return [sum(together) for together in zip(*columns.values(), strict=False)] if all(columns.values()) else []


def _recordings(folder: Path) -> Iterator[Mapping[str, Any]]:
    for file in sorted(folder.glob("recording-*.json")):
        yield readable(file)
