"""Promises without what recording each event cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.diagnosis.diagnosis import diagnose
from stepscope.diagnosis.recording_costs import OPERATOR_NS, recorded_events
from stepscope.diagnosis.view import View
from stepscope.readers import unrecorded_steps, with_unrecorded_steps
from stepscope.report.words import headline
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import UnrecordedSteps
from stepscope.trace.program_facts import ProgramFacts, StepFacts
from stepscope.whatif.changes import scaled_operators
from tests.unit.recording import Recording
from tests.unit.run_folders import made_run, recording

US = 1_000
STEPS = 4
SMALL = 100


def recorded(unrecorded: UnrecordedSteps | None, *, waits: int = 0, device: bool = False, lines: bool = False) -> Trace:
    """Steps of 1000 us: 100 operators of 3 us with 3 us between them, and one of 400 us.

    Args:
        waits: time in which each step's thread waited for a processor, of the 1000 us.
    """
    facts = {"thread_processor_ns": 1000 * US - waits, "thread_waiting_ns": waits}
    steps = tuple(StepFacts(index=number, duration_ns=1000 * US, **facts) for number in range(STEPS))
    made = Recording(Metadata(program=ProgramFacts(steps=steps), unrecorded=unrecorded))
    for number in range(STEPS):
        begin = 1000 * US * number
        made.step(begin, 1000 * US, number)
        for place in range(SMALL):
            made.operator(begin + 6 * US * place + 3 * US, 3 * US, "aten::add")
        made.operator(begin + 600 * US, 400 * US, "aten::mm")
        if lines:
            made.line(begin, 600 * US, "/home/alice/train.py(3): train")
        if device:
            made.launched(begin + 10 * US, begin + 20 * US, 900 * US, "gemm", number + 1)
    return made.trace()


def share_of_small(trace: Trace) -> float:
    """What a step would lose without its small operators."""
    view = View(trace)
    rows = np.flatnonzero((trace.operators["name"] == "aten::add").to_numpy())
    return view.saved_ns(scaled_operators(rows, 0.0)) / view.step_ns


def test_without_other_steps_a_saving_is_a_share_of_the_recorded_step() -> None:
    assert share_of_small(recorded(None)) == pytest.approx(0.3)
    assert View(recorded(None)).recorded_events is None


@pytest.mark.parametrize("waits", [0, 500 * US])
def test_a_saving_is_a_share_of_the_step_without_the_cost_of_its_events(waits: int) -> None:
    works = 1000 * US - waits
    trace = recorded(UnrecordedSteps(20, 900 * US, 1000 * US, works - 101 * US * works // (1000 * US)), waits=waits)

    # 101 operators cost 1 us each of the time that they took, half of it in them and half between them.
    view = View(trace)
    assert view.recorded_events is not None
    assert view.recorded_events.operator_ns == pytest.approx(1 * US, rel=0.01)
    assert share_of_small(trace) == pytest.approx((300 - 50) / (1000 - 101), abs=2e-3)
    assert view.step_ns == 1000 * US  # the accounting stays as recorded


def test_what_operators_do_not_explain_slowed_python_if_lines_were_recorded() -> None:
    slower = UnrecordedSteps(20, 400 * US, 1000 * US, 650 * US)
    even = share_of_small(recorded(slower))
    python = share_of_small(recorded(slower, lines=True))

    small = 300 - SMALL * 1.5 * OPERATOR_NS / US / 2
    assert python == pytest.approx(small / 650, abs=5e-3)
    assert even < python


@pytest.mark.parametrize(
    "unrecorded",
    [
        pytest.param(UnrecordedSteps(20, 1000 * US, 1000 * US, 1000 * US), id="as long"),
        pytest.param(UnrecordedSteps(20, 1200 * US, 1000 * US, 1100 * US), id="longer"),
        pytest.param(UnrecordedSteps(20, 500 * US, 1000 * US), id="time on a processor unknown"),
    ],
)
def test_steps_that_are_not_shorter_say_nothing(unrecorded: UnrecordedSteps) -> None:
    view = View(recorded(unrecorded))

    assert recorded_events(view.experiment, view.experiment.graph) is None


def test_with_a_device_wall_time_counts_and_only_operators_do() -> None:
    trace = recorded(UnrecordedSteps(20, 100 * US, 1000 * US, 100 * US), device=True)

    events = View(trace).recorded_events
    assert events is not None
    assert events.operator_ns == pytest.approx(1.5 * OPERATOR_NS)


def test_both_times_are_said() -> None:
    trace = recorded(UnrecordedSteps(20, 700 * US, 1000 * US, 700 * US))
    diagnosis = diagnose(trace)

    assert (diagnosis.step_ns, diagnosis.unrecorded_ns) == (1000 * US, 700 * US)
    assert "700.0 us" in headline(diagnosis)
    assert "1.0 ms while recorded" in headline(diagnosis)
    assert diagnose(recorded(None)).unrecorded_ns == 0


def test_the_times_come_from_the_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path))
    run = made_run("a", root=tmp_path)
    trace = run.rank_folder(0) / "trace-1.json.gz"
    run.write_recording(0, recording([4, 5, 9], [10, 11, 15], trace=trace.name))
    program = Trace.from_tables({}, Metadata(program=ProgramFacts()))

    found = with_unrecorded_steps(program, trace)
    assert found.metadata.unrecorded == UnrecordedSteps(3, 5, 11)
    counted = [{"first_step": 9, "recorded": False, "ns": [4, 5, 9], "processor_ns": [3, 3, 4], "faults": [7, 0, 8]}]
    counted.append({"first_step": 5, "recorded": True, "ns": [10, 11, 15]})
    assert unrecorded_steps(counted) == UnrecordedSteps(3, 5, 11, 3, 7)
    for other in (trace.with_name("trace-2.json.gz"), tmp_path / "rank0" / trace.name):
        assert with_unrecorded_steps(program, other) is program
    assert with_unrecorded_steps(replace(program, metadata=Metadata()), trace).metadata.unrecorded is None


@pytest.mark.parametrize("times", [None, 7, [], [{"first_step": 9, "recorded": False, "ns": [1, 2, 3]}]])
def test_too_few_steps_of_a_kind_say_nothing(times: Any) -> None:
    assert unrecorded_steps(times) is None
