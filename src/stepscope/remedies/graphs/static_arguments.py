"""Keep a call's arguments in static tensors, for graphs that read the same memory at every replay."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_MOST_DEEP: Final = 20


class NotStatic(Exception):
    """A graph cannot have this argument or result; the message says which and what to give instead."""


class _Same:
    """An object that equals only itself, and is kept alive by its holder."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True, slots=True)
class Flat:
    """A value as its tensors, in order, and everything else as a comparable structure."""

    tensors: tuple[Tensor, ...]
    structure: Hashable

    def rebuilt(self, tensors: Sequence[Tensor]) -> Any:
        """The value with these tensors in place of its own."""
        return _built(self.structure, iter(tensors))

    @property
    def signature(self) -> Hashable:
        """Equal for values that the same graph can serve."""
        return (self.structure, *((each.shape, each.dtype, each.device, each.stride()) for each in self.tensors))


def flat(value: Any, what: str = "the argument") -> Flat:
    """Flatten a value: tuples, lists and dictionaries of tensors, plain values, modules and functions.

    Raises NotStatic for any other object, since its tensors cannot be seen.
    """
    tensors: list[Tensor] = []
    structure = _taken_apart(value, tensors, what, 0)
    return Flat(tuple(tensors), structure)


def _taken_apart(value: Any, tensors: list[Tensor], what: str, depth: int) -> Hashable:
    kind = type(value)
    if kind in (Tensor, torch.nn.Parameter) and value.layout == torch.strided:
        tensors.append(value)
        return ("tensor",)
    if kind in _PLAIN:
        return ("plain", kind, value)
    if depth < _MOST_DEEP and kind in (list, tuple):
        return (kind, *(_taken_apart(each, tensors, what, depth + 1) for each in value))
    if depth < _MOST_DEEP and isinstance(value, tuple) and hasattr(kind, "_fields"):
        named: Any = kind
        return ("named", named, *(_taken_apart(each, tensors, what, depth + 1) for each in value))
    if depth < _MOST_DEEP and kind in (dict, OrderedDict):
        inside = [(_taken_apart(each, tensors, what, depth + 1)) for each in value.values()]
        return ("mapping", kind, tuple(value), *inside)
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) or (callable(value) and not torch.is_tensor(value)):
        return ("object", _Same(value))
    raise NotStatic(
        f"{what} holds a {kind.__name__}, whose memory is not known: use plain tensors, or tuples, lists and "
        "dictionaries of them"
    )


def _built(structure: Any, tensors: Iterator[Tensor]) -> Any:
    kind = structure[0]
    if kind == "tensor":
        return next(tensors)
    if kind == "plain":
        return structure[2]
    if kind == "object":
        return structure[1].value
    if kind == "mapping":
        values = [_built(each, tensors) for each in structure[3:]]
        return structure[1](zip(structure[2], values, strict=True))
    if kind == "named":
        return structure[1](*(_built(each, tensors) for each in structure[2:]))
    return kind(_built(each, tensors) for each in structure[1:])


class StaticArguments:
    """Tensors of the same shapes as a call's, at addresses that never change.

    Raises NotStatic if a tensor requires a gradient, which would go to the copy.
    """

    def __init__(self, given: Flat, device: torch.device) -> None:
        for each in given.tensors:
            if each.requires_grad:
                raise NotStatic(
                    "a tensor among the arguments requires a gradient, which its copy would get: let the function "
                    "read it from outside, or make it inside"
                )
        self._given = given
        with torch.inference_mode(False):  # inference tensors do not count their versions
            self.buffers = tuple(
                torch.empty_like(each, device=device if each.device.type == "cpu" else each.device, requires_grad=False)
                for each in given.tensors
            )

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy a call's tensors in, without waiting for the device."""
        for buffer, tensor in zip(self.buffers, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)

    def call(self, function: Callable[..., Any]) -> Any:
        args, kwargs = self._given.rebuilt(self.buffers)
        return function(*args, **kwargs)


_CUDA: Final = ("cuda",)


class GraphedOptimizers:
    """The optimizers that a captured function steps."""

    def __init__(self, device_types: Sequence[str] = _CUDA) -> None:
        self._device_types = device_types
        self._optimizers: list[Optimizer] = []
        self._kept: list[tuple[Any, Any]] = []
        self._rates: list[tuple[dict[str, Any], Tensor]] = []

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self._optimizers)

    def add(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers += optimizers
        self.prepare()

    def prepare(self) -> None:
        """Put everything a step reads on the device; again after `load_state_dict`, which replaces it."""
        self._kept = [(each.state, each.param_groups) for each in self._optimizers]
        self._rates = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                device = _device(group, self._device_types)
                if device is None:
                    continue
                if "capturable" in group:
                    group["capturable"] = True
                    _move_counts(optimizer, group, device)
                if _takes_rates(optimizer, group):
                    rate = group["lr"]
                    kept = torch.tensor(float(rate), dtype=torch.float32, device=device)
                    group["lr"] = kept
                    self._rates.append((group, kept))

    def refresh(self) -> bool:
        """Take over learning rates set since; return whether states were replaced, which makes graphs useless."""
        if any(
            each.state is not state or each.param_groups is not groups
            for each, (state, groups) in zip(self._optimizers, self._kept, strict=True)
        ):
            self.prepare()
            return True
        for group, kept in self._rates:
            rate = group["lr"]
            if rate is not kept:
                if isinstance(rate, Tensor):
                    kept.copy_(rate, non_blocking=True)
                else:
                    kept.fill_(float(rate))
                group["lr"] = kept
        return False

    @property
    def key(self) -> Hashable:
        """The settings that a graph holds as constants."""
        own = {id(kept) for _, kept in self._rates}
        return tuple(
            tuple(
                (name, _constant(value))
                for name, value in group.items()
                if name not in ("params", "initial_lr") and id(value) not in own
            )
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        )

    @property
    def settings(self) -> Hashable:
        """All of the groups' current settings, to detect changes."""
        return self.key, tuple((id(group["lr"]), kept._version) for group, kept in self._rates)


def _device(group: dict[str, Any], types: Sequence[str]) -> torch.device | None:
    """The one device of the given types that holds all of the group's parameters; None otherwise."""
    devices = {each.device for each in group["params"]}
    found = devices.pop() if len(devices) == 1 else None
    return found if found is not None and found.type in types else None


def _takes_rates(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether its kernels read the learning rate from the device."""
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return bool(group.get("capturable"))
    return isinstance(optimizer, torch.optim.SGD) and bool(group.get("fused"))


def _move_counts(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> None:
    """Move step counts from the host to the device, as torch keeps them with capturable=True."""
    for parameter in group["params"]:
        state = optimizer.state.get(parameter, {})
        count = state.get("step")
        if isinstance(count, Tensor):
            state["step"] = count.to(device=device, dtype=torch.float32)
        elif count is not None:
            state["step"] = torch.tensor(float(count), dtype=torch.float32, device=device)


def _constant(value: object) -> Hashable:
    """A setting as a key: device tensors by address, host tensors by value."""
    if isinstance(value, Tensor):
        return (float(value),) if value.device.type == "cpu" and value.numel() == 1 else value.data_ptr()
    if isinstance(value, (list, tuple)):
        return tuple(_constant(each) for each in value)
    return value if isinstance(value, Hashable) else id(value)
