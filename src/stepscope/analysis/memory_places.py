"""Which operator, line and module each block of memory was allocated by."""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.attribution import attribute, parse, user_entries
from stepscope.analysis.host import HostActivity
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows, inherit

PLACE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "file": pl.String,
    "line": pl.Int32,  # of the statement, or of the function's definition where the trace knows no more
    "function": pl.String,
    "module": pl.String,
    "exact_line": pl.Boolean,
}

_PRIMITIVES: Final = (
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::resize_",
)
"""Operators that only hand out memory for the one around them."""


def allocating_operators(trace: Trace, operator: Rows) -> Rows:
    """For each of these rows of `operators`, the nearest around it or itself that does more than ask for memory.

    What has no operator, -1, stays -1.
    """
    parent = trace.operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    if not len(parent):
        return operator
    primitive = trace.operators["name"].is_in(_PRIMITIVES).fill_null(False).to_numpy()
    own = np.where(primitive & (parent >= 0), -1, np.arange(len(parent)))
    return np.where(operator >= 0, inherit(own, parent)[np.maximum(operator, 0)], -1)


def block_places(trace: Trace, blocks: pl.DataFrame, operator: Rows, activity: HostActivity | None) -> pl.DataFrame:
    """Where in the user's code each block was asked for; columns as in PLACE_SCHEMA, null where unknown.

    Args:
        blocks: as `stepscope.analysis.memory_events.blocks` gives them.
        operator: row in operators of each, -1 for none.
        activity: as `host_activity` gives it, if it was computed already.
    """
    places = attribute(trace, activity).operators()
    found = gathered(places.select(list(PLACE_SCHEMA)), operator)
    stacks = trace.memory["call_stack"]
    if stacks.null_count() == len(stacks) or blocks.is_empty():
        return found
    own = stacks.gather(blocks["row"])
    known = own.unique().drop_nulls().to_list()
    rows = [(stack, *user_place(stack), None, True) for stack in known]
    table = pl.DataFrame(rows, schema={"stack": pl.String, **PLACE_SCHEMA}, orient="row")
    by_stack = pl.DataFrame({"stack": own}).join(table, on="stack", how="left", maintain_order="left")
    return pl.DataFrame([by_stack[name].fill_null(found[name]) for name in PLACE_SCHEMA])


def gathered(table: pl.DataFrame, rows: Rows) -> pl.DataFrame:
    """These rows of a table, null for -1."""
    index = pl.Series(rows, dtype=pl.Int64)
    known = pl.select(pl.when(index >= 0).then(index)).to_series()
    return pl.DataFrame([table[name].gather(known) for name in table.columns])


def user_place(call_stack: str) -> tuple[str | None, int | None, str | None]:
    """File, line and function of the user's innermost entry of a call stack; None where there is none."""
    entries = user_entries(call_stack)
    place = parse(entries[0]) if entries else None
    return place if place is not None else (None, None, None)
