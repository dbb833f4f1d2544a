"""An agent: a thread in a training process through which another process can record a few of its steps.

stepscope.start_server()        in the script, or `stepscope run --serve`; then, from anywhere else:
stepscope attach PID
"""

from __future__ import annotations

import atexit
import os
import secrets
import sys
import threading
from pathlib import Path
from socket import gethostname
from typing import Any, Final

from stepscope import guard
from stepscope.errors import AgentError, UsageError
from stepscope.record import agent_files
from stepscope.record.agent_files import TOO_LATE, VERSION, AgentFile, CaptureOrder, Refusal
from stepscope.record.agent_http import Place
from stepscope.record.agent_service import AgentService, Outcome, Program
from stepscope.record.controller import CaptureHandle, CaptureRequest, StepController
from stepscope.record.manifest import rank_and_world_size
from stepscope.record.requests import RequestFolder
from stepscope.record.run_folder import RunFolder


class ControlledProgram:
    """A program whose steps a controller is told of."""

    def __init__(self, controller: StepController) -> None:
        self._controller = controller

    def current_step(self) -> int:
        """The number of the step that runs now."""
        return self._controller.current_step()

    def begin(self, order: CaptureOrder, out: Path) -> ControlledCollection:
        """Record what was ordered into the file `out`.

        Raises:
            Refusal: the first step has begun already.
        """
        self._refuse_passed(order)
        handle = self._controller.request(
            CaptureRequest(
                steps=order.steps,
                seconds=order.seconds,
                first_step=order.first_step,
                options=order.options,
                out=out,
                timeout_s=order.timeout_s,
            )
        )
        try:
            self._refuse_passed(order)  # it may have begun just now
        except Refusal:
            handle.cancel()
            raise
        return ControlledCollection(handle)

    def _refuse_passed(self, order: CaptureOrder) -> None:
        step = self._controller.current_step()
        if order.first_step is not None and order.first_step <= step:
            raise Refusal(TOO_LATE, f"step {order.first_step} is not to come: step {step} has begun")


class ControlledCollection:
    """A capture that the controller was asked for."""

    def __init__(self, handle: CaptureHandle) -> None:
        self._handle = handle

    def is_recording(self) -> bool:
        """Whether its first step has begun."""
        return self._handle.is_recording

    def wait(self, timeout_s: float) -> Outcome | None:
        """How it ended; None where it has not after that long."""
        try:
            result = self._handle.wait(timeout_s)
        except TimeoutError:
            return None
        return Outcome(result.path, result.first_step, result.steps, result.problem)

    def finish(self) -> None:
        """End it at the end of the current step, and keep what was recorded."""
        self._handle.finish()

    def cancel(self) -> None:
        """End it and throw away what was recorded."""
        self._handle.cancel()


def installed_program() -> ControlledProgram:
    """This process's program; where nobody counts its steps yet, hooks in torch and jax do from now on.

    Raises:
        AgentError: there is neither jax nor torch, so there is nothing to record with.
    """
    if "jax" not in sys.modules:
        try:
            import torch  # noqa: F401  # the hooks need it, and the program will
        except ImportError as error:
            raise AgentError(
                f"an agent records with torch, which cannot be imported here, or with jax, which is not: {error}"
            ) from error
    from stepscope.record.hooks import watch_steps

    controller = watch_steps()
    controller.stays = True
    return ControlledProgram(controller)


_ANSWER_S: Final = 0.2
_PATIENCE_S: Final = 2.0
_lock = threading.RLock()
_agent: Agent | None = None


