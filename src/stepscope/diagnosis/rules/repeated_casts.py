"""# What it finds
Tensors that are converted from one number type to another and back, and weights that are converted for each token that
is generated.

# Why it costs time
A conversion computes nothing: it reads a whole tensor and writes another. Its gradient is converted as well, and values
that went through a narrower type have lost precision for good.

# How it is measured
Copies between floating-point types in the forward pass, each paired with the next copy of a tensor of that shape in the
other direction, and the conversions of their gradients. Their whole cost is counted as saved: a single type throughout
needs no conversions. low-precision reports conversions to float64 and back around computation in float64; fusible-chain
reports those inside a normalisation or another chain that one function replaces.

For weights: conversions and dequantisations in decoding iterations, of large tensors that occur in each of them and
whose first dimension is not that of the batch. Their whole cost is counted as saved.

# Known false positives
A layer that needs a wider type than the rest of the model, such as a sum over very many numbers. Under autocast the
framework converts; a model that holds its weights in the narrow type then needs fewer conversions.

# What to do
Keep activations in one type from layer to layer, and convert inputs once, when the batch is made. Convert weights once,
or let a kernel that multiplies quantised weights do so inside the product.

# Reference
PyTorch, "Automatic mixed precision package"; TraceLens lists conversions as candidates for fusion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.conversions import Cast, casts, there_and_back, wide_operators
from stepscope.analysis.work import tensor_shapes_of
from stepscope.diagnosis.rule import (
    Answers,
    Figure,
    Found,
    InServing,
    Limits,
    Remedy,
    Rows,
    Rule,
    Threshold,
    View,
    rows_of,
)
from stepscope.diagnosis.rules.fusible_chain import rows_of_named_functions
from stepscope.whatif.changes import scaled_operators

_BITS: Final = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


_CONVERTS: Final = r"(?i)^aten::_to_copy$|dequanti[sz]e"
_LARGE: Final = 1 << 18
"""Fewest elements of a tensor that can be a weight worth mentioning."""
_CONVERTED: Final = InServing(
    "Convert the weights once, or multiply them with a kernel that reads them as they are stored.",
    "weights",
    "model = model.to(torch.bfloat16)        # once, before the loop\n"
    "from torchao.quantization import Int4WeightOnlyConfig, quantize_\n"
    "quantize_(model, Int4WeightOnlyConfig())      # weights of 4 bits, which products convert as they read them",
)


def check(view: View, limits: Limits) -> Answers:
    yield from _to_and_fro(view, limits)
    if view.serves:
        yield from _of_weights(view)


def _to_and_fro(view: View, limits: Limits) -> Answers:
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


def _of_weights(view: View) -> Iterator[Found]:
    decodes = view.begin_in_span(view.iterations.filter(pl.col("phase") == "decode", pl.col("requests").is_not_null()))
    spans = decodes.with_row_index("iteration").sort("start_ns")
    spans = spans.select("lane", "iteration", "requests", "tokens", begin="start_ns", until=_end())
    found = view.operators.filter(pl.col("name").str.contains(_CONVERTS), pl.col("input_shapes").is_not_null())
    found = found.sort("start_ns").join_asof(
        spans, left_on="start_ns", right_on="begin", by="lane", check_sortedness=False
    )
    found = found.filter(pl.col("start_ns") < pl.col("until"))
    shapes = [max(tensor_shapes_of(each), key=prod, default=()) for each in found["input_shapes"]]
    found = found.with_columns(
        first=pl.Series([each[0] if each else 0 for each in shapes], dtype=pl.Int64),
        elements=pl.Series([min(prod(each), 1 << 60) if each else 0 for each in shapes], dtype=pl.Int64),
    )
    found = found.filter((pl.col("first") != pl.col("requests")) & pl.col("first").ne_missing(pl.col("tokens")))
    found = found.filter(pl.col("elements") >= _LARGE)
    found = found.filter(pl.col("iteration").n_unique().over("input_shapes") == decodes.height)
    rows = view.outermost(rows_of(found))
    if decodes.height < 2 or not len(rows):
        return
    found = found.filter(pl.col("row").is_in(pl.Series(rows).implode()))
    cost = view.cost_ns(rows)
    yield Found(
        f"{view.percent(cost)} of the {view.period} converts weights for each token: "
        f"{found.height / decodes.height:,.0f} times in each decoding iteration",
        cost,
        basis="the cost of conversions of large tensors that occur in every decoding iteration",
        confidence="medium",
        figures=[
            Figure("conversions in a decoding iteration", found.height / decodes.height, "count"),
            Figure("decoding iterations", decodes.height, "count"),
            Figure("elements converted in each", int(found["elements"].sum()) // decodes.height, "count"),
        ],
        intervals=view.longest(view.trace.operators[rows], "conversion", 1),
        remedy=_CONVERTED.remedy(view),
        where=view.at_operators(rows),
        change=scaled_operators(rows, 0.0),
        for_every_framework=True,
    )


def _end() -> pl.Expr:
    return pl.col("start_ns") + pl.col("duration_ns")


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
