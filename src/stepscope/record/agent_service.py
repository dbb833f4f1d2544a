"""What an agent does when it is asked: the same for requests that come over HTTP and in files."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import parse_qs

from stepscope import guard
from stepscope.record.agent_files import (
    CANCELLED,
    DONE,
    ENDED,
    FAILED,
    MAX_WAIT_S,
    RECORDING,
    WAITING,
    CaptureOrder,
    Refusal,
    Reply,
    decoded,
)

_KEPT: Final = 16
"""Captures that are remembered; older ones are forgotten, and their files removed where no run keeps them."""
_CAPTURE: Final = re.compile(r"/captures/([0-9a-z]{1,20})(?:/(trace|stop)|/files/([\w.-]{1,200}))?", re.ASCII)
_log = logging.getLogger("stepscope.agent")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a capture ended.

    Attributes:
        trace: the file, or None where nothing was recorded.
        first_step: the number of the first step in it.
        steps: how many steps are in it.
        problem: one sentence, where something went wrong.
    """

    trace: Path | None
    first_step: int | None = None
    steps: int | None = None
    problem: str | None = None


class Collection(Protocol):
    """A capture under way in the program. Every method may be called from any thread, and none waits for a step."""

    def is_recording(self) -> bool:
        """Whether its first step has begun."""

    def wait(self, timeout_s: float) -> Outcome | None:
        """How it ended; None where it has not after that long."""

    def finish(self) -> None:
        """End it at the end of the current step, and keep what was recorded."""

    def cancel(self) -> None:
        """End it and throw away what was recorded."""


class Program(Protocol):
    """The program an agent is in."""

    def current_step(self) -> int:
        """The number of the step that runs now."""

    def begin(self, order: CaptureOrder, out: Path) -> Collection:
        """Record what was ordered into the file `out`.

        Raises:
            Refusal: it cannot be done, such as from a step on that has begun.
        """


