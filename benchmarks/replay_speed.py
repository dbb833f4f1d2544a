"""How fast a trace of a million events is replayed, in how much memory; beside HTA's critical path of the same trace.

    python benchmarks/replay_speed.py [--events 1000000] [--runs 3] [--hta PYTHON] [--directory DIR] [--json FILE]

Two generated traces (long_trace.py): "stacks" is a recording with Python frames, operators and a kernel for each; in
"waits" threads, queues, collectives and the host wait for one another in every step. Events are complete ones: those
with a beginning and a duration.

Every run is a fresh process held to one core (where the system can do that), with one Polars thread; seconds are CPU
seconds, figures are medians. Memory is the process's peak as the operating system counts it: when the trace has been
read from its file, and at the end; reading is in it, because no replay goes without. "Preparing" is what every analysis
of host threads shares (which slice lies in which, and the cause of each), "graph" and "replay" come after it; "change"
halves all dispatch time and replays that. Each replay is held against the trace: every beginning and end must be the
measured one to the nanosecond.

HTA's figures are of HolisticTraceAnalysis 0.5.0 in the Python that --hta names (or none): the CPU seconds of
`TraceAnalysis.critical_path_analysis(rank, "ProfilerStep", (first, last))` over all steps alone, without opening the
trace, and the process's peak. Its memory and its time are bounded (--hta-gib, --hta-seconds); what needs more fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from read_trace import measure  # noqa: E402

MOST_SECONDS, MOST_MIB = 2.0, 1024
HEAD = """\
| trace | reading, s | preparing, s | graph, s | replay, s | the three, s | change, s | MiB once read | MiB in all \
| HTA's critical path, s | MiB in all | times as long |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"""
TRACES = {"stacks": (), "waits": ("--machine",)}
REPLAY = """
import resource
import numpy as np
from stepscope.analysis.host import host_activity
from stepscope.analysis.step_view import StepView
from stepscope.readers import open_trace
from stepscope.whatif import Experiment, build_graph, replay
from stepscope.whatif.changes import scaled_cause

taken = {}
def timed(what, call):
    begin = time.process_time()
    result = call()
    taken[what] = time.process_time() - begin
    return result
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
trace = timed("reading", lambda: open_trace(path))
read = peak()
activity = timed("preparing", lambda: (host_activity(trace), ))[0]
timed("threads", lambda: activity.timelines)
graph = timed("graph", lambda: build_graph(trace, activity=activity))
done = timed("replay", lambda: replay(graph))
peak_of_replay = peak()
works, stretches = graph.works, graph.stretches
exact = (
    np.array_equal(done.work_start, works.start)
    and np.array_equal(done.work_end, works.start + works.duration)
    and np.array_equal(done.stretch_start, stretches.start)
    and np.array_equal(done.stretch_end, stretches.end)
)
view = StepView(trace)
view.activity = activity
experiment = Experiment(view)
before = experiment.graph, experiment.measured_ns
timed("change", lambda: experiment.run(scaled_cause("dispatch", 0.5)(experiment, experiment.graph)))
taken["preparing"] += taken.pop("threads")
names = ("operators", "launches", "device_work", "frames", "annotations", "synchronisations")
events = sum(getattr(trace, name).height for name in names)
print(json.dumps({**taken, "events": events, "read_mib": read, "replay_mib": peak_of_replay, "exact": exact,
                  "works": len(works.start), "stretches": len(stretches.start), "steps": experiment.step_count}))
"""
HTA = """
import logging, resource; logging.disable(logging.CRITICAL)
limit = gib * 2**30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
from hta.trace_analysis import TraceAnalysis
begin = time.process_time()
analysis = TraceAnalysis(trace_files={0: path}, trace_dir=os.path.dirname(path))
opened = time.process_time()
graph, _ = analysis.critical_path_analysis(rank=0, annotation="ProfilerStep", instance_id=(0, steps - 1))
print(json.dumps({"reading": opened - begin, "path": time.process_time() - opened, "nodes": len(graph.nodes)}))
"""


