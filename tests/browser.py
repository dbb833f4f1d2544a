"""A headless Chromium, driven through its DevTools protocol over a pipe with the standard library only."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
DEADLINE_S = 60.0
# The pipe must be file descriptors 3 and 4 of the browser, which only the process that becomes it can arrange.
TRAMPOLINE = (
    "import os,sys; os.dup2(int(sys.argv[1]),3); os.dup2(int(sys.argv[2]),4); os.execv(sys.argv[3],sys.argv[3:])"
)


class Browser:
    """A headless Chromium with one page, and everything it said."""

    def __init__(self, profile: Path) -> None:
        their_input, our_output = os.pipe()
        our_input, their_output = os.pipe()
        high = [_above_ten(descriptor) for descriptor in (their_input, their_output)]
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        command = [sys.executable, "-c", TRAMPOLINE, *map(str, high), str(CHROMIUM), *flags]
        self.process = subprocess.Popen(command, pass_fds=high, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        for descriptor in high:
            os.close(descriptor)
        self._input, self._output, self._rest = our_input, our_output, b""
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.page(f"{domain}.enable")

    def page(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method on the page."""
        return self.call(method, self._session, **parameters)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method and wait for its answer; events that arrive meanwhile are kept."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        os.write(self._output, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def event(self, method: str) -> dict[str, Any]:
        """The parameters of the first event of this name, waited for."""
        while not (found := [event for event in self.events if event["method"] == method]):
            self.events.append(self._next())
        parameters: dict[str, Any] = found[0]["params"]
        return parameters

    def open(self, address: str) -> None:
        """Load a page, wait until it has loaded and a little longer, for what it might do later."""
        self.events = [event for event in self.events if event["method"] != "Page.loadEventFired"]
        self.page("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())
        self.script("new Promise(done => setTimeout(() => requestAnimationFrame(done), 300))")

    def script(self, expression: str) -> Any:
        """The value of an expression in the page; an error there is an error here."""
        result = self.page(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def key(self, key: str) -> None:
        """Press a key on whatever has the focus."""
        self.page("Input.dispatchKeyEvent", type="keyDown", key=key)
        self.page("Input.dispatchKeyEvent", type="keyUp", key=key)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Give the page this size, in CSS pixels, and a colour scheme."""
        self.page("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.page("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self) -> bytes:
        """The visible part of the page as a PNG file."""
        return base64.b64decode(self.page("Page.captureScreenshot", format="png")["data"])

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """What went to the console, failed or was forbidden."""
        loud = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")
        return [event for event in self.events if event["method"] in loud]

    @property
    def requests(self) -> list[str]:
        """Addresses the page asked for."""
        asked = (event for event in self.events if event["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in asked]

    def close(self) -> None:
        """End the browser."""
        os.close(self._output)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._input)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._input], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser did not answer in time"
            chunk = os.read(self._input, 1 << 16)
            assert chunk, "the browser has ended"
            self._rest += chunk
        message, self._rest = self._rest.split(b"\0", 1)
        decoded: dict[str, Any] = json.loads(message)
        return decoded


def _above_ten(descriptor: int) -> int:
    import fcntl

    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10)
    os.close(descriptor)
    return copy