class Agent:
    """The agent of this process; ends with the process, or when closed.

    Attributes:
        address: where it listens: "host:port", or "unix:" and a path.
        token: what a client must show; `stepscope attach` finds it in the agent's file.
    """

    def __init__(self, place: Place, program: Program, run: RunFolder | None, rank: int, world_size: int) -> None:
        self.token = place.token or secrets.token_urlsafe(32)
        self._process = os.getpid()
        self._in_run = run is not None
        self._service = AgentService(
            program,
            identity=_identity(run, rank, world_size),
            new_trace=(lambda: run.new_trace_path(rank)) if run else None,
            run=run.path if run else None,
            on_shutdown=self._close_soon,
        )
        self._server = place.listen(self.token, self._service.handle)
        self.address = place.address_of(self._server)
        # a helper of the process that answers for this rank is found by its number only
        answers = run if run is not None and not _is_served(run, rank) else None
        self._requests = RequestFolder(answers.requests, rank, self._without_waiting) if answers else None
        self._thread = threading.Thread(target=self._serve, name="stepscope-agent", daemon=True)
        self._files = [] if place.socket is None else [place.socket]
        self._held = guard.on_failure("the agent", self._abandon)
        is_started = False
        try:
            self._announce(run, answers, rank, world_size)
            self._start()
            is_started = True
        finally:
            if not is_started:
                guard.off(self._held)
                self._withdraw()
                self._server.server_close()

    def __repr__(self) -> str:
        return f"<stepscope agent at {self.address}>"  # without the token, which must not end up in a log

    @guard.entry
    def close(self) -> None:
        """End the agent; a capture under way is thrown away. Closing twice does nothing."""
        _forget(self)
        guard.off(self._held)
        atexit.unregister(self._at_exit)
        self._withdraw()
        if self._requests:
            self._requests.stop()
        self._server.stop()
        self._thread.join(_PATIENCE_S)
        self._server.server_close()
        self._service.close()

    def _abandon(self) -> None:
        """After an error of ours: answer nobody any more."""
        _forget(self)
        self._withdraw()
        if self._requests:
            self._requests.stop()
        self._server.stop()

    def _announce(self, run: RunFolder | None, answers: RunFolder | None, rank: int, world_size: int) -> None:
        """Write the files by which clients find the agent."""
        content = AgentFile(
            address=self.address,
            token=self.token,
            pid=self._process,
            host=gethostname(),
            rank=rank,
            world_size=world_size,
            run=str(run.path) if run else None,
            namespace=agent_files.own_namespace(),
        )
        self._files.append(agent_files.write_user_file(content))
        if answers is not None:
            self._files.append(agent_files.write_agent_file(answers.agents / f"rank{rank}.json", content))

    def _start(self) -> None:
        self._thread.start()
        if self._requests:
            self._requests.start()
        atexit.register(self._at_exit)

    def _without_waiting(self, method: str, target: str, body: bytes) -> Any:
        return self._service.handle(method, target, body, may_wait=False)

    def _withdraw(self) -> None:
        if os.getpid() == self._process:  # a forked child has the object, but the files are its parent's
            while self._files:
                agent_files.remove(self._files.pop())

    def _close_soon(self) -> None:
        """Let whoever asked for the end have an answer first."""
        timer = threading.Timer(_ANSWER_S, self.close)
        timer.daemon = True
        timer.start()

    @guard.entry(in_background=True)
    def _serve(self) -> None:
        self._server.serve_until_stopped()

    @guard.entry
    def _at_exit(self) -> None:
        """Leave nothing behind; the threads end with the process, and what a run recorded stays in its folder."""
        if os.getpid() == self._process:
            self._withdraw()
            if not self._in_run:
                self._service.close()

    def _leave_child(self) -> None:
        """Give up the listening socket in a forked child, where no thread serves it."""
        self._server.socket.close()


def _inert() -> Agent:
    """What a program is given after an error of ours: an agent that listens nowhere."""
    found = Agent.__new__(Agent)
    found.address = found.token = ""
    return found


_INERT: Final = _inert()


@guard.entry(otherwise=_INERT, raises=(UsageError, AgentError))
def start_server(
    port: int = 0,
    *,
    address: str = "127.0.0.1",
    token: str | None = None,
    socket: str | os.PathLike[str] | None = None,
) -> Agent:
    """Let other processes record steps of this one, with `stepscope attach`.

    Starts a thread that waits for requests and costs the program nothing until one comes. A process has one agent: a
    second call gives the first one's. Steps are found as `stepscope run` finds them.

    Args:
        port: to listen on; 0 chooses a free one.
        address: to listen on; only this machine can connect to the default.
        token: what clients must show, at least 16 characters; a random one unless given. It is written into a file
            that only this user can read, where `stepscope attach` finds it.
        socket: path of a Unix socket to listen on instead; only this user can connect to it.

    Raises:
        UsageError: the arguments cannot be used.
        AgentError: it cannot listen there, or cannot write its file.
    """
    place = Place(address=address, port=port, token=token, socket=None if socket is None else Path(socket).absolute())
    place.check()
    with _lock:
        if _agent is not None:
            if not place.includes(_agent.address):
                _warn(f"this process has an agent at {_agent.address} already; no second one is started")
            return _agent
        rank, world_size = rank_and_world_size()
        return _started(place, _run_of_environment(), rank, world_size)


def serve_for_run(run_folder: RunFolder, rank: int) -> Agent | None:
    """Start the agent of one rank of `stepscope run --serve`: on a free port of this machine, and in the run's files.

    Whatever prevents it is told on stderr; the program runs without.
    """
    with _lock:
        if _agent is not None:
            return _agent
        with guard.attempt() as starting:
            return _started(Place(), run_folder, rank, rank_and_world_size()[1])
        _warn(f"the program runs without an agent: {guard.sentence(starting.error)}")
        return None


def _started(place: Place, run: RunFolder | None, rank: int, world_size: int) -> Agent:
    global _agent
    _agent = Agent(place, installed_program(), run, rank, world_size)
    return _agent


def _forget(agent: Agent) -> None:
    global _agent
    with _lock:
        if _agent is agent:
            _agent = None


def _run_of_environment() -> RunFolder | None:
    """The run that `stepscope run` started this process for."""
    path = os.environ.get("STEPSCOPE_RUN")
    return RunFolder.open(Path(path)) if path else None


def _is_served(run: RunFolder, rank: int) -> bool:
    """Whether another process, which runs, is the rank's."""
    other = agent_files.read_agent_file(run.agents / f"rank{rank}.json")
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


def _warn(sentence: str) -> None:
    guard.tell(sentence)


@guard.entry
def _after_fork_in_child() -> None:
    """A child has neither the thread nor the program's steps; it may start an agent of its own."""
    global _agent, _lock
    _lock = threading.RLock()
    inherited, _agent = _agent, None
    if inherited is not None:
        inherited._leave_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
