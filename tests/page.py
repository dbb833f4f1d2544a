"""The page of a real `stepscope view` in a browser, for tests and pictures of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.browser import Browser
from tests.e2e.conftest import environment

START_S: Final = 60.0
SETTLED_S: Final = 60.0


class Page:
    """The page of one trace in the browser."""

    def __init__(self, browser: Browser, address: str) -> None:
        self.browser = browser
        self.address = address.partition("?")[0]
        browser.resize(1280, 800)
        browser.open("about:blank")
        browser.events.clear()
        browser.open(address)
        self.settle()

    def settle(self) -> None:
        """Wait until nothing loads any more."""
        self.wait("document.querySelector('main') !== null && document.querySelector('.loading') === null")
        self.script("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def wait(self, condition: str, about: str = "") -> None:
        deadline = time.monotonic() + SETTLED_S
        while not self.script(condition):
            assert time.monotonic() < deadline, (about, condition, self.text("body"))
            time.sleep(0.05)

    def script(self, expression: str) -> Any:
        """The value of an expression, asked again if the page was loaded anew meanwhile."""
        try:
            return self.browser.script(expression)
        except AssertionError as error:
            if "navigated" not in str(error):
                raise
            time.sleep(0.3)
            return self.browser.script(expression)

    def text(self, selector: str) -> str:
        found: str = self.script(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return found

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.script(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(each => each.innerText)"
        )
        return found

    def click(self, selector: str, text: str = "") -> None:
        """Click the first element that matches and has this text."""
        those = f"[...document.querySelectorAll({json.dumps(selector)})]"
        found = self.script(f"{those}.find(each => each.innerText.trim().startsWith({json.dumps(text)}))?.click() ?? 0")
        assert found is not None, f"no {selector} {text}"
        self.settle()

    def key(self, *keys: str) -> None:
        for key in keys:
            code = {"Escape": 27, "Enter": 13}.get(key, 0)
            text = key if len(key) == 1 else ""
            self.browser.page("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, windowsVirtualKeyCode=code)
            self.browser.page("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)
        self.settle()

    def type(self, selector: str, text: str) -> None:
        box = f"document.querySelector({json.dumps(selector)})"
        self.script(f"{box}.value = {json.dumps(text)}; {box}.dispatchEvent(new Event('input', {{bubbles: true}}))")
        self.settle()

    @property
    def views(self) -> list[str]:
        return self.texts("nav.views a")

    def show(self, view: str) -> None:
        self.click("nav.views a", view)
        assert self.text("nav.views a[aria-current]") == view

    @property
    def parameters(self) -> dict[str, str]:
        found: dict[str, str] = self.script("Object.fromEntries(new URLSearchParams(location.hash.slice(1)))")
        return found

    def assert_silent(self) -> None:
        # A window of the timeline that is no longer wanted is given up.
        assert [each for each in self.browser.complaints if not each["params"].get("canceled")] == []
        asked = [url for url in self.browser.requests if not url.startswith(("data:", "about:"))]
        assert [url for url in asked if not url.startswith(self.address)] == []


@contextlib.contextmanager
def served(*paths: str | Path) -> Iterator[str]:
    """The address that `stepscope view` printed, while it runs."""
    command = [sys.executable, "-m", "stepscope", "view", *map(str, paths), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment())
    assert process.stdout is not None
    try:
        yield _address(process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _address(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    said, deadline = b"", time.monotonic() + START_S
    while (found := re.search(rb"http://127\.0\.0\.1:\d+/\?token=[\w-]+(?=\s)", said)) is None:
        ready, _, _ = select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))
        chunk = os.read(process.stdout.fileno(), 4096) if ready else b""
        assert chunk, f"no address, but: {said.decode()}"
        said += chunk
    return found[0].decode()
