"""Energy measured by counters over windows of steps, as stored in a run's folder."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from stepscope.files import converted, readable

FORMAT: Final = 1
_MOST: Final = 10_000

Kind: TypeAlias = Literal["gpu", "cpu", "dram"]
KINDS: Final[tuple[Kind, ...]] = ("gpu", "cpu", "dram")
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
_Whole = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Positive = Annotated[int, msgspec.Meta(gt=0, lt=2**62)]
_Row = TypeVar("_Row")


class Counter(msgspec.Struct, frozen=True):
    """What was measured: a GPU, a processor package ("cpu") or its memory ("dram").

    Attributes:
        device: its number; for a GPU, as the process sees it.
        method: an energy "counter", or "power samples" that were integrated.
        identity: equal for the same hardware in every process; None if unknown.
    """

    kind: Kind
    device: _Text
    method: Literal["counter", "power samples"]
    identity: _Text | None = msgspec.field(default=None, name="id")
    name: _Text | None = None

    @property
    def key(self) -> str:
        """The counter's key in the windows, such as "gpu 0"."""
        return f"{self.kind} {self.device}"


@dataclass(frozen=True, slots=True)
class MissingCounter:
    """A counter without a reading, and the reason; `device` is None if it applies to the whole kind."""

    kind: Kind
    device: _Text | None
    reason: _Text


class EnergyWindow(msgspec.Struct):
    """Consecutive steps between two readings of the counters; joules by the counters' keys."""

    first_step: _Whole
    steps: _Positive
    ns: _Positive
    joules: dict[str, float]


class EnergyRecord(msgspec.Struct):
    """The measurements of one process; `machine` is equal for all processes on one machine."""

    machine: str | None = None
    counters: list[Counter] = []
    windows: list[EnergyWindow] = []
    missing: list[MissingCounter] = []

    @property
    def steps(self) -> int:
        return sum(window.steps for window in self.windows)

    @property
    def step_ns(self) -> float | None:
        """Mean duration of a step; None without windows."""
        return sum(window.ns for window in self.windows) / self.steps if self.steps else None

    def step_joules(self, key: str) -> float | None:
        """Return joules per step of one counter over all windows; None if a window lacks it."""
        if not self.window_joules(key):
            return None
        return math.fsum(window.joules[key] for window in self.windows) / self.steps

    def window_joules(self, key: str) -> list[float]:
        """Return joules per step of one counter in each window; empty if a window lacks it."""
        if not all(key in window.joules for window in self.windows):
            return []
        return [window.joules[key] / window.steps for window in self.windows]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **msgspec.to_builtins(self)}

    @classmethod
    def from_json(cls, content: object) -> EnergyRecord | None:
        """Parse the output of `to_json`, skipping malformed rows; None if it has another format."""
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
    found: list[_Row] = []
    for row in value[:_MOST] if isinstance(value, list) else ():
        with contextlib.suppress(msgspec.ValidationError):
            found.append(converted(row, kind))
    return found


def _possible(joules: Mapping[str, Any], known: set[str]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in joules.items()
        if key in known and type(value) in (int, float) and 0 < value < 1e15
    }


KEY: Final = "energy"
"""Key of the record in a process's recording-*.json file."""


def record_beside(trace: str | Path) -> EnergyRecord | None:
    """Return the energy record of the process that recorded this trace of a run folder; None if it has none."""
    path = Path(trace)
    for content in _recordings(path.parent):
        if content.get("trace") == path.name:
            return EnergyRecord.from_json(content.get(KEY))
    return None


def records_of(recordings: Sequence[object]) -> list[tuple[int | None, EnergyRecord]]:
    """Return the (rank, record) pairs in the recording files of a run's processes."""
    found = []
    for content in recordings:
        if isinstance(content, Mapping) and (record := EnergyRecord.from_json(content.get(KEY))) is not None:
            rank = content.get("rank")
            found.append((rank if type(rank) is int else None, record))
    return found


def step_energies(runs: Sequence[Sequence[object]]) -> dict[str, list[list[float]]]:
    """Return joules per step of each window by "gpu", "cpu" and "dram", for several runs of a program.

    Energy is summed over all ranks, and every device counts once. If ranks have different numbers of windows, only
    windows that all ranks have count. If a counter has no number in a run, the run has no windows.
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
