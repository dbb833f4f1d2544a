"""Capture programs that run XLA's profiler server: JAX, PyTorch/XLA, TensorFlow.

`jax.profiler.start_server(9012)` and `torch_xla.debug.profiler.start_server(9012)` answer gRPC
`tensorflow.ProfilerService`. The client is that of the `xprof` package; each host is captured in a separate process,
all at the same time, under a time limit.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Final

from stepscope import guard
from stepscope.errors import AgentError
from stepscope.files import make_private, private_file, private_folder
from stepscope.record.agent.client import for_each

LOG: Final = "profiler-client.log"
"""Log file of the xprof client, in the folder of the captures."""
MOST_SECONDS: Final = 600.0
"""A server keeps its recording in memory until the end."""
_PROFILES: Final = Path("plugins") / "profile"
"""Where TensorBoard looks for profiles."""
_START_S: Final = 60.0
_CONNECT_S: Final = 5.0
_CHILD: Final = (
    "import json, sys; order = json.loads(sys.stdin.readline()); sys.path[:] = order['path']; "
    "from stepscope.record.profiler_server import record_one_host; record_one_host(order)"
)
_ENDED: Final = "the connection was lost: the program has ended"
_NO_PROFILE: Final = "it sent no profile"
_REASONS: Final = (
    ("ALREADY_EXISTS", "another profile of the program is being recorded; only one can be at a time"),
    ("Connection refused", _ENDED),  # the package existed a moment ago
    ("UNIMPLEMENTED", "it answers gRPC, but is not a profiler server"),
    ("DEADLINE_EXCEEDED", "it did not answer in time"),
    ("Socket closed", _ENDED),
    ("No trace event was collected", _NO_PROFILE),
)
_LOG_TAIL_BYTES: Final = 65536


@dataclass(frozen=True, slots=True)
class ProfilerOrder:
    """A request to a profiler server.

    Attributes:
        host_level: detail of host events: 0 none, 1 the program's annotations, 2 important ones, 3 all.
        python_frames: record every Python frame.
        timeout_s: how long a reply may take beyond `seconds`.
    """

    seconds: float = 2.0
    host_level: int = 2
    python_frames: bool = False
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class HostProfile:
    """The capture of one host ("host:port"): an `.xplane.pb` file, or the reason why there is none."""

    address: str
    path: Path | None
    problem: str | None = None


def check_client() -> None:
    """Check early that the client package is installed.

    Raises AgentError if it is not; the message says how to install it.
    """
    if find_spec("xprof") is None:
        raise AgentError(
            "recording through a profiler server needs the xprof package: pip install 'stepscope[xla]' "
            f"(looked for in {sys.prefix})"
        )


def capture_hosts(addresses: Sequence[str], order: ProfilerOrder, folder: Path) -> list[HostProfile]:
    """Record the same time interval on every host.

    Args:
        addresses: "host:port" of each profiler server.
        folder: profiles go to `plugins/profile/<time>/<host>_<port>.xplane.pb` in it, where `tensorboard --logdir`
            finds them; the client's output goes to `LOG`.

    Returns:
        One for each address, in that order, including failures.

    Raises AgentError if the folder cannot be written.
    """
    children: list[_Child] = []
    try:
        private_folder(folder, tighten=False)
        with tempfile.TemporaryDirectory(prefix=".capture-", dir=folder) as scratch:
            try:
                for number, address in enumerate(addresses):
                    children.append(_Child(address, order, Path(scratch) / str(number)))
                for_each(children, lambda child: child.wait_until_ready())
                for_each(children, lambda child: child.record(order))
            finally:
                for child in children:
                    child.end()
            _keep_logs(children, folder / LOG)
            place = _new_place(folder)
            return [child.profile(place) for child in children]
    except OSError as error:
        raise AgentError(f"no profile can be written to {folder}: {error.strerror or error}") from error


def record_one_host(order: dict[str, Any]) -> None:
    """Capture one host in a dedicated process, since xprof's client may crash, hang or write to stdout.

    Standard output has one JSON object per line: {"ready": true} once xprof is imported, then, after a line of input,
    {"done": true} or {"problem": sentence}. The client's own output goes to standard error, a log file.

    Args:
        order: `address` of the server, `folder` for the profile, `milliseconds`, and the client's `options`.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    with guard.attempt() as loading:  # the package may be broken in any way
        trace: Any = importlib.import_module("xprof.convert._pywrap_profiler_plugin").trace
    if loading.error is not None:
        answer(problem=f"the xprof package cannot be used: {type(loading.error).__name__}: {loading.error}")
        return
    answer(ready=True)
    if not sys.stdin.readline():  # the parent is gone
        return
    with guard.attempt() as tracing:  # raised in C++, with any type
        trace(order["address"], order["folder"], "", True, order["milliseconds"], 1, order["options"])
    answer(**({"done": True} if tracing.error is None else {"problem": str(tracing.error)}))


