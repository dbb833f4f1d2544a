"""How long the stages of input pipelines take, here and in workers."""

from __future__ import annotations

import copy
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from stepscope.record.input_functions import Timed, is_timed
from stepscope.record.input_stages import InputWatch
from stepscope.trace.naming import is_stepscope_file
from stepscope.trace.program_facts import InputStageFacts

torch = pytest.importorskip("torch")
data = torch.utils.data

WAIT_S = 0.002


def brighter(value: float) -> float:
    time.sleep(WAIT_S)
    return value + 1


class Darker:
    def __call__(self, value: float) -> float:
        return value - 1


class Compose:
    def __init__(self, transforms: list[Callable[[float], float]]) -> None:
        self.transforms = transforms

    def __call__(self, value: float) -> float:
        for transform in self.transforms:
            value = transform(value)
        return value


class Pictures(data.Dataset):  # type: ignore[misc,name-defined]
    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> float:
        if index >= 6:
            raise IndexError(index)
        return self.transform(float(index)) if self.transform else float(index)


class Stream(data.IterableDataset):  # type: ignore[misc,name-defined]
    def __iter__(self) -> Iterator[int]:
        yield from range(5)


def keep(batch: list[float]) -> list[float]:
    return batch


@pytest.fixture
def watch() -> Iterator[InputWatch]:
    watch = InputWatch()
    watch.install(watch)
    watch.begin()
    yield watch
    watch.uninstall(watch)


def counted(watch: InputWatch) -> dict[tuple[str, str], int]:
    return {(stage.stage, stage.name): stage.calls for stage in watch.stages() if stage.stage != "sampler"}


def stage_of(watch: InputWatch, name: str) -> InputStageFacts:
    [found] = [stage for stage in watch.stages() if stage.name == name]
    return found


def test_in_the_process_itself(watch: InputWatch) -> None:
    dataset = Pictures(Compose([brighter, Darker()]))

    batches = list(data.DataLoader(dataset, batch_size=4, collate_fn=keep))

    assert batches == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0]]
    assert counted(watch) == {
        ("item", "Pictures.__getitem__"): 6,
        ("transform", "brighter"): 6,
        ("transform", "Darker"): 6,
        ("collate", "keep"): 2,
    }
    slow, item = stage_of(watch, "brighter"), stage_of(watch, "Pictures.__getitem__")
    assert slow.total_ns >= 6 * WAIT_S * 1e9
    assert item.total_ns >= slow.total_ns
    assert slow.processor_ns is None
    assert item.processor_ns is not None
    assert item.processor_ns < item.total_ns
    assert (slow.file, slow.line) == (__file__, brighter.__code__.co_firstlineno)
    assert stage_of(watch, "Darker").line == Darker.__call__.__code__.co_firstlineno
    assert not slow.in_workers


class Backwards(data.Sampler):  # type: ignore[misc,name-defined]
    def __iter__(self) -> Iterator[int]:
        time.sleep(WAIT_S)
        yield from range(5, -1, -1)


def test_the_sampler_is_a_stage_of_its_own(watch: InputWatch) -> None:
    loader = data.DataLoader(Pictures(None), batch_size=4, sampler=Backwards(), collate_fn=keep)

    assert list(loader) == [[5.0, 4.0, 3.0, 2.0], [1.0, 0.0]]

    sampler, item = stage_of(watch, "Backwards.__iter__"), stage_of(watch, "Pictures.__getitem__")
    assert (sampler.stage, sampler.line) == ("sampler", Backwards.__iter__.__code__.co_firstlineno)
    assert sampler.total_ns >= WAIT_S * 1e9 > item.total_ns
    assert not sampler.in_workers


def test_a_second_iterator_names_the_functions_and_not_what_measures_them(watch: InputWatch) -> None:
    dataset = Pictures(brighter)
    first, second = (iter(data.DataLoader(dataset, collate_fn=keep)) for _ in range(2))

    assert (next(first), next(second)) == ([1.0], [1.0])
    assert {stage.name for stage in watch.stages() if stage.stage == "transform"} == {"brighter"}
    assert not any(is_stepscope_file(stage.file) for stage in watch.stages())


def test_the_transforms_are_given_back(watch: InputWatch) -> None:
    plain, composed = Pictures(brighter), Pictures(Compose([brighter]))
    iterators = [iter(data.DataLoader(one, collate_fn=keep)) for one in (plain, composed)]
    assert is_timed(plain.transform)
    assert is_timed(composed.transform.transforms[0])

    del iterators

    assert plain.transform is brighter
    assert composed.transform.transforms == [brighter]


