"""A call's arguments in tensors that stay where they are, for graphs that read the same memory in every launch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_MOST_DEEP: Final = 20


class NotStatic(Exception):
    """An argument or result that a graph cannot have; the message says which and what to give instead."""


class _Same:
    """An object that counts as equal to itself only, and is kept alive with whatever holds this."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True, slots=True)
class Flat:
    """A value as the tensors in it, in order, and everything else, which can be compared."""

    tensors: tuple[Tensor, ...]
    structure: Hashable

    def rebuilt(self, tensors: Sequence[Tensor]) -> Any:
        """The value with these tensors in place of its own."""
        return _built(self.structure, iter(tensors))

    @property
    def signature(self) -> Hashable:
        """What two values must share for the same graph to serve both."""
        return (self.structure, *((each.shape, each.dtype, each.device, each.stride()) for each in self.tensors))


def flat(value: Any, what: str = "the argument") -> Flat:
    """The value taken apart: tuples, lists and dictionaries of tensors, plain values, modules and functions.

    Raises:
        NotStatic: something else is in it, whose tensors cannot be seen.
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
        f"{what} holds a {kind.__name__}, whose memory cannot be told: use plain tensors, or tuples, lists and "
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

    Args:
        given: the arguments of the call that comes first, as `flat((args, kwargs))`.
        device: where tensors of the host get their copies; those of a device stay on theirs.

    Raises:
        NotStatic: a tensor that wants a gradient: the copy's would not be its own.
    """

    def __init__(self, given: Flat, device: torch.device) -> None:
        for each in given.tensors:
            if each.requires_grad:
                raise NotStatic(
                    "a tensor among the arguments wants a gradient, which a copy of it would get: let the function "
                    "read it from outside, or make it inside"
                )
        self._given = given
        with torch.inference_mode(False):  # tensors of inference do not count how often they are changed
            self.buffers = tuple(
                torch.empty_like(each, device=device if each.device.type == "cpu" else each.device, requires_grad=False)
                for each in given.tensors
            )

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy a call's tensors in, without waiting for the device."""
        for buffer, tensor in zip(self.buffers, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)

    def call(self, function: Callable[..., Any]) -> Any:
        """The function's result for what was filled in."""
        args, kwargs = self._given.rebuilt(self.buffers)
        return function(*args, **kwargs)
