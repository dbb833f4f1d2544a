"""Read the program's objects without running code of theirs: overridden methods, properties, `__getattr__`, `__eq__`.

Attributes come from the objects' own dictionaries, kinds from `type`, as `isinstance` asks for `__class__`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

_COMPILED: Final = "_orig_mod"
_NOTHING: Final[dict[str, Any]] = {}


def attributes(value: Any) -> dict[str, Any]:
    """Return what is stored in an object's own dictionary; empty for an object without one."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return _NOTHING
    return found if type(found) is dict else _NOTHING


def is_module(value: Any) -> bool:
    """Whether it is a torch.nn.Module."""
    kind = getattr(sys.modules.get("torch.nn.modules.module"), "Module", None)
    return kind is not None and issubclass(type(value), kind)


def is_plain(value: Any) -> bool:
    """Whether it is a tensor of torch's own, whose attributes run nothing of the program's."""
    kind, torch = type(value), sys.modules["torch"]
    return kind is torch.Tensor or kind is torch.nn.Parameter


def modules_in(root: Any) -> dict[int, tuple[str, Any]]:
    """Return a module and those inside it, each once, as id -> (qualified name, module), the outer ones first."""
    found: dict[int, tuple[str, Any]] = {}
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in found or not is_module(module):
            continue
        found[id(module)] = path, module
        inner = [(f"{path}.{name}" if path else str(name), each) for name, each in _items(module, "_modules")]
        waiting.extend(reversed(inner))
    return found


def parameters_in(root: Any) -> Iterator[Any]:
    """Yield the parameters of a module and of those inside it, each once."""
    seen: set[int] = set()
    for _, module in modules_in(root).values():
        for _, each in _items(module, "_parameters"):
            if each is not None and id(each) not in seen:
                seen.add(id(each))
                yield each


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters that an optimizer holds."""
    return [one for group in groups_of(optimizer) for one in _sequence(group.get("params"))]


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    return [group for group in _sequence(attributes(optimizer).get("param_groups")) if type(group) is dict]


def _items(module: Any, name: str) -> list[tuple[str, Any]]:
    held: Any = attributes(module).get(name)
    return list(dict.items(held)) if issubclass(type(held), dict) else []


def _sequence(value: Any) -> Sequence[Any]:
    return value if type(value) in (list, tuple) else ()


def names_in_roots(roots: Iterable[Any]) -> dict[int, str]:
    """Map the id of every module inside these roots to its name; for nested roots, the outer one names it.

    A module is named by the class of its root, followed by its qualified name in it; several roots of one class are
    numbered.
    """
    inside = [(root, modules_in(root)) for root in roots]
    names: dict[int, str] = {}
    of_class: dict[str, int] = {}
    for root, modules in sorted(inside, key=lambda each: -len(each[1])):
        if id(root) in names:
            continue
        held: Mapping[str, Any] = dict(_items(root, "_modules"))
        label = type(held.get(_COMPILED, root)).__name__
        of_class[label] = of_class.get(label, -1) + 1
        if of_class[label]:
            label = f"{label}_{of_class[label]}"
        for number, (name, _) in modules.items():
            parts = [part for part in name.split(".") if part and part != _COMPILED]
            names.setdefault(number, ".".join([label, *parts]))
    return names
