"""Metadata of a trace: its origin, its devices, and what was repaired while reading."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.trace.program_facts import ProgramFacts
from stepscope.trace.run_counts import RunCounts
from stepscope.trace.window import Window


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
    """One accelerator as described by the profiler; None where the file does not say.

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
    """Steps of the same run that no profiler slowed down, beside those that one recorded; medians.

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
        recorded: optional parts the profiler was asked for ("stacks", "shapes", "memory", "modules", "flops"), None
            where the file does not say.
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
