"""unused-parameters: DistributedDataParallel searches for unused parameters in vain."""

from __future__ import annotations

from stepscope.diagnosis.rules.unused_parameters import RULE as rule
from stepscope.trace import Trace
from stepscope.trace.program_facts import DataParallelFacts, ProgramFacts
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, the_finding
from tests.unit.shaped import Shaped


def searching(walk_ns: int = 4_000, *, looks: bool = True, unused: int | None = 0) -> Trace:
    """A forward pass of 20,000 ns and a walk through its graph in a step of 100,000 ns."""
    facts = DataParallelFacts(kind="DistributedDataParallel", find_unused_parameters=looks, unused_parameters=unused)
    step = Shaped(facts=ProgramFacts(data_parallel=(facts,)))
    step.recording.annotation(0, 10 + 20_000 + walk_ns, "DistributedDataParallel.forward")
    step.call("aten::linear", 20_000, (8, 8), (8, 8))
    return step.trace()


FIRES: Cases = {"all are used": searching, "not known which are": lambda: searching(unused=None)}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "some are unused": lambda: searching(unused=2),
    "not looked for": lambda: searching(looks=False),
    "found at once": lambda: searching(500),
}


def test_the_walk_is_saved() -> None:
    finding = the_finding(rule, searching())

    assert finding.saving_ns_per_step == 4_000
    assert figures_of(finding) == [
        ("share of the step that the search costs", 0.04, "share", 0.01),
        ("searches per step", 1.0, "count", None),
        ("parameters without a gradient", 0, "count", None),
    ]
    assert [(each.start_ns, each.duration_ns) for each in finding.evidence.intervals] == [(20_010, 4_000)]


def test_the_threshold_decides() -> None:
    assert asked(rule, searching(), share=0.041).findings == ()
    assert len(asked(rule, searching(500), share=0.005).findings) == 1
