"""What each line of the user's code costs, forward and backward."""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.analysis.attribution import SourcePlace
from stepscope.analysis.place_costs import COST_COLUMNS, PlaceCosts, cost_sums, place_costs
from stepscope.trace import Trace, Window

LINE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "file": pl.String,  # null in the one row of what has no place in the user's code
    "line": pl.Int32,
    "function": pl.String,
    "exact_line": pl.Boolean,  # `line` is the statement's; otherwise it stands for the whole function defined there
    **COST_COLUMNS,
    "share": pl.Float64,  # of the whole time, 0 to 1
}


def line_table(trace: Trace, *, costs: PlaceCosts | None = None, window: Window | None = None) -> pl.DataFrame:
    """The lines of the user's code that anything was attributed to, the costliest first.

    Args:
        costs: as `place_costs` gives them, if they were computed already.
        window: another stretch than the complete steps.

    Returns:
        Columns as in LINE_SCHEMA, sums over the steps. The times of all rows add up to all device time, or, where the
        trace has no device, to the operators' own time. `calls` are the operators that the line called itself.
    """
    costs = place_costs(trace, window=window) if costs is None else costs
    sums = cost_sums(costs, "place")
    places = pl.DataFrame(
        [(number, *place) for number, place in enumerate(costs.attribution.places)],
        schema={"place": pl.Int64, **{name: LINE_SCHEMA[name] for name in SourcePlace._fields}},
        orient="row",
    )
    total = max(costs.total_ns, 1)
    table = sums.join(places, on="place", how="left").with_columns(share=pl.col("total_ns") / total)
    if not (table["place"] >= 0).any() and not costs.total_ns:
        return pl.DataFrame(schema=dict(LINE_SCHEMA))
    columns = [pl.col(name).cast(dtype) for name, dtype in LINE_SCHEMA.items()]
    order = ["total_ns", "idle_ns", "host_ns", "file", "line", "function"]
    return table.select(columns).sort(order, descending=[True, True, True, False, False, False], nulls_last=True)
