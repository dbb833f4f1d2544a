"""A process with an agent, for tests: real controller, real server, and a recorder that writes what it was told."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from stepscope.record.agent.http import Endpoint
from stepscope.record.agent.server import Agent
from stepscope.record.controller import StepController
from stepscope.record.run_folder import RunFolder
from stepscope.record.schedule import RecordOptions


class Recording:
    """Writes the numbers of the steps that it was told of."""

    notice = None
    ended_by: ClassVar[list[int]] = []
    """The threads that had recordings thrown away."""

    def __init__(self, options: RecordOptions, first_step: int) -> None:
        self.steps = [first_step]
        self.options = options

    def prepare(self) -> None: ...

    def start(self) -> None: ...

    def step(self) -> None:
        self.steps.append(self.steps[-1] + 1)

    def stop(self) -> None: ...

    def discard(self) -> None:
        self.ended_by.append(threading.get_ident())

    def save(self, path: Path) -> Path:
        path.write_text(json.dumps({"steps": self.steps, "stacks": self.options.stacks}))
        path.with_name(f"{path.name}.lines.parquet").write_bytes(b"lines")
        return path


class Process:
    """What a test does with one: take steps, and ask its agent."""

    def __init__(self, endpoint: Endpoint, run: RunFolder | None = None, rank: int = 0, world_size: int = 1) -> None:
        self.controller = StepController(make_recording=Recording)
        self.agent = Agent(endpoint, self.controller, run, rank, world_size)

    def take_steps(self, count: int) -> None:
        for _ in range(count):
            self.controller.step_boundary()

    def send(self, data: bytes, *, close: bool = True) -> bytes:
        """Send bytes as they are, and return everything that comes back."""
        with self.connected() as connection:
            try:
                connection.sendall(data)
                if close:
                    connection.shutdown(socket.SHUT_WR)
            except OSError:  # the agent hung up first
                pass
            return everything(connection)

    def ask(self, method: str, target: str, body: Any = None, **headers: str | None) -> tuple[int, Any]:
        """A request as it should be, except for the headers that are given; the status and the JSON."""
        content = b"" if body is None else json.dumps(body).encode()
        chosen: dict[str, str | None] = {
            "Host": "localhost",
            "Authorization": f"Bearer {self.agent.token}",
            "Content-Length": str(len(content)),
            **headers,
        }
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in chosen.items() if value)]
        answer = self.send("\r\n".join([*lines, "", ""]).encode() + content)
        head, _, rest = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(rest) if b"application/json" in head else rest

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        if self.agent.address.startswith("unix:"):
            connection = socket.socket(socket.AF_UNIX)
            place: Any = self.agent.address.removeprefix("unix:")
        else:
            host, _, port = self.agent.address.rpartition(":")
            connection = socket.socket(socket.AF_INET6 if "[" in host else socket.AF_INET)
            place = (host.strip("[]"), int(port))
        with connection:
            connection.settimeout(30)
            connection.connect(place)
            yield connection


def everything(connection: socket.socket) -> bytes:
    """All that comes until the other side hangs up."""
    received = b""
    try:
        while piece := connection.recv(1 << 16):
            received += piece
    except ConnectionError:
        pass
    return received
