"""# What it finds
Attention that is written out as a matrix product, a softmax and another matrix product.

# Why it costs time
The first product creates the scores: a matrix with one number for every pair of positions in every head. Written out,
each operator reads and writes the whole matrix, and the backward pass keeps several copies. A fused operator computes
the scores block by block, never stores them, and skips what a causal mask hides.

# How it is measured
Operators in order of time: a softmax over (queries, keys), the matrix product before it that creates a matrix of that
shape, the matrix product after it that reads one, and everything between them that works on the scores, with all their
backward operators. The remaining time of a fused operator is subtracted. It still needs two products and a softmax in
the forward pass, five products and two softmaxes in the backward pass, of these only the blocks that a causal mask
leaves. The product of weights and values, which writes no scores, shows how long one product takes.

# Known false positives
The weights themselves are needed, for a plot or another loss. Few fused operators support a learned bias. On a CPU,
PyTorch does not fuse attention with dropout, and nothing is reported, although `stepscope.remedies.attention` computes
it without storing the scores.

# What to do
Use `torch.nn.functional.scaled_dot_product_attention`; `need_weights=False` for `nn.MultiheadAttention`;
`attn_implementation="sdpa"` for Transformers. Or `stepscope.remedies.attention`, which skips padding, stores no scores
where PyTorch's would (dropout on a CPU, a learned mask), and calls the vendor's kernel on an HPU.

# Reference
Dao et al., "FlashAttention" (2022); PyTorch's documentation of scaled_dot_product_attention. The number of products was
checked against PyTorch 2.13 on a CPU for lengths of 64 to 2,048.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from stepscope.analysis.patterns import WrittenOutAttention
from stepscope.diagnosis.finding import Interval, NotAnswered
from stepscope.diagnosis.lines.costs import settings_at
from stepscope.diagnosis.parts import PARTS
from stepscope.diagnosis.rule import Answers, Figure, Found, InServing, Limits, Remedy, Rule, Threshold, View, rows_of
from stepscope.diagnosis.rules._operators import attention_by_hand
from stepscope.whatif.changes import scaled_operators

_OPTION: Final = "attn_implementation="
"""The option of Transformers that chooses attention."""
_FORWARD_PRODUCTS: Final = 2
_BACKWARD_PRODUCTS: Final = 5
"""Matrix products of one score block in a fused backward pass, which computes the scores again."""
_BACKWARD_SOFTMAXES: Final = 2
_SOFTMAX_AT_MOST: Final = 0.5
"""Upper limit for the softmax of a cached block, as a share of a product's time."""
_BLOCK: Final = 512
"""Keys in a block; blocks that a causal mask hides are skipped."""


def check(view: View, limits: Limits) -> Answers:
    found = attention_by_hand(view)
    if view.device is None:
        found = [each for each in found if not (each.dropout or each.is_fallback)]
    if not found:
        yield from _question(view, limits)
        return
    forward = np.unique(np.concatenate([each.operators for each in found]))
    backward = view.backward_of(forward)
    written_out = np.concatenate([forward, backward])
    cost = view.cost_ns(written_out)
    remaining = sum(_remaining_ns(view, each, with_backward=bool(len(backward))) for each in found)
    saved = cost - remaining
    if not limits.reached(saved):
        return
    yield Found(
        f"attention keeps its {found[0].scores[-2]:,} by {found[0].scores[-1]:,} scores in memory instead of fusing "
        f"what works on them: {view.percent(cost)} of the {view.period}",
        saved,
        basis="the cost of the written-out operators, less the products and softmax that a fused operator still needs",
        confidence="medium",
        figures=_figures(view, found, len(backward), cost),
        intervals=(_example(view, found),),
        remedy=_remedy(found),
        where=(*settings_at(view, _OPTION), *view.at_operators(forward)),
        change=scaled_operators(written_out, remaining / cost),
    )


