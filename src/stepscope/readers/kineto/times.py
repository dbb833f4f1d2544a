"""From the file's microseconds to integer nanoseconds, without losing a digit."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final

import numpy as np
import numpy.typing as npt

LATEST_NS: Final = 2**61
"""Year 2043; differences of such times can be added and doubled in 64 bits, which nesting does."""
EARLIEST_NS: Final = -(2**59)
LONGEST_NS: Final = 2**60
DOUBLE_LIMIT: Final = 2.0**41
"""Microseconds up to which a double's spacing is below half a nanosecond."""
_MOST_DIGITS: Final = 19


def nanoseconds(microseconds: Sequence[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Exact int64 nanoseconds, and which of them fit, of numbers that are int, Decimal, or float below DOUBLE_LIMIT."""
    if not microseconds:
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    first = type(microseconds[0])
    if first is float or first is int:
        try:
            values = np.array(microseconds)
        except (ValueError, OverflowError):
            values = np.zeros(0, np.bool_)
        lowest, highest = values.min(initial=0), values.max(initial=0)
        if values.dtype == np.int64 and lowest > EARLIEST_NS // 1000 and highest < LATEST_NS // 1000:
            return values * 1000, np.ones(len(values), np.bool_)
        if values.dtype == np.float64 and lowest > EARLIEST_NS / 1000 and highest < DOUBLE_LIMIT:
            return np.rint(values * 1000).astype(np.int64), np.ones(len(values), np.bool_)
    exact = [_exact_nanoseconds(value) for value in microseconds]
    fits = np.array([value is not None for value in exact])
    return np.array([0 if value is None else value for value in exact], np.int64), fits


def difference(later: Any, earlier: Any) -> Any:
    """Between two times of a file, of which damage or size may have made one a Decimal and left the other a float."""
    if type(later) is type(earlier):
        return later - earlier
    return Decimal(later) - Decimal(earlier)


def _exact_nanoseconds(value: Any) -> int | None:
    try:
        exact = Decimal(value) * 1000
        number = int(exact.to_integral_value()) if exact.adjusted() < _MOST_DIGITS else LATEST_NS
    except (ArithmeticError, ValueError):
        return None
    return number if EARLIEST_NS < number < LATEST_NS else None
