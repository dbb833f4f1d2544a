"""Find the agents that a user's target means: an address, a process number or a run."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Final

import msgspec

from stepscope.errors import AgentError, UsageError
from stepscope.record.agent.client import AgentClient, HttpTransport
from stepscope.record.agent.http import is_loopback
from stepscope.record.agent.protocol import AgentFile, FileTransport, agent_at, agent_of_process, agents_in, user_agents
from stepscope.record.run_folder import RunFolder

FindRun = Callable[[str], "RunFolder | None"]
"""Returns the run of a name or path, or None."""

_ADDRESS: Final = re.compile(r"(?:http://|grpc://)?(\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})/?", re.ASCII)
_EVERYWHERE: Final = ("0.0.0.0", "::")

CONNECT_S: Final = 5.0
ANSWER_S: Final = 20.0
"""An agent shares its interpreter with the program, so a reply may take a while."""

_HTTP: Final = b"GET /status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_HTTP_2: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""How a gRPC connection begins: the preface, and a SETTINGS frame without settings (RFC 9113, 3.4)."""
_FRAME_BYTES: Final = 9
_MOST_BYTES: Final = 1 << 16
_SETTINGS: Final = 4


def clients_for(target: str, *, find_run: FindRun, token: str | None, through_files: bool) -> list[AgentClient]:
    """Return clients for the agents that a target means, by rank.

    Args:
        target: "host:port", "unix:" and a path, a process number, or the name or path of a run.
        token: None for the one in the agent file.
        through_files: use request files in the run folder.

    Raises UsageError if the target is not understood, AgentError if no agent was found.
    """
    if through_files:
        return _through_files(target, find_run(target))
    if target.startswith("unix:") or Path(target).is_socket():
        path = Path(target.removeprefix("unix:")).absolute()
        return [_at(f"unix:{path}", token)]
    address = address_of(target)
    if address is not None:
        return [_at(address, token)]
    run = find_run(target)
    if run is not None:
        return [_client(agent, f"rank {agent.rank}", token, run.path) for agent in _agents_of(run)]
    if target.isascii() and target.isdigit():
        return [_of_process(int(target), token)]
    raise UsageError(
        f"{target!r} is not an address (host:port or unix:PATH), a process number or a run that can be found"
    )


def address_of(target: str) -> str | None:
    """Return the "host:port" in a target; None if the target is something else.

    Raises UsageError if the port is invalid.
    """
    address = _ADDRESS.fullmatch(target)
    return None if address is None else f"{address[1]}:{_port(address[2])}"


def _through_files(target: str, run: RunFolder | None) -> list[AgentClient]:
    if run is None:
        raise UsageError(f"--through-files needs a run, and there is no run {target!r}")
    return [
        AgentClient(FileTransport(run.requests, agent.rank), f"rank {agent.rank}", rank=agent.rank, run=run.path)
        for agent in _agents_of(run)
    ]


def _agents_of(run: RunFolder) -> list[AgentFile]:
    agents = agents_in(run.agents)
    if not agents:
        raise AgentError(
            f"the run {run.name} has no agent: it has ended, has not done its first step yet, or was started without "
            "--serve (stepscope run --serve ...)"
        )
    return agents


def _of_process(pid: int, token: str | None) -> AgentClient:
    agent = agent_of_process(pid)
    if agent is None:
        raise AgentError(
            f"process {pid} has no agent of yours: start one with stepscope.start_server() in its script, or run it "
            f"with stepscope run --serve (agents are looked for in {user_agents()})"
        )
    return _client(agent, f"process {pid}", token, Path(agent.run) if agent.run else None)


def _at(address: str, token: str | None) -> AgentClient:
    name = f"the agent at {address}"
    known = agent_at(re.sub("^localhost:", "127.0.0.1:", address))  # the form used in agent files
    if known is None:
        return AgentClient(HttpTransport(address, token), name)
    return _client(msgspec.structs.replace(known, address=address), name, token, Path(known.run) if known.run else None)


