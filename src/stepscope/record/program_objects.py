"""Access the program's objects without running their code, keeping them alive or being seen by them.

Read them: overridden methods, properties, `__getattr__`, `__eq__` do not run, since attributes come from the objects'
own dictionaries, and kinds from `type`, as `isinstance` asks for `__class__`. Note the calls of modules, by weak
references. Work in the program's process unseen by its torch modes and tensor subclasses, and with room on the stack
however deep the program's calls are.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, TracebackType
from typing import Any, Final

from stepscope import guard
from stepscope.trace.line_records import MODULE_LEFT
from stepscope.trace.naming import is_third_party_file

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
    kind = getattr(sys.modules.get("torch.nn.modules.module"), "Module", None)
    return kind is not None and issubclass(type(value), kind)


def is_plain(value: Any) -> bool:
    """Whether it is one of torch's own tensors, whose attributes run none of the program's code."""
    kind, torch = type(value), sys.modules["torch"]
    return kind is torch.Tensor or kind is torch.nn.Parameter


def numbers_of(tensor: Any) -> Any:
    """Copy the content of one of torch's own tensors of whole numbers or bools on the CPU to a NumPy array.

    No operator runs, which a profiler would see, and the tensor stays as it is: `Tensor.numpy` would forbid the program
    to resize it afterwards.

    Raises:
        ValueError: it has no memory of its own.
    """
    import numpy as np

    size, strides = tensor.element_size(), tensor.stride()
    kind = np.dtype(str(tensor.dtype).removeprefix("torch."))
    if not tensor.numel():
        return np.empty(tensor.shape, kind)
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, strides, strict=True))
    taken = (last + 1) * size
    address = tensor.data_ptr()
    if not address or tensor.untyped_storage().nbytes() < tensor.storage_offset() * size + taken:
        raise ValueError("the tensor has no memory")
    memory = (ctypes.c_char * taken).from_address(address)
    return np.ndarray(tuple(tensor.shape), kind, memory, strides=[each * size for each in strides]).copy()


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
        functions: for each name, its `forward` if that is a library's other than torch, as "file:line function".
        threads: for each thread, the times and the indices of names; MODULE_LEFT for the end of a call.
    """

    names: list[str]
    evaluating: list[int]
    threads: list[tuple[array[int], array[int]]]
    functions: list[str] = field(default_factory=list)


def call_time(module: Any) -> int:
    """Return the time for the note of a call that begins."""
    return -time.time_ns() if attributes(module).get("training") is False else time.time_ns()


def named_calls(threads: Sequence[CallNotes]) -> NamedCalls:
    """Name the modules of noted calls as `names_in_roots` does; one that is gone, by its class."""
    names = names_in_roots(_roots(threads))
    numbers: dict[tuple[str, bool], int] = {}
    functions: list[str] = []
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
                if number == len(functions):
                    functions.append(_forward_of(module))
            times.append(abs(time_ns))
            modules.append(number)
        result.append((times, modules))
    evaluating = [number for (_, evaluates), number in numbers.items() if evaluates]
    return NamedCalls([name for name, _ in numbers], evaluating, result, functions)


def _forward_of(module: Any) -> str:
    function: Any = next((vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind)), None)
    while type(function) is FunctionType and "__wrapped__" in function.__dict__:
        function = function.__dict__["__wrapped__"]
    if type(function) is not FunctionType or not is_third_party_file(function.__code__.co_filename):
        return ""
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno} {type(module).__name__}.{code.co_name}"


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


class _Unseen(threading.local):
    """A block whose calls of torch on this thread reach no `__torch_function__` and no `__torch_dispatch__`."""

    def __init__(self) -> None:
        self._entered: list[list[Any]] = []

    def __enter__(self) -> None:
        guards: list[Any] = []
        if not self._entered:  # within a block nothing is to be done
            compiled: Any = getattr(sys.modules.get("torch"), "_C", None)
            kinds = (getattr(compiled, name, None) for name in ("DisableTorchFunction", "_DisableTorchDispatch"))
            guards = [kind() for kind in kinds if kind is not None]
        for each in guards:
            each.__enter__()
        self._entered.append(guards)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for each in reversed(self._entered.pop()):
            each.__exit__(kind, error, traceback)


unseen: Final = _Unseen()


_FRAMES: Final = 60


class _StackRoom:
    """Raises the recursion limit while a profile, trace or monitoring function of stepscope is on.

    Without it a function that just fits the program's limit would end in a RecursionError, since ours do not fit.
    """

    def __init__(self) -> None:
        self._users = 0
        self._limits = (0, 0)  # the program's, and ours in its place

    def take(self) -> None:
        if not self._users:
            usual = sys.getrecursionlimit()
            self._limits = usual, usual + _FRAMES
            sys.setrecursionlimit(self._limits[1])
        self._users += 1

    def give_back(self) -> None:
        self._users -= 1
        if not self._users and sys.getrecursionlimit() == self._limits[1]:  # the program has set no other
            with guard.attempt():  # the stack is deeper than that now
                sys.setrecursionlimit(self._limits[0])


stack_room: Final = _StackRoom()
