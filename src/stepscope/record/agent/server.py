"""An agent: a thread in a training process through which another process can record a few of its steps.

stepscope.start_server()        in the script, or `stepscope run --serve`; then, from anywhere else:
stepscope attach PID
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from socket import gethostname
from typing import Any, Final
from urllib.parse import parse_qs

from stepscope import guard
from stepscope.errors import AgentError, UsageError
from stepscope.record.agent import protocol
from stepscope.record.agent.http import Endpoint
from stepscope.record.agent.protocol import (
    CANCELLED,
    DONE,
    ENDED,
    FAILED,
    MAX_WAIT_S,
    RECORDING,
    TOO_LATE,
    VERSION,
    WAITING,
    AgentFile,
    CaptureOrder,
    Refusal,
    Reply,
    RequestFolder,
    decoded,
)
from stepscope.record.captures import CaptureHandle, CaptureRequest
from stepscope.record.controller import StepController
from stepscope.record.manifest import rank_and_world_size
from stepscope.record.run_folder import RunFolder
from stepscope.threads import Lock

_KEPT: Final = 16
"""Number of captures kept; older ones are dropped, with their files unless a run keeps those."""
_CAPTURE: Final = re.compile(r"/captures/([0-9a-z]{1,20})(?:/(trace|stop)|/files/([\w.-]{1,200}))?", re.ASCII)
_ANSWER_S: Final = 0.2
_PATIENCE_S: Final = 2.0


class AgentService:
    """The service that answers the protocol's requests; it never raises.

    Args:
        identity: what the status contains besides the step: process, rank, versions.
        new_trace: returns the path of the next trace; None for temporary files that are removed with the agent.
        run: the run folder that paths in replies are relative to, or None.
        on_shutdown: called when a client asks the agent to stop.
    """

    def __init__(
        self,
        controller: StepController,
        *,
        identity: dict[str, Any],
        new_trace: Callable[[], Path] | None = None,
        run: Path | None = None,
        on_shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        self._controller = controller
        self._identity = identity
        self._new_trace = new_trace or self._own_trace
        self._run = run
        self._on_shutdown = on_shutdown
        self._captures: dict[str, _Capture] = {}
        self._begun = 0
        self._folder: Path | None = None
        self._closed = False
        self._lock = Lock()

    def handle(self, method: str, target: str, body: bytes, *, may_wait: bool = True) -> Reply:
        """Carry out a request.

        Args:
            target: path and query.
            may_wait: whether the reply may be delayed as long as the client allows.
        """
        with guard.attempt() as answering:
            path, _, query = target.partition("?")
            return self._routed(method, path, body, _wait_s(query) if may_wait else 0.0)
        error = answering.error
        if isinstance(error, Refusal):
            return Reply(error.status, {"error": error.sentence})
        return Reply(500, {"error": f"the agent failed: {type(error).__name__}: {guard.sentence(error)}"})

    def close(self) -> None:
        """Drop all captures and remove the agent's own files; a running capture is discarded."""
        with self._lock:
            self._closed = True
            for capture in self._captures.values():
                guard.attempted(capture.cancel)  # the program may be exiting
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
            raise Refusal(404, "there is nothing at this path; GET /status identifies the process")
        capture = self._captures.get(parts[1])
        if capture is None:
            raise Refusal(404, f"there is no capture {parts[1]}")
        return self._about(capture, method, parts[2], parts[3], wait_s)

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
            with contextlib.suppress(TimeoutError):
                capture.handle.wait(wait_s)
        return Reply(200, capture.described(self._run))

    def _status(self) -> dict[str, Any]:
        under_way = self._under_way()
        return self._identity | {
            "step": self._controller.current_step(),
            "recording": under_way is not None and under_way.state == RECORDING,
            "capture": under_way.id if under_way else None,
            "memory": memory_now(),
        }

    def _begin(self, order: CaptureOrder) -> _Capture:
        with self._lock:
            if self._closed:
                raise Refusal(503, "the agent is ending")
            under_way = self._under_way()
            if under_way is not None:
                raise Refusal(409, f"the capture {under_way.id} is under way; stop or cancel it first")
            handle = begin_capture(self._controller, order, self._new_trace())
            self._begun += 1
            capture = _Capture(f"c{self._begun}", order, handle)
            self._captures[capture.id] = capture
            while len(self._captures) > _KEPT:
                self._forget(next(iter(self._captures)))
            return capture

    def _forget(self, id: str) -> None:
        for file in self._captures.pop(id).files():
            if file.parent == self._folder:
                file.unlink(missing_ok=True)

    def _under_way(self) -> _Capture | None:
        return next((capture for capture in self._all() if capture.state not in ENDED), None)

    def _all(self) -> list[_Capture]:
        return list(self._captures.values())

    def _own_trace(self) -> Path:
        """Return a path in a folder that only this user can read."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="stepscope-"))
        return self._folder / f"trace-{self._begun + 1}.json.gz"


def memory_now() -> dict[str, int | None]:
    """Bytes of this process in memory, and of tensors on its devices; None if unknown. Waits for no device."""
    resident = device = None
    with guard.attempt(), open("/proc/self/statm", "rb") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with guard.attempt():
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_initialized():
            device = sum(cuda.memory_allocated(number) for number in range(cuda.device_count()))
    return {"process_bytes": resident, "device_bytes": device}


def begin_capture(controller: StepController, order: CaptureOrder, out: Path) -> CaptureHandle:
    """Record what was ordered into the file `out`. Raises Refusal if the first step has begun already."""

    def refuse_passed() -> None:
        step = controller.current_step()
        if order.first_step is not None and order.first_step <= step:
            raise Refusal(TOO_LATE, f"step {order.first_step} is no longer ahead: step {step} has begun")

    refuse_passed()
    request = CaptureRequest(order.steps, order.seconds, order.first_step, order.options, out, order.timeout_s)
    handle = controller.request(request)
    try:
        refuse_passed()  # it may have begun in the meantime
    except Refusal:
        handle.cancel()
        raise
    return handle


class _Capture:
    def __init__(self, id: str, order: CaptureOrder, handle: CaptureHandle) -> None:
        self.id = id
        self.handle = handle
        self._order = order
        self._begun_unix_s = time.time()
        self._cancelled = False

    @property
    def state(self) -> str:
        result = self.handle.result
        if self._cancelled:
            return CANCELLED
        if result is None:
            return RECORDING if self.handle.is_recording else WAITING
        return FAILED if result.path is None else DONE

    def finish(self) -> None:
        """End it and keep the recording; does nothing after the end."""
        if self._cancelled:
            raise Refusal(409, f"the capture {self.id} was cancelled")
        self.handle.finish()

    def cancel(self) -> None:
        """End it and discard the recording; a trace that is already saved stays."""
        if self.state not in ENDED:
            self.handle.cancel()
            result = self.handle.result
            self._cancelled = result is None or result.path is None  # it may have been saved in the meantime

    def files(self) -> list[Path]:
        """Return the trace first, then its companion files."""
        result = None if self._cancelled else self.handle.result
        if result is None or result.path is None:
            return []
        trace = result.path
        return [trace, *sorted(path for path in trace.parent.glob(f"{trace.name}.*") if path.is_file())]

    def file(self, name: str | None) -> Path:
        files = self.files()
        if not files:
            raise Refusal(409, f"the capture {self.id} is {self.state} and has no trace")
        found = files[0] if name is None else next((file for file in files if file.name == name), None)
        if found is None:
            raise Refusal(404, f"the capture {self.id} has no file of that name")
        return found

    def described(self, run: Path | None) -> dict[str, Any]:
        result = self.handle.result
        files = self.files()
        in_run = run is not None and bool(files) and files[0].is_relative_to(run)
        return {
            "id": self.id,
            "state": self.state,
            "begun_unix_s": self._begun_unix_s,
            "asked": self._order.to_json(),
            "first_step": result.first_step if result else self._order.first_step,
            "steps": result.steps if result else None,
            "problem": result.problem if result else None,
            "files": [{"name": file.name, "bytes": file.stat().st_size} for file in files],
            "in_run": files[0].relative_to(run).as_posix() if in_run and run else None,
        }


def _require(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise Refusal(405, f"this request needs the method {' or '.join(allowed)}")


def _wait_s(query: str) -> float:
    """Read how long the client will wait for the reply, from ?wait=SECONDS."""
    try:
        wait_s = float(parse_qs(query, max_num_fields=10).get("wait", ["0"])[-1]) if query else 0.0
    except ValueError:
        raise Refusal(400, "wait is a number of seconds") from None
    return min(MAX_WAIT_S, wait_s) if wait_s > 0 else 0.0


_lock: Final = Lock()
_agent: Agent | None = None


class Agent:
    """The agent of this process; it stops when it is closed or the process ends.

    Attributes:
        address: "host:port", or "unix:" and a path.
        token: the token that clients need; `stepscope attach` reads it from the agent file.
    """

    def __init__(
        self, endpoint: Endpoint, controller: StepController, run: RunFolder | None, rank: int, world_size: int
    ) -> None:
        self.token = endpoint.token or secrets.token_urlsafe(32)
        self._process = os.getpid()
        self._in_run = run is not None
        self._service = AgentService(
            controller,
            identity=_identity(run, rank, world_size),
            new_trace=(lambda: run.new_trace_path(rank)) if run else None,
            run=run.path if run else None,
            on_shutdown=self._close_soon,
        )
        self._server = endpoint.listen(self.token, self._service.handle)
        self.address = endpoint.address_of(self._server)
        # a helper process of the rank is found by its number only
        answers = run if run is not None and not _is_served(run, rank) else None
        self._requests = RequestFolder(answers.requests, rank, self._without_waiting) if answers else None
        self._thread = threading.Thread(target=self._serve, name="stepscope-agent", daemon=True)
        self._files = [] if endpoint.socket is None else [endpoint.socket]
        self._held = guard.on_failure("the agent", self._abandon)
        is_started = False
        try:
            self._announce(run, answers, rank, world_size)
            self._thread.start()
            if self._requests:
                self._requests.start()
            atexit.register(self._at_exit)
            is_started = True
        finally:
            if not is_started:
                guard.off(self._held)
                self._withdraw()
                self._server.server_close()

    def __repr__(self) -> str:
        return f"<stepscope agent at {self.address}>"  # the token must not appear in a log

    @guard.entry
    def close(self) -> None:
        """Stop the agent and discard a running capture. Closing twice does nothing."""
        guard.off(self._held)
        atexit.unregister(self._at_exit)
        self._abandon()
        self._thread.join(_PATIENCE_S)
        self._server.server_close()
        self._service.close()

    def _abandon(self) -> None:
        """Stop answering, after an internal error too."""
        _forget(self)
        self._withdraw()
        if self._requests:
            self._requests.stop()
        self._server.stop()

    def _announce(self, run: RunFolder | None, answers: RunFolder | None, rank: int, world_size: int) -> None:
        content = AgentFile(
            address=self.address,
            token=self.token,
            pid=self._process,
            host=gethostname(),
            rank=rank,
            world_size=world_size,
            run=str(run.path) if run else None,
            namespace=protocol.own_namespace(),
        )
        self._files.append(protocol.write_user_file(content))
        if answers is not None:
            self._files.append(protocol.write_agent_file(answers.agents / f"rank{rank}.json", content))

    def _without_waiting(self, method: str, target: str, body: bytes) -> Any:
        return self._service.handle(method, target, body, may_wait=False)

    def _withdraw(self) -> None:
        if os.getpid() == self._process:  # after a fork the child has this object, but the files belong to the parent
            while self._files:
                protocol.remove(self._files.pop())

    def _close_soon(self) -> None:
        """Close after the client that asked for it has received the reply."""
        timer = threading.Timer(_ANSWER_S, self.close)
        timer.daemon = True
        timer.start()

    @guard.entry(in_background=True)
    def _serve(self) -> None:
        self._server.serve_until_stopped()

    @guard.entry
    def _at_exit(self) -> None:
        """Remove the agent's files; the threads end with the process, and recorded traces stay in the run folder."""
        if os.getpid() == self._process:
            self._withdraw()
            if not self._in_run:
                self._service.close()

    def _leave_child(self) -> None:
        """Close the listening socket in a forked child, which has no thread to serve it."""
        self._server.socket.close()


