"""The arguments of a DataLoader that hide the input behind the step, found by trying them.

choice = tune_loader(dataset, step_ms=42.0, batch_size=64, shuffle=True)
print(choice)                                  # every trial, and what it measured
loader = choice.loader()                       # or DataLoader(dataset, **choice.arguments)
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stepscope.remedies.host_settings import check_whole, default_device, usable_processors
from stepscope.remedies.loading.measurement import (
    OF_WORKERS,
    LoaderTrial,
    measure_loader,
    unchanged_random_state,
    workers_give_the_same,
)

_FOUND_HERE: Final = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
_PREFETCH: Final = 2
"""The DataLoader's own."""
_MORE_PREFETCH: Final = (4, 8)
_HIDDEN_SHARE: Final = 0.05
_BETTER: Final = 0.75
"""A trial is better than another one if it leaves less than this share of its wait."""
_TRIALS_PER_BUDGET: Final = 8
_SHORTEST_TIMEOUT_S: Final = 5.0
_HEADER: Final = (
    f"{'workers':>7} {'prefetch':>8} {'pinned':>6} {'start, ms':>10} {'batch, ms':>10} {'wait, ms':>9} {'longest':>8}"
)


@dataclass(frozen=True, slots=True)
class LoaderChoice:
    """What `tune_loader` found; as text, the table of all trials.

    Attributes:
        dataset: what was loaded.
        arguments: for `DataLoader(dataset, **arguments)`: the user's own, and those that were found.
        trials: everything that was tried, in order.
        chosen: the trial with these arguments.
        step_ms: what a step was said to take besides.
        hidden: whether the wait that is left is at most 5 % of the step.
        notes: what else there is to know, in sentences.
    """

    dataset: Dataset[Any]
    arguments: dict[str, Any]
    trials: tuple[LoaderTrial, ...]
    chosen: LoaderTrial
    step_ms: float
    hidden: bool
    notes: tuple[str, ...] = ()

    def loader(self, **changes: Any) -> DataLoader[Any]:
        """A new DataLoader with these arguments; `changes` come before them."""
        return DataLoader(self.dataset, **{**self.arguments, **changes})

    def __str__(self) -> str:
        rows = [f"{_row(trial)}{'  <- chosen' if trial is self.chosen else ''}" for trial in self.trials]
        hidden = "the input is hidden" if self.hidden else "the input is not hidden"
        last = f"A step of {self.step_ms:g} ms waits {self.chosen.wait_ms:.2f} ms for its batch: {hidden}."
        return "\n".join([_HEADER, *rows, last, *self.notes])


@dataclass(slots=True)
class _Search:
    """One search: what it may use, and what it has tried."""

    dataset: Dataset[Any]
    step_ms: float
    arguments: dict[str, Any]
    device: torch.device | None
    most: int
    budget_s: float
    report: Callable[[str], object] | None
    begun: float = field(default_factory=time.monotonic)
    trials: list[LoaderTrial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(self, workers: int, prefetch: int = _PREFETCH, pinned: bool | None = None) -> LoaderTrial:
        """Measure these, and keep the trial."""
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
        return self.begun + self.budget_s - time.monotonic()

    @property
    def over(self) -> bool:
        """Whether what is left is less than what the workers of the last trial took to start."""
        return self.left_s <= max(self.trials[-1].start_ms / 1e3, 0.0)

    def hides(self, trial: LoaderTrial) -> bool:
        return trial.problem is None and trial.wait_ms <= _HIDDEN_SHARE * self.step_ms

    def best(self) -> LoaderTrial | None:
        """The cheapest that hides the input, or else the cheapest of those that leave hardly more of it than any."""
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
    accelerator if there is one, and sleeps `step_ms`. What counts is the mean time that a batch is waited for (and
    copied), once the batches that were loaded ahead at the start are used up. One worker comes first and tells what a
    batch costs; then as many as that needs, and more, until the wait is at most 5 % of the step, more do not help, the
    processors are used up, or the budget ends. No worker at all is tried where batches are cheap. More is loaded ahead
    where batches come fast enough on average. The trials leave the random state as it was.

    Args:
        dataset: a map-style or iterable data set. Its samples are really loaded, several times.
        step_ms: what a step takes without the input, in milliseconds.
        batch_size: of the DataLoader; None where `batch_sampler` is given.
        budget_s: begin no further trial after this many seconds; the one that runs is finished.
        most_workers: try no more; by default the processors that this process may use, divided by LOCAL_WORLD_SIZE.
        device: to which batches are copied; by default the current accelerator. With "cpu" nothing is copied or pinned.
        report: called with a line for each trial, such as `print`.
        loader_arguments: everything else for the DataLoader: shuffle, collate_fn, multiprocessing_context, ...

    Raises:
        ValueError, TypeError: an argument cannot be used, or the data set gives no batch.
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
    """One worker, as many as its batches need, then more; none where batches are cheap or workers do not help."""
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
    """Whether batches may cost no more in this process than to receive them from the one worker that made them."""
    if one.problem or one.batch_ms <= 2 * _HIDDEN_SHARE * search.step_ms:
        return True
    return one.batch_ms <= search.step_ms and not search.hides(one)


def _counts(needed: int, most: int) -> list[int]:
    """Numbers of workers from two on, in the order of the trials: what is needed, one more, then twice as many."""
    numbers = {min(max(needed, 2), most), min(max(needed, 2) + 1, most), most}
    number = 2 * max(needed, 2)
    while number < most:
        numbers.add(number)
        number *= 2
    return sorted(numbers - {0, 1})


def _look_at_sharding(search: _Search) -> None:
    """Whether an iterable data set divides itself among workers: each gets a copy of it."""
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
    """More batches ahead, where workers are fast enough on average and still waited for."""
    best = search.best()
    if best is None or not best.workers or search.hides(best) or best.batch_ms > search.step_ms:
        return
    if best.longest_ms < 2 * best.wait_ms:
        return  # every batch is waited for alike: that is the time to receive it, and not that it came late
    for prefetch in _MORE_PREFETCH:
        if search.over or search.hides(search.run(best.workers, prefetch)):
            return


def _try_pinning(search: _Search) -> None:
    """Pageable memory, too, where batches go to a device: pinning is worth it where their copies are waited for."""
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
    """Where the wait that is left comes from, in sentences."""
    if best.epochs > 1:
        yield "The data set is shorter than a trial: beginning an epoch is in the waits."
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
    """Those of the DataLoader, after a look at all."""
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
