"""mixed_precision: autocast, and a guard that changes nothing but what it finds wrong."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.remedies import MixedPrecision, PrecisionDrift, allow_tf32, mixed_precision  # noqa: E402


def network() -> Any:
    torch.manual_seed(2)
    layers = (torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4))
    return torch.nn.Sequential(*layers)


def trained(precision: MixedPrecision | None, steps: int = 4, model: Any = None) -> tuple[Any, list[float]]:
    """A model after some steps, by the object or by plain autocast in bf16, and its losses."""
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(steps):
        batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        if precision is None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(batch).float().square().mean()
            loss.backward()
            optimizer.step()
        else:
            loss = precision.loss(lambda b=batch: model(b).float().square().mean())
            precision.backward(loss)
            precision.step(optimizer)
        losses.append(float(loss.detach()))
    return model, losses


def state(model: Any) -> list[Any]:
    return [*model.parameters(), *model.buffers()]


def test_with_the_guard_training_is_plain_autocast_bit_by_bit() -> None:
    """Weights, losses, running statistics of batch normalisation, and the random numbers that come next."""
    plain, expected = trained(None)
    next_numbers = torch.rand(3), random.random()
    random.seed(5)
    next_of_python = random.random()
    random.seed(5)
    precision = mixed_precision("bf16", device="cpu", check_steps=3, tolerance=0.1)
    guarded, losses = trained(precision)
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(state(plain), state(guarded), strict=True))
    assert torch.equal(torch.rand(3), next_numbers[0])
    assert random.random() == next_of_python
    assert precision.drift.verdict == "within"
    assert len(precision.drift.full) == 3
    assert precision.enabled


def test_the_losses_compared_are_those_of_the_same_weights_and_random_numbers() -> None:
    precision = mixed_precision("bf16", device="cpu", check_steps=2, tolerance=1.0)
    torch.manual_seed(7)
    model = network()
    torch.manual_seed(11)
    model, losses = trained(precision, steps=2, model=model)
    torch.manual_seed(7)
    again = network()
    torch.manual_seed(11)
    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    assert precision.drift.full[0] == float(again(batch).float().square().mean().detach())
    assert precision.drift.low == tuple(losses)
    assert 0 < precision.drift.differences[0] < 0.02


def test_drift_goes_back_to_full_precision_with_the_step_that_showed_it() -> None:
    precision = mixed_precision("bf16", device="cpu", check_steps=3, tolerance=0.0)
    with pytest.warns(
        UserWarning,
        match=r"^1 loss in bf16 differs from full precision by 0\.\d+% at most, tolerance 0\.000%: exceeded; this step",
    ):
        guarded, losses = trained(precision)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for number in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8, generator=torch.Generator().manual_seed(number))).square().mean()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(state(model), state(guarded), strict=True))
    assert not precision.enabled
    with precision:
        assert model(torch.zeros(2, 8)).dtype == torch.float32


def test_drift_is_an_error_where_asked() -> None:
    with pytest.raises(RuntimeError, match=r"tolerance 0\.000%: exceeded$"):
        trained(mixed_precision(device="cpu", tolerance=0.0, on_drift="error"))


def test_a_loss_that_overflows_in_fp16_alone_is_drift() -> None:
    """A sum of squares beyond 65,504."""
    layer = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.constant_(layer.weight, 200.0)
    precision = mixed_precision("fp16", device="cpu")
    with pytest.warns(
        UserWarning, match=r"differs from full precision by more than a share can say \(inf beside 2\.56e\+10\), tol"
    ):
        loss = precision.loss(lambda: layer(torch.full((2, 4), 200.0)).square().mean())
    assert bool(loss.isfinite())


def test_fp16_has_a_scaler_that_leaves_out_steps_with_overflow() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = mixed_precision("fp16", device="cpu", check_steps=1)
    precision.backward(precision.loss(lambda: model(torch.ones(2, 4)).float().mean() / 8))
    assert float(model.weight.grad[0, 0]) == precision.scaler.get_scale() / 8
    precision.unscale(optimizer)
    assert float(model.weight.grad[0, 0]) == 0.125
    precision.step(optimizer)
    before = model.weight.detach().clone()
    assert str(precision.drift).endswith("within")
    model.weight.grad.fill_(float("inf"))
    scale = precision.scaler.get_scale()
    precision.step(optimizer)
    assert torch.equal(before, model.weight)
    assert precision.scaler.get_scale() == scale / 2


def test_bf16_needs_no_scaler() -> None:
    model = torch.nn.Linear(4, 1)
    precision = mixed_precision(torch.bfloat16, device="cpu", check_steps=0)
    assert precision.scaler is None
    precision.backward(precision.loss(lambda: model(torch.ones(2, 4)).mean()))
    precision.unscale(torch.optim.SGD(model.parameters(), lr=0.1))
    assert float(model.weight.grad[0, 0]) == 1.0
    assert str(precision.drift) == "losses in bf16 were not compared with full precision"


def test_as_a_context_it_is_autocast() -> None:
    layer = torch.nn.Linear(4, 4)
    precision = mixed_precision("bf16", device="cpu")
    with precision, precision:
        assert layer(torch.ones(1, 4)).dtype == torch.bfloat16
    assert layer(torch.ones(1, 4)).dtype == torch.float32


def test_what_an_earlier_backward_pass_needs_is_not_written() -> None:
    class Turned(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.register_buffer("angles", torch.ones(3))

        def forward(self, batch: Any) -> Any:
            return batch * self.weight * self.angles

    model = Turned()
    precision = mixed_precision("bf16", device="cpu", check_steps=2)
    losses = [precision.loss(lambda: model(torch.ones(3)).mean()) for _ in range(2)]
    sum(losses).backward()
    assert float(model.weight.grad[0]) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "result",
    [
        lambda loss: (loss, torch.ones(3)),
        lambda loss: [loss],
        lambda loss: {"loss": loss, "logits": torch.ones(3)},
        lambda loss: SimpleNamespace(loss=loss),
        lambda loss: loss.reshape(1),
    ],
)
def test_the_loss_may_come_with_more(result: Callable[[Any], Any]) -> None:
    precision = mixed_precision("bf16", device="cpu")
    made = precision.loss(lambda scale: result(torch.tensor(2.0) * scale), 3.0)
    assert type(made) is type(result(torch.tensor(1.0)))
    assert precision.drift.low == (6.0,)


@pytest.mark.parametrize("result", [torch.ones(3), 3.0, None, ()])
def test_a_function_without_a_loss_is_refused(result: Any) -> None:
    with pytest.raises(TypeError, match="the function must return a loss without dimensions"):
        mixed_precision("bf16", device="cpu").loss(lambda: result)


def test_what_the_drift_says() -> None:
    drift = PrecisionDrift("bf16", 0.01, (2.0, 4.0), (2.01, 4.0))
    assert drift.differences == (pytest.approx(0.005), 0.0)
    assert str(drift) == "2 losses in bf16 differ from full precision by 0.500% at most, tolerance 1.000%: within"
    nan, infinite = float("nan"), float("inf")
    assert replace(drift, low=(nan, 4.0)).verdict == "exceeded"
    assert replace(drift, full=(nan, infinite), low=(nan, infinite)).verdict == "within"
    assert replace(drift, full=(0.0, 0.0), low=(0.0, 1e-9)).differences == (0.0, infinite)
    assert PrecisionDrift("fp16", 0.1).verdict == "not checked"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": "int8"}, "mixed precision is in 'bf16' or 'fp16', not 'int8'"),
        ({"dtype": torch.float32}, "mixed precision is in 'bf16' or 'fp16', not torch.float32"),
        ({"check_steps": -1}, "check_steps must be 0 or more, not -1"),
        ({"tolerance": float("nan")}, "tolerance must be 0 or more, not nan"),
        ({"on_drift": "ignore"}, "on_drift must be 'warn' or 'error', not 'ignore'"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        mixed_precision(**{"device": "cpu", **options})


def tf32() -> tuple[Any, ...]:
    """All that torch says of the setting; raises where its two ways contradict each other."""
    backends = torch.backends
    newer = [backends.cuda.matmul, getattr(backends.cudnn, "conv", None), getattr(backends.cudnn, "rnn", None)]
    return (
        backends.cuda.matmul.allow_tf32,
        backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
        *(getattr(each, "fp32_precision", None) for each in newer),
    )


@pytest.fixture
def usual_tf32() -> Iterator[tuple[Any, ...]]:
    before = tf32()
    yield before
    assert tf32() == before


def test_tf32_is_switched_for_both_ways_of_asking_and_back(usual_tf32: tuple[Any, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with allow_tf32():
            assert tf32()[:3] == (True, True, "high")
            with allow_tf32(False):
                assert tf32()[:3] == (False, False, "highest")
            assert tf32()[:3] == (True, True, "high")
        assert tf32() == usual_tf32
        setting = allow_tf32()
        assert tf32()[:2] == (True, True)
        setting.restore()


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")
def test_tf32_that_was_set_the_newer_way_is_kept(usual_tf32: tuple[Any, ...]) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with allow_tf32(False):
        assert tf32()[:3] == (False, False, "highest")
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    allow_tf32(False)
    torch.backends.cudnn.allow_tf32 = usual_tf32[1]
    torch.backends.cuda.matmul.fp32_precision = usual_tf32[3]


def test_tf32_takes_a_truth_value_only() -> None:
    with pytest.raises(TypeError, match="allow_tf32 takes True or False, not 'high'"):
        allow_tf32("high")
