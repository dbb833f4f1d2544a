"""The replay of PyTorch's allocator: its rules, totals of real devices, and checkpointing that was measured."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from stepscope.analysis.allocator import (
    CachingAllocator,
    Change,
    OutOfMemoryError,
    candidates,
    fit,
    fit_table,
    modules_like,
    usual_changes,
)
from stepscope.analysis.memory import DeviceMemory, device_memories
from stepscope.errors import UsageError
from stepscope.readers import open_trace
from tests.unit.recording import Recording

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        ([1], 512, 2 * MIB),
        ([513], 1024, 2 * MIB),
        ([MIB, MIB], 2 * MIB, 2 * MIB),
        ([MIB, MIB, 1], 2 * MIB + 512, 4 * MIB),
        ([MIB + 1], MIB + 512, 20 * MIB),
        ([3 * MIB] * 6, 18 * MIB, 20 * MIB),
        ([10 * MIB], 10 * MIB, 10 * MIB),
        ([10 * MIB + 1], 10 * MIB + 512, 12 * MIB),  # a rest of at most 1 MiB would stay part of the block
        ([11 * MIB], 12 * MIB, 12 * MIB),
        ([19 * MIB + 512 * KIB], 20 * MIB, 20 * MIB),
    ],
)
def test_requests_are_rounded_and_share_segments(sizes: list[int], allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    for size in sizes:
        allocator.allocate(size)

    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(30 * MIB)
    allocator.release(large)
    allocator.release(small)

    assert allocator.allocate(25 * MIB) is small


def test_neighbours_that_are_free_become_one_block() -> None:
    allocator = CachingAllocator()
    first, second, _ = (allocator.allocate(4 * MIB) for _ in range(3))
    allocator.release(first)
    allocator.release(second)

    allocator.allocate(8 * MIB)

    assert allocator.reserved == 20 * MIB


def test_unused_segments_go_back_before_memory_runs_out() -> None:
    allocator = CachingAllocator(64 * MIB)
    unused, cut = allocator.allocate(40 * MIB), allocator.allocate(3 * MIB)
    allocator.release(unused)
    allocator.allocate(44 * MIB)
    assert allocator.reserved == 64 * MIB

    allocator.release(cut)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(30 * MIB)


def test_segments_that_expand_fit_where_others_leave_holes() -> None:
    """Batches of growing sizes: each needs a new segment, unless the last one grows."""
    peaks = []
    for expandable in (False, True):
        allocator = CachingAllocator(expandable=expandable)
        for step in range(1, 8):
            allocator.release(allocator.allocate(step * 20 * MIB))
        peaks.append(allocator.reserved)

    assert peaks == [sum(range(1, 8)) * 20 * MIB, 7 * 20 * MIB]


def test_pages_inside_an_expandable_segment_go_back_and_come_again() -> None:
    allocator = CachingAllocator(100 * MIB, expandable=True)
    first, second = allocator.allocate(40 * MIB), allocator.allocate(40 * MIB)
    allocator.release(first)
    third = allocator.allocate(60 * MIB)
    assert allocator.reserved == 100 * MIB

    allocator.release(third)
    allocator.release(second)
    allocator.allocate(100 * MIB)
    assert allocator.reserved == 100 * MIB


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("limit", [None, 300 * MIB])
@pytest.mark.parametrize("seed", range(6))
def test_books_balance(seed: int, limit: int | None, expandable: bool) -> None:
    draw = random.Random(seed)
    allocator = CachingAllocator(limit, expandable=expandable, held=5 * MIB)
    live: list[Any] = []
    for _ in range(2_000):
        if live and draw.random() < 0.5:
            allocator.release(live.pop(draw.randrange(len(live))))
        else:
            asked = draw.choice([draw.randrange(1, MIB), draw.randrange(1, 10 * MIB), draw.randrange(1, 60 * MIB)])
            try:
                live.append(allocator.allocate(asked))
            except OutOfMemoryError:
                assert limit is not None
                continue
            assert live[-1].size >= asked
        assert allocator.allocated == 5 * MIB + sum(block.size for block in live)
        assert allocator.allocated <= allocator.reserved <= (limit or 1 << 62)

    while live:
        allocator.release(live.pop())
    with pytest.raises(OutOfMemoryError):
        CachingAllocator(allocator.reserved, held=5 * MIB).allocate(allocator.reserved)
    assert allocator.allocated == 5 * MIB


# These began with an almost empty cache, or with one that the same steps had filled.
@pytest.mark.parametrize(
    "name",
    [f"second/a100_particle_bs{size}" for size in (128, 256, 512)] + ["kineto/h100_owlv2", "second/mi300x_qwen_chat"],
)
def test_the_replay_reserves_what_real_devices_reserved(name: str, traces_folder: Path) -> None:
    memory = device_memories(open_trace(traces_folder / f"{name}.json.gz"))[0]

    found = fit(memory, Change(), None)

    assert memory.reserved_bytes is not None
    assert found["peak_bytes"] == pytest.approx(memory.peak_bytes, rel=0.001)
    assert found["reserved_bytes"] == pytest.approx(memory.reserved_bytes, rel=0.025)


def test_the_request_that_does_not_fit_is_named() -> None:
    recording = Recording()
    recording.operator(10, 20, "aten::mm", source_file="train.py", source_line=7, source_function="step")
    recording.block(5, None, 600 * MIB, device="0")
    recording.block(15, None, 500 * MIB, device="0")
    [memory] = device_memories(recording.trace())

    [fails, fits] = fit_table(memory, [Change(), Change(batch_factor=0.5)], 1024 * MIB, {}).iter_rows(named=True)

    assert (fails["fits"], fails["failed_bytes"]) == (False, 500 * MIB)
    assert (fails["file"], fails["line"]) == ("train.py", 7)
    assert (fits["fits"], fits["failed_bytes"]) == (True, None)


def test_what_a_batch_does_not_change_stays() -> None:
    recording = Recording()
    recording.step(100, 1000, 1)
    recording.block(6, None, 100 * MIB, device="0")  # a parameter
    recording.operator(200, 100, "aten::linear", sequence_number=7, forward_thread=0)
    recording.block(230, 500, 50 * MIB, device="0")
    [memory] = device_memories(recording.trace())

    assert [fit(memory, Change(batch_factor=factor), None)["peak_bytes"] // MIB for factor in (1, 2, 4)] == [
        150,
        200,
        300,
    ]


torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> DeviceMemory:
    return profiled(tmp_path_factory.mktemp("plain"), checkpoint=False)


def profiled(folder: Path, *, checkpoint: bool) -> DeviceMemory:
    """Memory of two steps of a network of six equal layers."""
    from torch.utils.checkpoint import checkpoint as again

    class Layer(torch.nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.wide = torch.nn.LayerNorm(64), torch.nn.Linear(64, 256)
            self.narrow = torch.nn.Linear(256, 64)

        def forward(self, x: Any) -> Any:
            return x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x))))

    class Model(torch.nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(6))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = again(layer, x, use_reentrant=False) if checkpoint else layer(x)
            return x

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, with_stack=True, record_shapes=True
    ) as profile:
        for _ in range(2):
            loss = model(torch.randn(4096, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            profile.step()
    path = folder / f"{checkpoint}.json"
    profile.export_chrome_trace(str(path))
    [memory] = device_memories(open_trace(path))
    return memory


def test_checkpointing_brings_the_peak_that_a_program_with_it_has(plain: DeviceMemory, tmp_path: Path) -> None:
    checkpointed = profiled(tmp_path, checkpoint=True)

    one, six = candidates(plain)
    found = fit(plain, Change(checkpointed=six), None)

    assert (len(one), len(six)) == (1, 6)
    assert set(one) < set(six) == set(modules_like(plain, ["Layer_*"]))
    assert found["peak_bytes"] == pytest.approx(checkpointed.peak_bytes, rel=0.1)
    assert plain.peak_bytes > 2.5 * checkpointed.peak_bytes
    assert fit(plain, Change(checkpointed=one), None)["peak_bytes"] < plain.peak_bytes
    assert Change(checkpointed=six) in usual_changes(plain)


def test_modules_without_anything_to_checkpoint(plain: DeviceMemory) -> None:
    with pytest.raises(UsageError, match="no module that made an activation matches 'Conv'"):
        modules_like(plain, ["Conv"])
    with pytest.raises(UsageError, match="nothing to checkpoint in Elsewhere"):
        fit(plain, Change(checkpointed=("Elsewhere",)), None)
