"""What `stepscope diagnose` takes, as a process: the first time, again with other settings, and unchanged; its peers.

    python benchmarks/diagnose_speed.py [--megabytes 10 100] [--runs 5] [--phases] [--directory DIR] [--json FILE]
                                        [--hta PYTHON] [--tb-profiler PYTHON] [--tracelens PYTHON] [--exports]

Traces are long_trace.py's. "first" reads the file with an empty cache, "threshold" asks with another threshold of a
rule (--set), "output" with another --top, "again" is the same command once more, whose answer is kept. Figures are
medians of the runs: CPU seconds of the process (user and system), elapsed seconds, and its peak of memory as the
operating system counts it.

Other tools run in the Pythons that have them, in turn with stepscope, each as a process that opens the same file and
makes its tables: HolisticTraceAnalysis (holistictraceanalysis==0.5.0, pandas<3), torch-tb-profiler (0.4.3, pandas<3)
and AMD's TraceLens. One that takes more than 15 minutes or fails is not run again.

--phases also runs the command once in a process of its own and prints where its CPU seconds and its memory go:
imports, reading, each analysis that a `View` keeps, each rule's own work, each rule's replays and rendering. What a
rule asks first is counted for what it asked, not for the rule. Looking takes time too, about 30 us a phase begun.

--exports also writes each export, and the page, of a trace whose tables are cached, and prints how large it is, beside
a command that opens the trace and shows one small table.
"""

from __future__ import annotations

import argparse
import builtins
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
import json, os, subprocess, sys, threading, time
began = time.perf_counter()
process = subprocess.Popen(sys.argv[2:], stdout=subprocess.DEVNULL)
limit = threading.Timer(float(sys.argv[1]), process.kill)
limit.start()
_, status, used = os.wait4(process.pid, 0)
limit.cancel()
elapsed = time.perf_counter() - began
peak = used.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
print(json.dumps({"cpu_s": used.ru_utime + used.ru_stime, "elapsed_s": elapsed, "mib": peak}))
sys.exit(os.waitstatus_to_exitcode(status))
"""
MOST_SECONDS = 900.0

HTA = """
import sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/")
print(analysis.get_temporal_breakdown(visualize=False))
print(analysis.get_idle_time_breakdown(ranks=[0], visualize=False))
print(analysis.get_gpu_kernel_breakdown(visualize=False))
print(analysis.get_comm_comp_overlap(visualize=False))
"""
TB_PROFILER = """
import sys, tempfile
from torch_tb_profiler.profiler.data import RunProfileData
from torch_tb_profiler.profiler.run_generator import RunGenerator
with tempfile.TemporaryDirectory() as cache:
    data = RunProfileData.parse("worker", None, sys.argv[1], cache)
    print(vars(RunGenerator("worker", None, data).generate_run_profile()))
"""
TRACELENS = """
import sys, tempfile
from TraceLens.Reporting.generate_perf_report_pytorch import generate_perf_report_pytorch
with tempfile.TemporaryDirectory() as folder:
    generate_perf_report_pytorch(sys.argv[1], output_csvs_dir=folder)