def _remaining_ns(view: View, attention: WrittenOutAttention, *, with_backward: bool) -> int:
    column = view.trace.operators["duration_ns"] if view.device is None else view.operator_costs["device_total_ns"]
    product = int(column[attention.second_product])
    softmax = min(int(column[attention.softmax]), product * _SOFTMAX_AT_MOST)  # the excess is page faults
    products = _FORWARD_PRODUCTS + (_BACKWARD_PRODUCTS if with_backward else 0)
    softmaxes = 1 + (_BACKWARD_SOFTMAXES if with_backward else 0)
    blocks = -(-attention.scores[-1] // _BLOCK)
    part = (blocks + 1) / (2 * blocks) if attention.causal else 1.0
    return int((product * products + softmax * softmaxes) * part)


def _figures(view: View, found: list[WrittenOutAttention], backward: int, cost: int) -> list[Figure]:
    largest = max(each.score_bytes for each in found)
    rows, columns = found[0].scores[-2:]
    figures = [
        Figure("queries of one matrix of scores", rows, "count"),
        Figure("keys of one matrix of scores", columns, "count"),
        view.share_figure("in written-out attention", cost),
        view.count_per_step("written-out attentions", len(found)),
    ]
    if largest:
        figures.append(Figure("bytes of one matrix of scores", largest, "bytes"))
        if backward:
            held = sum(each.score_bytes for each in found) // view.step_count
            figures.append(Figure("bytes of weights kept for the backward pass, at least", held, "bytes"))
    return figures


def _example(view: View, found: list[WrittenOutAttention]) -> Interval:
    operators = view.trace.operators
    first, last = int(found[0].operators[0]), int(found[0].operators[-1])
    begin = int(operators["start_ns"][first])
    return Interval(begin, int(operators["start_ns"][last] + operators["duration_ns"][last]) - begin, "attention")


def _remedy(found: list[WrittenOutAttention]) -> Remedy:
    if all(each.is_fallback for each in found):
        return Remedy(
            "scaled_dot_product_attention falls back to single operators here: ask for a fused kernel, and PyTorch "
            "says what prevents it.",
            "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
            "with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):\n"
            "    loss = model(batch)   # 16-bit inputs, no mask or a boolean one, equal head sizes\n"
            "# or, in blocks where PyTorch has no fused kernel: from stepscope.remedies import attention",
        )
    mask = ", is_causal=True" if all(each.causal for each in found) else ""
    mask = mask or (", attn_mask=mask" if any(each.masked for each in found) else "")
    dropout = ", dropout_p=p" if any(each.dropout for each in found) else ""
    first = "p = dropout if self.training else 0.0\n" if dropout else ""
    given = "(query, key, value" + mask + dropout + ")\n"
    return Remedy(
        "Let one fused operator compute it; query, key and value are (batch, heads, length, size of a head).",
        first
        + "attended = torch.nn.functional.scaled_dot_product_attention"
        + given
        + "# or, which can skip padding and holds no scores on any device: from stepscope.remedies import attention\n"
        "# attended = attention"
        + given
        + '# nn.MultiheadAttention: need_weights=False;  Transformers: attn_implementation="sdpa"',
    )


def _question(view: View, limits: Limits) -> Iterator[NotAnswered]:
    """The question of what a long softmax belongs to, if shapes are missing."""
    softmax = view.operators.filter(view.operators["name"].is_in(["aten::softmax", "aten::_softmax"]))
    if softmax.is_empty() or softmax["input_shapes"].null_count() < softmax.height:
        return
    cost = view.cost_ns(rows_of(softmax))
    if view.share(cost) < limits["share"]:
        return
    yield NotAnswered(
        "Is attention written out, where a fused operator could compute it?",
        "the trace has no input shapes, which would show the matrix products around a softmax",
        PARTS["shapes"].how_for(view.trace.metadata.format),
    )


RULE: Final = Rule(
    id="unfused-attention",
    title="Attention is written out instead of fused",
    thresholds={"share": Threshold(0.02, "share", "share of the {period} that fused attention would save")},
    check=check,
    needs=("operators", "shapes"),
    replaces=("fusible-chain",),
    remedies={
        "hpu": Remedy(
            "Use Gaudi's fused attention.",
            "from habana_frameworks.torch.hpex.kernels import FusedSDPA\n"
            "out = FusedSDPA.apply(query, key, value, None, 0.0, True)       # mask, dropout, causal",
        ),
    },
    serving=InServing(
        "Choose an attention backend that computes scores and values in one kernel.",
        "attention",
        "attended = torch.nn.functional.scaled_dot_product_attention(query, key, value)",
    ),
)
