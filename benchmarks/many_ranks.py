"""How long the page of a job with many ranks takes: the first time, and again from their summaries.

Ranks are of the simulated machine: in each step they train the same layers and reduce once; one of them comes late
because it waits for its batch, mostly the same one, and all others wait for it. The cache is an empty one.

    python benchmarks/many_ranks.py 64 256 1024
    python benchmarks/many_ranks.py 64 --keep FOLDER     only writes the traces
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.simulator import Machine, kineto_bytes

US = 1_000
STEPS, LAYERS = 20, 24
LATE, OFTEN, RARELY = 400 * US, 17, 40
TRANSFER = 60 * US
SETTLED_S = 3.0
"""Files that changed just now are not remembered by their time."""


def late_rank(step: int) -> int:
    return RARELY if step % 5 == 4 else OFTEN


def rank_bytes(rank: int) -> bytes:
    """One rank's trace without its rank: those that are never late have the same."""
    machine = Machine(tick_ns=US)
    main, queue = machine.host("main"), machine.queue(number=7)
    for step in range(STEPS):
        late = LATE if rank == late_rank(step) else 0
        with main.step(step), main.frame("train.py(12): step", before_ns=3 * US):
            main.data_loader(30 * US + late, workers=True)
            for layer in range(LAYERS):
                with main.frame(f"nn.Module: Linear_{layer}", before_ns=2 * US), main.operator("aten::addmm"):
                    main.launch("gemm", queue, 15 * US)
            with main.operator("c10d::allreduce_"):
                main.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", queue, TRANSFER + LATE - late)
            with main.optimizer_step(), main.operator("aten::_fused_adamw_"):
                main.launch("adamw", queue, 25 * US)
            main.item(queue)
    return kineto_bytes(machine)


def write_ranks(folder: Path, ranks: int) -> int:
    """Write the traces of so many ranks; return their bytes without compression."""
    folder.mkdir(parents=True, exist_ok=True)
    late = {rank: rank_bytes(rank) for rank in (OFTEN, RARELY)}
    usual = rank_bytes(-1)
    written = 0
    for rank in range(ranks):
        about = json.dumps({"backend": "nccl", "rank": rank, "world_size": ranks})
        text = late.get(rank, usual).replace(b"{\n", f'{{\n"distributedInfo": {about},\n'.encode(), 1)
        (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(text, 1, mtime=0))
        written += len(text)
    return written


class Page:
    """The server of a folder's page, as a browser uses it."""

    def __init__(self, folder: Path) -> None:
        self._begun = time.monotonic()
        command = [sys.executable, "-m", "stepscope", "view", str(folder), "--no-browser"]
        self._program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._program.stdout is not None
        self._address = self._program.stdout.readline().strip()
        self._opened = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        self._opened.open(self._address, timeout=60).read()

    def document(self, name: str) -> Any:
        return json.loads(self._opened.open(f"{self._address.partition('?')[0]}api/{name}", timeout=600).read())

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def end(self) -> None:
        self._program.send_signal(signal.SIGINT)
        self._program.wait(60)


def measure(ranks: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CACHE_HOME"] = f"{place}/cache"
        folder = Path(place) / "traces"
        size = write_ranks(folder, ranks)
        time.sleep(SETTLED_S)
        print(f"{ranks} ranks of {size / ranks / 1e6:.1f} MB")
        for when in ("first", "again"):
            page = Page(folder)
            ready_s = page.seconds
            page.document("session")
            first = page.document("ranks")
            first_s = page.seconds
            while (found := page.document("ranks"))["read"] < found["of"]:
                time.sleep(0.5)
            whole_s = page.seconds
            page.end()
            assert found["slowest"] == [late_rank(step) for step in found["steps"]], found["slowest"]
            print(
                f"  {when}: address after {ready_s:.1f} s, first screen {first_s:.1f} s with {first['read']} ranks, "
                f"all {whole_s:.1f} s, {whole_s / ranks * 1e3:.0f} ms a rank",
                flush=True,
            )
        kept = [each.stat().st_size for each in Path(place).glob("cache/stepscope/ranks/*")]
        print(f"  {len(kept)} summaries, the largest of {max(kept) / 1e3:.1f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", metavar="RANKS", type=int, nargs="+")
    parser.add_argument("--keep", metavar="FOLDER", type=Path)
    options = parser.parse_args()
    for ranks in options.ranks:
        if options.keep:
            write_ranks(options.keep, ranks)
        else:
            measure(ranks)


if __name__ == "__main__":
    main()
