"""Finding a DataLoader's arguments by trial: real loaders for what a user meets, computed trials for the search."""

from __future__ import annotations

import math
import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from stepscope.remedies.loading import trials
from stepscope.remedies.loading.trials import LoaderTrial, tune_loader

pytestmark = pytest.mark.filterwarnings("ignore:Got pickle error when attempting")


class Numbers(Dataset[torch.Tensor]):
    """The numbers from 0 on; one of them may be broken, or drawn."""

    def __init__(self, length: int, broken: int | None = None, drawn: bool = False) -> None:
        self.length, self.broken, self.drawn = length, broken, drawn

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.broken:
            raise LookupError(f"there is no sample {index}")
        if self.drawn:
            random.random()
            torch.rand(1)
        return torch.tensor(float(index))


class Stream(IterableDataset[torch.Tensor]):
    """The numbers from 0 on, all of them from each worker, or each worker's part."""

    def __init__(self, divided: bool) -> None:
        self.divided = divided

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        begin, step = (worker.id, worker.num_workers) if self.divided and worker is not None else (0, 1)
        return (torch.tensor(number) for number in range(begin, 100_000, step))


class SimulatedLoader:
    """What loaders do whose batches take `batch_ms` in a worker and `receive_ms` to receive, in place of real ones."""

    def __init__(
        self, batch_ms: float, receive_ms: float = 0.0, longest: float = 1.0, prefetch: int = 2, start_ms: float = 1.0
    ) -> None:
        self.batch_ms, self.receive_ms, self.longest = batch_ms, receive_ms, longest
        self.prefetch, self.start_ms = prefetch, start_ms

    def __call__(
        self, dataset: object, step_ms: float, arguments: dict[str, Any], seconds: float, device: object
    ) -> LoaderTrial:
        workers, prefetch = arguments["num_workers"], arguments.get("prefetch_factor")
        each = self.batch_ms / workers + self.receive_ms if workers else self.batch_ms
        wait = max(each - step_ms, self.receive_ms) if workers else self.batch_ms
        if workers and prefetch >= self.prefetch:
            wait = wait if each > step_ms else self.receive_ms
        elif workers:
            wait += 1.0
        return LoaderTrial(
            workers, prefetch, arguments["pin_memory"], self.start_ms, each, wait, wait * self.longest, 10
        )


def simulated(monkeypatch: pytest.MonkeyPatch, loader: SimulatedLoader, step_ms: float, most: int) -> Any:
    monkeypatch.setattr(trials, "measure_loader", loader)
    return tune_loader(Numbers(10), step_ms, batch_size=4, most_workers=most, device="cpu")


def test_as_many_workers_as_the_batches_need(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = simulated(monkeypatch, SimulatedLoader(batch_ms=35), step_ms=10, most=16)

    assert [trial.workers for trial in choice.trials] == [1, 4]
    assert choice.hidden
    assert choice.arguments == {
        "batch_size": 4,
        "num_workers": 4,
        "prefetch_factor": 2,
        "persistent_workers": True,
        "pin_memory": False,
    }


def test_cheap_batches_need_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = simulated(monkeypatch, SimulatedLoader(batch_ms=0.4), step_ms=10, most=16)

    assert [trial.workers for trial in choice.trials] == [1, 0]
    assert choice.arguments == {"batch_size": 4, "num_workers": 0, "pin_memory": False}


def test_a_worker_is_not_used_where_receiving_costs_more_than_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = simulated(monkeypatch, SimulatedLoader(batch_ms=1.5, receive_ms=3.0), step_ms=10, most=4)

    assert choice.chosen.workers == 0
    assert not choice.hidden


def test_the_search_ends_with_the_processors_and_says_what_it_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = simulated(monkeypatch, SimulatedLoader(batch_ms=100), step_ms=10, most=4)

    assert [trial.workers for trial in choice.trials] == [1, 4]
    assert choice.notes == (
        "Batches come every 25.00 ms at most; at that rate it takes about 10 workers, each with a processor. Or make "
        "them cheaper: cache what is the same in every epoch, or prepare it beforehand.",
    )


def test_more_workers_that_do_not_help_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = simulated(monkeypatch, SimulatedLoader(batch_ms=12, receive_ms=1.0), step_ms=10, most=16)

    assert [trial.workers for trial in choice.trials] == [1, 2, 3]
    assert choice.chosen.workers == 2
    assert choice.notes[0].startswith(
        "Batches come faster (every 7.00 ms) than they are used: what is left is the time"
    )


def test_more_is_loaded_ahead_where_some_batches_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = SimulatedLoader(batch_ms=9, longest=5.0, prefetch=4)
    choice = simulated(monkeypatch, loader, step_ms=10, most=1)

    assert [(trial.workers, trial.prefetch_factor) for trial in choice.trials] == [(1, 2), (0, None), (1, 4)]
    assert choice.arguments["prefetch_factor"] == 4
    assert choice.hidden


def test_memory_that_is_not_pinned_is_tried_beside_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "measure_loader", SimulatedLoader(batch_ms=35))
    choice = tune_loader(Numbers(10), 10, batch_size=4, most_workers=8, device="cuda")

    assert [(trial.workers, trial.pin_memory) for trial in choice.trials] == [(1, True), (4, True), (4, False)]


