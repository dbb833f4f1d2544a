"""Batches on the device ahead of time: the same batches, in the same order, and no thread left."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from stepscope.remedies.loading import prefetch
from stepscope.remedies.loading.prefetch import mapped, moved, prefetch_to_device, tensors_of

META = torch.device("meta")
"""A device that every torch has: copies to it are real moves, without values."""


class Pair(NamedTuple):
    tokens: torch.Tensor
    name: str


@dataclass(frozen=True)
class Sample:
    tokens: torch.Tensor
    weight: float


class Encoding:
    """As tokenizers give it: an object that moves itself, and takes no other argument."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def to(self, device: torch.device) -> Encoding:
        return Encoding(self.tokens.to(device))


def numbers(count: int = 5, fails_at: int | None = None) -> Iterator[torch.Tensor]:
    for number in range(count):
        if number == fails_at:
            raise OSError("the disk is gone")
        yield torch.tensor([number])


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("stepscope-loads")]


def test_no_batch() -> None:
    assert list(prefetch_to_device([], "cpu")) == []
    assert list(prefetch_to_device([], META)) == []
    assert list(prefetch_to_device([], "cpu", in_thread=True)) == []


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("ahead", [1, 2, 10])
def test_all_batches_come_in_order(in_thread: bool, ahead: int) -> None:
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=3)

    got = [batch for (batch,) in prefetch_to_device(loader, "cpu", ahead, in_thread=in_thread)]

    assert [batch.tolist() for batch in got] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert own_threads() == []


@pytest.mark.parametrize("in_thread", [False, True])
def test_batches_are_on_the_device_and_as_many_wait_as_asked(in_thread: bool) -> None:
    taken: list[int] = []

    def loader() -> Iterator[torch.Tensor]:
        for number, batch in enumerate(numbers(9)):
            taken.append(number)
            yield batch

    batches = iter(prefetch_to_device(loader(), META, ahead=3, in_thread=in_thread))
    first = next(batches)

    assert first.device == META
    if not in_thread:
        assert taken == [0, 1, 2, 3]
    assert [batch.shape for batch in batches] == [torch.Size([1])] * 8
    assert own_threads() == []


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("in_thread", [False, True])
def test_an_exception_comes_at_its_place_with_its_traceback(device: str, in_thread: bool) -> None:
    batches = iter(prefetch_to_device(numbers(5, fails_at=2), device, in_thread=in_thread))

    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(batches)

    assert "numbers" in [entry.name for entry in caught.traceback]
    assert own_threads() == []


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_early_end_leaves_no_thread_behind(device: str) -> None:
    for _ in prefetch_to_device(numbers(1000), device, in_thread=True):
        break

    assert own_threads() == []


def test_every_structure_keeps_its_type() -> None:
    tensor = torch.arange(3)
    batch = {
        "list": [tensor, "text", 4, None],
        "tuple": (tensor, b"bytes"),
        "named": Pair(tensor, "a"),
        "dataclass": Sample(tensor, 0.5),
        "object": Encoding(tensor),
        "ordered": OrderedDict(first=tensor),
        "default": defaultdict(list, {"first": tensor}),
        "packed": pack_sequence([tensor]),
    }

    moved_batch = moved(batch, META)

    assert [tensor.device.type for tensor in tensors_of(moved_batch)].count("meta") == len(
        list(tensors_of(moved_batch))
    ) - 1
    assert [type(value) for value in moved_batch.values()] == [type(value) for value in batch.values()]
    assert moved_batch["list"][1:] == ["text", 4, None]
    assert moved_batch["tuple"][1] == b"bytes"
    assert (moved_batch["named"].name, moved_batch["dataclass"].weight) == ("a", 0.5)
    assert moved_batch["default"].default_factory is list
    assert moved_batch["packed"].data.device == META
    assert all(tensor.device.type == "cpu" for tensor in tensors_of(batch)), "the batch itself was changed"


def test_a_structure_that_holds_itself_ends() -> None:
    batch: list[Any] = [torch.ones(1)]
    batch.append(batch)

    assert next(tensors_of(mapped(batch, lambda tensor: tensor + 1))).item() == 2


