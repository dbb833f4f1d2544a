"""Energy that counters measured over stretches of steps, as a run's folder keeps it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from stepscope.files import readable

FORMAT: Final = 1
_MOST: Final = 10_000

Kind: TypeAlias = Literal["gpu", "cpu", "dram"]
KINDS: Final[tuple[Kind, ...]] = ("gpu", "cpu", "dram")
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
_Whole = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Positive = Annotated[int, msgspec.Meta(gt=0, lt=2**62)]
_Row = TypeVar("_Row")


class Counter(msgspec.Struct, frozen=True):
    """What measured: a device, a processor package ("cpu") or the memory beside one ("dram").

    Attributes:
        device: its number, of a GPU as the process sees it.
        method: "counter" (of energy) or "power samples", which were integrated.
        identity: the same for the same hardware whoever measures it; None if unknown.
    """

    kind: Kind
    device: _Text
    method: Literal["counter", "power samples"]
    identity: _Text | None = msgspec.field(default=None, name="id")
    name: _Text | None = None

    @property
    def key(self) -> str:
        """By which windows name it, such as "gpu 0"."""
        return f"{self.kind} {self.device}"


@dataclass(frozen=True, slots=True)
class MissingCounter:
    """What gave no number, and why; `device` None where that holds for all of the kind."""

    kind: Kind
    device: _Text | None
    reason: _Text


class EnergyWindow(msgspec.Struct):
    """Consecutive steps between two readings of the counters, in nanoseconds; joules by the counters' keys."""

    first_step: _Whole
    steps: _Positive
    ns: _Positive
    joules: dict[str, float]


class EnergyRecord(msgspec.Struct):
    """What one process measured; `machine` is the same for all processes of a machine."""

    machine: str | None = None
    counters: list[Counter] = []
    windows: list[EnergyWindow] = []
    missing: list[MissingCounter] = []

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
        if not self.window_joules(key):
            return None
        return math.fsum(window.joules[key] for window in self.windows) / self.steps

    def window_joules(self, key: str) -> list[float]:
        """Joules per step of one counter in each window; empty where one of them has no number of it."""
        if not all(key in window.joules for window in self.windows):
            return []
        return [window.joules[key] / window.steps for window in self.windows]

    def to_json(self) -> dict[str, Any]:
        """For the run folder."""
        return {"format": FORMAT, **msgspec.to_builtins(self)}

    @classmethod
    def from_json(cls, content: object) -> EnergyRecord | None:
        """The reverse of `to_json`; None where the content is something else, and without rows that are malformed."""
        if not isinstance(content, Mapping) or content.get("format") != FORMAT:
            return None
        counters = list(dict.fromkeys(_rows(content.get("counters"), Counter)))
        known = {counter.key for counter in counters}
        windows = [
            {**row, "joules": _possible(row["joules"], known)}
            for row in _rows(content.get("windows"), dict)
            if isinstance(row.get("joules"), Mapping)
        ]
        machine = next(iter(_rows([content.get("machine")], str)), None)
        missing = _rows(content.get("missing"), MissingCounter)
        return cls(machine, counters, _rows(windows, EnergyWindow), missing)


def _rows(value: object, kind: type[_Row]) -> list[_Row]:
    """The rows of a list that are of a type."""
    found: list[_Row] = []
    for row in value[:_MOST] if isinstance(value, list) else ():
        with contextlib.suppress(msgspec.ValidationError):
            found.append(msgspec.convert(row, kind))
    return found


def _possible(joules: Mapping[str, Any], known: set[str]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in joules.items()
        if key in known and type(value) in (int, float) and 0 < value < 1e15
    }


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
    """Joules per step of each window by "gpu", "cpu" and "dram", of all ranks together, for several runs of a program.

    Every device counts once. Of ranks with different numbers of windows, those that all have count; a run without a
    number has no windows.
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
