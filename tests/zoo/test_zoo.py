"""Planted faults are found first, on their lines, and clean twins raise no alarm.

Real programs are recorded as a user would, a few by default and all with STEPSCOPE_ZOO=all. What they promise and gain
is the matter of benchmarks/diagnosis_accuracy.py: it takes time, and a quiet machine.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepscope import diagnose, open_trace
from tests.zoo import measure, registry, verdict
from tests.zoo.simulated import SIMULATED, Simulated

QUICK = (
    "per_token_loss",
    "collecting_garbage",
    "large_logits",
    "optimizer_one_by_one",
)
CHOSEN = registry.PROGRAMS if os.environ.get("STEPSCOPE_ZOO") == "all" else QUICK
BESIDE = {"host-contention", "host-allocator", "step-variance"}
"""Findings about the machine and how busy it was: other tests may run beside this one."""


@pytest.mark.parametrize("name", CHOSEN)
def test_the_planted_fault_is_found_first_on_its_line(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = registry.program(name)
    if "transformers" in program.path.read_text():
        pytest.importorskip("transformers", minversion="5.11")
    found = measure.findings(measure.diagnosed(measure.record(program, "fault", tmp_path)))
    own = [one for one in found if one["rule"] not in BESIDE or one["rule"] == program.rule]

    assert own[0]["rule"] == program.rule
    if program.has_place:
        place = verdict.line_of(own[0])
        assert place is not None
        assert program.names_the_line(*place), f"{place} is none of {sorted(program.lines)}"


@pytest.mark.parametrize("one", SIMULATED, ids=lambda one: one.name)
def test_a_simulated_fault_is_found_first(one: Simulated, tmp_path: Path) -> None:
    findings = diagnose(open_trace(one.write("fault", tmp_path))).findings

    assert findings[0].rule == one.rule


@pytest.mark.parametrize("one", SIMULATED, ids=lambda one: one.name)
def test_a_simulated_clean_twin_raises_no_alarm(one: Simulated, tmp_path: Path) -> None:
    findings = diagnose(open_trace(one.write("clean", tmp_path))).findings

    assert [finding.rule for finding in findings if finding.saving_share > verdict.ALARM] == []


@pytest.mark.parametrize("one", SIMULATED, ids=lambda one: one.name)
def test_a_simulated_fault_costs_what_its_twin_does_not(one: Simulated) -> None:
    assert one.step_ns("fault") > one.step_ns("clean")
