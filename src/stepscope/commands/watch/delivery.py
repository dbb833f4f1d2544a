"""Where a watch's alerts and metrics go: a webhook, a command, an OpenMetrics endpoint. None of them holds it up."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from queue import Full, Queue
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from stepscope import __version__
from stepscope.errors import UsageError
from stepscope.report.document import compact_json

_TIMEOUT_S: Final = 10.0
_COMMAND_TIMEOUT_S: Final = 60.0
_PAUSES_S: Final = (1.0, 5.0)
"""Between the tries to reach a webhook."""
_POLL_S: Final = 0.1
_MOST_WAITING: Final = 100
_MOST_CLIENTS: Final = 8
_CONTENT_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_ADDRESS: Final = re.compile(r"(?:(\[[0-9a-fA-F:.]+\]|[\w.-]*):)?(\d{1,5})", re.ASCII)

Say = Callable[[str], None]
"""Tells the user a sentence."""
Send = Callable[[bytes, Mapping[str, str]], str | None]
"""Delivers an alert, given as JSON and as variables; returns why that failed, or None."""


class Deliveries:
    """A thread that delivers alerts one after another; what fails is told, and forgotten."""

    def __init__(self, sends: list[Send], say: Say) -> None:
        self._sends, self._say = sends, say
        self._waiting: Queue[dict[str, Any]] = Queue(_MOST_WAITING)
        if sends:
            threading.Thread(target=self._deliver, name="stepscope-alerts", daemon=True).start()

    def add(self, alert: dict[str, Any]) -> None:
        """Have an alert delivered; never waits."""
        if not self._sends:
            return
        try:
            self._waiting.put_nowait(alert)
        except Full:
            self._say(f"an alert was not delivered, as {_MOST_WAITING} others wait")

    def finish(self, patience_s: float) -> None:
        """Wait until all is delivered, at most so long."""
        until = time.monotonic() + patience_s
        while self._sends and self._waiting.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.05)

    def _deliver(self) -> None:
        while True:
            alert = self._waiting.get()
            variables = {f"STEPSCOPE_{name.upper()}": str(value) for name, value in alert.items()}
            for send in self._sends:
                problem = send(compact_json(alert), variables)
                if problem is not None:
                    self._say(problem)
            self._waiting.task_done()


def webhook(address: str) -> Send:
    """POST alerts as JSON to an http or https address; three tries of ten seconds. Raises UsageError if it is none."""
    try:
        parts = urlsplit(address)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and address.isprintable()
        known = known and " " not in address
    except ValueError:
        known = False
    if not known:
        raise UsageError(f"{address!r} is not a webhook: write http://HOST/PATH or https://HOST/PATH")

    def send(body: bytes, _: Mapping[str, str]) -> str | None:
        problem = ""
        for pause_s in (*_PAUSES_S, 0.0):
            problem = _posted(parts, body)
            if not problem:
                return None
            time.sleep(pause_s)
        return f"an alert was not delivered to {parts.hostname}: {problem}"  # the path may hold a secret

    return send


def _posted(parts: SplitResult, body: bytes) -> str:
    """Why the request failed; "" if it was accepted. A redirect is a failure, as it would not be a POST any more."""
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    headers = {"Content-Type": "application/json", "User-Agent": f"stepscope/{__version__}"}
    try:
        connection.request("POST", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), body, headers)
        status = connection.getresponse().status
        return "" if 200 <= status < 300 else f"it answered {status}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()


def command(text: str) -> Send:
    """Start a program for each alert, without a shell: JSON on its standard input, and variables STEPSCOPE_...

    Raises UsageError if the text is not a command line.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is not a command: {error}") from error
    if not words:
        raise UsageError("the command of --on-alert is empty")

    def send(body: bytes, variables: Mapping[str, str]) -> str | None:
        try:
            ended = subprocess.run(
                words,
                input=body,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **variables},
                timeout=_COMMAND_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{words[0]} has not ended within {_COMMAND_TIMEOUT_S:.0f} s of an alert, and was killed"
        except (OSError, ValueError) as error:
            return f"{words[0]} cannot be started: {getattr(error, 'strerror', None) or error}"
        return f"{words[0]} ended with {ended.returncode} for an alert" if ended.returncode else None

    return send


class Metrics:
    """Answers GET /metrics at an address with what was last set.

    Args:
        address: "host:port", or a port of this machine's loopback.

    Raises UsageError if it is not an address, or cannot be listened at.
    """

    def __init__(self, address: str) -> None:
        match = _ADDRESS.fullmatch(address)
        if match is None or int(match[2]) > 65535:
            raise UsageError(f"{address!r} is not an address for --metrics: write HOST:PORT, or a port")
        host = (match[1] or "127.0.0.1").strip("[]")
        self.text = b"# EOF\n"
        try:
            self._server = _Server((host, int(match[2])), self)
        except OSError as error:
            raise UsageError(f"--metrics cannot listen at {address}: {error.strerror or error}") from error
        self.port: int = self._server.server_address[1]
        shown = f"[{host}]" if ":" in host else host or "0.0.0.0"
        self.url = f"http://{shown}:{self.port}/metrics"
        threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="stepscope-metrics", daemon=True
        ).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, place: tuple[str, int], metrics: Metrics) -> None:
        self.address_family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        self.metrics = metrics
        self._room = threading.Semaphore(_MOST_CLIENTS)
        super().__init__(place, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hang up on more clients at once than any scraper opens, each of which would be a thread."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that hang up."""


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _TIMEOUT_S
    server_version = f"stepscope/{__version__}"
    sys_version = ""

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404)
            return
        text = self.server.metrics.text
        self.send_response(200)
        self.send_header("Content-Type", _CONTENT_TYPE)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """A scrape is no news."""
