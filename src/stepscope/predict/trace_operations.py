"""A trace's operator calls, described free of any device.

Work (`stepscope.analysis.work_formulas`) and dimensions come from the shapes of the inputs; what those do not tell is
not-a-number.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.backward import BACKWARD_NAME
from stepscope.analysis.roofline import roofline_calls
from stepscope.analysis.traffic import base_name
from stepscope.analysis.work_formulas import work_of
from stepscope.analysis.work_inputs import Call, Shape
from stepscope.analysis.work_of_operators import distinct_calls
from stepscope.predict.dimensions import UNKNOWN, Dimensions, dimensions
from stepscope.predict.further_work import further_work
from stepscope.predict.operations import Operations
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
