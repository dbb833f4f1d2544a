"""What the reader of a comparison should keep in mind, in sentences; settings and energies that differ."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import polars as pl

from stepscope.compare.statistics import SampleComparison, compare_samples
from stepscope.trace import Metadata
from stepscope.trace.program_facts import ProgramFacts

if TYPE_CHECKING:
    from stepscope.compare.comparison import SideSummary
    from stepscope.compare.record import Edge, LeftOut


_NOTICEABLE: Final = 0.005  # two means of the same steps that differ by more than this share are told apart
_MOST_WARNINGS: Final = 3
_MILLISECOND: Final = 1_000_000
_SECOND: Final = 1_000_000_000


def notes(
    ours: SideSummary,
    theirs: SideSummary,
    *,
    basis: str,
    samples: SampleComparison,
    is_unprofiled: bool,
    unknown: Collection[str],
) -> Iterator[str]:
    """What to keep in mind about a comparison; `unknown` are tables and columns that only one recording has."""
    if ours.paths == theirs.paths and all(ours.paths):
        yield f"Both sides are the same {'trace' if len(ours.paths) == 1 else 'traces'}."
    if basis == "mixed":
        without = "before" if ours.basis == "host" else "after"
        yield (
            f"No device was recorded {without}: there the main thread's time stands for the step, on the other side "
            "the device's; operators are compared by their time on the host."
        )
    yield from _about_side("before", ours)
    yield from _about_side("after", theirs)
    several = max(side.trace.device_work["device"].n_unique() for side in (ours, theirs))
    if several > 1:
        yield (
            f"A trace has {several} devices: operators and lines of your code count those of all, the other tables "
            "are about one."
        )
    yield from _of_one_side(ours, theirs, unknown)
    if ours.ranks != theirs.ranks:
        yield f"Ranks: {ours.ranks} before and {theirs.ranks} after; the tables are a rank's mean."
    takes = f"{_time(ours.step_ns)} before and {_time(theirs.step_ns)} after."
    means = ((ours, samples.before_ns), (theirs, samples.after_ns))
    if is_unprofiled:
        yield (
            "The verdict is about steps that ran without the profiler; what makes the difference is told by those in "
            f"the traces, which take {takes}"
        )
    elif any(mean is not None and abs(mean - side.step_ns) > _NOTICEABLE * side.step_ns for side, mean in means):
        yield ("Every run counts the same in the verdict, and every step in the tables: their mean step is " + takes)


def _about_side(word: str, side: SideSummary) -> Iterator[str]:
    if side.left_out:
        yield _left_out(word, side.left_out)
    if side.warnings:
        found = [f"{each.detail} ({each.count:,})" for each in side.warnings[:_MOST_WARNINGS]]
        more = f"; and {len(side.warnings) - len(found)} more" if len(side.warnings) > len(found) else ""
        yield f"{word.capitalize()}, while reading: {'; '.join(found)}{more}."
    if side.step_source == "none":
        yield f"No steps were found {word}: all that was recorded counts as one step."


def _of_one_side(ours: SideSummary, theirs: SideSummary, unknown: Collection[str]) -> Iterator[str]:
    for name, what in (("input_shapes", "input shapes"), ("module", "modules")):
        if name in unknown:
            yield f"Only one side's recording kept {what}: operators are matched without them."
    for name, what in (("lines", "lines of your code"), ("memory", "memory")):
        if name in unknown:
            yield f"Only one side's recording kept {what}, which cannot be compared."
    kept = [side.trace.metadata.recorded for side in (ours, theirs)]
    if kept[0] is not None and kept[1] is not None and (more := sorted(set(kept[0]) ^ set(kept[1]))):
        yield f"Only one side's recording kept {', '.join(more)}, which costs time itself: record both alike."


def _left_out(word: str, steps: Sequence[LeftOut]) -> str:
    """Such as "After, the last step (206.5 ms) is left out: it is far from the 117.9 to 127.1 ms of those between."."""
    by_edge: dict[Edge, list[LeftOut]] = {}
    for step in sorted(steps, key=lambda step: step.edge):
        by_edge.setdefault(step.edge, []).append(step)
    which = " and ".join(f"the {edge} step{_lengths(found)}" for edge, found in by_edge.items())
    between = _range([step.shortest_ns for step in steps], [step.longest_ns for step in steps])
    are, they = ("are", "they are") if len(steps) > 1 else ("is", "it is")
    return (
        f"{word.capitalize()}, {which} {are} left out: {they} far from the {between} of those between, and a recording "
        "begins or ends there. --all-steps counts all."
    )


def _lengths(steps: Sequence[LeftOut]) -> str:
    lengths = [step.duration_ns for step in steps]
    of = f" of {len(steps)} traces" if len(steps) > 1 else ""
    return f"{of} ({_range(lengths, lengths)})"


def _range(shortest: Sequence[int], longest: Sequence[int]) -> str:
    low, high = min(shortest), max(longest)
    return _time(high) if low == high else f"{_time(low)} to {_time(high)}"


def _time(ns: float) -> str:
    if ns >= _SECOND:
        return f"{ns / _SECOND:,.2f} s"
    return f"{ns / _MILLISECOND:,.1f} ms" if ns >= _MILLISECOND else f"{ns / 1e3:,.1f} us"


SETTING_SCHEMA: Final[Mapping[str, type[pl.DataType]]] = {
    "name": pl.String,
    "before": pl.String,  # null where the setting is not known, or is not there
    "after": pl.String,
}
_PROCESS: Final = ("processors", "usable_processors", "numa_nodes", "threads", "allocator")
"""The process's figures that are settings; others are measured and differ every time."""
_LOADER: Final = ("workers", "batch_size", "pin_memory", "persistent_workers", "prefetch_factor", "start_method")
_LONGEST: Final = 500


def settings_of_trace(metadata: Metadata) -> dict[str, str]:
    """The program's settings that a trace knows, by name."""
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


StepEnergies: TypeAlias = Mapping[str, Sequence[Sequence[float]]]
"""What used it ("gpu", "cpu" or "dram") -> for each run joules a step of each window that was measured."""


@dataclass(frozen=True, slots=True)
class EnergyComparison:
    """The energy of steps before and after."""

    kind: str  # "gpu", "cpu" or "dram"
    before_j: float
    after_j: float  # with before_j: mean joules per step
    change: float  # after_j / before_j - 1
    change_low: float | None
    change_high: float | None  # with change_low: its interval; None where chance cannot be estimated
    confidence: float
    before_windows: int
    after_windows: int  # with before_windows: how many were measured


def compared_energies(
    before: StepEnergies, after: StepEnergies, confidence: float = 0.95
) -> tuple[EnergyComparison, ...]:
    """What both sides measured; consecutive windows are compared by the same statistics as steps."""
    found = []
    for kind in ("gpu", "cpu", "dram"):
        sides = [[run for run in side.get(kind, ()) if run] for side in (before, after)]
        it = compare_samples(*sides, confidence=confidence) if all(sides) else None
        if it is not None and it.before_ns is not None and it.after_ns is not None and it.change is not None:
            means, interval = (it.before_ns, it.after_ns, it.change), (it.change_low, it.change_high)
            windows = (it.before_steps, it.after_steps)
            found.append(EnergyComparison(kind, *means, *interval, confidence, *windows))
    return tuple(found)
