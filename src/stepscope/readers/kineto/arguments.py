"""The wanted fields of the `args` of each kind of event, typed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
import polars as pl

from stepscope.readers.kineto.events import DECODE_ERRORS, Damage, Event
from stepscope.trace.naming import copy_kind, is_communication

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
OptionalInt = Int64 | None
OptionalNumber = Int64 | float | None
OptionalIdentifier = Int64 | str | None
MISSING: Final = msgspec.Raw(b"null")


class Operator(msgspec.Struct, gc=False):
    sequence_number: OptionalInt = msgspec.field(default=None, name="Sequence number")
    forward_thread: OptionalInt = msgspec.field(default=None, name="Fwd thread id")
    external_id: OptionalInt = msgspec.field(default=None, name="External id")
    input_shapes: msgspec.Raw = msgspec.field(default=MISSING, name="Input Dims")
    input_types: msgspec.Raw = msgspec.field(default=MISSING, name="Input type")
    input_values: msgspec.Raw = msgspec.field(default=MISSING, name="Concrete Inputs")
    call_stack: str | None = msgspec.field(default=None, name="Call stack")


class Launch(msgspec.Struct, gc=False):
    correlation: OptionalInt = None
    external_id: OptionalInt = msgspec.field(default=None, name="External id")
    old_external_id: OptionalInt = msgspec.field(default=None, name="external id")
    bytes: OptionalIdentifier = None
    kernel: str | None = None


class DeviceWork(msgspec.Struct, gc=False):
    device: OptionalIdentifier = None
    stream: OptionalIdentifier = None
    correlation: OptionalInt = None
    external_id: OptionalInt = msgspec.field(default=None, name="External id")
    old_external_id: OptionalInt = msgspec.field(default=None, name="external id")
    bytes: OptionalIdentifier = None
    size: OptionalInt = None
    direction: str | None = None
    grid: msgspec.Raw = MISSING
    block: msgspec.Raw = MISSING
    registers: OptionalNumber = msgspec.field(default=None, name="registers per thread")
    shared_memory: OptionalNumber = msgspec.field(default=None, name="shared memory")
    occupancy: OptionalNumber = msgspec.field(default=None, name="est. achieved occupancy %")
    blocks_per_multiprocessor: OptionalNumber = msgspec.field(default=None, name="blocks per SM")
    collective: str | None = msgspec.field(default=None, name="Collective name")
    group: OptionalIdentifier = msgspec.field(default=None, name="Process Group Name")
    group_size: OptionalInt = msgspec.field(default=None, name="Group size")
    group_ranks: str | None = msgspec.field(default=None, name="Process Group Ranks")
    group_description: str | None = msgspec.field(default=None, name="Process Group Description")
    source_rank: OptionalInt = msgspec.field(default=None, name="Src Rank")
    target_rank: OptionalInt = msgspec.field(default=None, name="Dst Rank")
    message_elements: OptionalInt = msgspec.field(default=None, name="In msg nelems")
    message_type: str | None = msgspec.field(default=None, name="dtype")
    graph_node: OptionalInt = msgspec.field(default=None, name="graph node id")
    module_fqn: Any = None
    annotation: Any = None
    marked: Any = msgspec.field(default=None, name="str")
    marked_name: Any = msgspec.field(default=None, name="name")

    @property
    def module(self) -> str | None:
        """What `torch.cuda.graph`'s annotation of the graph's node says, which its exporter merges into the arguments.

        Compilers write a module's qualified name under "module_fqn", `mark_kernels` writes text under "str".
        """
        marks = (self.annotation, self.marked_name, self.marked) if self.graph_node else ()
        found = (self.module_fqn, *marks)
        return next((each for each in found if isinstance(each, str) and each), None)


class Annotation(msgspec.Struct, gc=False):
    call_stack: str | None = msgspec.field(default=None, name="Call stack")


class Synchronisation(msgspec.Struct, gc=False):
    kind: str | None = msgspec.field(default=None, name="cuda_sync_kind")
    correlation: OptionalInt = None
    device: OptionalIdentifier = None
    stream: OptionalIdentifier = None
    waited_stream: OptionalIdentifier = msgspec.field(default=None, name="wait_on_stream")
    waited_correlation: OptionalInt = msgspec.field(default=None, name="wait_on_cuda_event_record_corr_id")


class Frame(msgspec.Struct, gc=False):
    python_id: OptionalInt = msgspec.field(default=None, name="Python id")


class Memory(msgspec.Struct, gc=False):
    device_type: OptionalInt = msgspec.field(default=None, name="Device Type")
    device_id: OptionalInt = msgspec.field(default=None, name="Device Id")
    address: OptionalInt = msgspec.field(default=None, name="Addr")
    bytes: OptionalInt = msgspec.field(default=None, name="Bytes")
    total_allocated: OptionalInt = msgspec.field(default=None, name="Total Allocated")
    total_reserved: OptionalInt = msgspec.field(default=None, name="Total Reserved")


class Name(msgspec.Struct, gc=False):
    """Arguments of the metadata events process_name, process_labels and thread_name."""

    name: str | None = None
    labels: str | None = None


Arguments = TypeVar("Arguments", bound=msgspec.Struct)


def decode(events: Sequence[Event], kind: type[Arguments], damage: Damage) -> list[Arguments]:
    """Decode the arguments of each event; fields of a wrong type are dropped and counted."""
    try:
        text = b"[%b]" % b",".join([event.args for event in events])
        found = msgspec.json.decode(text, type=list[kind | None])  # type: ignore[valid-type]
    except DECODE_ERRORS:
        return [_salvage(event.args, kind, damage) for event in events]
    if None in found:
        return [kind() if one is None else one for one in found]
    return found  # type: ignore[return-value]


def _salvage(raw: msgspec.Raw, kind: type[Arguments], damage: Damage) -> Arguments:
    try:
        return msgspec.json.decode(raw, type=kind)
    except DECODE_ERRORS:
        pass
    try:
        values = json.loads(bytes(raw).decode("utf-8", "replace"), strict=False, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        values = ()
    result = kind()
    if not isinstance(values, dict):
        damage["damaged_arguments"] += values is not None
        return result
    for field in msgspec.structs.fields(kind):
        if field.encode_name in values:
            try:
                setattr(result, field.name, _convert(values[field.encode_name], field.type))
            except (msgspec.MsgspecError, ValueError, RecursionError):
                damage["damaged_argument"] += 1
    return result


def _convert(value: Any, kind: Any) -> Any:
    if kind is msgspec.Raw:
        return msgspec.Raw(json.dumps(value).encode("utf-8", "replace"))
    if isinstance(value, str):  # an escape such as "\\ud800" is a lone surrogate, which UTF-8 cannot encode
        value = value.encode("utf-8", "replace").decode()
    return msgspec.convert(value, kind)


def counter_values(raw: msgspec.Raw) -> dict[str, float]:
    try:
        values = msgspec.json.decode(raw, type=dict[str, Any])
    except DECODE_ERRORS:
        return {}
    return {name: float(v) for name, v in values.items() if isinstance(v, (int, float)) and abs(v) < 1e300}


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
"""Categories by process name, for the oldest exports, whose events have no category."""
CATEGORY_OF_TABLE: Final = {"operators": "cpu_op", "launches": "cuda_runtime", "frames": "python_function"}
"""Category for slices that are classified by name alone, by table."""
RECORDED: Final = {
    "with_stack": "stacks",
    "record_shapes": "shapes",
    "profile_memory": "memory",
    "with_modules": "modules",
    "with_flops": "flops",
}
"""Key of the header for a profiler option -> word in `Metadata.recorded`."""


def device_work_kind(category: str, name: str, direction: str | None) -> str:
    """Return the kind of device work, one of `tables.DEVICE_WORK_KINDS`."""
    if category.endswith("memset"):
        return "set"
    if category.endswith("memcpy") or direction:
        return copy_kind(direction or name)
    if is_communication(name):
        return "communication"
    if category == "mtia_ccp_events" and name.startswith("dma"):
        return "copy_on_device"
    return "compute"


def external_ids(args: Sequence[Launch] | Sequence[DeviceWork]) -> pl.Series:
    """Return the number of the operator around each row (Int64), from the new key or else the old one."""
    return integers([a.old_external_id if a.external_id is None else a.external_id for a in args])


def integers(values: list[int | None]) -> pl.Series:
    return pl.Series(values, dtype=pl.Int64)


def integer(value: int | float | str | None) -> int | None:
    """Parse a whole number from any spelling; None if it is not a number."""
    if value is None or isinstance(value, int):
        return value
    try:
        number = int(float(value))
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < 2**63 else None


def queue(thread: Any) -> str:
    """Return the name of a stream or other row; 7, "7" and "stream 7" are the same."""
    return str(thread).removeprefix("stream ").strip()


def real_queue(stream: Any) -> str | None:
    """Return the name of a stream; None for the numbers -1 and 4294967295, which mean no stream."""
    return None if stream is None or str(stream) in ("-1", "4294967295") else queue(stream)


def memory_device(args: Memory) -> str:
    return "cpu" if args.device_type in (0, None) or args.device_id in (-1, None) else str(args.device_id)
