"""What recording adds to steps: page faults, and work for each event."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from stepscope.compare.comparison import compare_traces
from stepscope.diagnosis.diagnosis import diagnose
from stepscope.diagnosis.finding import Confidence, Finding
from stepscope.diagnosis.recording_costs import (
    OPERATOR_NS,
    Contention,
    faults_before,
    fresh_bytes,
    recorded_events,
    without_recorded_faults,
)
from stepscope.diagnosis.rule import Answers, Found, Limits, Remedy, Rule, Threshold
from stepscope.diagnosis.view import View
from stepscope.readers import unrecorded_steps, with_unrecorded_steps
from stepscope.report.comparison import comparison_document
from stepscope.report.diagnosis import TraceReport, json_report
from stepscope.report.text import text_of
from stepscope.report.words import exceptional_sentences, headline
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import TraceWarning, UnrecordedSteps
from stepscope.trace.program_facts import EvaluationFacts, ModelCallFacts, ProgramFacts, PromptFacts, StepFacts
from stepscope.whatif import Change
from stepscope.whatif.changes import scaled_cause, scaled_operators
from tests.unit.recording import Recording
from tests.unit.run_folders import made_run, recording

US = 1_000
PAGE = 4_096
STEPS = 4


def recorded_with_faults(
    *, warm_up: tuple[int, int] | None = (600 * US, 0), fresh: bool = True, device: bool = False
) -> Trace:
    """Steps of 1000 us: a loop of 600 us that takes 200 pages, and 400 us that take 10 pages, again the same ones.

    210 pages are mapped in a step, in which the operating system takes 1.5 us for each.

    Args:
        warm_up: time and mapped pages before the recording.
        fresh: whether the loop's pages are other ones in every step.
    """
    process = {} if warm_up is None else {"warm_up_ns": warm_up[0], "warm_up_faults": warm_up[1]}
    facts: dict[str, Any] = {"duration_ns": 1000 * US, "minor_faults": 210, "thread_system_ns": 315 * US}
    steps = tuple(StepFacts(index=number, **facts) for number in range(STEPS))
    recording = Recording(Metadata(program=ProgramFacts(steps=steps, process=process)))
    for number in range(STEPS):
        begin = 1000 * US * number
        recording.step(begin, 1000 * US, number)
        recording.operator(begin, 600 * US, "aten::zeros")
        recording.operator(begin + 600 * US, 400 * US, "aten::mm")
        address = PAGE * (100 + (200 * number if fresh else 0))
        recording.allocation(begin + 10 * US, 200 * PAGE, device="cpu", address=address)
        recording.allocation(begin + 610 * US, 10 * PAGE, device="cpu", address=0)
        if device:
            recording.launched(begin + 10 * US, begin + 20 * US, 900 * US, "gemm", number + 1)
    return recording.trace()


def without_loop(view: View) -> Change:
    """No operators of the loop."""
    return scaled_operators(np.flatnonzero((view.trace.operators["name"] == "aten::zeros").to_numpy()), 0.0)


def test_a_saving_is_taken_without_the_pages_that_only_the_recording_mapped() -> None:
    view = View(recorded_with_faults())

    # 810 of 840 mapped pages are new ones: 800 of the loop's at 1.5 us, 300 us of its 600 us in each step, and in the
    # first step 10 pages of the rest. What remains are 4 * 700 - 15 us, of which the loop is 4 * 300 us.
    left = 1 - 4 * 300 / (4 * 700 - 15)
    assert view.saved_ns(without_loop(view)) == round((1 - left) * 1000 * US)


def test_pages_that_other_steps_map_too_stay() -> None:
    view = View(recorded_with_faults(warm_up=(1000 * US, 105)))

    # Half of the 840 pages: of 810 new ones 420 / 810 count, so that the loop keeps 600 us - 200 * 420 / 810 * 1.5 us.
    loop = 600 - 200 * (420 / 810) * 1.5
    step = loop + 400 - 10 * (420 / 810) * 1.5 / STEPS
    assert view.saved_ns(without_loop(view)) == pytest.approx(loop / step * 1000 * US, abs=2)


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param(recorded_with_faults(warm_up=None), id="nothing was counted before"),
        pytest.param(recorded_with_faults(warm_up=(1000 * US, 210)), id="other steps map as many"),
        pytest.param(recorded_with_faults(warm_up=(50 * US, 0)), id="no step before"),
        pytest.param(recorded_with_faults(device=True), id="with a device"),
        pytest.param(Trace.from_tables({}), id="empty"),
    ],
)
def test_otherwise_savings_are_replayed_as_recorded(trace: Trace) -> None:
    view = View(trace)

    assert without_recorded_faults(view.experiment) is None


def test_memory_that_is_used_again_maps_no_page() -> None:
    view = View(recorded_with_faults(fresh=False))

    # Only the first step's 210 pages are new: 300 us of its loop, and 15 us of the rest.
    assert view.saved_ns(without_loop(view)) == round((4 * 600 - 300) / (4000 - 315) * 1000 * US)


def test_faults_before_the_recording_are_those_of_a_step() -> None:
    program = ProgramFacts(process={"warm_up_ns": 2100, "warm_up_faults": 50})

    assert faults_before(Metadata(program=program), 1000) == 25
    assert faults_before(Metadata(program=program), 1e6) is None
    assert faults_before(Metadata(), 1000) is None
    others = UnrecordedSteps(20, 900, 1000, 900, 7)
    assert faults_before(Metadata(program=program, unrecorded=others), 1000) == 7  # counted in many steps


def test_bytes_that_no_block_had_before() -> None:
    addresses, sizes = np.array([0, 50, 0, 300, 0, 500]), np.array([100, 100, 150, 100, 500, 10])

    assert fresh_bytes(addresses, sizes).tolist() == [100, 50, 0, 100, 250, 10]
    assert fresh_bytes(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


def test_pages_take_all_the_time_in_the_operating_system_that_recorded_steps_are_slower() -> None:
    """Huge pages take longer than FAULT_NS each."""
    trace = recorded_with_faults()
    program = trace.metadata.program
    assert program is not None
    steps = tuple(
        msgspec.structs.replace(each, thread_processor_ns=1000 * US, thread_system_ns=600 * US)
        for each in program.steps
    )
    metadata = replace(trace.metadata, program=msgspec.structs.replace(program, steps=steps))
    others = UnrecordedSteps(20, 500 * US, 1000 * US, 500 * US, 0)
    known = View(replace(trace, metadata=replace(metadata, unrecorded=others)))
    change = without_recorded_faults(known.experiment)

    assert change is not None
    graph = change(known.experiment, known.experiment.graph)
    assert known.experiment.run(graph).step_ns == pytest.approx(500 * US, rel=0.1)


SMALL = 100


def recorded(
    unrecorded: UnrecordedSteps | None,
    *,
    waits: int = 0,
    device: bool = False,
    lines: bool = False,
    **program: Any,
) -> Trace:
    """Steps of 1000 us: 100 operators of 3 us with 3 us between them, and one of 400 us.

    Args:
        waits: time in which each step's thread waited for a processor, of the 1000 us.
    """
    facts = {"thread_processor_ns": 1000 * US - waits, "thread_waiting_ns": waits}
    steps = tuple(StepFacts(index=number, duration_ns=1000 * US, **facts) for number in range(STEPS))
    made = Recording(Metadata(program=ProgramFacts(steps=steps, **program), unrecorded=unrecorded))
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
    # What other programs took of the step is in no saving.
    assert share_of_small(trace) == pytest.approx((300 - 50) / (1000 - 101) * works / (1000 * US), abs=2e-3)
    assert view.step_ns == 1000 * US  # the accounting stays as recorded


def test_what_operators_do_not_explain_slowed_python_if_lines_were_recorded() -> None:
    slower = UnrecordedSteps(20, 400 * US, 1000 * US, 700 * US)
    even = share_of_small(recorded(slower))
    python = share_of_small(recorded(slower, lines=True))

    cost = 1.5 * OPERATOR_NS / US  # of an operator; the rest of the 300 us slowed what is outside of operators
    assert python == pytest.approx((300 - SMALL * cost / 2) / 700, abs=5e-3)
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
    later = {"seen": 60, "steps": 3, "every": 16.0}
    run.write_recording(0, recording([4, 5, 9], [10, 11, 15], trace=trace.name) | {"evaluations": later})
    assert with_unrecorded_steps(program, trace).metadata.program.evaluations == EvaluationFacts(**later)
    run.write_recording(0, recording([4, 5, 9], [10, 11, 15], trace=trace.name) | {"evaluations": {"seen": "many"}})
    assert with_unrecorded_steps(program, trace).metadata.program.evaluations is None
    seen = ProgramFacts(model_calls=ModelCallFacts(files=("engine.py",), calls=((1, 1, 1, 9),)))
    serving = Trace.from_tables({}, Metadata(program=seen))
    calls = {"calls": {"calls": [[1, 1, 1, 9], [2, 1, 0, 1]]}, "prompts": {"calls": 1, "tokens": 9}}
    run.write_recording(0, recording([4, 5, 9], [10, 11, 15], trace=trace.name) | {"model_calls": calls})
    served = with_unrecorded_steps(serving, trace).metadata.program
    assert served.model_calls == ModelCallFacts(files=("engine.py",), calls=((1, 1, 1, 9), (2, 1, 0, 1)))
    assert served.prompts == PromptFacts(calls=1, tokens=9)
    run.write_recording(0, recording([4, 5, 9], [10, 11, 15], trace=trace.name) | {"model_calls": {"calls": 7}})
    assert with_unrecorded_steps(serving, trace).metadata.program == seen
    for other in (trace.with_name("trace-2.json.gz"), tmp_path / "rank0" / trace.name):
        assert with_unrecorded_steps(program, other) is program
    assert with_unrecorded_steps(replace(program, metadata=Metadata()), trace).metadata.unrecorded is None


@pytest.mark.parametrize("times", [None, 7, [], [{"first_step": 9, "recorded": False, "ns": [1, 2, 3]}]])
def test_too_few_steps_of_a_kind_say_nothing(times: Any) -> None:
    assert unrecorded_steps(times) is None


def busy(waits: int = 500 * US, **process: Any) -> Trace:
    """Steps of which other programs take so much."""
    process = {"usable_processors": 2, "other_cores": 1.5} | process
    return recorded(None, waits=waits, process=process)


def test_what_other_programs_take_is_said_once_and_in_no_saving() -> None:
    diagnosis = diagnose(busy())
    record = json_report(TraceReport(diagnosis))["contention"]

    assert diagnosis.contention == Contention(0.5, 500 * US, False, 1.5, 2)
    assert diagnosis.calm_step_ns == 500 * US
    assert exceptional_sentences(diagnosis)[0] == record["sentence"]
    assert "1.5 of 2 processors" in record["sentence"]
    assert (record["share"], record["calm_step_ns"]) == (0.5, 500 * US)
    assert share_of_small(busy()) == pytest.approx(0.15)
    assert sum(finding.saving_share for finding in diagnosis.findings) < 1


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param(busy(waits=99 * US), id="too little"),
        pytest.param(recorded(None), id="not waited"),
        pytest.param(busy(other_cores=0.1), id="others used less than the thread did not get"),
        pytest.param(busy(local_world_size=2), id="ranks contend"),
        pytest.param(busy(usable_processors=0), id="threads contend"),
        pytest.param(Trace.from_tables({}), id="empty"),
    ],
)
def test_what_the_program_does_itself_is_no_state_of_the_recording(trace: Trace) -> None:
    program = trace.metadata.program
    if program is not None and program.process_figure("usable_processors") == 0:
        trace = replace(
            trace, metadata=replace(trace.metadata, program=msgspec.structs.replace(program, torch={"threads": 2}))
        )

    assert View(trace).contention is None


def saving_of(view: View, confidence: Confidence, *, replayed: bool, cause: str = "dispatch") -> Finding:
    """What a rule promises that finds 800 us of each step."""

    def check(view: View, limits: Limits) -> Answers:
        change = scaled_cause(cause, 0.0) if replayed else None
        yield Found("it", 800 * US * STEPS, "time counted", confidence, Remedy(""), change=change)

    rule = Rule("zero-grad", "It", {"share": Threshold(0.1, "share", "of the {period}")}, check)
    return rule.ask(view).findings[0]


def test_confidence_falls_with_what_could_not_be_taken_out() -> None:
    calm, disturbed = View(recorded(None)), View(busy())

    assert saving_of(calm, "high", replayed=True).confidence == "high"
    counted, attributed = (saving_of(disturbed, "high", replayed=each) for each in (True, False))
    assert counted.confidence == "medium"
    assert counted.saving_ns_per_step == pytest.approx(350 * US)  # half of the 700 us in operators
    assert attributed.confidence == "medium"
    assert attributed.saving_ns_per_step == 500 * US  # no more than others left of the step
    assert saving_of(disturbed, "medium", replayed=False).confidence == "low"


def test_a_saving_below_the_time_that_was_counted_says_why() -> None:
    finding = saving_of(View(recorded(None)), "high", replayed=True, cause="untraced")

    assert finding.saving_ns_per_step == 300 * US
    assert finding.saving_basis != "time counted"


def test_a_comparison_names_the_side_whose_machine_was_busy_before_anything_else() -> None:
    disturbed = compare_traces([busy()], [recorded(None)])
    first = text_of(comparison_document([disturbed]), width=100).split("What the difference")[0]
    assert [sentence.split(":")[0] for sentence in disturbed.disturbed] == ["The machine was busy before"]
    assert "50%" in disturbed.disturbed[0]
    assert " ".join(disturbed.disturbed[0].split()) in " ".join(first.split())
    assert compare_traces([recorded(None)], [recorded(None)]).disturbed == ()


def test_a_file_that_is_cut_off_is_said_first() -> None:
    whole = recorded(None)
    cut = replace(whole, warnings=(TraceWarning("truncated", 1, "the file is truncated"),))
    packed = replace(whole, warnings=(TraceWarning("compressed_data:ends early", 1, "it ends early"),))
    for trace in (cut, packed):
        diagnosis = diagnose(trace)
        assert "cut off" in exceptional_sentences(diagnosis)[0]
        assert not headline(diagnosis).startswith("No device was recorded")
    assert headline(diagnose(whole)).startswith("No device was recorded")
    assert not any("cut off" in sentence for sentence in exceptional_sentences(diagnose(whole)))
