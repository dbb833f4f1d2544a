"""The words of a Perfetto trace that hold a trace of ours: shared by the reader and by the export that it reads back.

docs/formats/perfetto.md describes the whole file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

HEADER_NAME: Final = "stepscope.trace"
"""Name of the instant that says what a file of our own holds."""
HEADER_ANNOTATION: Final = "stepscope"
"""Its debug annotation: a string, the header as JSON."""
ROWS_NAME: Final = "stepscope.rows"
"""Name of the instants that hold links and numbers of rows, under the same annotation."""
HEADER_VERSION: Final = 1
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
    "lines": {None: "stepscope_line"},
    "modules": {None: "stepscope_module"},
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
