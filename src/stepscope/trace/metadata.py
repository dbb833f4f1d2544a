"""Metadata of a trace: its origin, its devices, what was repaired while reading, and counts of the whole run.

Counts cover the whole run, while the trace covers a part of it. Times are given only where the file has them; even then
the cost is unknown, since the device may have worked in the meantime.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from stepscope.trace.program_facts import ProgramFacts
from stepscope.trace.window import Window

FREQUENT_SHARE = 0.5
"""Share of steps above which an event is too frequent, as in torch_xla's own analysis."""
WARM_UP_STEPS = 10
"""First steps, in which compilation is expected, as in torch_xla's own analysis."""


@dataclass(frozen=True, slots=True)
class Tally:
    """How often something happened in the whole run; times are None if only the number was counted."""

    count: int
    total_ns: int | None = None
    longest_ns: int | None = None


_TALLY: Final = tuple(field.name for field in fields(Tally))


@dataclass(frozen=True, slots=True)
class Fallback:
    """An operator that ran on the CPU because the device does not support it.

    Attributes:
        operator: qualified name, such as "aten::digamma".
        count: None if the file only names the operator.
        types: input types, in the log's words.
    """

    operator: str
    count: int | None = None
    types: str | None = None


@dataclass(frozen=True, slots=True)
class CodePlace:
    """A Python frame in a log."""

    function: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Trigger:
    """What made the framework compile or execute a graph: the log's text, the Python stack and a count.

    Attributes:
        frames: innermost first.
    """

    cause: str
    frames: tuple[CodePlace, ...]
    count: int = 1


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A place at which torch.compile ended a graph, and why.

    Attributes:
        reason: in the compiler's words; "explanation" and "hint" are "" where it gave none.
        frames: the program's stack there, innermost first.
    """

    file: str
    line: int
    reason: str
    explanation: str = ""
    hint: str = ""
    frames: tuple[CodePlace, ...] = ()


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A graph that Inductor compiled: the key by which profilers name its calls, and its fused kernels."""

    key: str | None
    kernels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Compilation:
    """One compilation of a function, or of the rest of one after a graph break, by torch.compile's log.

    Attributes:
        number: of the function and of its compilation, as in "Torch-Compiled Region: 0/1".
        called_from: the stack at which it was called, innermost first.
        compile_ns, backward_ns: time to compile the forward and the backward pass.
        cached: whether all its graphs came from Inductor's cache; None if it compiled none with Inductor.
        reason: the guard that failed before it; None for a first compilation.
        failure: why it could not be compiled.
        logging_ns: time that writing the log took.
    """

    process: str
    number: str
    function: str
    file: str
    line: int
    called_from: tuple[CodePlace, ...] = ()
    start_unix_ns: int | None = None
    compile_ns: int | None = None
    backward_ns: int | None = None
    cached: bool | None = None
    guards: int | None = None
    operators: int | None = None
    graphs: tuple[CompiledGraph, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()
    reason: str | None = None
    failure: str | None = None
    logging_ns: int = 0


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Combined counts of all files; None or empty if no file has them.

    Attributes:
        steps: number of step ends reported to the framework.
        compilations: of graphs.
        late_compilations: those after the first WARM_UP_STEPS steps.
        transfers_out: transfers from the device to the host.
        scalar_reads: reads of single values, such as by `.item()`; included in the transfers.
        cached, missed: lookups of compiled graphs that succeeded or failed.
        fallbacks, compile_triggers, execute_triggers: most frequent first.
        compiled: compilations by torch.compile, in the order of its log.
    """

    sources: tuple[str, ...] = ()
    steps: int | None = None
    compilations: Tally | None = None
    late_compilations: int | None = None
    executions: Tally | None = None
    transfers_out: Tally | None = None
    scalar_reads: int | None = None
    cached: int | None = None
    missed: int | None = None
    fallbacks: tuple[Fallback, ...] = ()
    compile_triggers: tuple[Trigger, ...] = ()
    execute_triggers: tuple[Trigger, ...] = ()
    compiled: tuple[Compilation, ...] = ()

    @property
    def compiles_too_often(self) -> bool:
        """Whether graphs are still compiled in more than half of the steps after the first WARM_UP_STEPS."""
        if self.steps is None or self.steps <= WARM_UP_STEPS:
            return False
        if self.late_compilations is not None:
            return self.late_compilations > FREQUENT_SHARE * (self.steps - WARM_UP_STEPS)
        return self.compilations is not None and self.compilations.count > FREQUENT_SHARE * self.steps

    @property
    def reads_too_often(self) -> bool:
        """Whether values are read from the device in more than half of the steps."""
        if not self.steps or self.transfers_out is None:
            return False
        return self.transfers_out.count > FREQUENT_SHARE * self.steps


def joined(parts: Iterable[RunCounts]) -> RunCounts:
    """Combine the counts of several files of the same run; of two counts of the same thing, the larger one is used."""
    whole = RunCounts()
    for part in parts:
        pairs = {field.name: (getattr(whole, field.name), getattr(part, field.name)) for field in fields(RunCounts)}
        whole = RunCounts(**{name: _combined(*pair) for name, pair in pairs.items()})
    return replace(
        whole,
        fallbacks=_fallbacks(whole.fallbacks),
        compile_triggers=_triggers(whole.compile_triggers),
        execute_triggers=_triggers(whole.execute_triggers),
    )


def _combined(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, tuple):
        return first + second
    if isinstance(first, Tally):
        return Tally(*(_combined(getattr(first, name), getattr(second, name)) for name in _TALLY))
    return max(first, second)


def _fallbacks(found: Iterable[Fallback]) -> tuple[Fallback, ...]:
    by_operator: dict[str, Fallback] = {}
    for each in found:
        known = by_operator.get(each.operator, each)
        by_operator[each.operator] = Fallback(
            each.operator, _combined(known.count, each.count), known.types or each.types
        )
    return tuple(sorted(by_operator.values(), key=lambda each: (-(each.count or 0), each.operator)))


def _triggers(found: Iterable[Trigger]) -> tuple[Trigger, ...]:
    counts: dict[tuple[str, tuple[CodePlace, ...]], int] = {}
    for each in found:
        counts[each.cause, each.frames] = counts.get((each.cause, each.frames), 0) + each.count
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return tuple(Trigger(cause, frames, count) for (cause, frames), count in ordered)


@dataclass(frozen=True, slots=True)
class TraceWarning:
    """Something that was skipped or repaired while reading.

    Attributes:
        kind: a stable, short identifier such as "truncated" or "damaged_event".
        count: how many times it happened.
        detail: one sentence for the user.
    """

    kind: str
    count: int
    detail: str


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator as described by the profiler; None if the file does not say.

    Attributes:
        peak_flops_s: peak operations per second of its fastest number type with more than 8 bits.
        bandwidth_bytes_s: peak memory bandwidth, bytes per second.
    """

    device: str
    name: str | None = None
    memory_bytes: int | None = None
    compute_capability: str | None = None
    multiprocessors: int | None = None
    peak_flops_s: float | None = None
    bandwidth_bytes_s: float | None = None


@dataclass(frozen=True, slots=True)
class UnrecordedSteps:
    """Medians of the run's steps that no profiler slowed down, and of the recorded ones.

    Attributes:
        count: number of unrecorded steps.
        step_ns, recorded_step_ns: wall time of an unrecorded and of a recorded step.
        processor_ns: time that the steps' thread ran on a processor in an unrecorded step; None if unknown.
        faults: pages that were mapped for the process in an unrecorded step; None if unknown.
    """

    count: int
    step_ns: int
    recorded_step_ns: int
    processor_ns: int | None = None
    faults: int | None = None


@dataclass(frozen=True, slots=True)
class Metadata:
    """A trace's description of itself.

    Attributes:
        path: where it was read from.
        format: the reader's name, such as "kineto".
        events: number of events in the file, of any kind.
        complete_events: number of events with a start and a duration.
        origin_unix_ns: wall clock at time 0 of the trace, nanoseconds since 1970, where known.
        recorded: optional parts that the profiler was to record ("stacks", "shapes", "memory", "modules", "flops");
            None if the file does not say.
        window: the part that was read, if only a part was requested.
        program: settings of the program, if stepscope recorded it.
        evidence: counts from other files of the run, if given; never stored in the cache.
        unrecorded: the run's other steps, if the trace lies in the run's folder; never stored in the cache.
    """

    path: str = ""
    format: str = ""
    events: int = 0
    complete_events: int = 0
    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None
    origin_unix_ns: int | None = None
    host: str | None = None
    devices: tuple[Device, ...] = ()
    recorded: tuple[str, ...] | None = None
    window: Window | None = None
    program: ProgramFacts | None = None
    evidence: RunCounts | None = None
    unrecorded: UnrecordedSteps | None = None
