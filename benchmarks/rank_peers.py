"""What stepscope, HTA and xprof say of the same folders of ranks: who comes late, with time and memory.

Simulated ranks have a late one by construction, or one after another in turn. Of real ones the truth is what needs no
clock: the rank that spends least time in its collectives is the one that the others wait for.

    python benchmarks/rank_peers.py --hta PYTHON --xprof PYTHON

Each tool runs in the Python that has it, in a process of its own, without a cache. HTA: `get_potential_stragglers(1)`,
or its error. xprof (folders of XLA's profiles alone): the host with least collective time in its pod viewer, which
shows the times and names nobody. Seconds are of the processor, memory is the most of any one process.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.simulator.ranks import rank_machine, write_ranks
from tests.simulator.xplane import write_xplane

STEPSCOPE: Final = """
import contextlib, io, json, sys
from stepscope.commands import main
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
    main(["diagnose", sys.argv[1], "--no-cache", "--json", "-"])
found = json.loads(out.getvalue())["across_ranks"]
print(found[0]["title"] if found else "no rank is late")
"""
HTA: Final = """
import logging, sys, warnings
warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
try:
    found = TraceAnalysis(trace_dir=sys.argv[1]).get_potential_stragglers(num_candidates=1)
    print("rank " + ", ".join(map(str, found)))
except Exception as error:
    print(f"fails: {type(error).__name__}: {error}")
"""
XPROF: Final = """
import glob, json, sys
from xprof.convert import raw_to_tool_data
files = sorted(glob.glob(sys.argv[1] + "/plugins/profile/*/*.xplane.pb"))
data, _ = raw_to_tool_data.xspace_to_tool_data(files, "pod_viewer", {"use_saved_result": False})
sums = {}
for step in json.loads(data)["podStatsSequence"]["podStatsMap"]:
    for core, each in step["podStatsPerCore"].items():
        sums[core] = sums.get(core, 0) + each["stepBreakdownUs"].get("3", 0)
least = min(sums, key=sums.get)
mean = max(sum(sums.values()) / len(sums), 1)
print(f"core {least} has least collective time ({sums[least] / mean:.0%} of the mean)")
"""

NAMES: Final = (b"ncclDevKernel_AllReduce_Sum_f32_RING_LL", b"ncclKernel_AllReduce_RING_LL_Sum_float")
"""Of one kernel, since NCCL 2.19 and before; HTA 0.5 looks for names that begin with ncclKernel."""


@dataclass(frozen=True)
class Folder:
    name: str
    path: Path
    truth: str
    is_xla: bool = False


def folders(place: Path) -> Iterator[Folder]:
    for ranks in (8, 64):
        write_ranks(place / f"late{ranks}", ranks, lambda step: 5)
        yield Folder(f"simulated, {ranks} ranks", place / f"late{ranks}", "rank 5 is late in every step")
    write_ranks(place / "old", 8, lambda step: 5)
    for file in (place / "old").iterdir():
        text = gzip.decompress(file.read_bytes()).replace(*NAMES)
        file.write_bytes(gzip.compress(text, 1, mtime=0))
    yield Folder("the first, with names of NCCL before 2.19", place / "old", "rank 5 is late in every step")
    write_ranks(place / "turns", 8, lambda step: step % 8)
    yield Folder("simulated, 8 ranks", place / "turns", "each rank is late in its turn")
    write_ranks(place / "even", 8, lambda step: step % 8, late_ns=0)
    yield Folder("simulated, 8 ranks", place / "even", "none is late")
    run = place / "xla/plugins/profile/2026_01_01"
    run.mkdir(parents=True)
    for rank in range(4):
        write_xplane(rank_machine((rank == 2,) * 20), run / f"host{rank}.xplane.pb")
    yield Folder("simulated, 4 hosts of XLA", place / "xla", "host 2 is late in every step", is_xla=True)
    traces = os.environ.get("STEPSCOPE_TRACES")
    for name, truth in (
        ("second/v100_dlrm_8_ranks", "rank 7 is least in collectives, then 2 and 6; one step was recorded"),
        ("kineto/cpu_ddp_gloo", "rank 1 comes last to the broadcast that begins a step"),
        ("kineto/ranks128_sampled", "2 of 128 ranks: nothing can be said"),
    ):
        if traces is not None and Path(traces, name).is_dir():
            yield Folder(Path(name).name, Path(traces, name), truth)


def said(python: str, program: str, folder: Path) -> tuple[str, float, float]:
    """What a program prints of a folder, its processor seconds, and the MiB of its largest process."""
    with tempfile.TemporaryFile("w+") as out:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.execv(python, [python, "-c", program, os.fspath(folder)])
        _, status, usage = os.wait4(child, 0)
        out.seek(0)
        lines = out.read().strip().splitlines()
    return (lines[-1] if lines else f"ends with {status}"), usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hta", metavar="PYTHON")
    parser.add_argument("--xprof", metavar="PYTHON")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (Path(__file__).parents[1] / "src", *sys.path[:1])))
    print("| ranks | truth | tool | says | CPU seconds | MiB |\n|---|---|---|---|---:|---:|")
    with tempfile.TemporaryDirectory() as place:
        for folder in folders(Path(place)):
            peer = ("xprof", options.xprof, XPROF) if folder.is_xla else ("HTA", options.hta, HTA)
            for tool, python, program in (("stepscope", sys.executable, STEPSCOPE), peer):
                if python:
                    words, seconds, mib = said(python, program, folder.path)
                    print(
                        f"| {folder.name} | {folder.truth} | {tool} | {json.dumps(words)[1:-1]} | {seconds:.1f} "
                        f"| {mib:.0f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