"""
PEERS = {
    "hta": ("HTA: opening, and four breakdowns", HTA),
    "tb_profiler": ("torch-tb-profiler: its tables, without the server", TB_PROFILER),
    "tracelens": ("TraceLens: its performance report", TRACELENS),
}


def measured(words: list[str], environment: dict[str, str]) -> dict[str, float] | str:
    """Run the command; return its CPU and elapsed seconds and its peak in MiB, or why it failed."""
    command = [sys.executable, "-I", "-S", "-c", MEASURED, str(MOST_SECONDS), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        found = json.loads(done.stdout)
        said = done.stderr.strip().splitlines() or [
            f"killed after {found['elapsed_s']:.0f} s and {found['mib']:,.0f} MiB"
        ]
        return said[-1]
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def stepscope(words: list[str], environment: dict[str, str]) -> dict[str, float]:
    found = measured([sys.executable, "-m", "stepscope", *words], environment)
    if isinstance(found, str):
        raise SystemExit(f"{' '.join(words)} failed: {found}")
    return found


def runs(trace: Path, count: int, peers: dict[str, str]) -> dict[str, dict[str, float] | str]:
    """The medians of the four ways to ask, and of each peer, in turn; why, where a peer fails.

    Args:
        peers: by its key in PEERS, the Python that has it.
    """
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    failed: dict[str, str] = {}
    for number in range(count):
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "STEPSCOPE_CACHE_DIR": cache, "PYTHONPATH": str(ROOT / "src")}
            found["first"].append(stepscope(["diagnose", str(trace)], environment))
            stricter = ["diagnose", str(trace), "--set", f"loop-in-step.repetitions={9 + number}"]
            found["threshold"].append(stepscope(stricter, environment))
            other = ["diagnose", str(trace), "--top", str(6 + number)]
            found["output"].append(stepscope(other, environment))
            found["again"].append(stepscope(other, environment))
        for key, python in peers.items():
            name, script = PEERS[key]
            if name in failed:
                continue
            figures = measured([python, "-c", script, str(trace.resolve())], dict(os.environ))
            if isinstance(figures, str):
                failed[name] = figures
            else:
                found[name].append(figures)
    medians: dict[str, dict[str, float] | str] = {
        way: {key: statistics.median(each[key] for each in figures) for key in figures[0]}
        for way, figures in found.items()
        if way not in failed
    }
    return {**medians, **failed}


def print_exports(trace: Path) -> None:
    """A table of what each export takes, and of the page."""
    from stepscope.commands.read.export import FORMATS

    print(f"\n| {trace.name} | CPU s | MiB | written MB |\n|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "STEPSCOPE_CACHE_DIR": cache, "PYTHONPATH": str(ROOT / "src")}
        stepscope(["query", str(trace), "SELECT count(*) FROM lanes"], environment)
        asked = {"opening": ["query", str(trace), "SELECT max(lane) FROM lanes"]}
        asked |= {name: ["export", str(trace), f"{folder}/{name}", "--format", name] for name in FORMATS}
        asked["diagnose, no page"] = ["diagnose", str(trace)]
        asked["diagnose --html"] = ["diagnose", str(trace), "--html", f"{folder}/page.html"]
        for name, words in asked.items():
            figures = stepscope(words, environment)
            made = [each for each in Path(folder).rglob("*") if each.is_file()]
            size = sum(each.stat().st_size for each in made) / 1e6
            print(f"| {name} | {figures['cpu_s']:.2f} | {figures['mib']:,.0f} | {size:,.1f} |", flush=True)
            for each in made:
                each.unlink()


def memory_mib() -> tuple[float, float]:
    """Resident memory now and its highest since the last call; zeros where the system does not tell (Linux does)."""
    try:
        text = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0.0, 0.0
    now, highest = (int(text.split(f"{key}:")[1].split()[0]) / 1024 for key in ("VmRSS", "VmHWM"))
    return now, highest


class Phase:
    """What a phase took by itself, without the phases inside it: CPU seconds, its calls, memory in MiB.

    Attributes:
        kept: memory that was resident after it and not before.
        peak: the process's highest while it ran.
    """

    def __init__(self) -> None:
        self.seconds = self.calls = self.kept = self.peak = 0.0


class Phases:
    """The phases by name. Nested, each counts for itself alone."""

    def __init__(self) -> None:
        self.found: dict[str, Phase] = defaultdict(Phase)
        self._open: list[str] = []
        self._began, (self._resident, _) = time.process_time(), memory_mib()

    def _passed(self) -> None:
        """Give the phase that ran until now what it took."""
        now, highest = memory_mib()
        if self._open:
            phase = self.found[self._open[-1]]
            phase.seconds += time.process_time() - self._began
            phase.kept += now - self._resident
            phase.peak = max(phase.peak, highest)
        self._began, self._resident = time.process_time(), now

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._passed()
        self._open.append(name)
        try:
            yield
        finally:
            self._passed()
            self._open.pop()
            self.found[name].calls += 1

    def timed(self, name: str | Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a phase, whose name may depend on its arguments."""

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            with self.phase(name if isinstance(name, str) else name(*arguments)):
                return function(*arguments, **named)

        return call

    def asked_by(self, *_: Any) -> str:
        """A name for a replay: the rule that it is for."""
        rules = (name.removeprefix("rule: ") for name in reversed(self._open) if name.startswith("rule: "))
        return f"replay: {next(rules, 'what no rule asks: the measured steps, findings together')}"