def test_no_trial_begins_whose_workers_would_not_start_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "measure_loader", SimulatedLoader(batch_ms=100, start_ms=6000))

    choice = tune_loader(Numbers(10), 10, budget_s=5, most_workers=4, device="cpu")

    assert [trial.workers for trial in choice.trials] == [1]
    assert choice.notes[0] == "The budget of 5 s ended before 4 workers were tried."


def test_a_real_search_and_its_table() -> None:
    lines: list[str] = []
    choice = tune_loader(
        Numbers(1000), 1000.0 / 4, batch_size=2, budget_s=0.1, most_workers=1, device="cpu", report=lines.append
    )

    table = str(choice).splitlines()
    assert table[0].split() == [
        "workers",
        "prefetch",
        "pinned",
        "start,",
        "ms",
        "batch,",
        "ms",
        "wait,",
        "ms",
        "longest",
    ]
    assert len(lines) == len(choice.trials)
    assert [line for line in table if line.endswith("<- chosen")] != []
    assert all(trial.batches >= 1 and math.isfinite(trial.wait_ms) for trial in choice.trials)
    loader = choice.loader(shuffle=False)
    assert isinstance(loader, DataLoader)
    assert loader.batch_size == 2
    assert loader.num_workers == choice.chosen.workers
    assert multiprocessing.active_children() == []


def test_the_random_state_stays_as_it_was() -> None:
    generator = torch.Generator().manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), generator.get_state()

    tune_loader(
        Numbers(8, drawn=True), 1.0, budget_s=0.01, most_workers=0, device="cpu", shuffle=True, generator=generator
    )

    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.equal(generator.get_state(), before[2])


def test_a_data_set_shorter_than_a_trial_begins_again() -> None:
    choice = tune_loader(Numbers(3), 1.0, batch_size=2, budget_s=0.05, most_workers=0, device="cpu")

    assert choice.chosen.epochs > 1
    assert "The data set is shorter than a trial: the waits include starting an epoch." in choice.notes


@pytest.mark.parametrize("arguments", [{}, {"batch_size": 8, "drop_last": True}])
def test_a_data_set_without_a_batch(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the data set yields no batch"):
        tune_loader(
            Numbers(3 if arguments else 0),
            1.0,
            most_workers=1,
            device="cpu",
            sampler=range(3 if arguments else 0),
            **arguments,
        )


@pytest.mark.parametrize(("workers", "where"), [(0, "on a batch"), (1, "in a worker")])
def test_a_sample_that_fails_is_told_with_its_cause(workers: int, where: str) -> None:
    with pytest.raises(
        RuntimeError, match=f"^the data set fails {where}: LookupError: .*there is no sample 1"
    ) as caught:
        tune_loader(Numbers(20, broken=1), 1.0, most_workers=workers, device="cpu")

    assert isinstance(caught.value.__cause__, LookupError)
    assert multiprocessing.active_children() == []


def test_a_data_set_that_spawned_workers_cannot_get() -> None:
    class Local(Numbers):
        pass

    with pytest.raises(
        RuntimeError, match=r"cannot be sent to workers, which are started by spawn: .*Local.*; define it"
    ):
        tune_loader(Local(20), 1.0, most_workers=1, device="cpu", multiprocessing_context="spawn")

    assert multiprocessing.active_children() == []


def test_an_iterable_data_set_that_is_not_divided_gets_one_worker() -> None:
    choice = tune_loader(Stream(divided=False), 1.0, batch_size=4, budget_s=0.05, most_workers=4, device="cpu")

    assert choice.chosen.workers <= 1
    assert "two workers begin with the same batch" in choice.notes[0]


def test_an_iterable_data_set_that_is_divided() -> None:
    choice = tune_loader(Stream(divided=True), 1.0, batch_size=4, budget_s=0.05, most_workers=2, device="cpu")

    assert "Two workers begin with different batches" in choice.notes[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step_ms": 0}, "step_ms is 0; it takes a number above 0"),
        ({"step_ms": math.nan}, "step_ms is nan"),
        ({"budget_s": -1}, "budget_s is -1"),
        ({"most_workers": -1}, "most_workers is -1; it takes a whole number from 0 on"),
        ({"num_workers": 4}, "num_workers is what tune_loader finds: leave it out"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune_loader(Numbers(10), **{"step_ms": 1.0, **arguments})


def test_a_loader_is_no_data_set() -> None:
    with pytest.raises(TypeError, match=r"pass loader\.dataset"):
        tune_loader(DataLoader(Numbers(10)), 1.0)  # type: ignore[arg-type]
