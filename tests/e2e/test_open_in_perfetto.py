"""The button that hands a trace to Perfetto's page: a stand-in answers for that page, by its own protocol."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.browser import CHROMIUM, Browser
from tests.e2e.conftest import BATCHED
from tests.page import Page, served

STAND_IN: Final = """\
<!doctype html>
<script>
addEventListener("message", ({data, origin, source}) => {
    if (data === "PING") {
        window.pings = (window.pings ?? 0) + 1;
        if (window.pings === 3) source.postMessage("PONG", origin);
    } else {
        const {buffer, title} = data.perfetto;
        window.received = {origin, title, events: JSON.parse(new TextDecoder().decode(buffer)).traceEvents.length};
    }
});
</script>
"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser, google-chrome or chrome on the PATH"),
]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path / "profile")
    browser.call("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=True, flatten=True)
    browser.events.clear()
    yield browser
    browser.close()


def answered(browser: Browser) -> tuple[str, str]:
    """The session of the window that was opened, whose page the stand-in is, and the address that it asked for."""
    session = browser.event("Target.attachedToTarget")["sessionId"]
    browser.call("Fetch.enable", session, patterns=[{"urlPattern": "*"}])
    browser.call("Runtime.runIfWaitingForDebugger", session)
    paused = browser.event("Fetch.requestPaused")
    page = base64.b64encode(STAND_IN.encode()).decode()
    headers = [{"name": "Content-Type", "value": "text/html"}]
    browser.call(
        "Fetch.fulfillRequest",
        session,
        requestId=paused["requestId"],
        responseCode=200,
        responseHeaders=headers,
        body=page,
    )
    return session, paused["request"]["url"]


def test_a_trace_goes_to_perfetto_only_after_the_second_click(browser: Browser) -> None:
    with served(BATCHED) as address:
        page = Page(browser, address)
        page.show("Timeline")

        # When the button is pressed
        page.click("button", "Open in Perfetto")

        # Then it says where the trace goes, and nothing has gone
        assert "ui.perfetto.dev" in page.text("dialog[open]")
        assert "Nothing is sent before you click" in page.text("dialog[open]")
        page.assert_silent()
        assert not [url for url in browser.requests if "api/perfetto" in url]

        # When, then: after the click the whole trace arrives, from this page
        hand = "[...document.querySelectorAll('dialog[open] button')].find(each => each.innerText.includes('Hand'))"
        page.script(f"setTimeout(() => {hand}.click()); 0")  # the window that opens waits for its debugger
        session, asked = answered(browser)
        assert asked == "https://ui.perfetto.dev/"
        page.wait("document.querySelector('dialog[open]') === null")
        received = browser.call("Runtime.evaluate", session, expression="window.received", returnByValue=True)
        value = received["result"]["value"]
        assert value["origin"] + "/" == page.address
        assert value["title"] == BATCHED.name
        assert value["events"] > 1000
        page.assert_silent()