def test_the_loaders_own_attributes_stay() -> None:
    dataset = TensorDataset(torch.arange(10))
    sampler = DistributedSampler(dataset, num_replicas=2, rank=0)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)

    prefetched = prefetch_to_device(loader, "cpu")
    prefetched.set_epoch(3)

    assert len(prefetched) == 3
    assert prefetched.dataset is dataset
    assert prefetched.batch_sampler is loader.batch_sampler
    assert sampler.epoch == 3
    with pytest.raises(AttributeError):
        _ = prefetched.nothing_of_the_kind


def test_the_epoch_reaches_the_sampler_of_a_batch_sampler_once() -> None:
    told: list[int] = []

    class Order(list[int]):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    order = Order([3, 1, 2])
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_sampler=BatchSampler(order, 2, False))

    prefetch_to_device(loader, "cpu").set_epoch(7)

    assert told == [7]


def test_a_loader_without_a_length() -> None:
    with pytest.raises(TypeError):
        len(prefetch_to_device(numbers(), "cpu"))
    assert len(list(prefetch_to_device(numbers(), "cpu"))) == 5


@pytest.mark.parametrize("ahead", [0, -1, 1.5])
def test_a_number_ahead_that_is_none(ahead: Any) -> None:
    with pytest.raises(ValueError, match=f"ahead is {ahead!r}; it takes a whole number from 1 on"):
        prefetch_to_device([], "cpu", ahead)


def test_something_that_is_no_loader() -> None:
    with pytest.raises(TypeError, match=r"takes an iterable, .* not int"):
        prefetch_to_device(3, "cpu")  # type: ignore[arg-type]


def test_xla_gets_its_own_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "torch_xla" / "distributed"
    package.mkdir(parents=True)
    (tmp_path / "torch_xla" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "parallel_loader.py").write_text(
        "class MpDeviceLoader:\n"
        "    def __init__(self, loader, device, **kwargs):\n"
        "        self.loader, self.device = loader, device\n"
        "    def __iter__(self):\n"
        "        return ((self.device.type, batch) for batch in self.loader)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "torch_xla"]:
        monkeypatch.delitem(sys.modules, name)

    got = list(prefetch_to_device([1, 2], "xla"))

    for name in ("torch_xla", "torch_xla.distributed", "torch_xla.distributed.parallel_loader"):
        sys.modules.pop(name, None)
    assert got == [("xla", 1), ("xla", 2)]


class SimulatedStreams:
    """The calls of torch's module of a device with streams, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        calls = self.calls

        class Event:
            made = 0

            def __init__(self) -> None:
                type(self).made += 1
                self.number = self.made

            def record(self, stream: str) -> None:
                calls.append(f"event {self.number} in {stream}")

        self.Event = Event

    def Stream(self, device: torch.device) -> str:
        return "side"

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.calls.append(f"begin {stream}")
        yield

    def device(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self, device: torch.device) -> SimulatedStreams:
        return self

    def wait_event(self, event: Any) -> None:
        self.calls.append(f"step waits for event {event.number}")


def test_the_step_waits_for_its_batch_on_the_device_and_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = SimulatedStreams()
    monkeypatch.setattr(prefetch, "streams_of", lambda device: streams)
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda tensor, stream: streams.calls.append(f"kept: {len(tensor)}"),
        raising=False,
    )
    on_device = torch.ones(7, device=META)
    batches = iter(prefetch_to_device([[torch.ones(number), on_device] for number in (1, 2)], META, ahead=1))

    next(batches)

    assert streams.calls == [
        "begin side",
        "event 1 in side",
        "begin side",
        "event 2 in side",
        "step waits for event 1",
        "kept: 1",
    ]
    next(batches)
    assert streams.calls[6:] == ["step waits for event 2", "kept: 2"]


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_values_are_right_on_a_device_that_is_busy(pinned: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    data = torch.arange(64 * 2**16, dtype=torch.float32).reshape(64, 2**16)
    loader = DataLoader(TensorDataset(data), batch_size=4, pin_memory=pinned)
    weight = torch.randn(2048, 2048, device="cuda")
    sums = []
    for (batch,) in prefetch_to_device(loader):
        for _ in range(20):
            weight = torch.tanh(weight @ weight)
        sums.append(batch.double().sum())
        del batch
        torch.empty(4, 2**16, device="cuda").fill_(-1)  # would take the batch's memory if it were free

    assert torch.stack(sums).tolist() == data.double().reshape(16, -1).sum(1).tolist()