class _Child:
    def __init__(self, address: str, order: ProfilerOrder, folder: Path) -> None:
        self.address = address
        self.problem: str | None = None
        self._folder = folder
        private_folder(folder, new=True)
        self._log: BinaryIO = private_file(folder / LOG).open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C goes to the command, which ends its children itself
        )
        self._send(
            path=sys.path,
            address=address,
            folder=str(folder),
            milliseconds=max(1, round(order.seconds * 1000)),
            options={
                "host_tracer_level": order.host_level,
                "device_tracer_level": 1,
                "python_tracer_level": int(order.python_frames),
            },
        )

    def wait_until_ready(self) -> None:
        self._take_answer(_START_S, "the xprof package took more than {:.0f} s to load")

    def record(self, order: ProfilerOrder) -> None:
        if self.problem is None:
            self._send()
            self._take_answer(order.seconds + order.timeout_s, "it has not answered within {:.0f} s")

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(OSError):  # written to a process that has ended
                if pipe is not None:
                    pipe.close()

    def log(self) -> bytes:
        with contextlib.suppress(OSError):
            return (self._folder / LOG).read_bytes()
        return b""

    def profile(self, place: Path) -> HostProfile:
        found = sorted((self._folder / _PROFILES).glob("*/*.xplane.pb"))
        if not found:
            problem = self.problem or "the server sent no profile"
            return HostProfile(self.address, None, f"{self.address}: {self._reason(problem)}")
        private_folder(place)
        path = place / f"{file_name(self.address)}.xplane.pb"
        make_private(found[0])
        os.replace(found[0], path)
        return HostProfile(self.address, path)

    def _reason(self, problem: str) -> str:
        """Shorten the client's message to a sentence; the cause is in its log, if anywhere."""
        said = problem + self.log()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        known = next((sentence for sign, sentence in _REASONS if sign in said), None)
        if known == _NO_PROFILE and not _listens(self.address):  # the client often says no more when its server dies
            return _ENDED
        return known or " ".join(problem.split())

    def _send(self, **content: Any) -> None:
        pipe = self._process.stdin
        with contextlib.suppress(OSError):  # it has ended; its output says why
            if pipe is not None:
                pipe.write(json.dumps(content).encode() + b"\n")
                pipe.flush()

    def _take_answer(self, limit_s: float, too_late: str) -> None:
        """Wait for the next line of output; kill a process that exceeds the limit."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(limit_s, give_up)
        timer.start()
        try:
            line = self._process.stdout.readline() if self._process.stdout is not None else b""
        finally:
            timer.cancel()
        if late.is_set():
            self.problem = too_late.format(limit_s)
        elif not line.endswith(b"\n"):
            self.problem = f"the client of xprof ended without an answer ({_end(self._process.wait())}); see {LOG}"
        else:
            self.problem = json.loads(line).get("problem")


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, ValueError), socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S):
        return True
    return False


def _end(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def _keep_logs(children: Sequence[_Child], log: Path) -> None:
    with private_file(log).open("ab") as file:
        for child in children:
            file.write(f"== {child.address} {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode() + child.log())


def _new_place(folder: Path) -> Path:
    return next(place for place in _places(folder / _PROFILES) if not place.exists())


def _places(profiles: Path) -> Iterator[Path]:
    moment = time.strftime("%Y_%m_%d_%H_%M_%S")
    yield profiles / moment
    number = 1
    while True:
        number += 1
        yield profiles / f"{moment}_{number}"


def file_name(address: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", address).strip("_") or "host"


def link_or_copy(source: Path, destination: Path) -> None:
    """Hard-link the file, or copy it if the file system has no links. Raises AgentError if neither is possible."""
    try:
        private_folder(destination.parent, tighten=False)
        try:
            os.link(source, destination)
        except OSError:
            shutil.copyfile(source, private_file(destination))
    except OSError as error:
        raise AgentError(f"{destination} cannot be written: {error.strerror or error}") from error
