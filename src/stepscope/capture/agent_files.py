"""Where agents can be found: a small file for each, readable by its user only, because it holds the token.

<user's folder>/agents/<host>-<pid>.json      every agent of this user, so that a process is found by its number
<run folder>/agents/rank<R>.json              the agents of a run
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import sys
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import platformdirs

from stepscope.capture.run_folder import write_json
from stepscope.errors import AgentError, UsageError
from stepscope.whole_files import private_folder

_MAX_FILE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class AgentFile:
    """How to reach an agent.

    Attributes:
        address: "host:port", or "unix:" and the path of a socket.
        token: what a client must show.
        pid: the process the agent is in.
        host: the machine it is on.
        rank: of the process in its job.
        world_size: processes in the job.
        run: the run folder, or None.
        namespace: of process numbers, which differ between containers of one machine; empty where there are none.
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
        """Whether the process is on this machine, and its number means the same there as here."""
        return self.host == socket.gethostname() and self.namespace == own_namespace()

    @property
    def is_gone(self) -> bool:
        """Whether the process was on this machine and has ended."""
        return self.is_here and not _is_alive(self.pid)


def own_namespace() -> str:
    """The namespace of this process's number, such as "pid:[4026531836]"."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def user_agents() -> Path:
    """The folder of this user's agents: in STEPSCOPE_DATA_DIR, or where files of running programs lie."""
    with warnings.catch_warnings():  # where no XDG_RUNTIME_DIR is set, a folder for temporary files serves
        warnings.simplefilter("ignore")
        parent = os.environ.get("STEPSCOPE_DATA_DIR") or platformdirs.user_runtime_dir("stepscope", appauthor=False)
    return Path(parent) / "agents"


def write_user_file(content: AgentFile) -> Path:
    """Make the process findable by its number.

    Raises:
        AgentError: the folder belongs to somebody else or is open to others, or cannot be written.
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
        raise AgentError(f"{folder} cannot be made: {error.strerror}") from error
    return write_agent_file(folder / f"{content.host}-{content.pid}.json", content)


def write_agent_file(path: Path, content: AgentFile) -> Path:
    """Write the file whole, with mode 0600 from the first moment.

    Raises:
        AgentError: it cannot be written.
    """
    try:
        private_folder(path.parent)
        write_json(path, asdict(content))
    except OSError as error:
        raise AgentError(f"{path} cannot be written: {error.strerror}") from error
    except UsageError as error:
        raise AgentError(str(error)) from error
    return path


def read_agent_file(path: Path) -> AgentFile | None:
    """What the file says; None where there is none, or it is no file of an agent, or not its owner's."""
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            foreign = hasattr(os, "getuid") and state.st_uid not in (os.getuid(), 0)
            if foreign or not stat.S_ISREG(state.st_mode):  # somebody else's file would send us to their address
                return None
            content = json.loads(file.read(_MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return _checked(content)


def agents_in(folder: Path) -> list[AgentFile]:
    """The agents whose files lie in a folder, by rank and process; those of ended processes are taken away."""
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
    """The agent in the process of this number on this machine, or None."""
    return next((agent for agent in agents_in(user_agents()) if agent.pid == pid and agent.is_here), None)


def agent_at(address: str) -> AgentFile | None:
    """This user's agent on this machine that listens at an address, or None."""
    return next((agent for agent in agents_in(user_agents()) if agent.address == address and agent.is_here), None)


def remove(path: Path) -> None:
    """Take a file away, if it is there."""
    with contextlib.suppress(OSError):
        path.unlink()


def _checked(content: Any) -> AgentFile | None:
    """The content as an `AgentFile`; a later version may write more than this one knows."""
    if not isinstance(content, dict):
        return None
    kinds = {"pid": int, "rank": int, "world_size": int}
    known: dict[str, Any] = {}
    for part in fields(AgentFile):
        value = content.get(part.name)
        if isinstance(value, kinds.get(part.name, str)):
            known[part.name] = value
    try:
        return AgentFile(**known)
    except TypeError:  # without an address, a token, a process or a host
        return None


def _is_alive(pid: int) -> bool:
    if sys.platform == "win32":  # where signal 0 is Ctrl+C; who does not answer is found out by asking
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it exists and is somebody else's
        return True
    return True
