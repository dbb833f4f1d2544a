"""Weights that several modules share: find them, check whether they still are shared, and tie them again.

Sharing is lost when parameters are replaced one by one: by `.to()` onto a device whose tensors are of another kind
(XLA, some accelerators), by `to_empty()` from the meta device, by `load_state_dict(assign=True)`. The copies then train
apart, and take their memory twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias

import torch
from torch import Tensor

__all__ = ["LoopConstants"]


Ties: TypeAlias = tuple[tuple[str, ...], ...]
"""Groups of names of the same parameter, in the model's order."""

_WRAPPERS: Final = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of names that wrappers add: data parallel, torch.compile, FSDP, activation checkpointing."""


def tied_parameters(model: torch.nn.Module) -> Ties:
    """Names of parameters that are the same object, or are at the same place in memory.

    Keep the result and pass it to `check_tied` and `tie_again` after the model was moved, wrapped or loaded. It works
    on the meta device and with parametrized modules, whose names are those of `model.named_parameters()`.

    Returns:
        A tuple of groups of two or more names; empty if nothing is shared.

    Raises:
        TypeError: for an object that is not a module.
    """
    groups: dict[tuple[int, int], list[str]] = {}
    for name, parameter in _parameters(model).items():
        groups.setdefault(_place(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def check_tied(model: torch.nn.Module, before: Iterable[Iterable[str]]) -> Ties:
    """Return the groups of `before` that are no longer one parameter; empty if all are.

    Args:
        before: the result of `tied_parameters`, or groups of names of your own. Names may lack or have the prefixes
            that data parallel, torch.compile, FSDP and checkpointing add.

    Raises:
        ValueError: the model has no parameter of such a name.
        TypeError: for an object that is not a module.
    """
    found = _Named(model)
    return tuple(group for group in _groups(before) if len({_place(found.parameter(name)) for name in group}) > 1)


def tie_again(model: torch.nn.Module, before: Iterable[Iterable[str]]) -> Ties:
    """Make the names of each group of `before` one parameter again: that of the group's first name.

    Call it before the optimizer is made, because an optimizer keeps the parameters that it was given. If the values
    have become different a warning says so; the first name's are kept.

    Args:
        before: see `check_tied`.

    Returns:
        The groups that had come apart.

    Raises:
        ValueError: the model has no parameter of such a name, or those of a group have different shapes.
        TypeError: for an object that is not a module.
    """
    found = _Named(model)
    apart = check_tied(model, before)
    for group in apart:
        first, *others = ((name, found.parameter(name)) for name in group)
        for name, parameter in others:
            if parameter.shape != first[1].shape:
                raise ValueError(
                    f"{first[0]} of shape {tuple(first[1].shape)} and {name} of shape {tuple(parameter.shape)} cannot "
                    "be one parameter; they shared memory through a view, which has to be recreated by hand"
                )
            if _differ(first[1], parameter):
                warnings.warn(
                    f"{first[0]} and {name} have different values; those of {first[0]} are kept", stacklevel=2
                )
            found.replace(name, first[1])
    return apart


@contextmanager
def keeps_ties(model: torch.nn.Module) -> Iterator[Ties]:
    """Tie weights after the block that were tied before it.

        with keeps_ties(model):
            model.to_empty(device="cuda")

    Yields the groups. If the block raises, nothing is done.
    """
    before = tied_parameters(model)
    yield before
    tie_again(model, before)


def _parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"tied weights are those of a torch.nn.Module, not of {type(model).__name__}")
    return dict(model.named_parameters(remove_duplicate=False))


def _place(parameter: Tensor) -> tuple[int, int]:
    """Equal for parameters that are the same, or start at the same element of the same memory."""
    try:
        storage = parameter.untyped_storage()
        if not parameter.numel() or type(parameter) not in (Tensor, torch.nn.Parameter):
            return (id(parameter), 0)
    except (RuntimeError, NotImplementedError, ValueError):  # lazy parameters, and tensors of devices without memory
        return (id(parameter), 0)
    return (storage._cdata, int(parameter.storage_offset()))


def _differ(one: Tensor, other: Tensor) -> bool:
    if "meta" in (one.device.type, other.device.type):
        return False
    return not torch.equal(one.detach(), other.detach().to(device=one.device, dtype=one.dtype))


def _groups(before: Iterable[Iterable[str]]) -> Iterator[tuple[str, ...]]:
    for group in before:
        if isinstance(group, str):
            raise TypeError(
                f"groups of names are expected, as tied_parameters(model) returns them, not the name {group!r}"
            )
        yield tuple(group)


def _plain(name: str) -> str:
    """A name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class _Named:
    """A model's parameters by name, found also if a wrapper has changed the names."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._found = _parameters(model)
        self._plain = {_plain(name): name for name in self._found}

    def _name(self, name: str) -> str:
        known = name if name in self._found else self._plain.get(_plain(name))
        if known is None:
            raise ValueError(
                f"the model ({type(self._model).__name__}) has no parameter {name!r}; "
                "pass what tied_parameters returned for the same model"
            )
        return known

    def parameter(self, name: str) -> Tensor:
        return self._found[self._name(name)]

    def replace(self, name: str, parameter: Tensor) -> None:
        path, _, attribute = self._name(name).rpartition(".")
        setattr(self._model.get_submodule(path), attribute, parameter)


_LAZY = ("xla", "hpu")
"""Devices on which reading another index makes another graph."""
_ALIGNMENT_BYTES = 16
"""Compiled code copies inputs with another alignment before it uses them."""


class LoopConstants:
    """One value for each iteration of a loop, each a tensor on the device.

        timesteps = LoopConstants([0.9, 0.5, 0.1], device=device)
        for now in timesteps:                           # 3 tensors without dimensions
            sample = denoise(sample, now)
        for now, following in timesteps.windows(2):     # 2 pairs
            sample = denoise(sample, now, following)

    Iterating starts from the first value each time, reads nothing back from the device and copies nothing to it.

    Args:
        values: numbers, or a tensor of shape (iterations, ...) whose rows are the values. It is copied.
        device: where the values are needed; by default a tensor's own, else torch's default device.
        dtype: by default a tensor's own, else what torch.tensor gives the numbers.
        rolled: True reads the first element of a rolled tensor in every iteration, which needs a small operator for
            each; False gives each iteration its own view, which needs none; by default True on XLA and HPU.

    Raises:
        TypeError: values are neither numbers nor a tensor.
        ValueError: a tensor without dimensions.
    """

    def __init__(
        self,
        values: Sequence[float] | Tensor,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rolled: bool | None = None,
    ) -> None:
        try:
            given = values.detach() if isinstance(values, Tensor) else torch.tensor(list(values), dtype=dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"LoopConstants takes numbers or a tensor, one value for each iteration, not {type(values).__name__}"
            ) from error
        if given.dim() == 0:
            raise ValueError("LoopConstants got a tensor without dimensions: its first dimension counts the iterations")
        place = torch.device(device) if device is not None else None
        if place is None and not isinstance(values, Tensor):
            place = torch.empty(0).device
        self._values = given.to(device=place, dtype=dtype, copy=True)
        self._rolled = self._values.device.type in _LAZY if rolled is None else rolled
        self._views = () if self._rolled else _aligned(self._values)

    def __len__(self) -> int:
        return int(self._values.shape[0])

    def __iter__(self) -> Iterator[Tensor]:
        if not self._rolled:
            yield from self._views
            return
        left = self._values
        for _ in range(len(self)):
            now, left = left[0], torch.roll(left, -1, 0)  # before the iteration, so that all have the same graph
            yield now

    def windows(self, size: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield each value with the `size - 1` values that follow it.

        Raises ValueError if the size is not 1 or more.
        """
        if size < 1:
            raise ValueError(f"a window has one value or more, not {size}")
        left = self._values
        for first in range(len(self) - size + 1):
            if self._rolled:
                window, left = tuple(left[place] for place in range(size)), torch.roll(left, -1, 0)
                yield window
            else:
                yield self._views[first : first + size]

    def __repr__(self) -> str:
        shape = tuple(self._values.shape[1:])
        return f"LoopConstants({len(self)} values of shape {shape}, {self._values.dtype}, {self._values.device})"


def _aligned(values: Tensor) -> tuple[Tensor, ...]:
    """The rows, each aligned so that compiled code takes it without a copy."""
    length = values.shape[1:].numel()
    step = max(_ALIGNMENT_BYTES // values.element_size(), 1)
    wide = values.new_zeros(values.shape[0], -(-max(length, 1) // step) * step)
    wide[:, :length] = values.reshape(values.shape[0], length)
    return tuple(row[:length].view(values.shape[1:]) for row in wide.unbind())
