"""Measure the stages of the program's input pipelines: items, transforms, collate function, pinning.

While a recording is prepared or `stepscope run` watches, new iterators of DataLoaders count the time of each batch's
items and of its collate function, and the calls of the dataset's transforms, also in workers. The dataset's own class
is not touched, and iterators that began earlier are not measured.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any, Final

import msgspec

from stepscope import guard
from stepscope.record.input_functions import (
    COLLATE,
    StageCounters,
    StageFunction,
    Timed,
    attach,
    fetch_begins,
    fetch_ended,
    is_stream,
    is_timed,
    loader_facts,
    original_of,
    sampler_function,
    stage_functions,
    start_method,
)
from stepscope.record.program_objects import attributes
from stepscope.threads import Lock
from stepscope.trace.program_facts import InputStageFacts, LoaderFacts

_MOST: Final = 100
"""Maximum number of distinct loaders; the oldest are dropped."""
_Key = tuple[str, str, "str | None", "int | None", bool]
_Sums = dict[_Key, list[int]]


class _Loader:
    """One loader: its settings, the number of iterations started, and the number of live iterators."""

    def __init__(self, facts: LoaderFacts) -> None:
        self.facts = facts
        self.batches: int | None = None
        self.started = 0
        self.alive = 0
        self.before = 0


class _Pipeline:
    """The counters of one loader iterator."""

    def __init__(self, loader: Any) -> None:
        self.functions = stage_functions(loader.dataset, loader.collate_fn)
        self.sampler = sampler_function(loader)
        self.is_stream = is_stream(type(loader.dataset))
        self.chosen = [0, 0, 0]
        self.seen: _Loader | None = None
        self.in_workers = loader.num_workers > 0
        self.is_forked = self.in_workers and start_method(loader) == "fork"
        by_name = self.in_workers and not self.is_forked
        self.counters = StageCounters(loader.num_workers, len(self.functions), by_name=by_name)
        self.measured: list[StageFunction] = []

    def add_to(self, sums: _Sums) -> None:
        for function, counted in zip(self.functions, self.counters.totals(), strict=True):
            total = sums[function.stage, function.name, function.file, function.line, self.in_workers]
            for place, value in enumerate(counted):
                total[place] += value
        sampler = self.sampler
        total = sums[sampler.stage, sampler.name, sampler.file, sampler.line, False]
        for place, value in enumerate(self.chosen):
            total[place] += value

    def give_transforms_back(self) -> None:
        """Restore the transforms of a dataset that this process itself read from."""
        while self.measured:
            function = self.measured.pop()
            with guard.attempt():
                present = _get(function.holder, function.place)
                if is_timed(present):
                    _set(function.holder, function.place, original_of(present))


class InputWatch:
    """Observes the loaders of this process while at least one user needs it. Each process has one: `input_watch`."""

    def __init__(self) -> None:
        self._users: set[int] = set()
        self._restore: list[Callable[[], None]] = []
        self._lock = Lock()
        self._pipelines: dict[int, _Pipeline] = {}
        self._ended = _sums()
        self._before = _sums()
        self._loaders: dict[int, _Loader] = {}
        self._iterators: weakref.WeakKeyDictionary[Any, _Pipeline] = weakref.WeakKeyDictionary()
        self.local = threading.local()

    def install(self, user: object) -> None:
        with self._lock:
            self._users.add(id(user))
            if not self._restore:
                self._restore = _patched(self)

    def uninstall(self, user: object) -> None:
        """Remove one user; after the last, restore torch and the loaders."""
        with self._lock:
            self._users.discard(id(user))
            while self._restore and not self._users:
                self._restore.pop()()
            for pipeline in list(self._pipelines.values()) if not self._users else ():
                pipeline.give_transforms_back()

    def begin(self) -> None:
        """Start counting for `loaders` and `stages`."""
        self._before = self._now()
        for loader in self._loaders.values():
            loader.before = loader.started

    def loaders(self) -> tuple[LoaderFacts, ...]:
        """Return the loaders iterated since `begin`, including iterations still running.

        A program may make a new loader in each epoch: the batches of similar ones count, if always as many.
        """
        loaders = list(self._loaders.values())
        alike: defaultdict[LoaderFacts, set[int]] = defaultdict(set)
        for loader in loaders:
            alike[loader.facts].update([] if loader.batches is None else [loader.batches])
        found = []
        for loader in loaders:
            counts = alike[loader.facts] if loader.batches is None else {loader.batches}
            batches = next(iter(counts)) if len(counts) == 1 else None
            if loader.started > loader.before or loader.alive:
                iterators = loader.started - loader.before
                found.append(msgspec.structs.replace(loader.facts, iterators=iterators, batches=batches))
        return tuple(found)

    def stages(self) -> tuple[InputStageFacts, ...]:
        """Return the stages measured since `begin`, the longest first."""
        found = []
        for key, now in self._now().items():
            before = self._before.get(key, [0, 0, 0])
            calls, total, processor = (max(last - first, 0) for first, last in zip(before, now, strict=True))
            if calls:
                found.append(InputStageFacts(
                    stage=key[0], name=key[1], file=key[2], line=key[3], in_workers=key[4],
                    calls=calls, total_ns=total,
                    processor_ns=None if key[0] == "transform" else processor,
                ))  # fmt: skip
        return tuple(sorted(found, key=lambda one: -one.total_ns))

    def add(self, stage: str, name: str, elapsed_ns: int, processor_ns: int) -> None:
        total = self._ended[stage, name, None, None, False]
        for place, value in enumerate((1, elapsed_ns, processor_ns)):
            total[place] += value

    @guard.entry
    def choosing_begins(self, iterator: Any) -> tuple[int, int]:
        return time.perf_counter_ns(), time.thread_time_ns()

    @guard.entry
    def choosing_ends(self, started: tuple[int, int] | None, chosen: Any, iterator: Any) -> None:
        pipeline = self._iterators.get(iterator)
        if pipeline is not None and chosen is None and sys.exc_info()[0] is StopIteration and not pipeline.is_stream:
            if pipeline.seen is not None:  # len() is not called: a data set's may do anything
                pipeline.seen.batches = pipeline.chosen[0]
        elif started is not None and pipeline is not None:
            elapsed = time.perf_counter_ns() - started[0], time.thread_time_ns() - started[1]
            for place, value in enumerate((1, *elapsed)):
                pipeline.chosen[place] += value

    @guard.entry
    def iteration_begins(self, loader: Any) -> None:
        """Register an iteration over a loader; one that differs from torch's own is ignored."""
        key = id(loader)
        with guard.attempt():
            if key not in self._loaders:
                while len(self._loaders) >= _MOST:
                    self._loaders.pop(next(iter(self._loaders)))
                self._loaders[key] = _Loader(loader_facts(loader))
            self._loaders[key].started += 1

    def follow(self, pipeline: _Pipeline, loader: Any, iterator: Any) -> None:
        key = id(pipeline)
        self._pipelines[key] = pipeline
        self._iterators[iterator] = pipeline
        seen = pipeline.seen = self._loaders.get(id(loader))
        if seen is not None:
            seen.alive += 1
        weakref.finalize(iterator, self._iterator_ends, key, seen).atexit = True

    @guard.entry
    def _iterator_ends(self, key: int, loader: _Loader | None) -> None:
        pipeline = self._pipelines.pop(key, None)
        if pipeline is not None:
            pipeline.add_to(self._ended)
            pipeline.counters.close()
            pipeline.give_transforms_back()
        if loader is not None:
            loader.alive -= 1

    def _now(self) -> _Sums:
        sums = _sums()
        for key, values in list(self._ended.items()):
            sums[key] = list(values)
        for pipeline in list(self._pipelines.values()):
            pipeline.add_to(sums)
        return sums


