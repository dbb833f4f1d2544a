"""How near the step on several devices comes to what was measured: messages, whole steps, and steps of our own.

    python benchmarks/scaling_accuracy.py [--traces FOLDER] [--only links|recordings|own] [--models NAME ...]
                                          [--keep FOLDER] [--markdown]

links       Transfers of the table's links beside published measurements: all-reduces of 32 KiB to 512 MiB on eight
            H200, and of 4 GiB on two and eight MI300X (S. Bekman, "Machine Learning Engineering", network/benchmarks,
            CC BY-SA 4.0). The first reduce in the switch where that is quicker, which a ring does not.
recordings  Real recordings of one of several ranks in the folder that STEPSCOPE_TRACES names. All they exchanged is
            taken out of the graph, with waiting for others; then the buckets that their gradients make are sent over a
            link that was fitted to the quickest collective of each size, and the steps are replayed. Measured is the
            mean step as it was recorded, with waiting for late ranks. "N times faster" is what dividing the work
            promises: the step without messages.
own         Two ranks of this machine (data_parallel_program.py) train small models in turns alone and together. The
            link is fitted to all-reduces beside which nothing else runs; the step together is predicted from the
            recording of steps alone. Figures are medians of the rounds. gloo's all-reduces run on the processors that
            compute, so that they slow each other down, and DistributedDataParallel copies gradients into its buckets
            and back there: "copies" is what the recording of both ranks shows of that, which no prediction counts.

Needs PyTorch for "own".
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "src")]

import numpy as np  # noqa: E402
import polars as pl  # noqa: E402

from stepscope.errors import StepscopeError  # noqa: E402
from stepscope.predict.buckets import buckets_of, gradients_of  # noqa: E402
from stepscope.predict.exchanges import AddedExchange, recorded_exchange  # noqa: E402
from stepscope.predict.limits import Link, fitted_link, named_link  # noqa: E402
from stepscope.predict.scaling import data_parallel  # noqa: E402
from stepscope.readers import open_trace  # noqa: E402
from stepscope.whatif.experiment import Experiment  # noqa: E402

PROGRAM = Path(__file__).with_name("data_parallel_program.py")
MODELS = ("multilayer", "transformer", "convolutions")
KIB = 1024
# Algorithm bandwidth, GB/s, by payload in KiB: torch 2.9.1, NCCL 2.27.7, 20 trials each.
H200 = {
    32: 0.82, 64: 1.67, 128: 3.27, 256: 6.71, 512: 13.68, 1024: 22.82, 2048: 36.87, 4096: 61.23, 8192: 88.87,
    16384: 125.65, 32768: 157.62, 65536: 198.01, 131072: 229.67, 262144: 249.23, 524288: 257.31,
}  # fmt: skip
# Bus bandwidth, GB/s, of 4 GiB by number of devices.
MI300X = {2: 47.671, 8: 312.912}
RECORDINGS = {
    "a100_ddp_rank3of8": ["a100_ddp_rank3of8.json.gz"],
    "v100_ddp_rank1of2": ["v100_ddp_rank1of2.json.gz"],
    "mi300x_resnet_checkpoint_rank0of8": ["mi300x_resnet_checkpoint_rank0of8.json.gz"],
    "cpu_ddp_gloo": ["cpu_ddp_gloo/rank0.json.gz", "cpu_ddp_gloo/rank1.json.gz"],
}
DDP_COPIES = r"^torch::distributed::reducer::mul_out$|^torch\.distributed\.ddp\.reducer::copy_bucket_to_grad$"


@dataclass(frozen=True)
class Row:
    """One comparison; nanoseconds."""

    what: str
    alone: float
    measured: float
    predicted: float
    low: float
    high: float
    copies: float = 0.0


TIMES = ("alone", "measured", "predicted", "low", "high", "copies")


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=os.environ.get("STEPSCOPE_TRACES"))
    parser.add_argument("--only", choices=("links", "recordings", "own"))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument(
        "--keep", type=Path, help="where recordings of our own go, and are read again if they are there"
    )
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    if arguments.only in (None, "links"):
        print_links()
    if arguments.only in (None, "recordings") and arguments.traces:
        print_rows("recordings", list(recordings(Path(arguments.traces) / "kineto")), arguments.markdown)
    if arguments.only in (None, "own"):
        with tempfile.TemporaryDirectory() as folder:
            place = arguments.keep or Path(folder)
            print_rows("own, two ranks of this machine", list(own(place, arguments.models)), arguments.markdown)


def print_links() -> None:
    """The table's links beside measured all-reduces."""
    print("all-reduces among eight H200, nvlink4")
    link = named_link("nvlink4")
    errors = {}
    for kib, rate in H200.items():
        measured, told = kib * KIB / rate, link.transfer_ns("all_reduce", kib * KIB, 8)
        errors[kib] = told / measured - 1
        print(f"  {kib:8,} KiB  measured {measured / 1e3:8.1f} us  table {told / 1e3:8.1f} us  {errors[kib]:+7.1%}")
    large = [abs(error) for kib, error in errors.items() if kib >= 1024]
    print(f"  of 1 MiB and more: mean {statistics.mean(large):.1%}, largest {max(large):.1%}")
    print("all-reduces of 4 GiB among MI300X, infinity-fabric-mi300")
    link, size = named_link("infinity-fabric-mi300"), 4 << 30
    for devices, rate in MI300X.items():
        measured = size * 2 * (devices - 1) / devices / rate
        told = link.transfer_ns("all_reduce", size, devices)
        text = f"  {devices} devices  measured {measured / 1e6:8.1f} ms  table {told / 1e6:8.1f} ms"
        print(f"{text}  {told / measured - 1:+7.1%}")