def _inert() -> Agent:
    """Return an agent that listens nowhere, for the program to use after an internal error."""
    found = Agent.__new__(Agent)
    found.address = found.token = ""
    return found


@guard.entry(otherwise=_inert(), raises=(UsageError, AgentError))
def start_server(
    port: int = 0, *, address: str = "127.0.0.1", token: str | None = None, socket: str | os.PathLike[str] | None = None
) -> Agent:
    """Let other processes record steps of this one, with `stepscope attach`.

    Starts a thread that waits for requests and costs the program nothing until one arrives. A process has one agent: a
    second call returns the first one's. Steps are detected as in `stepscope run`.

    Args:
        port: port to listen on; 0 chooses a free one.
        address: address to listen on; the default is reachable from this machine only.
        token: token that clients need, at least 16 characters; random by default. It is written to a file that only
            this user can read, where `stepscope attach` finds it.
        socket: path of a Unix socket to listen on instead; only this user can connect to it.

    Raises:
        UsageError: the arguments are invalid.
        AgentError: it cannot listen there, or cannot write its file.
    """
    endpoint = Endpoint(
        address=address, port=port, token=token, socket=None if socket is None else Path(socket).absolute()
    )
    endpoint.check()
    with _lock:
        if _agent is not None:
            if not endpoint.includes(_agent.address):
                guard.tell(f"this process already has an agent at {_agent.address}; no second one is started")
            return _agent
        path = os.environ.get("STEPSCOPE_RUN")  # the run folder of the `stepscope run` that started this process
        return _started(endpoint, RunFolder.open(Path(path)) if path else None, *rank_and_world_size())


