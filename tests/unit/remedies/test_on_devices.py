"""Each remedy beside the plain way, with values and gradients, on whatever device there is."""

from __future__ import annotations

import copy
import gc
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stepscope.remedies import (
    DataParallelSettings,
    DeferredNumber,
    DeferredScalars,
    HorizontalTrainer,
    LoopConstants,
    allow_tf32,
    attention,
    capture_step,
    chunked_cross_entropy,
    clip_grad_norm,
    collect_garbage_at_steps,
    fuse_optimizer,
    keeps_ties,
    linear_cross_entropy,
    mixed_precision,
    pad_dimension,
    pad_to_lengths,
    pad_vocabulary,
    prefetch_to_device,
)
from tests.devices import needs_gpu, on_devices
from tests.unit.applying import Start, applied

pytestmark = pytest.mark.slow
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def close(found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    torch.testing.assert_close(
        found.float(), expected.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], check_device=True
    )


def network(device: str, width: int = 16) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, width), nn.GELU(), nn.Linear(width, 4)).to(device)


def batches(device: str, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [
        (torch.randn(8, 12, generator=draw).to(device), torch.randint(4, (8,), generator=draw).to(device))
        for _ in range(count)
    ]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Losses of plain training."""
    losses = []
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def same(one: nn.Module, other: nn.Module) -> None:
    for found, expected in zip(one.parameters(), other.parameters(), strict=True):
        close(found.detach(), expected.detach())


@on_devices
@TYPES
@pytest.mark.parametrize("causal", [False, True])
def test_attention(device: str, dtype: torch.dtype, causal: bool) -> None:
    given = [torch.randn(2, 4, 33, 16, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    weight = torch.randn(2, 4, 33, 16, device=device, dtype=dtype)
    answers: list[list[Tensor]] = []
    functions: list[Callable[..., Tensor]] = [attention, F.scaled_dot_product_attention]
    for function in functions:
        found = function(*given, is_causal=causal)
        answers.append([found.detach(), *torch.autograd.grad(found, given, weight)])
    for mine, plain in zip(*answers, strict=True):
        close(mine, plain, dtype)


@on_devices
def test_recomputed_attention_with_padding(device: str) -> None:
    query, key, value = given = [torch.randn(2, 4, 32, 16, device=device, requires_grad=True) for _ in range(3)]
    lengths = torch.tensor([32, 20])
    kept = torch.arange(32, device=device)[None] < lengths.to(device)[:, None]
    past = torch.ones(32, 32, dtype=torch.bool, device=device).tril()
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=kept[:, None, None, :] & past)
    found = attention(query, key, value, is_causal=True, valid_seq_len=lengths, seq_padding="right", recompute=True)
    rows = kept[:, None, :, None].expand_as(found)
    close(found[rows], expected[rows])
    for mine, plain in zip(
        torch.autograd.grad(found[rows].sum(), given), torch.autograd.grad(expected[rows].sum(), given), strict=True
    ):
        close(mine, plain)


@on_devices
@TYPES
def test_losses(device: str, dtype: torch.dtype) -> None:
    hidden = torch.randn(40, 8, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(300, 8, device=device, dtype=dtype, requires_grad=True)
    target = torch.randint(300, (40,), device=device)
    losses: list[Callable[[], Tensor]] = [
        lambda: F.cross_entropy((hidden @ weight.t()).float(), target),
        lambda: chunked_cross_entropy(hidden @ weight.t(), target, chunk_size=16),
        lambda: linear_cross_entropy(hidden, weight, target, chunk_size=16),
    ]
    answers = [(loss := each(), *torch.autograd.grad(loss, (hidden, weight))) for each in losses]
    for answer in answers[1:]:
        for mine, plain in zip(answer, answers[0], strict=True):
            close(mine.detach(), plain.detach(), dtype)


@on_devices
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_fused_optimizers(device: str, kind: Any) -> None:
    plain = network(device)
    other = copy.deepcopy(plain)
    trained(plain, kind(plain.parameters(), lr=0.05, foreach=False), batches(device))
    trained(other, fuse_optimizer(kind(other.parameters(), lr=0.05)), batches(device))
    same(other, plain)


@on_devices
def test_clipping(device: str) -> None:
    plain = network(device)
    F.cross_entropy(plain(batches(device)[0][0]), batches(device)[0][1]).backward()  # type: ignore[no-untyped-call]
    other = copy.deepcopy(plain)
    for mine, theirs in zip(other.parameters(), plain.parameters(), strict=True):
        mine.grad = None if theirs.grad is None else theirs.grad.clone()
    close(clip_grad_norm(other.parameters(), 0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    for mine, theirs in zip(other.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        close(mine.grad, theirs.grad)


@on_devices
def test_prefetched_batches(device: str) -> None:
    data = [torch.full((1000,), float(number)) for number in range(6)]
    found = [(batch.device.type, float(batch.sum())) for batch in prefetch_to_device(data, device)]
    assert found == [(device, float(each.sum())) for each in data]


@on_devices
def test_numbers_that_are_read_later(device: str) -> None:
    values = [torch.tensor(float(number), device=device) for number in range(5)]
    rows: list[tuple[int, str, float]] = []
    with DeferredScalars(lambda step, name, value: rows.append((step, name, value)), every=2) as scalars:
        for number, value in enumerate(values):
            scalars.add(number, loss=value)
            value.add_(100)  # what is logged is the value at the time
    assert rows == [(number, "loss", float(number)) for number in range(5)]
    assert [float(DeferredNumber(value)) for value in values] == [value.item() for value in values]


@on_devices
def test_mixed_precision(device: str) -> None:
    plain, data = network(device), batches(device)
    other = copy.deepcopy(plain)
    expected = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1), data)
    precision = mixed_precision("bf16", device=device, check_steps=2)
    optimizer, losses = torch.optim.SGD(other.parameters(), lr=0.1), []
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = precision.loss(lambda inputs=inputs, targets=targets: F.cross_entropy(other(inputs).float(), targets))  # type: ignore[misc]
        precision.backward(loss)
        precision.step(optimizer)
        losses.append(loss.item())
    assert losses == pytest.approx(expected, rel=0.03)


@on_devices
def test_tf32(device: str) -> None:
    left, right = torch.randn(256, 256, device=device), torch.randn(256, 256, device=device)
    exact = (left.double() @ right.double()).float()
    with allow_tf32():
        torch.testing.assert_close(left @ right, exact, rtol=2e-3, atol=0.1)
    with allow_tf32(False):
        torch.testing.assert_close(left @ right, exact, rtol=1e-5, atol=1e-3)


@on_devices
def test_stacked_trainings(device: str) -> None:
    plain = [network(device), network(device)]
    rates, data = (0.1, 0.01), batches(device)
    trainer = HorizontalTrainer(
        [copy.deepcopy(each) for each in plain],
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        torch.optim.SGD,
        [{"lr": rate} for rate in rates],
    )
    for batch in data:
        trainer.step(batch)
    for model, rate, found in zip(plain, rates, trainer.models(), strict=True):
        trained(model, torch.optim.SGD(model.parameters(), lr=rate), data)
        same(found, model)


@on_devices
def test_a_padded_vocabulary(device: str) -> None:
    table, head = nn.Embedding(101, 8, device=device), nn.Linear(8, 101, device=device)
    words = torch.randint(101, (20,), device=device)
    expected = head(table(words)).detach()
    pad_vocabulary(table, head)
    close(head(table(words)).detach(), expected)
    assert table.weight.shape[0] == 128


@on_devices
@pytest.mark.parametrize("learning", [False, True])
def test_captured_steps(device: str, learning: bool) -> None:
    plain = network(device)
    other = copy.deepcopy(plain)
    answers = []
    for model, capture in ((plain, False), (other, True)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(inputs: Tensor, targets: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            with torch.set_grad_enabled(learning):
                loss = F.cross_entropy(model(inputs), targets)
            if learning:
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            return loss.detach()

        run = capture_step(step) if capture else step
        answers.append([float(run(*batch)) for batch in batches(device, 8)])
    assert answers[1] == pytest.approx(answers[0], rel=1e-4)
    same(other, plain)


@on_devices
def test_padded_shapes_and_constants_of_a_loop(device: str) -> None:
    rows = [torch.arange(size, device=device) for size in (3, 5)]
    padded = pad_to_lengths(rows, multiple=4)
    assert padded.device.type == device
    assert padded.tolist() == [[0, 1, 2, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 0, 0, 0]]
    wide = torch.randn(4, 5, device=device)
    close(pad_dimension(wide, 1, 8)[:, :5], wide)
    values, x = [0.9, 0.5, 0.1], torch.randn(8, device=device)
    expected = found = x
    for value, constant in zip(values, LoopConstants(values, device=device), strict=True):
        expected, found = expected * value, found * constant
    close(found, expected)


@on_devices
def test_weights_that_stay_tied_when_they_move(device: str) -> None:
    table, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, head)
    with keeps_ties(model):
        model.to(device)
        head.weight = nn.Parameter(head.weight.detach().clone())
    assert head.weight is table.weight
    assert table.weight.device.type == device


@pytest.fixture
def one_rank(device: str) -> Iterator[None]:
    """A process group of one; it ends after all that uses it, since its threads may need Python to end."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    yield
    gc.collect()
    torch.distributed.destroy_process_group()


@on_devices
@pytest.mark.usefixtures("one_rank")
def test_settings_of_data_parallel_training(device: str) -> None:
    plain = network(device)
    wrapped = DataParallelSettings(bucket_cap_mb=1.0, gradient_as_bucket_view=True).ddp(copy.deepcopy(plain))
    for model in (plain, wrapped):
        with collect_garbage_at_steps(every=2) as garbage:
            trained(model, torch.optim.SGD(model.parameters(), lr=0.1), batches(device))
            garbage.step()
    same(wrapped, plain)


@pytest.fixture
def start() -> Iterator[Start]:
    with applied() as begin:
        yield begin


@on_devices
@pytest.mark.parametrize(
    "flag", ["bf16", "tf32", "channels-last", "fuse-optimizer", "zero-grad", "chunked-loss", "clip-in-one-pass"]
)
def test_what_is_applied_from_outside(device: str, flag: str, start: Start) -> None:
    def losses() -> list[float]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 300)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        images, labels = torch.randn(6, 3, 8, 8, device=device), torch.randint(300, (6,), device=device)
        found = []
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            loss = F.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found.append(float(loss))
        return found

    expected = losses()
    applying = start(flag)
    assert losses() == pytest.approx(expected, rel=0.03)
    does_nothing = flag in ("tf32", "chunked-loss") if device == "cpu" else flag == "chunked-loss"
    assert does_nothing or applying.to_json()["applied"], applying.to_json()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("flags", ["pin-memory", "pin-memory,non-blocking"])
