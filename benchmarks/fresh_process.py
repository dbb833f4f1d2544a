"""Measures a program in a fresh process, on one core and with one thread of Polars."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parent.parent / "src"
ONE_CORE = """
import json, os, sys, time
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
"""
"""What every measured program begins with."""


def measure(python: str, program: str, path: str, *arguments: str, sources: Path = SOURCES) -> dict[str, Any]:
    """One run: what the program says as JSON in its last line; process_cpu (seconds) and peak_mib of the process."""
    environment = {**os.environ, "POLARS_MAX_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(sources)}
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            [python, "-c", ONE_CORE + program, path, *arguments],
            stdout=output,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"a measured process failed with exit code {child.returncode}: {path}")
        output.seek(0)
        said = json.loads(output.read().splitlines()[-1])
    peak_unit = 1 if sys.platform == "darwin" else 1024
    whole = {"process_cpu": usage.ru_utime + usage.ru_stime, "peak_mib": usage.ru_maxrss * peak_unit / 2**20}
    return {**said, **whole}
