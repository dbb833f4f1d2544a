"""Train many small models at once: B copies of a model with their own hyperparameters, computed as one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn

from stepscope.remedies.optimizers.stacked_updates import stacked_update

_OWN: Final = frozenset({"training", "forward"})
_PLAIN: Final = (bool, int, float, str, type(None), tuple, torch.dtype)


class MemberDropout(nn.Module):
    """nn.Dropout whose probability is a buffer, so that each member has its own."""

    share: Tensor

    def __init__(self, share: float) -> None:
        super().__init__()
        self.register_buffer("share", torch.tensor(share))

    def forward(self, inputs: Tensor) -> Tensor:
        """Zero elements with this member's probability, and scale the others so that the mean stays."""
        if not self.training:
            return inputs
        kept = torch.rand_like(inputs) >= self.share
        scale = torch.where(self.share < 1, 1 / (1 - self.share), 0.0)  # not infinite if everything is dropped
        return torch.where(kept, inputs, 0.0) * scale.to(inputs.dtype)


@dataclass(frozen=True, slots=True)
class Members:
    """Models that are trained as one.

    Attributes:
        template: a module that computes what each member does, called with any member's values.
        parameters, buffers: name -> values of all members, (members, *shape).
        shares: name of an nn.Dropout -> its probability for each member, if they differ.
        prototype: a copy of the first model, with values.
    """

    template: nn.Module
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    shares: dict[str, list[float]]
    prototype: nn.Module

    def train(self) -> None:
        """Put the template in training mode, except for parts that were in eval() mode in a training model."""
        parts = self.prototype.named_modules()
        held = [name for name, part in parts if _is_held(self.prototype, part)]
        self.template.train()
        for name in held:
            self.template.get_submodule(name).training = False

    def model(self, member: int, values: Mapping[str, Tensor]) -> nn.Module:
        made = copy.deepcopy(self.prototype)
        for name, shares in self.shares.items():
            made.get_submodule(name).p = shares[member]  # type: ignore[assignment]
        own = {**dict(made.named_parameters()), **dict(made.named_buffers())}
        with torch.no_grad():
            for name, value in values.items():
                if name in own:  # everything except a dropout's probability
                    own[name].copy_(value)
        return made


def stacked(models: Sequence[nn.Module]) -> Members:
    """Stack the models' values; the models stay as they are.

    If nn.Dropout's probability differs between models, the template has a `MemberDropout` in its place.

    Raises:
        TypeError: something that is not a module.
        ValueError: no model, none with a parameter to train, or models that differ in more than their values and
            nn.Dropout's probability.
    """
    if not models:
        raise ValueError("give at least one model")
    first = models[0]
    for model in models:
        if not isinstance(model, nn.Module):
            raise TypeError(f"models are torch.nn.Modules, not {type(model).__name__}")
    for number, other in enumerate(models[1:], start=1):
        _check_alike(first, other, number)
    if not any(parameter.requires_grad for parameter in first.parameters()):
        raise ValueError("the models have no parameter to train")
    dropouts = [name for name, module in first.named_modules() if type(module) is nn.Dropout]
    every: dict[str, list[Any]] = {name: [model.get_submodule(name).p for model in models] for name in dropouts}
    shares = {name: [float(share) for share in found] for name, found in every.items() if len(set(found)) > 1}
    fitted = [copy.deepcopy(model) for model in models] if shares else list(models)
    for name, found in shares.items():
        for member, share in zip(fitted, found, strict=True):
            _replace(member, name, MemberDropout(share))
    parameters, buffers = torch.func.stack_module_state(fitted)
    return Members(copy.deepcopy(fitted[0]), parameters, buffers, shares, copy.deepcopy(first))


