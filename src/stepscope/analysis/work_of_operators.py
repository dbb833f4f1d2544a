"""The arithmetic and memory traffic of every operator call in a trace, where shapes tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import polars as pl

from stepscope.analysis.work_formulas import work_of
from stepscope.analysis.work_inputs import Call, Shape, call_of
from stepscope.analysis.work_products import CONVOLUTIONS, SIZES_FROM_PARENT
from stepscope.trace import Trace

WORK_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "work_kind": pl.String,  # as in `stepscope.analysis.work_inputs.Work`
    "flops": pl.Int64,
    "bytes": pl.Int64,
    "number_type": pl.String,
}

_INPUTS: Final = ("name", "input_shapes", "input_types", "input_values")
_KEY: Final = (*_INPUTS, "parent_shapes", "parent_types")


def work_of_operators(trace: Trace) -> pl.DataFrame:
    """What each call needs: one row for each row of `operators`, in order; columns as in WORK_SCHEMA, null if unknown.

    An operator around others counts their work too. Where a convolution's stride and padding are not recorded, its
    output's size is that of the gradients that convolutions of the same shapes meet in their backward pass.
    """
    found = distinct_calls(trace)
    rows = [
        None if call is None else work_of(name, call, output)
        for name, call, output in zip(found.names, found.calls, found.outputs, strict=True)
    ]
    known = pl.DataFrame(
        [(None, None, None, None) if row is None else tuple(row) for row in rows], dict(WORK_SCHEMA), orient="row"
    )
    return found.spread(known)


@dataclass(frozen=True, slots=True)
class DistinctCalls:
    """The calls of a trace that differ in name or inputs, those without recorded shapes left out.

    Attributes:
        names: of the operators, such as "aten::mm".
        calls: their inputs; None where those are damaged.
        outputs: spatial size of a convolution's output where other calls tell it.
        texts: the names with the inputs as the trace has them, columns as in `inputs`.
        inputs: the same for each row of `operators`.
    """

    names: list[str]
    calls: list[Call | None]
    outputs: list[Shape | None]
    texts: pl.DataFrame
    inputs: pl.DataFrame

    def spread(self, known: pl.DataFrame) -> pl.DataFrame:
        """For each row of `operators` what is known of its distinct call, null for calls that are not among these."""
        table = pl.concat([self.texts, known], how="horizontal")
        joined = self.inputs.join(table, on=_KEY, how="left", nulls_equal=True, maintain_order="left")
        return joined.select(known.columns)


def distinct_calls(trace: Trace) -> DistinctCalls:
    """The calls of a trace's operators, those that are alike once; of gradients of convolutions with their sizes."""
    parents = trace.operators.select(parent_shapes="input_shapes", parent_types="input_types").with_row_index("parent")
    inputs = trace.operators.select(*_INPUTS, "parent")
    needs_parent = pl.col("name").is_in([f"aten::{name}" for name in SIZES_FROM_PARENT])
    inputs = inputs.with_columns(parent=pl.when(needs_parent).then("parent"))
    inputs = inputs.join(parents, on="parent", how="left", maintain_order="left").select(_KEY)
    unique = inputs.filter(pl.col("input_shapes").is_not_null()).unique(maintain_order=True)
    names = unique["name"].to_list()
    calls = [_call(row) for row in unique.iter_rows(named=True)]
    sizes = _outputs(names, calls)
    outputs = [None if call is None else sizes.get((call.shape(0), call.shape(1))) for call in calls]
    return DistinctCalls(names, calls, outputs, unique, inputs)


def _call(row: dict[str, str | None]) -> Call | None:
    """The call's inputs; of an operator whose sizes stand with its parent, the parent's."""
    if row["parent_shapes"] is not None:
        return call_of(row["parent_shapes"], row["parent_types"], None)
    return call_of(row["input_shapes"], row["input_types"], row["input_values"])


def _outputs(names: list[str], calls: list[Call | None]) -> dict[tuple[Shape | None, Shape | None], Shape]:
    """Spatial size of the output by shapes of input and weight, where every backward pass of such says the same."""
    found: dict[tuple[Shape | None, Shape | None], set[Shape]] = {}
    for name, call in zip(names, calls, strict=True):
        layout = CONVOLUTIONS.get(name.removeprefix("aten::"))
        if call is None or layout is None or layout.gradient is None:
            continue
        gradient = call.shape(layout.gradient)
        if gradient:
            key = call.shape(layout.input), call.shape(layout.weight)
            found.setdefault(key, set()).add(gradient[2:])
    return {key: shapes.pop() for key, shapes in found.items() if len(shapes) == 1}
