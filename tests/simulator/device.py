"""Devices: queues that run work in order, the work they ran, and the host calls that launched it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from tests.simulator.timeline import Slice, Timeline

COMPUTE = "compute"
COMMUNICATION = "communication"
COPY = "copy"
SET = "set"


@dataclass(frozen=True, eq=False)
class Launch:
    """The host call that gave the device some work."""

    thread: Timeline
    call: Slice
    correlation: int

    @property
    def start_ns(self) -> int:
        return self.call.start_ns


@dataclass(frozen=True, eq=False)
class Work:
    """Something a queue of a device did. ``launch`` is None when its launch is not in the trace."""

    device: int
    queue: int
    kind: str
    name: str
    start_ns: int
    duration_ns: int
    correlation: int
    launch: Launch | None
    bytes: int | None = None

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True)
class Event:
    """A marker in a queue, reached at ``time_ns``."""

    device: int
    queue: int
    time_ns: int


@dataclass(eq=False)
class Queue:
    """A stream. Work starts when it may, when the work before it ended, and when the events it waits for came."""

    device: int
    number: int
    front_end_gap_ns: int
    end_ns: int = 0
    blocked_until_ns: int = 0
    last_call_ns: int = 0

    def start_of_next_ns(self, ready_ns: int) -> int:
        """When work that may start at ``ready_ns`` does start."""
        after_last_ns = self.end_ns + self.front_end_gap_ns if self.end_ns else 0
        return max(ready_ns, after_last_ns, self.blocked_until_ns)


@dataclass(eq=False)
class Ledger:
    """What all threads of a machine share: counters, the work that was done, the profiler's own overhead."""

    tick_ns: int
    with_frames: bool
    queues: dict[tuple[int, int], Queue] = field(default_factory=dict)
    works: list[Work] = field(default_factory=list)
    overheads: list[tuple[int, int]] = field(default_factory=list)
    identifiers: count[int] = field(default_factory=lambda: count(1))
    correlations: count[int] = field(default_factory=lambda: count(101))

    def queues_of(self, device: int) -> list[Queue]:
        return [queue for queue in self.queues.values() if queue.device == device]

    def run(
        self,
        queue: Queue,
        kind: str,
        name: str,
        ready_ns: int,
        duration_ns: int,
        launch: Launch | None,
        byte_count: int | None = None,
    ) -> Work:
        """Put work in a queue; when it runs is settled at once, since nothing later can move it."""
        if duration_ns <= 0:
            raise ValueError(f"device work lasts at least 1 ns, {name!r} was given {duration_ns}")
        correlation = launch.correlation if launch else next(self.correlations)
        start_ns = queue.start_of_next_ns(ready_ns)
        work = Work(queue.device, queue.number, kind, name, start_ns, duration_ns, correlation, launch, byte_count)
        queue.end_ns = work.end_ns
        self.works.append(work)
        return work
