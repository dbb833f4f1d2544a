"""Logs of collectives as NCCL's backend of PyTorch and NCCL's Inspector write them, with known faults.

By the documented forms: version 2.10 of the flight recorder's dumps, and v4.0 of the Inspector's lines.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

US: Final = 1_000
START_NS: Final = 1_760_000_000_000_000_000
TRANSFER_NS: Final = 400 * US
ELEMENTS: Final = 1 << 20


def entry(number: int, rank: int = 0, **changed: Any) -> dict[str, Any]:
    """A call of all_reduce that is done; `changed` are other values of its fields."""
    return {
        "record_id": number - 1,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": START_NS + number * 1000 * US,
        "duration_ms": TRANSFER_NS / 1e6,
        "input_sizes": [[ELEMENTS]],
        "output_sizes": [[ELEMENTS]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": START_NS + number * 1000 * US,
        "time_discovered_completed_ns": START_NS + number * 1000 * US + TRANSFER_NS,
        "retired": True,
        "timeout_ms": 600_000,
        "is_p2p": False,
        "frames": [
            {"name": "all_reduce", "filename": "/usr/lib/python3/site-packages/torch/distributed/c10d.py", "line": 1},
            {"name": "step", "filename": "/home/user/train.py", "line": 12},
        ],
        **changed,
    }


UNDONE: Final[dict[str, Any]] = {
    "state": "started",
    "time_discovered_completed_ns": None,
    "duration_ms": None,
    "retired": False,
}


def dump(entries: Sequence[dict[str, Any]], groups: dict[str, list[int]]) -> dict[str, Any]:
    configured = {name: {"name": name, "desc": "default_pg" if name == "0" else f"mesh_{name}", "ranks": str(ranks)}
                  for name, ranks in groups.items()}  # fmt: skip
    return {"version": "2.10", "nccl_version": "2.27.5", "pg_config": configured, "pg_status": {},
            "entries": list(entries)}  # fmt: skip


def write_dumps(
    folder: Path, ranks: int, calls: Callable[[int], Sequence[dict[str, Any]]], *, as_json: bool = False
) -> None:
    """Write each rank's dump, whose default group has all ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        content = dump(calls(rank), {"0": list(range(ranks))})
        name = f"nccl_trace_rank_{rank}{'.json' * as_json}"
        (folder / name).write_bytes(json.dumps(content).encode() if as_json else pickle.dumps(content, protocol=2))


def inspected(rank: int, number: int, time_ns: int = TRANSFER_NS, **changed: Any) -> dict[str, Any]:
    """The Inspector's record of an all-reduce in a communicator of `ranks`; see `changed` for its other values."""
    ranks, size = changed.pop("ranks", 4), changed.pop("size", 4 * ELEMENTS)
    algorithm = size / time_ns
    return {
        "header": {"id": changed.pop("group", "0x7f8c496ae9f661"), "rank": rank, "n_ranks": ranks, "nnodes": 1},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "rec_mechanism": "profiler_plugin",
            "dump_timestamp_us": START_NS // 1000 + number,
            "hostname": changed.pop("host", "node0"),
            "pid": changed.pop("pid", 100 + rank),
        },
        "coll_perf": {
            "coll": "AllReduce",
            "coll_sn": number,
            "coll_msg_size_bytes": size,
            "coll_exec_time_us": time_ns // US,
            "coll_timing_source": "kernel_gpu",
            "coll_algobw_gbs": algorithm,
            "coll_busbw_gbs": algorithm * 2 * (ranks - 1) / ranks,
            **changed,
        },
    }


def write_inspected(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
