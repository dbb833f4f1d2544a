"""Find the tensor operators that have the same inputs in two consecutive steps.

Tensors of mostly zeros that products take as dense ones are found in the same look.

During a look, torch reports each call of its functions on the thread that runs the steps. A call is constant if its
numbers are the same as in the previous step, and its tensors come from constant calls, or are older and unchanged.
Values are not read, but for the number of zeros of a product's inputs, which is read when the look ends.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType
from typing import Any, Final

from stepscope import guard
from stepscope.record.lines import compiles, hide_from_compiler, is_users
from stepscope.record.program_objects import is_plain
from stepscope.trace.program_facts import ConstantFacts, SparseFacts

STEPS: Final = 2
_MOST_CALLS: Final = 256
"""Calls of a line in a step; a line with more runs a library."""
_MOST_NOTED: Final = 50_000
"""Calls in total, each about 20 us slower; a look that sees more ends without a result."""
_DEEPEST: Final = 40
"""Frames between a call and the line of the user's code that it belongs to."""
_MOST_ITEMS: Final = 10_000
_MOST_FACTS: Final = 200
_RANDOM: Final = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential", "poisson", "empty")
"""Parts of names of functions whose result differs each time, or is filled in unseen."""
_NOT_IN_PLACE: Final = ("__invert__", "__index__", "__int__")
_PRODUCTS: Final = frozenset({"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "einsum"})
_COUNTED: Final = range(2**14, 2**26 + 1)
"""Elements of tensors whose zeros are counted."""
_MOST_COUNTS: Final = 64
_SPARSE: Final = 0.03
"""Most elements of a tensor of mostly zeros that are not zero."""
_UNSEEN: Final = frozenset({"grad", "set_", "resize_"})
_PLAIN: Final = (bool, int, float, complex, str, type(None), type(Ellipsis))
_CALLABLE: Final = (FunctionType, BuiltinFunctionType)

_Line = tuple[CodeType, int]


@dataclass
class _Call:
    """One call of a line: its name, its arguments without the contents of tensors, and whether it is constant."""

    name: str
    arguments: object
    is_constant: bool = False
    is_pure: bool = False


@dataclass
class _Step:
    """The calls of one step by line, and the older tensors that they used, with their versions."""

    lines: defaultdict[_Line, list[_Call]] = field(default_factory=lambda: defaultdict(list))
    sources: dict[int, tuple[weakref.ref[Any], int]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Known:
    """A tensor that a call of this step made."""

    tensor: weakref.ref[Any]
    is_constant: bool
    is_pure: bool


class ConstantLook:
    """Watches functions of torch from `start` on; `border` marks the end of a step, and the look ends after STEPS."""

    def __init__(self) -> None:
        self.is_over = True
        self._steps: list[_Step] = []
        self._known: dict[int, _Known] = {}
        self._made: defaultdict[int, list[_Call]] = defaultdict(list)
        self._written: set[int] = set()
        self._varies = False
        self._noted = 0
        self._found: tuple[ConstantFacts, ...] = ()
        self._counts: dict[tuple[_Line, tuple[int, ...]], Any] = {}
        self.sparse: tuple[SparseFacts, ...] = ()
        self._mode: Any = None
        self._until_s = float("inf")
        self._restore: list[Callable[[], None]] = []

    def start(self, until_s: float = float("inf")) -> None:
        """Begin with the step that begins now, unless something else watches functions, or compiles them.

        Args:
            until_s: when the look ends by itself, on the monotonic clock, if no step ends it before.
        """
        import torch
        from torch.overrides import TorchFunctionMode

        if torch._C._len_torch_function_stack() or compiles() or sys.gettrace() is not None:
            return
        look = self

        class Watching(TorchFunctionMode):
            def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                try:
                    result = function(*args, **(kwargs or {}))
                except BaseException as error:
                    guard.hide(error)
                    raise
                if look.is_over:
                    look.leave()
                elif not torch._C._get_tracing_state():
                    with torch._C.DisableTorchFunction():  # reading a tensor must not call its class
                        look.called(function, args, kwargs or {}, result)
                return result

        overrides: Any = sys.modules["torch.overrides"]
        asked = guard.replaced(overrides.has_torch_function, self._has_function, "record.constant_calls.ConstantLook")
        compiling = guard.around(torch.compile, before=self.compiles)
        self._restore = [guard.put(overrides, "has_torch_function", asked), guard.put(torch, "compile", compiling)]
        self._mode = Watching()
        self._mode.__enter__()
        self.is_over, self._until_s = False, until_s
        self._steps.append(_Step())

    def _has_function(self, original: Any, relevant: Any) -> bool:
        """The answer of `original` without the watch: modules then choose faster functions with other results."""
        overrides: Any = sys.modules["torch.overrides"]
        if self.is_over:
            self._give_back()
        if overrides._get_current_function_mode() is not self._mode:
            return bool(original(relevant))
        overrides._pop_mode()
        try:
            return bool(original(relevant))
        finally:
            overrides._push_mode(self._mode)

    @guard.entry
    def compiles(self, *_: object, **__: object) -> None:
        """End the look before something is compiled together with the watch."""
        self.stop()

    def border(self) -> None:
        if self.is_over:
            self.take_off()
        elif len(self._steps) < STEPS:
            self._forget()
            self._steps.append(_Step())
        else:
            self._found = guard.attempted(self._constant_lines) or ()
            self.sparse = guard.attempted(self._sparse_inputs) or ()
            self.stop()

    def stop(self) -> None:
        self.is_over = True
        self._steps.clear()
        self._forget()
        self.take_off()

    def take_off(self) -> bool:
        """Remove the watch, if it is on this thread, also from below what the program has put on it since."""
        self._give_back()
        if self._mode is None:
            return False
        overrides: Any = sys.modules["torch.overrides"]
        place = next(
            (at for at, each in enumerate(overrides._get_current_function_mode_stack()) if each is self._mode), None
        )
        if place is None:
            return False
        above = [overrides._pop_mode() for _ in overrides._get_current_function_mode_stack()[place:]]
        for each in above[-2::-1]:
            overrides._push_mode(each)
        self._mode = None
        return True

    def _give_back(self) -> None:
        while self._restore:
            self._restore.pop()()

    @guard.entry
    def leave(self) -> None:
        """Take the watch off soon: torch has taken it off for this call, and puts it back when the call returns."""
        self._give_back()
        if sys.getprofile() is None:
            hide_from_compiler(self._next)
            sys.setprofile(self._next)

    @guard.inline("record.constant_calls.ConstantLook._next")
    def _next(self, frame: FrameType, event: str, value: Any) -> None:
        if self.take_off() or self._mode is None:
            sys.setprofile(None)

    def _forget(self) -> None:
        self._known.clear()
        self._made.clear()

    def called(self, function: Any, positional: Any, named: Any, result: Any) -> None:
        """Note a call of one of torch's functions; one that cannot be understood is skipped."""
        self._noted += 1
        if self._noted > _MOST_NOTED or time.monotonic() > self._until_s:
            self.is_over = True
            self._steps.clear()
            return
        with guard.attempt():
            name = _name(function)
            written = _written(name, positional, named)
            made = [] if written is not None else list(_tensors(result))
            line = _line(sys._getframe(2)) if made or written is not None else None
            if line is not None:
                inputs = [
                    each for each in (*_tensors(positional), *_tensors(list(named.values()))) if each is not written
                ]
                if name in _PRODUCTS:
                    self._count(line, inputs)
                call = self._judged(line, _Call(name, _arguments(positional, named)), inputs)
                if written is not None:
                    self._write(written, call)
                self._make(made, inputs, call)

    def _judged(self, line: _Line, call: _Call, inputs: list[Any]) -> _Call:
        states = [self._state(each) for each in inputs]
        is_as_before = self._is_as_before(line, call)
        is_known = call.name not in _UNSEEN and not any(each in call.name for each in _RANDOM)
        self._varies |= call.name.startswith("rand")
        call.is_constant = is_as_before and is_known and all(constant for constant, _ in states)
        call.is_pure = call.is_constant and all(pure for _, pure in states)
        return call

    def _make(self, made: list[Any], inputs: list[Any], call: _Call) -> None:
        """Note the tensors that a call made; memory that they do not share with its inputs is new."""
        shared = {_storage(each) for each in inputs}
        for each in made:
            storage = _storage(each)
            if storage not in shared:
                self._written.discard(storage)
                self._made[storage].clear()
            self._known[id(each)] = _Known(weakref.ref(each), call.is_constant, call.is_pure)
            self._made[storage].append(call)

    def _is_as_before(self, line: _Line, call: _Call) -> bool:
        """Note a line's call; return whether its call at this place in the previous step had the same arguments."""
        noted = self._steps[-1].lines[line]
        noted.append(call)
        if len(self._steps) < STEPS or len(noted) > _MOST_CALLS:
            return False
        before = self._steps[-2].lines.get(line, [])
        if len(before) < len(noted):
            return False
        other = before[len(noted) - 1]
        return call.arguments is not None and (other.name, other.arguments) == (call.name, call.arguments)

    def _state(self, tensor: Any) -> tuple[bool, bool]:
        """Whether a tensor is the same in each step, and whether only from calls without older tensors."""
        if self._written and _storage(tensor) in self._written:
            return False, False
        known = self._known.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            return known.is_constant, known.is_pure
        version = 0 if tensor.is_inference() else tensor._version
        sources = self._steps[-1].sources
        if id(tensor) not in sources:
            sources[id(tensor)] = weakref.ref(tensor), version
        if len(self._steps) < STEPS:
            return False, False
        before = self._steps[-2].sources.get(id(tensor))
        is_same = before is not None and before[0]() is tensor and before[1] == version
        self._varies |= not is_same and not tensor.requires_grad
        return is_same and not _is_trained(tensor), False

    def _write(self, tensor: Any, call: _Call) -> None:
        """Note what a call wrote into a tensor; what differs from step to step undoes the calls that made it."""
        known = self._known.get(id(tensor))
        if not call.is_constant or known is None or known.tensor() is not tensor:
            self._written.add(_storage(tensor))
            for each in self._made[_storage(tensor)]:
                each.is_constant = False
        elif known.is_constant:
            self._known[id(tensor)] = _Known(known.tensor, True, known.is_pure and call.is_pure)
        call.is_constant &= known is not None and known.is_constant

    def _count(self, line: _Line, inputs: list[Any]) -> None:
        """Count what is not zero in large inputs that need no gradient, once for each line and shape."""
        import torch

        for each in inputs:
            key = line, tuple(each.shape)
            is_data = each.is_floating_point() and each.layout is torch.strided and not each.requires_grad
            is_data = is_data and (each.device.type == "cpu" or _is_eager_cuda(each))
            if is_data and each.numel() in _COUNTED and key not in self._counts and len(self._counts) < _MOST_COUNTS:
                self._counts[key] = torch.count_nonzero(each)

    def _sparse_inputs(self) -> tuple[SparseFacts, ...]:
        counts = {key: int(count) for key, count in self._counts.items()}
        self._counts.clear()
        return tuple(
            SparseFacts(file=code.co_filename, line=line, shape=shape, nonzero=count)
            for ((code, line), shape), count in counts.items()
            if count <= _SPARSE * prod(shape)
        )

    def facts(self) -> tuple[ConstantFacts, ...]:
        """The lines with constant calls; empty if the look did not see STEPS steps."""
        return self._found

    def _constant_lines(self) -> tuple[ConstantFacts, ...]:
        """The lines with constant calls.

        If nothing varies, the program repeats one step, and only calls without older tensors count.
        """
        found = []
        for (code, line), calls in self._steps[-1].lines.items():
            constant = [
                place for place, each in enumerate(calls) if each.is_constant and (each.is_pure or self._varies)
            ]
            if constant and len(calls) <= _MOST_CALLS:
                names = tuple(each.name for each in calls)
                file, function = code.co_filename, code.co_name
                facts = ConstantFacts(file=file, function=function, line=line, calls=names, constant=tuple(constant))
                found.append(facts)
        return tuple(found)[:_MOST_FACTS]


def _is_eager_cuda(tensor: Any) -> bool:
    """Whether an operator on it runs now, and is neither collected nor captured."""
    import torch

    return bool(tensor.device.type == "cuda" and not torch.cuda.is_current_stream_capturing())


def _name(function: Any) -> str:
    """A function's name; for a getter, the name of its attribute."""
    name = getattr(function, "__name__", "")
    return str(getattr(getattr(function, "__self__", None), "__name__", name) if name == "__get__" else name)


def _written(name: str, positional: Any, named: Any) -> Any:
    """The tensor that a call changes in place; None if there is none."""
    if "out" in named:
        return named["out"] if is_plain(named["out"]) else None
    is_special = name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    is_in_place = is_special or (name.endswith("_") and not name.endswith("__"))
    return positional[0] if is_in_place and positional and is_plain(positional[0]) else None


def _tensors(value: Any, depth: int = 0) -> Iterator[Any]:
    if is_plain(value):
        yield value
    elif type(value) in (list, tuple) and depth < 3:
        for each in value[:_MOST_ITEMS]:
            yield from _tensors(each, depth + 1)


def _arguments(positional: Any, named: Any) -> object:
    """The arguments in a comparable form; None if one of them has none."""
    found = [_comparable(each) for each in (*positional, *(one for pair in sorted(named.items()) for one in pair))]
    return None if any(each is None for each in found) else tuple(found)


def _comparable(value: Any) -> object:
    import torch

    kind = type(value)
    if is_plain(value):
        return tuple(value.shape), str(value.dtype)
    if kind in (*_PLAIN, *_CALLABLE, torch.dtype, torch.device, torch.layout, torch.memory_format):
        return kind.__name__, repr(value)
    if kind is slice:
        return _comparable((value.start, value.stop, value.step))
    if kind in (list, tuple, torch.Size) and len(value) <= _MOST_ITEMS:
        found = tuple(_comparable(each) for each in value)
        return None if None in found else found
    return None


def _storage(tensor: Any) -> int:
    """The number of the memory that a tensor and its views share; of the tensor itself if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _is_trained(tensor: Any) -> bool:
    import torch

    return bool(tensor.requires_grad and torch.is_grad_enabled())


def _line(frame: FrameType | None) -> _Line | None:
    for _ in range(_DEEPEST):
        if frame is None:
            return None
        if is_users(frame.f_code.co_filename):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None
