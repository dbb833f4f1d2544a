"""Find values that are equal in each of a few steps before the recording, and need not be computed in every step.

During a look, Python reports the returns of functions on the thread that runs the steps. The results and local
variables of the user's functions, and of modules that they call, are hashed: tensors, arrays, lists of numbers. Large
ones are sampled. Only the hashes are kept.
"""

from __future__ import annotations

import marshal
import os
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType
from typing import Any, Final

import xxhash

from stepscope import guard
from stepscope.record.constant_calls import ConstantLook
from stepscope.record.gradients import GradientLook
from stepscope.record.lines import hide_from_compiler, is_users
from stepscope.record.program_objects import call_code, names_in_roots, numbers_of, stack_room, unseen
from stepscope.record.step_objects import KeptGraphs, MadeInSteps
from stepscope.trace.program_facts import (
    BackwardFacts,
    ConstantFacts,
    KeptGraphFacts,
    ListFacts,
    SparseFacts,
    ValueFacts,
)  # fmt: skip

STEPS: Final = 2
"""Complete steps that are compared."""
_MOST_CALLS: Final = 64
"""Calls of one function in a step whose values are hashed; a function that is called more often is left out."""
_MOST_NAMES: Final = 40
_MOST_FACTS: Final = 400
_WHOLE_BYTES: Final = 1 << 20
"""Larger tensors and arrays are sampled."""
_SAMPLES: Final = 1 << 16
_FEWEST: Final = 8
"""Values with fewer elements cost nothing to compute."""
_MOST_ITEMS: Final = 100_000
_FEW_PARTS: Final = 8
_DEEPEST: Final = 4
_LONGEST_S: Final = 1.0
"""Time after which nothing more is hashed."""
_CLOCK_EVERY: Final = 256
"""Events between two looks at the clock."""
_LONG: Final = 64
"""Entries from which searching a list costs more than a dictionary's lookup."""
_RESUMABLE: Final = 0x20 | 0x80 | 0x200

_Key = tuple[CodeType, str]
"""A function, and the name of one of its variables; "" for its result."""


def fingerprint(value: Any, depth: int = 0) -> int | None:
    """Return a hash of a value's content; None for anything small, or of another kind."""
    kind = type(value)
    if kind.__module__.startswith("torch") and kind.__name__ in ("Tensor", "Parameter"):
        return _of_tensor(value)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return _of_array(value) if value.size >= _FEWEST and value.dtype.kind in "biufc" else None
    if kind in (list, tuple, dict) and depth < _DEEPEST:
        return _of_items(value, depth)
    return None


def _digest(*parts: bytes) -> int:
    return xxhash.xxh3_64_intdigest(b"\0".join(parts)) >> 4


def _of_tensor(tensor: Any) -> int | None:
    import torch

    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack() or torch._C._get_tracing_state():
        return None  # the program watches or traces operators, and would see ours
    if tensor.numel() < _FEWEST or tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
        return None
    if tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    size = tensor.numel() * tensor.element_size()
    taken = tensor.detach()[_slices(tensor.shape, size)].cpu().contiguous()
    total = tensor.detach().sum().item() if size > _WHOLE_BYTES else 0  # what changes between the samples shows in it
    kind = repr((tensor.shape, tensor.dtype, total)).encode()
    return _digest(numbers_of(taken.reshape(-1).view(torch.uint8)).tobytes(), kind)


def _of_array(array: Any) -> int:
    taken = array[_slices(array.shape, array.nbytes)]
    total = array.sum() if array.nbytes > _WHOLE_BYTES else 0
    return _digest(taken.tobytes(), repr((array.shape, array.dtype.str, total)).encode())


