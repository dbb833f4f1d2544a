"""Find the DataLoader arguments that hide the input behind the step, by trying them.

choice = tune_loader(dataset, step_ms=42.0, batch_size=64, shuffle=True)
print(choice)                                  # every trial, and what it measured
loader = choice.loader()                       # or DataLoader(dataset, **choice.arguments)
"""

from __future__ import annotations

import contextlib
import errno
import math
import multiprocessing
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stepscope.remedies.attempts import Attempt
from stepscope.remedies.loading.prefetch import moved, tensors_of
from stepscope.remedies.settings import check_whole, default_device, usable_processors

_MOST_BATCHES: Final = 64
_FEWEST_BATCHES: Final = 2
_FEWEST_AHEAD: Final = 4
OF_WORKERS: Final = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
"""Arguments that a DataLoader takes only with workers."""
_OF_THE_MACHINE: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EAGAIN)


@dataclass(frozen=True, slots=True)
class LoaderTrial:
    """One loader's measurements.

    Attributes:
        prefetch_factor: None without workers.
        start_ms: time to the first batch, including the start of the workers.
        batch_ms: time between batches taken without pause.
        wait_ms, longest_ms: mean and longest time a step waited for its batch and its copy to the device.
        batches: number of waits counted.
        epochs: how often the loader was started; above 1, the waits include starting an epoch, as in training.
        problem: why it could not be measured, in one sentence.
    """

    workers: int
    prefetch_factor: int | None
    pin_memory: bool
    start_ms: float = 0.0
    batch_ms: float = 0.0
    wait_ms: float = 0.0
    longest_ms: float = 0.0
    batches: int = 0
    epochs: int = 1
    problem: str | None = None


class _Batches:
    """Batches of a loader, epoch after epoch, each on the device."""

    def __init__(self, loader: DataLoader[Any], device: torch.device | None, pinned: bool) -> None:
        self._loader, self._device, self._pinned = loader, device, pinned
        self._iterator: Any = iter(loader)
        self.epochs = 1

    def next(self) -> None:
        """Take one batch; begins again at the end of the data set. Raises ValueError for an empty one."""
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._iterator = iter(self._loader)
            self.epochs += 1
            batch = next(self._iterator, self)
            if batch is self:
                raise ValueError(
                    "the data set yields no batch: it is empty, or smaller than a batch with drop_last=True"
                ) from None
        if self._device is not None:
            moved(batch, self._device, self._pinned)

    def close(self) -> None:
        """End the workers now: an error's traceback would keep them alive."""
        _end_workers(self._iterator)
        self._iterator = None


def _end_workers(iterator: Any) -> None:
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()


def measure_loader(
    dataset: Dataset[Any], step_ms: float, arguments: dict[str, Any], seconds: float, device: torch.device | None
) -> LoaderTrial:
    """Start a loader, take its batches as training would, and end it.

    Args:
        step_ms: how long each step sleeps.
        seconds: how long to measure after the first batch; longer if that gives too few batches.
        device: where batches are copied; None leaves them where they are.

    Raises:
        RuntimeError: the data set fails; the cause is attached.
        ValueError: it yields no batch, or the DataLoader refuses the arguments.
    """
    workers = arguments["num_workers"]
    prefetch = arguments.get("prefetch_factor")
    trial = LoaderTrial(workers, prefetch, arguments["pin_memory"])
    loader = _loader(dataset, arguments)
    begin = time.perf_counter()
    with Attempt() as measuring, contextlib.ExitStack() as stack:
        batches = stack.enter_context(contextlib.closing(_started(loader, device, arguments)))
        batches.next()
        start = time.perf_counter() - begin
        each, waits = _measured(batches, step_ms / 1e3, seconds, workers * (prefetch or 0))
    error = measuring.error
    if isinstance(error, (ValueError, _Unsendable)):
        raise error
    if error is not None and workers and (problem := _why_machine_cannot(error, arguments)):
        return replace(trial, problem=problem)
    _blame_data_set(error, "in a worker" if workers else "on a batch")
    return replace(
        trial,
        start_ms=start * 1e3,
        batch_ms=each * 1e3,
        wait_ms=sum(waits) / len(waits) * 1e3,
        longest_ms=max(waits) * 1e3,
        batches=len(waits),
        epochs=batches.epochs,
    )