def _sums() -> _Sums:
    return defaultdict(lambda: [0, 0, 0])


_watch = InputWatch()


def input_watch() -> InputWatch:
    return _watch


def _patched(watch: InputWatch) -> list[Callable[[], None]]:
    """Patch torch's loaders to measure; return the functions that undo it.

    Loaders keep working if anything fails here or if this torch version uses other names.
    """
    from torch.utils.data import _utils, dataloader

    loader_kind: Any = dataloader.DataLoader
    iterator_kind: Any = getattr(dataloader, "_BaseDataLoaderIter", object)
    iterator_begins = functools.partial(_iterator_is_made, watch)
    pinning = functools.partial(_pinning_begins, watch), functools.partial(_pinning_ends, watch)
    restore: list[Callable[[], None]] = []
    for owner, name, before, after, also_after_errors in (
        (loader_kind, "__iter__", watch.iteration_begins, None, False),
        (loader_kind, "_get_iterator", iterator_begins, _iterator_was_made, True),
        (dataloader._DatasetKind, "create_fetcher", None, functools.partial(_fetcher_was_made, watch), False),
        (iterator_kind, "_next_index", watch.choosing_begins, watch.choosing_ends, True),
        (_utils.pin_memory, "pin_memory", *pinning, True),
    ):
        original = vars(owner).get(name)
        if original is not None:
            function = original.__func__ if isinstance(original, staticmethod) else original
            wrapped = guard.around(function, before, after, also_after_errors=also_after_errors)
            ours = staticmethod(wrapped) if isinstance(original, staticmethod) else wrapped
            restore.append(guard.put(owner, name, ours))
    return restore


