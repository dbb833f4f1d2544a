"""Runs on the page: their list, how far the recording of one is, and recordings that the page asks for."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from stepscope.errors import AgentError, StepscopeError, UsageError
from stepscope.report.format import duration
from stepscope.view.documents import NoDocument

if TYPE_CHECKING:
    from stepscope.record.manifest import RunManifest
    from stepscope.record.run_folder import RunFolder
    from stepscope.record.runs import RunIndex

_STOPPED: Final = "stepscope stopped early in the program, which goes on"
_NO_PYTHON: Final = "the program has not started Python yet"
_LONG_S: Final = 600
_SEEN: Final = {
    "jax": "jax is imported; the first steps are awaited",
    "torch": "torch is imported; the first steps are awaited",
    "python": "Python runs; it has imported neither torch nor jax yet",
}
"""What a run's markers say, the latest first."""


@dataclass
class _Capture:
    """A recording that the page asked for."""

    run: Path
    is_over: bool = False
    problem: str | None = None


class RunList(Protocol):
    """Runs that the page can show."""

    def exist(self) -> bool:
        """Whether there is any."""

    def meant(self, name: str) -> Path:
        """The run with this name, or the newest for "latest". Raises NoDocument if no run has it."""

    def name_of(self, run: Path) -> str:
        """What the run is called."""

    def traces(self, run: Path) -> list[Path]:
        """The latest trace of each of its ranks."""

    def table(self) -> list[dict[str, Any]]:
        """The runs, the latest first."""


class Runs:
    """The runs of this user."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._capture: _Capture | None = None

    @cached_property
    def _index(self) -> RunIndex:
        from stepscope.record.runs import RunIndex

        return RunIndex()

    def exist(self) -> bool:
        """Whether any run was recorded; told without making an index."""
        return self._index.path.exists() and bool(self._index.all())

    def meant(self, name: str) -> Path:
        """The folder of the run that a name means.

        Raises:
            NoDocument: there is none.
        """
        record = self._index.meant(name)
        if record is None:
            raise NoDocument(f"there is no run {name[:100]!r}" if name != "latest" else "nothing was recorded yet")
        return record.path

    def name_of(self, run: Path) -> str:
        return run.name

    def traces(self, run: Path) -> list[Path]:
        return _folder(run).latest_traces()

    def table(self) -> list[dict[str, Any]]:
        """The runs, the latest first."""
        from stepscope.commands.record.runs import state_of

        return [
            {
                "name": each.name,
                "path": str(each.path),
                "command": each.command,
                "started_unix_s": each.started_unix_s,
                "ended_unix_s": each.ended_unix_s,
                "state": state_of(each),
                "traces": each.traces if each.is_gone else len(_folder(each.path).traces()),
                "bytes": 0 if each.is_gone else _folder(each.path).bytes,
                "quiet_s": None if each.is_gone or each.ended_unix_s is not None else _quiet_s(each.path),
            }
            for each in self._index.all()
        ]

    def progress(self, path: Path) -> dict[str, Any]:
        """How far the recording of a run is, what is awaited, and whether more can be recorded now."""
        folder = _folder(path)
        manifest, recordings = folder.manifest(), folder.recordings()
        has_ended = manifest.ended_unix_s is not None
        agent, why_not = ({}, "the program has ended") if has_ended else _agent_status(folder, manifest)
        seen = [agent.get("step"), *(one.get("steps_seen") for one in recordings)]
        traces = len(folder.traces())
        capture = self._capture
        return {
            "name": folder.name,
            "has_ended": has_ended,
            "is_complete": _is_complete(recordings),
            "sentence": _sentence(folder, manifest, recordings, agent, traces),
            "steps_seen": max((each for each in seen if each is not None), default=None),
            "traces": traces,
            "can_capture": bool(agent),
            "why_not": why_not,
            "capture": None
            if capture is None or capture.run != path
            else {"is_over": capture.is_over, "problem": capture.problem},
        }

    def capture(self, path: Path) -> dict[str, Any]:
        """Record a few steps more of a running program, as `stepscope attach RUN` does; `progress` tells of it.

        Raises:
            UsageError: one is being made, or the run is another user's.
            AgentError: the program cannot be reached.
        """
        from stepscope.commands.record.attach import recording_of_run

        with self._lock:
            if self._capture is not None and not self._capture.is_over:
                raise UsageError(f"{self._capture.run.name} is being recorded: wait until it is done")
            _check_owner(_folder(path).path)
            record = recording_of_run(str(path))
            self._capture = _Capture(path)
        threading.Thread(target=_recorded, args=(self._capture, record), name="capture", daemon=True).start()
        return {"name": path.name}


def _recorded(capture: _Capture, record: Callable[[], object]) -> None:
    try:
        record()
    except StepscopeError as error:
        capture.problem = str(error)
    except Exception as error:  # noqa: BLE001 - the page goes on
        capture.problem = f"a bug in stepscope ({type(error).__name__})"
    capture.is_over = True


def _folder(path: Path) -> RunFolder:
    from stepscope.record.run_folder import RunFolder

    return RunFolder.open(path)


def _quiet_s(path: Path) -> int:
    """Seconds since anything was written into a run's folder."""
    written = []
    for place in (path, *path.rglob("*")):
        with contextlib.suppress(OSError):  # a run that records renames its files
            written.append(place.stat().st_mtime)
    return max(round(time.time() - max(written, default=0.0)), 0)


