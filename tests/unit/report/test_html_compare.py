"""The page of a comparison: both steps on one scale, the causes, the tables, and nothing of a trace as markup."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stepscope.analysis.picture import StepPicture
from stepscope.commands import main
from stepscope.commands.read.compare import compared_picture
from stepscope.compare import Comparison, Side, compare_sides, compare_traces
from stepscope.report.comparison import comparison_document
from stepscope.report.html import html_of
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
from tests.unit.recording import Recording
from tests.unit.small_traces import complete

HOSTILE = "<script>alert(1)</script>&\u202e"
INPUT = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def training(*, load_ns: int, steps: int = 4, device: bool = True, name: str = "") -> Trace:
    """Steps one after the other: a batch is loaded, then something is computed for 100 ns."""
    metadata = Metadata(devices=(Device("0", name),)) if device else Metadata()
    recording = Recording(metadata)
    time = 1000
    for number in range(steps):
        begin = time
        recording.annotation(time, load_ns, INPUT)
        time += load_ns
        recording.operator(time, 10 if device else 110, f"aten::mm{name}")
        if device:
            recording.launched(time + 2, time + 10, 100, f"gemm{name}", number + 1)
        time += 120
        recording.step(begin, time - begin, number)
    return recording.trace()


def page_of(*comparisons: Comparison) -> str:
    pictures = [(compared_picture(each.before.trace), compared_picture(each.after.trace)) for each in comparisons]
    return html_of(comparison_document(comparisons, pictures), top=20).decode()


def drawn(page: str) -> list[dict[str, Any]]:
    return [
        json.loads(text)
        for text in re.findall(r'<script type="application/json" id="c\d+-\w+-data">(.*?)</script>', page)
    ]


def test_nothing_recorded_on_either_side() -> None:
    page = page_of(compare_traces(Trace.from_tables({}), Trace.from_tables({})))

    assert page.count("Nothing was recorded in this step.") == 2
    assert page.count("the whole recording: no steps were found") == 2
    assert [each["duration"] for each in drawn(page)] == [1, 1]


def test_without_a_comparison_there_is_no_page() -> None:
    with pytest.raises(ValueError, match="at least one comparison"):
        comparison_document([], [])
    comparison = compare_traces(training(load_ns=10), training(load_ns=20))
    with pytest.raises(ValueError, match="longer"):
        comparison_document([comparison], [(None, None)] * 2)


def test_both_steps_are_drawn_on_the_scale_of_the_longer_one() -> None:
    page = page_of(compare_traces(training(load_ns=900), training(load_ns=100)))

    before, after = drawn(page)
    assert [(each["duration"], each["scale"]) for each in (before, after)] == [(1020, 1020), (220, 1020)]
    assert page.count('data-together="c0"') == 2
    assert [before["names"][gap[3]] for gap in before["gaps"]].count("input") == 1


def test_without_a_device_the_causes_are_the_main_threads() -> None:
    page = page_of(compare_traces(training(load_ns=900, device=False), training(load_ns=100, device=False)))

    before, after = drawn(page)
    assert (before["devices"], after["devices"]) == ([""], [""])
    assert sum(gap[2] for gap in before["gaps"] if before["names"][gap[3]] == "input") == 900
    assert "Time by cause" in page
    assert "What the main thread did, in a mean step." in page


def test_a_device_on_one_side_only() -> None:
    page = page_of(compare_traces(training(load_ns=900), training(load_ns=100, device=False)))

    causes = page.split('id="c0-causes"')[1].split("</section>")[0]
    assert "without a device, what the main thread did, in a mean step." in causes
    labels = re.findall(r'<td class="cause"><i[^>]*></i>(.*?)</td>', causes)
    ours = [label for label in labels if not label.startswith("idle: ")]
    assert sorted(ours) == ["computing", "host: computing", "host: input", "host: untraced"]
    assert "idle: input" in labels


def test_the_causes_stand_as_bars_on_one_scale_and_as_differences() -> None:
    page = page_of(compare_traces(training(load_ns=900), training(load_ns=100)))

    causes = page.split('id="c0-causes"')[1].split("</section>")[0]
    cells = [re.sub(r"<[^>]*>", "", cell).strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", causes, re.DOTALL)]
    rows = [cells[at : at + 7] for at in range(0, len(cells), 7)]
    assert rows[0] == ["idle: input", "the host was loading data", "900 ns", "100 ns", "−800 ns", "", "−78.4 %"]
    assert rows[-1] == ["The step", "", "1.0 us", "220 ns", "−800 ns", "", "−78.4 %"]
    assert "Before: computing 100 ns; idle: input 900 ns" in causes


def test_several_sides_have_an_overview_and_a_part_each() -> None:
    sides = [
        Side(name, [training(load_ns=load)]) for name, load in (("runs/base", 900), ("runs/a", 500), ("runs/b", 100))
    ]
    page = page_of(*compare_sides(sides[0], sides[1:]))

    assert "<h1>2 runs beside base</h1>" in page
    assert re.findall(r"<h1>(.*?→.*?)</h1>", page) == ["base → a", "base → b"]
    assert [each["scale"] for each in drawn(page)] == [1020] * 4
    assert re.findall(r'data-together="(c\d)"', page) == ["c0", "c0", "c1", "c1"]


def test_a_side_that_is_not_drawn_leaves_the_other() -> None:
    comparison = compare_traces(training(load_ns=900), training(load_ns=100))
    picture: StepPicture = compared_picture(comparison.after.trace)
    page = html_of(comparison_document([comparison], [(None, picture)]), top=20).decode()

    (after,) = drawn(page)
    assert (after["duration"], after["scale"]) == (220, 220)


def test_no_name_is_ever_markup() -> None:
    sides = [
        Side(HOSTILE, [training(load_ns=900, name=HOSTILE)], {HOSTILE: HOSTILE}),
        Side("after", [training(load_ns=9)]),
    ]
    (comparison,) = compare_sides(sides[0], sides[1:])
    page = page_of(comparison)

    assert "<script>alert" not in page
    assert "\u202e" not in page
    assert page.count("<script") == 3  # two pictures' data, and the page's own
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;\\u202e" in page


def test_the_page_asks_the_network_for_nothing() -> None:
    page = page_of(compare_traces(training(load_ns=900), training(load_ns=100)))

    assert "default-src 'none'" in page
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", page)


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two files of three steps, in which a frame names a folder of alice's."""
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path / "cache"))
    paths = []
    for name, length_us in (("slow", 200), ("fast", 100)):
        events = [
            event
            for number in range(3)
            for event in (
                complete(f"ProfilerStep#{number}", "user_annotation", length_us * number, length_us),
                complete("/home/alice/secret/train.py(3): f", "python_function", length_us * number + 1, 50),
                complete("aten::mm", "cpu_op", length_us * number + 5, 20),
            )
        ]
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps({"traceEvents": events}))
    return list(map(str, paths))


def test_the_command_writes_the_page(traces: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *traces, "--html", str(tmp_path / "page.html")]) == 0
    assert "Faster: " in capsys.readouterr().out
    page = (tmp_path / "page.html").read_text()
    assert [(each["duration"], each["scale"]) for each in drawn(page)] == [(200_000, 200_000), (100_000, 200_000)]
    assert "/home/alice/secret/train.py" in page

    assert main(["compare", *traces, "--html", "-", "--redact"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("<!doctype html>")
    assert "train.py(3): f" in page
    assert "alice" not in page
    assert "secret" not in page


def test_only_one_report_goes_to_standard_output(traces: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *traces, "--html", "-", "--json", "-"]) == 2
    assert capsys.readouterr().err == "stepscope: only one report can go to standard output\n"
