"""The client side of an agent: request captures and fetch the traces."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Protocol, TypeVar
from urllib.parse import quote

import msgspec

from stepscope.errors import AgentError
from stepscope.files import converted, whole_file
from stepscope.record.agent.protocol import DONE, ENDED, MAX_WAIT_S, TOO_LATE, VERSION, WAITING, CaptureOrder, Reply

_MAX_ANSWER_BYTES: Final = 16 * 2**20
_COPY_BYTES: Final = 1 << 20
_UNAUTHORIZED: Final = 401
_ATTEMPTS: Final = 6
_MARGIN_STEPS: Final = 2
"""The current step, and one for the profiler to warm up."""
_SAMPLE_S: Final = 0.25
_MARGIN_S: Final = 0.25
_PATIENT_SAMPLE_S: Final = 10.0
_FIRST_PAUSE_S: Final = 0.02
_MOST_COUNTED: Final = 2**53
_Count = Annotated[int, msgspec.Meta(ge=-1, lt=_MOST_COUNTED)]

Started = list[tuple["AgentClient", "CaptureState"]]
Item = TypeVar("Item")
Value = TypeVar("Value")


class RefusedError(AgentError):
    """An agent refused a request; `status` is the HTTP status."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Transport(Protocol):
    """A connection to one agent."""

    def call(self, method: str, target: str, body: dict[str, Any] | None, timeout_s: float) -> Reply:
        """Send a request and wait for the reply. Raises AgentError if the agent cannot be reached or does not reply."""

    def download(self, target: str, destination: Path, timeout_s: float) -> None:
        """Fetch a file, completely or not at all. Raises AgentError if the file cannot be fetched or written."""


class CaptureState(msgspec.Struct, frozen=True):
    """Progress of one capture.

    Attributes:
        first_step: number of the first recorded step; until that is known, the requested one.
        steps: number of recorded steps; None before the end.
        files: names and sizes in bytes, the trace first.
        in_run: the trace's path relative to the run folder, if it is saved there.
    """

    id: str
    state: str
    first_step: _Count | None
    steps: _Count | None
    problem: str | None
    files: tuple[tuple[str, int], ...]
    in_run: str | None

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @classmethod
    def of(cls, body: dict[str, Any]) -> CaptureState:
        files = tuple((os.path.basename(file["name"]), int(file["bytes"])) for file in body["files"])
        values: dict[str, Any] = {
            name: body.get(name) for name in ("id", "state", "first_step", "steps", "problem", "in_run")
        }
        return converted({**values, "files": files}, cls)