def _check_owner(path: Path) -> None:
    if hasattr(os, "getuid") and path.stat().st_uid != os.getuid():
        raise UsageError(f"{path.name} is a run of another user")


def _agent_status(folder: RunFolder, manifest: RunManifest) -> tuple[dict[str, Any], str]:
    """The state of the first rank's agent, or that there is none and why."""
    from stepscope.record.agent.protocol import agents_in
    from stepscope.record.agent.targets import clients_for

    if not agents_in(folder.agents):
        if manifest.options.get("serve"):
            return {}, "more can be recorded from its first step on"
        return {}, "more could be recorded from here if it had been started with stepscope run --serve"
    try:
        clients = clients_for(str(folder.path), find_run=lambda _: folder, token=None, through_files=False)
        return clients[0].status(), ""
    except AgentError as error:
        return {}, str(error)


def _is_complete(recordings: Sequence[dict[str, Any]]) -> bool:
    """Whether every rank has recorded and timed what was asked for."""
    ranks = {one["rank"] for one in recordings if one.get("complete")}
    return bool(ranks) and len(ranks) >= max(int(one.get("world_size") or 1) for one in recordings)


def _sentence(
    folder: RunFolder, manifest: RunManifest, recordings: Sequence[dict[str, Any]], agent: dict[str, Any], traces: int
) -> str:
    from stepscope.record.run_folder import LEFT

    asked = manifest.options.get("steps")
    if agent.get("recording"):
        return f"recording at step {agent['step']}"
    if _is_complete(recordings) or (manifest.ended_unix_s is not None and traces):
        return "recorded"
    problem = next((one["problem"] for one in recordings if one.get("problem")), None)
    if problem is not None:
        return str(problem)
    if folder.was_seen(LEFT):
        return _STOPPED
    if manifest.ended_unix_s is not None:
        return f"ended without a recording: stepscope runs show {folder.name} says more"
    if traces:
        return "its steps are recorded; further ones are timed without the profiler"
    if agent:
        return f"the program warms up; then {asked} steps are recorded"
    awaited = next((words for name, words in _SEEN.items() if folder.was_seen(name)), _NO_PYTHON)
    quiet_s = _quiet_s(folder.path)
    if quiet_s < _LONG_S:
        return awaited
    return f"{awaited}; nothing was written for {duration(quiet_s * 1e9)}, so it may have been killed"
