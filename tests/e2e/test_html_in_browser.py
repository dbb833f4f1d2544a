"""The HTML report in a real browser: no error on the console, no request but for the file, and it can be used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from stepscope.analysis.picture import PathPiece, PictureGap, PictureLane, PictureSlice, Shown, StepPicture
from stepscope.compare import compare_traces
from stepscope.report.comparison import comparison_document
from stepscope.report.html import html_of
from tests.browser import CHROMIUM, Browser
from tests.unit.hand_built import empty, full
from tests.unit.rendered import html_report
from tests.unit.report.test_html_compare import training

HOSTILE = "</script><img src=http://127.0.0.1:9/x onerror=console.error('hostile')><script>console.error('hostile')//"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser, google-chrome or chrome on the PATH"),
]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


def picture(name: str) -> StepPicture:
    """A millisecond with a host thread, a queue and a gap."""
    return StepPicture(
        start_ns=0,
        duration_ns=1_000_000,
        lanes=(PictureLane(name, "host", "", 2, (name,)), PictureLane("stream 7", "queue", "0", 1)),
        slices=(
            PictureSlice(0, 0, 0, 900_000, name, "frame"),
            PictureSlice(0, 1, 100_000, 300_000, "aten::mm", "operator"),
            PictureSlice(1, 0, 500_000, 400_000, "gemm", "compute"),
        ),
        gaps=(PictureGap("0", 0, 500_000, "input", None), PictureGap("0", 900_000, 100_000, name, name)),
        host_slices=Shown(2, 2, 300_000),
        device_slices=Shown(1, 5, 400_000),
        threads=Shown(1, 1),
        queues=Shown(1, 1),
    )


def opened(browser: Browser, folder: Path, report: bytes) -> Path:
    path = folder / "report.html"
    path.write_bytes(report)
    browser.open(path.as_uri())
    return path


def column(browser: Browser, table: str, number: int) -> list[str]:
    cells = f"document.querySelectorAll('#{table} tbody tr td:nth-child({number})')"
    texts: list[str] = browser.script(f"[...{cells}].map(cell => cell.textContent)")
    return texts


@pytest.mark.parametrize("name", ["loss", HOSTILE], ids=["plain", "hostile"])
def test_a_report_is_silent_and_asks_for_nothing(browser: Browser, tmp_path: Path, name: str) -> None:
    # Given
    operators = pl.DataFrame({"name": [name], "self_ns": [5]})
    diagnosis = full(operators=operators)

    # When
    report = html_report([diagnosis, empty()], [picture(name), None])
    path = opened(browser, tmp_path, report)
    browser.script("document.querySelectorAll('button').forEach(button => button.click())")

    # Then
    assert browser.complaints == []
    assert [url for url in browser.requests if url != "data:,"] == [path.as_uri()]
    assert column(browser, "r0-operators", 1) == [name]


@pytest.mark.parametrize(
    ("injected", "complaint", "request_"),
    [
        ("<script>console.error('x')</script>", True, False),
        ("<img src='http://127.0.0.1:9/x.png'>", True, True),
        ("<link rel=stylesheet href='http://127.0.0.1:9/x.css'>", True, True),
    ],
    ids=["console", "image", "style"],
)
def test_the_browser_would_tell(
    browser: Browser, tmp_path: Path, injected: str, complaint: bool, request_: bool
) -> None:
    # Given a report that someone spoilt, its policy gone
    spoilt = (
        html_report([empty()], [None]).replace(b"Content-Security-Policy", b"x").replace(b"</main>", injected.encode())
    )

    # When
    path = opened(browser, tmp_path, spoilt)

    # Then
    assert bool(browser.complaints) is complaint
    assert any(url not in (path.as_uri(), "data:,") for url in browser.requests) is request_


def test_the_policy_keeps_an_injected_script_from_running(browser: Browser, tmp_path: Path) -> None:
    # Given
    spoilt = html_report([empty()], [None]).replace(b"</main>", b"<script>document.title = 'taken'</script>")

    # When
    opened(browser, tmp_path, spoilt)

    # Then
    assert browser.script("document.title") == "stepscope: a trace"
    assert "Content Security Policy" in json.dumps(browser.complaints)


def test_headers_sort_by_number_and_by_name(browser: Browser, tmp_path: Path) -> None:
    # Given
    operators = pl.DataFrame({"name": ["b", "a", "c", "d"], "self_ns": [900, 2_000_000, 30_000, None]})
    opened(browser, tmp_path, html_report([full(operators=operators)], [None]))
    click = "document.querySelector('#r0-operators th:nth-child({}) button').click()"

    # When, then: largest first, then smallest first, nulls last; names from A
    browser.script(click.format(2))
    assert column(browser, "r0-operators", 1) == ["a", "c", "b", "d"]
    browser.script(click.format(2))
    assert column(browser, "r0-operators", 1) == ["b", "c", "a", "d"]
    browser.script(click.format(1))
    assert column(browser, "r0-operators", 1) == ["a", "b", "c", "d"]
    assert browser.script("document.querySelector('#r0-operators th').getAttribute('aria-sort')") == "ascending"


def test_the_picture_zooms_and_shows_a_finding(browser: Browser, tmp_path: Path) -> None:
    # Given
    opened(browser, tmp_path, html_report([full()], [picture("loss")]))
    output = "document.querySelector('.picture output').textContent"
    assert browser.script(output) == "1.0 ms of 1.0 ms"

    # When, then
    browser.script("document.querySelector('.picture canvas').focus()")
    browser.key("+")
    assert browser.script(output) == "625.0 us of 1.0 ms"
    browser.key("0")
    assert browser.script(output) == "1.0 ms of 1.0 ms"
    before = browser.script("document.querySelector('canvas').toDataURL()")
    browser.script("document.querySelector('.show').click()")
    assert browser.script(output) == "50 ns of 1.0 ms"
    assert browser.script("document.querySelector('canvas').toDataURL()") != before


def test_two_steps_beside_each_other_zoom_together(browser: Browser, tmp_path: Path) -> None:
    # Given a comparison whose second step is half as long
    comparison = compare_traces(training(load_ns=900), training(load_ns=100))
    pictures = (picture("before"), replace(picture("after"), duration_ns=500_000))
    path = opened(browser, tmp_path, html_of(comparison_document([comparison], [pictures]), top=20))
    after = "document.querySelectorAll('canvas')[1].toDataURL()"
    whole = browser.script(after)

    # When the first one is zoomed, and shown whole again
    browser.script("document.querySelector('[data-do=in]').click()")
    zoomed = browser.script(after)
    browser.script("document.querySelector('[data-do=whole]').click()")

    # Then the second one is as well
    assert zoomed != whole
    assert browser.script(after) == whole
    assert browser.script("document.querySelector('output').textContent") == "1.0 ms of 1.0 ms"
    assert browser.complaints == []
    assert [url for url in browser.requests if url != "data:,"] == [path.as_uri()]


def test_pointing_at_a_gap_tells_its_cause(browser: Browser, tmp_path: Path) -> None:
    # Given
    opened(browser, tmp_path, html_report([empty()], [picture(HOSTILE)]))
    place = "(({x, y, width, height}) => [x, y + height - 45, width])(document.querySelector('canvas').{})"
    browser.script("document.querySelector('canvas').scrollIntoView()")
    x, y, width = browser.script(place.replace("{}", "getBoundingClientRect()"))

    # When, then: the device is idle first, then busy with a queue's work
    for part, text in ((0.4, "idle 500.0 us: input\nthe host was loading data"), (0.8, "busy")):
        browser.page("Input.dispatchMouseEvent", type="mouseMoved", x=x + part * width, y=y)
        assert browser.script("document.getElementById('tooltip').textContent") == text


def test_pointing_at_the_critical_path_tells_what_the_step_waits_for(browser: Browser, tmp_path: Path) -> None:
    # Given
    path = (PathPiece(0, 500_000, "host", "input", HOSTILE), PathPiece(500_000, 500_000, "compute", None, "gemm"))
    opened(browser, tmp_path, html_report([empty()], [replace(picture("loss"), path=path)]))
    browser.script("document.querySelector('canvas').scrollIntoView()")
    place = "(({x, y, width}) => [x, y + 40, width])(document.querySelector('canvas').getBoundingClientRect())"
    x, y, width = browser.script(place)

    # When, then: the lane stands above all others
    for part, text in (
        (0.4, f"the step waits 500.0 us: host: input\nthe host was loading data\n{HOSTILE}"),
        (0.8, "the step waits 500.0 us: device: computation\nthe device computed\ngemm"),
    ):
        browser.page("Input.dispatchMouseEvent", type="mouseMoved", x=x + part * width, y=y)
        assert browser.script("document.getElementById('tooltip').textContent") == text


def test_a_thousand_short_gaps_take_the_room_they_took(browser: Browser, tmp_path: Path) -> None:
    # Given: the device is idle for a tenth of every microsecond
    gaps = tuple(PictureGap("0", 1000 * number, 100, "input", None) for number in range(1000))
    opened(browser, tmp_path, html_report([empty()], [replace(picture("loss"), gaps=gaps)]))

    # When: the strip's pixels in the colour of the cause are counted
    orange = browser.script(
        """(() => {
            const canvas = document.querySelector("canvas");
            const { data } = canvas.getContext("2d").getImageData(168, canvas.height - 63, canvas.width - 170, 28);
            let found = 0;
            for (let at = 0; at < data.length; at += 4) found += data[at] > data[at + 2] + 60;
            return found / (data.length / 4);
        })()"""
    )

    # Then
    assert orange == pytest.approx(0.1, abs=0.04)


def test_the_theme_follows_the_system_until_it_is_chosen(browser: Browser, tmp_path: Path) -> None:
    # Given
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.page("Emulation.setEmulatedMedia", features=dark)
    opened(browser, tmp_path, html_report([full()], [picture("loss")]))
    colour = "getComputedStyle(document.body).backgroundColor"
    by_system = browser.script(colour)

    # When
    browser.script("document.getElementById('theme').click()")

    # Then
    assert (by_system, browser.script(colour)) == ("rgb(17, 21, 26)", "rgb(245, 246, 248)")


@pytest.mark.parametrize("width", [1280, 375])
def test_nothing_is_wider_than_the_window(browser: Browser, tmp_path: Path, width: int) -> None:
    # Given
    browser.page("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500)

    # When
    opened(browser, tmp_path, html_report([full()], [picture("x" * 300)]))

    # Then
    assert browser.script("document.documentElement.scrollWidth") <= width
