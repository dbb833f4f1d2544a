"""How fast exports of Nsight Systems are read, and in how much memory; beside a plain pandas read of the same tables.

    python benchmarks/read_nsight_systems.py [--directory DIR] [--rows 500000 2000000] [--runs 3]
                                             [--pandas-python PYTHON | --without-pandas]

The files are generated: steps of operators with a launch and a kernel each, copies, waits and calls of the operating
system, in the proportions of a trace with emit_nvtx, with texts as PyTorch writes them. Every run is a fresh process
held to one core (where the system can do that), with one Polars thread. Rows are those of the tables of events. Seconds
are CPU seconds of the call alone and of the whole process, imports included; memory is the process's peak as the
operating system counts it. Figures are medians.

pandas 3 is timed in an environment of its own, which is made in the directory unless --pandas-python names an
interpreter that has pandas: `read_sql_query("SELECT * FROM ...")` for each table, with all columns and with those alone
that stepscope reads. It does nothing but that: no names are looked up, nothing is sorted, nested or linked.
With STEPSCOPE_TRACES set, a real file is read as well.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from fresh_process import measure

HERE = Path(__file__).resolve().parent
PANDAS = "pandas>=3,<4"
REAL_TRACE = "nsys/two_gpu_before.sqlite"
TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": """start end deviceId contextId streamId globalPid correlationId demangledName
        shortName registersPerThread gridX gridY gridZ blockX blockY blockZ staticSharedMemory dynamicSharedMemory""",
    "CUPTI_ACTIVITY_KIND_MEMCPY": """start end deviceId contextId streamId globalPid correlationId bytes copyKind
        srcKind dstKind""",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": """start end deviceId contextId streamId globalPid correlationId syncType""",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end globalTid correlationId nameId",
    "NVTX_EVENTS": "start end eventType globalTid textId text",
    "OSRT_API": "start end globalTid nameId",
    "StringIds": "id value",
}
UNREAD = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "mangledName launchType cacheConfig localMemoryPerThread localMemoryTotal gridId",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "eventClass returnValue callchainId",
    "NVTX_EVENTS": "rangeId category color domainId uint64Value int64Value doubleValue uint32Value int32Value jsonText",
}
"""Columns that stand in real files, too, and take part in what reading them costs."""
NAMES = ("cudaLaunchKernel_v7000", "cudaMemcpyAsync_v3020", "cudaStreamSynchronize_v3020", "poll")
FIRST_KERNEL = 100

PROLOGUE = """
path, tables = sys.argv[1], json.loads(sys.argv[2])
def report(rows):
    print(json.dumps({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "rows": rows}))
