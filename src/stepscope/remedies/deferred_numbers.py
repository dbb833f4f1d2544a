"""A number that a device computes and the host reads only when it is used.

history = []
for batch in loader:
    loss = ...
    history.append(DeferredNumber(loss))       # in place of loss.item(): does not wait
print(f"{history[-1]:.4f}")                    # waits for this one
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch

from stepscope.remedies.host_settings import host_memory, streams_of

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
            raise ValueError(f"the tensor has {tensor.numel()} elements: a number is one; take its mean first")
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
    __truediv__, __rtruediv__ = _read_now(operator.truediv)  # a mean is mostly computed to be printed
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
