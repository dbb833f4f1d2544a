"""What a notebook shows of a diagnosis: static, with the numbers of the reports, and no name is markup."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import stepscope
from stepscope.trace import Trace
from tests.unit.hand_built import INPUT_BOUND, empty, full
from tests.unit.recording import Recording

HOSTILE = "</b><script>alert(1)</script>\u202e"


def shown(page: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def test_the_first_screen_of_a_diagnosis() -> None:
    page = full()._repr_html_()
    text = shown(page)

    assert "The device waits 40.0 ms a step for the DataLoader" in text
    assert "saves 40.0 ms of 120.3 ms per step (33.2 %)" in text
    assert "/home/jane doe/project/train.py:88" in text
    assert "dataset, num_workers=8" in text
    widths = [float(width) for width in re.findall(r"display:block;width:([\d.]+)%", page)]
    assert 99 < sum(widths) < 101
    assert "<script" not in page
    assert "<style" not in page
    assert len(page) < 20_000


def test_an_empty_diagnosis_says_so() -> None:
    assert "Nothing was found that would save a noticeable part of the recording." in shown(empty()._repr_html_())


def test_no_name_is_markup() -> None:
    finding = replace(INPUT_BOUND, title=HOSTILE, remedy=replace(INPUT_BOUND.remedy, text=HOSTILE, code=HOSTILE))
    page = full(findings=(finding,) * 5)._repr_html_()

    assert "<script" not in page
    assert "\u202e" not in page
    assert page.count("&lt;script&gt;") == 3 * 3 + 2


def hostile_trace() -> Trace:
    """Steps with a device and memory, whose names are markup."""
    recording = Recording(unit_ns=1000)
    device = recording.allocator()
    for step in range(3):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.operator(begin + 100, 800, HOSTILE)
        recording.launched(begin + 120, begin + 200, 300, HOSTILE, step)
        recording.block(begin + 130, begin + 150, 4096, device)
    return recording.trace()


@pytest.mark.parametrize(
    "ask",
    [
        lambda trace: trace,
        stepscope.diagnose,
        lambda trace: trace.what_if(),
        lambda trace: trace.what_if(scale=["*=0.5"], launch_overhead="1us", curve="operators"),
        lambda trace: trace.predict("H100-SXM,L4"),
        lambda trace: trace.memory_use(),
        lambda trace: stepscope.compare_traces(trace, [trace, trace]),
    ],
)
def test_an_answer_is_three_lines_and_a_small_screen(ask: Callable[[Trace], Any]) -> None:
    answer = ask(hostile_trace())

    assert 1 <= len(repr(answer).splitlines()) <= 3
    assert len(repr(answer)) < 3 * 310
    page = answer._repr_html_()
    assert 100 < len(page) < 8_000
    for markup in ("<script", "<style", "<img", "\u202e"):
        assert markup not in page
    assert "\u202e" not in repr(answer)


def test_a_finding_names_its_saving_and_its_place() -> None:
    [title, place, remedy] = repr(INPUT_BOUND).splitlines()

    assert title.endswith("saves 40.0 ms (33.2 %)")
    assert place.startswith("/home/jane doe/project/train.py:88; ")
    assert remedy == INPUT_BOUND.remedy.text
    assert "saves 40.0 ms (33.2 %)" in shown(INPUT_BOUND._repr_html_())


def test_a_cell_is_named_as_the_notebook_counts_it() -> None:
    finding = replace(INPUT_BOUND, where=(replace(INPUT_BOUND.where[0], file="cell 3", line=4),))

    assert repr(finding).splitlines()[1] == "cell 3, line 4"
    assert "<code>cell 3, line 4</code>" in full(findings=(finding,))._repr_html_()


def test_answers_are_those_of_the_commands() -> None:
    trace = hostile_trace()

    halved = trace.what_if(scale="*=0.5")
    assert halved.together is not None
    assert halved.together.saving_ns > 0
    assert [each.device.name for each in trace.predict("L4").predictions] == ["L4"]
    assert trace.memory_use("0").memory.peak_bytes == 4096
    for wrong in (
        lambda: trace.what_if(remove="nothing"),
        lambda: trace.what_if(steps="1:2"),
        lambda: trace.predict("no such device"),
        lambda: trace.predict("L4", devices="1,2"),
        lambda: trace.memory_use("7"),
    ):
        with pytest.raises(stepscope.StepscopeError):
            wrong()
