"""The energy that a run's processes measured, read back from its folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stepscope.cost.energy_measured import KINDS, EnergyRecord
from stepscope.kept_json import readable

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