class AgentClient:
    """The client of one agent.

    Args:
        name: the agent's name in messages, such as "rank 0".
        run: the folder of its run, if it is known and readable from here.
        patience_s: how long to wait for a reply.
    """

    def __init__(
        self, transport: Transport, name: str, *, rank: int = 0, run: Path | None = None, patience_s: float = 20.0
    ) -> None:
        self.name = name
        self.rank = rank
        self._transport = transport
        self._run = run
        self._patience_s = patience_s

    def status(self) -> dict[str, Any]:
        """Return the process's identity and its current step.

        Raises AgentError if nobody answers, or something other than this agent does.
        """
        status = self._ask("GET", "/status")
        rank = status.get("rank", self.rank)
        if status.get("agent") != VERSION or not all(_is_count(each) for each in (status.get("step"), rank)):
            raise AgentError(f"{self.name} is not an agent of this version of stepscope")
        self.rank = rank
        return status

    def captures(self) -> list[CaptureState]:
        return [_state(self.name, body) for body in self._ask("GET", "/captures").get("captures", [])]

    def start(self, order: CaptureOrder) -> CaptureState:
        """Begin a capture.

        Raises:
            RefusedError: for example, another capture is running; its status is `TOO_LATE` if the first step has begun.
            AgentError: the agent does not reply.
        """
        return self._captured("POST", "/captures", order.to_json())

    def capture(self, id: str, wait_s: float = 0.0) -> CaptureState:
        """Return the state of a capture; with `wait_s`, wait up to that long for the capture to end."""
        return self._captured("GET", f"/captures/{quote(id)}?wait={min(wait_s, MAX_WAIT_S):.3f}")

    def stop(self, id: str) -> CaptureState:
        return self._captured("POST", f"/captures/{quote(id)}/stop")

    def cancel(self, id: str) -> CaptureState:
        return self._captured("DELETE", f"/captures/{quote(id)}")

    def shutdown(self) -> None:
        """Stop the agent; the program continues."""
        self._ask("POST", "/shutdown")

    def wait(self, id: str, timeout_s: float) -> CaptureState:
        until, pauses_s = time.monotonic() + timeout_s, _growing_pauses()
        while True:
            asked_s = time.monotonic()
            left_s = max(0.0, until - asked_s)
            state = self.capture(id, left_s)
            if state.ended or left_s <= 0:
                return state
            if time.monotonic() - asked_s < _FIRST_PAUSE_S:  # file requests are answered at once
                time.sleep(next(pauses_s))

    def begun(self, id: str) -> CaptureState:
        """Wait until a capture's first step has begun or the capture has ended, and return its state."""
        pauses_s = _growing_pauses()
        while (state := self.capture(id)).state == WAITING:
            time.sleep(next(pauses_s))
        return state

    def fetch(self, state: CaptureState, destination: Path) -> Path:
        """Copy the trace of a finished capture to `destination`, together with its companion files.

        Raises AgentError if there is no trace, or it cannot be fetched or written.
        """
        if state.state != DONE or not state.files:
            raise AgentError(f"{self.name}: {state.problem or f'the capture is {state.state} and has no trace'}")
        trace_name = state.files[0][0]
        for name, _ in state.files[::-1]:  # the trace comes last, so that its presence means that all files are there
            if not name.startswith(trace_name):
                continue
            place = destination.with_name(destination.name + name.removeprefix(trace_name))
            local = self._local(state, name)
            if local is not None:
                _copy(local, place)
            else:
                self._transport.download(f"/captures/{quote(state.id)}/files/{quote(name)}", place, self._patience_s)
        return destination

    def trace_in_run(self, state: CaptureState) -> Path | None:
        """Return the path of the trace in the run folder; None if it cannot be read from here."""
        return self._local(state, state.files[0][0]) if state.files else None

    def _local(self, state: CaptureState, name: str) -> Path | None:
        if self._run is None or state.in_run is None:
            return None
        place = (self._run / state.in_run).with_name(name)
        if ".." in place.parts or not place.is_relative_to(self._run) or not place.is_file():
            return None
        return place if place.stat().st_size == dict(state.files).get(name) else None

    def _captured(self, method: str, target: str, body: dict[str, Any] | None = None) -> CaptureState:
        return _state(self.name, self._ask(method, target, body))

    def _ask(self, method: str, target: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        waiting_s = MAX_WAIT_S if "?wait=" in target else 0.0
        reply = self._transport.call(method, target, body, self._patience_s + waiting_s)
        if reply.status < 400:
            return reply.body
        sentence = str(reply.body.get("error") or f"it answered {reply.status}")
        if reply.status == _UNAUTHORIZED:
            sentence += "; give it with --token or STEPSCOPE_TOKEN"
        raise RefusedError(reply.status, f"{self.name}: {sentence}")


def _growing_pauses() -> Iterator[float]:
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(pause_s * 1.5, 1.0)


class HttpTransport:
    """HTTP to an agent at an address.

    Args:
        address: "host:port", or "unix:" and a path.
    """

    def __init__(self, address: str, token: str | None) -> None:
        self._address = address
        self._headers = {"Host": "localhost", "Connection": "close"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def call(self, method: str, target: str, body: dict[str, Any] | None, timeout_s: float) -> Reply:
        with self._answer(method, target, body, timeout_s) as answer:
            content = answer.read(_MAX_ANSWER_BYTES)
            return Reply(answer.status, _object(content, self._address))

    def download(self, target: str, destination: Path, timeout_s: float) -> None:
        with self._answer("GET", target, None, timeout_s) as answer:
            if answer.status != 200:
                body = _object(answer.read(_MAX_ANSWER_BYTES), self._address)
                raise RefusedError(answer.status, str(body.get("error")))
            with _whole_file(destination) as file:
                shutil.copyfileobj(answer, file, _COPY_BYTES)
                if answer.length:  # the connection ended before the whole file had arrived
                    raise http.client.IncompleteRead(b"", answer.length)

    @contextlib.contextmanager
    def _answer(
        self, method: str, target: str, body: dict[str, Any] | None, timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        connection = _connection(self._address, timeout_s)
        try:
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, target, content, self._headers)
            yield connection.getresponse()
        except ConnectionRefusedError:
            raise AgentError(f"nothing listens at {self._address}: the process or its agent has ended") from None
        except TimeoutError:
            raise AgentError(f"{self._address} has not answered within {timeout_s:.0f} s") from None
        except http.client.RemoteDisconnected:
            raise AgentError(f"{self._address} hung up without an answer: the process has ended, or is busy") from None
        except http.client.IncompleteRead:
            raise AgentError(f"{self._address} did not finish its answer: the process has ended") from None
        except http.client.HTTPException as error:
            raise AgentError(f"{self._address} is not an agent of stepscope ({type(error).__name__})") from error
        except OSError as error:
            raise AgentError(f"{self._address} cannot be reached: {error.strerror or error}") from error
        finally:
            connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connection(address: str, timeout_s: float) -> http.client.HTTPConnection:
    if address.startswith("unix:"):
        return _UnixConnection(address.removeprefix("unix:"), timeout_s)
    host, _, port = address.rpartition(":")
    return http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout_s)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and -1 <= value < _MOST_COUNTED


def _state(name: str, body: dict[str, Any]) -> CaptureState:
    try:
        return CaptureState.of(body)
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise AgentError(f"{name} is not an agent of this version of stepscope") from error


def _object(content: bytes, address: str) -> dict[str, Any]:
    try:
        body = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise AgentError(f"{address} is not an agent of stepscope: its answer is not JSON")
    return body


def _copy(source: Path, destination: Path) -> None:
    if destination.exists() and source.samefile(destination):
        return
    with source.open("rb") as file, _whole_file(destination) as copy:
        shutil.copyfileobj(file, copy, _COPY_BYTES)


@contextlib.contextmanager
def _whole_file(destination: Path) -> Iterator[BinaryIO]:
    try:
        with whole_file(destination, private=True) as file:
            yield file
    except OSError as error:
        if isinstance(error, (ConnectionError, TimeoutError)):
            raise
        raise AgentError(f"{destination} cannot be written: {error.strerror or error}") from error


def start_together(clients: Sequence[AgentClient], order: CaptureOrder) -> Started:
    """Begin a capture of the same step numbers in every process.

    The first step must lie ahead of every process: it is the furthest process's step plus the number of steps that can
    run while all are being asked. If one process has passed it anyway, all captures are cancelled and tried again with
    a larger margin. A duration in seconds is converted to a number of steps.

    Raises:
        AgentError: a process cannot be reached or refuses; then none records.
    """
    if len(clients) == 1:
        return [(clients[0], clients[0].start(order))]
    step, steps_per_s, answer_s = _pace(clients, order.seconds)
    if order.seconds is not None:
        order = msgspec.structs.replace(order, steps=max(1, round(order.seconds * steps_per_s)), seconds=None)
    margin = _MARGIN_STEPS + math.ceil(steps_per_s * (2 * answer_s + _MARGIN_S))
    for _ in range(_ATTEMPTS):
        started = _started(clients, msgspec.structs.replace(order, first_step=step + margin))
        if started is not None:
            return started
        step = max(for_each(clients, lambda client: int(client.status()["step"])))
        margin *= 4
    raise AgentError("the processes run their steps faster than they can be asked to record the same ones")


def cancel_all(started: Started) -> None:
    for client, state in started:
        with contextlib.suppress(AgentError):
            client.cancel(state.id)


def for_each(asked: Sequence[Item], ask: Callable[[Item], Value]) -> list[Value]:
    """Ask all at the same time; return the replies in the same order, or raise the first error."""
    pool = ThreadPoolExecutor(max(1, len(asked)))
    try:
        return list(pool.map(ask, asked))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for replies


def for_each_pair(started: Started, ask: Callable[[AgentClient, CaptureState], CaptureState]) -> Started:
    """Ask every client about its capture at the same time; return the new states in the same order."""
    states = for_each(started, lambda pair: ask(*pair))
    return [(client, state) for (client, _), state in zip(started, states, strict=True)]


def _started(clients: Sequence[AgentClient], order: CaptureOrder) -> Started | None:
    """Begin in every process; return None, with nothing started, if the first step has already begun in one of them."""

    def begun(client: AgentClient) -> CaptureState | AgentError:
        try:
            return client.start(order)
        except AgentError as error:
            return error

    answers = list(zip(clients, for_each(clients, begun), strict=True))
    started = [(client, answer) for client, answer in answers if isinstance(answer, CaptureState)]
    errors = [answer for _, answer in answers if isinstance(answer, AgentError)]
    if not errors:
        return started
    cancel_all(started)
    others = [error for error in errors if not (isinstance(error, RefusedError) and error.status == TOO_LATE)]
    if others:
        raise others[0]
    return None


def _pace(clients: Sequence[AgentClient], seconds: float | None) -> tuple[int, float, float]:
    """Return the furthest step, steps per second, and the seconds that asking all of them takes.

    If a duration must be converted to steps, wait for the end of a step, at most that long or ten seconds.
    """
    until = time.monotonic() + (_SAMPLE_S if seconds is None else max(seconds, _PATIENT_SAMPLE_S))
    begun = time.monotonic()
    first = max(_steps(clients))
    answer_s = time.monotonic() - begun
    while True:
        time.sleep(_SAMPLE_S)
        asked = time.monotonic()
        step = max(_steps(clients))
        answer_s = max(answer_s, time.monotonic() - asked)
        enough = seconds is None or (step > first and asked - begun >= min(seconds, 1.0))
        if enough or time.monotonic() >= until:
            return step, (step - first) / (time.monotonic() - begun), answer_s


def _steps(clients: Sequence[AgentClient]) -> list[int]:
    return for_each(clients, lambda client: int(client.status()["step"]))
