"""How fast traces are read, in how much memory, and how fast again from the cache; beside HolisticTraceAnalysis.

    python benchmarks/read_trace.py [--directory DIR] [--sizes 100 500 2000] [--runs 3]
                                    [--hta-python PYTHON | --without-hta] [--without-scanner] [--all-cores]
    python benchmarks/read_trace.py --curve 10000

Every run is a fresh process held to one core (where the system can do that), with one Polars thread. Seconds are CPU
seconds of the call alone and of the whole process, imports included; memory is the process's peak as the
operating system counts it. Figures are medians; MB is 10^6 bytes of raw JSON, MiB is 2^20 bytes.

HolisticTraceAnalysis 0.5.0 with pandas below 3 is timed in an environment of its own, which is made in the directory
unless --hta-python names one. Two of its calls are timed: `TraceAnalysis(trace_dir=...)`, which is how its guide opens
a trace, and `Trace(...).parse_traces(use_multiprocessing=False, use_memory_profiling=False)`, the parsing alone and
its fastest setting. Its number of events is compared with the one it should have: events with a duration and a
category other than "Trace". (TraceAnalysis then leaves out device work outside the whole steps, which is meant so.)

With --without-scanner, stepscope reads without its compiled scanner, as where none was built. With --all-cores, it may
use all cores: compare the wall seconds. --curve reads one trace of this size, and prints how much memory it had when.

With STEPSCOPE_TRACES set, a real trace is read as well.
"""

from __future__ import annotations

import argparse
import gzip
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fresh_process import measure

HERE = Path(__file__).resolve().parent
HTA = ("holistictraceanalysis==0.5.0", "pandas<3")
REAL_TRACE = "kineto/v100_dlrm_rank1of2.json.gz"