def test_transforms_of_loaders_that_are_still_read_are_given_back(watch: InputWatch) -> None:
    dataset = Pictures(brighter)
    iterator = iter(data.DataLoader(dataset, collate_fn=keep))
    watch.uninstall(watch)

    assert dataset.transform is brighter
    assert next(iterator) == [1.0]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"] if sys.platform.startswith("linux") else ["spawn"])
def test_in_workers(watch: InputWatch, method: str) -> None:
    loader = data.DataLoader(
        Pictures(brighter), batch_size=2, num_workers=2, collate_fn=keep, multiprocessing_context=method
    )

    assert list(loader) == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]

    calls = counted(watch)
    assert calls == {
        ("item", "Pictures.__getitem__"): 6,
        ("transform", "brighter"): 6,
        ("collate", "keep"): 3,
        ("worker_start", "2 workers"): 1,
    }
    assert stage_of(watch, "brighter").in_workers
    assert stage_of(watch, "brighter").total_ns >= 6 * WAIT_S * 1e9
    [facts] = watch.loaders()
    assert (facts.workers, facts.prefetch_factor, facts.start_method, facts.iterators) == (2, 2, method, 1)


def test_workers_that_stay(watch: InputWatch) -> None:
    loader = data.DataLoader(Pictures(brighter), batch_size=3, num_workers=1, collate_fn=keep, persistent_workers=True)
    list(loader)
    watch.begin()
    list(loader)

    assert counted(watch)["item", "Pictures.__getitem__"] == 6
    assert ("worker_start", "1 workers") not in counted(watch)
    [facts] = watch.loaders()
    assert (facts.persistent_workers, facts.iterators) == (True, 1)


def test_only_what_comes_after_the_beginning_counts(watch: InputWatch) -> None:
    loader = data.DataLoader(Pictures(), batch_size=6, collate_fn=keep)
    list(loader)
    watch.begin()
    assert watch.stages() == ()
    assert watch.loaders() == ()
    list(loader)

    assert counted(watch) == {("item", "Pictures.__getitem__"): 6, ("collate", "keep"): 1}


def test_a_stream(watch: InputWatch) -> None:
    loader = data.DataLoader(Stream(), batch_size=2, collate_fn=keep)

    assert list(loader) == [[0, 1], [2, 3], [4]]
    assert counted(watch)["collate", "keep"] == 3
    assert counted(watch)["item", "Stream.__iter__"] == 6  # three batches that were to be of two
    assert watch.loaders()[0].batches is None


def test_errors_are_the_programs_own(watch: InputWatch) -> None:
    with pytest.raises(IndexError, match="7"):
        list(data.DataLoader(Pictures(), sampler=[7], collate_fn=keep))
    with pytest.raises(IndexError, match="7"):
        list(data.DataLoader(Pictures(), sampler=[7], collate_fn=keep, num_workers=1))


@pytest.mark.slow
def test_a_dataset_inside_others_is_named(watch: InputWatch) -> None:
    inner = Pictures(partial(brighter))
    dataset = data.ConcatDataset([data.Subset(inner, [0, 1]), inner])
    list(data.DataLoader(dataset, batch_size=8, collate_fn=keep))

    assert counted(watch) == {
        ("item", "Pictures.__getitem__"): 8,
        ("transform", "partial"): 8,
        ("collate", "keep"): 1,
    }
    assert stage_of(watch, "partial").line == brighter.__code__.co_firstlineno


def test_a_measured_function_passes_for_the_one_it_stands_for() -> None:
    darker = Darker()
    timed: Any = Timed(darker, memoryview(bytearray(48)).cast("q"), 1)

    assert isinstance(timed, Darker)
    assert is_timed(timed)
    assert timed(3.0) == 2.0
    assert copy.copy(timed) is darker
    assert type(pickle.loads(pickle.dumps(timed))) is Darker


def test_batches_are_counted_where_an_iteration_ends(watch: InputWatch) -> None:
    def loader() -> Any:
        return data.DataLoader(Pictures(None), batch_size=4, collate_fn=keep)

    first, stream = loader(), data.DataLoader(Stream(), batch_size=2)
    assert len(list(first)) == 2
    list(stream)
    begun = iter(loader())
    next(begun)

    assert [(each.dataset, each.batches) for each in watch.loaders()] == [
        ("Pictures", 2),
        ("Stream", None),
        ("Pictures", 2),
    ]
