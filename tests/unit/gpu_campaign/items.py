"""What the items of tests/unit/gpu_campaign do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_campaign.plan import At, NotHere


def counted(at: At, about: str) -> dict[str, Any]:
    """Note the call in the file that `about` names, and keep a table and a trace."""
    with Path(about).open("a") as file:
        file.write(f"{at.device} {at.is_dry}\n")
    (at.keep / "table.parquet").write_bytes(b"rows")
    (at.keep / "trace-1.json").write_text("{}")
    return {"answer": 42}


def fails(at: At, about: str) -> dict[str, Any]:
    """Raise an error."""
    raise ValueError(f"it is {about}")


def crashes(at: At, about: str) -> dict[str, Any]:
    """End as a fault of the driver ends a process."""
    print("the last words", flush=True)
    os.abort()


def hangs(at: At, about: str) -> dict[str, Any]:
    """Start a program that hangs as well, in a session of its own; `about` is the file of its number."""
    words = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
    Path(about).write_text(str(subprocess.Popen(words, start_new_session=True).pid))
    time.sleep(600)
    return {}


def takes_its_turn(at: At, about: str) -> dict[str, Any]:
    """Note its process twice in the file that `about` names, half a second apart."""
    program = f"""
import os, time
from tests.zoo import command
command.take_turn()
for _ in range(2):
    with open({about!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    time.sleep(0.5)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    return {}


def lacks(at: At, about: str) -> dict[str, Any]:
    """Cannot be done here."""
    raise NotHere("the device has no FP8")