def _check_alike(first: nn.Module, other: nn.Module, number: int) -> None:
    modules, twins = dict(first.named_modules()), dict(other.named_modules())
    if list(modules) != list(twins):
        odd = next(iter(set(modules) ^ set(twins)), "the order of their layers")
        raise ValueError(f"models 0 and {number} are built differently: {odd or 'their outermost modules differ'}")
    for name, module in modules.items():
        place, twin = name or type(module).__name__, twins[name]
        if type(module) is not type(twin):
            kinds = f"{type(module).__name__} and {type(twin).__name__}"
            raise ValueError(f"models 0 and {number} are built differently: {place} is {kinds}")
        if _is_held(first, module) != _is_held(other, twin):
            raise ValueError(f"models 0 and {number} differ in whether {place} is in eval() mode")
        _check_values(module, twin, place, number)
        _check_settings(module, twin, place, number)
    if _ties(first) != _ties(other):
        raise ValueError(f"models 0 and {number} share their parameters differently")


def _is_held(model: nn.Module, part: nn.Module) -> bool:
    """Whether a part of a model was put in eval() mode by itself, such as a batch norm that keeps its statistics."""
    return model.training and not part.training


def _facts(values: Mapping[str, Tensor | None]) -> list[tuple[Any, ...]]:
    return [
        (name, value is None) if value is None else (name, value.shape, value.dtype, value.device, value.requires_grad)
        for name, value in values.items()
    ]


def _check_values(first: nn.Module, other: nn.Module, place: str, number: int) -> None:
    for kind in ("_parameters", "_buffers"):
        if _facts(getattr(first, kind)) != _facts(getattr(other, kind)):
            raise ValueError(
                f"models 0 and {number} differ in shape, type, device or requires_grad of {place}'s values: models are "
                "trained together where only their values differ"
            )


def _check_settings(first: nn.Module, other: nn.Module, place: str, number: int) -> None:
    for name, value in vars(first).items():
        if name.startswith("_") or name in _OWN or not isinstance(value, _PLAIN):
            continue
        if (type(first), name) == (nn.Dropout, "p"):
            continue
        if vars(other).get(name) != value:
            raise ValueError(
                f"models 0 and {number} differ in {place}.{name} ({value!r} and {vars(other).get(name)!r}): members "
                "may differ in their values, in nn.Dropout's p and in the optimizer's hyperparameters"
            )


def _ties(model: nn.Module) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    module.train(model.get_submodule(name).training)
    setattr(model.get_submodule(parent) if parent else model, last, module)


Loss: TypeAlias = Callable[[Callable[..., Any], Any], Tensor]
"""loss(model, batch) -> a scalar; `model` is called like the member's module."""
Batches: TypeAlias = Literal["shared", "own"]


