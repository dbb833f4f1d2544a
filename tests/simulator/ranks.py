"""Traces of a job's ranks: all train the same layers and reduce once in each step, which one of them comes to late."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

from tests.simulator.kineto import kineto_bytes
from tests.simulator.machine import Machine

US: Final = 1_000
STEPS: Final = 20
LAYERS: Final = 24
LATE_NS: Final = 400 * US
TRANSFER_NS: Final = 60 * US
LISTED: Final = 30
"""Members of a group that PyTorch lists; the others are three dots."""


def write_ranks(folder: Path, ranks: int, late: Callable[[int], int]) -> int:
    """Write the traces of so many ranks; return their bytes before compression.

    Args:
        late: the rank that waits for its batch in a step, and all others wait for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    members = [*map(str, range(min(ranks, LISTED))), *(["..."] if ranks > LISTED else [])]
    group = {b'"Group size": 2': f'"Group size": {ranks}', b'"[0, 1]"': f'"[{", ".join(members)}]"'}

    @cache
    def trace(is_late: tuple[bool, ...]) -> bytes:
        text = _text(is_late)
        for pair, all_ranks in group.items():
            text = text.replace(pair, all_ranks.encode())
        return text

    written = 0
    for rank in range(ranks):
        text = trace(tuple(late(step) == rank for step in range(STEPS)))
        about = json.dumps({"backend": "nccl", "rank": rank, "world_size": ranks})
        text = text.replace(b"{\n", f'{{\n"distributedInfo": {about},\n'.encode(), 1)
        (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(text, 1, mtime=0))
        written += len(text)
    return written


def _text(is_late: tuple[bool, ...]) -> bytes:
    machine = Machine(tick_ns=US)
    main, queue = machine.host("main"), machine.queue(number=7)
    for step in range(STEPS):
        late_ns = LATE_NS if is_late[step] else 0
        with main.step(step), main.frame("train.py(12): step", before_ns=3 * US):
            main.data_loader(30 * US + late_ns, workers=True)
            for layer in range(LAYERS):
                with main.frame(f"nn.Module: Linear_{layer}", before_ns=2 * US), main.operator("aten::addmm"):
                    main.launch("gemm", queue, 15 * US)
            with main.operator("c10d::allreduce_"):
                main.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", queue, TRANSFER_NS + LATE_NS - late_ns)
            with main.optimizer_step(), main.operator("aten::_fused_adamw_"):
                main.launch("adamw", queue, 25 * US)
            main.item(queue)
    return kineto_bytes(machine)
