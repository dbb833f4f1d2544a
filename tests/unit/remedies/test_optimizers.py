"""fuse_optimizer keeps the trajectory, the object and the state, and says what it does not fuse."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.remedies import fuse_optimizer  # noqa: E402
from stepscope.remedies.optimizers import vendor  # noqa: E402

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.05}),
    "SGD, momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "SGD, nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "Adam": ("Adam", {"lr": 0.01, "weight_decay": 0.01}),
    "AdamW": ("AdamW", {"lr": 0.01}),
    "AdamW, amsgrad": ("AdamW", {"lr": 0.01, "amsgrad": True, "maximize": False}),
    "Adagrad": ("Adagrad", {"lr": 0.05, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "RMSprop": ("RMSprop", {"lr": 0.005, "momentum": 0.5, "centered": True}),
    "NAdam": ("NAdam", {"lr": 0.01}),
    "Adamax": ("Adamax", {"lr": 0.01}),
}


def network(dtype: Any = None) -> Any:
    torch.manual_seed(1)
    layers = (torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 6), torch.nn.LayerNorm(6))
    return torch.nn.Sequential(*layers).to(dtype or torch.float32)


def train(model: Any, optimizer: Any, steps: int, first: int = 0) -> None:
    for number in range(first, first + steps):
        batch = torch.randn(16, 12, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(batch.to(next(model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()


def made(name: str, model: Any) -> Any:
    kind, options = OPTIMIZERS[name]
    return getattr(torch.optim, kind)(model.parameters(), **options)


def quietly(optimizer: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return fuse_optimizer(optimizer)


def distance(one: Any, other: Any) -> float:
    """The largest difference of two models' parameters, over the size of the largest of them."""
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    size = max(float(parameter.detach().double().abs().max()) for parameter, _ in pairs)
    return max(float((a.detach().double() - b.detach().double()).abs().max()) for a, b in pairs) / size


@pytest.mark.parametrize(
    ("name", "made_before"), [*((name, 5) for name in OPTIMIZERS), ("SGD, momentum", 0), ("AdamW", 0)]
)
def test_fifty_steps_are_the_unfused_ones_in_fp32(name: str, made_before: int) -> None:
    """To 5e-5 of the largest parameter, also with state that was made before."""
    plain, other = network(), network()
    reference, optimizer = made(name, plain), made(name, other)
    train(plain, reference, 50)
    train(other, optimizer, made_before)
    assert quietly(optimizer) is optimizer
    train(other, optimizer, 50 - made_before, first=made_before)
    assert distance(plain, other) < 5e-5
    assert distance(network(), other) > 0.01, "nothing was learned"


@pytest.mark.parametrize("name", ["Adam", "AdamW", "AdamW, amsgrad", "Adagrad"])
def test_in_bf16_fifty_fused_steps_are_no_farther_from_fp32_than_the_loop(name: str) -> None:
    """A fused update rounds once, the loop after each operator: it may be 1.1 times as far away at most."""
    exact, plain, other = network(torch.bfloat16).float(), network(torch.bfloat16), network(torch.bfloat16)
    train(exact, made(name, exact), 50)
    train(plain, made(name, plain), 50)
    optimizer = made(name, other)
    train(other, optimizer, 5)
    assert fuse_optimizer(optimizer).fusion.implementation == "fused"
    train(other, optimizer, 45, first=5)
    assert distance(exact, other) <= 1.1 * distance(exact, plain)
    assert distance(plain, other) < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["SGD", "SGD, momentum", "AdamW", "Adagrad"])
def test_a_fused_kernel_that_computes_something_else_is_not_used(name: str, dtype: Any) -> None:
    """As fused SGD in bf16 and fp16 on a CPU with torch 2.13 (pytorch issue 191763): the choice follows it."""
    plain, other = (torch.nn.Parameter(torch.linspace(-1, 1, 200).to(dtype)) for _ in range(2))
    kind, options = OPTIMIZERS[name]
    reference, optimizer = (getattr(torch.optim, kind)([parameter], **options) for parameter in (plain, other))
    quietly(optimizer)
    for number in range(5):
        plain.grad = (torch.cos(torch.arange(200.0) * (number + 1)) + 2).to(dtype)
        other.grad = plain.grad.clone()
        reference.step()
        optimizer.step()
    assert float((plain - other).detach().abs().max()) <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["SGD", "SGD, nesterov", "Adam", "AdamW, amsgrad", "Adagrad"])
