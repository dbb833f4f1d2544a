"""The further views of the page in a real browser: what they show is what the commands print, and they can be used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from stepscope.report.format import duration, size
from tests.browser import CHROMIUM, Browser
from tests.e2e.conftest import PER_TOKEN, run_here
from tests.page import Page, served

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