def test_batches_of_a_pinning_loader(flags: str, start: Start) -> None:
    data = torch.arange(64 * 1024, dtype=torch.float32).reshape(64, 1024)
    start(flags)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=8)
    sums = torch.stack([batch.to("cuda").double().sum() for (batch,) in loader])
    assert sums.tolist() == data.double().reshape(8, -1).sum(1).tolist()
    assert loader.pin_memory


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("flag", ["compile", "compile=reduce-overhead"])
def test_a_compiled_model_on_a_gpu(flag: str, start: Start) -> None:
    plain = network("cuda", 64)
    other = copy.deepcopy(plain)
    expected = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1), batches("cuda", 6))
    start(flag)
    assert trained(other, torch.optim.SGD(other.parameters(), lr=0.1), batches("cuda", 6)) == pytest.approx(
        expected, rel=1e-3
    )


@pytest.mark.gpu
@needs_gpu
def test_a_captured_step_is_quicker_than_its_launches() -> None:
    """Medians of many steps in turn, and a difference that nothing else explains: sixty layers of 64."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(60)]).cuda().requires_grad_(False)
    inputs = torch.randn(8, 64, device="cuda")
    graph = capture_step(lambda x: model(x))
    times: dict[str, list[float]] = {"plain": [], "graph": []}
    runs: dict[str, Callable[[Tensor], Tensor]] = {"plain": model, "graph": graph}
    for number, (name, run) in itertools.product(range(60), runs.items()):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(5):
            run(inputs)
        end.record()
        end.synchronize()
        if number >= 10:
            times[name].append(begin.elapsed_time(end))
    assert graph.mode == "cuda-graph"
    assert sorted(times["graph"])[25] < sorted(times["plain"])[25]
    assert not math.isnan(float(graph(inputs).sum()))
