"""The further views of the page in a real browser: what they show is what the commands print, and they can be used."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from stepscope.record.watch_log import Watched, WatchLog
from stepscope.report.format import duration, size
from tests.browser import CHROMIUM, Browser
from tests.e2e.conftest import BATCHED, PER_TOKEN, TIMEOUT_S, environment, run_here
from tests.page import Page, served
from tests.simulator.ranks import write_ranks

RANK_ROWS: Final = "document.querySelector('tbody')?.querySelectorAll('tr:not(.space)').length"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser, google-chrome or chrome on the PATH"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser") / "profile")
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def sample() -> Iterator[str]:
    with served(PER_TOKEN) as address:
        yield address


@pytest.fixture
def page(browser: Browser, sample: str) -> Page:
    return Page(browser, sample)


def printed(*words: str) -> Any:
    """What a command writes as JSON."""
    return run_here(*words).json()


def row(page: Page, name: str) -> list[str]:
    """The cells of the row that begins with this name."""
    cells: list[str] = page.script(
        "[...([...document.querySelectorAll('tbody tr')].find(each => each.cells[0]?.innerText.trim() === "
        f"{json.dumps(name)})?.cells ?? [])].map(each => each.innerText.trim())"
    )
    return cells


def test_modules_are_those_of_the_command_and_can_be_chosen(page: Page) -> None:
    rows = printed("modules", str(PER_TOKEN), "--json", "-")["modules"]
    page.show("Modules")
    for each in rows[:3]:
        cells = row(page, each["name"])
        assert [duration(each[name]) for name in ("total_ns", "self_ns", "forward_ns", "backward_ns")] == cells[2:6]

    # When the icicle is used by keyboard alone
    page.script("document.querySelector('.icicle canvas').focus()")
    page.key("ArrowDown", "Enter")

    # Then it looks closer at a module, which is chosen
    assert page.parameters["module"] == "1"
    assert page.parameters["choose"] == f"module:{rows[1]['module']}"
    assert rows[1]["name"] in page.text(".way")
    page.key("Escape")
    assert page.parameters["module"] == "0"
    page.assert_silent()


def test_the_flame_graph_zooms_finds_and_is_a_table_as_well(page: Page) -> None:
    page.show("Flame graph")
    page.script("document.querySelector('.icicle canvas').focus()")
    page.key("ArrowDown", "ArrowDown", "Enter")
    assert len(page.texts(".way button")) == 4
    page.click(".way button", "All")
    assert "frame" not in page.parameters

    page.type("[data-filter]", "fill_")
    assert "of the time" in page.text("[role=status]")
    page.click("summary")
    total, _, itself = row(page, "aten::fill_")[1:4]
    assert total == itself  # it calls nothing
    page.assert_silent()


def test_memory_shows_what_is_alive_at_a_chosen_moment(page: Page) -> None:
    device = printed("memory", str(PER_TOKEN), "--format", "json")["devices"][0]
    page.show("Memory")
    assert size(device["peak"]["bytes"]) in page.text(".facts-list")
    assert "Alive at the peak" in page.text(".section h2")
    assert size(device["peak"]["bytes"]) in page.text(".section header")
    largest = page.texts("tbody tr:not(.space) td:first-child")

    # When the last moment is chosen by keyboard
    page.script("document.querySelector('.plot [tabindex]').focus()")
    page.key("End", "Enter")

    # Then other blocks are alive, and the address keeps the moment
    assert "Alive at" in page.text(".section h2")
    assert int(page.parameters["memory-at"]) > device["peak"]["start_ns"]
    assert page.texts("tbody tr:not(.space) td:first-child") != largest
    page.click("[aria-label='Divide by'] button", "by line")
    page.wait("document.querySelector('.plot-legend').innerText.includes('gpt2_training.py')")
    page.assert_silent()


def test_what_if_answers_as_the_command_does(page: Page) -> None:
    answer = printed("whatif", str(PER_TOKEN), "--remove", "loop-in-step", "--scale", "aten::mm=0.5", "--json", "-")
    page.show("What if")
    assert "as recorded" in page.text(".headline")

    # When a finding is ticked, and an operator is made faster
    page.click(".choice input")
    page.type(".add input", "aten::mm")
    page.click(".add button", "Add")
    page.wait("document.querySelector('.result').ariaBusy === 'false'")

    # Then the step, both paths and the line to type are those of the command
    assert page.parameters["remove"] == "loop-in-step"
    assert duration(answer["together"]["step_ns"]) in page.text(".headline")
    assert len(page.texts(".path-bar")) == 2
    assert row(page, "together")[1] == duration(answer["together"]["step_ns"])
    assert page.text(".result pre").endswith("--remove loop-in-step --scale aten::mm=0.5")
    assert answer["sentences"][-1]["texts"][-1] in page.text(".result")

    page.click("button", "Reset")
    assert "remove" not in page.parameters
    page.assert_silent()


def test_what_lies_in_the_future_is_what_the_commands_print(page: Page) -> None:
    predicted = printed("predict", str(PER_TOKEN), "--batch", "16", "--json", "-")
    page.show("Predict")
    page.script("location.hash += '&batch=16'")
    page.wait(
        f"document.querySelector('.answer').innerText.includes({duration(predicted['predictions'][0]['step_ns'])!r})"
    )
    assert [row(page, each["device"])[2] for each in predicted["predictions"]] == [
        duration(each["step_ns"]) for each in predicted["predictions"]
    ]

    planned = printed("plan", str(PER_TOKEN), "--iterations", "4e6", "--budget", "500", "--json", "-")
    page.script("location.hash = 'view=plan&iterations=4e6&budget=500'")
    page.wait(f"document.body.innerText.includes({json.dumps(planned['recommendation'][0])})")
    assert f"{len(planned['machines'])} machines" in page.text("main")

    page.script("location.hash = 'view=energy&cpu-watts=100&iterations=1e6'")
    page.wait("document.querySelector('.facts-list') !== null")
    assert "72.1 J" in page.text(".facts-list")
    page.assert_silent()


def test_sliders_choose_what_the_commands_take(page: Page) -> None:
    recorded = printed("predict", str(PER_TOKEN), "--json", "-")["recorded_batch"]
    page.show("Predict")
    page.wait("document.querySelector('.slider input[type=range]') !== null")

    # When the batch size is dragged to the largest, and the price of the recorded device is chosen
    drag = """(name, value) => {
        const box = [...document.querySelectorAll('.slider')].find(each => each.innerText.includes(name)).children[1];
        box.value = value ?? box.max;
        box.dispatchEvent(new Event('input', {bubbles: true}));
    }"""
    page.script(f"({drag})('Batch')")
    page.script(f"({drag})('US$', 9)")

    # Then both stand in the address and beside the sliders, and the answer follows
    assert page.parameters["batch"] == str(16 * recorded)
    assert page.script("document.querySelector('.slider input[type=text]').value") == str(16 * recorded)
    page.wait("[...document.querySelectorAll('th')].some(each => each.innerText.includes('Pays off below'))")
    predicted = printed("predict", str(PER_TOKEN), "--batch", str(16 * recorded), "--json", "-")["predictions"][0]
    page.wait(f"document.querySelector('.answer').innerText.includes({duration(predicted['step_ns'])!r})")
    page.assert_silent()


def test_a_mistake_in_an_option_is_said_and_can_be_corrected(page: Page) -> None:
    page.script("location.hash = 'view=plan&iterations=many'")
    page.wait("document.querySelector('.failed')?.innerText.includes('not a number of iterations')")
    page.type("input[type=text]", "1000")
    page.wait("document.querySelector('.failed') === null")


def test_two_recordings_are_compared_as_the_command_does(browser: Browser) -> None:
    found = printed("compare", str(PER_TOKEN), str(BATCHED), "--json", "-")["comparisons"][0]
    with served(PER_TOKEN, BATCHED) as address:
        page = Page(browser, address)
        page.show("Compare")
        assert page.text(".verdict") == found["sentences"][0]
        widths = page.script("[...document.querySelectorAll('.two-step .cause-bar')].map(each => each.clientWidth)")
        steps = [found[side]["step_ns"] for side in ("before", "after")]
        assert widths[1] / widths[0] == pytest.approx(steps[1] / steps[0], abs=0.01)
        page.click("[role=tab]", "operators")
        largest = max(found["operators"], key=lambda each: abs(each["difference_ns"]))
        assert duration(abs(largest["difference_ns"])) in page.text("tbody")

        # Then the differences by cause stand beside two timelines, the largest first
        signs = page.texts(".changes .number")
        most = max(found["causes"], key=lambda each: abs(each["difference_ns"]))
        assert signs[0].lstrip("+-") == duration(abs(most["difference_ns"]))
        page.wait("document.querySelectorAll('.two-timelines .timeline-state').length === 0")
        lengths = ".two-timelines .timeline-length"
        first, second = page.texts(lengths)
        assert first == second  # one scale

        # When, then: one is zoomed by keyboard and moved, and the other follows
        page.script("document.querySelectorAll('.two-timelines .timeline')[1].focus()")
        page.key("w", "w", "d")
        page.wait(f"[...document.querySelectorAll({lengths!r})].every(each => each.textContent !== {first!r})")
        page.wait(f"new Set([...document.querySelectorAll({lengths!r})].map(each => each.textContent)).size === 1")
        page.script("document.querySelectorAll('.two-timelines .timeline')[0].focus()")
        page.key("w")
        page.wait("location.hash.includes('beside=')")
        page.assert_silent()


def test_ranks_stand_beside_each_other_and_open(browser: Browser) -> None:
    folder = os.environ.get("STEPSCOPE_TRACES")
    if not folder:
        pytest.skip("STEPSCOPE_TRACES is not set")
    with served(Path(folder) / "second" / "v100_dlrm_8_ranks") as address:
        page = Page(browser, address)
        page.show("Ranks")
        page.wait(f"{RANK_ROWS} === 8")

        # When the second rank is opened by keyboard
        page.script("document.querySelector('.heat canvas').focus()")
        page.key("ArrowDown", "ArrowDown", "Enter")

        # Then every view is of it
        assert page.parameters["rank"] == "1"
        page.wait("document.querySelector('.headline')?.innerText.includes('a step takes')")
        page.assert_silent()


def test_a_trace_that_is_written_again_is_told_until_it_is_read_anew(browser: Browser, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    shutil.copy(PER_TOKEN, trace)
    with served(trace) as address:
        page = Page(browser, address)
        page.show("Operators")
        assert page.texts(".changed") == []
        shutil.copy(BATCHED, tmp_path / "new.json.gz")
        os.replace(tmp_path / "new.json.gz", trace)
        page.show("Modules")
        page.wait("document.querySelector('.changed button') !== null")
        page.click(".changed button")
        page.wait("document.querySelector('main h2') !== null && document.querySelector('.changed') === null")
        page.assert_silent()


def test_ranks_come_as_they_are_read_and_a_damaged_one_is_named(browser: Browser, tmp_path: Path) -> None:
    # Given ranks of which the fourth comes late, and one whose file is cut
    write_ranks(tmp_path, 12, late=lambda step: 3)
    (tmp_path / "rank7.json.gz").write_bytes((tmp_path / "rank7.json.gz").read_bytes()[:60])

    # Then the page begins with all ranks, in which the late one is marked
    with served(tmp_path) as address:
        page = Page(browser, address)
        assert page.text("nav.views a[aria-current]") == "Ranks"
        page.wait(f"{RANK_ROWS} === 11")
        page.wait("document.querySelector('.reading') === null")
        assert "rank7.json.gz" in page.text(".missing")
        assert row(page, "rank 3")[-1] == "20"
        assert row(page, "rank 4")[-1] == "0"
        assert page.script("document.querySelector('select[aria-label=Figure]').value") == "late"

        # When another figure is chosen, and the late rank opened
        chosen = "document.querySelector('select[aria-label=Figure]')"
        page.script(f"{chosen}.value = 'step'; {chosen}.dispatchEvent(new Event('change', {{bubbles: true}}))")
        page.wait("document.querySelector('[aria-busy=true]') === null")
        assert "longer step" in page.text(".scale-of")
        page.click("tbody tr", "rank 3")
        assert page.parameters["rank"] == "3"
        page.wait("document.querySelector('.headline')?.innerText.includes('a step takes')")
        page.assert_silent()


TRAINING: Final = """\
import os, sys, time
import torch

