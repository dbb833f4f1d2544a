"""What the processes of a measured program left of their steps, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepscope.capture.bench_steps import PREFIX
from stepscope.capture.run_folder import RunFolder
from stepscope.kept_json import readable, say_changed


@dataclass(frozen=True, slots=True)
class Record:
    """Of one process; see `stepscope.capture.bench_steps`."""

    rank: int
    world_size: int
    machine: str
    source: str
    clock: str
    complete: bool
    ends_ns: tuple[int, ...]
    own_profiler: bool
    said: tuple[str, ...]
    losses: tuple[float, ...] = ()


def read_records(folder: RunFolder) -> list[Record]:
    """One for each rank on the machine of the first, by rank: that of the process that took most steps.

    Clocks of several machines cannot be compared; all ranks take the same steps.
    """
    found: list[Record] = []
    for rank in folder.ranks():
        of_rank = [record for path in _paths(folder, rank) if (record := _record(path, rank)) is not None]
        if of_rank:
            found.append(max(of_rank, key=lambda record: len(record.ends_ns)))
    return [record for record in found if record.machine == found[0].machine]


def job_ends_ns(records: Sequence[Record]) -> list[int]:
    """When each step had ended on every rank; as many steps as every rank took."""
    return [max(ends) for ends in zip(*(record.ends_ns for record in records), strict=False)]


def _paths(folder: RunFolder, rank: int) -> list[Path]:
    return sorted((folder.path / f"rank{rank}").glob(f"{PREFIX}*.json"))


def _record(path: Path, rank: int) -> Record | None:
    content = readable(path)
    if not content:
        return None
    try:
        return Record(
            rank=rank,
            world_size=int(content["world_size"]),
            machine=str(content["machine"]),
            source=str(content["source"]),
            clock=str(content["clock"]),
            complete=bool(content["complete"]),
            ends_ns=tuple(map(int, content["ends_ns"])),
            own_profiler=bool(content["own_profiler"]),
            said=tuple(map(str, content["said"])),
            losses=tuple(map(float, content.get("losses", ()))),
        )
    except (ValueError, TypeError, KeyError, OverflowError):
        say_changed(path)
        return None
