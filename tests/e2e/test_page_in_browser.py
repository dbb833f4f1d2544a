"""The page in a real browser, served by a real `stepscope view`: silent, asks nobody else, and can be used."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import pytest

from stepscope.integrations.notebook import page_of
from stepscope.readers import open_trace
from stepscope.report.format import cell, duration, share
from stepscope.trace import Trace
from stepscope.view.documents import framed_page
from tests.browser import CHROMIUM, Browser
from tests.e2e.conftest import PER_TOKEN, run_here
from tests.page import Page, served
from tests.unit.recording import Recording, saved

HOSTILE: Final = (
    "</script><img src=http://127.0.0.1:9/x onerror=console.error('hostile')><script>console.error('hostile')//"
)
LONG: Final = "x" * 10_000_000
TRACES: Final = (
    "kineto/v100_resnet50_workers0.json.gz",
    "kineto/mi300x_sglang_prefilldecode.json.gz",
    "xplane/tpu_x4_inference.xplane.pb",
    "second/h100_2gpu_1s.sqlite",
    "second/rtx3060ti_resnet50_deepview.json.gz",
)
AXE: Final = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
MOST_SHIFT: Final = 0.1
with_axe = pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not in web/node_modules: npm ci there")
BEFORE: Final = """
    window.shifts = [];
    new PerformanceObserver(list => list.getEntries().forEach(each => each.hadRecentInput || shifts.push(each.value)))
        .observe({type: "layout-shift", buffered: true});
"""
"""Runs before the page's own script."""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser, google-chrome or chrome on the PATH"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser") / "profile")
    browser.page("Page.addScriptToEvaluateOnNewDocument", source=BEFORE)
    yield browser
    browser.close()


def assert_every_view_opens(page: Page) -> None:
    """Each view without a complaint or a failure, no wider than a phone, and without jumping about."""
    assert sum(page.script("shifts")) <= MOST_SHIFT
    for view in page.views:
        page.script("shifts.length = 0")
        page.show(view)
        assert page.texts(".failed") == [], view
        assert sum(page.script("shifts")) <= MOST_SHIFT, view
        page.browser.resize(360, 740)
        page.wait("document.documentElement.scrollWidth <= 360", view)
        page.browser.resize(1280, 800)
    page.assert_silent()


def serious(page: Page) -> list[list[str]]:
    """What axe-core finds that keeps somebody out."""
    if not page.script("'axe' in window"):
        page.script(f"{AXE.read_text()}; 0")
    found: list[list[str]] = page.script(
        "axe.run(document, {resultTypes: ['violations']}).then(({violations}) => violations"
        ".filter(({impact}) => ['serious', 'critical'].includes(impact))"
        ".map(({id, nodes}) => [id, ...nodes.slice(0, 3).map(({html}) => html.slice(0, 200))]))"
    )
    return found


def assert_open_to_all(page: Page) -> None:
    for view in page.views:
        page.show(view)
        assert serious(page) == [], view


@pytest.mark.parametrize("name", TRACES)
def test_every_view_of_a_real_trace_opens(browser: Browser, name: str) -> None:
    folder = os.environ.get("STEPSCOPE_TRACES")
    if not folder:
        pytest.skip("STEPSCOPE_TRACES is not set")
    with served(Path(folder) / name) as address:
        assert_every_view_opens(Page(browser, address))


def test_hostile_names_are_text(browser: Browser, tmp_path: Path) -> None:
    # Given names that are markup, one of them of ten megabytes
    recording = Recording(unit_ns=1000)
    for step in range(3):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.frame(begin, 600, "</script><img src=x>.py(5): <b>load</b>")
        recording.operator(begin + 620, 200, f"aten::{HOSTILE}")
        recording.module(begin + 620, 200, HOSTILE)
        recording.launched(begin + 640, begin + 700, 100, HOSTILE, 2 * step)
        recording.launched(begin + 660, begin + 800, 150, LONG, 2 * step + 1)
    with served(saved(tmp_path, recording.trace(), HOSTILE.replace("/", "")[:60])) as address:
        page = Page(browser, address)

        # When every view is opened, and what has such a name is chosen
        assert_every_view_opens(page)
        page.show("Kernels")
        page.click("tbody tr", "xxxx")
        page.click("tbody tr", HOSTILE[:20])

        # Then the page shows it, and nothing ran
        assert HOSTILE[:20] in page.text(".chip")
        assert len(page.parameters["choose"]) < 500
        assert page.script("document.querySelectorAll('img, main script').length") == 0
        page.assert_silent()


