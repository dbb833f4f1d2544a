#!/usr/bin/env python3
"""Record dumps of PyTorch's flight recorder in tests/fixtures/flight_recorder: gloo processes that hang in known ways.

python scripts/record_flight_recorder.py
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C import _distributed_c10d

FIXTURES = Path(__file__).resolve().parent.parent / "tests/fixtures/flight_recorder"
RANKS = {"hang": 2, "order": 2, "groups": 4}
AFTER_S = 5


def main() -> None:
    for name, ranks in RANKS.items():
        (FIXTURES / name).mkdir(parents=True, exist_ok=True)
        mp.spawn(process, (name, ranks), ranks)


def process(rank: int, name: str, ranks: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", TORCH_FR_BUFFER_SIZE="100")
    threading.Timer(AFTER_S, dump, (rank, name)).start()
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])] if ranks == 4 else []
    values = torch.ones(1000)
    for _ in range(3):
        dist.all_reduce(values)
    if name == "hang":
        if rank == 1:
            time.sleep(60)
        dist.all_reduce(values)
    elif name == "order":
        for call in (dist.all_reduce, lambda each: dist.broadcast(each, 0))[:: 1 if rank == 0 else -1]:
            call(values)
    else:
        if rank == 3:
            time.sleep(60)
        dist.all_reduce(values, group=pairs[rank // 2])
        dist.all_reduce(values)
    time.sleep(60)


def dump(rank: int, name: str) -> None:
    content = pickle.loads(_distributed_c10d._dump_fr_trace())
    for entry in content["entries"]:
        entry.update(thread_id="1", frames=[frame for each in entry["frames"] if (frame := without_machine(each))])
    (FIXTURES / name / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))
    os._exit(0)


def without_machine(frame: dict[str, Any]) -> dict[str, Any] | None:
    """The frame without this machine's folders; None for Python's own."""
    file = frame["filename"]
    for folder, place in (
        (torch.__path__[0], "/usr/lib/python3/site-packages/torch"),
        (__file__, "/home/user/train.py"),
    ):
        if file.startswith(folder):
            return {**frame, "filename": file.replace(folder, place)}
    return None


if __name__ == "__main__":
    main()