def trace_of(name: str, events: int, directory: Path) -> Path:
    """A generated trace; made in a process of its own, whose memory the measured ones do not inherit."""
    path = directory / f"{name}-{events}.json"
    if not path.exists():
        partial = path.with_suffix(".partial")
        words = [sys.executable, str(HERE / "long_trace.py"), str(partial), "--events", str(events), *TRACES[name]]
        subprocess.run(words, check=True)
        partial.rename(path)
    return path


def replayed(path: Path, runs: int) -> dict[str, Any]:
    """The medians of our figures over some runs."""
    found = [measure(sys.executable, REPLAY, path, path) for _ in range(runs)]
    if not all(one["exact"] for one in found):
        raise SystemExit(f"the replay of {path.name} is not what was measured")
    return {key: statistics.median(one[key] for one in found) for key in found[0]}


def peer(path: Path, steps: int, python: str, gib: int, seconds: int) -> dict[str, Any] | str:
    """HTA's figures, or how it failed."""
    settings = f"gib, steps, seconds = {gib}, {steps}, {seconds}\n"
    try:
        return measure(python, settings + HTA, path, path)
    except SystemExit as problem:
        return str(problem)


def row(name: str, own: dict[str, Any], other: dict[str, Any] | str | None) -> str:
    """One trace's line of the table."""
    ours = own["preparing"] + own["graph"] + own["replay"]
    cells = [f"{name}, {own['events']:,.0f} events, {own['works']:,.0f} kernels and copies", f"{own['reading']:.1f}"]
    cells += [f"{own[what]:.2f}" for what in ("preparing", "graph", "replay")]
    cells += [f"{ours:.2f}", f"{own['change']:.2f}", f"{own['read_mib']:.0f}", f"{own['replay_mib']:.0f}"]
    if isinstance(other, dict):
        cells += [f"{other['path']:.1f}", f"{other['peak_mib']:,.0f}", f"{other['path'] / ours:.0f}"]
    else:
        cells += ["-" if other is None else "fails", "-", "-"]
    return f"| {' | '.join(cells)} |"


def verdict(found: dict[str, dict[str, Any]]) -> str:
    """The slowest and the largest beside the targets, in a sentence."""
    seconds = max(one["preparing"] + one["graph"] + one["replay"] for one in found.values())
    mib = max(one["replay_mib"] for one in found.values())
    return (
        f"Preparing, graph and replay take {seconds:.2f} s at most (target: {MOST_SECONDS:g} s), the process needs "
        f"{mib:.0f} MiB with reading (target: {MOST_MIB} MiB). The replay gave every measured beginning and end to the "
        "nanosecond."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--events", type=int, default=1_000_000, metavar="NUMBER")
    parser.add_argument("--runs", type=int, default=3, metavar="N")
    parser.add_argument("--hta", metavar="PYTHON", help="a Python that has HTA")
    parser.add_argument("--hta-gib", metavar="GIB", type=int, default=16, help="memory that HTA may take (default: 16)")
    parser.add_argument("--hta-seconds", metavar="S", type=int, default=900, help="and processor time (default: 900)")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "stepscope-benchmark")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    machine = f"Python {platform.python_version()}, {platform.machine()}"
    print(f"{machine}, one core, CPU seconds, median of {options.runs} runs\n")
    print(HEAD, flush=True)
    found: dict[str, dict[str, Any]] = {}
    for name in TRACES:
        path = trace_of(name, options.events, options.directory)
        own = replayed(path, options.runs)
        other = (
            None
            if options.hta is None
            else peer(path, int(own["steps"]), options.hta, options.hta_gib, options.hta_seconds)
        )
        found[name] = {**own, "hta": other}
        print(row(name, own, other), flush=True)
    print(f"\n{verdict(found)}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
