"""Trains a small model on the ranks of one machine (gloo, one thread each); scaling_accuracy.py starts it.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 python benchmarks/data_parallel_program.py MODEL OUT

MODEL is a key of MODELS: in turns each rank trains a copy of its own, which exchanges nothing, and all of them one
together, so that both are measured on a machine that is as busy. A single rank trains alone. For each round the folder
OUT gets a recording of steps of either kind and for each rank a JSON file with the seconds of steps that were timed
without a profiler. MODEL "link" times all-reduces of several sizes instead.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import stepscope

SIZES = (65_536, 262_144, 1_048_576, 4_194_304, 16_777_216, 33_554_432)
"""Bytes of the messages that tell the link."""
REPEATS = 15
WARM_UP, STEPS, ROUNDS = 3, 6, 4
"""Steps before anything counts; steps of each kind in a round, timed and recorded; and rounds."""

Step = Callable[[], None]


def multilayer() -> tuple[nn.Module, Tensor]:
    """Wide layers: 101 MB of gradients, little computation for them."""
    layers = (nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    return nn.Sequential(*layers), torch.randn(32, 1024)


def transformer() -> tuple[nn.Module, Tensor]:
    """Four encoder layers: 12.6 MB of gradients in 48 tensors."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4), torch.randn(8, 64, 256)


def convolutions() -> tuple[nn.Module, Tensor]:
    """Convolutions: 6.3 MB of gradients, much computation for them."""
    channels = (3, 64, 128, 256, 512)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(16, 3, 64, 64)


MODELS = {"multilayer": multilayer, "transformer": transformer, "convolutions": convolutions}


def main() -> None:
    """Train or time, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("link", *MODELS))
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    if arguments.model == "link":
        result: dict[str, object] = {"sizes": SIZES, "seconds": [list(map(timed, SIZES)) for _ in range(REPEATS)]}
    else:
        result = dict(trained(*MODELS[arguments.model](), arguments.out))
    (arguments.out / f"rank{dist.get_rank()}.times.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def timed(size: int) -> float:
    """Seconds of an all-reduce to which all ranks come together."""
    message = torch.ones(size // 4)
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(message)
    return time.perf_counter() - start


def trained(module: nn.Module, batch: Tensor, out: Path) -> dict[str, list[float]]:
    """Seconds of the timed steps of each kind; further ones are recorded."""
    steps = {"alone": step_of(copy.deepcopy(module), batch)}
    if dist.get_world_size() > 1:
        steps["together"] = step_of(DistributedDataParallel(module), batch)
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for number in range(ROUNDS):
        for kind, step in steps.items():
            dist.barrier()
            seconds[kind] += [measured(step) for _ in range(STEPS)]
        for kind, step in steps.items():
            dist.barrier()
            recorded(step, out / f"{kind}{number}.json.gz")
    return seconds


def step_of(module: nn.Module, batch: Tensor) -> Step:
    """A training step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        module(batch).square().mean().backward()
        optimizer.step()

    return step


def measured(step: Step) -> float:
    """Seconds of a step."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def recorded(step: Step, path: Path) -> None:
    """Record some steps; several ranks write a file each."""
    schedule = stepscope.schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    with stepscope.profile(path, schedule=schedule, memory=False, lines=False) as profile:
        for _ in range(1 + STEPS):
            step()
            profile.step()


if __name__ == "__main__":
    main()
