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


def generating(second: str = "[2, 4, 1, 64]") -> Trace:
    """A prompt of 15 tokens and four tokens, each of which copies keys and values for 40 of 100 ns."""
    recording = Recording()
    for token in range(5):
        begin = 100 * token
        recording.operator(begin, 10, "aten::embedding", input_shapes=f"[[5000, 256], [2, {1 if token else 15}], []]")
        if token:
            for start in (20, 40):
                shapes = f"[[[2, 4, {14 + token}, 64], {second}], []]"
                recording.operator(begin + start, 20, "aten::cat", input_shapes=shapes)
        recording.operator(begin + 60, 40, "aten::mm")
    return recording.trace()


ITEMS = ListFacts(file="train.py", function=20, name="self.items", length=100, growth=50, read=((21, 22),))

FIRES: Cases = {
    "a tensor to which each step appends": lambda: appending(100, 110, 120, 130),
    "a list to which each step appends": lambda: reading(ITEMS),
    "a cache to which each token appends": generating,
}
SILENT: Cases = {
    "nothing": empty_trace,
    "a busy device": busy_device,
    "batches of one size": lambda: appending(100, 100, 100, 100),
    "batches of several sizes": lambda: appending(100, 110, 125, 130),
    "too few steps": lambda: appending(100, 110, 120),
    "a sequence that is generated": lambda: appending(100, 110, 120, 130, trains=False),
    "two tensors of one length": lambda: generating("[2, 4, 16, 64]"),
    "another shape": lambda: generating("[2, 1, 1, 64]"),
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


def test_a_cache_costs_what_its_copies_take_but_for_the_new_row() -> None:
    finding = the_finding(rule, generating())

    figures = {each.name: each.value for each in finding.evidence.figures}
    assert figures["such copies per step"] == pytest.approx(8 / 5)
    assert (figures["rows of the longest cache"], figures["rows that are appended at once"]) == (18, 1)
    assert finding.saving_ns_per_step == pytest.approx(8 * 20 * (1 - 1 / 17.4) / 5, rel=0.05)
