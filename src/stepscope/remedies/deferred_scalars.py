"""Numbers that a device computes and the host reads only when they are used, and scalars logged without waiting.

history = []
for batch in loader:
    loss = ...
    history.append(DeferredNumber(loss))       # in place of loss.item(): does not wait
print(f"{history[-1]:.4f}")                    # waits for this one

with DeferredScalars(writer) as scalars:            # a SummaryWriter, wandb, or any write(step, name, value)
    for step, batch in enumerate(loader):
        loss = ...
        scalars.add(step, loss=loss)                # in place of writer.add_scalar("loss", loss.item(), step)
"""

from __future__ import annotations

import atexit
import functools
import math
import numbers
import operator
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast, overload

import torch

from stepscope.remedies.attempts import Attempt, in_background
from stepscope.remedies.settings import check_whole, host_memory, streams_of

_DEEPEST: Final = 64
"""Deepest chain of deferred sums: a host further ahead waits."""


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, DeferredNumber) else value


_Binary: TypeAlias = Callable[[Any, Any], Any]


def _put_off(compute: _Binary) -> tuple[_Binary, _Binary]:
    """A method with a deferred result, and its reflected form."""
    return (lambda self, other: self._of(compute, self, other)), (lambda self, other: self._of(compute, other, self))


def _read_now(compute: _Binary) -> tuple[_Binary, _Binary]:
    """A method that waits for the number, and its reflected form."""
    return (lambda self, other: compute(self.value, _plain(other))), (lambda self, other: compute(other, self.value))


def _of_value(compute: Any) -> Callable[[Any], Any]:
    return lambda self: compute(self.value)


