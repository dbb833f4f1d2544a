"""Operator calls of a trace, described independently of any device, and the device work that each launched.

Work (`stepscope.analysis.work_formulas`) and dimensions come from the shapes of the inputs; what shapes do not give is
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
from stepscope.machine.devices import DevicePeaks
from stepscope.predict.dimensions import Dimensions, dimensions, further_work
from stepscope.predict.operations import Cast, Operations, by_type, in_precision
from stepscope.trace import Trace, Window
from stepscope.trace.nesting import Rows, inherit

Mask: TypeAlias = npt.NDArray[np.bool_]
Labels: TypeAlias = npt.NDArray[np.str_]

SIDES: Final = ("compute", "memory bandwidth")
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
_LONGEST_NAME: Final = 100  # characters; NumPy reserves the longest name's size for every name of an array
_BACKWARD_OPERATOR: Final = r"_backward(?:_|$)"


def operations_of_calls(trace: Trace, *, window: Window | None = None) -> tuple[Rows, Operations]:
    """Find every operator call that itself launched device work, and describe its work.

    Args:
        window: only calls that start in it.

    Returns:
        Rows in `operators`, ascending, and the operations in the same order; `kind` is "" for unknown operators,
            `number_type` is "tf32" where kernel names say so.
    """
    calls = roofline_calls(trace, window=window).unique("row", keep="first", maintain_order=True).sort("row")
    rows: Rows = calls["row"].to_numpy()
    found = described(trace, rows)
    is_tf32 = (calls["number_type"] == "tf32").fill_null(False).to_numpy()
    return rows, replace(found, number_type=np.where(is_tf32, "tf32", found.number_type))


def described(trace: Trace, rows: Rows) -> Operations:
    """Describe the operator calls of these rows, whether or not a device ran them."""
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
    """Whether each operator computes gradients, by its name or an enclosing autograd node; shape (operators,)."""
    names = trace.operators["name"]
    nodes = names.str.contains(BACKWARD_NAME).fill_null(False).to_numpy()
    own: npt.NDArray[np.bool_] = names.str.contains(_BACKWARD_OPERATOR).fill_null(False).to_numpy()
    parent = trace.operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    inside: npt.NDArray[np.bool_] = inherit(np.where(nodes, 1, -1), parent) > 0
    return inside | own


def _known(name: str, shapes: str | None, call: Call | None, output: Shape | None) -> tuple[object, ...]:
    work = None if call is None else work_of(name, call, output) or further_work(name, shapes, call)
    if call is None or work is None:
        return (None,) * len(_KNOWN)
    loops = dimensions(name, call, output)
    if work.kind == "optimizer":
        loops = Dimensions(1.0, 1.0, float(work.bytes or 0) / 4, 1.0)
    flops, moved = (None if number is None else float(number) for number in (work.flops, work.bytes))
    return work.kind, work.number_type, flops, moved, *loops


class CalledOperations:
    """Operators that launched a trace's device work, described independently of any device, and the work of each.

    Args:
        precision: requested number type; None for the recorded one.
    """

    def __init__(self, trace: Trace, precision: str | None = None) -> None:
        self.trace = trace
        self._precision = precision
        self._rows, self.operations = operations_of_calls(trace)

    @cached_property
    def known(self) -> Mask:
        """Operations with known work."""
        numbers = np.isfinite(self.operations.flops) & np.isfinite(self.operations.bytes)
        known: Mask = numbers & (self.operations.kind != "")
        return known

    @cached_property
    def cast(self) -> Cast:
        """Operations in the requested number type."""
        if self._precision is None:
            return in_precision(self.operations, None)
        stays = in_optimizer(self.trace)[self._rows]
        return in_precision(self.operations, self._precision, stays=stays)

    @cached_property
    def of_work(self) -> Rows:
        """For each row of `device_work` the index of its call among the operations, -1 if none launched it."""
        operator = launching_operators(self.trace)
        if not len(self._rows):
            return np.full(len(operator), -1, np.int64)
        place = np.minimum(np.searchsorted(self._rows, operator), len(self._rows) - 1)
        return np.where(self._rows[place] == operator, place, -1)

    @cached_property
    def kinds(self) -> Labels:
        """Label shared by works with similar prediction errors: kind of the operator, else of the kernel or work."""
        kind = _of_work(self.trace.device_work, "kind")
        result = np.where(kind == "compute", np.where(self._is_matrix, "matrix", "a kernel by name"), kind)
        if len(self.operations):
            kinds = self.operations.kind[np.maximum(self.of_work, 0)]
            result = np.where((self.of_work >= 0) & (kinds != ""), kinds, result)
        return result.astype(np.str_)

    @cached_property
    def calls(self) -> Rows:
        """Index of each distinct call: operators with the same work, else works with the same name."""
        _, number = np.unique(_of_work(self.trace.device_work, "name"), return_inverse=True)
        result: Rows = number.ravel().astype(np.int64)
        known = self.of_work >= 0
        if known.any():
            result[known] = len(result) + different_calls(self.operations)[self.of_work[known]]
        return result

    def sides(self, device: DevicePeaks, precision: str | None = None) -> Labels:
        """What limits each work on a device: "compute" or "memory bandwidth".

        Where shapes were not recorded the kernel's name decides: matrix products are compute, everything else is memory
        bandwidth.
        """
        by_name = np.where(self._is_matrix, *SIDES)
        if not len(self.operations):
            return by_name
        sides = sides_of(in_precision(self.operations, precision).operations, device)[self.of_work]
        return np.where((self.of_work >= 0) & (sides != ""), sides, by_name)

    @cached_property
    def _is_matrix(self) -> Mask:
        names = self.trace.device_work["name"]
        found = {name: arithmetic(name).is_matrix for name in names.unique().drop_nulls().to_list()}
        return np.array([found.get(name, False) for name in names.to_list()], np.bool_)


def launching_operators(trace: Trace) -> Rows:
    """For each row of `device_work` the row of the operator that launched it, -1 if none did."""
    launch = trace.device_work["launch"].cast(pl.Int64)
    rows: Rows = trace.launches["operator"].cast(pl.Int64).gather(launch).fill_null(-1).to_numpy()
    return rows


def in_optimizer(trace: Trace) -> Mask:
    """Whether each operator runs in an optimizer step."""
    inside: Mask = (operator_places(trace)["phase"] == "optimizer").fill_null(False).to_numpy()
    return inside


def different_calls(operations: Operations) -> Rows:
    """Index of each distinct operation: same kind, arithmetic, traffic and dimensions."""
    names = ("name", "number_type", "flops", "bytes", "batch", "rows", "columns", "inner")
    table = pl.DataFrame({name: getattr(operations, name) for name in names})
    found: Rows = table.select(pl.struct(pl.all()).rank("dense")).to_series().to_numpy().astype(np.int64)
    return found


def sides_of(operations: Operations, device: DevicePeaks) -> Labels:
    """What limits each operation on a device, one of SIDES; "" where its work is unknown.

    A number type without a peak on the device uses the 32-bit peak.
    """
    usual = device.flops_s.get("fp32") or max(device.flops_s.values(), default=np.nan)
    compute = operations.flops / by_type(operations.number_type, device.flops_s, usual)
    traffic = operations.bytes / device.bandwidth_bytes_s
    return np.where(np.isfinite(compute + traffic), np.where(compute > traffic, *SIDES), "")


def _of_work(work: pl.DataFrame, column: str) -> Labels:
    return work[column].fill_null("other").to_numpy().astype(np.str_)
