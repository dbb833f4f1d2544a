"""How long a job with many ranks takes: its page, or its diagnosis; the first time, and again from what is kept.

Ranks are those of `tests/simulator/ranks.py`, of which one comes late, mostly the same one. The cache is an empty one.

    python benchmarks/many_ranks.py 64 256 1024
    python benchmarks/many_ranks.py 64 --keep FOLDER     only writes the traces
    python benchmarks/many_ranks.py 8 64 1024 --planted  finds faults that are planted in jobs drawn at random
    python benchmarks/many_ranks.py --diagnose 64 256 1024              `stepscope diagnose` of ranks of 20 MB
    python benchmarks/many_ranks.py --diagnose 64 --dask 2              by a Dask LocalCluster of two workers
    python benchmarks/many_ranks.py --diagnose 1024 --layers 24         ranks of 1 MB
    python benchmarks/many_ranks.py --join 64 256 1024   only joins summaries, copies of those of two ranks of 24 MB

--planted counts, over jobs of `tests/simulator/jobs.py`, how often the planted fault is the first finding, with its
rank or place and its cause, and how often the same job without the fault has no finding.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec
import polars as pl

from stepscope.diagnosis.job import job_of, job_steps
from stepscope.diagnosis.rank_groups import exchanges
from stepscope.diagnosis.rank_summary import RankSummary, _decoded, _encoded, rank_summary
from stepscope.diagnosis.ranks import across_ranks
from stepscope.diagnosis.view import View
from stepscope.readers import open_trace
from tests.simulator.jobs import FAULTS, drawn
from tests.simulator.ranks import LISTED, write_ranks

OFTEN, RARELY = 17, 40
SETTLED_S = 3.0
"""Files that changed just now are not remembered by their time."""


def late_rank(step: int) -> int:
    return RARELY if step % 5 == 4 else OFTEN


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
        size = write_ranks(folder, ranks, late_rank)
        time.sleep(SETTLED_S)
        print(f"{ranks} ranks of {size / ranks / 1e6:.1f} MB")
        for when in ("first", "again"):
            page = Page(folder)
            try:
                ready_s = page.seconds
                page.document("session")
                first = page.document("ranks")
                first_s = page.seconds
                while (found := page.document("ranks"))["read"] < found["of"]:
                    time.sleep(0.5)
                whole_s = page.seconds
            finally:
                page.end()
            assert found["slowest"] == [late_rank(step) for step in found["steps"]], found["slowest"]
            print(
                f"  {when}: address after {ready_s:.1f} s, first screen {first_s:.1f} s with {first['read']} ranks, "
                f"all {whole_s:.1f} s, {whole_s / ranks * 1e3:.0f} ms a rank",
                flush=True,
            )
        kept = [each.stat().st_size for each in Path(place).glob("cache/stepscope/ranks/*")]
        print(f"  {len(kept)} summaries, the largest of {max(kept) / 1e3:.1f} kB")


def planted(ranks: int, trials: int, first: int) -> None:
    """Print how many planted faults are found first, and how many clean twins stay silent."""
    for number, fault in enumerate(FAULTS):
        found = silent = 0
        begun = time.monotonic()
        for trial in range(first, first + trials):
            seed = trial * len(FAULTS) + number
            records, plant = drawn(ranks, seed, fault)
            findings = across_ranks(records)
            is_found = plant is not None and plant.is_told(findings)
            found += is_found
            clean = across_ranks(drawn(ranks, seed, f"clean {fault}")[0])
            silent += not clean
            for wrong in ([] if is_found else [f"missed {plant}: {[each.title for each in findings]}"]) + [
                f"false alarm: {each.title}" for each in clean
            ]:
                print(f"    seed {seed}: {wrong}", file=sys.stderr)
        took = (time.monotonic() - begun) / trials
        print(f"| {fault} | {ranks:,} | {found} of {trials} | {silent} of {trials} | {took:.1f} s |", flush=True)


BIG: Final[dict[str, Any]] = {"layers": 480, "steps": 40, "per_bucket": 20, "late_ns": 2_000_000}
"""A trace of 24 MB with 1,000 collectives."""


_JOIN: Final = """\
import resource, sys
from stepscope.commands import main
code = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""
"""The command, which then prints the most memory that its own process had."""


@contextlib.contextmanager
def scheduler(dask_workers: int) -> Iterator[str]:
    """The address of a Dask scheduler with so many workers; "" for none."""
    if not dask_workers:
        yield ""
        return
    from distributed import LocalCluster

    with LocalCluster(n_workers=dask_workers, threads_per_worker=1, dashboard_address=None) as cluster:
        yield cluster.scheduler_address


def processors_s(address: str) -> float:
    """Seconds of processors that ended processes have taken, and the workers of a scheduler."""
    taken_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    if address:
        from distributed import Client

        with Client(address) as client:
            taken_s += sum(client.run(time.process_time).values())
    return taken_s


