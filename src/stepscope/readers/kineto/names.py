"""What the categories in a Kineto trace mean."""

from __future__ import annotations

from typing import Final

from stepscope.readers.names import copy_kind, is_communication

OPERATOR_CATEGORIES: Final = frozenset({"cpu_op", "operator"})
LAUNCH_CATEGORIES: Final = frozenset(
    {"cuda_runtime", "cuda_driver", "runtime", "mtia_runtime", "privateuse1_runtime", "xpu_runtime"}
)
DEVICE_CATEGORIES: Final = frozenset(
    {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "mtia_ccp_events", "concurrent_kernel"}
)
FRAME_CATEGORIES: Final = frozenset({"python_function"})
SYNCHRONISATION_CATEGORIES: Final = frozenset({"cuda_sync"})
ANNOTATION_CATEGORIES: Final = {
    "user_annotation": "host",
    "gpu_user_annotation": "device",
    "mtia_user_annotation": "device",
    "overhead": "overhead",
    "trace": "profiler",
}
LEGACY_CATEGORIES: Final[dict[int | str, str]] = {"CPU functions": "operator", "CUDA functions": "kernel"}
"""By process, of the oldest exports, whose events have no category."""
CATEGORY_OF_TABLE: Final = {"operators": "cpu_op", "launches": "cuda_runtime", "frames": "python_function"}
"""Of slices whose name alone tells where they belong."""
RECORDED: Final = {
    "with_stack": "stacks",
    "record_shapes": "shapes",
    "profile_memory": "memory",
    "with_modules": "modules",
    "with_flops": "flops",
}
"""Key of the header that says what the profiler was asked for -> the word of `Metadata.recorded`."""


def device_work_kind(category: str, name: str, direction: str | None) -> str:
    """Kind of a device's work, in the words of `tables.DEVICE_WORK_KINDS`."""
    if category.endswith("memset"):
        return "set"
    if category.endswith("memcpy") or direction:
        return copy_kind(direction or name)
    if is_communication(name):
        return "communication"
    if category == "mtia_ccp_events" and name.startswith("dma"):
        return "copy_on_device"
    return "compute"
