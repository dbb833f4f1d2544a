import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepscope.remedies.optimizers.horizontal import HorizontalTrainer

STEPS = 10


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4)
    )


class Tied(nn.Module):
    """A little language model whose head is its embedding, with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 4, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(inputs.abs().long().clamp(max=3))).mean(1))


def loss(model: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def models_of(make: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make() for _ in range(count)]


def batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (2 * torch.randn(12, 6, generator=generator), torch.randint(0, 4, (12,), generator=generator))
        for _ in range(count)
    ]


def alone(
    model: nn.Module,
    optimizer: type[torch.optim.Optimizer],
    settings: dict[str, Any],
    seen: Sequence[tuple[Tensor, Tensor]],
    max_norm: float | None = None,
) -> tuple[nn.Module, list[float]]:
    """One model trained as usual."""
    model = copy.deepcopy(model).train()
    made: Any = optimizer(model.parameters(), foreach=False, **settings)  # type: ignore[call-arg]
    losses = []
    for batch in seen:
        made.zero_grad()
        value = loss(model, batch)
        value.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        made.step()
        losses.append(float(value.detach()))
    return model, losses


def assert_same(found: nn.Module, expected: nn.Module, tolerance: float) -> None:
    for (name, value), (_, wanted) in zip(found.state_dict().items(), expected.state_dict().items(), strict=True):
        largest = max(float(wanted.double().abs().max()), 1.0)
        assert float((value.double() - wanted.double()).abs().max()) <= tolerance * largest, name


MOMENTUM = [{"lr": rate, "momentum": 0.9, "nesterov": True} for rate in (0.1, 0.01, 0.003)]
DECAYED = [{"lr": 1e-2}, {"lr": 1e-3, "weight_decay": 0.3}, {"eps": 1e-4}]


@pytest.mark.parametrize(
    ("make", "optimizer", "settings"),
    [
        (
            mlp,
            torch.optim.SGD,
            [{"lr": 0.1}, {"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}],
        ),
        (mlp, torch.optim.SGD, [{"lr": 0.1, "dampening": 0.5}, {}, {"momentum": 0.5}]),
        (mlp, torch.optim.SGD, MOMENTUM),
        (mlp, torch.optim.Adam, [{"lr": 1e-2}, {"lr": 1e-3, "betas": (0.8, 0.9)}, {"weight_decay": 0.1}]),
        (mlp, torch.optim.AdamW, DECAYED),
        (mlp, torch.optim.AdamW, [{"lr": rate, "amsgrad": True} for rate in (1e-2, 1e-3, 1e-4)]),
        (convolutional, torch.optim.SGD, MOMENTUM),
        (convolutional, torch.optim.AdamW, DECAYED),
        (Tied, torch.optim.SGD, MOMENTUM),
        (Tied, torch.optim.AdamW, DECAYED),
    ],
)
def test_members_become_what_they_become_alone(
    make: Callable[[], nn.Module], optimizer: type[torch.optim.Optimizer], settings: list[dict[str, Any]]
) -> None:
    models = [model.double() for model in models_of(make, 3)]
    seen = [(inputs.double(), targets) for inputs, targets in batches()]
    trainer = HorizontalTrainer(models, loss, optimizer, settings)
    losses = torch.stack([trainer.step(batch) for batch in seen])
    for member, (found, model) in enumerate(zip(trainer.models(), models, strict=True)):
        expected, wanted = alone(model, optimizer, settings[member], seen)
        torch.testing.assert_close(losses[:, member], torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-9)
        assert_same(found, expected, 1e-9)
    assert [name for name, _ in trainer.models()[0].named_parameters()] == [n for n, _ in models[0].named_parameters()]


@pytest.mark.parametrize("make", [mlp, convolutional, Tied])
def test_single_precision_differs_by_roundings(make: Callable[[], nn.Module]) -> None:
    models, seen = models_of(make, 3), batches()
    trainer = HorizontalTrainer(models, loss, torch.optim.SGD, MOMENTUM)
    for batch in seen:
        trainer.step(batch)
    for found, model, settings in zip(trainer.models(), models, MOMENTUM, strict=True):
        assert_same(found, alone(model, torch.optim.SGD, settings, seen)[0], 1e-5)


def test_the_models_given_stay_as_they_were() -> None:
    models = models_of(convolutional, 2)
    before = [copy.deepcopy(model.state_dict()) for model in models]
    HorizontalTrainer(models, loss).step(batches(1)[0])
    for model, values in zip(models, before, strict=True):
        for name, value in model.state_dict().items():
            assert torch.equal(value, values[name])


def test_bfloat16_members_agree_as_its_roundings_allow() -> None:
    models = [model.to(torch.bfloat16) for model in models_of(mlp, 2)]
    seen = [(inputs.to(torch.bfloat16), targets) for inputs, targets in batches()]
    trainer = HorizontalTrainer(models, loss, torch.optim.SGD, {"lr": 0.05})
    for batch in seen:
        trainer.step(batch)
    for found, model in zip(trainer.models(), models, strict=True):
        assert_same(found, alone(model, torch.optim.SGD, {"lr": 0.05}, seen)[0], 0.03)


def test_adam_trains_bfloat16_members() -> None:
    models = [model.to(torch.bfloat16) for model in models_of(mlp, 2)]
    seen = [(inputs.to(torch.bfloat16), targets) for inputs, targets in batches()]
    trainer = HorizontalTrainer(models, loss, torch.optim.AdamW, {"lr": 0.01})
    for batch in seen:
        trainer.step(batch)
    for found, model in zip(trainer.models(), models, strict=True):
        assert_same(found, alone(model, torch.optim.AdamW, {"lr": 0.01}, seen)[0], 0.05)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)])
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.heads[self.calls % 2](inputs)
        return found


def test_a_parameter_that_some_steps_do_without_counts_its_own_updates() -> None:
    models, seen = models_of(TwoHeads, 2), batches()
    trainer = HorizontalTrainer(models, loss, torch.optim.Adam, {"lr": 0.05})
    for batch in seen:
        trainer.step(batch)
    for found, model in zip(trainer.models(), models, strict=True):
        assert_same(found, alone(model, torch.optim.Adam, {"lr": 0.05}, seen)[0], 1e-4)


def test_a_part_in_eval_mode_keeps_its_statistics() -> None:
    models, seen = models_of(convolutional, 2), batches(2)
    for model in models:
        model[2].eval()  # type: ignore[index, operator]
    trainer = HorizontalTrainer(models, loss, torch.optim.SGD, {"lr": 0.1})
    for batch in seen:
        trainer.step(batch)
        trainer.evaluate(batch)
    for found, model in zip(trainer.models(), models, strict=True):
        assert torch.equal(found[2].running_mean, model[2].running_mean)  # type: ignore[index, arg-type]
        assert not torch.equal(found[2].weight, model[2].weight)  # type: ignore[index, arg-type]
    models[1].train()
    with pytest.raises(ValueError, match="whether 2 is in eval"):
        HorizontalTrainer(models, loss)


def test_a_member_that_drops_everything_has_gradients_of_zero() -> None:
    models = [nn.Sequential(nn.Linear(6, 4), nn.Dropout(share), nn.Linear(4, 4)) for share in (0.0, 1.0)]
    trainer = HorizontalTrainer(models, loss, torch.optim.SGD, {"lr": 0.1})
    trainer.step(batches(1)[0])
    assert torch.equal(trainer.models()[1][0].weight, models[1][0].weight)  # type: ignore[index]


@pytest.mark.parametrize("value", [0.5, None, (1, 2)])
def test_a_loss_that_is_no_tensor_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="the loss must be a tensor"):
        HorizontalTrainer(models_of(mlp, 2), lambda model, batch: value).step(batches(1)[0])


def test_a_loss_without_a_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="does not depend"):
        HorizontalTrainer(models_of(mlp, 2), lambda *given: loss(*given).detach()).step(batches(1)[0])


def test_each_member_may_see_batches_of_its_own() -> None:
    models, first, second = models_of(mlp, 2), batches(), batches()[::-1]
    trainer = HorizontalTrainer(models, loss, torch.optim.SGD, {"lr": 0.1}, batches="own")
    for (x, y), (u, v) in zip(first, second, strict=True):
        trainer.step((torch.stack([x, u]), torch.stack([y, v])))
    for found, model, seen in zip(trainer.models(), models, (first, second), strict=True):
        assert_same(found, alone(model, torch.optim.SGD, {"lr": 0.1}, seen)[0], 1e-5)
    with pytest.raises(ValueError, match=r"begins with 2, not \(12, 6\)"):
        trainer.step(first[0])


def test_each_members_gradient_is_clipped_by_itself() -> None:
    models, seen = models_of(mlp, 2), batches()
    models[1][0].weight.data.mul_(20)  # type: ignore[index, union-attr, operator]
    trainer = HorizontalTrainer(models, loss, torch.optim.SGD, {"lr": 0.1}, max_norm=0.05)
    for batch in seen:
        trainer.step(batch)
    for found, model in zip(trainer.models(), models, strict=True):
        assert_same(found, alone(model, torch.optim.SGD, {"lr": 0.1}, seen, max_norm=0.05)[0], 1e-5)


def test_a_stopped_member_stays_and_the_others_go_on() -> None:
    models = [model.double() for model in models_of(convolutional, 3)]
    seen = [(inputs.double(), targets) for inputs, targets in batches()]
    rates = [{"lr": 1e-2}, {"lr": 1e-3}, {"lr": 3e-3}]
    trainer = HorizontalTrainer(models, loss, torch.optim.AdamW, rates)
    for batch in seen[:8]:
        trainer.step(batch)
    trainer.stop(1)
    for batch in seen[8:]:
        losses = trainer.step(batch)
    assert trainer.active == [0, 2]
    assert losses.isnan().tolist() == [False, True, False]
    assert trainer.evaluate(seen[0]).isnan().tolist() == [False, True, False]
    for member, steps in enumerate((STEPS, 8, STEPS)):
        expected, _ = alone(models[member], torch.optim.AdamW, rates[member], seen[:steps])
        assert_same(trainer.models()[member], expected, 1e-9)
    with pytest.raises(ValueError, match="member 1 is not trained"):
        trainer.stop(1)
    trainer.stop(0, 2)
    with pytest.raises(ValueError, match="every member was stopped"):
        trainer.step(seen[0])


def test_a_training_goes_on_from_its_state() -> None:
    models, seen = models_of(convolutional, 3), batches()
    whole, first = (HorizontalTrainer(models, loss, torch.optim.AdamW, {"lr": 1e-2}) for _ in range(2))
    for trainer, steps in ((whole, seen), (first, seen[:7])):
        for number, batch in enumerate(steps):
            trainer.step(batch)
            if number == 4:
                trainer.stop(1)
    second = HorizontalTrainer(models_of(convolutional, 3), loss, torch.optim.AdamW, {"lr": 1e-2})
    second.load_state_dict(first.state_dict())
    for batch in seen[7:]:
        second.step(batch)
    for found, expected in zip(second.models(), whole.models(), strict=True):
        assert_same(found, expected, 0.0)
    with pytest.raises(ValueError, match="other parameters"):
        HorizontalTrainer(models_of(mlp, 3), loss).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="not have 2 members"):
        HorizontalTrainer(models_of(convolutional, 2), loss).load_state_dict(first.state_dict())


def test_rates_may_change_between_steps() -> None:
    models, seen = models_of(mlp, 2), batches(4)
    trainer = HorizontalTrainer(models, loss, torch.optim.SGD, [{"lr": 0.1}, {"lr": 0.2}])
    trainer.step(seen[0])
    trainer.hyperparameters["lr"] *= 0.5
    trainer.step(seen[1])
    model = copy.deepcopy(models[1])
    for batch, rate in zip(seen[:2], (0.2, 0.1), strict=True):
        model, _ = alone(model, torch.optim.SGD, {"lr": rate}, [batch])
    assert_same(trainer.models()[1], model, 1e-6)


def test_dropout_differs_between_members_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    shares = [nn.Sequential(nn.Linear(1, 1), nn.Dropout(share)) for share in (0.0, 0.25, 0.75)]
    for model in shares:
        nn.init.ones_(model[0].weight)
        nn.init.zeros_(model[0].bias)

    def kept(model: Callable[..., Any], batch: Tensor) -> Tensor:
        return model(batch).mean()

    def zeros(model: Callable[..., Any], batch: Tensor) -> Tensor:
        return (model(batch) == 0).float().mean() + 0 * model(batch).sum()

    ones = torch.ones(20_000, 1)
    trainer = HorizontalTrainer(shares, zeros, torch.optim.SGD, {"lr": 0.0})
    torch.testing.assert_close(trainer.step(ones), torch.tensor([0.0, 0.25, 0.75]), atol=0.02, rtol=0)
    assert trainer.evaluate(ones).tolist() == [0.0, 0.0, 0.0]
    mean = HorizontalTrainer(shares, kept, torch.optim.SGD, {"lr": 0.0}).step(ones)
    torch.testing.assert_close(mean, torch.ones(3), atol=0.05, rtol=0)
    assert [model[1].p for model in trainer.models()] == [0.0, 0.25, 0.75]
    assert [name for name, _ in trainer.models()[1].named_buffers()] == []


def test_the_same_dropout_draws_masks_of_its_own_for_each_member() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
    trainer = HorizontalTrainer([model, copy.deepcopy(model)], lambda model, batch: model(batch).sum(), torch.optim.SGD)
    losses = trainer.step(torch.ones(1000, 1))
    assert losses[0] != losses[1]


def test_frozen_parameters_stay() -> None:
    models, seen = models_of(mlp, 2), batches(3)
    for model in models:
        model[0].requires_grad_(False)  # type: ignore[index, operator]
    trainer = HorizontalTrainer(models, loss, torch.optim.SGD, {"lr": 0.1})
    for batch in seen:
        trainer.step(batch)
    trainer.stop(0)
    trainer.step(seen[0])
    assert torch.equal(trainer.models()[1][0].weight, models[1][0].weight)  # type: ignore[index]
    assert not torch.equal(trainer.models()[1][2].weight, models[1][2].weight)  # type: ignore[index]


@pytest.mark.parametrize(
    ("models", "reason"),
    [
        ([], "at least one model"),
        ([nn.ReLU(), nn.ReLU()], "no parameter to train"),
        ([nn.Linear(2, 2), nn.Linear(2, 3)], "shape"),
        ([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))], "built differently"),
        ([nn.Sequential(nn.ReLU()), nn.Sequential(nn.GELU())], "0 is ReLU and GELU"),
        ([nn.Sequential(nn.LayerNorm(2, eps=1e-5)), nn.Sequential(nn.LayerNorm(2, eps=1e-3))], r"differ in 0\.eps"),
        ([nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)], "requires_grad"),
    ],
)
def test_models_that_are_not_alike_are_refused(models: list[nn.Module], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        HorizontalTrainer(models, loss)


def test_what_cannot_be_mapped_is_refused_with_its_reason() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            found: Tensor = self.layer(inputs)
            return found if found.sum() > 0 else -found

    with pytest.raises(RuntimeError, match="cannot be trained as one: vmap"):
        HorizontalTrainer([Branching(), Branching()], loss).step(batches(1)[0])
    recurrent = [nn.LSTM(6, 4), nn.LSTM(6, 4)]
    with pytest.raises(RuntimeError, match="cannot be trained as one: Batching rule not implemented for aten::lstm"):
        HorizontalTrainer(recurrent, lambda model, batch: model(batch[0])[0].sum()).step(batches(1)[0])
    with pytest.raises(ValueError, match="scalar for each member"):
        HorizontalTrainer(models_of(mlp, 2), lambda model, batch: model(batch[0])).step(batches(1)[0])


@pytest.mark.parametrize(
    ("optimizer", "settings", "reason"),
    [
        (torch.optim.LBFGS, {}, "SGD, Adam, AdamW, not by LBFGS"),
        (torch.optim.SGD, {"beta": 1.0}, "knows lr, momentum, dampening, weight_decay, not beta"),
        (torch.optim.Adam, [{"amsgrad": True}, {}], "amsgrad must be the same"),
        (torch.optim.Adam, [{}, {}, {}], "2 models have hyperparameters for 3"),
        (torch.optim.Adam, {"betas": 0.9}, "betas must be two numbers"),
        (torch.optim.Adam, {"betas": (0.9, 1.0)}, "beta2 must be from 0 to below 1"),
        (torch.optim.SGD, {"lr": -0.1}, "lr must be 0 or more"),
        (torch.optim.SGD, {"lr": float("nan")}, "lr must be 0 or more"),
        (torch.optim.SGD, {"lr": "fast"}, "lr must be a number"),
    ],
)
def test_unknown_optimizers_and_hyperparameters_are_refused(optimizer: Any, settings: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        HorizontalTrainer(models_of(mlp, 2), loss, optimizer, settings)