class DeferredNumber:
    """A number in a one-element tensor, whose copy to the host starts now and is waited for when it is used.

    It works wherever a number does: `float()`, formatting, comparison, arithmetic, `math`, numpy and pickle read it.
    Sums, differences and products with numbers are deferred too, with the results that Python computes in 64 bits. It
    is not a `float`, though: `isinstance(value, float)` is False, and `json.dumps` needs `float(value)`.

    On CUDA and XPU the copy runs on the device's stream into pinned memory. On other accelerators the number is copied
    on the device, and reading it waits for everything launched until then. On the CPU nothing is deferred.

    Args:
        tensor: floating point, one element, on any device; later in-place changes have no effect. A plain number is
            kept as it is.

    Raises:
        TypeError: it is neither a floating-point tensor nor a number.
        ValueError: it does not have exactly one element.
    """

    __slots__ = ("_copy", "_depth", "_event", "_parts", "_value")

    def __init__(self, tensor: torch.Tensor | numbers.Real) -> None:
        self._value: float | None = None
        self._copy: torch.Tensor | None = None
        self._event: Any = None
        self._depth = 0
        self._parts: tuple[Callable[[Any, Any], Any], Any, Any] | None = None
        if isinstance(tensor, numbers.Real):
            self._value = float(tensor)
            return
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            what = f"tensor of {tensor.dtype}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"a {what} cannot be deferred: give a tensor of floating point numbers")
        if tensor.numel() != 1:
            raise ValueError(f"the tensor has {tensor.numel()} elements, not one: take its mean first")
        single = tensor.detach().reshape(())
        if single.device.type == "cpu":
            self._value = single.item()
            return
        streams = streams_of(single.device)
        if streams is None:
            self._copy = single.clone()
            return
        self._copy = host_memory(single)
        self._copy.copy_(single, non_blocking=True)
        self._event = streams.Event()
        self._event.record(streams.current_stream(single.device))

    @property
    def is_there(self) -> bool:
        """Whether the number can be used without waiting."""
        if self._value is not None:
            return True
        if self._parts is not None:
            return all(each.is_there for each in self._parts[1:] if isinstance(each, DeferredNumber))
        return self._event is not None and bool(self._event.query())

    @property
    def value(self) -> float:
        """The number; waits for it if necessary."""
        todo = [self]
        while todo:  # chains of sums exceed Python's recursion limit
            number = todo[-1]
            if number._value is not None:
                todo.pop()
            elif number._parts is None:
                number._read()
            else:
                compute, left, right = number._parts
                missing = [each for each in (left, right) if isinstance(each, DeferredNumber) and each._value is None]
                if missing:
                    todo += missing
                else:
                    number._value = compute(_plain(left), _plain(right))
                    number._parts = None
        assert self._value is not None
        return self._value

    def _read(self) -> None:
        assert self._copy is not None
        if self._event is not None:
            self._event.synchronize()
        self._value = self._copy.item()
        self._copy = self._event = None

    def _settle_below(self, levels: int) -> int:
        """Wait for the operand `levels` sums below this one, the oldest, and return the depth that remains."""
        number = self
        for level in range(levels):
            parts = number._parts[1:] if number._parts is not None else ()
            below = [each for each in parts if isinstance(each, DeferredNumber)]
            if not below:
                return level
            number = max(below, key=lambda each: each._depth)
        _ = number.value
        return levels

    @classmethod
    def _of(cls, compute: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        """Compute from two numbers, at once if both have arrived or if one is not a Python number."""
        for each in (left, right):
            if not isinstance(each, DeferredNumber | float | int):
                return compute(_plain(left), _plain(right))
        deferred = [each for each in (left, right) if isinstance(each, DeferredNumber)]
        if all(each.is_there for each in deferred):
            return compute(_plain(left), _plain(right))
        deepest = max(deferred, key=lambda each: each._depth)
        depth = deepest._depth + 1
        if depth > _DEEPEST:
            depth = deepest._settle_below(_DEEPEST // 2) + 1
        number = cls.__new__(cls)
        number._value = number._copy = number._event = None
        number._parts, number._depth = (compute, left, right), depth
        return number

    __add__, __radd__ = _put_off(operator.add)
    __sub__, __rsub__ = _put_off(operator.sub)
    __mul__, __rmul__ = _put_off(operator.mul)
    __truediv__, __rtruediv__ = _read_now(operator.truediv)  # a mean is usually computed to be printed
    __floordiv__, __rfloordiv__ = _read_now(operator.floordiv)
    __mod__, __rmod__ = _read_now(operator.mod)
    __divmod__, __rdivmod__ = _read_now(divmod)
    __pow__, __rpow__ = _read_now(operator.pow)
    __lt__, __gt__ = _read_now(operator.lt)
    __le__, __ge__ = _read_now(operator.le)
    __neg__, __pos__, __abs__ = map(_of_value, (operator.neg, float, abs))
    __trunc__, __floor__, __ceil__ = map(_of_value, (math.trunc, math.floor, math.ceil))
    __float__, __int__, __bool__, __complex__ = map(_of_value, (float, int, bool, complex))
    __hash__, __str__, __repr__ = map(_of_value, (hash, str, repr))

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.value, digits)

    def __eq__(self, other: object) -> Any:
        return self.value == _plain(other)

    def __ne__(self, other: object) -> Any:
        return self.value != _plain(other)

    def __format__(self, form: str) -> str:
        return format(self.value, form)

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (self.value,)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy

        return numpy.array(self.value, dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # other attributes belong to no number, such as a buffer's or an index's
            raise AttributeError(f"a deferred number has no {name}")
        return getattr(self.value, name)


numbers.Real.register(DeferredNumber)


Write = Callable[[int, str, float], object]
_MOST_UNREAD: Final = 4
"""Most groups of values being copied to the host; beyond that, the oldest is waited for."""


@dataclass(slots=True)
class _Group:
    """Values of consecutive steps that are copied to the host together.

    Each entry is (step, name, value); value is a number, or a reference: ((device, dtype), position).
    """

    entries: list[tuple[int, str, float | tuple[Any, int]]] = field(default_factory=list)
    on_device: dict[Any, list[torch.Tensor]] = field(default_factory=dict)
    copies: dict[Any, torch.Tensor] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)
    given: int = 0

    def begin_copying(self) -> None:
        """Start one copy per device and dtype, into pinned memory without waiting if the device has streams."""
        for key, values in self.on_device.items():
            together = torch.stack(values)
            streams = streams_of(together.device)
            if streams is None:
                self.copies[key] = together  # read when it is needed
                continue
            copy = host_memory(together)
            copy.copy_(together, non_blocking=True)
            event = streams.Event()
            event.record(streams.current_stream(together.device))
            self.copies[key] = copy
            self.events.append(event)
        self.on_device.clear()

    def give(self, write: Write, latest: dict[str, tuple[int, float]]) -> None:
        """Pass the values on in order; after an exception in `write`, resume with the value that it did not take."""
        for event in self.events:
            event.synchronize()
        numbers = {key: copy.tolist() for key, copy in self.copies.items()}
        while self.given < len(self.entries):
            step, name, value = self.entries[self.given]
            number = float(numbers[value[0]][value[1]]) if isinstance(value, tuple) else value
            latest[name] = (step, number)
            write(step, name, number)
            self.given += 1


class DeferredScalars:
    """Collect scalars that may still be computed on a device, and write them once they have arrived.

    `add` copies each value on its device and reads nothing. Every `every` calls the collected values are copied to the
    host together. On CUDA and XPU the copy runs on the stream and is written at a later `add`, so that the host waits
    only when it is five copies ahead; on other accelerators the host waits once every `every` calls. Every value is
    written as `float(value)`, in the order in which it was added; numbers and CPU tensors at once if nothing is queued
    before them. Use it from one thread, in a `with` statement or with `close()`, which writes the rest, also after an
    exception; otherwise the rest is written when the interpreter exits.

    Args:
        write: `write(step, name, value)`, such as `print`; or an object with `add_scalar` (TensorBoard's
            SummaryWriter), or with `log` (wandb, or a run of it), which gets all values of a step in one call.
        every: number of `add` calls between copies to the host.
        most: copy earlier once this many values are collected.

    Attributes:
        latest: by name, the step and value written last, for progress bars.

    Raises:
        TypeError, ValueError: an argument cannot be used.
    """

    def __init__(self, write: Write | Any, *, every: int = 50, most: int = 10_000) -> None:
        check_whole("every", every)
        check_whole("most", most)
        self.latest: dict[str, tuple[int, float]] = {}
        self._write, self._flush_written = _writer(write)
        self._every, self._most = every, most
        self._calls = 0
        self._collected = _Group()
        self._under_way: deque[_Group] = deque()
        self._closed = False
        atexit.register(self._close_at_exit)

    def add(self, step: int, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Collect the values of a step: tensors with one element on any device, or numbers.

        Raises:
            ValueError: a tensor does not have exactly one element, or this is closed.
            TypeError: a value is not a number.
        """
        if self._closed:
            raise ValueError("these scalars are closed: add values before close(), or inside the with statement")
        # Check every value before keeping any.
        entries = [(name, _scalar(name, value)) for name, value in {**(values or {}), **more}.items()]
        for name, value in entries:
            if isinstance(value, torch.Tensor):
                key = (value.device, value.dtype)
                kept = self._collected.on_device.setdefault(key, [])
                self._collected.entries.append((step, name, (key, len(kept))))
                kept.append(value)
            else:
                self._collected.entries.append((step, name, value))
        self._calls += 1
        # Without values from a device there is nothing to wait for.
        only_numbers = not self._under_way and not self._collected.on_device
        if only_numbers or self._calls >= self._every or len(self._collected.entries) >= self._most:
            self._begin_copying()
        self._give_what_is_there()

    def flush(self) -> None:
        """Wait for everything that was added, and write it."""
        self._begin_copying()
        while self._under_way:
            self._give_oldest()
        self._flush_written()

    def close(self) -> None:
        """Write everything; nothing can be added afterwards."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        atexit.unregister(self._close_at_exit)

    def __enter__(self) -> DeferredScalars:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.close()
            return
        with Attempt() as closing:  # must not hide the first error: a failed device cannot be read
            self.close()
        if closing.error is not None:
            warnings.warn(f"the last scalars could not be read: {closing.error}", RuntimeWarning, stacklevel=2)

    @in_background
    def _close_at_exit(self) -> None:
        self.close()

    def _begin_copying(self) -> None:
        group, self._collected, self._calls = self._collected, _Group(), 0
        if group.entries:
            group.begin_copying()
            self._under_way.append(group)

    def _give_what_is_there(self) -> None:
        while self._under_way:
            are_there = all(event.query() for event in self._under_way[0].events)
            if not are_there and len(self._under_way) <= _MOST_UNREAD:
                return
            self._give_oldest()

    def _give_oldest(self) -> None:
        self._under_way[0].give(self._write, self.latest)
        self._under_way.popleft()


def _scalar(name: str, value: Any) -> torch.Tensor | float:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            what = "is complex" if value.is_complex() else f"has {value.numel()} elements"
            raise ValueError(f"{name} {what}; a scalar is one real number: take its mean or norm first")
        value = value.detach()
        return float(value) if _is_on_host(value) else value.reshape(()).clone()
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} is {type(value).__name__}; a scalar is a number or a tensor with one element"
        ) from None


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _writer(write: Any) -> tuple[Write, Callable[[], object]]:
    """Return (`write(step, name, value)`, the function to call at the end of a flush)."""
    if hasattr(write, "add_scalar"):
        return (lambda step, name, value: write.add_scalar(name, value, step)), lambda: None
    if not callable(write) and hasattr(write, "log"):
        steps = _WholeSteps(write.log)
        return steps.write, steps.flush
    if not callable(write):
        raise TypeError(
            f"{type(write).__name__} cannot be written to: give a function of step, name and value, or an object with "
            "add_scalar or log"
        )
    return cast(Write, write), lambda: None


