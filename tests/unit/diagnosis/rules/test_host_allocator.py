"""host-allocator: the host gets its memory anew from the operating system in each step."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from stepscope.diagnosis.rules.host_allocator import RULE as rule
from stepscope.trace import Trace
from stepscope.trace.metadata import UnrecordedSteps
from stepscope.trace.program_facts import StepFacts
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, the_finding
from tests.unit.diagnosis.rules.host_steps import counted


def mapping(allocator: str | None = "glibc", *, warm_up: tuple[int, int] | None = (1000, 3000), **more: Any) -> Trace:
    """Steps of 1000 ns with 3000 page faults each, after so long a warm-up with so many."""
    more = {"thread_system_ns": 300, "minor_faults": 3000, **more}
    counts = {} if warm_up is None else {"warm_up_ns": warm_up[0], "warm_up_faults": warm_up[1]}
    return counted(process={"allocator": allocator, **counts}, **more)


def memory_taken_in_once() -> Trace:
    """One of four steps maps all the pages."""
    trace = mapping()
    program = trace.metadata.program
    assert program is not None
    steps = (program.steps[0], *(StepFacts(index=number, duration_ns=1000, minor_faults=0) for number in (1, 2, 3)))
    program = msgspec.structs.replace(program, steps=steps)
    return dataclasses.replace(trace, metadata=dataclasses.replace(trace.metadata, program=program))


def other_steps(faults: int) -> Trace:
    """The run's other steps have so many page faults each."""
    trace = mapping()
    return dataclasses.replace(
        trace,
        metadata=dataclasses.replace(trace.metadata, unrecorded=UnrecordedSteps(20, 900, 1000, faults=faults)),
    )


FIRES: Cases = {"glibc": mapping, "other steps too": lambda: other_steps(2500), "not known": lambda: mapping(None)}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "another allocator": lambda: mapping("jemalloc"),
    "few pages": lambda: mapping(minor_faults=1999),
    "few pages where nothing is recorded": lambda: mapping(warm_up=(1000, 1999)),
    "few pages in each of two steps before": lambda: mapping(warm_up=(2100, 3998)),
    "few pages in a quicker step before": lambda: mapping(warm_up=(100, 3)),
    "no step before": lambda: mapping(warm_up=(99, 3)),
    "nothing counted before": lambda: mapping(warm_up=None),
    "little time": lambda: mapping(thread_system_ns=49),
    "few pages in the run's other steps": lambda: other_steps(1999),
    "memory taken in once": memory_taken_in_once,
    "nothing counted": lambda: mapping(thread_system_ns=None),
}


def test_the_time_in_the_operating_system() -> None:
    finding = the_finding(rule, mapping())

    assert finding.title == "30% of the step goes to the operating system, which maps 3,000 pages a step"
    assert finding.saving_ns_per_step == 300
    assert figures_of(finding) == [
        ("pages mapped per step", 3000.0, "count", 2000),
        ("pages mapped per recorded step", 3000.0, "count", None),
        ("share of the step in the operating system", 0.3, "share", 0.05),
        ("bytes allocated per step", 0, "bytes", None),
    ]
    assert finding.remedy.code.startswith("stepscope run --allocator jemalloc train.py ")
    assert "\nLD_PRELOAD=libjemalloc.so.2 MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1 " in finding.remedy.code


def test_what_the_recording_needs_is_left_out() -> None:
    finding = the_finding(rule, mapping(warm_up=(1900, 4800)))

    # A warm-up of two steps, as recorded ones take; they map 2400 pages each, of which 3000 take 300 ns.
    assert finding.title == "24% of the step goes to the operating system, which maps 2,400 pages a step"
    assert finding.saving_ns_per_step == 240
    assert figures_of(finding)[1] == ("pages mapped per recorded step", 3000.0, "count", None)


@pytest.mark.parametrize("warm_up", [None, (99, 3)])
def test_without_a_step_before_the_question_stays_open(warm_up: tuple[int, int] | None) -> None:
    (question,) = asked(rule, mapping(warm_up=warm_up)).not_answered

    assert question.why.startswith("recorded steps map 3,000 pages, which the recording itself may need")
    assert asked(rule, mapping(warm_up=warm_up, thread_system_ns=49)).not_answered == ()


def test_pages_explain_only_so_much() -> None:
    finding = the_finding(rule, mapping(minor_faults=10, warm_up=(1000, 10)), faults=10, fault_ns=20)

    assert finding.saving_ns_per_step == 10 * 20


def test_the_thresholds_decide() -> None:
    assert len(asked(rule, mapping(minor_faults=2000, thread_system_ns=50)).findings) == 1
    assert asked(rule, mapping(), share=0.31).findings == ()
    assert asked(rule, mapping(), faults=3001).findings == ()
