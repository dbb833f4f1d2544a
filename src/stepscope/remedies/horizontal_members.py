"""Whether models can be trained as one, and the one module that stands for all of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

_OWN: Final = frozenset({"training", "forward"})
_PLAIN: Final = (bool, int, float, str, type(None), tuple, torch.dtype)


class MemberDropout(nn.Module):
    """nn.Dropout whose share is a buffer, so that each member has its own."""

    share: Tensor

    def __init__(self, share: float) -> None:
        super().__init__()
        self.register_buffer("share", torch.tensor(share))

    def forward(self, inputs: Tensor) -> Tensor:
        """Zero each element with this member's share, and scale the others so that the mean stays."""
        if not self.training:
            return inputs
        kept = torch.rand_like(inputs) >= self.share
        scale = torch.where(self.share < 1, 1 / (1 - self.share), 0.0)  # not infinite where all is dropped
        return torch.where(kept, inputs, 0.0) * scale.to(inputs.dtype)


@dataclass(frozen=True, slots=True)
class Members:
    """Models that are trained as one.

    Attributes:
        template: a module that computes what each of them does, with whatever values it is called with.
        parameters, buffers: name -> values of all members, (members, *shape).
        shares: name of an nn.Dropout -> its share for each member, where they differ.
        prototype: a copy of the first model, with values.
    """

    template: nn.Module
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    shares: dict[str, list[float]]
    prototype: nn.Module

    def train(self) -> None:
        """Put the template in training mode, all but those parts that were in eval() mode in a model that trains."""
        parts = self.prototype.named_modules()
        held = [name for name, part in parts if _is_held(self.prototype, part)]
        self.template.train()
        for name in held:
            self.template.get_submodule(name).training = False

    def model(self, member: int, values: Mapping[str, Tensor]) -> nn.Module:
        """A module of its own with that member's values and dropout."""
        made = copy.deepcopy(self.prototype)
        for name, shares in self.shares.items():
            made.get_submodule(name).p = shares[member]  # type: ignore[assignment]
        own = {**dict(made.named_parameters()), **dict(made.named_buffers())}
        with torch.no_grad():
            for name, value in values.items():
                if name in own:  # all but a dropout's share
                    own[name].copy_(value)
        return made


def stacked(models: Sequence[nn.Module]) -> Members:
    """The models' values one above the other; the models stay as they are.

    Where nn.Dropout's share differs between models, the template has a `MemberDropout` in its place.

    Raises:
        TypeError: something that is no module.
        ValueError: no model, none with a parameter to train, or models that differ in more than their values and
            nn.Dropout's share.
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
    shares = {
        name: found
        for name, module in first.named_modules()
        if type(module) is nn.Dropout and len(set(found := _shares(models, name))) > 1
    }
    fitted = [copy.deepcopy(model) for model in models] if shares else list(models)
    for name, found in shares.items():
        for member, share in zip(fitted, found, strict=True):
            _replace(member, name, MemberDropout(share))
    parameters, buffers = torch.func.stack_module_state(fitted)
    return Members(copy.deepcopy(fitted[0]), parameters, buffers, shares, copy.deepcopy(first))


def _shares(models: Sequence[nn.Module], name: str) -> list[float]:
    found: list[Any] = [model.get_submodule(name).p for model in models]
    return [float(share) for share in found]


def _check_alike(first: nn.Module, other: nn.Module, number: int) -> None:
    mine, theirs = dict(first.named_modules()), dict(other.named_modules())
    if list(mine) != list(theirs):
        odd = next(iter(set(mine) ^ set(theirs)), "the order of their layers")
        raise ValueError(f"models 0 and {number} are built differently: {odd or 'their outermost modules differ'}")
    for name, module in mine.items():
        place, twin = name or type(module).__name__, theirs[name]
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
    """Whether a part of a model was put in eval() mode by itself, as a batch norm that is to keep its statistics."""
    return model.training and not part.training


def _check_values(first: nn.Module, other: nn.Module, place: str, number: int) -> None:
    for kind in ("_parameters", "_buffers"):
        mine, theirs = getattr(first, kind), getattr(other, kind)
        facts = [
            {name: None if value is None else (tuple(value.shape), value.dtype, value.device, value.requires_grad)}
            for values in (mine, theirs)
            for name, value in values.items()
        ]
        half = len(facts) // 2
        if facts[:half] != facts[half:]:
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
    """Names of parameters that are one tensor."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    module.train(model.get_submodule(name).training)
    setattr(model.get_submodule(parent) if parent else model, last, module)
