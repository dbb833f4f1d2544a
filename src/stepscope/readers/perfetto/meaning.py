"""What an event of another tool's file is: which table it belongs to, and which of its arguments is which column."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from stepscope.readers import names
from stepscope.readers.kineto.names import (
    ANNOTATION_CATEGORIES,
    DEVICE_CATEGORIES,
    FRAME_CATEGORIES,
    LAUNCH_CATEGORIES,
    OPERATOR_CATEGORIES,
    SYNCHRONISATION_CATEGORIES,
    device_work_kind,
)
from stepscope.readers.perfetto.vocabulary import ANNOTATIONS

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
OWN_ARGUMENTS: Final = {
    table: {name: column for column, name in columns.items()} for table, columns in ANNOTATIONS.items()
}
"""The same in files of our own."""


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