class HorizontalTrainer:
    """Trains copies of one model as one: each operator runs once for all members instead of once for each.

    A small model leaves most of a device idle, and its host busy with launches; B of them stacked by
    torch.func.stack_module_state and mapped by torch.func.vmap launch as much as one. Each member has its own values,
    random numbers and hyperparameters, independent of the others. The idea is that of HFTA (Wang et al., "Horizontally
    Fused Training Array", MLSys 2021).

    Results equal those of separate trainings except for rounding: after 10 steps in FP64 all values agree within 1e-9
    of the largest, in FP32 within 1e-5 with SGD. (Adam divides by a gradient: if that is zero except for rounding, such
    as for a bias before a batch norm, two separate FP32 programs differ as much.) With dropout each member draws masks
    of its own, not those that a separate program would draw.

    Refused with torch's own message: data-dependent control flow (`if tensor > 0`, `.item()`), operators that
    torch.func.vmap cannot map (nn.LSTM and nn.GRU), nn.BatchNorm with momentum=None.

    Example:
        trainer = HorizontalTrainer(
            [make_model() for _ in range(8)],
            lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            torch.optim.AdamW,
            [{"lr": rate} for rate in rates],
        )
        for batch in loader:
            losses = trainer.step(batch)              # (8,)
        best = trainer.models()[int(losses.argmin())]

    Args:
        models: one per member, built alike on one device; members start from copies of their values. A part in eval()
            mode, such as a batch norm that keeps its statistics, stays so in a training model.
        loss: a function of the model and a batch that returns the mean loss, a scalar.
        optimizer: torch.optim.SGD, Adam or AdamW.
        hyperparameters: for each member the arguments of the optimizer's constructor, such as lr, momentum, betas,
            weight_decay; one mapping applies to all.
        batches: "shared" if all members see the same batch, "own" if the first dimension of each tensor of a batch is
            the members.
        max_norm: clip each member's gradient to this norm, as torch.nn.utils.clip_grad_norm_ does for one model.
        chunk_size: members to map at a time, to need less memory; None for all at once.

    Attributes:
        members: the initial number of members.
        active: the members still in training, ascending.
        hyperparameters: name -> one number for each active member, (active,); may be changed between steps.

    Raises:
        ValueError: models that are not alike, or an unknown optimizer or hyperparameter.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        loss: Loss,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
        hyperparameters: Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
        *,
        batches: Batches = "shared",
        max_norm: float | None = None,
        chunk_size: int | None = None,
    ) -> None:
        if batches not in ("shared", "own"):
            raise ValueError(f'batches is "shared" or "own", not {batches!r}')
        if max_norm is not None and not max_norm >= 0:
            raise ValueError(f"max_norm must be 0 or more, not {max_norm}")
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size must be 1 or more, not {chunk_size}")
        self._stacked = stacked(models)
        self.members = len(models)
        self.active = list(range(self.members))
        self._loss, self._batches, self._chunk_size, self._max_norm = loss, batches, chunk_size, max_norm
        self._ended: dict[int, nn.Module] = {}
        self._template = self._stacked.template
        self._parameters, self._buffers = self._stacked.parameters, self._stacked.buffers
        device = next(iter(self._parameters.values())).device
        self._update, self.hyperparameters = stacked_update(optimizer, self._each(hyperparameters), device)

    def step(self, batch: Any) -> Tensor:
        """Run one training step of all active members.

        Args:
            batch: the loss function's batch; tensors in tuples, lists and dicts are found. With `batches="own"` the
                first dimension of each is all members, including stopped ones.

        Returns:
            The losses before the update, (members,), on the models' device; NaN for stopped members.

        Raises:
            RuntimeError: the model cannot be mapped; the message says why.
            ValueError: every member was stopped, the batch has another number of members, or the loss is not a scalar
                tensor or depends on no parameter.
        """
        for parameter in self._parameters.values():
            parameter.grad = None
        self._stacked.train()
        losses = self._mapped(batch)
        if not losses.requires_grad:
            raise ValueError("the loss does not depend on the models' parameters: was it detached?")
        losses.sum().backward()  # type: ignore[no-untyped-call]
        if self._max_norm is not None:
            self._clip(self._max_norm)
        self._update.step(self._parameters, self.hyperparameters)
        return self._of_all(losses.detach())

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Tensor:
        """Compute the losses of all active members without training: (members,), NaN for stopped members."""
        self._template.eval()
        return self._of_all(self._mapped(batch))

    def stop(self, *members: int) -> None:
        """End the training of these members; the others continue, at accordingly lower cost.

        Raises ValueError for a member that does not exist or was stopped before.
        """
        for member in members:
            if member not in self.active:
                raise ValueError(f"member {member} is not trained; those that are: {self.active}")
        kept = [place for place, member in enumerate(self.active) if member not in members]
        for member in members:
            self._ended[member] = self._model(member)
        self.active = [self.active[place] for place in kept]
        with torch.no_grad():
            places = torch.tensor(kept, dtype=torch.int64, device=next(iter(self.hyperparameters.values())).device)
            self._parameters = {
                name: value.detach().index_select(0, places).requires_grad_(value.requires_grad)
                for name, value in self._parameters.items()
            }
            self._buffers = {name: value.index_select(0, places) for name, value in self._buffers.items()}
            self.hyperparameters = {name: each.index_select(0, places) for name, each in self.hyperparameters.items()}
            self._update.keep(places)

    def models(self) -> list[nn.Module]:
        """Return every member as a separate module, in the given order; copies, with the current values."""
        return [
            copy.deepcopy(self._ended[member]) if member in self._ended else self._model(member)
            for member in range(self.members)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume, for torch.save and `load_state_dict` of a trainer built alike."""
        return {
            "active": list(self.active),
            "parameters": {name: value.detach().clone() for name, value in self._parameters.items()},
            "buffers": {name: value.clone() for name, value in self._buffers.items()},
            "hyperparameters": {name: value.clone() for name, value in self.hyperparameters.items()},
            "steps": dict(self._update.steps),
            "optimizer": {
                name: {key: each.clone() for key, each in of.items()} for name, of in self._update.state.items()
            },
            "ended": {member: model.state_dict() for member, model in self._ended.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`. Raises ValueError if it belongs to other models."""
        shapes = {name: value.shape[1:] for name, value in state["parameters"].items()}
        if shapes != {name: value.shape[1:] for name, value in self._parameters.items()}:
            raise ValueError("the state belongs to models with other parameters")
        if set(state["active"]) | set(state["ended"]) != set(range(self.members)):
            raise ValueError(f"the state does not have {self.members} members")
        trained = {name: value.requires_grad for name, value in self._parameters.items()}
        self.active = list(state["active"])
        self._parameters = {n: v.detach().clone().requires_grad_(trained[n]) for n, v in state["parameters"].items()}
        self._buffers = {name: value.clone() for name, value in state["buffers"].items()}
        self.hyperparameters = {name: value.clone() for name, value in state["hyperparameters"].items()}
        self._update.steps = dict(state["steps"])
        self._update.state = {n: {k: each.clone() for k, each in of.items()} for n, of in state["optimizer"].items()}
        self._ended = {member: self._stacked.model(member, values) for member, values in state["ended"].items()}

    def _mapped(self, batch: Any) -> Tensor:
        if not self.active:
            raise ValueError("every member was stopped")
        dimension, chosen = (None, batch) if self._batches == "shared" else (0, self._of_active(batch))

        def loss_of_one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any) -> Tensor:
            def model(*positional: Any, **named: Any) -> Any:
                return torch.func.functional_call(self._template, (parameters, buffers), positional, named)

            found = self._loss(model, batch)
            if not isinstance(found, Tensor):
                raise ValueError(f"the loss must be a tensor, a scalar for each member, not {type(found).__name__}")
            return found

        dimensions = (0, 0, dimension)
        mapped = torch.func.vmap(loss_of_one, dimensions, randomness="different", chunk_size=self._chunk_size)
        try:
            with _kernels_that_can_be_mapped(next(iter(self._parameters.values())).device):
                losses: Tensor = mapped(self._parameters, self._buffers, chosen)
        except RuntimeError as error:
            raise RuntimeError(f"these models cannot be trained as one: {_first_sentence(error)}") from error
        if losses.shape != (len(self.active),):
            raise ValueError(f"the loss must be a scalar for each member, not {tuple(losses.shape[1:])}")
        return losses

    def _clip(self, max_norm: float) -> None:
        gradients = [each.grad for each in self._parameters.values() if each.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(grad.flatten(1), dim=1) for grad in gradients])
        factor = (max_norm / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
        for grad in gradients:
            grad.mul_(factor.view(-1, *[1] * (grad.dim() - 1)).to(grad.dtype))

    def _of_all(self, losses: Tensor) -> Tensor:
        if len(self.active) == self.members:
            return losses
        found = losses.new_full((self.members,), float("nan"))
        found[self.active] = losses
        return found

    def _of_active(self, batch: Any) -> Any:
        def rows(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.dim() == 0 or value.shape[0] != self.members:
                raise ValueError(
                    f"a batch of its own for each member begins with {self.members}, not {tuple(value.shape)}"
                )
            return value if len(self.active) == self.members else value[self.active]

        return torch.utils._pytree.tree_map(rows, batch)

    def _model(self, member: int) -> nn.Module:
        place = self.active.index(member)
        values = {**self._parameters, **self._buffers}
        return self._stacked.model(member, {name: value.detach()[place] for name, value in values.items()})

    def _each(self, given: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        if isinstance(given, Mapping):
            return [given] * self.members
        if not given:
            return [{}] * self.members
        if len(given) != self.members:
            raise ValueError(f"{self.members} models have hyperparameters for {len(given)}")
        return list(given)


def _kernels_that_can_be_mapped(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """On the CPU, use attention of plain operators: the fused kernel has no batched form, and would run per member."""
    if device.type != "cpu":
        return contextlib.nullcontext()
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:  # before PyTorch 2.3
        return contextlib.nullcontext()
    return sdpa_kernel(SDPBackend.MATH)


def _first_sentence(error: Exception) -> str:
    return str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
