"""A trace of which only a part was read is diagnosed as that part."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.analysis.host import host_time
from stepscope.analysis.steps import step_table
from stepscope.commands import main
from stepscope.diagnosis import diagnose
from stepscope.trace import Metadata, Trace, TraceWarning, Window
from tests.simulator import Machine
from tests.simulator.kineto import write_kineto
from tests.unit.recording import Recording


def three_steps(window: Window | None) -> Trace:
    """Steps of 1000 ns with an operator in each, as if `window` had been read."""
    recording = Recording()
    for number in range(3):
        recording.step(1000 * number, 1000, number)
        recording.operator(1000 * number + 100, 800, "aten::mm")
    trace = recording.trace()
    return replace(trace, metadata=replace(trace.metadata, window=window))


@pytest.mark.parametrize(
    ("window", "complete"),
    [
        (None, [True, True, True]),
        (Window(1000, 2000), [False, True, False]),
        (Window(500, 2**62), [False, True, True]),
        (Window(1100, 1900), [False, False, False]),
    ],
)
def test_a_step_is_complete_where_all_of_it_was_read(window: Window | None, complete: list[bool]) -> None:
    assert step_table(three_steps(window))["complete"].to_list() == complete


@pytest.mark.parametrize("window", [Window(1000, 2000), Window(1100, 1900), Window(2500, 2**62)])
def test_host_time_is_that_of_the_window(window: Window) -> None:
    trace = three_steps(window)
    expected = min(window.end_ns, 3000) - window.start_ns
    assert host_time(trace)["duration_ns"].sum() == expected
    assert diagnose(trace).host["ns"].sum() == expected


def test_a_window_without_a_whole_step_has_no_steps_and_says_so() -> None:
    diagnosis = diagnose(three_steps(Window(1100, 1900)))
    assert (diagnosis.step_source, diagnosis.step_ns, diagnosis.step_count) == ("none", 800, 1)
    assert "How long is a step?" in [question.question for question in diagnosis.not_answered]


@pytest.mark.parametrize("kind", ["truncated", "compressed_data"])
def test_what_was_cut_off_is_asked_about(kind: str) -> None:
    warning = TraceWarning(kind, 1, "the file ends early")
    questions = diagnose(Trace.from_tables({}, Metadata(), (warning,))).not_answered
    asked = [(one.question, one.why) for one in questions if "missing" in one.question]
    assert asked == [("What was in the missing part of the file, such as the work of a device?", "the file ends early")]


def without_marks(folder: Path) -> str:
    """Eight times the same three kernels, 100 us apart, in a file."""
    machine = Machine()
    host, queue = machine.host("main"), machine.queue()
    for _ in range(8):
        for name in ("first", "second", "third"):
            host.launch(name, queue, 5_000)
        host.work(100_000)
    return str(write_kineto(machine, folder / "trace.json"))


def test_steps_that_are_inferred_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = without_marks(tmp_path)
    assert main(["steps", path, "--no-cache", "--format", "json"]) == 0
    steps = json.loads(capsys.readouterr().out)
    assert [step["index"] for step in steps] == list(range(len(steps)))
    assert len(steps) >= 6
    query = "select name from device_work"
    assert main(["query", path, query, "--steps", "2:3", "--no-cache", "--format", "json"]) == 0
    read = [work["name"] for work in json.loads(capsys.readouterr().out)]
    assert read[:6] == ["first", "second", "third"] * 2  # and what was launched then and ran later
    assert len(read) < 12
    assert main(["diagnose", path, "--steps", "50", "--no-cache"]) == 2
    assert "the inferred steps are 0 to" in capsys.readouterr().err


def test_without_steps_of_any_kind_a_window_is_advised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine()
    machine.host("main").launch("once", machine.queue(), 5_000)
    path = str(write_kineto(machine, tmp_path / "trace.json"))
    assert main(["diagnose", path, "--steps", "1", "--no-cache"]) == 2
    assert capsys.readouterr().err == (
        "stepscope: nothing marks steps in this trace, and nothing repeats: use a time window instead\n"
    )
