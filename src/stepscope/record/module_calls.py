"""Notes of the calls of modules, which keep no module alive, and the names that the calls get."""

from __future__ import annotations

import sys
import time
import weakref
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from stepscope.record.program_objects import attributes, names_in_roots
from stepscope.trace.program_facts import MODULE_LEFT

CallNotes = list[Any]
"""Flat list of time and `ModuleRef`; None instead of one marks the end of a call. The time of a call in evaluation mode
is negative.
"""


def call_code() -> CodeType | None:
    """Return the code object that every module call runs; None if torch is not imported or has none."""
    module = sys.modules.get("torch.nn.modules.module")
    function = getattr(getattr(module, "Module", None), "_call_impl", None)
    return getattr(function, "__code__", None)


class ModuleRef(weakref.ref[Any]):
    """A called module, which it does not keep alive, and its class."""

    __slots__ = ("kind",)

    kind: str


def module_ref(module: Any, known: dict[int, ModuleRef]) -> ModuleRef:
    """Return the reference to a module, made at its first call.

    Args:
        known: the references made so far, by the module's id.
    """
    found = known.get(id(module))
    if found is None or found() is not module:
        found = known[id(module)] = ModuleRef(module)
        found.kind = type(module).__name__
    return found


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """Calls of modules.

    Attributes:
        names: of the modules; a module that was called in both modes is listed twice.
        evaluating: indices of the names that stand for calls in evaluation mode.
        threads: of each thread the times, and the indices of the names, MODULE_LEFT for the end of a call.
    """

    names: list[str]
    evaluating: list[int]
    threads: list[tuple[array[int], array[int]]]


def call_time(module: Any) -> int:
    """Return the time for the note of a call that begins."""
    return -time.time_ns() if attributes(module).get("training") is False else time.time_ns()


def named_calls(threads: Sequence[CallNotes]) -> NamedCalls:
    """Name the modules of noted calls as `names_in_roots` does; one that is gone, by its class."""
    names = names_in_roots(_roots(threads))
    numbers: dict[tuple[str, bool], int] = {}
    result = []
    for notes in threads:
        times, modules = array("q"), array("i")
        around: list[str] = []
        for time_ns, called in zip(notes[0::2], notes[1::2], strict=False):
            if called is None:
                if not around:  # a call that began before the recording
                    continue
                around.pop()
                number = MODULE_LEFT
            else:
                module = called()
                name = names.get(id(module)) if module is not None else None
                name = name or ".".join([*around[-1:], called.kind])
                around.append(name)
                number = numbers.setdefault((name, time_ns < 0), len(numbers))
            times.append(abs(time_ns))
            modules.append(number)
        result.append((times, modules))
    evaluating = [number for (_, evaluates), number in numbers.items() if evaluates]
    return NamedCalls([name for name, _ in numbers], evaluating, result)


def _roots(threads: Iterable[CallNotes]) -> list[Any]:
    """Return the distinct modules called outside all others that still live, in order of their first call."""
    found: dict[int, Any] = {}
    for notes in threads:
        depth = 0
        for called in notes[1::2]:
            module = called() if called is not None and depth == 0 else None
            if module is not None:
                found.setdefault(id(module), module)
            depth = max(0, depth - 1) if called is None else depth + 1
    return list(found.values())
