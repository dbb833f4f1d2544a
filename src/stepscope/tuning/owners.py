"""Which process measures a trial, and whether it is still there."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def process_name() -> dict[str, Any]:
    """What tells this process from every other one of every machine."""
    return {"machine": machine_name(), "process": os.getpid(), "started": _started(os.getpid())}


def is_alive(owner: Mapping[str, Any]) -> bool:
    """Whether that process of this machine still runs."""
    process = owner.get("process")
    if type(process) is not int or process <= 0:
        return False
    if os.path.isdir("/proc/self"):
        return _started(process) == owner.get("started") is not None
    if sys.platform == "win32":  # where signal 0 is Ctrl+C
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it exists and is somebody else's
        return True
    return True


def machine_name() -> str:
    """The machine and, in a container, its space of process numbers."""
    parts = [platform.node()]
    with contextlib.suppress(OSError, ValueError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _started(process: int) -> str | None:
    """When it was started, in the system's own count; None where it is gone or the system does not say."""
    with contextlib.suppress(OSError, IndexError):
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        words = text.rpartition(")")[2].split()
        return None if words[0] in ("Z", "X") else words[19]  # ended, and only not yet taken note of
    return None
