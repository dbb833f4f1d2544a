"""Requests as files in a run folder, for processes that cannot be reached over the network.

    requests/rank<R>-<NAME>.json      a request: {"method": "GET", "target": "/status", "body": {}}
    requests/rank<R>-<NAME>.claimed   the same while a process works on it: renaming the file claims the request
    requests/rank<R>-<NAME>.reply     the reply: {"status": 200, "body": {...}}

A request without a method asks for a capture, `{"steps": 5}`; the reply comes when the capture has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from stepscope import guard
from stepscope.errors import AgentError
from stepscope.files import private_folder, whole_file
from stepscope.record.agent.protocol import ENDED, MAX_BODY_BYTES, Refusal, Reply, decoded

Handle = Callable[[str, str, bytes], Reply]
"""Carries a request out without waiting: method, target, body."""

_IDLE_S: Final = 0.5
_BUSY_S: Final = 0.05
_BUSY_FOR_S: Final = 30.0
"""After a request more are likely; for this long the folder is checked more often."""
_SETTLED_NS: Final = 2_000_000_000
"""Some file systems store times in whole seconds: a folder that changed this recently may have changed again since."""
_ANYWAY_S: Final = 10.0
_MAX_REPLY_BYTES: Final = 16 * 2**20
_CLIENT_LOOKS_S: Final = (0.02, 0.25)


class RequestFolder:
    """A thread that answers the request files of one rank; it adds no cost to a step.

    Args:
        folder: `requests` of a run folder.
        rank: whose requests are answered.
    """

    def __init__(self, folder: Path, rank: int, handle: Handle) -> None:
        self._folder = folder
        self._handle = handle
        self._name = re.compile(rf"rank{rank}-([0-9A-Za-z_]{{1,60}})\.json", re.ASCII)
        self._seen_ns = -1
        self._looked_s = float("-inf")
        self._captures: dict[Path, str] = {}
        self._stopped = threading.Event()

    def start(self) -> None:
        """Create the folder, so that clients can write into it, and start the thread."""
        with contextlib.suppress(OSError):
            private_folder(self._folder)
        threading.Thread(target=self._look, name="stepscope-requests", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def poll(self) -> bool:
        """Answer the waiting requests; return whether there were any."""
        claims = self._claims() if self._may_have_changed() else []
        for claimed in claims:
            self._answer(claimed)
        self._answer_ended()
        return bool(claims)

    @guard.entry(in_background=True)
    def _look(self) -> None:
        busy_until = 0.0
        while not self._stopped.wait(_BUSY_S if time.monotonic() < busy_until else _IDLE_S):
            with guard.attempt():  # the folder may contain anything
                if self.poll():
                    busy_until = time.monotonic() + _BUSY_FOR_S

    def _may_have_changed(self) -> bool:
        """Whether the folder's modification time has changed, or ten seconds have passed since the last look."""
        try:
            changed_ns = self._folder.stat().st_mtime_ns
        except OSError:
            return False
        now_s = time.monotonic()
        settled = changed_ns == self._seen_ns and abs(time.time_ns() - changed_ns) > _SETTLED_NS
        if settled and now_s - self._looked_s < _ANYWAY_S:
            return False
        self._seen_ns, self._looked_s = changed_ns, now_s
        return True

    def _claims(self) -> list[Path]:
        """Claim the waiting requests by renaming them."""
        claimed = []
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for name in sorted(entry.name for entry in entries if self._name.fullmatch(entry.name)):
                claim = (self._folder / name).with_suffix(".claimed")
                with contextlib.suppress(OSError):  # another process claimed it, or the client withdrew it
                    os.rename(self._folder / name, claim)
                    claimed.append(claim)
        return claimed

    def _answer(self, claimed: Path) -> None:
        try:
            request = decoded(_content(claimed))
            if not isinstance(request, dict):
                raise Refusal(400, "a request is a JSON object")
            if "method" in request:
                reply = self._handle(*_call(request))
            else:
                reply = self._handle("POST", "/captures", json.dumps(request).encode())
                if reply.status == 201:
                    self._captures[claimed] = reply.body["id"]
                    return
        except Refusal as refusal:
            reply = Reply(refusal.status, {"error": refusal.sentence})
        _reply(claimed, reply)

    def _answer_ended(self) -> None:
        """Answer the requests that only asked for a capture, once it has ended."""
        for claimed, id in list(self._captures.items()):
            reply = self._handle("GET", f"/captures/{id}", b"")
            if reply.status != 200 or reply.body["state"] in ENDED:
                del self._captures[claimed]
                _reply(claimed, reply)


class FileTransport:
    """The client side of one rank's request files.

    Args:
        folder: `requests` of a run folder.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank

    def call(self, method: str, target: str, body: dict[str, Any] | None, timeout_s: float) -> Reply:
        """Write a request and wait for the reply.

        Raises AgentError if the folder cannot be written, or no reply came in time.
        """
        stem = f"rank{self._rank}-{secrets.token_hex(8)}"
        request, reply = self._folder / f"{stem}.json", self._folder / f"{stem}.reply"
        try:
            _write_whole(request, {"method": method, "target": target, "body": body or {}})
        except OSError as error:
            raise AgentError(f"{self._folder} cannot be written: {error.strerror}") from error
        try:
            return self._awaited(reply, timeout_s)
        finally:
            for leftover in (request, reply):
                with contextlib.suppress(OSError):
                    leftover.unlink()

    def download(self, target: str, destination: Path, timeout_s: float) -> None:
        """Raise: files are not transferred this way; traces are read directly in the run folder."""
        raise AgentError(f"the trace of rank {self._rank} is not in the run folder, or is still being written there")

    def _awaited(self, reply: Path, timeout_s: float) -> Reply:
        until, pause_s = time.monotonic() + timeout_s, _CLIENT_LOOKS_S[0]
        while True:
            with contextlib.suppress(FileNotFoundError):
                return _reply_in(reply)
            if time.monotonic() >= until:
                raise AgentError(
                    f"rank {self._rank} has not answered the request in {self._folder} within {timeout_s:.0f} s: "
                    "either it has ended, or it was not started with --serve"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _CLIENT_LOOKS_S[1])


def _call(request: dict[str, Any]) -> tuple[str, str, bytes]:
    method, target = request.get("method"), request.get("target")
    if not isinstance(method, str) or not isinstance(target, str):
        raise Refusal(400, "a request has a method and a target, such as GET and /status")
    return method, target, json.dumps(request.get("body", {})).encode()


def _content(path: Path) -> bytes:
    """Read a file of limited size; a pipe or a link could block or mislead the process."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise Refusal(400, "a request is a file")
            return file.read(MAX_BODY_BYTES + 1)
    except OSError as error:
        raise Refusal(400, f"the request cannot be read: {error.strerror}") from None


def _reply(claimed: Path, reply: Reply) -> None:
    """Write the reply and remove the request; a folder that has been removed is ignored."""
    with contextlib.suppress(OSError):
        body = reply.body if reply.file is None else {"file": str(reply.file)}
        _write_whole(claimed.with_suffix(".reply"), {"status": reply.status, "body": body})
        claimed.unlink(missing_ok=True)


def _write_whole(path: Path, content: dict[str, Any]) -> None:
    with whole_file(path, private=True) as file:
        file.write(json.dumps(content).encode())


def _reply_in(path: Path) -> Reply:
    with path.open("rb") as file:
        content = file.read(_MAX_REPLY_BYTES)
    try:
        answer = json.loads(content)
        return Reply(int(answer["status"]), dict(answer["body"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise AgentError(f"{path} is not an answer of an agent") from error