def test_what_torch_can_fuse_runs_its_fused_kernel(name: str) -> None:
    model = network()
    optimizer = fuse_optimizer(made(name, model))
    with torch.profiler.profile() as profile:
        train(model, optimizer, 1)
    called = {event.key for event in profile.key_averages()}
    kernel = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw", "Adagrad": "adagrad"}[type(optimizer).__name__]
    assert f"aten::_fused_{kernel}_" in called
    assert optimizer.fusion.reasons == ()
    assert fuse_optimizer(made(name, network(torch.float64))).fusion.implementation == "fused"
    assert str(optimizer.fusion) == "updates with torch's fused kernels"


def test_lists_of_tensors_where_nothing_is_fused_and_parameters_are_small() -> None:
    optimizer = torch.optim.RMSprop(network().parameters(), lr=0.01)
    with pytest.warns(
        UserWarning, match=r"^RMSprop updates lists of tensors, not fused: torch .* has no fused RMSprop$"
    ):
        fuse_optimizer(optimizer)
    assert [group["foreach"] for group in optimizer.param_groups] == [True]


def test_the_loop_stays_where_lists_are_slower() -> None:
    optimizer = torch.optim.RMSprop([torch.nn.Parameter(torch.zeros(5000))], lr=0.01)
    with pytest.warns(UserWarning, match="^RMSprop is left as it was, not fused: torch"):
        fuse_optimizer(optimizer)
    assert optimizer.param_groups[0]["foreach"] is None


def with_gaps() -> Any:
    return torch.optim.AdamW([torch.zeros(4, 8)[:, ::2].requires_grad_()])


def half_state() -> Any:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()
    optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"] = torch.zeros(3, dtype=torch.float16)
    return optimizer


def own_step() -> Any:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return None

    return Own([torch.nn.Parameter(torch.zeros(3))], lr=0.1)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.optim.LBFGS(network().parameters()), "has no fused LBFGS"),
    (lambda: torch.optim.SparseAdam(network().parameters()), "has no fused SparseAdam"),
    (lambda: torch.optim.Adam(network().parameters(), differentiable=True), "differentiable=True asks for"),
    (lambda: torch.optim.AdamW(network().to("meta").parameters()), "has no fused AdamW for torch.float32 on meta"),
    (
        lambda: torch.optim.SGD([torch.zeros(2, dtype=torch.complex64, requires_grad=True)], lr=0.1),
        "has no fused SGD for torch.complex64 on cpu",
    ),
    (with_gaps, r"a parameter of shape \(4, 4\) is a view with gaps"),
    (half_state, "state 'exp_avg' is torch.float16 on cpu, its parameter torch.float32 on cpu"),
    (own_step, "Own has a step of its own"),
]


@pytest.mark.parametrize(("build", "reason"), REFUSED)
def test_what_cannot_be_fused_is_said_once_and_left_alone(build: Callable[[], Any], reason: str) -> None:
    optimizer = build()
    with pytest.warns(UserWarning, match=reason) as said:
        assert fuse_optimizer(optimizer) is optimizer
    assert len(said) == 1
    assert not any(group.get("fused") for group in optimizer.param_groups)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fuse_optimizer(optimizer)  # asked again, it is not said again


def test_groups_are_fused_one_by_one() -> None:
    fine, gaps = torch.nn.Parameter(torch.zeros(3)), torch.zeros(4, 8)[:, ::2].requires_grad_()
    optimizer = torch.optim.AdamW([{"params": [fine]}, {"params": [gaps]}])
    with pytest.warns(UserWarning, match="^AdamW is partly fused: a parameter of shape"):
        fuse_optimizer(optimizer)
    assert [bool(group["fused"]) for group in optimizer.param_groups] == [True, False]
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)
    fine.grad, gaps.grad = torch.ones(3), torch.ones(4, 4)
    optimizer.step()
    assert float(fine.detach().abs().min()) > 0
    assert float(gaps.detach().abs().min()) > 0