def _client(agent: AgentFile, name: str, token: str | None, run: Path | None) -> AgentClient:
    return AgentClient(
        HttpTransport(_reachable(agent), token or agent.token),
        name,
        rank=agent.rank,
        run=run if run is not None and run.is_dir() else None,
    )


def _reachable(agent: AgentFile) -> str:
    host, _, port = agent.address.rpartition(":")
    everywhere = host.strip("[]") in _EVERYWHERE
    if agent.address.startswith("unix:") or agent.host == socket.gethostname():
        return f"localhost:{port}" if everywhere else agent.address
    if is_loopback(host.strip("[]")):
        raise AgentError(
            f"the agent of rank {agent.rank} can only be reached on {agent.host}: use --through-files where the run "
            f"folder is shared, or a tunnel (ssh -L {port}:localhost:{port} {agent.host})"
        )
    return f"{agent.host}:{port}" if everywhere else agent.address


def _port(text: str) -> int:
    if not 0 < int(text) <= 65535:
        raise UsageError(f"there is no port {text}")
    return int(text)


class Listener(Enum):
    AGENT = "an agent of stepscope"
    PROFILER_SERVER = "a profiler server"


def listener_at(address: str, *, connect_s: float = CONNECT_S, answer_s: float = ANSWER_S) -> Listener:
    """Find out what listens at "host:port"; anything that answers HTTP/1 may be an agent.

    Raises AgentError if nobody listens, nobody answers in time, or the reply is neither HTTP nor gRPC.
    """
    first = _first_bytes(address, _HTTP, connect_s, answer_s)
    if first.startswith(b"HTTP/"):
        return Listener.AGENT
    if _is_settings(first) or (not first and _is_settings(_first_bytes(address, _HTTP_2, connect_s, answer_s))):
        return Listener.PROFILER_SERVER
    if not first:
        raise AgentError(f"{address} hung up without an answer: the process has ended, or is busy")
    raise AgentError(
        f"{address} is neither an agent of stepscope nor a profiler server: it speaks neither HTTP nor gRPC"
    )


def _is_settings(answer: bytes) -> bool:
    """Whether the reply begins with a SETTINGS frame on stream 0, which every HTTP/2 server sends first."""
    return len(answer) >= _FRAME_BYTES and answer[3] == _SETTINGS and answer[5:_FRAME_BYTES] == bytes(4)


def _take_rest(connection: socket.socket, answer: bytes) -> None:
    """Read the rest of the reply, so that the HTTP server does not log an aborted connection."""
    left = _MOST_BYTES if answer.startswith(b"HTTP/") else 0
    with contextlib.suppress(OSError):
        while left > 0 and (part := connection.recv(left)):
            left -= len(part)


def _first_bytes(address: str, request: bytes, connect_s: float, answer_s: float) -> bytes:
    """Read enough of the reply to recognise the server; empty if the connection is closed."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), connect_s) as connection:
            until = time.monotonic() + answer_s
            connection.settimeout(answer_s)
            connection.sendall(request)
            answer = b""
            while len(answer) < _FRAME_BYTES and (left_s := until - time.monotonic()) > 0:
                connection.settimeout(left_s)
                part = connection.recv(64)
                if not part:
                    break
                answer += part
            _take_rest(connection, answer)
            return answer
    except ConnectionRefusedError:
        raise AgentError(f"nothing listens at {address}: the process or its agent has ended") from None
    except TimeoutError:
        raise AgentError(f"{address} has not answered within {answer_s:.0f} s") from None
    except ConnectionError:
        return b""
    except UnicodeError:  # raised by the IDNA codec, which splits a name into labels
        raise AgentError(f"{address} cannot be reached: {host[:100]!r} is not a host name") from None
    except OSError as error:
        raise AgentError(f"{address} cannot be reached: {error.strerror or error}") from error
