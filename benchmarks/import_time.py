"""What `import stepscope` adds to a program's start: it stands at the top of people's training scripts.

    python benchmarks/import_time.py [--runs 30]

Interpreters with and without the import are started in turn, and the difference of each pair is taken; printed are the
medians, in milliseconds of wall and of CPU time, and whether Polars or torch came with the import.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"
HEAVY = ("polars", "torch", "numpy", "jinja2", "rich")


def start(program: str) -> tuple[float, float]:
    """Wall and CPU seconds of an interpreter that runs `program`."""
    began = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(SOURCE)})
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"the interpreter failed: {program}")
    return wall, usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=30)
    options = parser.parse_args()
    start("import stepscope")  # writes the bytecode
    pairs = [(start("pass"), start("import stepscope")) for _ in range(options.runs)]
    print("| | wall ms | CPU ms |")
    print("|---|---:|---:|")
    for name, which in (("bare interpreter", 0), ("with import stepscope", 1)):
        wall, cpu = (statistics.median(pair[which][clock] for pair in pairs) * 1000 for clock in (0, 1))
        print(f"| {name} | {wall:.1f} | {cpu:.1f} |")
    wall, cpu = (statistics.median(pair[1][clock] - pair[0][clock] for pair in pairs) * 1000 for clock in (0, 1))
    print(f"| difference | {wall:.1f} | {cpu:.1f} |")
    program = f"import stepscope, sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True
    )
    print(f"\nimported with it, of {', '.join(HEAVY)}: {found.stdout.strip()}")


if __name__ == "__main__":
    main()
