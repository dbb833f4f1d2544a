"""What `stepscope diagnose` takes, as a process: the first time, again with other settings, and unchanged.

    python benchmarks/diagnose_speed.py [--megabytes 10 100] [--runs 5] [--phases] [--directory DIR] [--json FILE]

Traces are long_trace.py's. "first" reads the file with an empty cache, "kept" finds its tables in the cache but asks
something new (another --top), "again" is the same command once more, whose answer is kept. Figures are medians of the
runs: CPU seconds of the process (user and system), elapsed seconds, and its peak of memory as the operating system
counts it.

--phases also runs the command once in this process and prints where its CPU seconds go: imports, reading, each
analysis that a `View` keeps, each rule's own work, replays and rendering. What a rule asks first is counted for what it
asked, not for the rule.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.long_trace import write_long_trace  # noqa: E402

# In a small process of its own: a child's peak is at least what its parent held when it was started.
MEASURED = """
import json, os, subprocess, sys, time
began = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, used = os.wait4(process.pid, 0)
elapsed = time.perf_counter() - began
peak = used.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
print(json.dumps({"cpu_s": used.ru_utime + used.ru_stime, "elapsed_s": elapsed, "mib": peak}))
sys.exit(os.waitstatus_to_exitcode(status))
"""


def measured(words: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Run the command; return its CPU and elapsed seconds and its peak in MiB."""
    command = [sys.executable, "-I", "-S", "-c", MEASURED, sys.executable, "-m", "stepscope", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-500:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def runs(trace: Path, count: int) -> dict[str, dict[str, float]]:
    """The medians of the three ways to ask."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(count):
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "STEPSCOPE_CACHE_DIR": cache, "PYTHONPATH": str(ROOT / "src")}
            found["first"].append(measured(["diagnose", str(trace)], environment))
            other = ["diagnose", str(trace), "--top", str(6 + number)]
            found["kept"].append(measured(other, environment))
            found["again"].append(measured(other, environment))
    return {
        way: {key: statistics.median(each[key] for each in figures) for key in figures[0]}
        for way, figures in found.items()
    }


class Phases:
    """CPU seconds by phase; what is called inside a phase and is one itself counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[list[float]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began, inside = time.process_time(), [0.0]
        self._open.append(inside)
        try:
            yield
        finally:
            self._open.pop()
            taken = time.process_time() - began
            self.seconds[name] += taken - inside[0]
            if self._open:
                self._open[-1][0] += taken

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            with self.phase(name):
                return function(*arguments, **named)

        return call


def _at_once(check: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: list(check(*arguments))  # a generator's work is done where it is used


def phases_of(trace: Path) -> dict[str, float]:
    """CPU seconds of each phase of one diagnosis, the first time."""
    phases = Phases()
    with phases.phase("imports"):
        import stepscope.commands.shared.reading as reading
        import stepscope.readers as readers
        import stepscope.report.diagnosis  # noqa: F401
        import stepscope.report.text as text
        from stepscope.commands import main
        from stepscope.diagnosis import rules
        from stepscope.diagnosis.view import View
        from stepscope.whatif import Experiment
    readers.open_trace = phases.timed("reading", readers.open_trace)
    text.text_of = phases.timed("rendering", text.text_of)
    Experiment.run = phases.timed("replays", Experiment.run)  # type: ignore[method-assign]
    assert reading
    for kind in View.__mro__[:-1]:
        for name, member in list(vars(kind).items()):
            if isinstance(member, functools.cached_property):
                made = functools.cached_property(phases.timed(f"analysis: {name}", member.func))
                made.__set_name__(kind, name)
                setattr(kind, name, made)
    for rule in rules.RULES:
        object.__setattr__(rule, "check", phases.timed(f"rule: {rule.id}", _at_once(rule.check)))
    with tempfile.TemporaryDirectory() as cache:
        os.environ["STEPSCOPE_CACHE_DIR"] = cache
        with contextlib.redirect_stdout(io.StringIO()), phases.phase("everything else"):
            main(["diagnose", str(trace), "--no-cache"])
    return dict(sorted(phases.seconds.items(), key=lambda each: -each[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--directory", type=Path, help="keep the traces here")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        folder = arguments.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        print("| MB | asked | CPU s | elapsed s | MiB |\n|---:|---|---:|---:|---:|")
        for megabytes in arguments.megabytes:
            trace = folder / f"{megabytes}.json"
            if not trace.exists():
                write_long_trace(trace, megabytes * 10**6)
            os.utime(trace, (0, 0))
            time.sleep(3)  # an answer about a file that just changed is not kept
            results[str(megabytes)] = found = runs(trace, arguments.runs)
            for way, figures in found.items():
                row = f"{figures['cpu_s']:.2f} | {figures['elapsed_s']:.2f} | {figures['mib']:,.0f}"
                print(f"| {megabytes:,} | {way} | {row} |", flush=True)
            if arguments.phases:
                command = [sys.executable, __file__, "--of-one", str(trace)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found["phases"] = json.loads(done.stdout)
        for megabytes, found in results.items():
            if "phases" in found:
                print(f"\n{megabytes} MB, CPU seconds by phase:")
                for name, seconds in list(found["phases"].items())[:25]:
                    print(f"  {seconds:7.2f}  {name}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--of-one"]:
        print(json.dumps(phases_of(Path(sys.argv[2]))))
    else:
        main()