_starting: Final = Lock()
"""Held while the workers of a loader are started."""


class _Making:
    """The construction of an iterator that counts for a pipeline: in this process, or in the workers it starts."""

    def __init__(self, watch: InputWatch, loader: Any) -> None:
        self.watch = watch
        self.pipeline = _Pipeline(loader)
        self._worker: Any = None
        self._loop: Any = None
        self._held: object = None
        if self.pipeline.in_workers:
            self._exchange_worker_loop()
        else:
            watch.local.pipeline = self.pipeline
        self.started, self.processor = time.perf_counter_ns(), time.thread_time_ns()

    def _exchange_worker_loop(self) -> None:
        from torch.utils.data import _utils

        pipeline = self.pipeline
        if pipeline.is_forked or _can_be_imported():
            _starting.acquire()
            self._held = guard.on_failure("", self.end, thread=threading.get_ident())
            self._worker = _utils.worker
            self._loop = self._worker._worker_loop
            self._worker._worker_loop = functools.partial(
                measured_worker, pipeline.counters.handle, self._loop if pipeline.is_forked else None
            )

    def end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            guard.off(self._held)
            worker._worker_loop = self._loop
            _starting.release()
        self.watch.local.pipeline = None


@guard.entry
def _iterator_is_made(watch: InputWatch, loader: Any) -> _Making | None:
    with guard.attempt():  # a loader that differs from torch's own is not measured
        return _Making(watch, loader)
    return None


@guard.entry
def _iterator_was_made(making: _Making | None, iterator: Any, loader: Any) -> None:
    if making is None:
        return
    making.end()
    if iterator is None:
        return
    if making.pipeline.in_workers:
        elapsed, on_processor = time.perf_counter_ns() - making.started, time.thread_time_ns() - making.processor
        making.watch.add("worker_start", f"{loader.num_workers} workers", elapsed, on_processor)
    making.watch.follow(making.pipeline, loader, iterator)


def _can_be_imported() -> bool:
    """Whether a process that is not forked can import this package: `stepscope run` loads it from outside the path."""
    return PathFinder.find_spec("stepscope") is not None


