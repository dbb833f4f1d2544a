"""A trace's operator calls, described free of any device.

Work (`stepscope.analysis.work_formulas`) and dimensions come from the shapes of the inputs; what those do not tell is
not-a-number.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.attribution import operator_places
from stepscope.analysis.kernels import arithmetic
from stepscope.analysis.module_paths import BACKWARD_NAME
from stepscope.analysis.roofline import roofline_calls
from stepscope.analysis.work import Call, Shape, base_name
from stepscope.analysis.work_formulas import distinct_calls, work_of
from stepscope.machine.own_devices import DevicePeaks
from stepscope.predict.dimensions import UNKNOWN, Dimensions, dimensions, further_work
from stepscope.predict.operations import Cast, Operations, in_precision, is_low
from stepscope.trace import Trace, Window
from stepscope.trace.nesting import Rows, inherit

_KNOWN: Final[dict[str, type[pl.DataType]]] = {
    "kind": pl.String,
    "number_type": pl.String,
    "flops": pl.Float64,
    "bytes": pl.Float64,
    "batch": pl.Float64,
    "rows": pl.Float64,
    "columns": pl.Float64,
    "inner": pl.Float64,
}
_LONGEST_NAME: Final = 100
"""Characters; every name of an array takes as much memory as the longest."""
_BACKWARD_OPERATOR: Final = r"_backward(?:_|$)"


def operations_of_calls(trace: Trace, *, window: Window | None = None) -> tuple[Rows, Operations]:
    """Every operator call that launched work on a device itself, and what that work is.

    Args:
        window: only calls that start in this stretch of time.

    Returns:
        Rows in `operators`, ascending, and the operations in the same order; `kind` is "" where nothing is known of
        such operators, `number_type` is "tf32" where the kernels' names say so.
    """
    calls = roofline_calls(trace, window=window).unique("row", keep="first", maintain_order=True).sort("row")
    rows: Rows = calls["row"].to_numpy()
    found = described(trace, rows)
    is_tf32 = (calls["number_type"] == "tf32").fill_null(False).to_numpy()
    return rows, replace(found, number_type=np.where(is_tf32, "tf32", found.number_type))


def described(trace: Trace, rows: Rows) -> Operations:
    """What the operator calls of these rows do, whether or not a device did it."""
    distinct = distinct_calls(trace)
    shapes = distinct.texts["input_shapes"].to_list()
    known = [
        _known(name, text, call, output)
        for name, text, call, output in zip(distinct.names, shapes, distinct.calls, distinct.outputs, strict=True)
    ]
    table = distinct.spread(pl.DataFrame(known, dict(_KNOWN), orient="row"))[rows]
    names = trace.operators["name"][rows]
    numbers = {name: table[name].fill_null(np.nan).to_numpy() for name, kind in _KNOWN.items() if kind is pl.Float64}
    return Operations(
        name=np.array([base_name(name)[:_LONGEST_NAME] for name in names.to_list()], np.str_),
        kind=table["kind"].fill_null("").to_numpy().astype(np.str_),
        number_type=table["number_type"].fill_null("").to_numpy().astype(np.str_),
        is_backward=is_backward(trace)[rows],
        **numbers,
    )


def is_backward(trace: Trace) -> npt.NDArray[np.bool_]:
    """Whether each operator computes gradients: by its name, or as part of a node of autograd; shape (operators,)."""
    names = trace.operators["name"]
    nodes = names.str.contains(BACKWARD_NAME).fill_null(False).to_numpy()
    own: npt.NDArray[np.bool_] = names.str.contains(_BACKWARD_OPERATOR).fill_null(False).to_numpy()
    parent = trace.operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    inside: npt.NDArray[np.bool_] = inherit(np.where(nodes, 1, -1), parent) > 0
    return inside | own


def _known(name: str, shapes: str | None, call: Call | None, output: Shape | None) -> tuple[object, ...]:
    if call is None:
        return (None,) * len(_KNOWN)
    work = work_of(name, call, output) or further_work(name, shapes, call)
    if work is None:
        return (None,) * len(_KNOWN)
    loops: Dimensions = UNKNOWN if work.kind == "optimizer" else dimensions(name, call, output)
    if work.kind == "optimizer":
        loops = Dimensions(1.0, 1.0, float(work.bytes or 0) / 4, 1.0)
    flops, moved = (None if number is None else float(number) for number in (work.flops, work.bytes))
    return work.kind, work.number_type, flops, moved, *loops


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
