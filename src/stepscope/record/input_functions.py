"""The functions that make up a loader's pipeline, and where they are defined."""

from __future__ import annotations

import functools
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any, Final

from stepscope import guard
from stepscope.record.program_objects import attributes
from stepscope.trace.program_facts import LoaderFacts

_TRANSFORMS: Final = ("transform", "transforms", "target_transform")
_MOST_TRANSFORMS: Final = 24
_DEEPEST: Final = 8


@dataclass(frozen=True, slots=True)
class StageFunction:
    """One stage of a pipeline.

    Attributes:
        stage: as in `InputStageFacts`.
        holder: the object or list that holds the function, if it can be replaced there.
        place: the attribute's name or the list's index.
    """

    stage: str
    name: str
    file: str | None = None
    line: int | None = None
    holder: Any = None
    place: Any = None


def loader_facts(loader: Any) -> LoaderFacts:
    workers = loader.num_workers
    return LoaderFacts(
        dataset=type(_innermost(loader.dataset)).__name__,
        workers=workers,
        batch_size=loader.batch_size,
        pin_memory=bool(loader.pin_memory),
        persistent_workers=bool(loader.persistent_workers),
        prefetch_factor=loader.prefetch_factor if workers else None,
        start_method=start_method(loader) if workers else None,
    )


def start_method(loader: Any) -> str:
    context = loader.multiprocessing_context
    if context is None:
        import multiprocessing

        context = multiprocessing
    return str(context.get_start_method())


def stage_functions(dataset: Any, collate: Any) -> list[StageFunction]:
    """Return the pipeline's item and collate functions, followed by the dataset's transforms.

    The order is the same in every process, so that an index refers to the same stage everywhere.
    """
    inner = _innermost(dataset)
    method = _method_of(type(inner))
    found = [_described("item", _of_class(type(inner), method), f"{type(inner).__name__}.{method}")]
    found.append(_described("collate", collate, _name_of(collate)))
    for attribute in _TRANSFORMS:
        transform = attributes(inner).get(attribute)
        if callable(transform) and len(found) < _MOST_TRANSFORMS:
            found.extend(_transforms(transform, inner, attribute))
    return found[: _MOST_TRANSFORMS + 2]


def sampler_function(loader: Any) -> StageFunction:
    """Return the sampler that chooses a loader's items; of torch's batch sampler, the one inside."""
    sampler = loader.batch_sampler
    inner = attributes(sampler).get("sampler")
    if sampler is None or (inner is not None and type(sampler).__module__.startswith("torch.utils.data")):
        sampler = loader.sampler if inner is None else inner
    name = f"{type(sampler).__name__}.__iter__"
    return _described("sampler", _of_class(type(sampler), "__iter__"), name)


def is_stream(kind: type) -> bool:
    """Whether a data set of this class is iterable only."""
    return any(base.__name__ == "IterableDataset" for base in kind.__mro__)


def _method_of(kind: type) -> str:
    """Return the method that torch calls on such a dataset to get items."""
    names = ("__iter__",) if is_stream(kind) else ("__getitems__", "__getitem__")
    return next((name for name in names if callable(getattr(kind, name, None))), "__getitem__")


def _transforms(transform: Any, holder: Any, attribute: str) -> list[StageFunction]:
    parts = attributes(transform).get("transforms")
    if type(parts) is list and all(callable(part) for part in parts):
        return [_transform(part, parts, place) for place, part in enumerate(parts)]
    return [_transform(transform, holder, attribute)]


def _transform(function: Any, holder: Any, place: Any) -> StageFunction:
    found = _described("transform", function, _name_of(function))
    return StageFunction(found.stage, found.name, found.file, found.line, holder, place)


def _described(stage: str, function: Any, name: str) -> StageFunction:
    code = _code_of(function)
    if code is None:
        return StageFunction(stage, name)
    file = code.co_filename
    return StageFunction(stage, name, file if file[:1] == "<" else os.path.abspath(file), code.co_firstlineno)


def _code_of(function: Any) -> Any:
    """Return the code object that runs on a call; None for a function not written in Python."""
    for _ in range(_DEEPEST):
        function = original_of(function) if is_timed(function) else function
        kind = type(function)
        if kind is FunctionType and "__wrapped__" not in vars(function):
            return function.__code__
        function = _delegate(function, kind)
    return None


def _delegate(function: Any, kind: Any) -> Any:
    """The function that a called object stands for, or calls."""
    if kind is FunctionType:
        return vars(function)["__wrapped__"]
    if kind in (MethodType, staticmethod, classmethod):
        return function.__func__
    if issubclass(kind, functools.partial):
        return function.func
    if kind in _BUILTIN or issubclass(kind, type):
        return None
    stored = attributes(function).get("func")
    return stored if callable(stored) else _of_class(kind, "forward") or _of_class(kind, "__call__")