def measured_worker(handle: Any, original: Any, *positional: Any, **named: Any) -> None:
    """The worker loop, measured; runs in the worker process."""
    from torch.utils.data import _utils

    _measure_this_worker(handle, positional[10] if len(positional) > 10 else named.get("worker_id", 0))
    loop: Any = original or _utils.worker._worker_loop
    guard.around(loop)(*positional, **named)


@guard.entry
def _measure_this_worker(handle: Any, worker_id: int) -> None:
    from torch.utils.data import dataloader

    fetchers: Any = dataloader._DatasetKind
    create = vars(fetchers)["create_fetcher"].__func__
    create = getattr(create, "__wrapped__", create)  # a forked process, whose parent measures too
    measured = guard.around(create, after=functools.partial(_measure_in_worker, handle, worker_id))
    fetchers.create_fetcher = staticmethod(measured)


@guard.entry
def _measure_in_worker(
    handle: Any, worker_id: int, _: None, fetcher: Any, kind: Any, dataset: Any, auto: Any, collate: Any, drop_last: Any
) -> None:
    with guard.attempt():  # a fetcher that differs from torch's own is not measured
        functions = stage_functions(dataset, collate)
        measure_fetcher(fetcher, functions, attach(handle, worker_id, len(functions)))


@guard.entry
def _fetcher_was_made(watch: InputWatch, _: None, fetcher: Any, *__: Any, **___: Any) -> None:
    pipeline = getattr(watch.local, "pipeline", None)
    if pipeline is not None:
        with guard.attempt():
            pipeline.measured = measure_fetcher(fetcher, pipeline.functions, pipeline.counters.row(0))


def measure_fetcher(fetcher: Any, functions: list[StageFunction], row: memoryview) -> list[StageFunction]:
    """Make a fetcher and its dataset's transforms count in this row; return the transforms."""
    kind: Any = type(fetcher)
    if not hasattr(fetcher, "collate_fn") or is_timed(fetcher.collate_fn):
        return []
    fetcher.collate_fn = Timed(fetcher.collate_fn, row, COLLATE, processor=True)
    fetcher._stepscope_row = row
    fetcher.__class__ = _measured_kind(kind)
    transforms = [each for each in enumerate(functions) if each[1].holder is not None]
    for stage, function in transforms:
        present = _get(function.holder, function.place)
        if not is_timed(present):
            _set(function.holder, function.place, Timed(present, row, stage))
    return [function for _, function in transforms]


@functools.cache
def _measured_kind(kind: Any) -> Any:
    """Return a subclass of the fetcher's class that counts the time of each batch."""

    class Measured(kind):  # type: ignore[misc]
        def fetch(self, index: Any) -> Any:
            started = fetch_begins(self._stepscope_row)
            items: Any = ()
            try:
                with guard.hidden:
                    batch = super().fetch(index)
                items = index if self.auto_collation else (index,)
                return batch
            finally:
                fetch_ended(self._stepscope_row, started, items)

    return Measured


@guard.entry
def _pinning_begins(watch: InputWatch, *_: Any, **__: Any) -> tuple[int, int] | None:
    # default_convert and default_collate call themselves for each part of a batch
    if getattr(watch.local, "pinning", False):
        return None
    watch.local.pinning = True
    return time.perf_counter_ns(), time.thread_time_ns()


@guard.entry
def _pinning_ends(watch: InputWatch, started: tuple[int, int] | None, *_: Any, **__: Any) -> None:
    if started is not None:
        watch.local.pinning = False
        watch.add("pin", "pin_memory", time.perf_counter_ns() - started[0], time.thread_time_ns() - started[1])


def _get(holder: Any, place: Any) -> Any:
    return holder[place] if type(holder) is list else attributes(holder)[place]


def _set(holder: Any, place: Any, value: Any) -> None:
    """Replace what is stored, without the program's `__setattr__`."""
    if type(holder) is list:
        holder[place] = value
    else:
        attributes(holder)[place] = value
