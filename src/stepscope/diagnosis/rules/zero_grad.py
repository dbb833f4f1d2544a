"""# What it finds
Gradients that are filled with zeros instead of being set to None.

# Why it costs time
Filling writes every gradient once. The backward pass then adds the new gradient to the zeros: it reads both and writes
the sum, where it could simply have kept the new one.

# How it is measured
Operators that fill tensors with zeros in place outside the backward pass, in `Optimizer.zero_grad` or in the program's
own code, and in the backward pass as many additions inside AccumulateGrad as tensors were filled. Their cost is the
thread's time; with a device, its time for them and its idle time before them. All of it is saved.

Recorded shapes show that the tensors filled are the ones added to; without shapes only the operators' names and counts
suggest it, and the confidence is medium.

# Known false positives
With gradient accumulation the additions of later passes remain, so only as many additions as tensors were filled are
counted. Code that reads a gradient of zeros breaks when the gradient is None.

# What to do
Call `optimizer.zero_grad()`, which sets gradients to None by default since PyTorch 2.0.

# Reference
PyTorch performance tuning guide; PyTorch's GradNotSetToNonePattern (removed in 2026).
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import polars as pl

from stepscope.diagnosis.rule import Answers, Found, Limits, Remedy, Rows, Rule, Threshold, View, rows_of
from stepscope.diagnosis.rules._operators import called_from_python, engine_pauses, length_ns, scaled_with_pauses
from stepscope.whatif.changes import scaled_operators, together

_FILLING: Final = r"^aten::(?:_foreach_)?zero_$"
_ACCUMULATING: Final = r"AccumulateGrad$"
_ADDING: Final = r"^aten::add_?$"
_SHAPE: Final = r"\[[\d, ]*\]"
_MATCHING: Final = 0.9
"""Share of shapes that filled tensors and additions must have in common to count as the same tensors."""


def check(view: View, limits: Limits) -> Answers:
    filling, adding = _rows(view)
    if not len(filling) or not len(adding):
        return
    between = engine_pauses(view, filling)
    own = view.cost_ns(filling) + length_ns(view, between)
    tensors = _tensors(view, filling, len(adding))
    filled = min(tensors, len(adding))
    additions = view.cost_ns(adding) * filled // len(adding)
    cost = own + additions
    if not limits.reached(cost):
        return
    yield Found(
        f"{tensors / view.step_count:,.0f} gradients are filled with zeros {view.each_step}, and the backward pass "
        "adds to them",
        cost,
        basis="the time to fill gradients, and to add to them in the backward pass",
        confidence="medium" if _are_the_same(view, filling, adding) else "low",
        figures=[
            view.count_per_step("gradients filled", tensors),
            view.ns_per_step("time to fill them", own),
            view.ns_per_step("time to add to them", additions),
        ],
        remedy=Remedy(
            "Drop the gradients: the backward pass then keeps what it computed instead of adding it to zeros.",
            "optimizer.zero_grad(set_to_none=True)   # the default; for a module: model.zero_grad()",
            apply=("zero-grad",),
        ),
        where=view.at_operators(filling),
        change=together(
            scaled_with_pauses(filling, [between], 0.0),
            scaled_operators(adding, 1 - filled / len(adding)),
        ),
    )


def _rows(view: View) -> tuple[Rows, Rows]:
    """The operators that fill tensors with zeros, and the additions inside AccumulateGrad."""
    names = view.trace.operators["name"]
    called = called_from_python(view)
    filling = called[names.gather(called).str.contains(_FILLING).to_numpy()]
    parents = view.operators["parent"]
    adding = view.operators.filter(
        names.gather(parents).str.contains(_ACCUMULATING).fill_null(False) & pl.col("name").str.contains(_ADDING)
    )
    return filling, rows_of(adding)


def _tensors(view: View, filling: Rows, added: int) -> int:
    """Number of tensors filled; an operator over a list of unknown length fills all that are added to."""
    lists = view.trace.operators["name"].gather(filling).str.contains("_foreach_")
    shapes = view.trace.operators["input_shapes"].gather(filling).fill_null("").filter(lists)
    inside = int(shapes.str.count_matches(r"\[\d").sum())
    return int((~lists).sum()) + (inside or added if lists.any() else 0)


def _are_the_same(view: View, filling: Rows, adding: Rows) -> bool:
    """Whether recorded shapes show that the filled tensors are the ones that the backward pass adds to."""
    operators = view.trace.operators
    lists = operators["name"].gather(filling).str.contains("_foreach_")
    filled = operators["input_shapes"].gather(filling).str.extract_all(_SHAPE)
    added = operators["input_shapes"].gather(adding).str.extract_all(_SHAPE).list.first()
    filled = pl.concat([filled.filter(~lists).list.first(), filled.filter(lists).explode()]).drop_nulls()
    both = Counter(filled.to_list()) & Counter(added.drop_nulls().to_list())
    return both.total() >= _MATCHING * min(_tensors(view, filling, len(adding)), len(adding))


RULE: Final = Rule(
    id="zero-grad",
    title="Gradients are filled with zeros instead of being dropped",
    thresholds={"share": Threshold(0.02, "share", "share of the {period} that filling and adding cost")},
    check=check,
    needs=("operators",),
)
