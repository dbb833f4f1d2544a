"""The page's timeline in a real browser: it is painted, zooms, searches, measures, and tells what the tables say."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from benchmarks.long_trace import simulated, write_long_trace_of
from stepscope import Trace, open_trace
from tests.browser import CHROMIUM, Browser

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser, google-chrome or chrome on the PATH"),
]


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("timeline") / "training.json"
    write_long_trace_of(path, simulated(), 30_000)
    return path


@pytest.fixture(scope="module")
def trace(trace_file: Path) -> Trace:
    return open_trace(trace_file)


@pytest.fixture(scope="module")
def address(trace_file: Path) -> Iterator[str]:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    command = [sys.executable, "-m", "stepscope", "view", str(trace_file), "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield next(found[0] for line in server.stdout if (found := re.search(r"http\S+token=\S+", line)))
    server.terminate()
    server.wait()


@pytest.fixture
def page(address: str, tmp_path: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path / "profile")
    browser.resize(1280, 900)
    browser.open(address)
    browser.open(browser.script("location.origin") + "/?#view=timeline")
    until(browser, "performance.getEntriesByName('timeline-painted').length")
    yield browser
    # Requests that the next zoom made superfluous were called back.
    complaints = [each for each in browser.complaints if not each["params"].get("canceled")]
    origin = browser.script("location.origin")
    elsewhere = [url for url in browser.requests if not url.startswith((origin, "data:", "about:"))]
    browser.close()
    assert (complaints, elsewhere) == ([], [])


def until(browser: Browser, condition: str) -> None:
    for _ in range(400):
        if browser.script(condition):
            return
        time.sleep(0.05)
    pytest.fail(f"the page did not come to {condition}: {browser.script('document.body.innerText')[:2000]}")


def place(browser: Browser, name: str) -> tuple[float, float, float]:
    """Left, top and width of a canvas of the timeline."""
    box = f"document.querySelector('.timeline-{name}').getBoundingClientRect()"
    left, top, width = browser.script(f"(({{left, top, width}}) => [left, top, width])({box})")
    return left, top, width


def mouse(browser: Browser, kind: str, x: float, y: float, **more: object) -> None:
    browser.page("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)


def drag(browser: Browser, start: tuple[float, float], end: tuple[float, float], modifiers: int = 0) -> None:
    mouse(browser, "mousePressed", *start, button="left", buttons=1, clickCount=1, modifiers=modifiers)
    mouse(browser, "mouseMoved", *end, button="left", buttons=1, modifiers=modifiers)
    mouse(browser, "mouseReleased", *end, button="left", clickCount=1, modifiers=modifiers)


def test_a_wheel_zooms_at_the_pointer_and_a_key_shows_all_again(page: Browser) -> None:
    # Given
    left, top, width = place(page, "lanes")

    # When
    mouse(page, "mouseWheel", left + width / 2, top + 30, deltaX=0, deltaY=-100, modifiers=2)

    # Then
    until(page, "location.hash.includes('range=')")
    page.script("document.querySelector('.timeline').focus()")
    page.key("0")
    until(page, "!location.hash.includes('range=')")


def test_what_is_found_is_counted_chosen_and_shown(page: Browser, trace: Trace) -> None:
    # Given
    tables = ("annotations", "frames", "operators", "launches", "device_work")
    names = pl.concat([trace.table(table)["name"] for table in tables])
    count = names.str.to_lowercase().str.contains("gemm_back", literal=True).sum()

    # When
    search = "document.querySelector('main [data-filter]')"
    page.script(f"{search}.focus(); {search}.value = 'GEMM_back'")
    page.script(f"{search}.dispatchEvent(new Event('input', {{ bubbles: true }}))")
    until(page, f"document.querySelector('main [role=status]').textContent.includes('{count:,} slices')")
    page.key("Enter")

    # Then
    until(page, "location.hash.includes('slice=device_work')")
    until(page, "document.querySelector('.timeline-slice h2')?.textContent === 'gemm_backward'")
    until(page, "document.querySelector('.timeline-slice').textContent.includes('launched by')")


def test_a_measured_stretch_tells_what_ran_in_it(page: Browser) -> None:
    # Given
    left, top, width = place(page, "lanes")

    # When
    drag(page, (left + 0.25 * width, top + 30), (left + 0.5 * width, top + 30), modifiers=8)

    # Then: the device's time is busy or has causes, and the names are those of the simulated training
    until(page, "location.hash.includes('measure=')")
    until(page, "document.querySelector('main h2')?.textContent.startsWith('Measured')")
    until(page, "document.querySelector('.timeline-device')?.textContent.includes('busy')")
    texts = page.script("[...document.querySelectorAll('.table .name')].map(each => each.textContent)")
    assert "train.py(12): step" in texts


def test_a_click_chooses_a_slice_and_arrows_its_neighbours(page: Browser) -> None:
    # Given: zoomed until slices stand alone
    page.script("location.hash = 'view=timeline&range=1000000-1100000'")
    time.sleep(1)
    page.script("document.querySelector('.timeline').focus()")

    # When
    page.key("ArrowRight")
    until(page, "location.hash.includes('slice=')")
    first = page.script("location.hash.match(/slice=([^&]*)/)[1]")
    page.key("ArrowDown")

    # Then
    until(page, f"!location.hash.includes('slice={first}')")
    page.key("Escape")
    until(page, "!location.hash.includes('slice=')")
