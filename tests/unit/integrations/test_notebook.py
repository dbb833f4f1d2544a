"""Notebooks: magics in a real shell of IPython, and the messages between the page's widget and the kernel."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import stepscope
from stepscope.trace import Trace
from tests.unit.recording import Recording

ipython = pytest.importorskip("IPython", reason="IPython is not installed")


def trace_of(file: str = "train.py") -> Trace:
    """Two steps of 100 us, of which the line 4 of a file takes 30 us."""
    recording = Recording(unit_ns=1000)
    for step in range(2):
        recording.step(100 * step, 100, step)
        recording.operator(100 * step + 10, 20, "aten::mm")
        recording.line(100 * step + 5, 30, f"{file}(4): train")
        recording.line(100 * step + 35, 60, f"{file}(9): other")
    return recording.trace()


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_line_magic("load_ext", "stepscope")
    yield shell
    InteractiveShell.clear_instance()


class RecordedTrace:
    """In place of a cell's recording: a trace that is there already."""

    name = "kept"
    is_cancelled = False
    steps = 0

    def __init__(self, options: Any) -> None:
        type(self).steps = options.steps

    def end(self, files: dict[str, str], number: int | None) -> Trace:
        return trace_of(f"cell {number}")

    def cancel(self) -> None:
        type(self).is_cancelled = True


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[RecordedTrace]:
    class Own(RecordedTrace):
        pass

    monkeypatch.setattr("stepscope.integrations.magics._CellRecording", Own)
    return Own


def test_a_recorded_cell_runs_as_any_other_and_shows_its_diagnosis(
    shell: Any, recorded: type[RecordedTrace], capsys: pytest.CaptureFixture[str]
) -> None:
    result = shell.run_cell("%%stepscope kept --steps 7\ndef train():\n    value = 3\n    return value\ntrain()", True)

    assert result.result == 3
    assert recorded.steps == 7
    assert "a step takes 100.0 us" in capsys.readouterr().out
    assert isinstance(shell.user_ns["kept"], Trace)

    # its lines are those of the cell as it is written
    shell.run_line_magic("stepscope_lines", "train")
    out = capsys.readouterr().out
    assert "30.0 us of 100.0 us per step (30.0 %)" in out
    assert [line.split() for line in out.splitlines() if "return value" in line] == [
        ["4", "30.0", "us", "30.0", "%", "return", "value"]
    ]


def test_an_error_of_the_cell_is_that_of_the_cell(
    shell: Any, recorded: type[RecordedTrace], capsys: pytest.CaptureFixture[str]
) -> None:
    result = shell.run_cell("%%stepscope\n\n1 / 0", True)

    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert traceback.extract_tb(result.error_in_exec.__traceback__)[-1].lineno == 3
    assert recorded.is_cancelled
    out = capsys.readouterr().out
    assert "ZeroDivisionError" in out
    assert "stepscope:" not in out


@pytest.mark.parametrize(
    "line",
    [
        "%%stepscope --stpes 3",
        "%%stepscope 3x",
        "%%stepscope --steps 0",
        "%%stepscope class",
        "%%stepscope --out /no/folder/x",
    ],
)
def test_a_wrong_option_is_said_and_the_cell_runs(shell: Any, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.run_cell(f"{line}\n3 + 4", True).result == 7
    assert "stepscope: the cell is not recorded: " in capsys.readouterr().err


def test_an_error_of_ours_does_not_stop_the_cell(
    shell: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr("stepscope.integrations.magics._CellRecording.__init__", fail)

    assert shell.run_cell("%%stepscope\n3 + 4", True).result == 7
    assert "KeyError" in capsys.readouterr().err
    assert shell.run_cell("5", True).result == 5
    shell.run_line_magic("stepscope_lines", "len")
    assert "nothing was recorded yet" in capsys.readouterr().err


def test_a_reloaded_extension_records_once(
    shell: Any, recorded: type[RecordedTrace], capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_line_magic("unload_ext", "stepscope")
    assert shell.run_cell("6", True).result == 6
    shell.run_line_magic("load_ext", "stepscope")
    capsys.readouterr()

    shell.run_cell("%%stepscope\n7", True)

    assert capsys.readouterr().out.count("a step takes") == 1


def test_a_cell_that_a_recorded_one_runs_does_not_end_it(
    shell: Any, recorded: type[RecordedTrace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.diagnose", lambda trace: "diagnosed")
    shell.run_cell("%%stepscope kept\nfor each in ('1', ''):\n    get_ipython().run_cell(each)", True)
    assert shell.user_ns.pop("kept").lines["file"][0] == "cell 1"
    assert not recorded.is_cancelled
    shell.run_cell("%%stepscope\nget_ipython().run_cell('%%stepscope kept\\n1')", True)
    assert ("kept" in shell.user_ns, recorded.is_cancelled) == (True, True)


def test_after_an_interrupt_of_ours_the_next_cell_is_recorded() -> None:
    from stepscope.integrations.magics import _CellRecording

    def interrupted(problem: str) -> None:
        raise KeyboardInterrupt

    recording: Any = object.__new__(_CellRecording)
    recording._controller, taken = SimpleNamespace(finish=interrupted), list[str]()
    recording._take_off = lambda: taken.append("off")
    with pytest.raises(KeyboardInterrupt):
        recording.end({}, 1)
    assert taken == ["off"]


def test_names_of_cells_replace_their_files_wherever_they_are() -> None:
    from stepscope.integrations.magics import _CellNames

    named = _CellNames({"/tmp/ipykernel_7/1.py": "cell 3"}).redact(trace_of("/tmp/ipykernel_7/1.py"))

    assert set(named.lines["file"]) == {"cell 3"}
    assert set(named.lines["name"]) == {"cell 3(4): train", "cell 3(9): other"}
    named.check()


def test_the_widget_answers_with_the_page_and_with_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("anywidget", reason="anywidget is not installed")
    sent: list[dict[str, Any]] = []
    widget = trace_of().view(500)
    monkeypatch.setattr(type(widget), "send", lambda self, content: sent.append(content))

    widget._answer(widget, {"view": "1-2"}, [])
    for number, address in enumerate(("session", "diagnosis", "steps", "no-such", "timeline?start=x")):
        widget._answer(widget, {"view": "1-2", "ask": number, "address": address}, [])

    odd: list[Any] = [None, {}, {"view": 1}, [], "x"]
    for message in odd:
        widget._answer(widget, message, [])
    page, session, diagnosis, steps, *wrong = sent
    assert "Content-Security-Policy" in page["page"]
    assert json.loads(session["body"])["documents"]
    assert json.loads(diagnosis["body"])["steps"]["step_ns"] == 100_000
    assert len(json.loads(steps["body"])) == 2
    assert [each["status"] for each in wrong] == [404, 422]
    assert {each["view"] for each in sent} == {"1-2"}
    assert widget.height == 500
    assert len(json.dumps(widget.get_state(), default=str)) < 6_000  # what a notebook may save


def test_without_anywidget_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from stepscope.integrations import notebook

    notebook._widget_class.cache_clear()
    monkeypatch.setitem(sys.modules, "anywidget", None)

    with pytest.raises(stepscope.StepscopeError, match=r"stepscope\[notebook\]"):
        trace_of().view()
