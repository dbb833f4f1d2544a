"""What one host thread does over time: a clock, a stack of open slices, and a log of both.

The log is the source of the truth about idle time. Every time the clock moves, the thread writes down what stood
on its stack and which cause that stands for, so nothing has to be worked out from the written trace afterwards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

OPERATOR = "operator"
FRAME = "frame"
ANNOTATION = "annotation"
CALL = "call"
DRIVER_CALL = "driver_call"

STEP_PREFIX = "ProfilerStep#"
OPTIMIZER_PREFIX = "Optimizer.step#"
DATA_LOADER_PREFIX = "enumerate(DataLoader)"
LOGGING_PREFIX = "stepscope.logging#"
OPTIMIZER_FOLDER = "torch/optim/"
COMPILER_FOLDERS = ("torch/_dynamo/", "torch/_inductor/")
SYNCHRONISING_OPERATORS = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::nonzero"})
SYNCHRONISING_CALLS = frozenset({"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"})
ALLOCATING_CALLS = frozenset({"cudaMalloc", "cudaFree"})


@dataclass(eq=False)
class Slice:
    """One named stretch of a host thread's time. ``end_ns`` is None while it is open.

    ``shapes`` and ``types`` are an operator's inputs', where the profiler was asked for them. ``kernel`` is what a
    call launches, where the profiler writes it, as AMD's does.
    """

    identifier: int
    category: str
    name: str
    start_ns: int
    parent: Slice | None
    cause: str | None
    correlation: int | None = None
    device: int | None = None
    queue: int | None = None
    end_ns: int | None = None
    shapes: tuple[tuple[int, ...], ...] | None = None
    types: tuple[str, ...] = ()
    kernel: str | None = None

    @property
    def closed_ns(self) -> int:
        if self.end_ns is None:
            raise ValueError(f"the slice {self.name!r} is still open")
        return self.end_ns

    def enclosing(self, category: str) -> Slice | None:
        """The innermost slice of this category around this one, itself left out."""
        slice_ = self.parent
        while slice_ is not None and slice_.category != category:
            slice_ = slice_.parent
        return slice_


@dataclass(frozen=True)
class Stretch:
    """A time in which a thread's innermost slice did not change; ``innermost`` is None when no slice was open."""

    start_ns: int
    end_ns: int
    innermost: Slice | None
    cause: str


def definite_cause(category: str, name: str) -> str | None:
    """The cause a slice stands for whatever surrounds it, or None."""
    if category == ANNOTATION:
        if name.startswith(DATA_LOADER_PREFIX):
            return "input"
        return "optimizer" if name.startswith(OPTIMIZER_PREFIX) else None
    if category == FRAME:
        if name.startswith(OPTIMIZER_FOLDER):
            return "optimizer"
        return "compilation" if any(folder in name for folder in COMPILER_FOLDERS) else None
    if name.startswith(LOGGING_PREFIX):
        return "logging"
    if name in ALLOCATING_CALLS:
        return "allocation"
    if name.startswith("gloo:"):
        return "communication"
    synchronises = name in SYNCHRONISING_OPERATORS or name in SYNCHRONISING_CALLS
    return "synchronisation" if synchronises else None


@dataclass(eq=False)
class Timeline:
    """A host thread's clock, its open slices and the log of what it did.

    Two slices of one thread never start at the same instant: the second one starts a tick later, as in a recording
    by a tracer that itself takes time. So the nesting can be told from the times alone, in whatever order a file
    holds the slices.
    """

    name: str
    thread_id: int
    tick_ns: int
    identifiers: count[int]
    now_ns: int = 0
    slices: list[Slice] = field(default_factory=list)
    stack: list[Slice] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)

    def work(self, duration_ns: int) -> None:
        """Spend host time in whatever slice is innermost."""
        if duration_ns < 0:
            raise ValueError(f"time cannot run backwards: {duration_ns}")
        if duration_ns == 0:
            return
        start_ns, innermost = self.now_ns, self.stack[-1] if self.stack else None
        self.now_ns += duration_ns
        if self.stretches and self.stretches[-1].innermost is innermost:
            start_ns = self.stretches.pop().start_ns
        self.stretches.append(Stretch(start_ns, self.now_ns, innermost, self._cause()))

    def wait_until(self, time_ns: int) -> None:
        """Spend time in the innermost slice until ``time_ns``, if that is still to come."""
        self.work(max(0, time_ns - self.now_ns))

    def open(self, category: str, name: str, *, cause: str | None = None, correlation: int | None = None) -> Slice:
        """Open a slice inside the innermost one; ``cause`` overrides what its name stands for."""
        if self.slices and self.slices[-1].start_ns == self.now_ns:
            self.work(self.tick_ns)
        parent = self.stack[-1] if self.stack else None
        cause = cause or definite_cause(category, name)
        slice_ = Slice(next(self.identifiers), category, name, self.now_ns, parent, cause, correlation)
        self.slices.append(slice_)
        self.stack.append(slice_)
        return slice_

    def close(self) -> Slice:
        """Close the innermost slice."""
        slice_ = self.stack.pop()
        slice_.end_ns = self.now_ns
        return slice_

    def between(self, start_ns: int, end_ns: int) -> Iterator[Stretch]:
        """What the thread did in [start_ns, end_ns), without holes: time it did not log is time without a slice."""
        position = max(0, bisect_right(self.stretches, start_ns, key=lambda stretch: stretch.start_ns) - 1)
        for stretch in self.stretches[position:]:
            if stretch.start_ns >= end_ns:
                break
            if stretch.end_ns > start_ns:
                until_ns = min(stretch.end_ns, end_ns)
                yield Stretch(start_ns, until_ns, stretch.innermost, stretch.cause)
                start_ns = until_ns
        if start_ns < end_ns:
            yield Stretch(start_ns, end_ns, None, "untraced")

    def synchronising_call_at(self, time_ns: int) -> str | None:
        """The last synchronising call or copy to the host in progress at ``time_ns``, both ends included."""
        for slice_ in reversed(self.slices):
            copies_out = slice_.category == CALL and slice_.cause == "synchronisation"
            waits = copies_out or slice_.name in SYNCHRONISING_CALLS
            if waits and slice_.start_ns <= time_ns <= slice_.closed_ns:
                return slice_.name
        return None

    def _cause(self) -> str:
        """What the host is doing now, seen from its stack: the innermost slice that stands for a cause decides."""
        for slice_ in reversed(self.stack):
            if slice_.cause is not None:
                return slice_.cause
        categories = {slice_.category for slice_ in self.stack}
        if categories & {OPERATOR, CALL, DRIVER_CALL}:
            return "dispatch"
        return "python" if FRAME in categories else "untraced"
