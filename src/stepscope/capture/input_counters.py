"""Counters of the stages of one input pipeline, which loader workers and the program share."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from stepscope.capture import guard

STRIDE: Final = 3
"""Calls, time by the clock and time on a processor of one stage, one after the other."""
COLLATE: Final = 1
"""The stage of the collate function, behind that of the items."""
_ITEM_BYTES: Final = 8


class StageCounters:
    """Counters of `stages` stages in each of `workers` processes; in shared memory where there are any.

    Args:
        workers: number of worker processes; 0 for counters of this process alone.
        by_name: whether workers must open the memory by a name, because they are not forked.

    Attributes:
        handle: what a worker needs for `attach`.
    """

    def __init__(self, workers: int, stages: int, *, by_name: bool = False) -> None:
        self._stages = stages
        self._path: str | None = None
        self._process = os.getpid()
        length = max(workers, 1) * stages * STRIDE * _ITEM_BYTES
        self._memory: mmap.mmap | bytearray
        if not workers:
            self._memory = bytearray(length)
        elif by_name:
            descriptor, self._path = tempfile.mkstemp(prefix="stepscope-input-")
            try:
                _reserve(descriptor, length)
                self._memory = mmap.mmap(descriptor, length)
            finally:
                os.close(descriptor)
        else:
            self._memory = mmap.mmap(-1, length)
        self._view = memoryview(self._memory).cast("q")
        self.handle: Any = self._path if self._path is not None else self._memory

    def row(self, worker: int) -> memoryview:
        """The counters of one process."""
        return _row(self._view, worker, self._stages)

    def totals(self) -> list[tuple[int, int, int]]:
        """For each stage (calls, nanoseconds, processor nanoseconds), of all processes together."""
        values = self._view.tolist()
        width = self._stages * STRIDE
        sums = [sum(values[place::width]) for place in range(width)]
        return [(sums[place], sums[place + 1], sums[place + 2]) for place in range(0, width, STRIDE)]

    def close(self) -> None:
        """Remove the memory's name; the counters can still be read."""
        path, self._path = self._path, None
        if path is not None and self._process == os.getpid() and os.path.exists(path):
            os.unlink(path)


def _reserve(descriptor: int, length: int) -> None:
    """Have the disk give the room now: a full one would end the process at the first write into mapped memory."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, length)
    else:
        os.write(descriptor, bytes(length))


def attach(handle: Any, worker: int, stages: int) -> memoryview:
    """The counters of a worker process, inside it."""
    if isinstance(handle, str):
        descriptor = os.open(handle, os.O_RDWR)
        try:
            memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
    else:
        memory = handle
    return _row(memoryview(memory).cast("q"), worker, stages)


def _row(view: memoryview, worker: int, stages: int) -> memoryview:
    width = stages * STRIDE
    return view[worker * width : (worker + 1) * width]


class Timed:
    """A transform or collate function that counts its calls and otherwise is what it stands for.

    Args:
        processor: whether to count its time on a processor too, which may take microseconds to read.
    """

    def __init__(self, function: Callable[..., Any], row: memoryview, stage: int, *, processor: bool = False) -> None:
        self._function = function
        self._row = row
        self._place = stage * STRIDE
        self._processor_ns = time.thread_time_ns if processor else _no_time

    def __call__(self, *positional: Any, **named: Any) -> Any:
        begun, processor = time.perf_counter_ns(), self._processor_ns()
        try:
            result = self._function(*positional, **named)
        except BaseException as error:
            guard.hide(error)
            _count(self, begun, processor)
            raise
        _count(self, begun, processor)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __reduce__(self) -> Any:
        return _itself, (self._function,)

    @property
    def __class__(self) -> Any:
        return type(self._function)

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError("the class of a measured function cannot be changed")


@guard.entry
def _count(timed: Timed, begun: int, processor: int) -> None:
    row, place = timed._row, timed._place
    row[place] += 1
    row[place + 1] += time.perf_counter_ns() - begun
    row[place + 2] += timed._processor_ns() - processor


def _no_time() -> int:
    return 0


def is_timed(value: object) -> bool:
    """Whether it is a `Timed`, which passes for what it stands for."""
    return type(value) is Timed


def original_of(value: Any) -> Any:
    """What a `Timed` stands for."""
    return value.__reduce__()[1][0]


def _itself(function: Any) -> Any:
    return function


_Begun = tuple[int, int, int, int]


@guard.entry
def fetch_begins(row: memoryview) -> _Begun | None:
    """The clocks, and what the collate function has taken so far."""
    collate = STRIDE * COLLATE
    return row[collate + 1], row[collate + 2], time.perf_counter_ns(), time.thread_time_ns()


@guard.entry
def fetch_ended(row: memoryview, begun: _Begun | None, items: Sequence[Any]) -> None:
    """Count a batch's items: the time since then, without the collate function's."""
    if begun is None:
        return
    collate, collate_processor, begun_ns, processor_ns = begun
    elapsed, on_processor = time.perf_counter_ns() - begun_ns, time.thread_time_ns() - processor_ns
    row[0] += len(items)
    row[1] += max(elapsed - (row[STRIDE * COLLATE + 1] - collate), 0)
    row[2] += max(on_processor - (row[STRIDE * COLLATE + 2] - collate_processor), 0)
