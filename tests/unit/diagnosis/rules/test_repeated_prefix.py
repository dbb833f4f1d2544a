"""repeated-prefix: the common beginning of prompts is computed again."""

from __future__ import annotations

from stepscope.diagnosis.rules.repeated_prefix import RULE as rule
from stepscope.trace import Trace
from stepscope.trace.program_facts import ProgramFacts, PromptFacts
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.shaped import Shaped


def answered(repeated: int = 300, *, prefill_ns: int = 40_000, trains: bool = False) -> Trace:
    """A step of 100,000 ns that reads prompts of 2 rows of 50 tokens and decodes."""
    facts = PromptFacts(calls=4, tokens=400, repeated_tokens=repeated)
    step = Shaped(facts=ProgramFacts(prompts=facts))
    step.call("aten::embedding", 100, (1000, 16), (2, 50), types=["float", "long int"])
    step.call("aten::linear", prefill_ns, (2, 50, 16), (16, 16))
    step.call("aten::embedding", 100, (1000, 16), (2, 1), types=["float", "long int"])
    step.call("aten::linear", 20_000, (2, 1, 16), (16, 16))
    if trains:
        step.call("aten::_fused_adam_", 10_000, (1000, 16))
    return step.trace()


FIRES: Cases = {"three quarters": answered}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "prompts differ": lambda: answered(0),
    "they hardly begin alike": lambda: answered(30),
    "prompts are short work": lambda: answered(prefill_ns=1_000),
    "it trains": lambda: answered(trains=True),
}


def test_what_prompts_share_is_saved_where_they_are_read() -> None:
    finding = the_finding(rule, answered())

    assert finding.saving_ns_per_step == int((100 + 40_000) * 0.75)
    assert figures_of(finding)[0] == ("share of the prompts' tokens that repeat a beginning", 0.75, "share", 0.1)
    assert ("of them in beginnings that repeat", 300, "count", None) in figures_of(finding)
    assert places_of(finding) == [("train.py", 20, "step")]


def test_the_thresholds_decide() -> None:
    assert asked(rule, answered(), repeated=0.76).findings == ()
    assert asked(rule, answered(), share=0.31).findings == ()
