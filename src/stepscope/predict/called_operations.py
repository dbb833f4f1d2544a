"""The operators that launched a trace's device work, described once for all devices and targets."""

from __future__ import annotations

from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.attribution import operator_places
from stepscope.predict.operations import Operations
from stepscope.predict.precision import Cast, in_precision, is_low
from stepscope.predict.trace_operations import operations_of_calls
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows

Mask: TypeAlias = npt.NDArray[np.bool_]


class CalledOperations:
    """The operators that launched device work, described once for all devices of a trace.

    Args:
        precision: the number type that is asked for; None for the recorded one.
    """

    def __init__(self, trace: Trace, precision: str | None) -> None:
        self.trace = trace
        self._precision = precision

    @cached_property
    def _found(self) -> tuple[Rows, Operations]:
        return operations_of_calls(self.trace)

    @property
    def operations(self) -> Operations:
        """What each of them computes."""
        return self._found[1]

    @cached_property
    def known(self) -> Mask:
        """Of which operations the work is known."""
        numbers = np.isfinite(self.operations.flops) & np.isfinite(self.operations.bytes)
        known: Mask = numbers & (self.operations.kind != "")
        return known

    @cached_property
    def is_low(self) -> bool | None:
        """Whether products compute in 16 bits or less; None where their work is not known."""
        return is_low(self.operations)

    @cached_property
    def cast(self) -> Cast:
        """The operations in the number type that is asked for."""
        if self._precision is None:
            return in_precision(self.operations, None)
        in_optimizer = (operator_places(self.trace)["phase"] == "optimizer").fill_null(False).to_numpy()
        return in_precision(self.operations, self._precision, stays=in_optimizer[self._found[0]])

    @cached_property
    def of_work(self) -> Rows:
        """For each row of `device_work` the place of its call among the operations, -1 for none."""
        launch = self.trace.device_work["launch"].cast(pl.Int64)
        operator = self.trace.launches["operator"].cast(pl.Int64).gather(launch).fill_null(-1).to_numpy()
        called = self._found[0]
        if not len(called):
            return np.full(len(operator), -1, np.int64)
        place = np.minimum(np.searchsorted(called, operator), len(called) - 1)
        return np.where(called[place] == operator, place, -1)
