"""# What it finds
Dropout in a program that trains nothing.

# Why it costs time
A module in the mode of training, as its constructor leaves it, draws random numbers for each element that dropout may
drop, multiplies by them, and on some devices attention with dropout is no fused operator. The answers are worse, too:
parts of them are dropped at random.

# How it is measured
Dropout that draws random numbers, in a recording without a backward pass and without an optimizer's step. The time of
these operators is saved. Where attention falls back to single operators because of dropout, all of their time but that
of the matrix products and the softmax is counted, too.

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
import numpy.typing as npt
import polars as pl

from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View, rows_of
from stepscope.whatif.changes import scaled_operators

_AROUND: Final = r"^aten::(?:native_dropout|(?:alpha_|feature_)?dropout_?|_scaled_dot_product_attention_math)$"
_NEEDED: Final = ("aten::bmm", "aten::baddbmm", "aten::_softmax", "aten::_safe_softmax")
"""What attention computes in any case."""
_DRAWS: Final = ("aten::bernoulli_", "aten::native_dropout")


def check(view: View, limits: Limits) -> Answers:
    if view.trains:
        return
    names = view.trace.operators["name"]
    draws = rows_of(view.operators.filter(pl.col("name").is_in(_DRAWS)))
    around = names.str.contains(_AROUND).to_numpy()
    rows = np.unique([each for each in (_outermost_around(view, row, around) for row in draws.tolist()) if each >= 0])
    if not len(rows):
        return
    lengths = view.trace.operators["duration_ns"].to_numpy()
    needed = np.flatnonzero(view.inside(rows) & names.is_in(_NEEDED).to_numpy())
    left = float(lengths[view.outermost(needed)].sum() / max(lengths[rows].sum(), 1))
    cost = view.cost_ns(rows)
    if not limits.reached(cost * (1 - left)):
        return
    yield Found(
        f"dropout draws random numbers {len(draws) / view.step_count:,.3g} times {view.a_step}, and nothing is "
        f"trained: {view.percent(cost * (1 - left))} of the {view.period}",
        cost * (1 - left),
        basis="the operators of dropout, and of attention that falls back to single operators for it, without their "
        "products and softmax",
        confidence="medium",
        figures=[
            Figure(f"dropouts that draw {view.per}", len(draws) / view.step_count, "count"),
            view.share_figure("that evaluation saves", cost * (1 - left)),
            Figure("share of these operators that remains", left, "share"),
        ],
        where=view.at_operators(rows),
        remedy=Remedy(
            "Switch the model to evaluation once, before it answers.",
            "model = load_model().eval()       # a module is in the mode of training until eval() is called",
        ),
        change=scaled_operators(rows, left),
    )


def _outermost_around(view: View, row: int, around: npt.NDArray[np.bool_]) -> int:
    """The outermost dropout or attention around an operator, -1 for none."""
    found = -1
    while row >= 0:
        found = row if around[row] else found
        row = int(view.parents[row])
    return found


RULE: Final = Rule(
    id="training-mode",
    title="Dropout is drawn although nothing is trained",
    thresholds={"share": Threshold(0.01, "share", "share of the {period} that goes to dropout")},
    check=check,
    needs=("operators",),
)