def _slices(shape: Iterable[int], size: int) -> tuple[slice, ...]:
    """Evenly spaced elements of a large tensor, of which the sum is hashed too; all of a small one."""
    sizes = list(shape)
    if size <= _WHOLE_BYTES:
        return tuple(slice(None) for _ in sizes)
    most = max(int(_SAMPLES ** (1 / len(sizes))), 2)
    return tuple(slice(None, None, max(length // most, 1)) for length in sizes)


def _of_items(value: Any, depth: int) -> int | None:
    parts = list(value.values()) if isinstance(value, dict) else list(value[:_FEW_PARTS])
    if not parts or len(value) > _MOST_ITEMS:
        return None
    if type(parts[0]) in (int, float, bool, str, list, tuple):
        is_long = not isinstance(value, dict) and (len(value) >= _FEWEST or type(parts[0]) in (list, tuple))
        if is_long and _is_small(value):
            with guard.attempt():  # unmarshallable objects among the items
                return _digest(marshal.dumps(value, 2))
        return None
    if len(value) > _FEW_PARTS:
        return None
    found = [fingerprint(part, depth + 1) for part in parts]
    return None if None in found else _digest(repr(found).encode())


def _is_small(value: Any) -> bool:
    """Whether nested lists have few items and characters in total."""
    waiting, left = [value], _MOST_ITEMS
    while waiting and left >= 0:
        each = waiting.pop()
        if type(each) in (list, tuple, str, bytes, bytearray):
            left -= len(each)
        if type(each) in (list, tuple) and left >= 0:
            waiting += [one for one in each if type(one) not in (int, float, bool)]
    return left >= 0


@dataclass
class _Seen:
    """The hashes of one result or variable: for each step, those of its calls in order."""

    steps: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class LookFacts:
    """What a look saw: equal values, backward passes that compute unused gradients, and what lines call."""

    values: tuple[ValueFacts, ...] = ()
    backward: tuple[BackwardFacts, ...] = ()
    constants: tuple[ConstantFacts, ...] = ()
    sparse: tuple[SparseFacts, ...] = ()
    kept_graphs: tuple[KeptGraphFacts, ...] = ()


class ValueLook:
    """Hashes values from `start` on; `border` marks the end of a step, and the look ends by itself after STEPS."""

    def __init__(self) -> None:
        self.is_over = True
        self._started_s = 0.0
        self._spent_s = 0.0
        self._step = 0
        self._seen: defaultdict[_Key, _Seen] = defaultdict(_Seen)
        self._calls: defaultdict[int, _Seen] = defaultdict(_Seen)
        self._modules: dict[int, weakref.ref[Any]] = {}
        self._roots: dict[int, weakref.ref[Any]] = {}
        self._counts: defaultdict[CodeType, int] = defaultdict(int)
        self._module_call: CodeType | None = None
        self._thread = 0
        self._until_s = float("inf")
        self._events = 0
        self._taken_off: object = None
        self._gradients = GradientLook()
        self._lists: dict[tuple[CodeType, str], list[int]] = {}  # length at the first call in each step
        self.made = MadeInSteps()
        self._constants = ConstantLook()
        self._graphs = KeptGraphs()

    def start(self, longest_s: float = float("inf")) -> None:
        """Begin with the step that begins now, unless the program is profiled in another way.

        Args:
            longest_s: time after which the look ends even if no step does: the program may have left its loop.
        """
        if sys.getprofile() is None and not self._step:
            self.is_over, self._module_call = False, call_code()
            self._thread, self._until_s = threading.get_ident(), time.monotonic() + longest_s
            self._taken_off = guard.on_failure("", self.stop, thread=threading.get_ident())
            guard.attempted(self._gradients.start)
            stack_room.take()
            hide_from_compiler(self._event)
            sys.setprofile(self._event)

    def forget(self) -> None:
        """Drop what was seen, to look again at steps of another kind."""
        self.stop()
        vars(self).update(vars(ValueLook()))

    def border(self) -> None:
        """End a step; the variables of running functions are hashed too."""
        if self._step >= STEPS or self.is_over:
            self._constants.border()
            if self._constants.is_over:
                self.stop()
            return
        if sys.getprofile() != self._event:  # the program profiles itself, or its steps run on another thread
            self.stop()
            return
        sys.setprofile(None)
        running = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if is_users(frame.f_code.co_filename):
                running.append((frame.f_code, {} if _asks_for_locals(frame.f_code) else locals_of(frame)))
                self._look(frame, None, running[-1][1])
            frame = frame.f_back
        self._graphs.look(running)
        self._counts.clear()
        self.made.border()
        self._step += 1
        self._gradients.border()
        if self._step < STEPS and self._spent_s <= _LONGEST_S:
            sys.setprofile(self._event)
            return
        if self._step == STEPS:
            guard.attempted(lambda: self._constants.start(self._until_s))
        if self._constants.is_over:
            self.stop()

    def stop(self) -> None:
        if not self.is_over:
            self.is_over = True
            stack_room.give_back()
            guard.off(self._taken_off)
            self._constants.stop()
            self._take_off()

    def _take_off(self) -> None:
        if sys.getprofile() == self._event:
            sys.setprofile(None)

    @guard.inline("record.equal_values.ValueLook")
    def _event(self, frame: FrameType, event: str, value: Any) -> None:
        if self.is_over or threading.get_ident() != self._thread:
            self._take_off()  # another thread has ended the look, or the program has put back what it found
            return
        self._events += 1
        if not self._events % _CLOCK_EVERY and time.monotonic() > self._until_s:
            self.stop()
            return
        code = frame.f_code
        if event == "call":
            self.made.called(frame)
            if code in self._gradients.begins:
                with unseen:
                    self._gradients.begins[code](frame)
        if event != "return":
            return
        self.made.returned(frame)
        if code in self._gradients.ends:
            with unseen:
                self._gradients.ends[code](frame)
        elif code is self._module_call:
            self._module_returned(frame, value)
        elif is_users(code.co_filename) and not code.co_flags & _RESUMABLE and code.co_name != "<module>":
            self._look(frame, value, {} if _asks_for_locals(code) else frame.f_locals)

    def _module_returned(self, frame: FrameType, value: Any) -> None:
        caller = frame.f_back
        while caller is not None and caller.f_code.co_name == "_wrapped_call_impl":
            caller = caller.f_back
        module = frame.f_locals.get("self")
        around = caller
        while around is not None and around.f_code is not self._module_call:
            around = around.f_back
        if around is None:
            self._roots[id(module)] = weakref.ref(module)
        if caller is not None and is_users(caller.f_code.co_filename):
            known = self._modules.get(id(module))
            if known is not None and known() is not module:  # the module is gone, and this one has its id
                self._calls.pop(id(module), None)
            self._modules[id(module)] = weakref.ref(module)
            self._add(self._calls[id(module)], value)

    def _look(self, frame: FrameType, value: Any, variables: Mapping[str, Any]) -> None:
        code = frame.f_code
        self._counts[code] += 1
        if self._counts[code] == 1:
            for name, length in dict(_long_lists(frame, variables)).items():
                if not self._step or (code, name) in self._lists:
                    self._lists.setdefault((code, name), []).append(length)
        if self._counts[code] > _MOST_CALLS:
            return
        self._add(self._seen[code, ""], value)
        for name, local in list(variables.items())[:_MOST_NAMES]:
            self._add(self._seen[code, name], local)

    def _add(self, seen: _Seen, value: Any) -> None:
        if self._spent_s > _LONGEST_S:
            return
        started_s = time.perf_counter()
        with guard.attempt():
            found = fingerprint(value)
            if found is not None:
                while len(seen.steps) <= self._step:
                    seen.steps.append([])
                seen.steps[self._step].append(found)
        self._spent_s += time.perf_counter() - started_s

    def lists(self) -> tuple[ListFacts, ...]:
        """The long lists that functions could reach in the steps that were looked at, by their last lengths."""
        return tuple(
            ListFacts(
                file=code.co_filename,
                function=code.co_firstlineno,
                name=name,
                length=lengths[-1],
                growth=lengths[-1] - lengths[0] if len(lengths) == STEPS else 0,
            )
            for (code, name), lengths in list(self._lists.items())[:_MOST_FACTS]
        )

    def facts(self) -> LookFacts:
        """The findings of the complete steps; empty if the look did not see STEPS of them."""
        if self._step < STEPS:
            return LookFacts()
        roots = [root for root in (each() for each in self._roots.values()) if root is not None]
        values = () if self._spent_s > _LONGEST_S else self._values(names_in_roots(roots))
        backward = guard.attempted(lambda: self._gradients.facts(roots)) or ()
        self._modules.clear()
        self._roots.clear()
        return LookFacts(values, backward, self._constants.facts(), self._constants.sparse, self._graphs.facts())

    def _values(self, names: Mapping[int, str]) -> tuple[ValueFacts, ...]:
        found = []
        for (code, name), seen in self._seen.items():
            whole = code.co_name == "<module>"
            place = {"file": code.co_filename, "function": code.co_name, "name": name, "last": _last_line(code)}
            found.append(_facts(seen, line=0 if whole else code.co_firstlineno, **place))
        for number, seen in self._calls.items():
            found.append(_facts(seen, module=names.get(number, "") if self._modules[number]() is not None else ""))
        return tuple(each for each in found if each is not None)[:_MOST_FACTS]


def _long_lists(frame: FrameType, variables: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Lists that a function's code names: variables, globals, and attributes of self that no property computes."""
    code = frame.f_code
    names = frame.f_globals
    found = [(name, names[name]) for name in code.co_names if name in names]
    with guard.attempt():  # an object without attributes
        own = object.__getattribute__(variables.get("self"), "__dict__")
        found += [(f"self.{name}", own[name]) for name in code.co_names if name in own]
    for name, value in [*variables.items(), *found][: 4 * _MOST_NAMES]:
        if type(value) in (list, tuple) and len(value) >= _LONG:
            yield name, len(value)


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return a running frame's local variables, without a second reference to them in the frame.

    Up to Python 3.12 the frame keeps the dictionary of them, and so the tensors of this step, until the next request.
    It is emptied unless somebody else has it. Not for the frame whose event a profile or trace function handles: what
    is missing there afterwards is deleted.
    """
    held = frame.f_locals
    found = dict(held)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED and sys.getrefcount(held) <= _OURS:
        held.clear()
    return found


def _asks_for_locals(code: CodeType) -> bool:
    """Whether a function may hold the result of `locals()`, which reading its variables would change."""
    return sys.version_info < (3, 13) and bool(code.co_flags & CO_OPTIMIZED) and not _LOCALS.isdisjoint(code.co_names)


_LOCALS: Final = frozenset({"locals", "vars"})
_OURS: Final = 3
"""References to a frame's variables that nobody else holds: the frame's, ours, and the counting function's."""


def _last_line(code: CodeType) -> int:
    inner = [_last_line(each) for each in code.co_consts if isinstance(each, CodeType)]
    return max([line for _, _, line in code.co_lines() if line is not None] + inner, default=code.co_firstlineno)


def _facts(seen: _Seen, **place: Any) -> ValueFacts | None:
    steps = [step for step in seen.steps[:STEPS] if step]
    if len(steps) < STEPS:
        return None
    return ValueFacts(
        calls=max(map(len, steps)),
        distinct=max(len(set(step)) for step in steps),
        is_constant=all(step == steps[0] for step in steps),
        **place,
    )


_look = ValueLook()


def value_look() -> ValueLook:
    """Return the look of this process, which forked processes do not continue."""
    return _look


@guard.entry
def _stop_in_child() -> None:
    _look.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_in_child)
