"""Speed-up curves: how much shorter a step would be if one thing took less time, as causal profilers ask."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import polars as pl

from stepscope.analysis.kernels import kernel_table
from stepscope.analysis.lines import line_table
from stepscope.analysis.modules import module_table
from stepscope.analysis.operators import operator_table
from stepscope.analysis.place_costs import place_costs
from stepscope.whatif.changes import scaled
from stepscope.whatif.experiment import Experiment

CURVE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "name": pl.String,  # operator, kernel or module, or FILE:LINE
    "factor": pl.Float64,  # by which its time is multiplied; 0.5 is twice as fast, 0 is gone
    "step_ns": pl.Float64,
    "saving_share": pl.Float64,  # of the measured step, 0 to 1
}
CurveKind: TypeAlias = Literal["operators", "kernels", "modules", "lines"]
FACTORS: Final = (0.75, 0.5, 0.25, 0.0)


def speed_up_curve(
    experiment: Experiment, kind: CurveKind, *, top: int = 10, factors: Sequence[float] = FACTORS
) -> pl.DataFrame:
    """The step's length if each of the costliest operators, kernels, modules or lines took so many times as long.

    Args:
        top: how many of the costliest are tried.

    Returns:
        Columns as in CURVE_SCHEMA, the largest saving at the smallest factor first.
    """
    rows = []
    for name in _costliest(experiment, kind, top):
        for factor in factors:
            outcome = experiment.run(scaled(glob.escape(name), factor)(experiment, experiment.graph))
            rows.append((name, factor, outcome.step_ns, outcome.saving_share))
    table = pl.DataFrame(rows, schema=dict(CURVE_SCHEMA), orient="row")
    largest = pl.col("saving_share").max().over("name")
    return table.sort([largest, "name", "factor"], descending=[True, False, True])


def _costliest(experiment: Experiment, kind: CurveKind, top: int) -> list[str]:
    trace = experiment.trace
    if kind == "operators":
        return operator_table(trace)["name"].unique(maintain_order=True).head(top).to_list()
    if kind == "kernels":
        return kernel_table(trace)["name"].unique(maintain_order=True).head(top).to_list()
    costs = place_costs(trace, attribution=experiment.attribution)
    if kind == "modules":
        return module_table(trace, costs=costs)["module"].drop_nulls().head(top).to_list()
    lines = line_table(trace, costs=costs).drop_nulls(["file", "line"]).head(top)
    return [f"{file}:{line}" for file, line in lines.select("file", "line").iter_rows()]
