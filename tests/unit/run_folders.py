"""Run folders as `stepscope run` leaves them, made by its own writers, with step times that a test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder
from stepscope.record.runs import RunIndex

DAY_S = 86_400.0
BEGAN_S = 1_790_000_000.0
COMMIT = "a1b2c3d4e5f6" + "0" * 28


def recording(
    unprofiled: Sequence[int] = (), profiled: Sequence[int] = (), *, rank: int = 0, **more: Any
) -> dict[str, Any]:
    """What a process leaves of its recording, with the times of its steps in nanoseconds."""
    stretches = [{"first_step": 6, "recorded": True, "ns": list(profiled)}] if profiled else []
    if unprofiled:
        stretches.append({"first_step": 11, "recorded": False, "ns": list(unprofiled)})
    return {"rank": rank, "world_size": 1, "steps": len(profiled), "problem": None, "step_times": stretches, **more}


def made_run(
    name: str,
    *recordings: dict[str, Any],
    day: float = 0,
    command: str = "python train.py",
    folder: str | None = "/home/alice/project",
    root: Path | None = None,
    commit: str | None = COMMIT,
    facts: dict[str, Any] | None = None,
    exit_code: int = 0,
) -> RunFolder:
    """A run that ended, in the index."""
    manifest = RunManifest(
        command=tuple(command.split()),
        folder=folder,
        started_unix_s=BEGAN_S + day * DAY_S,
        git=None if commit is None else {"commit": commit, "dirty": False},
        versions={"stepscope": "0.1.0"},
    )
    made = RunFolder.create(root, name, manifest)
    left = [{**one, "facts": facts} if facts else one for one in recordings]
    made.write_manifest(manifest.ended(manifest.started_unix_s + 60, exit_code, left))
    RunIndex().add(made)
    return made
