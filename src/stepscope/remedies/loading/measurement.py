"""One trial of a DataLoader: how long a step waits for its batch, once what was loaded ahead is used up."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import random
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset

from stepscope.remedies.loading.prefetch import moved, tensors_of

_MOST_BATCHES: Final = 64
_FEWEST_BATCHES: Final = 2
_FEWEST_AHEAD: Final = 4
OF_WORKERS: Final = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
"""Arguments that a DataLoader takes only with workers."""
_OF_THE_MACHINE: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EAGAIN)


@dataclass(frozen=True, slots=True)
class LoaderTrial:
    """What one loader did.

    Attributes:
        workers, prefetch_factor, pin_memory: its arguments; prefetch_factor is None without workers.
        start_ms: until the first batch came, with the start of the workers.
        batch_ms: how often batches came when nothing was done between them.
        wait_ms, longest_ms: how long a step waited for its batch and its copy to the device: the mean, and the longest.
        batches: how many waits were counted.
        epochs: how often the loader was begun; beyond one, beginning an epoch is in the waits, as in training.
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
        """Take one batch; begins again where the data set ends. Raises ValueError where there is none at all."""
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._iterator = iter(self._loader)
            self.epochs += 1
            batch = next(self._iterator, self)
            if batch is self:
                raise ValueError(
                    "the data set gives no batch: it is empty, or smaller than a batch with drop_last=True"
                ) from None
        if self._device is not None:
            moved(batch, self._device, self._pinned)

    def close(self) -> None:
        """End the workers now: an error's traceback would keep them."""
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
        seconds: how long to measure after the first batch; some batches more where they take longer.
        device: to which batches are copied; None leaves them where they are.

    Raises:
        RuntimeError: the data set fails; the cause is attached.
        ValueError: it gives no batch, or the DataLoader refuses the arguments.
    """
    workers = arguments["num_workers"]
    prefetch = arguments.get("prefetch_factor")
    trial = LoaderTrial(workers, prefetch, arguments["pin_memory"])
    loader = _loader(dataset, arguments)
    begin = time.perf_counter()
    with contextlib.ExitStack() as stack:
        try:
            batches = stack.enter_context(contextlib.closing(_started(loader, device, arguments)))
            batches.next()
            start = time.perf_counter() - begin
            each, waits = _measured(batches, step_ms / 1e3, seconds, workers * (prefetch or 0))
        except (ValueError, _Unsendable):
            raise
        except Exception as error:  # whatever the user's data set raises
            if workers and (problem := _of_the_machine(error, arguments)):
                return replace(trial, problem=problem)
            where = "in a worker" if workers else "on a batch"
            raise RuntimeError(f"the data set fails {where}: {_reason(error)}") from error
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
    """Seconds between batches that are taken at once, and the waits of the later half of the steps."""
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
    """Workers could not be started with this data set."""


def _loader(dataset: Dataset[Any], arguments: dict[str, Any]) -> DataLoader[Any]:
    """A DataLoader; that it has more workers than torch suggests is what the trial is about."""
    if not arguments["num_workers"]:
        arguments = {name: value for name, value in arguments.items() if name not in OF_WORKERS}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return DataLoader(dataset, **arguments)


def _started(loader: DataLoader[Any], device: torch.device | None, arguments: dict[str, Any]) -> _Batches:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            return _Batches(loader, device, arguments["pin_memory"])
    except Exception as error:  # whatever pickling the user's data set raises
        method = start_method(arguments)
        if arguments["num_workers"] and method != "fork" and _of_the_machine(error, arguments) is None:
            raise _Unsendable(
                f"the data set cannot be sent to workers, which are started by {method}: {_reason(error)}; define it, "
                "its transforms and collate_fn at the top level of a module, or pass multiprocessing_context='fork'"
            ) from error
        raise


def start_method(arguments: dict[str, Any]) -> str:
    """How a loader with these arguments starts its workers: fork, spawn or forkserver."""
    context = arguments.get("multiprocessing_context")
    if isinstance(context, str):
        return context
    return str((context or multiprocessing).get_start_method())


def _of_the_machine(error: BaseException, arguments: dict[str, Any]) -> str | None:
    """Why so many workers do not run here, where that and not the data set is the reason."""
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


def _reason(error: BaseException) -> str:
    """The error in one line; of a worker's, the last line of its traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "DataLoader worker process" in lines[0]:
        return lines[-1].strip()
    return f"{type(error).__name__}: {lines[0] if lines else 'without a message'}"


def workers_give_the_same(dataset: Dataset[Any], arguments: dict[str, Any]) -> bool:
    """Whether two workers of an iterable data set begin with equal batches: it is not divided among them."""
    loader = _loader(dataset, {**arguments, "num_workers": 2, "prefetch_factor": 1})
    iterator = iter(loader)
    try:
        first, second = next(iterator, None), next(iterator, None)
    except Exception as error:  # whatever the user's data set raises
        raise RuntimeError(f"the data set fails in a worker: {_reason(error)}") from error
    finally:
        _end_workers(iterator)
    one, two = list(tensors_of(first)), list(tensors_of(second))
    return bool(one) and len(one) == len(two) and all(torch.equal(*pair) for pair in zip(one, two, strict=True))


@contextlib.contextmanager
def unchanged_random_state(arguments: dict[str, Any]) -> Iterator[None]:
    """Put the generators that loading draws from back: torch's, Python's, numpy's and those of the arguments."""
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
