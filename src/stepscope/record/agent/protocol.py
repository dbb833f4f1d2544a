"""The protocol between an agent and its clients: JSON over HTTP, or the same in files of a run folder.

    GET    /status                    who the process is, which step it is at, what it records
    GET    /captures                  the captures that the agent remembers, oldest first
    POST   /captures                  begin one: {"steps": 5}, {"seconds": 2.5}, or {} for one that lasts until stopped
    GET    /captures/ID               its state; with ?wait=20 the reply comes at its end, after 20 s at most
    POST   /captures/ID/stop          end it now and keep what was recorded
    DELETE /captures/ID               end it now and throw away what was recorded
    GET    /captures/ID/trace         the trace file
    GET    /captures/ID/files/NAME    the trace file or one of its companion files
    POST   /shutdown                  stop the agent; the program continues

A reply is a JSON object or a file. A refusal is {"error": "one sentence"} with an HTTP status from 400 on.
Clients find an agent by its `AgentFile`, in the user's agent folder or in the run folder.

Processes that cannot be reached over the network answer requests as files in a run folder:

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
import socket
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import platformdirs

from stepscope import guard
from stepscope.errors import AgentError, UsageError
from stepscope.files import converted, private_folder, whole_file
from stepscope.record.run_folder import write_json
from stepscope.record.schedule import RecordOptions

VERSION: Final = 1
"""Protocol version, part of an agent's status."""
MAX_BODY_BYTES: Final = 64 * 1024
"""The largest body of a request."""
MAX_WAIT_S: Final = 30.0
"""The longest time that one request may wait for the end of a capture."""
TOO_LATE: Final = 412
"""HTTP status of the refusal because the first step to record has already begun."""

WAITING: Final = "waiting"
RECORDING: Final = "recording"
DONE: Final = "done"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
ENDED: Final = frozenset({DONE, FAILED, CANCELLED})
"""The final states of a capture."""

_OPTIONS: Final = frozenset(option.name for option in fields(RecordOptions))
_LONGEST_REASON: Final = 120
_MAX_FILE_BYTES: Final = 64 * 1024

_StepCount = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
_StepNumber = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class Refusal(Exception):
    """A request that an agent refuses.

    Attributes:
        status: the HTTP status, from 400 on.
        sentence: the reason, for the user.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: dict[str, Any] = field(default_factory=dict)
    file: Path | None = None


class CaptureOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to record; without steps and seconds, until somebody stops it.

    Attributes:
        seconds: duration, extended to the end of the last step.
        first_step: number of the first step to record, which must not have begun; None for the next one.
        timeout_s: the capture is abandoned after this many seconds without the end of a step.
    """

    steps: _StepCount | None = None
    seconds: _Seconds | None = None
    first_step: _StepNumber | None = None
    timeout_s: _Seconds = 60.0
    options: RecordOptions = msgspec.field(default_factory=RecordOptions)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in msgspec.to_builtins(self).items() if value is not None}

    @classmethod
    def from_json(cls, body: object) -> CaptureOrder:
        """Read the body of POST /captures, which is untrusted. Raises Refusal if the body is invalid."""
        if not isinstance(body, dict):
            raise Refusal(400, 'a capture request is a JSON object, such as {"steps": 5}')
        given = {name: value for name, value in body.items() if value is not None}
        if "steps" in given and "seconds" in given:
            raise Refusal(400, "a capture has a number of steps or seconds, not both")
        options = given.get("options")
        unknown = sorted(set(options) - _OPTIONS) if isinstance(options, dict) else []
        if unknown:
            raise Refusal(400, f"there is no option {unknown[0]!r:.40}; the options are {', '.join(sorted(_OPTIONS))}")
        try:
            return converted(given, cls)
        except msgspec.ValidationError as error:
            raise Refusal(400, f"the capture is not valid: {error!s:.{_LONGEST_REASON}}") from None


def decoded(data: bytes) -> object:
    """Decode `data` as JSON; empty data is an empty object. Raises Refusal if the data is too long or not JSON."""
    if len(data) > MAX_BODY_BYTES:
        raise Refusal(413, f"a request may have at most {MAX_BODY_BYTES} bytes")
    if not data.strip():
        return {}
    try:
        return json.loads(data)
    except (ValueError, RecursionError):  # RecursionError: deeply nested brackets
        raise Refusal(400, "the request is not JSON") from None