"""
READ = """
from stepscope.readers import open_trace
wall, cpu = time.perf_counter(), time.process_time()
trace = open_trace(path)
report(trace.metadata.events)
"""
READ_PANDAS = """
import sqlite3, pandas
wall, cpu = time.perf_counter(), time.process_time()
connection = sqlite3.connect(path)
frames = {name: pandas.read_sql_query(f"SELECT {columns} FROM {name}", connection) for name, columns in tables.items()}
report(sum(len(frame) for name, frame in frames.items() if name != "StringIds"))
"""


def operators(count: int) -> Iterator[dict[str, list[tuple[Any, ...]]]]:
    """The rows of each table, some thousand operators at a time, columns as in TABLES and UNREAD."""
    process = 1 << 48 | 100 << 24
    thread, time_ns = process | 100, 28_000_000_000
    for first in range(0, count, 5000):
        rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in TABLES}
        for number in range(first, min(first + 5000, count)):
            time_ns += 9000
            text = f"aten::mul, seq = {number}, op_id = {3 * number}, sizes = [[{number % 64}, 512], [512]]"
            rows["NVTX_EVENTS"].append((time_ns, time_ns + 8000, 59, thread, None, text))
            rows["CUPTI_ACTIVITY_KIND_RUNTIME"].append((time_ns + 500, time_ns + 5000, thread, number + 1, 0))
            name = FIRST_KERNEL + number % 60
            place = (time_ns + 6000, time_ns + 14_000, 0, 1, 7, process, number + 1)
            rows["CUPTI_ACTIVITY_KIND_KERNEL"].append(
                (*place, name, name, 32, number % 500 + 1, 1, 1, 128, 1, 1, 0, 1024)
            )
            if number % 10 == 0:
                rows["OSRT_API"].append((time_ns + 600, time_ns + 900, thread, 3))
            if number % 20 == 0:
                rows["CUPTI_ACTIVITY_KIND_MEMCPY"].append((*place[:6], number + 1, 4096, 1, 1, 2))
            if number % 50 == 0:
                rows["CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"].append((*place[:6], number + 1, 3))
            if number % 1000 == 0:
                text = f"step {number // 1000}"
                rows["NVTX_EVENTS"].append((time_ns - 500, time_ns + 8_900_000, 59, thread, None, text))
        yield rows


def generate(path: Path, wanted: int) -> None:
    """Write a database with about this many rows of events."""
    with closing(sqlite3.connect(path)) as connection:
        for table, columns in TABLES.items():
            described = [f'"{name}" {"TEXT" if name in ("text", "value") else "INTEGER"}' for name in columns.split()]
            described += [f'"{name}" INTEGER' for name in UNREAD.get(table, "").split()]
            keyed = ", ".join(described).replace('"id" INTEGER', '"id" INTEGER PRIMARY KEY')
            connection.execute(f'CREATE TABLE "{table}" ({keyed})')
        kernels = [f"void at::native::elementwise_kernel<(int)128, (int)4, Functor{n}>(int, T3)" for n in range(60)]
        strings = [*enumerate(NAMES), *enumerate(kernels, FIRST_KERNEL)]
        connection.executemany("INSERT INTO StringIds VALUES (?, ?)", strings)
        for part in operators(wanted * 100 // 317):
            for table, rows in part.items():
                unread = [0 if "Value" not in name else None for name in UNREAD.get(table, "").split()]
                if rows:
                    marks = ", ".join("?" * (len(rows[0]) + len(unread)))
                    connection.executemany(f'INSERT INTO "{table}" VALUES ({marks})', [(*row, *unread) for row in rows])
        connection.commit()


def lines(name: str, path: Path, runs: int, pandas: str | None) -> Iterator[str]:
    """The lines of the table that belong to one file."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
        there = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    used = {table: ", ".join(f'"{column}"' for column in columns.split()) for table, columns in TABLES.items()}
    used = {table: columns for table, columns in used.items() if table in there}
    programs = [("stepscope, open_trace", sys.executable, READ, used)]
    if pandas is not None:
        programs += [("pandas, the columns that are used", pandas, READ_PANDAS, used)]
        programs += [("pandas, all columns", pandas, READ_PANDAS, dict.fromkeys(used, "*"))]
    for what, python, program, tables in programs:
        found = [measure(python, PROLOGUE + program, str(path), json.dumps(tables)) for _ in range(runs)]
        cpu, wall, process, peak = (
            statistics.median(run[key] for run in found) for key in ("cpu", "wall", "process_cpu", "peak_mib")
        )
        rows = found[0]["rows"]
        figures = f"{rows:,} | {cpu:.2f} | {rows / cpu:,.0f} | {wall:.2f} | {process:.2f} | {peak:.0f}"
        yield f"| {name} | {what} | {figures} |"


def generated(directory: Path, rows: int) -> Path:
    """A generated file; made in a process of its own, whose memory ours does not inherit."""
    path = directory / f"nsight-{rows}.sqlite"
    if not path.exists():
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        subprocess.run([sys.executable, __file__, "--generate", str(partial), "--rows", str(rows)], check=True)
        partial.rename(path)
    return path


def pandas_python(directory: Path, options: argparse.Namespace) -> str | None:
    """An interpreter that has pandas."""
    if options.without_pandas or options.pandas_python:
        return None if options.without_pandas else str(options.pandas_python)
    place = directory / "pandas"
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(place, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", PANDAS], check=True)
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "stepscope-benchmark")
    parser.add_argument("--rows", type=int, nargs="*", default=[500_000, 2_000_000])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--pandas-python", type=Path)
    parser.add_argument("--without-pandas", action="store_true")
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.generate:
        generate(options.generate, options.rows[0])
        return
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    pandas = pandas_python(directory, options)
    print(f"Python {platform.python_version()}, {platform.machine()}, one core, median of {options.runs} runs\n")
    print("| file | call | rows | CPU s | rows/s | wall s | whole process, CPU s | peak MiB |")
    print("|---|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for rows in options.rows:
        path = generated(directory, rows)
        for line in lines(f"{path.stat().st_size / 1e6:,.0f} MB", path, options.runs, pandas):
            print(line, flush=True)
    if folder := os.environ.get("STEPSCOPE_TRACES"):
        path = Path(folder) / REAL_TRACE
        for line in lines(path.name, path, options.runs, pandas):
            print(line, flush=True)


if __name__ == "__main__":
    main()
