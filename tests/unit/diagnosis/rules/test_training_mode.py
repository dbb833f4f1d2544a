"""training-mode: dropout in a program that trains nothing."""

from __future__ import annotations

from stepscope.diagnosis.rules.training_mode import RULE as rule
from stepscope.trace import Trace
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.shaped import Shaped


def answered(*, draws: bool = True, trains: bool = False, fused: bool = False) -> Trace:
    """A step of 100,000 ns with two dropouts of 10,000 ns each."""
    step = Shaped()
    for _ in range(2):
        step.call("aten::linear", 20_000, (2, 16), (16, 16))
        if fused:
            step.call("aten::native_dropout", 10_000, (2, 16))
            continue
        with step.inside("aten::dropout", 10_000, (2, 16)):
            if draws:
                step.call("aten::bernoulli_", 6_000, (2, 16))
    if trains:
        step.call("aten::_fused_adam_", 10_000, (16, 16))
    return step.trace()


FIRES: Cases = {"dropout": answered, "fused": lambda: answered(fused=True)}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "evaluation": lambda: answered(draws=False),
    "it trains": lambda: answered(trains=True),
}


def test_all_of_dropout_is_saved() -> None:
    finding = the_finding(rule, answered())

    assert finding.saving_ns_per_step == 20_000
    assert ("dropouts that draw per step", 2, "count", None) in figures_of(finding)
    assert places_of(finding) == [("train.py", 20, "step")]
    assert "eval()" in finding.remedy.code


def test_the_threshold_decides() -> None:
    assert asked(rule, answered(), share=0.21).findings == ()


def test_attention_that_falls_back_for_it_keeps_its_products() -> None:
    step = Shaped()
    with step.inside("aten::_scaled_dot_product_attention_math", 50_000, (2, 4, 8, 8)):
        step.call("aten::bmm", 15_000, (8, 8, 8), (8, 8, 8))
        with step.inside("aten::dropout", 20_000, (8, 8, 8)):
            step.call("aten::bernoulli_", 6_000, (8, 8, 8))

    assert the_finding(rule, step.trace()).saving_ns_per_step == 35_000