def test_something_else_than_an_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"fuse_optimizer takes an optimizer of torch\.optim, not Sequential"):
        fuse_optimizer(network())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_gradients_put_sgd_back_in_the_step_that_brings_them(momentum: float) -> None:
    tables = [torch.nn.Embedding(10, 4, sparse=True, _weight=torch.ones(10, 4)) for _ in range(2)]
    optimizers = [torch.optim.SGD(table.parameters(), lr=0.1, momentum=momentum) for table in tables]
    fuse_optimizer(optimizers[1])
    said = []
    for table, optimizer in zip(tables, optimizers, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            table(torch.tensor([1, 2, 2])).sum().backward()
            with warnings.catch_warnings(record=True) as caught:
                optimizer.step()
            said += [str(each.message) for each in caught]
    assert said == ["SGD is left as it was, not fused: the gradient of a parameter of shape (10, 4) is sparse"]
    assert torch.equal(tables[0].weight, tables[1].weight)
    assert optimizers[1].fusion.implementation == "unchanged"


def test_a_parameter_that_gets_its_first_gradient_late_has_momentum_from_then_on() -> None:
    results = []
    for fuse in (False, True):
        early, late = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        optimizer = torch.optim.SGD([early, late], lr=0.1, momentum=0.9, weight_decay=0.1)
        if fuse:
            fuse_optimizer(optimizer)
        for number in range(4):
            early.grad = torch.full((3,), float(number))
            late.grad = torch.full((3,), 2.0) if number >= 2 else None
            optimizer.step()
        results.append((early.detach().clone(), late.detach().clone()))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6)