def _measured(batches: _Batches, step: float, seconds: float, ahead: int) -> tuple[float, list[float]]:
    """Seconds per batch taken without pause, and the waits of the later half of the steps."""
    begin = time.perf_counter()
    taken = 0
    while taken < max(ahead, _FEWEST_AHEAD) and (not taken or time.perf_counter() - begin < seconds / 2):
        batches.next()
        taken += 1
    each = (time.perf_counter() - begin) / taken
    waits: list[float] = []
    while len(waits) < _MOST_BATCHES and (len(waits) < _FEWEST_BATCHES or time.perf_counter() - begin < seconds):
        time.sleep(step)
        asked = time.perf_counter()
        batches.next()
        waits.append(time.perf_counter() - asked)
    return each, waits[len(waits) // 2 :]


class _Unsendable(RuntimeError):
    """The data set cannot be sent to workers."""


def _loader(dataset: Dataset[Any], arguments: dict[str, Any]) -> DataLoader[Any]:
    """A DataLoader; torch's warning about too many workers is silenced, because the trial tests that."""
    if not arguments["num_workers"]:
        arguments = {name: value for name, value in arguments.items() if name not in OF_WORKERS}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return DataLoader(dataset, **arguments)


def _started(loader: DataLoader[Any], device: torch.device | None, arguments: dict[str, Any]) -> _Batches:
    with Attempt() as starting, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return _Batches(loader, device, arguments["pin_memory"])
    error, method = starting.error, start_method(arguments)
    assert error is not None
    if arguments["num_workers"] and method != "fork" and _why_machine_cannot(error, arguments) is None:
        raise _Unsendable(
            f"the data set cannot be sent to workers, which are started by {method}: {_reason(error)}; define it, "
            "its transforms and collate_fn at the top level of a module, or pass multiprocessing_context='fork'"
        ) from error
    raise error


def start_method(arguments: dict[str, Any]) -> str:
    """How a loader with these arguments starts its workers: fork, spawn or forkserver."""
    context = arguments.get("multiprocessing_context")
    if isinstance(context, str):
        return context
    return str((context or multiprocessing).get_start_method())


def _why_machine_cannot(error: BaseException, arguments: dict[str, Any]) -> str | None:
    """Why this many workers cannot run here, if the machine and not the data set is the reason."""
    text = str(error)
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        return f"the system refused workers: {error.strerror}"
    if "timed out after" in text:
        return "no batch came within the time that was left"
    if "exited unexpectedly" in text or "is killed by signal" in text:
        method = start_method(arguments)
        why = f"workers are started by {method}: a script needs `if __name__ == '__main__':`, and what the data set "
        why = "memory or /dev/shm may be short" if method == "fork" else f"{why}holds must be importable"
        return f"a worker ended ({text.splitlines()[0].rstrip('.')}): {why}"
    return None


def _blame_data_set(error: BaseException | None, where: str) -> None:
    if error is not None:
        raise RuntimeError(f"the data set fails {where}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The error in one line; for a worker's error, the last line of its traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "DataLoader worker process" in lines[0]:
        return lines[-1].strip()
    return f"{type(error).__name__}: {lines[0] if lines else 'without a message'}"


def workers_give_the_same(dataset: Dataset[Any], arguments: dict[str, Any]) -> bool:
    """Whether two workers of an iterable data set begin with equal batches, so that it is not sharded."""
    loader = _loader(dataset, {**arguments, "num_workers": 2, "prefetch_factor": 1})
    iterator = iter(loader)
    try:
        with Attempt() as taking:
            first, second = next(iterator, None), next(iterator, None)
    finally:
        _end_workers(iterator)
    _blame_data_set(taking.error, "in a worker")
    one, two = list(tensors_of(first)), list(tensors_of(second))
    return bool(one) and len(one) == len(two) and all(torch.equal(*pair) for pair in zip(one, two, strict=True))


@contextlib.contextmanager
def unchanged_random_state(arguments: dict[str, Any]) -> Iterator[None]:
    """Restore the generators that loading draws from: torch's, Python's, numpy's and those of the arguments."""
    owned = [getattr(arguments.get(name), "generator", None) for name in ("sampler", "batch_sampler")]
    owned.append(arguments.get("generator"))
    generators = [(one, one.get_state()) for one in owned if isinstance(one, torch.Generator)]
    numpy = sys.modules.get("numpy")
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy is not None:
            numpy.random.set_state(before[2])
        for generator, state in generators:
            generator.set_state(state)


_FOUND_HERE: Final = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
_PREFETCH: Final = 2
"""The DataLoader's default."""
_MORE_PREFETCH: Final = (4, 8)
_HIDDEN_SHARE: Final = 0.05
_BETTER: Final = 0.75
"""A trial beats another one if its wait is below this share of the other's."""
_TRIALS_PER_BUDGET: Final = 8
_SHORTEST_TIMEOUT_S: Final = 5.0
_HEADER: Final = (
    f"{'workers':>7} {'prefetch':>8} {'pinned':>6} {'start, ms':>10} {'batch, ms':>10} {'wait, ms':>9} {'longest':>8}"
)


@dataclass(frozen=True, slots=True)
class LoaderChoice:
    """The result of `tune_loader`; as text, the table of all trials.

    Attributes:
        arguments: for `DataLoader(dataset, **arguments)`: the user's own, and those that were found.
        trials: in order.
        chosen: the trial with these arguments.
        step_ms: the given duration of a step without input.
        hidden: whether the remaining wait is at most 5 % of the step.
        notes: remarks, in sentences.
    """

    dataset: Dataset[Any]
    arguments: dict[str, Any]
    trials: tuple[LoaderTrial, ...]
    chosen: LoaderTrial
    step_ms: float
    hidden: bool
    notes: tuple[str, ...] = ()

    def loader(self, **changes: Any) -> DataLoader[Any]:
        """Make a new DataLoader with these arguments; `changes` override them."""
        return DataLoader(self.dataset, **{**self.arguments, **changes})

    def __str__(self) -> str:
        rows = [f"{_row(trial)}{'  <- chosen' if trial is self.chosen else ''}" for trial in self.trials]
        hidden = "the input is hidden" if self.hidden else "the input is not hidden"
        last = f"A step of {self.step_ms:g} ms waits {self.chosen.wait_ms:.2f} ms for its batch: {hidden}."
        return "\n".join([_HEADER, *rows, last, *self.notes])


@dataclass(slots=True)
class _Search:
    dataset: Dataset[Any]
    step_ms: float
    arguments: dict[str, Any]
    device: torch.device | None
    most: int
    budget_s: float
    report: Callable[[str], object] | None
    started: float = field(default_factory=time.monotonic)
    trials: list[LoaderTrial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(self, workers: int, prefetch: int = _PREFETCH, pinned: bool | None = None) -> LoaderTrial:
        """Measure these arguments, and keep the trial."""
        arguments = self.arguments | {"num_workers": workers}
        arguments["pin_memory"] = self.device is not None if pinned is None else pinned
        if workers:
            arguments |= {"prefetch_factor": prefetch, "persistent_workers": True}
            # A data set that blocks must not block the search.
            arguments["timeout"] = arguments.get("timeout") or max(self.left_s, _SHORTEST_TIMEOUT_S)
        seconds = self.budget_s / _TRIALS_PER_BUDGET
        trial = measure_loader(self.dataset, self.step_ms, arguments, seconds, self.device)
        self.trials.append(trial)
        if self.report is not None:
            self.report(_row(trial))
        return trial

    @property
    def left_s(self) -> float:
        return self.started + self.budget_s - time.monotonic()

    @property
    def over(self) -> bool:
        """Whether less time is left than the workers of the last trial took to start."""
        return self.left_s <= max(self.trials[-1].start_ms / 1e3, 0.0)

    def hides(self, trial: LoaderTrial) -> bool:
        return trial.problem is None and trial.wait_ms <= _HIDDEN_SHARE * self.step_ms

    def best(self) -> LoaderTrial | None:
        """The cheapest trial that hides the input, or else the cheapest whose wait is close to the shortest."""
        tried = [trial for trial in self.trials if trial.problem is None]
        least = min((trial.wait_ms for trial in tried), default=0.0)
        good = [trial for trial in tried if self.hides(trial)] or [t for t in tried if t.wait_ms * _BETTER <= least]
        return min(good, key=lambda trial: (trial.workers, trial.prefetch_factor or 0, trial.wait_ms), default=None)


def tune_loader(
    dataset: Dataset[Any],
    step_ms: float,
    *,
    batch_size: int | None = 1,
    budget_s: float = 20.0,
    most_workers: int | None = None,
    device: torch.device | str | None = None,
    report: Callable[[str], object] | None = None,
    **loader_arguments: Any,
) -> LoaderChoice:
    """Find num_workers, prefetch_factor, pin_memory and persistent_workers by starting loaders and measuring them.

    Each trial starts a DataLoader and takes batches from it as training would: it waits for a batch, copies it to the
    accelerator if there is one, and sleeps `step_ms`. The measure is the mean wait for a batch (and its copy), once the
    batches that were loaded ahead at the start are used up. The first trial has one worker and shows what a batch
    costs; then come as many workers as that needs, and more, until the wait is at most 5 % of the step, more do not
    help, the processors are used up, or the budget ends. No worker at all is tried if batches are cheap. More batches
    are prefetched if they come fast enough on average. The trials leave the random state as it was.

    Args:
        dataset: a map-style or iterable data set. Its samples are really loaded, several times.
        step_ms: duration of a step without the input, in milliseconds.
        batch_size: of the DataLoader; None if `batch_sampler` is given.
        budget_s: begin no further trial after this many seconds; the current one is finished.
        most_workers: try no more; by default the processors that this process may use, divided by LOCAL_WORLD_SIZE.
        device: where batches are copied; by default the current accelerator. With "cpu" nothing is copied or pinned.
        report: called with a line for each trial, such as `print`.
        loader_arguments: everything else for the DataLoader: shuffle, collate_fn, multiprocessing_context, ...

    Raises:
        ValueError, TypeError: an argument cannot be used, or the data set yields no batch.
        RuntimeError: the data set fails, or cannot be sent to workers; the cause is attached.
    """
    arguments = _arguments(dataset, step_ms, batch_size, budget_s, most_workers, loader_arguments)
    target = default_device() if device is None else torch.device(device)
    most = _processors_of_rank() if most_workers is None else most_workers
    place = None if target.type == "cpu" else target
    search = _Search(dataset, step_ms, arguments, place, most, budget_s, report)
    with unchanged_random_state(arguments):
        _try_workers(search)
        _try_prefetch(search)
        _try_pinning(search)
    return _choice(search)


def _try_workers(search: _Search) -> None:
    """Try one worker, as many as its batches need, then more; none if batches are cheap or workers do not help."""
    if search.most and isinstance(search.dataset, IterableDataset):
        _look_at_sharding(search)
    before = search.run(1) if search.most else None
    # Only then: a data set that opens files at its first sample is better not used in this process.
    if (before is None or _is_cheap(search, before)) and search.hides(search.run(0)):
        return
    if before is None or before.problem or search.hides(before):
        return
    for workers in _counts(math.ceil(before.batch_ms / search.step_ms), search.most):
        if search.over:
            search.notes.append(f"The budget of {search.budget_s:g} s ended before {workers} workers were tried.")
            return
        trial = search.run(workers)
        if trial.problem or search.hides(trial) or trial.wait_ms > _BETTER * before.wait_ms:
            return
        before = trial


def _is_cheap(search: _Search, one: LoaderTrial) -> bool:
    """Whether making a batch in this process may cost no more than receiving it from a worker."""
    if one.problem or one.batch_ms <= 2 * _HIDDEN_SHARE * search.step_ms:
        return True
    return one.batch_ms <= search.step_ms and not search.hides(one)


def _counts(needed: int, most: int) -> list[int]:
    """Numbers of workers from two on, in the order of the trials: what is needed, one more, then doubling."""
    numbers = {min(max(needed, 2), most), min(max(needed, 2) + 1, most), most}
    number = 2 * max(needed, 2)
    while number < most:
        numbers.add(number)
        number *= 2
    return sorted(numbers - {0, 1})


def _look_at_sharding(search: _Search) -> None:
    """Note if an iterable data set is not sharded among workers: each gets a copy of it."""
    if search.most < 2:
        return
    if workers_give_the_same(search.dataset, search.arguments):
        search.most = 1
        search.notes.append(
            "The data set is iterable, and two workers begin with the same batch: with several workers every sample "
            "would come several times. Let each take its part in __iter__, by torch.utils.data.get_worker_info(), and "
            "try again."
        )
    else:
        search.notes.append(
            "The data set is iterable: every worker iterates over a copy of it. Two workers begin with different "
            "batches; whether they divide all samples among them cannot be seen from that."
        )


def _try_prefetch(search: _Search) -> None:
    """Try more prefetching if workers are fast enough on average and still waited for."""
    best = search.best()
    if best is None or not best.workers or search.hides(best) or best.batch_ms > search.step_ms:
        return
    if best.longest_ms < 2 * best.wait_ms:
        return  # equal waits for every batch are the time to receive it; it did not come late
    for prefetch in _MORE_PREFETCH:
        if search.over or search.hides(search.run(best.workers, prefetch)):
            return


def _try_pinning(search: _Search) -> None:
    """Try pageable memory, too, if batches go to a device: pinning pays only if their copies are waited for."""
    best = search.best()
    if best is not None and search.device is not None and not search.over:
        search.run(best.workers, best.prefetch_factor or _PREFETCH, pinned=False)


def _choice(search: _Search) -> LoaderChoice:
    best = search.best()
    if best is None:
        raise RuntimeError(next(trial.problem for trial in search.trials if trial.problem))
    arguments = search.arguments | {"num_workers": best.workers, "pin_memory": best.pin_memory}
    if best.workers:
        arguments |= {"prefetch_factor": best.prefetch_factor, "persistent_workers": True}
    else:
        arguments = {name: value for name, value in arguments.items() if name not in OF_WORKERS}
    notes = (*search.notes, *_what_is_left(search, best))
    hidden = search.hides(best)
    return LoaderChoice(search.dataset, arguments, tuple(search.trials), best, search.step_ms, hidden, notes)


def _what_is_left(search: _Search, best: LoaderTrial) -> Iterator[str]:
    """The causes of the remaining wait, in sentences."""
    if best.epochs > 1:
        yield "The data set is shorter than a trial: the waits include starting an epoch."
    if search.hides(best):
        return
    if best.workers and best.batch_ms <= search.step_ms:
        yield (
            f"Batches come faster (every {best.batch_ms:.2f} ms) than they are used: what is left is the time to "
            "receive one from a worker. Fewer and larger tensors in a batch take less."
        )
        return
    workers = math.ceil(best.batch_ms * max(best.workers, 1) / search.step_ms)
    yield (
        f"Batches come every {best.batch_ms:.2f} ms at most; at that rate it takes about {workers} "
        f"{'workers, each with a processor' if workers > 1 else 'worker'}. Or make them cheaper: cache what is the "
        "same in every epoch, or prepare it beforehand."
    )


def _row(trial: LoaderTrial) -> str:
    prefetch = "-" if trial.prefetch_factor is None else str(trial.prefetch_factor)
    begin = f"{trial.workers:>7} {prefetch:>8} {'yes' if trial.pin_memory else 'no':>6}"
    if trial.problem:
        return f"{begin} {trial.problem}"
    return f"{begin} {trial.start_ms:>10.1f} {trial.batch_ms:>10.2f} {trial.wait_ms:>9.2f} {trial.longest_ms:>8.2f}"


def _arguments(
    dataset: Any,
    step_ms: float,
    batch_size: int | None,
    budget_s: float,
    most_workers: int | None,
    others: dict[str, Any],
) -> dict[str, Any]:
    """Check all arguments; return those of the DataLoader."""
    if isinstance(dataset, DataLoader):
        raise TypeError("tune_loader takes the data set, not a loader of it: pass loader.dataset and its arguments")
    for name, number in (("step_ms", step_ms), ("budget_s", budget_s)):
        if not (isinstance(number, (int, float)) and math.isfinite(number) and number > 0):
            raise ValueError(f"{name} is {number!r}; it takes a number above 0")
    if most_workers is not None:
        check_whole("most_workers", most_workers, 0)
    found = [name for name in _FOUND_HERE if name in others]
    if found:
        raise ValueError(f"{', '.join(found)} is what tune_loader finds: leave it out")
    if others.get("batch_sampler") is not None:
        return others
    return {"batch_size": batch_size, **others}


def _processors_of_rank() -> int:
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(usable_processors() // (int(ranks) if ranks.isdecimal() and int(ranks) else 1), 1)
