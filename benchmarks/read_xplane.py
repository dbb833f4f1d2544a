"""How fast XLA's profiles are read, in how much memory; beside the overview page of `xprof` on the same file.

    python benchmarks/read_xplane.py [--profile FILE] [--megabytes 100 400] [--runs 3] [--xprof-python PYTHON]
                                     [--directory DIR]

Large profiles are made of a small one (by default the repository's, of JAX on a CPU): every line's events follow again
and again, each time as much later as the profile is long, with all that stands beside them; names and programs are in
the file once. Every run is a fresh process held to one core (where the system can do that), with one Polars thread.
Seconds are CPU seconds of the call alone; memory is the process's peak as the operating system counts it. Figures are
medians; MB is 10^6 bytes of protobuf, MiB is 2^20 bytes.

`--xprof-python` names the interpreter of an environment with xprof 2: its conversion of the file to the overview page,
the first that it shows, is timed likewise.
"""

from __future__ import annotations

import argparse
import gzip
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fresh_process import measure

from stepscope.readers.xplane.content import varint
from stepscope.trace.protobuf_fields import message, whole

HERE = Path(__file__).resolve().parent
PROFILE = HERE.parent / "tests" / "fixtures" / "jax_training_cpu.xplane.pb.gz"
PLANES, LINES, EVENTS, OFFSET, DURATION = 1, 3, 4, 2, 3

PROLOGUE = """
path = sys.argv[1]
def report(wall, cpu, events):
    print(json.dumps({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "events": events}))
"""
READ = """
from stepscope.readers import open_trace
wall, cpu = time.perf_counter(), time.process_time()
trace = open_trace(path)
report(wall, cpu, trace.metadata.events)
"""
XPROF = """
import tempfile
from xprof.convert import raw_to_tool_data
folder = tempfile.mkdtemp(dir=os.path.dirname(path))  # of its own: xprof keeps what it made beside the file
os.link(path, os.path.join(folder, "host.xplane.pb"))
path = os.path.join(folder, "host.xplane.pb")
wall, cpu = time.perf_counter(), time.process_time()
data, _ = raw_to_tool_data.xspace_to_tool_data([path], "overview_page", {})
report(wall, cpu, len(data))
"""


def fields(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Number, value and all bytes of each field; the value of a number is what follows its tag."""
    at = 0
    while at < len(data):
        begin = at
        tag, at = varint(data, at)
        start = at
        if tag & 7 == 0:
            _, at = varint(data, at)
        elif tag & 7 == 2:
            length, start = varint(data, at)
            at = start + length
        else:
            at += 8 if tag & 7 == 1 else 4
        yield tag >> 3, data[start:at], data[begin:at]


class Line:
    """A line of the small profile: what stands around its events, and each as what comes before and after its time."""

    def __init__(self, data: bytes) -> None:
        self.rest = b""
        self.events: list[tuple[bytes, int, bytes]] = []
        self.end_ps = 0
        for number, value, raw in fields(data):
            if number != EVENTS:
                self.rest += raw
                continue
            before, offset, after = b"", 0, b""
            for inner, part, both in fields(value):
                if inner == OFFSET:
                    offset = varint(part, 0)[0]
                elif inner < OFFSET:
                    before += both
                else:
                    after += both
                if inner == DURATION:
                    self.end_ps = max(self.end_ps, offset + varint(part, 0)[0])
            self.events.append((before, offset, after))
            self.end_ps = max(self.end_ps, offset)

    def repeated(self, copies: int, length_ps: int) -> bytes:
        """The line with its events so many times, each as much later."""
        parts = [self.rest]
        for copy in range(copies):
            for before, offset, after in self.events:
                event = before + whole(OFFSET, offset + copy * length_ps) + after
                parts.append(message(EVENTS, event))
        return b"".join(parts)


def make(small: bytes, megabytes: int, target: IO[bytes]) -> None:
    """Write a profile of about so many MB."""
    planes: list[tuple[bytes, list[Line], bytes]] = []
    others = b""
    for number, value, raw in fields(small):
        if number != PLANES:
            others += raw
            continue
        head, lines, rest = b"", [], b""
        for inner, part, both in fields(value):
            if inner == LINES:
                lines.append(Line(part))
            elif inner < LINES:
                head += both
            else:
                rest += both
        planes.append((head, lines, rest))
    length_ps = max((line.end_ps for _, lines, _ in planes for line in lines), default=0) + 1_000_000
    size = sum(
        len(before) + len(after) + 9 for _, lines, _ in planes for line in lines for before, _, after in line.events
    )
    copies = max(1, megabytes * 10**6 // size)
    for head, lines, rest in planes:
        repeated = [line.repeated(copies, length_ps) for line in lines]
        body = head + b"".join(message(LINES, each) for each in repeated) + rest
        target.write(message(PLANES, body))
    target.write(others)


def row(name: str, runs: list[dict[str, Any]], size: int) -> str:
    """A line of the table: medians."""
    middle = {key: statistics.median(run[key] for run in runs) for key in ("wall", "cpu", "peak_mib")}
    return (
        f"{name:<28} {middle['cpu']:8.2f} {middle['wall']:8.2f} {size / 1e6 / middle['cpu']:8.0f} "
        f"{middle['peak_mib']:9.0f}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, default=PROFILE)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 400])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--xprof-python", help="interpreter of an environment with xprof")
    parser.add_argument("--directory", type=Path, help="where the large profiles are made, by default a temporary one")
    options = parser.parse_args()
    small = options.profile.read_bytes()
    small = gzip.decompress(small) if small.startswith(b"\x1f\x8b") else small
    print(f"{platform.platform()}, Python {platform.python_version()}")
    print(f"{'':<28} {'CPU s':>8} {'wall s':>8} {'MB/s':>8} {'peak MiB':>9}")
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for megabytes in options.megabytes:
            path = Path(folder, f"made_{megabytes}.xplane.pb")
            with path.open("wb") as target:
                make(small, megabytes, target)
            size = path.stat().st_size
            ours = [measure(sys.executable, PROLOGUE + READ, str(path)) for _ in range(options.runs)]
            print(f"{size / 1e6:.0f} MB, {ours[0]['events']:,} events read")
            print(row("  stepscope", ours, size), flush=True)
            if options.xprof_python:
                theirs = [measure(options.xprof_python, PROLOGUE + XPROF, str(path)) for _ in range(options.runs)]
                print(row("  xprof, overview page", theirs, size), flush=True)
            path.unlink()


if __name__ == "__main__":
    main()
