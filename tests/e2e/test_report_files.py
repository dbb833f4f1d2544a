"""Report files in a real browser, opened as file://: silent, no request but for the file, and the numbers of --json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.report.document import Document, Section, Table
from stepscope.report.format import duration, share
from stepscope.report.html import html_of
from tests.browser import CHROMIUM, Browser
from tests.e2e.conftest import BATCHED, PER_TOKEN, run_here
from tests.page import Page
from tests.simulator.ranks import write_ranks
from tests.unit.recording import Recording, saved

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


def opened(browser: Browser, folder: Path, report: bytes) -> Path:
    path = folder / "report.html"
    path.write_bytes(report)
    browser.open(path.as_uri())
    return path


def reported(browser: Browser, folder: Path, *words: str | Path) -> tuple[Page, Any]:
    """The page that a command writes, and its JSON."""
    path = folder / "report.html"
    report = folder / "report.json"
    assert run_here(*map(str, words), "--html", str(path), "--json", str(report)).code == 0
    return Page(browser, path.as_uri()), json.loads(report.read_text())


def test_every_view_of_a_diagnosis_opens_and_its_numbers_are_those_of_the_json(
    browser: Browser, tmp_path: Path
) -> None:
    # Given
    page, report = reported(browser, tmp_path, "diagnose", PER_TOKEN)
    finding = report["findings"][0]

    # Then
    assert page.text(".headline") == report["headline"]
    saving = f"{duration(finding['saving_ns_per_step'])} {share(finding['saving_share'])}"
    assert page.text(".card .gain") == saving
    assert page.text(".bar-head h2").endswith(f": {duration(report['steps']['step_ns'])}")
    for view in page.views:
        page.show(view)
        assert page.texts(".failed") == [], view
        if view == "Timeline":
            page.wait("document.querySelector('.timeline-state') === null")
            assert "Perfetto" not in page.text("main")  # the file has one step only
        if view == "Memory":
            for each in page.texts("[aria-label='Divide by'] button"):
                page.click("[aria-label='Divide by'] button", each)
                assert page.texts(".failed") == [], each
        if view == "Steps":
            times = [duration(step["duration_ns"]) for step in report["steps"]["list"]]
            assert page.texts("tbody td:nth-child(3)") == times
    page.assert_silent()


def test_hostile_names_are_text(browser: Browser, tmp_path: Path) -> None:
    recording = Recording(unit_ns=1000)
    for step in range(3):
        recording.step(1000 * step, 1000, step)
        recording.operator(1000 * step + 100, 500, HOSTILE)
        recording.launched(1000 * step + 120, 1000 * step + 700, 100, HOSTILE, step)
    page, _ = reported(browser, tmp_path, "diagnose", saved(tmp_path, recording.trace()))

    for view in page.views:
        page.show(view)
    page.show("Operators")
    assert HOSTILE[:20] in page.text("tbody")
    assert page.script("document.querySelectorAll('img, main script').length") == 0
    page.assert_silent()


def test_ranks_begin_with_all_of_them_and_name_the_damaged_one(browser: Browser, tmp_path: Path) -> None:
    # Given
    write_ranks(tmp_path / "ranks", 3, late=lambda step: 1)
    (tmp_path / "ranks" / "rank2.json.gz").write_bytes(b"\x1f\x8b")

    # When
    page, report = reported(browser, tmp_path, "diagnose", tmp_path / "ranks")

    # Then
    assert page.text("nav.views a[aria-current]") == "Ranks"
    assert page.texts("tbody tr:not(.space) td:first-child") == ["rank 0", "rank 1", "all-reduce"]
    assert report["unreadable"][0]["reason"] in page.text(".missing")
    page.click("tbody tr", "rank 1")
    assert page.text(".headline") == report["ranks"][1]["headline"]
    page.assert_silent()


def test_a_comparison_draws_both_steps_and_says_what_the_json_says(browser: Browser, tmp_path: Path) -> None:
    page, report = reported(browser, tmp_path, "compare", PER_TOKEN, BATCHED)
    (found,) = report["comparisons"]

    assert page.views == ["Compare"]
    assert page.text(".verdict") == found["sentences"][0]
    assert page.texts(".two-step .plot-head > span:last-child") == [
        f"{duration(found[side]['step_ns'])} mean of {found[side]['step_count']} steps" for side in ("before", "after")
    ]
    page.wait("document.querySelectorAll('.two-timelines .timeline-state').length === 0")
    page.wait("new Set([...document.querySelectorAll('.timeline-length')].map(each => each.textContent)).size === 1")
    page.assert_silent()


def test_the_policy_keeps_an_injected_script_from_running(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert run_here("diagnose", str(PER_TOKEN), "--html", str(path)).code == 0
    spoilt = path.read_bytes().replace(b"</html>", b"<script>document.body.id = 'taken'</script></html>")

    opened(browser, tmp_path, spoilt)

    assert browser.script("document.body.id") == ""
    assert "Content Security Policy" in json.dumps(browser.complaints)


def test_headers_of_a_table_sort_by_number_and_by_name(browser: Browser, tmp_path: Path) -> None:
    # Given
    rows = pl.DataFrame({"name": ["b", "a", "c", "d"], "self_ns": [900, 2_000_000, 30_000, None]})
    path = opened(browser, tmp_path, html_of(Document("rows", (Section("Rows", (Table(rows, "rows"),)),))))
    names = "[...document.querySelectorAll('tbody td:nth-child(1)')].map(cell => cell.textContent).join('')"

    # When, then: largest first, then smallest first, nulls last; names from A
    for column, order in ((2, "acbd"), (2, "bcad"), (1, "abcd")):
        browser.script(f"document.querySelector('th:nth-child({column}) button').click()")
        assert browser.script(names) == order
    assert browser.complaints == []
    assert [url for url in browser.requests if url != "data:,"] == [path.as_uri()]