torch.set_num_threads(1)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
begun = time.monotonic()
while not os.path.exists(sys.argv[1]) and time.monotonic() < begun + 300:
    while os.path.exists(sys.argv[1] + ".wait"):
        time.sleep(0.01)
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
"""


def test_a_watched_job_is_drawn_and_another_can_be_chosen(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path / "data"))
    known: dict[str, Any] = {"step_ns": 3e6, "recorded_step_ns": 4e6, "memory_bytes": 2**30, "late_rank": "<b>rank 3"}
    causes = {"input": 1e6, "<i>new": 5e5}
    (tmp_path / "data").mkdir(0o700)
    WatchLog().put(*(Watched(job="<b>job", unix_s=6e2 * number, causes=causes, **known) for number in range(1, 9)))
    WatchLog().put(Watched(job="other", unix_s=1.0, problem="nobody <b>answers"))
    with served() as address:
        page = Page(browser, address)
        page.show("Watch")
        titles = ["Idle time by cause, of the step", "Step time", "Memory of the largest process"]
        assert page.texts("figure h3") == titles
        assert [each.strip() for each in page.texts(".plot-legend span")] == ["input", "<i>new"]
        assert page.script("document.querySelectorAll('tbody tr:not(.space)').length") == 8
        assert page.script("document.querySelectorAll('main b, main i:not([style])').length") == 0
        page.script(
            "(each => {each.value = 'other'; each.dispatchEvent(new Event('change', {bubbles: true}))})"
            "(document.querySelector('select[aria-label=Job]'))"
        )
        page.wait("document.querySelector('main').innerText.includes('nobody <b>answers')")
        assert page.parameters["job"] == "other"
        page.assert_silent()


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_a_run_is_watched_until_its_answer_and_recorded_anew(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a run that waits before its first step
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path / "data"))
    program, stop, wait = tmp_path / "train.py", tmp_path / "stop", tmp_path / "stop.wait"
    program.write_text(TRAINING)
    wait.touch()
    words = ["run", "--serve", "--no-diagnose", "--name", "watched", str(program), str(stop)]
    process = subprocess.Popen(
        [sys.executable, "-m", "stepscope", *words], env=environment(), stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: (tmp_path / "data" / "runs" / "watched" / "seen" / "torch").exists())
        with served("watched") as address:
            page = Page(browser, address)

            # Then the page says what is awaited
            assert page.views == ["Runs"]
            page.wait("document.querySelector('.recording [role=status]')?.innerText.includes('awaited')")

            # When the steps begin, the answer appears
            wait.unlink()
            page.wait("document.querySelector('.headline')?.innerText.includes('a step takes')", "the answer")
            assert page.parameters == {"run": "watched", "traces": "1", "view": "overview"}

            # When it is recorded anew, the new recording opens
            page.show("Runs")
            page.wait(
                "[...document.querySelectorAll('.recording button')].some(each => each.innerText === 'Record now')"
            )
            page.click(".recording button", "Record now")
            page.wait("location.hash.includes('traces=2')", "the recording")
            page.wait("document.querySelector('.headline')?.innerText.includes('a step takes')")

            # When the program has ended, nothing more can be recorded
            page.show("Runs")
            stop.touch()
            assert process.wait(60) == 0
            page.wait("document.querySelector('.recording')?.innerText.includes('done, took')")
            assert "Record now" not in page.texts(".recording button")
            page.assert_silent()
    finally:
        stop.touch()
        process.kill()
        process.wait()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
