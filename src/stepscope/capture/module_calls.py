"""Which modules of the network are being called, noted while steps are recorded, and their names.

Every call of an nn.Module goes through one function of torch, `Module._call_impl`, which the watch for source lines
sees begin and end; nothing is hooked into modules, so that torch.compile compiles what it would without. What runs
inside a compiled module calls no modules and has the compiled one's name.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Any, Final

from stepscope.line_records import MODULE_LEFT

CallNotes = list[Any]
"""Time and module of one note after the other; None for the module where a call has ended."""

_COMPILED: Final = "_orig_mod"


def call_code() -> CodeType | None:
    """The code that every call of a module runs; None where torch is not imported or has none such."""
    module = sys.modules.get("torch.nn.modules.module")
    function = getattr(getattr(module, "Module", None), "_call_impl", None)
    return getattr(function, "__code__", None)


def named_calls(threads: Sequence[CallNotes]) -> tuple[list[str], list[tuple[array[int], array[int]]]]:
    """The modules' names, and for each thread times and numbers of modules, MODULE_LEFT for the end of a call.

    A module is called by its qualified name in the outermost module that is called, behind that one's class; where
    several of one class are, they are numbered.
    """
    names = _names_in_roots(_roots(threads))
    numbers: dict[str, int] = {}
    result = []
    for notes in threads:
        times, modules = array("q"), array("i")
        around: list[str] = []
        for time_ns, module in zip(notes[0::2], notes[1::2], strict=False):
            if module is None:
                if not around:  # a call that began before the recording
                    continue
                around.pop()
                number = MODULE_LEFT
            else:
                name = names.get(id(module)) or ".".join([*around[-1:], type(module).__name__])
                around.append(name)
                number = numbers.setdefault(name, len(numbers))
            times.append(time_ns)
            modules.append(number)
        result.append((times, modules))
    return list(numbers), result


def _roots(threads: Iterable[CallNotes]) -> list[Any]:
    """The different modules that were called outside of all others, in order of their first call."""
    found: dict[int, Any] = {}
    for notes in threads:
        depth = 0
        for module in notes[1::2]:
            if module is not None and depth == 0:
                found.setdefault(id(module), module)
            depth = max(0, depth - 1) if module is None else depth + 1
    return list(found.values())


def _names_in_roots(roots: Iterable[Any]) -> dict[int, str]:
    """The name of every module inside these; of roots inside each other the outer one names."""
    inside = [(root, dict(root.named_modules())) for root in roots]
    names: dict[int, str] = {}
    of_class: dict[str, int] = {}
    for root, modules in sorted(inside, key=lambda each: -len(each[1])):
        if id(root) in names:
            continue
        label = type(getattr(root, _COMPILED, root)).__name__
        of_class[label] = of_class.get(label, -1) + 1
        if of_class[label]:
            label = f"{label}_{of_class[label]}"
        for name, module in modules.items():
            parts = [part for part in name.split(".") if part and part != _COMPILED]
            names.setdefault(id(module), ".".join([label, *parts]))
    return names
