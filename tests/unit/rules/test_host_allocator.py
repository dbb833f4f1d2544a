"""host-allocator: the host's memory comes from the operating system anew in each step."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from stepscope.diagnosis.rules import host_allocator as rule
from stepscope.program_facts import StepFacts
from stepscope.trace import Trace
from tests.unit.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, the_finding
from tests.unit.rules.host_steps import counted


def mapping(allocator: str | None = "glibc", **more: Any) -> Trace:
    more = {"thread_system_ns": 300, "minor_faults": 3000, **more}
    return counted(process={"allocator": allocator}, **more)


def memory_taken_in_once() -> Trace:
    """One of four steps maps all the pages."""
    trace = mapping()
    program = trace.metadata.program
    assert program is not None
    steps = (program.steps[0], *(StepFacts(index=number, duration_ns=1000, minor_faults=0) for number in (1, 2, 3)))
    program = msgspec.structs.replace(program, steps=steps)
    return dataclasses.replace(trace, metadata=dataclasses.replace(trace.metadata, program=program))


FIRES: Cases = {"glibc": mapping, "not known": lambda: mapping(None)}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "another allocator": lambda: mapping("jemalloc"),
    "few pages": lambda: mapping(minor_faults=1999),
    "little time": lambda: mapping(thread_system_ns=49),
    "memory taken in once": memory_taken_in_once,
    "nothing counted": lambda: mapping(thread_system_ns=None),
}


def test_the_time_in_the_operating_system() -> None:
    finding = the_finding(rule, mapping())

    assert finding.title == "30% of the step goes to the operating system, which maps 3,000 pages a step"
    assert finding.saving_ns_per_step == 300
    assert figures_of(finding) == [
        ("pages mapped per step", 3000.0, "count", 2000),
        ("share of the step in the operating system", 0.3, "share", 0.05),
        ("bytes allocated per step", 0, "bytes", None),
    ]
    assert finding.remedy.code.startswith("LD_PRELOAD=libjemalloc.so.2 ")


def test_pages_explain_only_so_much() -> None:
    finding = the_finding(rule, mapping(minor_faults=10), faults=10, fault_ns=20)

    assert finding.saving_ns_per_step == 10 * 20


def test_the_thresholds_decide() -> None:
    assert len(asked(rule, mapping(minor_faults=2000, thread_system_ns=50)).findings) == 1
    assert asked(rule, mapping(), share=0.31).findings == ()
    assert asked(rule, mapping(), faults=3001).findings == ()
