"""How fast the readers of the formats other than Kineto's are, in how much memory; beside another checkout's, in turn.

    python benchmarks/read_formats.py [--formats rocprof gaudi ...] [--runs 3] [--other CHECKOUT] [--directory DIR]

The files are made: of the simulated machine of the tests (rocprof, Gaudi, Perfetto), of the repository's small profile,
again and again (XLA), and by `read_nsight_systems.py`. Every run is a fresh process held to one core (where the system
can do that), with one Polars thread; the compiled scanner serves where it was built, in each checkout its own. Seconds
are CPU seconds of the call alone; memory is the process's peak as the operating system counts it. Figures are medians,
the ratio is that of each run to the other checkout's next to it. MB is 10^6 bytes, unpacked.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import read_nsight_systems
import read_xplane
from fresh_process import SOURCES, measure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.simulator import programs
from tests.simulator.gaudi import GaudiOptions, gaudi_bytes
from tests.simulator.perfetto import perfetto_bytes
from tests.simulator.rocprof import rocprof_bytes

READ = """
from stepscope.readers import open_trace
import numpy, polars
cpu = time.process_time()
trace = open_trace(sys.argv[1])
print(json.dumps({"cpu": time.process_time() - cpu, "events": trace.metadata.events}))
"""
STEPS, REPEATED_STEPS, COPIES = 4000, 100, 40


def repeated(data: bytes, copies: int) -> bytes:
    """A Chrome trace whose events follow again and again, each time as much later as the trace is long."""
    document = json.loads(data)
    about = [event for event in document["traceEvents"] if event["ph"] == "M"]
    events = [event for event in document["traceEvents"] if event["ph"] != "M"]
    length = max(event["ts"] + event.get("dur", 0) for event in events) - min(event["ts"] for event in events) + 1000
    numbers = 1 + max(event.get("id", 0) for event in events)
    document["traceEvents"] = about + [
        event
        | {"ts": round(event["ts"] + copy * length, 3)}
        | ({"id": event["id"] + copy * numbers} if "id" in event else {})
        for copy in range(copies)
        for event in events
    ]
    return json.dumps(document, separators=(",", ":")).encode()


def xplane(path: Path) -> None:
    with path.open("wb") as target:
        read_xplane.make(gzip.decompress(read_xplane.PROFILE.read_bytes()), 100, target)


def nsight_systems(path: Path) -> None:
    read_nsight_systems.generate(path, 500_000)


def rocprof(path: Path) -> None:
    path.write_bytes(rocprof_bytes(programs.item_every_step(STEPS)))


def gaudi(path: Path, *, kineto: bool = True) -> None:
    options = GaudiOptions(kineto=kineto)
    path.write_bytes(repeated(gaudi_bytes(programs.item_every_step(REPEATED_STEPS), options), COPIES))


def gaudi_pairs(path: Path) -> None:
    gaudi(path, kineto=False)


def perfetto(path: Path) -> None:
    path.write_bytes(perfetto_bytes(programs.item_every_step(STEPS)))


FORMATS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "xplane": ("profile.xplane.pb", xplane),
    "nsight-systems": ("export.sqlite", nsight_systems),
    "rocprof": ("rocprof.json", rocprof),
    "gaudi": ("gaudi.json", gaudi),
    "gaudi-pairs": ("gaudi-pairs.json", gaudi_pairs),
    "perfetto": ("trace.pftrace", perfetto),
}
"""File name, and what writes it. The older Gaudi files have calls of the bridge as pairs of begin and end."""


def row(name: str, path: Path, checkouts: list[Path], runs: int) -> str:
    """A line of the table."""
    found: list[list[dict[str, Any]]] = [
        [measure(sys.executable, READ, str(path), sources=sources) for sources in checkouts] for _ in range(runs)
    ]
    size = path.stat().st_size
    cells = [f"{name}, {size / 1e6:.0f} MB, {found[0][0]['events']:,} events"]
    for place in range(len(checkouts)):
        cpu, peak = (statistics.median(each[place][key] for each in found) for key in ("cpu", "peak_mib"))
        cells += [f"{cpu:.2f}", f"{size / 1e6 / cpu:.0f}", f"{peak:.0f}"]
    if len(checkouts) > 1:
        cells.append(f"{statistics.median(each[1]['cpu'] / each[0]['cpu'] for each in found):.2f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--other", type=Path, help="another checkout, such as one of `git worktree add`")
    parser.add_argument("--directory", type=Path, help="where the files are made and kept, by default a temporary one")
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        for name in options.formats:
            file, make = FORMATS[name]
            make(options.directory / file)
        return
    checkouts = [SOURCES, *([options.other.resolve() / "src"] if options.other else [])]
    print(f"{platform.platform()}, Python {platform.python_version()}\n")
    heads = ["CPU s", "MB/s", "peak MiB"]
    heads = [*heads, *(f"{head}, other" for head in heads), "times as fast"] if options.other else heads
    print(f"| file | {' | '.join(heads)} |\n|---|{'---:|' * len(heads)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        place = options.directory or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        for name in options.formats:
            file, _ = FORMATS[name]
            if not (place / file).exists():  # made in a process of its own, since those measured inherit our peak
                making = [sys.executable, __file__, "--make", "--formats", name, "--directory", str(place)]
                subprocess.run(making, check=True)
            print(row(name, place / file, checkouts, options.runs), flush=True)


if __name__ == "__main__":
    main()
