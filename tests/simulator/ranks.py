"""Traces of a job's ranks: all train the same layers and reduce once in each step, which one of them comes to late."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

from tests.simulator.device import Queue
from tests.simulator.host import Host
from tests.simulator.kineto import kineto_bytes
from tests.simulator.machine import Machine

US: Final = 1_000
STEPS: Final = 20
LAYERS: Final = 24
LATE_NS: Final = 400 * US
TRANSFER_NS: Final = 60 * US
BUCKET_NS: Final = 20 * US
LISTED: Final = 30
"""Members of a group that PyTorch lists; the others are three dots."""


def write_ranks(
    folder: Path,
    ranks: int,
    late: Callable[[int], int],
    *,
    layers: int = LAYERS,
    steps: int = STEPS,
    per_bucket: int | None = None,
    late_ns: int = LATE_NS,
) -> int:
    """Write the traces of so many ranks; return their bytes before compression.

    Args:
        late: the rank that waits for its batch in a step, and all others wait for.
        per_bucket: layers after which gradients are reduced, besides once at the end of the step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    members = [*map(str, range(min(ranks, LISTED))), *(["..."] if ranks > LISTED else [])]
    group = {b'"Group size": 2': f'"Group size": {ranks}', b'"[0, 1]"': f'"[{", ".join(members)}]"'}

    @cache
    def trace(is_late: tuple[bool, ...]) -> bytes:
        text = kineto_bytes(rank_machine(is_late, layers, per_bucket, late_ns))
        for pair, all_ranks in group.items():
            text = text.replace(pair, all_ranks.encode())
        return text

    written = 0
    for rank in range(ranks):
        text = trace(tuple(late(step) == rank for step in range(steps)))
        about = json.dumps({"backend": "nccl", "rank": rank, "world_size": ranks})
        text = text.replace(b"{\n", f'{{\n"distributedInfo": {about},\n'.encode(), 1)
        (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(text, 1, mtime=0))
        written += len(text)
    return written


def rank_machine(
    is_late: tuple[bool, ...], layers: int = LAYERS, per_bucket: int | None = None, late_ns: int = LATE_NS
) -> Machine:
    """A rank that is late in some of its steps, and waits for the others' late rank in all other ones."""
    machine = Machine(tick_ns=US)
    main, queue = machine.host("main"), machine.queue(number=7)
    for step, is_late_now in enumerate(is_late):
        own_ns = late_ns if is_late_now else 0
        waiting_ns = late_ns - own_ns  # in the first exchange of the step
        with main.step(step), main.frame("train.py(12): step", before_ns=3 * US):
            main.data_loader(30 * US + own_ns, workers=True)
            for layer in range(layers):
                with main.frame(f"nn.Module: Linear_{layer}", before_ns=2 * US), main.operator("aten::addmm"):
                    main.launch("gemm", queue, 15 * US)
                if per_bucket is not None and layer % per_bucket == per_bucket - 1:
                    _all_reduce(main, queue, BUCKET_NS + waiting_ns)
                    waiting_ns = 0
            _all_reduce(main, queue, TRANSFER_NS + waiting_ns)
            with main.optimizer_step(), main.operator("aten::_fused_adamw_"):
                main.launch("adamw", queue, 25 * US)
            main.item(queue)
    return machine


def _all_reduce(main: Host, queue: Queue, duration_ns: int) -> None:
    with main.operator("c10d::allreduce_"):
        main.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", queue, duration_ns)