def serve_for_run(run_folder: RunFolder, rank: int) -> Agent | None:
    """Start the agent of one rank for `stepscope run --serve`, on a free local port and in the run's request files.

    An error is reported on stderr; the program runs without an agent.
    """
    with _lock:
        if _agent is not None:
            return _agent
        with guard.attempt() as starting:
            return _started(Endpoint(), run_folder, rank, rank_and_world_size()[1])
        guard.tell(f"the program runs without an agent: {guard.sentence(starting.error)}")
        return None


def _started(endpoint: Endpoint, run: RunFolder | None, rank: int, world_size: int) -> Agent:
    global _agent
    _agent = Agent(endpoint, installed_controller(), run, rank, world_size)
    return _agent


def installed_controller() -> StepController:
    """Return this process's step controller; if there is none yet, install hooks in torch and jax.

    Raises AgentError if neither jax nor torch is imported, so nothing can be recorded.
    """
    if "jax" not in sys.modules:
        try:
            import torch  # noqa: F401  # the hooks need it, and the program will
        except ImportError as error:
            raise AgentError(
                f"an agent records with jax, which is not imported, or torch, which cannot be imported here: {error}"
            ) from error
    from stepscope.record.hooks import watch_steps

    controller = watch_steps()
    controller.stays = True
    return controller


def _forget(agent: Agent) -> None:
    global _agent
    with _lock:
        if _agent is agent:
            _agent = None


def _is_served(run: RunFolder, rank: int) -> bool:
    """Whether another live process already serves this rank."""
    other = protocol.read_agent_file(run.agents / f"rank{rank}.json")
    return other is not None and other.is_here and not other.is_gone and other.pid != os.getpid()


def _identity(run: RunFolder | None, rank: int, world_size: int) -> dict[str, Any]:
    from stepscope import __version__

    return {
        "agent": VERSION,
        "stepscope": __version__,
        "pid": os.getpid(),
        "host": gethostname(),
        "rank": rank,
        "world_size": world_size,
        "run": str(run.path) if run else None,
    }


@guard.entry
def _after_fork_in_child() -> None:
    """Forget the agent in a forked child, which has neither its thread nor the program's steps."""
    global _agent
    inherited, _agent = _agent, None
    if inherited is not None:
        inherited._leave_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
