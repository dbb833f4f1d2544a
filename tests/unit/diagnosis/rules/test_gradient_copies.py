"""gradient-copies: reduced gradients are copied out of their buckets."""

from __future__ import annotations

from stepscope.diagnosis.rules.gradient_copies import RULE as rule
from stepscope.trace import Trace
from stepscope.trace.program_facts import DataParallelFacts, ProgramFacts
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, the_finding
from tests.unit.shaped import Shaped


def copying(length_ns: int = 1_000) -> Trace:
    """Three gradients are copied in a step of 100,000 ns."""
    facts = DataParallelFacts(kind="DistributedDataParallel", gradient_bytes=4096, gradient_as_bucket_view=False)
    step = Shaped(facts=ProgramFacts(data_parallel=(facts,)))
    for _ in range(3):
        with step.inside("torch.distributed.ddp.reducer::copy_bucket_to_grad", length_ns, (32, 32)):
            step.call("aten::copy_", length_ns - 10, (32, 32), (32, 32))
        step.call("torch::distributed::reducer::mul_out", 5_000, (32, 32))
    return step.trace()


FIRES: Cases = {"copies": copying}
SILENT: Cases = {"empty": empty_trace, "nothing is wrong": busy_device, "little": lambda: copying(300)}


def test_the_copies_are_saved() -> None:
    finding = the_finding(rule, copying())

    assert finding.saving_ns_per_step == 3_000
    assert finding.title == "3 gradients a step are copied out of the buckets they travelled in: 3.0% of the step"
    assert figures_of(finding) == [
        ("share of the step that the copies cost", 0.03, "share", 0.01),
        ("copies per step", 3.0, "count", None),
        ("bytes of gradients that are held twice", 4096, "bytes", None),
    ]
    assert "gradient_as_bucket_view=True" in finding.remedy.code


def test_the_threshold_decides() -> None:
    assert asked(rule, copying(), share=0.031).findings == ()
    assert len(asked(rule, copying(300), share=0.009).findings) == 1
