"""A trace of which only a part was read is diagnosed as that part."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.analysis.host import host_time
from stepscope.analysis.steps import step_table
from stepscope.commands import main
from stepscope.commands.read import diagnose as command
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


def with_steps(folder: Path, count: int, *, marked: bool) -> Path:
    """Steps of 1 ms with ten operators in each, marked or not, in a file."""
    recording = Recording()
    for number in range(count):
        if marked:
            recording.step(1_000_000 * number, 1_000_000, number)
        for operator in range(10):
            recording.operator(1_000_000 * number + 90_000 * operator, 80_000, f"aten::op{operator}")
    recording.trace().save(folder / "trace")
    return folder / "trace"


def diagnosed(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict[str, Any], str]:
    assert main(["diagnose", str(path), "--json", "-", *options]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_of_a_trace_that_is_too_large_the_steps_in_the_middle_are_diagnosed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = with_steps(tmp_path, 100, marked=True)  # 1,100 rows
    monkeypatch.setattr(command, "MOST_ROWS", 110)
    report, err = diagnosed(path, capsys)
    assert [step["index"] for step in report["steps"]["list"]] == list(range(45, 55))
    assert all(step["complete"] for step in report["steps"]["list"])
    assert [each["kind"] for each in report["trace"]["warnings"]] == ["middle_of_the_trace"]
    assert "steps 45 to 54 of its 100" in report["trace"]["warnings"][0]["detail"]
    assert report["trace"]["warnings"][0]["detail"] in err

    alone, _ = diagnosed(path, capsys, "--steps", "45:54")
    assert {**report, "trace": None} == {**alone, "trace": None}

    whole, err = diagnosed(path, capsys, "--window", "0:")
    assert (len(whole["steps"]["list"]), whole["trace"]["warnings"], err) == (100, [], "")


def test_without_marks_it_is_the_middle_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "MOST_ROWS", 500)
    report, err = diagnosed(with_steps(tmp_path, 100, marked=False), capsys)
    assert report["trace"]["window"] == {"start_ns": 24_972_500, "end_ns": 74_917_500}  # of 99,890,000 ns
    assert "0.0499 of its 0.0999 s" in err


@pytest.mark.parametrize("most", [1_100, 10**9])
def test_a_trace_that_is_small_enough_is_taken_as_a_whole(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "MOST_ROWS", most)
    report, err = diagnosed(with_steps(tmp_path, 100, marked=True), capsys)
    assert (len(report["steps"]["list"]), report["trace"]["warnings"], err) == (100, [], "")
