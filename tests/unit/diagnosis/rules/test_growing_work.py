"""growing-work: lines take longer from step to step."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.growing_work import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import ListFacts, ProgramFacts
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, places_of, the_finding
from tests.unit.recording import Recording

NODE = "autograd::engine::evaluate_function: MulBackward0"


def appending(*rows: int, trains: bool = True) -> Trace:
    """Steps of 1000 ns: a mean over so many rows of 8 on line 8 for 4 ns a row, and 100 ns of other work on line 9."""
    recording = Recording()
    for step, count in enumerate(rows):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.line(begin, 4 * count, "train.py(8): train")
        recording.operator(begin, 4 * count, "aten::mean", input_shapes=f"[[{count}, 8], []]")
        recording.line(begin + 4 * count, 1000 - 4 * count, "train.py(9): train")
        recording.operator(begin + 4 * count, 100, NODE if trains else "aten::mul", input_shapes="[[8, 8]]")
    return recording.trace()


def reading(*lists: ListFacts, steps: int = 3) -> Trace:
    """Steps 10 and later of 1000 ns, of which lines 21 and 22 take 600 ns without an operator."""
    recording = Recording(Metadata(program=ProgramFacts(lists=lists)))
    for step in range(steps):
        begin = 1000 * step
        recording.step(begin, 1000, 10 + step)
        recording.line(begin, 400, "train.py(9): train")
        recording.operator(begin, 400, "aten::mm")
        recording.line(begin + 400, 300, "train.py(21): average")
        recording.line(begin + 700, 300, "train.py(22): average")
    return recording.trace()


ITEMS = ListFacts(file="train.py", function=20, name="self.items", length=100, growth=50, read=((21, 22),))

FIRES: Cases = {
    "a tensor to which each step appends": lambda: appending(100, 110, 120, 130),
    "a list to which each step appends": lambda: reading(ITEMS),
}
SILENT: Cases = {
    "nothing": empty_trace,
    "a busy device": busy_device,
    "batches of one size": lambda: appending(100, 100, 100, 100),
    "batches of several sizes": lambda: appending(100, 110, 125, 130),
    "too few steps": lambda: appending(100, 110, 120),
    "a sequence that is generated": lambda: appending(100, 110, 120, 130, trains=False),
    "a list of one length": lambda: reading(ListFacts(file="train.py", function=20, name="xs", length=100)),
    "a list that is only added to": lambda: reading(ListFacts(file="train.py", function=20, name="xs", length=100,
                                                              growth=50)),
}  # fmt: skip


def test_what_the_last_step_added_remains() -> None:
    finding = the_finding(rule, appending(100, 110, 120, 130))

    figures = {each.name: each.value for each in finding.evidence.figures}
    assert places_of(finding) == [("train.py", 8, "train")]
    assert finding.saving_ns_per_step == pytest.approx(4 * (115 - 10), abs=2)
    assert figures["elements that each step adds"] == 80
    assert figures["time that each step adds, by least squares"] == 40


def test_a_list_is_as_long_as_the_steps_since_the_look_made_it() -> None:
    finding = the_finding(rule, reading(ITEMS))

    figures = {each.name: each.value for each in finding.evidence.figures}
    assert {place[1] for place in places_of(finding)} == {21, 22}
    assert figures["entries in the recorded steps, if it grew on as fast"] == 100 + 50 * (11 - 3)
    assert finding.saving_ns_per_step == pytest.approx(600 * (1 - 50 / 500), abs=2)
    assert not asked(rule, reading(ITEMS), share=0.6).findings