def _timed_imports(phases: Phases) -> None:
    """Make every import a phase that may have something to load."""
    imported = builtins.__import__

    def load(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        package = sys.modules.get(name) if level == 0 else None
        if package is not None and all(hasattr(package, each) for each in fromlist or ()):
            return imported(name, globals, locals, fromlist, level)
        with phases.phase("imports"):
            return imported(name, globals, locals, fromlist, level)

    builtins.__import__ = load


def phases_of(trace: Path) -> dict[str, dict[str, float]]:
    """What each phase of one diagnosis takes, the first time; the longest first."""
    phases = Phases()
    _timed_imports(phases)
    import stepscope.readers as readers
    from stepscope.analysis.step_view import StepView
    from stepscope.commands import main
    from stepscope.commands.read import diagnose
    from stepscope.diagnosis.rule import Rule
    from stepscope.diagnosis.view import View
    from stepscope.whatif import Experiment

    readers.open_trace = phases.timed("reading", readers.open_trace)
    diagnose._write = phases.timed("rendering", diagnose._write)
    Rule.ask = phases.timed(lambda rule, view: f"rule: {rule.id}", Rule.ask)  # type: ignore[method-assign]
    Experiment.run = phases.timed(phases.asked_by, Experiment.run)  # type: ignore[method-assign]
    for kind in {View, StepView, Experiment, *View.__mro__[:-1]}:
        for name, member in list(vars(kind).items()):
            if isinstance(member, functools.cached_property):
                made = functools.cached_property(phases.timed(f"analysis: {name}", member.func))
                made.__set_name__(kind, name)
                setattr(kind, name, made)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["STEPSCOPE_CACHE_DIR"] = cache
        with contextlib.redirect_stdout(io.StringIO()), phases.phase("everything else"):
            main(["diagnose", str(trace), "--no-cache"])
    return {name: vars(phase) for name, phase in sorted(phases.found.items(), key=lambda each: -each[1].seconds)}


def print_phases(megabytes: str, found: dict[str, dict[str, float]]) -> None:
    """A table of the phases, and sums of each kind of phase."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    print(f"\n| {megabytes} MB | calls | CPU s | kept MiB | peak MiB |\n|---|---:|---:|---:|---:|")
    for name, phase in found.items():
        whole = sums[name.split(":")[0]]
        for place, key in enumerate(("calls", "seconds", "kept")):
            whole[place] += phase[key]
        whole[3] = max(whole[3], phase["peak"])
    for name, (calls, seconds, kept, peak) in sorted(sums.items(), key=lambda each: -each[1][1]):
        print(f"| all {name} | {calls:.0f} | {seconds:.2f} | {kept:+,.0f} | {peak:,.0f} |")
    for name, phase in found.items():
        if phase["seconds"] >= 0.005 and ":" in name:
            row = f"{phase['calls']:.0f} | {phase['seconds']:.2f} | {phase['kept']:+,.0f} | {phase['peak']:,.0f}"
            print(f"| {name} | {row} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--exports", action="store_true")
    parser.add_argument("--directory", type=Path, help="keep the traces here")
    parser.add_argument("--json", type=Path)
    for key, (name, _) in PEERS.items():
        option = f"--{key.replace('_', '-')}"
        parser.add_argument(option, metavar="PYTHON", help=f"a Python that has {name.split(':')[0]}")
    arguments = parser.parse_args()
    peers = {key: python for key in PEERS if (python := getattr(arguments, key))}
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
            found: dict[str, Any] = {**runs(trace, arguments.runs, peers)} if arguments.runs else {}
            for way, figures in found.items():
                row = f"{figures} | | "
                if not isinstance(figures, str):
                    row = f"{figures['cpu_s']:.2f} | {figures['elapsed_s']:.2f} | {figures['mib']:,.0f}"
                print(f"| {megabytes:,} | {way} | {row} |", flush=True)
            if arguments.phases:
                command = [sys.executable, __file__, "--of-one", str(trace)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found["phases"] = json.loads(done.stdout)
            results[str(megabytes)] = found
            if arguments.exports:
                print_exports(trace)
        for megabytes, found in results.items():
            if "phases" in found:
                print_phases(megabytes, found["phases"])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--of-one"]:
        print(json.dumps(phases_of(Path(sys.argv[2]))))
    else:
        main()
