"""What an event of another tool's file is: which table it belongs to, and which of its arguments is which column."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from stepscope.readers import names
from stepscope.readers.kineto.fields import (
    ANNOTATION_CATEGORIES,
    DEVICE_CATEGORIES,
    FRAME_CATEGORIES,
    LAUNCH_CATEGORIES,
    OPERATOR_CATEGORIES,
    SYNCHRONISATION_CATEGORIES,
    device_work_kind,
)

MEMORY_NAME: Final = "[memory]"
"""Name of the instants that are rows of `memory`."""

CATEGORIES: Final[Mapping[str, Mapping[str | None, str]]] = {
    "operators": {None: "cpu_op"},
    "launches": {None: "cuda_runtime"},
    "device_work": {
        None: "kernel",
        "copy_in": "gpu_memcpy",
        "copy_out": "gpu_memcpy",
        "copy_on_device": "gpu_memcpy",
        "set": "gpu_memset",
    },
    "frames": {None: "python_function"},
    "lines": {None: "user_annotation"},
    "modules": {None: "user_annotation"},
    "annotations": {
        None: "user_annotation",
        "device": "gpu_user_annotation",
        "overhead": "overhead",
        "profiler": "trace",
    },
    "synchronisations": {None: "cuda_sync"},
    "memory": {None: "cpu_instant_event"},
}
"""Table -> the row's `kind`, None for all others -> category of its event."""

ANNOTATIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "operators": {
        "sequence_number": "Sequence number",
        "forward_thread": "Fwd thread id",
        "external_id": "External id",
        "input_shapes": "Input Dims",
        "input_types": "Input type",
        "input_values": "Concrete Inputs",
        "call_stack": "Call stack",
        "source_file": "source_file",
        "source_line": "source_line",
        "source_function": "source_function",
        "scope": "scope",
    },
    "launches": {
        "kind": "kind",
        "correlation": "correlation",
        "external_id": "External id",
        "bytes": "bytes",
    },
    "device_work": {
        "kind": "kind",
        "device": "device",
        "queue": "stream",
        "correlation": "correlation",
        "external_id": "External id",
        "bytes": "bytes",
        "grid": "grid",
        "block": "block",
        "registers": "registers per thread",
        "shared_memory_bytes": "shared memory",
        "occupancy": "occupancy",
        "blocks_per_multiprocessor": "blocks per SM",
        "collective": "Collective name",
        "group": "Process Group Name",
        "group_size": "Group size",
        "message_elements": "In msg nelems",
        "message_type": "dtype",
        "call_stack": "Call stack",
        "scope": "scope",
    },
    "frames": {
        "python_id": "Python id",
        "file": "file",
        "line": "line",
        "function": "function",
        "module": "module",
    },
    "lines": {"file": "file", "line": "line", "function": "function"},
    "modules": {},
    "annotations": {"kind": "kind", "step": "step", "call_stack": "Call stack"},
    "synchronisations": {
        "kind": "kind",
        "correlation": "correlation",
        "device": "device",
        "queue": "stream",
        "waited_queue": "wait_on_stream",
        "waited_correlation": "wait_on_cuda_event_record_corr_id",
    },
    "memory": {
        "device": "device",
        "address": "Addr",
        "bytes": "Bytes",
        "total_allocated": "Total Allocated",
        "total_reserved": "Total Reserved",
        "call_stack": "Call stack",
    },
}
"""Table -> column -> name of the debug annotation that holds it; Kineto's names where Kineto has one."""


def category(table: str, kind: str | None) -> str:
    """Category of the event of a row of that table and kind."""
    words = CATEGORIES[table]
    return words.get(kind, words[None])


_ROCPROF_CATEGORIES: Final = {
    "kernel_dispatch": "device_work",
    "memory_copy": "device_work",
    "hip_api": "launches",
    "hsa_api": "launches",
    "rccl_api": "operators",
    "marker_api": None,
}
"""Of rocprofv3's Perfetto files; a marker is what its name says."""
_OTHER_NAMES: Final = {
    "operators": {"external id": "external_id"},
    "launches": {"external id": "external_id", "corr_id": "correlation"},
    "device_work": {
        "external id": "external_id",
        "corr_id": "correlation",
        "copy_bytes": "bytes",
        "size": "bytes",
        "queue": "queue",
        "agent": "device",
        "dst_agent": "device",
        "group_segment_size": "shared_memory_bytes",
        "est. achieved occupancy %": "occupancy",
    },
    "synchronisations": {"cuda_sync_kind": "kind"},
    "memory": {"Device Id": "device"},
}
"""Further names of the columns, of older files and of other tools."""
ARGUMENTS: Final = {
    table: {name: column for column, name in columns.items()} | _OTHER_NAMES.get(table, {})
    for table, columns in ANNOTATIONS.items()
}
"""Table -> name of an argument -> column."""


@lru_cache(maxsize=65536)
def table_of(category: str, name: str) -> tuple[str, str | None]:
    """The table of a slice and its kind, where the table has kinds; of a category that is not known, by the name."""
    lowered = category.lower()
    if lowered in OPERATOR_CATEGORIES:
        return ("annotations", "host") if names.is_annotation(name) else ("operators", None)
    if lowered in LAUNCH_CATEGORIES or _ROCPROF_CATEGORIES.get(lowered) == "launches":
        return "launches", names.launch_kind(name)
    if lowered in DEVICE_CATEGORIES:
        return "device_work", device_work_kind(lowered, name, None)
    if lowered in ("kernel_dispatch", "memory_copy"):
        return "device_work", names.copy_kind(name) if lowered == "memory_copy" else device_work_kind("", name, None)
    if lowered in FRAME_CATEGORIES:
        return "frames", None
    if lowered in SYNCHRONISATION_CATEGORIES:
        return "synchronisations", names.synchronisation_kind(name)
    if lowered in ANNOTATION_CATEGORIES:
        return "annotations", ANNOTATION_CATEGORIES[lowered]
    if lowered == "rccl_api":
        return "operators", None
    table = names.host_slice_table(name)
    if table == "launches":
        return "launches", names.launch_kind(name)
    return (table, None) if table in ("operators", "frames") else ("annotations", "host")


def is_known(category: str) -> bool:
    """Whether the category tells the table."""
    lowered = category.lower()
    return (
        lowered in OPERATOR_CATEGORIES | LAUNCH_CATEGORIES | DEVICE_CATEGORIES | FRAME_CATEGORIES
        or lowered in SYNCHRONISATION_CATEGORIES
        or lowered in ANNOTATION_CATEGORIES
        or lowered in _ROCPROF_CATEGORIES
    )


def _percent(value: Any) -> Any:
    return value / 100 if isinstance(value, (int, float)) else None


CHANGES: Final[dict[tuple[str, str], Callable[[Any], Any]]] = {
    ("device_work", "est. achieved occupancy %"): _percent,
    ("synchronisations", "cuda_sync_kind"): lambda value: names.synchronisation_kind(str(value)),
    ("memory", "Device Id"): lambda value: "cpu" if value == -1 else value,
}
"""(table, name of an argument) -> what is to be done with the value."""


def text(value: Any) -> str | None:
    """An argument as text: what is no text as JSON."""
    if value is None or isinstance(value, str):
        return value
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else json.dumps(value)


def integer(value: Any) -> int | None:
    """An argument as a number of 64 bits, None if it is none."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and -(2**63) <= value < 2**63 else None


def number(value: Any) -> float | None:
    """An argument as a number with decimals, None if it is none."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else None
