"""Measures a program in a fresh process, on one core and with one thread of Polars, or on all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parent.parent / "src"
ONE_CORE = """
import json, os, sys, time
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
"""
"""What every measured program begins with."""


ALL_CORES = "import json, os, sys, time\n"


def measure(
    python: str,
    program: str,
    path: str,
    *arguments: str,
    all_cores: bool = False,
    curve_s: float | None = None,
    sources: Path = SOURCES,
) -> dict[str, Any]:
    """One run: what the program says as JSON in its last line; process_cpu (seconds) and peak_mib of the process.

    Args:
        sources: where the program imports stepscope from.
        all_cores: do not hold it to one core and one thread of Polars.
        curve_s: also return `curve`, pairs of seconds and resident MiB, so often (where there is /proc).
    """
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(sources)}
    environment |= {} if all_cores else {"POLARS_MAX_THREADS": "1"}
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            [python, "-c", (ALL_CORES if all_cores else ONE_CORE) + program, path, *arguments],
            stdout=output,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        curve = [] if curve_s is None else _resident(child.pid, curve_s)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"a measured process failed with exit code {child.returncode}: {path}")
        output.seek(0)
        said = json.loads(output.read().splitlines()[-1])
    peak_unit = 1 if sys.platform == "darwin" else 1024
    whole = {"process_cpu": usage.ru_utime + usage.ru_stime, "peak_mib": usage.ru_maxrss * peak_unit / 2**20}
    return {**said, **whole, **({"curve": curve} if curve else {})}


def _resident(process: int, every_s: float) -> list[tuple[float, float]]:
    """Sample a child's memory until it ends: seconds, MiB."""
    begin, found = time.monotonic(), []
    while True:
        try:
            pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        except OSError:
            return found
        if not pages:  # it has ended and waits to be reaped
            return found
        found.append((time.monotonic() - begin, pages * os.sysconf("SC_PAGE_SIZE") / 2**20))
        time.sleep(every_s)
