"""python-in-step: long stretches of Python between the operators."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepscope.diagnosis import diagnose
from stepscope.diagnosis.rules.python_in_step import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import FunctionFacts, ProgramFacts, WorkFacts
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.recording import Recording

MS = 1_000_000


def formatting(python_ms: int = 30, *, lines: bool = True, pieces: int = 1) -> Trace:
    """Two steps of 100 ms: operators, and Python in so many pieces that operators of no length divide."""
    recording = Recording()
    for step in range(2):
        begin = 100 * MS * step
        recording.step(begin, 100 * MS, step)
        computing = (100 - python_ms) * MS
        recording.operator(begin, computing, "aten::mm")
        each = python_ms * MS // pieces
        for number in range(pieces):
            start = begin + computing + number * each
            if lines:
                recording.line(start, each // 2, "train.py(20): report")
                recording.line(start + each // 2, each - each // 2, "train.py(21): report")
            else:
                recording.frame(start, each, "train.py(19): report")
            recording.operator(start + each - 1, 1, "aten::add")
    return recording.trace()


def on_a_device() -> Trace:
    """A device that works 60 ms of each 100 ms step and waits for Python in the rest."""
    recording = Recording()
    for step in range(2):
        begin = 100 * MS * step
        recording.step(begin, 100 * MS, step)
        recording.line(begin, 40 * MS, "train.py(20): report")
        recording.launched(begin + 40 * MS, begin + 40 * MS + 10, 60 * MS - 10, "gemm", 101 + step)
    return recording.trace()


def preempted(often: int) -> Trace:
    """Two steps of 100 calls from one line with 50 us of Python before each, but 2 ms before one of so many."""
    recording = Recording()
    begin = 0
    for step in range(2):
        first = begin
        for call in range(100):
            python = 2 * MS if call % often == 0 else MS // 20
            recording.line(begin, python + MS // 10, "model.py(8): forward")
            recording.operator(begin + python, MS // 10, "aten::linear")
            begin += python + MS // 10
        recording.step(first, begin - first, step)
    return recording.trace()


def around_operators(operators_us: int, *, module: bool = False) -> Trace:
    """Two steps of one line that calls 20 operators of this length, with 400 us of Python before each.

    Args:
        module: whether they are a module's.
    """
    recording = Recording()
    each = (400 + operators_us) * 1000
    for step in range(2):
        begin = 20 * each * step
        recording.step(begin, 20 * each, step)
        recording.line(begin, 20 * each, "train.py(8): train")
        if module:
            recording.module(begin, 20 * each, "Net")
        for call in range(20):
            recording.operator(begin + call * each + 400_000, operators_us * 1000, "aten::linear")
    return recording.trace()


FIRES: Cases = {
    "at a line that mostly is Python": lambda: around_operators(300),
    "every third call": lambda: preempted(3),
    "by lines": formatting,
    "by frames": lambda: formatting(lines=False),
    "on a device": on_a_device,
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "little": lambda: formatting(2),
    "between the operators of what a line calls": lambda: around_operators(500),
    "now and then": lambda: preempted(10),
    "many short pieces": lambda: formatting(30, pieces=300),
}


def test_saving_figures_and_lines() -> None:
    found = the_finding(rule, formatting())

    assert found.title == "30% of the step is Python code between operators"
    assert (found.saving_ns_per_step, found.saving_share) == (30 * MS - 1, (30 * MS - 1) / (100 * MS))
    assert figures_of(found) == [
        ("share of the step in long stretches of Python", (60 * MS - 2) / (200 * MS), "share", 0.03),
        ("such stretches per step", 1.0, "count", None),
        ("the longest of them", 30 * MS - 1, "ns", 200_000),
    ]
    assert places_of(found) == [("train.py", 20, "report"), ("train.py", 21, "report")]
    assert all(place.exact_line for place in found.where)


def test_frames_name_the_function() -> None:
    assert places_of(the_finding(rule, formatting(lines=False))) == [("train.py", 19, "report")]


def test_the_python_of_a_modules_call_is_not_the_programs() -> None:
    assert asked(rule, around_operators(100)).findings
    assert not asked(rule, around_operators(100, module=True)).findings


def test_thresholds() -> None:
    assert asked(rule, formatting(), share=0.31).findings == ()
    assert asked(rule, formatting(), stretch=31 * MS).findings == ()
    assert len(asked(rule, formatting(2), share=0.01).findings) == 1


def test_it_takes_the_place_of_launch_bound() -> None:
    rules = [finding.rule for finding in diagnose(on_a_device(), rules=["launch-bound", rule.id]).findings]

    assert rules == [rule.id]


def test_the_kind_of_work_is_named_where_most_of_it_is_one() -> None:
    report = FunctionFacts(file="train.py", name="report", line=18, last=22)
    slices = WorkFacts(file="train.py", function=18, kind="growing", name="losses", first=21, last=21)
    trace = formatting()
    program = ProgramFacts(functions=(report,), works=(slices,))

    found = the_finding(rule, replace(trace, metadata=replace(trace.metadata, program=program)))

    assert found.title.startswith("report reads a slice of losses that grows with its loop")
    assert places_of(found) == [("train.py", 21, "report")]
    assert found.saving_ns_per_step == pytest.approx(0.95 * 15 * MS, rel=1e-6)
    assert (found.confidence, found.saving_from) == ("medium", "replayed")


def calling(line: int) -> Trace:
    """Steps of 100 ms whose function `main` comes to this line, and whose function `make` takes 30 ms.

    Line 14 of `main` makes what a loop from line 16 on makes again.
    """
    functions = (
        FunctionFacts(file="train.py", name="main", line=10, last=19, calls=("make",)),
        FunctionFacts(file="train.py", name="make", line=20, last=22),
    )
    works = (
        WorkFacts(file="train.py", function=10, kind="constant", name="table", first=14, last=14, calls=("make",)),
        WorkFacts(file="train.py", function=10, kind="loop", first=16, last=19),
    )
    recording = Recording(Metadata(program=ProgramFacts(functions=functions, works=works)))
    for step in range(2):
        begin = 100 * MS * step
        recording.step(begin, 100 * MS, step)
        recording.line(begin, 1 * MS, "update.py(3): update")
        recording.line(begin + 1 * MS, 69 * MS, f"train.py({line}): main")
        recording.operator(begin, 70 * MS, "aten::mm")
        recording.line(begin + 70 * MS, 30 * MS, "train.py(21): make")
        recording.operator(begin + 100 * MS - 1, 1, "aten::add")
    return recording.trace()


def test_what_main_computes_before_its_loop_is_not_computed_in_each_step() -> None:
    assert "table" in the_finding(rule, calling(14)).title
    assert "table" not in the_finding(rule, calling(17)).title
