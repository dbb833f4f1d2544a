"""From what a user writes to the agents it means: an address, the number of a process, or a run."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from stepscope.capture.agent_files import AgentFile, agent_at, agent_of_process, agents_in, user_agents
from stepscope.capture.agent_place import is_loopback
from stepscope.capture.client import AgentClient, HttpTransport
from stepscope.capture.requests import FileTransport
from stepscope.capture.run_folder import RunFolder
from stepscope.errors import AgentError, UsageError

FindRun = Callable[[str], "RunFolder | None"]
"""The run of a name or path, or None."""

_ADDRESS: Final = re.compile(r"(?:http://|grpc://)?(\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})/?", re.ASCII)
_EVERYWHERE: Final = ("0.0.0.0", "::")


def clients_for(target: str, *, find_run: FindRun, token: str | None, through_files: bool) -> list[AgentClient]:
    """The agents that a target means, by rank.

    Args:
        target: "host:port", "unix:" and a path, the number of a process, or the name or path of a run.
        find_run: looks for a run.
        token: the user's; None for that in the agent's file.
        through_files: ask through files in the run folder.

    Raises:
        UsageError: the target means nothing.
        AgentError: there is no agent.
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
        return _of_run(run, token)
    if target.isascii() and target.isdigit():
        return [_of_process(int(target), token)]
    raise UsageError(
        f"{target!r} is no address (host:port or unix:PATH), no number of a process and no run that can be found"
    )


def address_of(target: str) -> str | None:
    """The "host:port" that a target is, or None where it is something else.

    Raises:
        UsageError: there is no such port.
    """
    address = _ADDRESS.fullmatch(target)
    return None if address is None else f"{address[1]}:{_port(address[2])}"


def _through_files(target: str, run: RunFolder | None) -> list[AgentClient]:
    if run is None:
        raise UsageError(f"--through-files needs a run, and {target!r} is none that can be found")
    agents = agents_in(run.agents)
    if not agents:
        raise _no_agent_in(run)
    return [
        AgentClient(FileTransport(run.requests, agent.rank), f"rank {agent.rank}", rank=agent.rank, run=run.path)
        for agent in agents
    ]


def _of_run(run: RunFolder, token: str | None) -> list[AgentClient]:
    agents = agents_in(run.agents)
    if not agents:
        raise _no_agent_in(run)
    return [_client(agent, f"rank {agent.rank}", token, run.path) for agent in agents]


def _of_process(pid: int, token: str | None) -> AgentClient:
    agent = agent_of_process(pid)
    if agent is None:
        raise AgentError(
            f"process {pid} has no agent of yours: start one with stepscope.start_server() in its script, or run it "
            f"with stepscope run --serve (agents are looked for in {user_agents()})"
        )
    return _client(agent, f"process {pid}", token, Path(agent.run) if agent.run else None)


def _at(address: str, token: str | None) -> AgentClient:
    """The agent at an address; the token of one on this machine is in its file."""
    name = f"the agent at {address}"
    known = agent_at(_numeric(address))
    if known is None:
        return AgentClient(HttpTransport(address, token), name)
    return _client(replace(known, address=address), name, token, Path(known.run) if known.run else None)


def _client(agent: AgentFile, name: str, token: str | None, run: Path | None) -> AgentClient:
    return AgentClient(
        HttpTransport(_reachable(agent), token or agent.token),
        name,
        rank=agent.rank,
        run=run if run is not None and run.is_dir() else None,
    )


def _reachable(agent: AgentFile) -> str:
    """The address to connect to from here."""
    if agent.address.startswith("unix:") or agent.host == socket.gethostname():
        host, _, port = agent.address.rpartition(":")
        everywhere = host.strip("[]") in _EVERYWHERE
        return f"localhost:{port}" if everywhere else agent.address
    host, _, port = agent.address.rpartition(":")
    if is_loopback(host.strip("[]")):
        raise AgentError(
            f"the agent of rank {agent.rank} can only be reached on {agent.host}: use --through-files where the run "
            f"folder is shared, or a tunnel (ssh -L {port}:localhost:{port} {agent.host})"
        )
    return f"{agent.host}:{port}" if host.strip("[]") in _EVERYWHERE else agent.address


def _numeric(address: str) -> str:
    """The address as an agent's file has it."""
    return address.replace("localhost:", "127.0.0.1:", 1) if address.startswith("localhost:") else address


def _port(text: str) -> int:
    if not 0 < int(text) <= 65535:
        raise UsageError(f"there is no port {text}")
    return int(text)


def _no_agent_in(run: RunFolder) -> AgentError:
    return AgentError(
        f"the run {run.name} has no agent: it has ended, has not done its first step yet, or was started without "
        "--serve (stepscope run --serve ...)"
    )