_BUILTIN: Final = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType, type(None))


def _of_class(kind: type, name: str) -> Any:
    """The function as defined in a class; None if it has none."""
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


def _name_of(function: Callable[..., Any]) -> str:
    function = original_of(function) if is_timed(function) else function
    kind = type(function)
    is_named = kind in (FunctionType, MethodType, *_BUILTIN) or issubclass(kind, type)
    return str(function.__qualname__) if is_named else kind.__name__


def _innermost(dataset: Any) -> Any:
    """Return the dataset inside torch's own wrappers, such as Subset."""
    for _ in range(_DEEPEST):
        if not type(dataset).__module__.startswith("torch.utils.data"):
            break
        inner = attributes(dataset).get("dataset")
        parts = attributes(dataset).get("datasets")
        if inner is None and type(parts) in (list, tuple) and parts:
            inner = parts[0]
        if inner is None:
            break
        dataset = inner
    return dataset


STRIDE: Final = 3
"""Counters of one stage: calls, wall time, CPU time."""
COLLATE: Final = 1
"""Index of the collate function's stage, after the items'."""
_ITEM_BYTES: Final = 8


class StageCounters:
    """Counters of the stages in each worker process, in shared memory; without workers, in this process.

    Args:
        by_name: whether workers must open the memory by name, because they are not forked.

    Attributes:
        handle: what a worker passes to `attach`.
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
        return _row(self._view, worker, self._stages)

    def totals(self) -> list[tuple[int, int, int]]:
        """Return (calls, nanoseconds, CPU nanoseconds) for each stage, summed over all processes."""
        values = self._view.tolist()
        width = self._stages * STRIDE
        sums = [sum(values[place::width]) for place in range(width)]
        return [(sums[place], sums[place + 1], sums[place + 2]) for place in range(0, width, STRIDE)]

    def close(self) -> None:
        """Unlink the shared memory; the counters stay readable."""
        path, self._path = self._path, None
        if path is not None and self._process == os.getpid() and os.path.exists(path):
            os.unlink(path)


def _reserve(descriptor: int, length: int) -> None:
    """Reserve the disk space now: on a full disk, the first write into mapped memory would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, length)
    else:
        os.write(descriptor, bytes(length))


def attach(handle: Any, worker: int, stages: int) -> memoryview:
    """Map the counters of a worker process, from inside the worker."""
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
    """Wraps a transform or collate function and counts its calls.

    Args:
        processor: whether to count CPU time too, which may take microseconds to read.
    """

    def __init__(self, function: Callable[..., Any], row: memoryview, stage: int, *, processor: bool = False) -> None:
        self._function = function
        self._row = row
        self._place = stage * STRIDE
        self._processor_ns = time.thread_time_ns if processor else _no_time

    def __call__(self, *positional: Any, **named: Any) -> Any:
        started, processor = time.perf_counter_ns(), self._processor_ns()
        try:
            with guard.hidden:
                return self._function(*positional, **named)
        finally:
            _count(self, started, processor)

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
def _count(timed: Timed, started: int, processor: int) -> None:
    row, place = timed._row, timed._place
    row[place] += 1
    row[place + 1] += time.perf_counter_ns() - started
    row[place + 2] += timed._processor_ns() - processor


def _no_time() -> int:
    return 0


def is_timed(value: object) -> bool:
    return type(value) is Timed


def original_of(value: Any) -> Any:
    return value.__reduce__()[1][0]


def _itself(function: Any) -> Any:
    return function


_Begun = tuple[int, int, int, int]


@guard.entry
def fetch_begins(row: memoryview) -> _Begun | None:
    """Return the clocks and the collate function's time so far."""
    collate = STRIDE * COLLATE
    return row[collate + 1], row[collate + 2], time.perf_counter_ns(), time.thread_time_ns()


@guard.entry
def fetch_ended(row: memoryview, started: _Begun | None, items: Sequence[Any]) -> None:
    """Count a batch's items, with the time since `started` minus the collate function's."""
    if started is None:
        return
    collate, collate_processor, started_ns, processor_ns = started
    elapsed, on_processor = time.perf_counter_ns() - started_ns, time.thread_time_ns() - processor_ns
    row[0] += len(items)
    row[1] += max(elapsed - (row[STRIDE * COLLATE + 1] - collate), 0)
    row[2] += max(on_processor - (row[STRIDE * COLLATE + 2] - collate_processor), 0)
