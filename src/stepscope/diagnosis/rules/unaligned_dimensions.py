"""# What it finds
Matrix products of 16-bit numbers with a dimension that is not a multiple of 8, such as a vocabulary of 50,257.

# Why it costs time
Tensor cores read rows in pieces of 16 bytes. Rows that do not begin on such a boundary need slower kernels, which read
one number at a time, or a copy.

# How it is measured
Matrix products by their input shapes: the device's time for those with such a dimension. Padded to the next multiple of
8, a product is assumed to run at the rate per multiplication of the trace's aligned 16-bit products, but at most twice
as fast as now; without such products 25 % of its time is counted as saved.

# Known false positives
Very small products, which no kernel runs well. Newer libraries pad automatically. Products of attention that is written
out are left to unfused-attention; those that reach 80 % of what the device can do are left out.

# What to do
Round layer sizes and vocabulary up to multiples of 8, or better 64: `stepscope.remedies.pad_vocabulary` does so for
existing layers and leaves their outputs unchanged.

# Reference
NVIDIA, "Matrix Multiplication Background User's Guide"; PyTorch's MatMulDimInFP16Pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.work import Shape, elements, shapes_of, types_of
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.diagnosis.rules._device import near_their_limit
from stepscope.diagnosis.rules._operators import attention_by_hand
from stepscope.whatif.changes import scaled_work_of

_PRODUCTS: Final = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_NARROW: Final = ("c10::Half", "c10::BFloat16")
_AT_MOST: Final = 0.5
_WITHOUT_PEERS: Final = 0.25


@dataclass(frozen=True, slots=True)
class _Product:
    row: int
    sizes: tuple[int, int, int]
    multiplications: int
    device_ns: int


def check(view: View, limits: Limits) -> Answers:
    if view.device is None:
        return
    multiple = max(int(limits["multiple"]), 1)
    attention = [each.operators for each in attention_by_hand(view)]
    of_attention = (
        view.inside(np.concatenate(attention)) if attention else np.zeros(view.trace.operators.height, np.bool_)
    )
    near = near_their_limit(view)
    products = [product for product in _products(view) if not of_attention[product.row] and product.row not in near]
    awkward = [product for product in products if any(size % multiple for size in product.sizes)]
    if not awkward:
        return
    rates = [product.multiplications / product.device_ns for product in products if product not in set(awkward)]
    rate = float(np.median(rates)) if rates else None
    parts = np.array([_saved(product, rate) for product in awkward])
    saved = float(parts.sum())
    device_ns = np.array([product.device_ns for product in awkward], np.int64)
    cost = int(device_ns.sum())
    worst = max(awkward, key=lambda product: product.device_ns)
    odd = next(size for size in sorted(worst.sizes, reverse=True) if size % multiple)
    rows = np.array([product.row for product in awkward], np.int64)
    yield Found(
        f"{odd:,}, not a multiple of {multiple}, slows down matrix products: {view.percent(cost)} of the {view.period}",
        saved,
        basis="up to half of these products' time, by how fast the trace's products with fitting dimensions run"
        if rate
        else f"{_WITHOUT_PEERS:.0%} of these products' time, an assumption: there are no others to compare with",
        confidence="medium" if rate else "low",
        figures=[
            view.share_figure("in such products", cost),
            view.count_per_step("such products", len(awkward)),
            Figure("dimension", odd, "count", multiple),
            Figure("dimension rounded up to a multiple of 64", -(-odd // 64) * 64, "count"),
        ],
        remedy=Remedy(
            f"Round {odd:,} up to {-(-odd // 64) * 64:,}; the added numbers are never looked up, or are masked.",
            "from stepscope.remedies import pad_vocabulary, padded_size\n"
            f"layer = torch.nn.Linear(width, padded_size({odd}))   # {-(-odd // 64) * 64}\n"
            "pad_vocabulary(model.embedding, model.head)   # or existing layers; outputs stay the same",
        ),
        where=view.at_operators(rows, device_ns),
        change=scaled_work_of(rows, 1 - parts / device_ns),
    )


def _products(view: View) -> list[_Product]:
    """The span's products of 16-bit matrices that took device time."""
    device = view.operator_costs["device_total_ns"].to_numpy()
    calls = view.operators.filter(pl.col("name").is_in(_PRODUCTS)).select("row", "input_shapes", "input_types")
    found = []
    for row, shapes, types in calls.iter_rows():
        matrices = [(shape, kind) for shape, kind in zip(shapes_of(shapes), types_of(types), strict=False)
                    if len(shape) >= 2]  # fmt: skip
        if len(matrices) < 2 or device[row] <= 0 or matrices[-1][1] not in _NARROW:
            continue
        sizes = _sizes(matrices[-2][0], matrices[-1][0])
        if sizes:
            count = elements(matrices[-2][0]) * sizes[1]
            found.append(_Product(row, sizes, count, int(device[row])))
    return found


def _sizes(left: Shape, right: Shape) -> tuple[int, int, int] | None:
    """A product's numbers of rows and columns, and the length of its sums."""
    return (left[-2], right[-1], left[-1]) if left[-1] == right[-2] else None


def _saved(product: _Product, rate: float | None) -> float:
    if rate is None:
        return product.device_ns * _WITHOUT_PEERS
    return float(np.clip(product.device_ns - product.multiplications / rate, 0.0, product.device_ns * _AT_MOST))


RULE: Final = Rule(
    id="unaligned-dimensions",
    title="Matrix dimensions do not fit the tensor cores",
    thresholds={
        "multiple": Threshold(8, "count", "number that dimensions should be multiples of"),
        "share": Threshold(0.02, "share", "share of the {period} that padding the dimensions would save"),
    },
    check=check,
    needs=("operators", "shapes", "types"),
)