def recordings(folder: Path) -> Iterator[Row]:
    """Steps of real ranks, rebuilt from their gradients."""
    for name, files in RECORDINGS.items():
        if all((folder / file).exists() for file in files):
            experiments = [Experiment(open_trace(folder / file)) for file in files]
            yield rebuilt(name, experiments[0], experiments[1:])


def rebuilt(name: str, experiment: Experiment, others: list[Experiment]) -> Row:
    """A rank's step without what it exchanged, and then with the buckets of its gradients."""
    recorded = recorded_exchange(experiment, others)
    if recorded is None or recorded.link is None:
        raise SystemExit(f"{name}: no collectives of known size")
    gradients = gradients_of(experiment)
    sizes = [size for size in recorded.table["bytes"].unique(maintain_order=True).to_list() if size]
    limit = recorded_limit(gradients.bytes[gradients.step == gradients.step[0]], sizes)
    buckets = buckets_of(gradients, bucket_bytes=limit[1], first_bytes=limit[0])
    added = AddedExchange(experiment, buckets)
    if experiment.device is None:
        from stepscope.predict.buckets import CutExperiment

        last = np.append(buckets.step[1:] != buckets.step[:-1], True)
        main_lane = np.full(int(last.sum()), experiment.lane, np.int32)
        added = AddedExchange(CutExperiment(experiment, main_lane, buckets.ready[last]), buckets)
    base = recorded.graph(added.experiment.graph, np.zeros(recorded.table.height))
    transfers = added.transfers_ns(recorded.link, recorded.ranks)

    def step(factor: float) -> float:
        return added.experiment.run(added.graph(base, transfers * factor)).step_ns

    error = recorded.link.error
    return Row(
        name,
        alone=step(0.0),
        measured=experiment.recorded_ns / experiment.step_count,
        predicted=step(1.0),
        low=step(1 - error),
        high=step(1 + error),
    )


def recorded_limit(gradients: np.ndarray, sizes: list[int]) -> tuple[int, int]:
    """Limits of the first bucket and the others: DistributedDataParallel's own where they give what was sent."""
    count = len(sizes)
    for first, others in ((1 << 20, 25 << 20), (1 << 20, 1 << 20)):
        filled, found = 0, []
        for size in gradients.tolist():
            filled += size
            if filled >= (others if found else first):
                found.append(filled)
                filled = 0
        if len(found) + (filled > 0) == count:
            return first, others
    return (min(sizes[0], 1 << 40), 1 << 40)  # set by the program: as the first one was


def own(folder: Path, models: list[str]) -> Iterator[Row]:
    """Steps of two ranks, predicted from the steps of each alone."""
    link = gloo_link(folder)
    hop_us = link.protocols[0].hop_ns / 1e3
    print(f"gloo between two ranks here: {link.bandwidth_bytes_s / 1e9:.2f} GB/s, {hop_us:.0f} us a hop")
    for model in models:
        place = folder / model
        if not place.exists():
            started(model, place)
        rounds = sorted(place.glob("together*-rank0.json.gz"))
        rows = []
        for together in rounds:
            alone = Experiment(open_trace(together.with_name(together.name.replace("together", "alone"))))
            both = Experiment(open_trace(together))
            [step] = data_parallel(alone, [2], link)
            copies = both.trace.operators.filter(pl.col("name").str.contains(DDP_COPIES))["duration_ns"].sum()
            recorded = both.recorded_ns / both.step_count
            mine = alone.recorded_ns / alone.step_count
            rows.append(Row(model, mine, recorded, step.step_ns, step.low_ns, step.high_ns, copies / both.step_count))
        yield Row(model, *(statistics.median(getattr(row, name) for row in rows) for name in TIMES))


def gloo_link(folder: Path) -> Link:
    """The link between two ranks of this machine, from all-reduces alone."""
    place = folder / "link"
    if not place.exists():
        started("link", place)
    told = json.loads((place / "rank0.times.json").read_text())
    times = [statistics.median(each) * 1e9 for each in zip(*told["seconds"], strict=True)]
    return fitted_link("gloo", ["all_reduce"] * len(times), told["sizes"], times, 2)


def started(model: str, place: Path) -> None:
    """Run the program on two ranks."""
    place.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), model, str(place)],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"training {model} on two ranks failed")


def print_rows(title: str, rows: list[Row], markdown: bool) -> None:
    """A table of measured against predicted, and what dividing the work promises."""
    mark = "| " if markdown else "  "
    print(title)
    heads = (
        "recording",
        "alone, ms",
        "measured, ms",
        "predicted, ms",
        "range, ms",
        "error",
        "N times faster",
        "copies, ms",
    )
    widths = (34, 10, 12, 13, 17, 8, 14, 10)
    print(
        mark + (" | " if markdown else "  ").join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
    )
    if markdown:
        print("|---" * len(heads) + "|")
    for row in rows:
        cells = (
            row.what, f"{row.alone / 1e6:.1f}", f"{row.measured / 1e6:.1f}", f"{row.predicted / 1e6:.1f}",
            f"{row.low / 1e6:.1f} to {row.high / 1e6:.1f}", f"{row.predicted / row.measured - 1:+.1%}",
            f"{row.alone / row.measured - 1:+.1%}", f"{row.copies / 1e6:.1f}",
        )  # fmt: skip
        print(
            mark
            + (" | " if markdown else "  ").join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        )


if __name__ == "__main__":
    try:
        main()
    except StepscopeError as error:
        raise SystemExit(str(error)) from error