class AgentFile(msgspec.Struct, frozen=True):
    """The address and token of one agent.

    Attributes:
        address: "host:port", or "unix:" and the path of a socket.
        token: the token that clients need.
        host: name of its machine.
        rank, world_size: of the process in its job.
        run: the run folder, or None.
        namespace: the PID namespace, which differs between containers of one machine; empty on systems without any.
    """

    address: str
    token: str
    pid: int
    host: str
    rank: int = 0
    world_size: int = 1
    run: str | None = None
    namespace: str = ""

    @property
    def is_here(self) -> bool:
        """Whether the process is on this machine and in the same PID namespace."""
        return self.host == socket.gethostname() and self.namespace == own_namespace()

    @property
    def is_gone(self) -> bool:
        return self.is_here and not _is_alive(self.pid)


def own_namespace() -> str:
    """Return the PID namespace of this process, such as "pid:[4026531836]"."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def user_agents() -> Path:
    """Return the folder of this user's agents: in STEPSCOPE_DATA_DIR, or in the runtime folder of the system."""
    with warnings.catch_warnings():  # without XDG_RUNTIME_DIR, in the folder for temporary files
        warnings.simplefilter("ignore")
        parent = os.environ.get("STEPSCOPE_DATA_DIR") or platformdirs.user_runtime_dir("stepscope", appauthor=False)
    return Path(parent) / "agents"


def write_user_file(content: AgentFile) -> Path:
    """Write the file by which the process is found by its number.

    Raises AgentError if the folder belongs to another user, is open to others, or cannot be written.
    """
    folder = user_agents()
    try:
        private_folder(folder)
        if hasattr(os, "getuid"):
            state = folder.stat()
            if state.st_uid != os.getuid():
                raise AgentError(f"{folder} belongs to another user; set STEPSCOPE_DATA_DIR to a folder of your own")
            if state.st_mode & 0o077:
                folder.chmod(0o700)
    except OSError as error:
        raise AgentError(f"{folder} cannot be created: {error.strerror}") from error
    return write_agent_file(folder / f"{content.host}-{content.pid}.json", content)


def write_agent_file(path: Path, content: AgentFile) -> Path:
    """Write the file atomically, with mode 0600 from the start. Raises AgentError if it cannot be written."""
    try:
        private_folder(path.parent)
        write_json(path, msgspec.structs.asdict(content))
    except OSError as error:
        raise AgentError(f"{path} cannot be written: {error.strerror}") from error
    except UsageError as error:
        raise AgentError(str(error)) from error
    return path


def read_agent_file(path: Path) -> AgentFile | None:
    """Read an agent file; None if it is missing, invalid or owned by another user."""
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            foreign = hasattr(os, "getuid") and state.st_uid not in (os.getuid(), 0)
            if foreign or not stat.S_ISREG(state.st_mode):  # another user's file could send us to their address
                return None
            return msgspec.json.decode(file.read(_MAX_FILE_BYTES), type=AgentFile)
    except (OSError, msgspec.DecodeError, ValueError, RecursionError):
        return None


def agents_in(folder: Path) -> list[AgentFile]:
    """Return the agents listed in a folder, by rank and process, and remove the files of processes that have ended."""
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("*.json")):
            agent = read_agent_file(path)
            if agent is None:
                continue
            if agent.is_gone:
                remove(path)
            else:
                found.append(agent)
    return sorted(found, key=lambda agent: (agent.rank, agent.pid))


def agent_of_process(pid: int) -> AgentFile | None:
    return next((agent for agent in agents_in(user_agents()) if agent.pid == pid and agent.is_here), None)


def agent_at(address: str) -> AgentFile | None:
    """Return this user's agent on this machine that listens at an address, or None."""
    return next((agent for agent in agents_in(user_agents()) if agent.address == address and agent.is_here), None)


def remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _is_alive(pid: int) -> bool:
    if sys.platform == "win32":  # on Windows, signal 0 is Ctrl+C; a dead process is detected by asking it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process exists and belongs to another user
        return True
    return True


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
