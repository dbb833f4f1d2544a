"""Batches of any structure: what is done to each tensor in mappings, lists, tuples, dataclasses and objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

_DEEPEST: Final = 16
"""Levels of a structure that are followed; what refers to itself ends there."""


def moved(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """The batch with all its tensors on the device, in the same structure; other values as they are."""
    return mapped(batch, lambda item: _to(item, device, non_blocking))


def mapped(batch: Any, change: Callable[[Any], Any], depth: int = 0) -> Any:
    """A structure like this one with `change` applied to each tensor and each object that has a `to` method.

    A structure is copied, never changed in place; its type stays.
    """
    if isinstance(batch, torch.Tensor) or (callable(getattr(batch, "to", None)) and not isinstance(batch, type)):
        return change(batch)
    if depth >= _DEEPEST or isinstance(batch, (str, bytes, bytearray, type)):
        return batch
    if isinstance(batch, Mapping):
        items = {key: mapped(value, change, depth + 1) for key, value in batch.items()}
        return items if type(batch) is dict else _filled(batch, items)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, change, depth + 1) for value in batch))
    if isinstance(batch, (list, tuple)):
        values = [mapped(value, change, depth + 1) for value in batch]
        return values if type(batch) is list else type(batch)(values)
    if dataclasses.is_dataclass(batch):
        clone = copy.copy(batch)
        for entry in dataclasses.fields(batch):
            # A frozen one, too: the copy is nobody else's yet.
            object.__setattr__(clone, entry.name, mapped(getattr(batch, entry.name), change, depth + 1))
        return clone
    return batch


def tensors_of(batch: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor in the structure, those that objects keep as attributes too."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif depth >= _DEEPEST or isinstance(batch, (str, bytes, bytearray, type, int, float)):
        return
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value, depth + 1)
    elif isinstance(batch, Sequence):
        for value in batch:
            yield from tensors_of(value, depth + 1)
    elif dataclasses.is_dataclass(batch) or callable(getattr(batch, "to", None)):
        for value in (getattr(batch, "__dict__", None) or _slots(batch)).values():
            yield from tensors_of(value, depth + 1)


def _slots(item: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(item):
        return {}
    return {entry.name: getattr(item, entry.name) for entry in dataclasses.fields(item)}


def _to(item: Any, device: torch.device, non_blocking: bool) -> Any:
    if isinstance(item, torch.Tensor):
        return item.to(device, non_blocking=non_blocking)
    try:
        return item.to(device, non_blocking=non_blocking)
    except TypeError:
        return item.to(device)  # of an object whose method takes nothing else


def _filled(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same type with other values."""
    clone = copy.copy(batch)
    if hasattr(clone, "update"):
        clone.update(items)
        return clone
    return type(batch)(items)  # type: ignore[call-arg]
