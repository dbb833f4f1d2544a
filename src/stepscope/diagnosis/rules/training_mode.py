"""# What it finds
Dropout in a program that trains nothing.

# Why it costs time
A module in the mode of training, as its constructor leaves it, draws random numbers for each element that dropout may
drop, multiplies by them, and on some devices attention with dropout is no fused operator. The answers are worse, too:
parts of them are dropped at random.

# How it is measured
Dropout that draws random numbers, in a recording without a backward pass and without an optimizer's step. The time of
these operators is saved. Where attention falls back to single operators because of dropout, half of their time other
than the matrix products' is counted as saved, too.

# Known false positives
Dropout on purpose, as for uncertainty (Monte Carlo dropout).

# What to do
Call `model.eval()` once, after the model is made or loaded.

# Reference
PyTorch documentation, "Autograd mechanics", on evaluation mode.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.rule import Answers, Found, Limits, Remedy, Rule, Threshold, View, rows_of
from stepscope.whatif.changes import scaled_operators

_DROPOUT: Final = r"^aten::(?:native_dropout|(?:alpha_|feature_)?dropout_?)$"
_DRAWS: Final = ("aten::bernoulli_", "aten::native_dropout")


def check(view: View, limits: Limits) -> Answers:
    if view.trains:
        return
    operators = view.trace.operators
    draws = rows_of(view.operators.filter(pl.col("name").is_in(_DRAWS)))
    dropouts = rows_of(view.operators.filter(pl.col("name").str.contains(_DROPOUT)))
    holding = np.unique(view.parents[draws[view.inside(dropouts)[draws]]])
    rows = view.outermost(
        np.unique(np.concatenate([holding[np.isin(holding, dropouts)], draws[np.isin(draws, dropouts)]]))
    )
    cost = view.cost_ns(rows)
    if not limits.reached(cost):
        return
    of_steps = operators["start_ns"].to_numpy()[rows]
    yield Found(
        f"dropout is drawn {len(rows) / view.step_count:,.0f} times {view.a_step}, and nothing is trained: "
        f"{view.percent(cost)} of the {view.period}",
        cost,
        basis="the operators of dropout that draw random numbers",
        confidence="medium",
        figures=[
            view.count_per_step("dropouts that draw", len(rows)),
            view.share_figure("in them", cost),
            view.count_per_step("steps with them", view.steps_with(of_steps)),
        ],
        where=view.at_operators(rows),
        remedy=Remedy(
            "Switch the model to evaluation once, before it answers.",
            "model = load_model().eval()       # a module is in the mode of training until eval() is called",
        ),
        change=scaled_operators(rows, 0.0),
    )


RULE: Final = Rule(
    id="training-mode",
    title="Dropout is drawn although nothing is trained",
    thresholds={"share": Threshold(0.01, "share", "share of the {period} that goes to dropout")},
    check=check,
    needs=("operators",),
)
