"""The settings of two programs: what traces tell of them, and where they differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
import polars as pl

from stepscope.program_facts import ProgramFacts
from stepscope.trace import Metadata

SETTING_SCHEMA: Final[Mapping[str, type[pl.DataType]]] = {
    "name": pl.String,
    "before": pl.String,  # null where the setting is not known, or is not there
    "after": pl.String,
}
_PROCESS: Final = ("processors", "usable_processors", "numa_nodes", "threads", "allocator")
"""Of the process's figures those that are settings; others are measured and differ every time."""
_LOADER: Final = ("workers", "batch_size", "pin_memory", "persistent_workers", "prefetch_factor", "start_method")
_LONGEST: Final = 500


def settings_of_trace(metadata: Metadata) -> dict[str, str]:
    """What a trace tells of the program's settings, by name; only what is known."""
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
    for number, loader in enumerate(program.loaders):
        name = _numbered("loader", number)
        yield from ((f"{name}.{field}", getattr(loader, field)) for field in _LOADER)
    groups: tuple[tuple[str, Iterable[msgspec.Struct]], ...] = (
        ("optimizer", program.optimizers),
        ("data parallel", program.data_parallel),
        ("model", () if program.model is None else (program.model,)),
    )
    for word, structs in groups:
        for number, struct in enumerate(structs):
            fields = msgspec.structs.asdict(struct)
            yield from ((f"{_numbered(word, number)}.{field}", value) for field, value in fields.items())


def _numbered(word: str, number: int) -> str:
    return word if number == 0 else f"{word} {number + 1}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def merged_settings(settings: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Those of several traces of one side: where they differ, every value."""
    values: dict[str, dict[str, None]] = {}
    for each in settings:
        for name, value in each.items():
            values.setdefault(name, {})[value] = None
    return {name: " | ".join(different) for name, different in values.items()}


def different_settings(before: Mapping[str, str], after: Mapping[str, str]) -> pl.DataFrame:
    """The settings that differ; columns as in SETTING_SCHEMA, in order of their names."""
    rows = [
        (name, before.get(name), after.get(name))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]
    return pl.DataFrame(rows, schema=dict(SETTING_SCHEMA), orient="row")