PROLOGUE = """
path, cache = sys.argv[1], sys.argv[2]
def report(events):
    print(json.dumps({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "events": events}))
"""
WITHOUT_SCANNER = """
from stepscope.readers import kineto
kineto.scan = lambda text, *, exact: None
"""
READ = """
from stepscope.readers import open_trace
wall, cpu = time.perf_counter(), time.process_time()
trace = open_trace(path)
report(trace.metadata.events)
"""
READ_WITH_CACHE = """
from pathlib import Path
from stepscope.readers import open_trace
from stepscope.trace.cache import TraceCache
wall, cpu = time.perf_counter(), time.process_time()
trace = open_trace(path, cache=TraceCache(Path(cache)))
report(trace.metadata.events)
"""
READ_WINDOW = """
from pathlib import Path
from stepscope.readers import open_trace
from stepscope.trace.cache import TraceCache
from stepscope.trace.window import Window
wall, cpu = time.perf_counter(), time.process_time()
trace = open_trace(path, cache=TraceCache(Path(cache)), window=Window(10**9, 2 * 10**9))
report(trace.metadata.events)
"""
HTA_OPEN = """
import logging; logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
wall, cpu = time.perf_counter(), time.process_time()
analysis = TraceAnalysis(trace_dir=os.path.dirname(path))
report(sum(len(frame) for frame in analysis.t.traces.values()))
"""
HTA_PARSE = """
import logging; logging.disable(logging.CRITICAL)
from hta.common.trace import Trace
trace = Trace(trace_dir=os.path.dirname(path))
wall, cpu = time.perf_counter(), time.process_time()
trace.parse_traces(use_multiprocessing=False, use_memory_profiling=False)
report(sum(len(frame) for frame in trace.traces.values()))
"""
COUNT = """
import gzip
opener = gzip.open if path.endswith(".gz") else open
document = json.load(opener(path, "rb"))
events = document["traceEvents"]
wall, cpu = time.perf_counter(), time.process_time()
report([len(events), sum("dur" in e and "cat" in e and e["cat"] != "Trace" for e in events)])
"""


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure; the events, which must be the same in all runs."""
    if len({run["events"] for run in runs}) != 1:
        raise SystemExit("runs over the same file found different numbers of events")
    figures = {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "events"}
    return {**figures, "events": runs[0]["events"]}


def rows(
    name: str, path: Path, raw_mb: float, cache: Path, options: argparse.Namespace, hta: str | None
) -> Iterator[str]:
    """The lines of the table that belong to one file."""
    shutil.rmtree(cache, ignore_errors=True)
    programs = [("stepscope, open_trace", sys.executable, READ, options.runs)]
    programs += [("stepscope, the same and kept in the cache", sys.executable, READ_WITH_CACHE, 1)]
    programs += [("stepscope, second opening", sys.executable, READ_WITH_CACHE, options.runs)]
    programs += [("stepscope, a second of it from the cache", sys.executable, READ_WINDOW, options.runs)]
    if hta is not None:
        programs += [("HTA, Trace.parse_traces", hta, HTA_PARSE, options.runs)]
        programs += [("HTA, TraceAnalysis(...)", hta, HTA_OPEN, options.runs)]
        all_events, hta_events = measure(sys.executable, PROLOGUE + COUNT, str(path), str(cache))["events"]
    for what, python, program, runs in programs:
        if options.without_scanner and what.startswith("stepscope"):
            program = WITHOUT_SCANNER + program
        all_cores = options.all_cores and what.startswith("stepscope")
        call = partial(measure, python, PROLOGUE + program, str(path), str(cache), all_cores=all_cores)
        found = medians([call() for _ in range(runs)])
        note = f"{found['events']:,}"
        if hta is not None:
            expected = hta_events if what.startswith("HTA") else all_events
            note += "" if found["events"] == expected else f" (of {expected:,})"
        yield (
            f"| {name} | {what} | {found['cpu']:.2f} | {raw_mb / found['cpu']:,.0f} | {found['wall']:.2f} "
            f"| {found['process_cpu']:.2f} | {found['peak_mib']:.0f} | {note} |"
        )


def curve(path: Path, parts: int = 12) -> Iterator[str]:
    """The memory of a process that reads a file, at so many times."""
    found = measure(sys.executable, PROLOGUE + READ, str(path), "", all_cores=True, curve_s=0.1)
    times = found["curve"][:: max(1, len(found["curve"]) // parts)]
    yield f"{path.stat().st_size / 1e6:,.0f} MB: {found['wall']:.0f} s, at most {found['peak_mib']:.0f} MiB"
    yield "| s | " + " | ".join(f"{seconds:.0f}" for seconds, _ in times) + " |"
    yield "|---|" + "---:|" * len(times)
    yield "| MiB | " + " | ".join(f"{mib:.0f}" for _, mib in times) + " |"


def long_trace(directory: Path, megabytes: int) -> Path:
    """A generated trace alone in its folder; made in a process of its own, whose memory ours does not inherit."""
    path = directory / f"long-{megabytes}" / "trace.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        subprocess.run([sys.executable, str(HERE / "long_trace.py"), str(partial), str(megabytes)], check=True)
        partial.rename(path)
    return path


def real_trace(directory: Path) -> tuple[Path, float] | None:
    """A real trace alone in a folder, and its raw size in MB; None without STEPSCOPE_TRACES."""
    folder = os.environ.get("STEPSCOPE_TRACES")
    if not folder:
        return None
    path = directory / "real" / Path(REAL_TRACE).name
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(folder) / REAL_TRACE, path)
    with gzip.open(path) as file:
        return path, sum(map(len, iter(lambda: file.read(2**20), b""))) / 1e6


def hta_python(directory: Path, options: argparse.Namespace) -> str | None:
    """An interpreter that has HolisticTraceAnalysis."""
    if options.without_hta or options.hta_python:
        return None if options.without_hta else str(options.hta_python)
    place = directory / "hta"
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(place, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *HTA], check=True)
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "stepscope-benchmark")
    parser.add_argument("--sizes", type=int, nargs="*", default=[100, 500, 2000], metavar="MB")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--hta-python", type=Path)
    parser.add_argument("--without-hta", action="store_true")
    parser.add_argument("--without-scanner", action="store_true")
    parser.add_argument("--all-cores", action="store_true")
    parser.add_argument("--curve", type=int, metavar="MB")
    options = parser.parse_args()
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    if options.curve is not None:
        print("\n".join(curve(long_trace(directory, options.curve))))
        return
    hta = hta_python(directory, options)
    cores = f"{os.cpu_count()} cores" if options.all_cores else "one core"
    print(
        f"Python {platform.python_version()}, {platform.machine()}, {cores}, median of {options.runs} runs\n",
        flush=True,
    )
    print("| trace | call | CPU s | MB/s | wall s | whole process, CPU s | peak MiB | events |")
    print("|---|---|---:|---:|---:|---:|---:|---:|", flush=True)
    cache = directory / "cache"
    for megabytes in options.sizes:
        path = long_trace(directory, megabytes)
        raw_mb = path.stat().st_size / 1e6
        compared = hta if megabytes <= 100 else None  # it takes minutes and many GiB for more
        for line in rows(f"{raw_mb:,.0f} MB", path, raw_mb, cache, options, compared):
            print(line, flush=True)
    if (found := real_trace(directory)) is not None:
        path, raw_mb = found
        for line in rows(f"{path.name}, {raw_mb:.0f} MB packed with gzip", path, raw_mb, cache, options, hta):
            print(line, flush=True)
    shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    main()
