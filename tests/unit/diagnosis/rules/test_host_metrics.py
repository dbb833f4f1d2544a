"""host-metrics: metrics are computed on the host in each step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepscope.diagnosis.diagnosis import without_replaced
from stepscope.diagnosis.rules.host_metrics import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import MetricFacts, ProgramFacts
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, places_of, the_finding
from tests.unit.recording import Recording

NODE = "autograd::engine::evaluate_function: MulBackward0"
COUNTING = (
    MetricFacts(file="train.py", function="<module>", first=11, last=11),
    MetricFacts(file="train.py", function="confusion", first=30, last=33),
)


def counting(*metrics: MetricFacts, in_steps: int = 4, trains: bool = True, loads: bool = False) -> Trace:
    """Four steps of 1000 ns; in some of them line 11 copies a tensor for 100 ns, and lines 31 and 32 take 300 ns."""
    recording = Recording(Metadata(program=ProgramFacts(metrics=metrics)))
    for step in range(4):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.line(begin, 600, "train.py(9): train")
        recording.operator(begin + 10, 100, "aten::mm")
        recording.operator(begin + 200, 100, NODE if trains else "aten::mul")
        if step < in_steps:
            if loads:
                recording.annotation(begin + 600, 400, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
            recording.line(begin + 600, 100, "train.py(11): train")
            recording.operator(begin + 610, 80, "aten::copy_")
            recording.line(begin + 700, 200, "train.py(31): confusion")
            recording.line(begin + 900, 100, "train.py(32): confusion")
    return recording.trace()


FIRES: Cases = {"a confusion matrix in each step": lambda: counting(*COUNTING)}
SILENT: Cases = {
    "nothing": empty_trace,
    "a busy device": busy_device,
    "other Python": counting,
    "in one of four steps": lambda: counting(*COUNTING, in_steps=1),
    "lines that make batches": lambda: counting(*COUNTING, loads=True),
    "a program that does not train": lambda: counting(*COUNTING, trains=False),
}


def test_the_lines_and_the_functions_that_they_call_count() -> None:
    finding = the_finding(rule, counting(*COUNTING))

    assert {place[1] for place in places_of(finding)} == {11, 31, 32}
    assert finding.saving_ns_per_step == pytest.approx(400, abs=10)
    assert ("time of these lines per step", 400) in [(each.name, each.value) for each in finding.evidence.figures]
    assert not asked(rule, counting(*COUNTING), share=0.5).findings


def test_of_findings_about_the_same_line_the_larger_is_kept() -> None:
    trace = counting(*COUNTING)
    metrics = the_finding(rule, trace)
    logging = replace(metrics, rule="frequent-logging", saving_ns_per_step=metrics.saving_ns_per_step // 2)
    elsewhere = replace(logging, where=(replace(metrics.where[0], line=99),))
    larger = replace(metrics, rule="frequent-logging", saving_ns_per_step=2 * metrics.saving_ns_per_step)

    assert without_replaced([metrics, logging, elsewhere]) == [metrics, elsewhere]
    assert without_replaced([metrics, larger]) == [larger]