class _WholeSteps:
    """Values for a `log(values, step=step)` that accepts each step only once."""

    def __init__(self, log: Callable[..., object]) -> None:
        self._log = log
        self._step: int | None = None
        self._values: dict[str, float] = {}

    def write(self, step: int, name: str, value: float) -> None:
        if step != self._step or name in self._values:
            self.flush()
        self._step = step
        self._values[name] = value

    def flush(self) -> None:
        if self._values:
            self._log(dict(self._values), step=self._step)
            self._values.clear()


def every(steps: int | None = None, *, seconds: float | None = None) -> Every:
    """Limit how often something is done: every so many steps (from 1 on), or every so many seconds.

    Called with a step, the result says whether this is the first one, or whether another multiple of `steps` has been
    reached since; asked twice about the same step it gives the same answer. Called without arguments it counts the
    calls: True for the first, and for each `steps`-th after it. Called with a function it returns one that calls it
    only when due; called with a progress bar (an object with `update`), one that draws only when due.

    Raises:
        ValueError: both, neither, or a number that is too small.
    """
    if (steps is None) == (seconds is None):
        raise ValueError("every takes a number of steps or of seconds: every(50) or every(seconds=10)")
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise ValueError(f"every({steps!r}) takes a whole number of steps from 1 on")
    if seconds is not None and not (isinstance(seconds, (int, float)) and math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"every(seconds={seconds!r}) takes a number above 0")
    return Every(steps, seconds)


