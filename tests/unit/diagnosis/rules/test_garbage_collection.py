"""garbage-collection: steps stop for Python's garbage collector."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from stepscope.diagnosis.rules.garbage_collection import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import FunctionFacts, PauseFacts, ProgramFacts, WorkFacts
from tests.unit.diagnosis.rules.cases import (
    US,
    Cases,
    asked,
    busy_device,
    empty_trace,
    figures_of,
    places_of,
    the_finding,
)
from tests.unit.recording import Recording


def collecting(*, called: bool | None = True, duration: int = 200, noted: bool = True) -> Trace:
    """Two steps of 1000 ns with one collection each."""
    pauses = tuple(
        PauseFacts(
            start_unix_ns=5_000 + 1000 * step + 300, duration_ns=duration, generation=2, thread=1,
            file="train.py", line=31, function="step", called=called,
        )
        for step in range(2)
    )  # fmt: skip
    program = ProgramFacts(pauses=pauses) if noted else None
    recording = Recording(Metadata(program=program, origin_unix_ns=5_000))
    for step in range(2):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.frame(begin, 1000, "train.py(20): step")
        recording.operator(begin, 250, "aten::mm")
        recording.annotation(begin + 300, duration, "Garbage collection")
    return recording.trace()


def called_in_a_stack() -> Trace:
    """Without notes of the collector: a call of gc.collect among the Python frames, and a device that waits for it."""
    recording = Recording(unit_ns=US)
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "train.py(20): step")
    recording.launched(0, 100, 100, "gemm", 1)
    recording.frame(250, 400, "<built-in function collect>")
    recording.launched(700, 800, 100, "gemm", 2)
    return recording.trace()


FIRES: Cases = {
    "called": collecting,
    "by itself": lambda: collecting(called=False),
    "line unknown": lambda: collecting(called=None),
    "without notes": lambda: collecting(noted=False),
    "in a stack": called_in_a_stack,
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "too short to matter": lambda: collecting(duration=19),
}


def test_its_time_and_its_line() -> None:
    finding = the_finding(rule, collecting())

    assert finding.title == "20% of the step goes to gc.collect(), which the program calls"
    assert finding.saving_ns_per_step == 200
    assert finding.saving_basis == "time in the garbage collector"
    assert figures_of(finding) == [
        ("share of the step lost to garbage collection", 0.2, "share", 0.02),
        ("time lost per step", 200, "ns", None),
        ("collections per step", 1.0, "count", None),
        ("longest collection", 200, "ns", None),
    ]
    assert places_of(finding) == [("train.py", 31, "step")]
    assert finding.remedy.code.startswith("# remove from the step: gc.collect()")


def test_what_runs_by_itself_is_frozen() -> None:
    finding = the_finding(rule, collecting(called=False))

    assert finding.title == "20% of the step goes to Python's garbage collector"
    assert "gc.freeze()" in finding.remedy.code


def test_a_device_waits_for_the_call_in_the_stack() -> None:
    finding = the_finding(rule, called_in_a_stack())

    assert finding.saving_ns_per_step == 400 * US
    assert finding.saving_basis == "idle time while the collector ran"
    assert figures_of(finding)[2] == ("collections per step", 1.0, "count", None)
    assert places_of(finding) == [("train.py", 20, "step")]


def test_the_threshold_decides() -> None:
    assert len(asked(rule, collecting(duration=20)).findings) == 1
    assert asked(rule, collecting(), share=0.21).findings == ()


def test_a_loop_that_makes_the_objects_is_the_cause() -> None:
    step = FunctionFacts(file="train.py", name="step", line=20, last=40)
    loop = WorkFacts(file="train.py", function=20, kind="loop", first=30, last=32)
    trace = collecting(called=False)
    program = msgspec.structs.replace(trace.metadata.program, functions=(step,), works=(loop,))

    found = the_finding(rule, replace(trace, metadata=replace(trace.metadata, program=program)))

    assert "A loop in step makes objects" in found.remedy.text
    assert "A loop" not in the_finding(rule, collecting(called=False)).remedy.text
