"""Settings of data-parallel training: two ranks of this machine (gloo, one thread each), times of the first."""

from __future__ import annotations

from remedy_measurements import Measurement

_RANKS = """
import os, socket, tempfile
from pathlib import Path
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import stepscope
from stepscope.remedies import DataParallelSettings

def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]

PORT, FOLDER = free_port(), tempfile.TemporaryDirectory()

def model():
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers)

def step_of(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    batch = torch.randn(64, 512)
    def step():
        optimizer.zero_grad()
        module(batch).square().mean().backward()
        optimizer.step()
    return step

def recorded(step, rank):
    "Settings from a recording of both ranks' steps."
    path = Path(FOLDER.name) / f"{rank}.json.gz"
    schedule = stepscope.schedule(wait=0, warmup=2, active=4, repeat=1)
    with stepscope.profile(path, schedule=schedule, memory=False, lines=False) as profile:
        for _ in range(6):
            step()
            profile.step()
    dist.barrier()
    found = [None]
    if rank == 0:
        from stepscope.diagnosis.view import View
        from stepscope.predict.data_parallel_settings import data_parallel_settings
        from stepscope.readers import open_trace
        from stepscope.whatif import Experiment
        first, second = (open_trace(path) for path in sorted(Path(FOLDER.name).glob("*.json.gz")))
        found = [data_parallel_settings(View(first), [Experiment(second)]).settings]
        print(found[0], file=sys.stderr)
    dist.broadcast_object_list(found)
    return found[0]

def rank_of(rank, make):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{PORT}", rank=rank, world_size=2)
    step = step_of(make(rank))
    if rank == 0:
        measured(step, warmup=4, steps=20)
    else:
        for _ in range(24):
            step()
    dist.barrier()
    dist.destroy_process_group()

def run(make):
    torch.multiprocessing.start_processes(rank_of, (make,), nprocs=2, start_method="fork")

"""
_PLAIN = _RANKS + "run(lambda rank: DistributedDataParallel(model()))\n"


def _with(settings: str) -> str:
    return _RANKS + f"run(lambda rank: DataParallelSettings({settings}).ddp(model()))\n"


MEASUREMENTS = (
    Measurement(
        "DataParallelSettings(gradient_as_bucket_view=True)",
        "12 layers of 512, batch 64, two ranks, gloo",
        _PLAIN,
        _with("gradient_as_bucket_view=True"),
    ),
    Measurement(
        "DataParallelSettings(find_unused_parameters=False)",
        "the same; without, unused parameters are looked for where there are none",
        _with("find_unused_parameters=True"),
        _with("find_unused_parameters=False"),
    ),
    Measurement(
        "DataParallelSettings(bucket_cap_mb=None)",
        "the same; without, each bucket holds one layer (1 MiB)",
        _with("bucket_cap_mb=1"),
        _PLAIN,
    ),
    Measurement(
        "data_parallel_settings",
        "the same; torch's own settings, and those that follow from a recording of four steps",
        _PLAIN,
        _RANKS
        + """
def make(rank):
    settings = recorded(step_of(DistributedDataParallel(model())), rank)
    return settings.ddp(model())

run(make)
""",
    ),
)