def test_an_empty_trace_says_what_is_missing_and_an_ended_server_what_to_do(browser: Browser, tmp_path: Path) -> None:
    with served(saved(tmp_path, Trace.from_tables({}))) as address:
        page = Page(browser, address)
        assert_every_view_opens(page)
        page.show("Steps")
        assert "profiler.step()" in page.text(".notice")
        page = Page(browser, address)
    page.show("Operators")
    assert "start it again" in page.text(".failed")


@pytest.fixture(scope="module")
def sample() -> Iterator[str]:
    with served(PER_TOKEN) as address:
        yield address


@pytest.fixture
def page(browser: Browser, sample: str) -> Page:
    return Page(browser, sample)


class TestTheSample:
    """The sample of scripts/demo."""

    def test_every_view_opens(self, page: Page) -> None:
        assert_every_view_opens(page)

    def test_the_first_screen_says_why_and_what_to_do(self, page: Page) -> None:
        # Then: the sentence, the bar that adds up, the timeline and the findings are in sight
        assert "a step takes" in page.text(".headline")
        widths = page.script("[...document.querySelectorAll('.cause-bar i')].map(each => parseFloat(each.style.width))")
        assert sum(widths) == pytest.approx(100)
        ends = page.script("[...document.querySelectorAll('.card')].map(each => each.getBoundingClientRect().bottom)")
        assert 0 < max(ends) <= 800
        page.wait("document.querySelector('.timeline-place canvas').width > 300")
        assert page.texts(".card .card-actions button")[:2] == ["Show", "Code"]

        # When, then: the code opens, and so does the command that tries it
        page.click(".card-actions button", "Code")
        assert "cross_entropy" in page.text("#opened")
        page.click(".card-actions button", "Try")
        assert "stepscope run --apply batched-loss" in page.text("#opened")
        page.assert_silent()

    def test_its_numbers_are_those_of_the_json(self, page: Page) -> None:
        # Given
        diagnosis = run_here("diagnose", PER_TOKEN, "--json", "-").json()
        operators = run_here("operators", PER_TOKEN, "--format", "json", "--top", "20").json()
        steps = run_here("steps", PER_TOKEN, "--format", "json").json()
        finding = diagnosis["findings"][0]

        # Then
        saving = f"{duration(finding['saving_ns_per_step'])} {share(finding['saving_share'])}"
        assert page.text(".card .gain") == saving
        assert page.text(".bar-head h2").endswith(f": {duration(diagnosis['steps']['step_ns'])}")
        page.show("Findings")
        column = {"ns": "time_ns", "share": "share", "bytes": "bytes", "count": "count", "": "count"}
        figures = [cell(column[each["unit"]], each["value"]) for each in finding["evidence"]["figures"]]
        assert [text.split(" (limit")[0] for text in page.texts(".finding .figures dd")][: len(figures)] == figures
        page.show("Operators")
        names = ("name", "calls", "calls_per_step", "host_self_ns", "host_self_share", "host_total_ns")
        expected = [[cell(name, row[name]) for name in names] for row in operators]
        rows = page.script(
            "[...document.querySelectorAll('tbody tr:not(.space)')].slice(0, 20)"
            ".map(row => [...row.cells].slice(0, 6).map(each => each.innerText))"
        )
        assert rows == expected
        page.show("Steps")
        assert page.texts("tbody td:nth-child(3)") == [duration(step["duration_ns"]) for step in steps]

    def test_a_finding_filters_the_other_views_and_the_address_keeps_it(self, page: Page) -> None:
        page.show("Operators")
        every = int(page.script("document.querySelector('table').getAttribute('aria-rowcount')"))

        # When
        page.show("Overview")
        page.click(".card h3 button")
        page.show("Operators")

        # Then
        assert page.parameters["choose"] == "finding:loop-in-step"
        assert "loop" in page.text(".chip")
        page.wait(
            f"document.querySelector('table').getAttribute('aria-rowcount') < {every}"
        )  # once the links are there
        assert int(page.script("document.querySelector('table').getAttribute('aria-rowcount')")) > 1
        page.show("Lines")
        assert page.script("document.querySelectorAll('.source .costs:not(.dim), tbody tr').length") > 0

        # When, then: back undoes it, step by step; clearing the chip as well
        page.script("history.back()")
        page.script("history.back()")
        page.script("history.back()")
        page.settle()
        assert "choose" not in page.parameters
        page.click(".card h3 button")
        page.click(".chip button")
        assert "choose" not in page.parameters
        assert page.texts(".chip") == []

    def test_a_link_opens_what_was_chosen(self, page: Page) -> None:
        page.script("location.hash = 'view=operators&choose=operator%3Aaten%3A%3Amm'")
        page.settle()

        assert page.text("nav.views a[aria-current]") == "Operators"
        assert "aten::mm" in page.text(".chip")
        assert page.texts("tr[aria-selected=true] td:first-child") == ["aten::mm"]
        page.show("Lines")
        assert page.script("document.querySelectorAll('.source .costs.dim').length") > 0

    def test_tables_sort_filter_and_obey_the_keyboard(self, page: Page) -> None:
        page.show("Operators")
        names = "tbody tr:not(.space) td:first-child"
        assert page.texts(names)[0] == "aten::fill_"

        # When sorted by name, then by calls
        page.click("th button", "Operator")
        assert page.texts(names)[:2] == sorted(page.texts(names)[:2], key=str.casefold)
        page.click("th button", "Calls")
        assert page.script("document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "descending"
        assert page.parameters["operators-sort"] == "-calls"

        # When filtered
        page.key("/")
        assert page.script("document.activeElement.hasAttribute('data-filter')") is True
        page.type("[data-filter]", "SOFTMAX aten")
        assert page.texts(names)
        assert all("softmax" in name for name in page.texts(names))

        # When moved to the second row and chosen
        second = page.texts(names)[1]
        page.script("document.querySelector('table').focus()")
        page.key("ArrowDown", "Enter")
        assert page.parameters["choose"] == f"operator:{second}"
        page.assert_silent()

    def test_keys_go_to_views_and_show_what_they_do(self, page: Page) -> None:
        page.key("g", "l")
        assert page.text("nav.views a[aria-current]") == "Lines"
        page.key("?")
        assert "Keyboard shortcuts" in page.text("dialog[open]")
        page.key("Escape")
        assert page.script("document.querySelector('dialog[open]')") is None

    def test_the_theme_follows_the_system_until_it_is_chosen(self, page: Page) -> None:
        colour = "getComputedStyle(document.body).backgroundColor"
        light = page.script(colour)
        page.browser.resize(1280, 800, dark=True)
        page.settle()
        dark = page.script(colour)
        assert dark != light
        page.click("header button[aria-label*=theme]")
        assert page.script(colour) == light
        page.click("header button[aria-label*=theme]")
        assert page.script(colour) == dark

    def test_a_step_is_chosen_with_its_time(self, page: Page) -> None:
        page.show("Steps")
        page.click(".steps-chart button:nth-of-type(2)")

        assert page.parameters["choose"] == "step:4"
        start, end = map(int, page.parameters["range"].split("-"))
        assert end - start == 748176853
        assert len(page.texts(".chip")) == 2

        # When, then: other views show what ran in it
        page.show("Operators")
        page.wait("[...document.querySelectorAll('th')].some(each => each.innerText.includes('Of the choice'))")

    @with_axe
    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    def test_nothing_keeps_anyone_out(self, page: Page, dark: bool) -> None:
        page.browser.resize(1280, 800, dark=dark)
        page.click(".card h3 button")
        assert_open_to_all(page)
        page.show("Timeline")
        page.click("button", "Open in Perfetto")
        assert serious(page) == []


@with_axe
def test_nothing_keeps_anyone_out_of_a_comparison_and_of_a_device(
    browser: Browser, simulated: Callable[[str], Path]
) -> None:
    traces = [simulated(name) for name in ("pageable_copy_fault", "pageable_copy_clean")]
    with served(*traces) as address:
        page = Page(browser, address)
        assert {"Compare", "Kernels"} <= set(page.views)
        assert_open_to_all(page)


class NotebookFrame:
    """The widget of a trace in a page that is no notebook, answered as the kernel answers it, and the frame in it."""

    def __init__(self, browser: Browser, trace: Trace) -> None:
        self.browser, self._page = browser, page_of(trace)
        self._session = ""
        self.asked: list[str] = []
        module = base64.b64encode(files("stepscope.view").joinpath("widget.js").read_bytes()).decode()
        browser.resize(1280, 800)
        browser.open("about:blank")
        browser.script(
            "window.sent = []; window.answer = () => 0; window.model = {get: () => 700, off: () => 0, "
            "on: (_, heard) => { window.answer = heard }, send: message => window.sent.push(message)}; "
            f"import('data:text/javascript;base64,{module}')"
            ".then(widget => { widget.default.render({model, el: document.body}) })"
        )

    def answer(self) -> None:
        for asked in self.browser.script("window.sent.splice(0)"):
            if "ask" in asked:
                self.asked.append(asked["address"])
                found = self._page.ask(asked["address"]).result()
                answer = {"status": found.status, "body": found.body.decode()}
            else:
                answer = {"page": framed_page(), "static": "stepscope-static"}
            self.browser.script(f"window.answer({json.dumps({**asked, **answer})}), 0")

    def wait(self, condition: str) -> None:
        deadline = time.monotonic() + 60
        while not self.script(condition):
            assert time.monotonic() < deadline, (condition, self.script("document.body?.innerText"), self.asked)
            time.sleep(0.05)
            self.answer()

    def script(self, expression: str) -> Any:
        """The value of an expression in the frame, which Chromium keeps in a process of its own."""
        targets = self.browser.call("Target.getTargets")["targetInfos"]
        frame = next((each["targetId"] for each in targets if each["type"] == "iframe"), None)
        if frame is None:
            return None
        if not self._session:
            self._session = self.browser.call("Target.attachToTarget", targetId=frame, flatten=True)["sessionId"]
        found = self.browser.call("Runtime.evaluate", self._session, expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")


def test_in_a_notebook_the_page_asks_the_kernel(browser: Browser) -> None:
    frame = NotebookFrame(browser, open_trace(PER_TOKEN))
    frame.wait("document.querySelector('main') !== null && document.querySelector('.loading') === null")
    assert "a step takes 720.9 ms" in frame.script("document.body.innerText")
    assert {"session", "diagnosis"} <= set(frame.asked)

    # its links work without an address, and its frame cannot reach what is around it
    frame.script("[...document.querySelectorAll('nav.views a')].find(each => each.innerText === 'Operators').click()")
    frame.wait("document.querySelector('nav.views a[aria-current]').innerText === 'Operators'")
    frame.wait("document.querySelector('tbody tr') !== null")
    assert "aten::fill_" in frame.script("document.querySelector('tbody').innerText")
    assert frame.script("document.querySelectorAll('.failed').length") == 0
    assert frame.script("(() => { try { return parent.document.title } catch { return 'apart' } })()") == "apart"
    assert frame.script("location.href") == "about:srcdoc"
