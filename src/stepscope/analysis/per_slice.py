"""Values of a trace's tables as values of the slices of its host threads."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from stepscope.analysis.host import HostActivity
from stepscope.trace.nesting import Rows

_T = TypeVar("_T")


class Numbering(Generic[_T]):
    """Gives each thing a number, from 0 on."""

    def __init__(self) -> None:
        self._numbers: dict[_T, int] = {}

    def __getitem__(self, thing: _T) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))

    @property
    def words(self) -> tuple[_T, ...]:
        return tuple(self._numbers)


def own_values(activity: HostActivity, table: int, values: Rows) -> Rows:
    """Values of a table's rows as values of slices, -1 for the slices of other tables."""
    result = np.full(len(activity.row), -1, np.int64)
    mine = np.flatnonzero(activity.table == table)
    result[mine] = values[activity.row[mine]]
    return result


def at(values: npt.NDArray[np.signedinteger[Any]], index: Rows) -> Rows:
    """The values at these positions, -1 for position -1."""
    if not len(values):
        return np.full(len(index), -1, np.int64)
    return np.where(index >= 0, values[np.maximum(index, 0)], -1).astype(np.int64)
