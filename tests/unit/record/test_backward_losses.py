"""The losses that a program's backward passes begin with, as they are noted on the way."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from stepscope.record.bench_steps import MOST_LOSSES, BackwardLosses, fix_seeds

torch = pytest.importorskip("torch")


@pytest.fixture
def losses() -> Iterator[BackwardLosses]:
    original = torch.autograd.backward
    noting = BackwardLosses()
    noting.start()
    yield noting
    noting.stop()
    assert torch.autograd.backward is original


def weight() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def test_both_ways_to_begin_a_backward_pass(losses: BackwardLosses) -> None:
    (weight() * 2).sum().backward()
    torch.autograd.backward([(weight() * 3).sum()])
    assert losses.stop() == [6.0, 9.0]
    assert losses.stop() == []


def test_the_value_is_that_of_the_moment(losses: BackwardLosses) -> None:
    loss = (weight() * 2).sum()
    loss.backward()
    with torch.no_grad():
        loss.zero_()
    assert losses.stop() == [6.0]


def test_a_loss_that_was_scaled_is_noted_as_it_was(losses: BackwardLosses) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    parameter = weight()
    scaler.scale((parameter * 2).sum()).backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2048.0] * 3
    assert losses.stop() == [6.0]


def test_what_is_no_loss_is_passed_over(losses: BackwardLosses) -> None:
    (weight() * 2).backward(torch.ones(3))
    torch.autograd.backward([])
    assert losses.stop() == []


def test_gradients_are_what_they_are_without(losses: BackwardLosses) -> None:
    parameter = weight()
    (parameter**2).sum().backward(retain_graph=True)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2.0] * 3


def test_no_more_are_kept_than_fit(losses: BackwardLosses) -> None:
    losses._tensors = [torch.zeros(())] * MOST_LOSSES
    weight().sum().backward()
    assert len(losses.stop()) == MOST_LOSSES


def drawn(monkeypatch: pytest.MonkeyPatch, by: int, own: int | None) -> tuple[float, float]:
    with monkeypatch.context() as changes:
        changes.setattr(torch, "manual_seed", torch.manual_seed)  # put back afterwards
        changes.setattr(random, "seed", random.seed)
        changes.setattr("numpy.random.seed", __import__("numpy").random.seed)
        fix_seeds(by).stop()
        if own is not None:
            torch.manual_seed(own)
            random.seed(own)
        return torch.rand(()).item(), random.random()


def test_seeds_are_fixed_and_another_one_moves_those_of_the_program_too(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.random.get_rng_state(), random.getstate()
    try:
        assert drawn(monkeypatch, 0, None) == drawn(monkeypatch, 0, None)
        assert drawn(monkeypatch, 0, 5) == drawn(monkeypatch, 2, 3)
        assert len({drawn(monkeypatch, by, own) for by in (0, 1) for own in (None, 7)}) == 4
    finally:
        torch.random.set_rng_state(state[0])
        random.setstate(state[1])