class Every:
    """The result of `every`; each object keeps its own count."""

    def __init__(self, steps: int | None, seconds: float | None) -> None:
        self._steps, self._seconds = steps, seconds
        self._calls = 0
        self._last_step: int | None = None
        self._last_answer = False
        self._last_turn: float | None = None

    @overload
    def __call__(self, what: int | None = None) -> bool: ...
    @overload
    def __call__(self, what: Any) -> Any: ...
    def __call__(self, what: Any = None) -> Any:
        """Return whether this step or call is due, or wrap `what` so that it acts only when due."""
        if what is None:
            self._calls += 1
            return self._is_time(self._calls - 1)
        if isinstance(what, int) and not isinstance(what, bool):
            if what != self._last_step:
                self._last_step, self._last_answer = what, self._is_time(what)
            return self._last_answer
        if callable(getattr(what, "update", None)) and not isinstance(what, type):
            return SparseBar(what, self._again(), self._again())
        if callable(what):
            is_time = self._again()
            return functools.wraps(what)(lambda *args, **named: what(*args, **named) if is_time() else None)
        raise TypeError(f"every takes a step, a function or a progress bar, not {type(what).__name__}")

    def _is_time(self, step: int) -> bool:
        if self._seconds is not None:
            now = time.monotonic()
            due = self._last_turn is None or now - self._last_turn >= self._seconds
        else:
            now = step // (self._steps or 1)
            due = now != self._last_turn  # a smaller step, too: a new epoch
        if due:
            self._last_turn = now
        return due

    def _again(self) -> Every:
        return Every(self._steps, self._seconds)


class SparseBar:
    """A progress bar that is drawn every so often: it passes everything on, but collects `update` and `set_postfix`.

    Tensors given to `set_postfix` are read only when the bar is drawn, so that the steps between do not wait for the
    device. `close`, the end of the iteration and the end of a `with` statement draw the rest.
    """

    def __init__(self, bar: Any, is_time: Every, is_time_for_postfix: Every) -> None:
        self._bar, self._is_time, self._is_time_for_postfix = bar, is_time, is_time_for_postfix
        self._advance: float = 0
        self._postfix: tuple[dict[str, Any], bool] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_bar":
            raise AttributeError(name)
        return getattr(self._bar, name)

    def __len__(self) -> int:
        return len(self._bar)

    def __iter__(self) -> Iterator[Any]:
        items = getattr(self._bar, "iterable", None)
        try:
            if items is None:
                yield from self._bar
            else:
                # tqdm's own iteration would draw on its own schedule.
                for item in items:
                    yield item
                    self.update()
        finally:
            self._draw()
            if items is not None:
                self._bar.close()  # as its own iteration does

    def __enter__(self) -> SparseBar:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        self._draw()
        return self._bar.__exit__(*error)

    def update(self, n: float = 1) -> None:
        """Count the progress; when due, advance the bar by all that was counted."""
        self._advance += n
        if self._is_time():
            self._advance_bar()

    def set_postfix(self, ordered_dict: Any = None, refresh: bool = True, **values: Any) -> None:
        """Keep these values; when due, show the latest ones."""
        self._postfix = {**(ordered_dict or {}), **values}, refresh
        if self._is_time_for_postfix():
            self._show_postfix()

    def close(self) -> None:
        """Draw the rest, and close the bar."""
        self._draw()
        self._bar.close()

    def _draw(self) -> None:
        self._show_postfix()
        self._advance_bar()

    def _advance_bar(self) -> None:
        advance, self._advance = self._advance, 0
        if advance:
            self._bar.update(advance)

    def _show_postfix(self) -> None:
        if self._postfix is not None:
            (values, refresh), self._postfix = self._postfix, None
            numbers = {
                name: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
                for name, value in values.items()
            }
            self._bar.set_postfix(numbers, refresh)
