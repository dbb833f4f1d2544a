"""Whether the settings that `stepscope data-parallel` computes help: two ranks of this machine, step against step.

    python benchmarks/data_parallel_settings.py

Two ranks (gloo, one thread each) train 12 layers of 512. Torch's own settings are recorded and settings computed from
that. Then copies of the model with each of the settings below take a step in turns, so that all of them meet the same
load of the machine. Printed is the median of each step over torch's own step of the same turn, below 1 where the
settings help, with the interval that holds the true median with 95 % (by order statistics, Conover 1999).
"""

from __future__ import annotations

import math
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stepscope
from stepscope.remedies import DataParallelSettings

TURNS = 80
SINGLE = {
    "gradient_as_bucket_view=True": DataParallelSettings(gradient_as_bucket_view=True),
    "find_unused_parameters=True": DataParallelSettings(find_unused_parameters=True),
    "bucket_cap_mb=1": DataParallelSettings(bucket_cap_mb=1),
    "bucket_cap_mb=50": DataParallelSettings(bucket_cap_mb=50),
}
Step = Callable[[], None]


def main() -> None:
    """Start both ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_of, (port, Path(folder)), nprocs=2)


def rank_of(rank: int, port: int, folder: Path) -> None:
    """Record, compute and measure; the first rank prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    own = step_of(DataParallelSettings())
    found = [from_recording(own, rank, folder)]
    dist.broadcast_object_list(found)
    steps = {"torch's own": own, "computed": step_of(found[0])}
    steps |= {name: step_of(settings) for name, settings in SINGLE.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(TURNS + 3):
        first = turn % len(steps)  # none is always the first or behind the same one
        for name in [*steps][first:] + [*steps][:first]:
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            if turn >= 3:
                times[name].append(time.perf_counter() - start)
    if rank == 0:
        report(times, found[0])
    dist.barrier()
    dist.destroy_process_group()


def step_of(settings: DataParallelSettings) -> Step:
    """A training step with these settings."""
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.ReLU())]
    module: DistributedDataParallel = settings.ddp(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    batch = torch.randn(64, 512)

    def step() -> None:
        optimizer.zero_grad()
        module(batch).square().mean().backward()
        optimizer.step()

    return step


def from_recording(step: Step, rank: int, folder: Path) -> DataParallelSettings | None:
    """What follows from a recording of both ranks' steps; None on all ranks but the first."""
    schedule = stepscope.schedule(wait=0, warmup=3, active=6, repeat=1)
    with stepscope.profile(folder / f"{rank}.json.gz", schedule=schedule, memory=False, lines=False) as profile:
        for _ in range(9):
            step()
            profile.step()
    dist.barrier()
    if rank:
        return None
    from stepscope.diagnosis.view import View
    from stepscope.predict.data_parallel_settings import data_parallel_settings
    from stepscope.whatif import Experiment

    first, second = (stepscope.open_trace(path) for path in sorted(folder.glob("*.json.gz")))
    found = data_parallel_settings(View(first), [Experiment(second)])
    for reason in found.reasons:
        print(f"{reason.setting}: {reason.value}, {reason.why}")
    return found.settings


def report(times: dict[str, list[float]], computed: DataParallelSettings) -> None:
    """The table, in Markdown."""
    own = times["torch's own"]
    print(f"\ncomputed: {computed.arguments()}\n")
    print("| Settings | median step, ms | over torch's own | 95 % interval |\n|---|---:|---:|---:|")
    for name, found in times.items():
        ratios = sorted(each / other for each, other in zip(found, own, strict=True))
        low = math.floor(len(ratios) / 2 - 1.96 * math.sqrt(len(ratios)) / 2)
        interval = f"{ratios[low]:.2f} to {ratios[len(ratios) - 1 - low]:.2f}" if name != "torch's own" else ""
        middle = statistics.median(found) * 1e3
        print(f"| `{name}` | {middle:.1f} | {statistics.median(ratios):.2f} | {interval} |")


if __name__ == "__main__":
    main()
