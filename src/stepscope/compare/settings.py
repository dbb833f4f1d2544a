"""Settings and energies of two sides, and their differences."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec
import polars as pl

from stepscope.compare.statistics import compare_samples
from stepscope.trace import Metadata
from stepscope.trace.program_facts import ProgramFacts

SETTING_SCHEMA: Final[Mapping[str, type[pl.DataType]]] = {
    "name": pl.String,
    "before": pl.String,  # null where the setting is unknown or absent
    "after": pl.String,
}
_PROCESS: Final = ("processors", "usable_processors", "numa_nodes", "threads", "allocator")
"""Process figures that are settings; the others are measured and differ every time."""
_LOADER: Final = ("workers", "batch_size", "pin_memory", "persistent_workers", "prefetch_factor", "start_method")
_LONGEST: Final = 500


def settings_of_trace(metadata: Metadata) -> dict[str, str]:
    """Program settings that a trace knows, by name."""
    found: dict[str, Any] = {
        "trace.format": metadata.format or None,
        "trace.recorded": None if metadata.recorded is None else ", ".join(metadata.recorded),
        "ranks": metadata.world_size,
        "backend": metadata.backend,
        "device": ", ".join(dict.fromkeys(device.name for device in metadata.devices if device.name)) or None,
    }
    if metadata.program is not None:
        found.update(_of_program(metadata.program))
    return {name: _text(value) for name, value in found.items() if value is not None}


def _of_program(program: ProgramFacts) -> Iterator[tuple[str, Any]]:
    yield from ((f"torch.{name}", value) for name, value in program.torch.items())
    yield from ((f"process.{name}", program.process.get(name)) for name in _PROCESS)
    yield from ((f"variable {name}", value) for name, value in program.environment.items())
    groups: tuple[tuple[str, Iterable[msgspec.Struct], Collection[str] | None], ...] = (
        ("loader", program.loaders, _LOADER),
        ("optimizer", program.optimizers, None),
        ("data parallel", program.data_parallel, None),
        ("model", () if program.model is None else (program.model,), None),
    )
    for word, structs, names in groups:
        for number, struct in enumerate(structs):
            numbered = word if number == 0 else f"{word} {number + 1}"
            for name in struct.__struct_fields__ if names is None else names:
                yield f"{numbered}.{name}", getattr(struct, name)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def merged_settings(settings: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Settings of several traces of one side; where they differ, all values are listed."""
    values: dict[str, dict[str, None]] = {}
    for each in settings:
        for name, value in each.items():
            values.setdefault(name, {})[value] = None
    return {name: " | ".join(different) for name, different in values.items()}


def different_settings(before: Mapping[str, str], after: Mapping[str, str]) -> pl.DataFrame:
    """Settings that differ; columns as in SETTING_SCHEMA, sorted by name."""
    rows = [
        (name, before.get(name), after.get(name))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]
    return pl.DataFrame(rows, schema=dict(SETTING_SCHEMA), orient="row")


StepEnergies: TypeAlias = Mapping[str, Sequence[Sequence[float]]]
"""Consumer ("gpu", "cpu" or "dram") -> for each run, joules per step in each measured window."""


@dataclass(frozen=True, slots=True)
class EnergyComparison:
    """Energy of steps before and after."""

    kind: str  # "gpu", "cpu" or "dram"
    before_j: float
    after_j: float  # before_j, after_j: mean joules per step
    change: float  # after_j / before_j - 1
    change_low: float | None
    change_high: float | None  # change_low, change_high: interval; None where chance cannot be estimated
    confidence: float
    before_windows: int
    after_windows: int  # before_windows, after_windows: number of measured windows


def compared_energies(
    before: StepEnergies, after: StepEnergies, confidence: float = 0.95
) -> tuple[EnergyComparison, ...]:
    """Compare energies measured on both sides; consecutive windows get the same statistics as steps."""
    found = []
    for kind in ("gpu", "cpu", "dram"):
        sides = [[run for run in side.get(kind, ()) if run] for side in (before, after)]
        it = compare_samples(*sides, confidence=confidence) if all(sides) else None
        if it is not None and it.before_ns is not None and it.after_ns is not None and it.change is not None:
            means, interval = (it.before_ns, it.after_ns, it.change), (it.change_low, it.change_high)
            windows = (it.before_steps, it.after_steps)
            found.append(EnergyComparison(kind, *means, *interval, confidence, *windows))
    return tuple(found)
