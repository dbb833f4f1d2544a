"""A number that a device computes, read when it is used.

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
from typing import Any, Final

import torch

from stepscope.remedies.host_settings import host_memory, streams_of

_DEEPEST: Final = 64
"""Sums of sums that are put off: a host that is further ahead than this waits."""


class DeferredNumber:
    """A number in a tensor of one element, whose copy to the host begins now and is waited for when it is used.

    It can be used where a number can: `float()`, formatting, comparison, arithmetic, `math`, numpy and pickle read it.
    Sums, differences and products with numbers are put off as well, and are what Python computes, in 64 bits.
    It is no `float`, though: `isinstance(value, float)` and `json.dumps` want `float(value)`.

    On CUDA and XPU the copy goes in the device's stream into pinned memory. On other accelerators the number is copied
    on the device, and reading it waits for what was launched by then. On the CPU there is nothing to put off.

    Args:
        tensor: floating point, one element, on any device. What happens to it afterwards changes nothing. A number
            stays what it is, since some code makes numbers by the type of others.

    Raises:
        TypeError: it is no tensor of floating point numbers, and no number.
        ValueError: it has not one element.
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
            raise TypeError(f"a {_what(tensor)} cannot be deferred: give a tensor of floating point numbers")
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
        """Whether using the number would not wait."""
        if self._value is not None:
            return True
        if self._parts is not None:
            return all(each.is_there for each in self._parts[1:] if isinstance(each, DeferredNumber))
        return self._event is not None and bool(self._event.query())

    @property
    def value(self) -> float:
        """The number; waits for it where it is not there yet."""
        todo = [self]
        while todo:  # sums of sums go deeper than Python's calls may
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
        """Wait for what lies so many sums below this one, which is the oldest, and return how deep it is then."""
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
        """What is computed of two numbers: at once where both are there, or where one is no number of Python."""
        for each in (left, right):
            if not isinstance(each, DeferredNumber | float | int):
                return compute(_plain(left), _plain(right))
        if all(each.is_there for each in (left, right) if isinstance(each, DeferredNumber)):
            return compute(_plain(left), _plain(right))
        deepest = max(
            (each for each in (left, right) if isinstance(each, DeferredNumber)), key=lambda each: each._depth
        )
        depth = deepest._depth + 1
        if depth > _DEEPEST:
            depth = deepest._settle_below(_DEEPEST // 2) + 1
        number = cls.__new__(cls)
        number._value = number._copy = number._event = None
        number._parts, number._depth = (compute, left, right), depth
        return number

    def __add__(self, other: Any) -> Any:
        return self._of(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return self._of(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return self._of(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._of(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return self._of(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._of(operator.mul, other, self)

    def __truediv__(self, other: Any) -> Any:  # a mean is most often taken to be shown
        return self.value / _plain(other)

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.value

    def __floordiv__(self, other: Any) -> Any:
        return self.value // _plain(other)

    def __rfloordiv__(self, other: Any) -> Any:
        return other // self.value

    def __mod__(self, other: Any) -> Any:
        return self.value % _plain(other)

    def __rmod__(self, other: Any) -> Any:
        return other % self.value

    def __divmod__(self, other: Any) -> Any:
        return divmod(self.value, _plain(other))

    def __rdivmod__(self, other: Any) -> Any:
        return divmod(other, self.value)

    def __pow__(self, other: Any) -> Any:
        return self.value ** _plain(other)

    def __rpow__(self, other: Any) -> Any:
        return other**self.value

    def __neg__(self) -> float:
        return -self.value

    def __pos__(self) -> float:
        return self.value

    def __abs__(self) -> float:
        return abs(self.value)

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.value, digits)

    def __trunc__(self) -> int:
        return math.trunc(self.value)

    def __floor__(self) -> int:
        return math.floor(self.value)

    def __ceil__(self) -> int:
        return math.ceil(self.value)

    def __float__(self) -> float:
        return self.value

    def __int__(self) -> int:
        return int(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __complex__(self) -> complex:
        return complex(self.value)

    def __eq__(self, other: object) -> Any:
        return self.value == _plain(other)

    def __ne__(self, other: object) -> Any:
        return self.value != _plain(other)

    def __lt__(self, other: Any) -> Any:
        return self.value < _plain(other)

    def __le__(self, other: Any) -> Any:
        return self.value <= _plain(other)

    def __gt__(self, other: Any) -> Any:
        return self.value > _plain(other)

    def __ge__(self, other: Any) -> Any:
        return self.value >= _plain(other)

    def __hash__(self) -> int:
        return hash(self.value)

    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return repr(self.value)

    def __format__(self, form: str) -> str:
        return format(self.value, form)

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (self.value,)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy

        return numpy.array(self.value, dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what is not above is no number's, such as a buffer or an index
            raise AttributeError(f"a deferred number has no {name}")
        return getattr(self.value, name)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, DeferredNumber) else value


def _what(value: object) -> str:
    return f"tensor of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__


numbers.Real.register(DeferredNumber)