def measure_diagnosis(ranks: int, dask_workers: int, layers: int) -> None:
    """Time `stepscope diagnose FOLDER`, and the memory of its process, which joins what the workers found."""
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory())
        os.environ["XDG_CACHE_HOME"] = f"{place}/cache"  # also that of workers
        address = stack.enter_context(scheduler(dask_workers))
        folder, report = Path(place) / "traces", Path(place) / "report.json"
        size = write_ranks(folder, ranks, late_rank, **{**BIG, "layers": layers})
        time.sleep(SETTLED_S)
        print(f"{ranks} ranks of {size / ranks / 1e6:.1f} MB, {address or 'processes'}", flush=True)
        words = ["diagnose", str(folder), "--json", str(report), *(["--scheduler", address] if address else [])]
        for when, more in (("first", []), ("again", ["--top", "6"])):  # other words have no kept answer
            begun, before_s = time.monotonic(), processors_s(address)
            joined = subprocess.run(
                [sys.executable, "-c", _JOIN, *words, *more],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                check=False,
            )
            assert joined.returncode == 0, joined.stdout[-500:]
            peak = int(joined.stdout.split()[-1]) / 2**20
            wall_s, cpu_s = time.monotonic() - begun, processors_s(address) - before_s
            found = json.loads(report.read_bytes())
            assert len(found["ranks"]) == ranks
            late = [each["title"] for each in found["across_ranks"] if each["rule"] == "late-rank"]
            assert ranks <= RARELY or f"rank {OFTEN}" in late[0], late
            print(
                f"  {when}: {wall_s:.1f} s, {wall_s / ranks * 1e3:.0f} ms a rank; {cpu_s:.1f} s of processors, "
                f"{cpu_s / ranks * 1e3:.0f} ms a rank; peak {peak:.0f} MiB of the joining process",
                flush=True,
            )
        sizes = [each.stat().st_size for each in Path(place).glob("cache/stepscope/ranks/*")]
        print(f"  {len(sizes)} summaries, the largest of {max(sizes, default=0) / 1e3:.1f} kB", flush=True)


def measure_join(ranks: int) -> None:
    """Time the join of so many ranks' summaries, and the most memory of this process, which has done nothing else."""
    with tempfile.TemporaryDirectory() as place:
        write_ranks(Path(place), 2, lambda step: 1, **BIG)
        packed = [
            msgspec.msgpack.encode(rank_summary(View(open_trace(file))), enc_hook=_encoded)
            for file in sorted(Path(place).iterdir())
        ]
    members = f"[{', '.join(map(str, range(min(ranks, LISTED))))}{', ...' if ranks > LISTED else ''}]"
    group = {"members": pl.lit(members), "group_size": pl.lit(ranks, pl.Int64)}
    before = peak_mib()
    summaries = []
    for rank in range(ranks):
        found = msgspec.msgpack.decode(packed[rank == OFTEN], type=RankSummary, dec_hook=_decoded)
        own = found.record.collectives
        own = replace(own, rank=rank, table=own.table.with_columns(**group))
        record = replace(found.record, name=f"rank {rank}", ranks=ranks, collectives=own)
        summaries.append(replace(found, record=record, steps=replace(found.steps, name=f"rank {rank}", rank=rank)))
    records = [each.record for each in summaries]
    held, begun = peak_mib(), time.process_time()
    findings = across_ranks(records)
    exchanges(records)
    job = job_of(summaries)
    assert f"rank {OFTEN}" in findings[0].title
    assert job is not None
    job_steps(job, summaries)
    print(
        f"{ranks} ranks with {records[0].collectives.table.height} collectives: joined in "
        f"{time.process_time() - begun:.1f} s of processors; {held - before:.0f} MiB of summaries, "
        f"{peak_mib() - before:.0f} MiB at most",
        flush=True,
    )


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", metavar="RANKS", type=int, nargs="+")
    parser.add_argument("--keep", metavar="FOLDER", type=Path)
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--trials", type=int, default=20, help="jobs of each fault and number of ranks")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument("--diagnose", action="store_true")
    parser.add_argument("--join", action="store_true")
    parser.add_argument("--layers", metavar="NUMBER", type=int, default=BIG["layers"])
    parser.add_argument("--dask", metavar="WORKERS", type=int, default=0)
    options = parser.parse_args()
    if options.planted:
        print("| fault | ranks | found first | clean twins silent | time a job |\n|---|---|---|---|---|")
    for ranks in options.ranks:
        if options.planted:
            planted(ranks, options.trials, options.first)
        elif options.keep:
            write_ranks(options.keep, ranks, late_rank)
        elif options.join:
            if len(options.ranks) == 1:
                measure_join(ranks)
            else:
                subprocess.run([sys.executable, __file__, "--join", str(ranks)], check=True)
        elif options.diagnose:
            measure_diagnosis(ranks, options.dask, options.layers)
        else:
            measure(ranks)


if __name__ == "__main__":
    main()
