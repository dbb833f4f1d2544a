"""What each work of a trace's devices is: its kind, and whether arithmetic or memory would limit it on a device."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.kernels import arithmetic
from stepscope.devices import DevicePeaks
from stepscope.predict.operations import Operations
from stepscope.predict.precision import in_precision
from stepscope.predict.trace_operations import operations_of_calls
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows

Labels: TypeAlias = npt.NDArray[np.str_]

SIDES: Final = ("compute", "memory bandwidth")


class WorkKinds:
    """The kinds of a trace's device work, free of any device; arrays as the rows of `device_work`.

    Attributes:
        operations: the operators that launched work.
        call: which of them launched each work, -1 for none.
    """

    def __init__(self, trace: Trace) -> None:
        self._work = trace.device_work
        called, self.operations = operations_of_calls(trace)
        self.call = _calls_of_work(trace, called)

    @property
    def kinds(self) -> Labels:
        """Works whose predictions err alike have the same: the operator's kind, else the kernel's, else the work's."""
        known = self.call >= 0
        result = np.where(self._is_matrix, "matrix", "a kernel by name")
        result = np.where(_of_work(self._work, "kind") == "compute", result, _of_work(self._work, "kind"))
        if known.any():
            kinds = self.operations.kind[np.maximum(self.call, 0)]
            result = np.where(known & (kinds != ""), kinds, result)
        return result.astype(np.str_)

    @property
    def calls(self) -> Rows:
        """A number for each different call: of operators of the same work, else of works of the same name."""
        _, number = np.unique(_of_work(self._work, "name"), return_inverse=True)
        result: Rows = number.ravel().astype(np.int64)
        known = self.call >= 0
        if known.any():
            result[known] = len(result) + different_calls(self.operations)[self.call[known]]
        return result

    def sides(self, device: DevicePeaks, precision: str | None = None) -> Labels:
        """What limits each work on a device: "compute", or "memory bandwidth".

        Where shapes were not recorded the kernel's name tells: matrix products compute, everything else moves memory.
        """
        by_name = np.where(self._is_matrix, *SIDES)
        if not len(self.operations):
            return by_name
        sides = sides_of(in_precision(self.operations, precision).operations, device)
        known = (self.call >= 0) & (sides != "")[self.call]
        return np.where(known, sides[self.call], by_name)

    @property
    def _is_matrix(self) -> npt.NDArray[np.bool_]:
        names = self._work["name"]
        told = {name: arithmetic(name).is_matrix for name in names.unique().drop_nulls().to_list()}
        return np.array([told.get(name, False) for name in names.to_list()], np.bool_)


def different_calls(operations: Operations) -> Rows:
    """A number for each operation, the same for those of the same kind, arithmetic, traffic and dimensions."""
    numbers = ("flops", "bytes", "batch", "rows", "columns", "inner")
    table = pl.DataFrame({name: getattr(operations, name) for name in ("name", "number_type", *numbers)})
    found = table.select(pl.struct(pl.all()).rank("dense")).to_series().to_numpy()
    result: Rows = found.astype(np.int64)
    return result


def sides_of(operations: Operations, device: DevicePeaks) -> Labels:
    """What limits each operation on a device, one of SIDES; "" where its work is not known.

    A number type that the device has no peak for counts with its 32-bit one.
    """
    usual = device.flops_s.get("fp32") or max(device.flops_s.values(), default=np.nan)
    peaks = np.array([device.flops_s.get(kind, usual) for kind in operations.number_type.tolist()], np.float64)
    compute, traffic = operations.flops / peaks, operations.bytes / device.bandwidth_bytes_s
    return np.where(np.isfinite(compute + traffic), np.where(compute > traffic, *SIDES), "")


def _calls_of_work(trace: Trace, called: Rows) -> Rows:
    """For each row of `device_work` the place of the operator that launched it in these rows, -1 for none."""
    result = np.full(trace.device_work.height, -1, np.int64)
    operator = trace.launches["operator"].cast(pl.Int64).gather(trace.device_work["launch"].cast(pl.Int64))
    operators = operator.fill_null(-1).to_numpy()
    if len(called):
        place = np.minimum(np.searchsorted(called, operators), len(called) - 1)
        result = np.where((operators >= 0) & (called[place] == operators), place, -1)
    return result


def _of_work(work: pl.DataFrame, column: str) -> Labels:
    return work[column].fill_null("other").to_numpy().astype(np.str_)