class AgentService:
    """Answers the requests of `stepscope.record.agent_files`; whatever it is sent, it raises nothing.

    Args:
        program: the program to record.
        identity: what the status says beside the step: process, rank, versions.
        new_trace: gives the file for the next trace; None for files of the agent's own, removed with it.
        run: the run folder, relative to which files are named, or None.
        on_shutdown: called when a client asks the agent to end.
    """

    def __init__(
        self,
        program: Program,
        *,
        identity: dict[str, Any],
        new_trace: Callable[[], Path] | None = None,
        run: Path | None = None,
        on_shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        self._program = program
        self._identity = identity
        self._new_trace = new_trace or self._own_trace
        self._run = run
        self._on_shutdown = on_shutdown
        self._captures: dict[str, _Capture] = {}
        self._begun = 0
        self._folder: Path | None = None
        self._closed = False
        self._lock = threading.Lock()

    def handle(self, method: str, target: str, body: bytes, *, may_wait: bool = True) -> Reply:
        """Carry a request out.

        Args:
            method: GET, POST or DELETE.
            target: path and query.
            body: JSON.
            may_wait: whether an answer may take as long as the client asks for.
        """
        with guard.attempt() as answering:
            path, _, query = target.partition("?")
            return self._routed(method, path, body, _wait_s(query) if may_wait else 0.0)
        error = answering.error
        if isinstance(error, Refusal):
            return Reply(error.status, {"error": error.sentence})
        return Reply(500, {"error": f"the agent failed: {type(error).__name__}: {guard.sentence(error)}"})

    def close(self) -> None:
        """Forget the captures and remove the agent's own files; a capture under way is thrown away."""
        with self._lock:
            self._closed = True
            for capture in self._captures.values():
                if not capture.ended:
                    with guard.attempt():  # the program may be ending
                        capture.cancel()
            self._captures.clear()
            folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _routed(self, method: str, path: str, body: bytes, wait_s: float) -> Reply:
        match path:
            case "/status":
                _require(method, "GET")
                return Reply(200, self._status())
            case "/captures" if method == "POST":
                return Reply(201, self._begin(CaptureOrder.from_json(decoded(body))).described(self._run))
            case "/captures":
                _require(method, "GET", "POST")
                return Reply(200, {"captures": [capture.described(self._run) for capture in self._all()]})
            case "/shutdown":
                _require(method, "POST")
                self._on_shutdown()
                return Reply(200, {"shutdown": True})
        parts = _CAPTURE.fullmatch(path)
        if parts is None:
            raise Refusal(404, "there is no such thing here; GET /status says who answers")
        return self._about(self._capture(parts[1]), method, parts[2], parts[3], wait_s)

    def _about(self, capture: _Capture, method: str, part: str | None, name: str | None, wait_s: float) -> Reply:
        if name is not None or part == "trace":
            _require(method, "GET")
            return Reply(200, file=capture.file(name))
        if part == "stop":
            _require(method, "POST")
            capture.finish()
        elif method == "DELETE":
            capture.cancel()
        else:
            _require(method, "GET", "DELETE")
            capture.wait(wait_s)
        return Reply(200, capture.described(self._run))

    def _status(self) -> dict[str, Any]:
        under_way = self._under_way()
        return self._identity | {
            "step": self._program.current_step(),
            "recording": under_way is not None and under_way.state == RECORDING,
            "capture": under_way.id if under_way else None,
        }

    def _begin(self, order: CaptureOrder) -> _Capture:
        with self._lock:
            if self._closed:
                raise Refusal(503, "the agent is ending")
            under_way = self._under_way()
            if under_way is not None:
                raise Refusal(409, f"the capture {under_way.id} is under way; stop or cancel it first")
            collection = self._program.begin(order, self._new_trace())
            self._begun += 1
            capture = _Capture(f"c{self._begun}", order, collection)
            self._captures[capture.id] = capture
            while len(self._captures) > _KEPT:
                self._forget(next(iter(self._captures)))
            return capture

    def _forget(self, id: str) -> None:
        capture = self._captures.pop(id)
        if self._folder is not None:
            for file in capture.files():
                if file.parent == self._folder:
                    file.unlink(missing_ok=True)

    def _under_way(self) -> _Capture | None:
        return next((capture for capture in self._all() if not capture.ended), None)

    def _all(self) -> list[_Capture]:
        return list(self._captures.values())

    def _capture(self, id: str) -> _Capture:
        capture = self._captures.get(id)
        if capture is None:
            raise Refusal(404, f"there is no capture {id}")
        return capture

    def _own_trace(self) -> Path:
        """A file in a folder that only this user can read."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="stepscope-"))
        return self._folder / f"trace-{self._begun + 1}.json.gz"


class _Capture:
    """One capture that a client asked for."""

    def __init__(self, id: str, order: CaptureOrder, collection: Collection) -> None:
        self.id = id
        self._order = order
        self._collection = collection
        self._begun_unix_s = time.time()
        self._cancelled = False

    @property
    def state(self) -> str:
        outcome = self._collection.wait(0)
        if self._cancelled:
            return CANCELLED
        if outcome is None:
            return RECORDING if self._collection.is_recording() else WAITING
        return FAILED if outcome.trace is None else DONE

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def wait(self, timeout_s: float) -> None:
        """Return when it has ended, or after that long."""
        if not self.ended:
            self._collection.wait(timeout_s)

    def finish(self) -> None:
        """End it and keep what was recorded; nothing where it has ended."""
        if self._cancelled:
            raise Refusal(409, f"the capture {self.id} was cancelled")
        if not self.ended:
            self._collection.finish()

    def cancel(self) -> None:
        """End it and throw away what was recorded; what has been saved stays."""
        if not self.ended:
            self._collection.cancel()
            outcome = self._collection.wait(0)
            self._cancelled = outcome is None or outcome.trace is None  # it may just have been saved

    def files(self) -> list[Path]:
        """The trace first, then what lies beside it under its name and belongs to it."""
        outcome = None if self._cancelled else self._collection.wait(0)
        if outcome is None or outcome.trace is None:
            return []
        trace = outcome.trace
        return [trace, *sorted(path for path in trace.parent.glob(f"{trace.name}.*") if path.is_file())]

    def file(self, name: str | None) -> Path:
        """The file of this name, or the trace."""
        files = self.files()
        if not files:
            raise Refusal(409, f"the capture {self.id} is {self.state} and has no trace")
        found = files[0] if name is None else next((file for file in files if file.name == name), None)
        if found is None:
            raise Refusal(404, f"the capture {self.id} has no file of that name")
        return found

    def described(self, run: Path | None) -> dict[str, Any]:
        """What a client is told of it."""
        outcome = self._collection.wait(0)
        files = self.files()
        return {
            "id": self.id,
            "state": self.state,
            "begun_unix_s": self._begun_unix_s,
            "asked": self._order.to_json(),
            "first_step": outcome.first_step if outcome else self._order.first_step,
            "steps": outcome.steps if outcome else None,
            "problem": outcome.problem if outcome else None,
            "files": [{"name": file.name, "bytes": file.stat().st_size} for file in files],
            "in_run": _relative(files[0], run) if files and run else None,
        }


def _relative(file: Path, folder: Path) -> str | None:
    return file.relative_to(folder).as_posix() if file.is_relative_to(folder) else None


def _require(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise Refusal(405, f"this is asked for with {' or '.join(allowed)}")


def _wait_s(query: str) -> float:
    """How long the client is ready to wait for the answer: ?wait=SECONDS."""
    if not query:
        return 0.0
    try:
        wait_s = float(parse_qs(query, max_num_fields=10).get("wait", ["0"])[-1])
    except ValueError:
        raise Refusal(400, "wait is a number of seconds") from None
    return min(MAX_WAIT_S, wait_s) if wait_s > 0 else 0.0