def test_a_gradient_of_another_layout_is_not_misread() -> None:
    """torch 2.13's fused kernels for a CPU read gradients in the parameter's order of memory, whatever their own."""
    results = []
    for fuse in (False, True):
        parameter = torch.arange(8.0).reshape(2, 4).t().requires_grad_()
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        if fuse:
            fuse_optimizer(optimizer)
        parameter.grad = torch.arange(8.0).reshape(4, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            optimizer.step()
        results.append(parameter.detach().clone())
    assert torch.equal(*results)


def test_a_closure_is_called_once_and_its_gradients_are_looked_at() -> None:
    table = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = fuse_optimizer(torch.optim.SGD(table.parameters(), lr=0.1))
    calls = []

    def closure() -> Any:
        calls.append(1)
        loss = table(torch.tensor([1])).sum()
        loss.backward()
        return loss

    with pytest.warns(UserWarning, match="is sparse"):
        loss = optimizer.step(closure)
    assert float(loss.detach()) == pytest.approx(float(table.weight[1].detach().sum()) + 0.4, abs=1e-5)
    assert calls == [1]


def test_hooks_that_come_after_are_called() -> None:
    model = network()
    optimizer = fuse_optimizer(torch.optim.AdamW(model.parameters()))
    called = []
    for number in range(2):
        optimizer.register_step_pre_hook(lambda *_, number=number: called.append(number))
    train(model, optimizer, 2)
    assert called == [0, 1, 0, 1]


def test_schedulers_and_scalers_go_on_working() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert fuse_optimizer(optimizer) is optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            optimizer.zero_grad()
            batch = torch.randn(4, 12, generator=torch.Generator().manual_seed(number))
            scaler.scale(model(batch).square().mean()).backward()
            if number == 1:
                model[0].weight.grad[0, 0] = float("inf")
            before = model[0].weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            assert torch.equal(before, model[0].weight) == (number == 1), "a step with an overflow has to be left out"
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
    assert scaler.get_scale() == 512.0


def test_a_sparse_gradient_under_a_scaler_is_unscaled() -> None:
    results = []
    for fuse in (False, True):
        table = torch.nn.Embedding(10, 4, sparse=True, _weight=torch.ones(10, 4))
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        if fuse:
            fuse_optimizer(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(2):
                optimizer.zero_grad()
                scaler.scale(table(torch.tensor([1, 2])).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
        results.append(table.weight.detach().clone())
    assert torch.equal(*results)


def test_a_checkpoint_of_the_loop_is_loaded_and_fused_again() -> None:
    plain, other = network(), network()
    reference, optimizer = made("AdamW", plain), fuse_optimizer(made("AdamW", other))
    train(plain, reference, 5)
    other.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert [group["fused"] for group in optimizer.param_groups] == [True]
    train(plain, reference, 20, first=5)
    train(other, optimizer, 20, first=5)
    assert distance(plain, other) < 1e-5


def test_step_counts_of_older_checkpoints_are_numbers() -> None:
    model = network()
    optimizer = made("Adam", model)
    train(model, optimizer, 2)
    for state in optimizer.state.values():
        state["step"] = int(state["step"])
    fuse_optimizer(optimizer)
    train(model, optimizer, 1)
    steps = [state["step"] for state in optimizer.state.values()]
    assert [(step.dtype, float(step)) for step in steps] == [(torch.float32, 3.0)] * len(steps)


GAUDI = '''
"""Stands for Gaudi's package: the documented constructor, and the update on a CPU that its documentation refers to."""
import torch

class FusedAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=0.001, betas=(0.9, 0.999), eps=1e-06, weight_decay=0.0, bias_correction=True,
                 moments_dtype=None):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
                                      bias_correction=bias_correction))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                first, second = group["betas"]
                state["exp_avg"].lerp_(p.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                size = group["lr"] * (1 - second ** group["step"]) ** 0.5 / (1 - first ** group["step"])
                p.mul_(1 - group["weight_decay"] * group["lr"])
                p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt() + group["eps"], value=-size)
'''


@pytest.fixture
def gaudi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of Gaudi's on the path; that parameters are on an HPU is all that is feigned of the device."""
    folder = tmp_path / "habana_frameworks" / "torch" / "hpex" / "optimizers"
    folder.mkdir(parents=True)
    for parent in (folder.parent, folder.parent.parent, folder.parent.parent.parent):
        (parent / "__init__.py").touch()
    (folder / "__init__.py").write_text(GAUDI)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(vendor, "_devices", lambda optimizer: {"hpu"})


@pytest.mark.usefixtures("gaudi")
def test_on_gaudi_the_vendors_optimizer_takes_over_groups_state_and_schedule() -> None:
    plain, other = network(), network()
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-12, "weight_decay": 0.1}
    reference, before = (torch.optim.AdamW(model.parameters(), **options) for model in (plain, other))
    scheduler = torch.optim.lr_scheduler.StepLR(before, 1, gamma=0.9)
    train(plain, reference, 5)
    train(other, before, 5)
    optimizer = fuse_optimizer(before)
    assert optimizer.fusion.implementation == "habana_frameworks.torch.hpex.optimizers.FusedAdamW"
    assert fuse_optimizer(optimizer) is optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(5, 15):
            train(plain, reference, 1, first=number)
            train(other, optimizer, 1, first=number)
            scheduler.step()
            reference.param_groups[0]["lr"] *= 0.9
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**10)
    assert distance(plain, other) < 1e-5


@pytest.mark.usefixtures("gaudi")
@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("AdamW", {"amsgrad": True}, "Gaudi's fused AdamW has neither amsgrad nor maximize"),
        ("Adam", {"weight_decay": 0.1}, "Gaudi's fused Adam decays weights as AdamW does, so weight_decay must be 0"),
        ("SGD", {"lr": 0.1}, "habana_frameworks.torch.hpex.optimizers has no FusedSGD here"),
        ("RMSprop", {}, "Gaudi has no fused RMSprop"),
    ],
)
def test_what_gaudis_optimizers_do_not_know_stays_with_torchs(kind: str, options: dict[str, Any], reason: str) -> None:
    optimizer = getattr(torch.optim, kind)(network().parameters(), **options)
    assert quietly(optimizer) is optimizer
    assert optimizer.fusion.implementation == ("foreach" if kind == "RMSprop" else "fused")
    assert vendor.vendor_optimizer(optimizer, kind) == (None, reason)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["SGD, momentum", "AdamW, amsgrad", "Adagrad"])
def test_on_a_gpu_state_that_was_made_before_goes_on(name: str) -> None:
    plain, other = network(), network()
    plain.cuda(), other.cuda()
    reference, optimizer = made(name, plain), made(name, other)
    for model, used in ((plain, reference), (other, optimizer)):
        for number in range(20):
            if number == 5 and used is optimizer:
                assert fuse_optimizer(optimizer).fusion.implementation == "fused"
            batch = torch.randn(16, 12, generator=torch.Generator().manual_seed(number)).cuda()
            used.zero_grad()
            model(batch).square().mean().backward()
            used.step()
    assert distance(plain, other) < 5e-5
