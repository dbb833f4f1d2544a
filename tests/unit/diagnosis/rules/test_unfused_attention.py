"""unfused-attention: attention is written out instead of fused."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.unfused_attention import RULE as rule
from stepscope.trace import Trace
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.shaped import Shaped

SCORES = (4, 64, 64)
HEADS = (4, 64, 32)
KEYS = (4, 32, 64)
DRAWN = "aten::bernoulli_"
"""What dropout does inside aten::dropout while it is trained."""


def attending(*between: str, backward: bool = True, scores: tuple[int, ...] = SCORES, around: str = "") -> Trace:
    """Products of 1,000 ns around a softmax of 3,000 ns in a step of 100,000 ns."""
    step = Shaped()
    if around:
        with step.inside(around, 20_000, HEADS, number=1):
            _attention(step, between, scores)
    else:
        _attention(step, between, scores)
    if backward:
        step.gradient("BmmBackward0", 4_000, 13)
        step.gradient("SoftmaxBackward0", 5_000, 12)
        step.gradient("BmmBackward0", 4_000, 11)
    return step.trace()


def _attention(step: Shaped, between: tuple[str, ...], scores: tuple[int, ...]) -> None:
    with step.inside("aten::matmul", 2_000, HEADS, KEYS, number=10):
        step.call("aten::bmm", 1_000, HEADS, KEYS, number=11)
    for name in between:
        mask = (1, *scores[1:]) if "mask" in name else scores
        if name == DRAWN:
            with step.inside("aten::dropout", 1_500, scores):
                step.call(name, 1_000, scores)
        else:
            step.call(name, 1_500, scores, mask, types=["float", "bool"])
    step.call("aten::softmax", 3_000, scores, number=12)
    step.call("aten::bmm", 1_000, (4, 64, 64), HEADS, number=13)


def without_shapes() -> Trace:
    step = Shaped()
    step.recording.operator(10, 9_000, "aten::softmax")
    return step.trace()


FIRES: Cases = {
    "training": attending,
    "inference": lambda: attending(backward=False),
    "dropout that does nothing, as in evaluation": lambda: attending("aten::dropout", backward=False),
    "with a mask": lambda: attending("aten::mul", "aten::masked_fill"),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "another softmax": lambda: attending(scores=(4, 64, 48)),
    "a gate over few experts": lambda: attending(scores=(4, 64, 8)),
    "dropout, which is not fused on a CPU": lambda: attending(DRAWN),
    "the fused operator's own fallback": lambda: attending(around="aten::_scaled_dot_product_attention_math"),
    "inside another operator": lambda: attending(around="aten::_native_multi_head_attention"),
    "without shapes": without_shapes,
}


def test_what_a_fused_operator_needs_is_taken_off() -> None:
    finding = the_finding(rule, attending())

    # Both products, the softmax and their gradients, less seven products of 1,000 ns and three times half of one.
    assert finding.saving_ns_per_step == (2_000 + 3_000 + 1_000) + (4_000 + 5_000 + 4_000) - 7 * 1_000 - 3 * 500
    assert finding.title == (
        "attention keeps its 64 by 64 scores in memory instead of fusing what works on them: 19% of the step"
    )
    assert figures_of(finding) == [
        ("share of the step that fused attention would save", 0.105, "share", 0.02),
        ("queries of one matrix of scores", 64, "count", None),
        ("keys of one matrix of scores", 64, "count", None),
        ("share of the step in written-out attention", 0.19, "share", None),
        ("written-out attentions per step", 1.0, "count", None),
        ("bytes of one matrix of scores", 4 * 64 * 64 * 4, "bytes", None),
        ("bytes of weights kept for the backward pass, at least", 4 * 64 * 64 * 4, "bytes", None),
    ]
    assert places_of(finding) == [("train.py", 20, "step")]
    assert finding.remedy.code.startswith(
        "attended = torch.nn.functional.scaled_dot_product_attention(query, key, value)\n"
    )


def test_a_forward_pass_needs_two_products() -> None:
    assert the_finding(rule, attending(backward=False)).saving_ns_per_step == 2_000 + 3_000 + 1_000 - 2 * 1_000 - 500


@pytest.mark.parametrize(
    ("between", "more", "arguments"),
    [
        (("aten::masked_fill",), 1_500, "value, is_causal=True)"),
        (("aten::mul",), 1_500, "value)"),
        (("aten::mul", "aten::masked_fill"), 3_000, "value, is_causal=True)"),
    ],
)
def test_what_works_on_the_scores_counts_and_decides_the_remedy(
    between: tuple[str, ...], more: int, arguments: str
) -> None:
    finding = the_finding(rule, attending(*between))

    assert finding.saving_ns_per_step == 10_500 + more
    assert arguments in finding.remedy.code


def test_without_shapes_the_question_stays_open() -> None:
    [question] = asked(rule, without_shapes()).not_answered

    assert question.question == "Is attention written out, where a fused operator could compute it?"


def test_the_threshold_decides() -> None:
    assert len(asked(rule, attending(), share=0.105).findings) == 1
    assert asked(rule, attending(), share=0.11).findings == ()
