"""# What it finds
Tensors that are converted from one number type to another and back.

# Why it costs time
A conversion computes nothing: it reads a whole tensor and writes another. Its gradient is converted as well, and values
that went through a narrower type have lost precision for good.

# How it is measured
Copies between floating-point types in the forward pass, each paired with the next copy of a tensor of that shape in the
other direction, and the conversions of their gradients. Their whole cost is counted as saved: a single type throughout
needs no conversions. low-precision reports conversions to float64 and back around computation in float64; fusible-chain
reports those inside a normalisation or another chain that one function replaces.

# Known false positives
A layer that needs a wider type than the rest of the model, such as a sum over very many numbers. Under autocast the
framework converts; a model that holds its weights in the narrow type then needs fewer conversions.

# What to do
Keep activations in one type from layer to layer, and convert inputs once, when the batch is made.

# Reference
PyTorch, "Automatic mixed precision package"; TraceLens lists conversions as candidates for fusion.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np

from stepscope.analysis.conversions import Cast, casts, there_and_back, wide_operators
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rows, Rule, Threshold, View, rows_of
from stepscope.diagnosis.rules.fusible_chain import rows_of_named_functions
from stepscope.whatif.changes import scaled_operators

_BITS: Final = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


def check(view: View, limits: Limits) -> Answers:
    rows = rows_of(view.operators)
    found = casts(view.trace, rows)
    paired = there_and_back(found)
    if any("float64" in (cast.source, cast.target) for cast in paired):
        wide = view.cost_ns(wide_operators(view.trace, rows, found))
        if wide > view.cost_ns(_rows(paired)):
            paired = [cast for cast in paired if "float64" not in (cast.source, cast.target)]
    paired = _without_named_functions(view, paired) if paired else []
    pairs = len(paired) / 2 / view.step_count
    if not paired or pairs < limits["pairs"]:
        return
    forward = _rows(paired)
    backward = view.backward_of(forward)
    conversions = np.concatenate([forward, backward])
    cost = view.cost_ns(conversions)
    ((there, back), _) = Counter((cast.source, cast.target) for cast in paired).most_common(1)[0]
    kept = min(there, back, key=lambda kind: _BITS[kind])
    yield Found(
        f"tensors are converted from {there} to {back} and back {pairs:,.0f} times {view.a_step}: "
        f"{view.percent(cost)} of its time",
        cost,
        basis="the cost of the conversions there and back" + (" and of their gradients'" if len(backward) else ""),
        confidence="medium",
        figures=[
            Figure(f"conversions to and fro {view.per}", pairs, "count", limits["pairs"]),
            view.count_per_step("conversions of all kinds", len(found)),
        ],
        intervals=view.longest(view.trace.operators[forward], "conversion", 1),
        remedy=Remedy(
            f"Stay in one type: take out the conversions, and convert the batch once where it is made if {kept} is "
            "wanted throughout.",
            f"batch = batch.to(torch.{kept})        # once, in the data loader\n"
            f"model = model.to(torch.{kept})        # and no .to(), .float(), .half() between layers",
        ),
        where=view.at_operators(forward),
        change=scaled_operators(conversions, 0.0),
    )


def _without_named_functions(view: View, paired: list[Cast]) -> list[Cast]:
    """Leave out pairs with a cast in a chain that a named function replaces, which fusible-chain reports."""
    named = set(rows_of_named_functions(view).tolist())
    waiting: dict[tuple[object, ...], list[Cast]] = {}
    kept: list[Cast] = []
    for cast in paired:
        first = waiting.get((cast.lane, cast.shape, cast.target, cast.source))
        if not first:
            waiting.setdefault((cast.lane, cast.shape, cast.source, cast.target), []).append(cast)
            continue
        pair = [first.pop(0), cast]
        if not any(each.row in named for each in pair):
            kept += pair
    return kept


def _rows(found: list[Cast]) -> Rows:
    return np.array([cast.row for cast in found], np.int64)


RULE: Final = Rule(
    id="repeated-casts",
    title="Tensors are converted to another number type and back",
    thresholds={
        "share": Threshold(0.02, "share", "share of the {period} in conversions to and fro"),
        "pairs": Threshold(2, "count", "conversions to and fro in a step"),
    },
    check=check,
    needs=("operators", "shapes", "types"),
    replaces=("fusible-chain",),
)
