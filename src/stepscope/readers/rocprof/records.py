"""The records of a rocprofv3 file, typed: only the fields that are wanted, as the tool's archive names them."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Final

import msgspec

from stepscope.readers.rocprof.document import elements

Time = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Handle(msgspec.Struct, gc=False, frozen=True):
    handle: int = 0


class Correlation(msgspec.Struct, gc=False, frozen=True):
    internal: int = 0
    external: int | None = None


class Size(msgspec.Struct, gc=False, frozen=True):
    x: int = 1
    y: int = 1
    z: int = 1


class Dispatch(msgspec.Struct, gc=False, frozen=True):
    agent_id: Handle = Handle()
    queue_id: Handle = Handle()
    kernel_id: int = 0
    group_segment_size: int | None = None
    workgroup_size: Size = Size()
    grid_size: Size = Size()


class Record(msgspec.Struct, gc=False):
    """An entry of `buffer_records`: a call, a kernel or a copy."""

    start_timestamp: Time
    end_timestamp: Time
    kind: int = -1
    operation: int = -1
    thread_id: int = 0
    correlation_id: Correlation = Correlation()
    stream_id: Handle | None = None
    dispatch_info: Dispatch | None = None
    src_agent_id: Handle = Handle()
    dst_agent_id: Handle = Handle()
    bytes: int | None = None


class Kernel(msgspec.Struct, gc=False):
    """An entry of `kernel_symbols`."""

    kernel_id: int = 0
    kernel_name: str = ""
    formatted_kernel_name: str = ""
    demangled_kernel_name: str = ""
    arch_vgpr_count: int | None = None

    @property
    def name(self) -> str:
        """As the user asked the tool to show it."""
        return self.formatted_kernel_name or self.demangled_kernel_name or self.kernel_name.removesuffix(".kd")


class Memory(msgspec.Struct, gc=False):
    heap_type: int = 0
    size_in_bytes: int = 0


class Agent(msgspec.Struct, gc=False):
    """An entry of `agents`: a processor; type 2 is a GPU."""

    id: Handle = Handle()
    type: int = 0
    node_id: int = 0
    cu_count: int | None = None
    gfx_target_version: int | None = None
    name: str = ""
    product_name: str = ""
    mem_banks: list[Memory] = []


class KindNames(msgspec.Struct, gc=False):
    """An entry of `strings.buffer_records`."""

    kind: str = ""
    operations: list[str] = []


class Message(msgspec.Struct, gc=False):
    """An entry of `strings.marker_api`: what a marker with this correlation number says."""

    key: int
    value: str


_RECORDS: Final = msgspec.json.Decoder(list[Record])
_RECORD: Final = msgspec.json.Decoder(Record)


def decode_records(text: bytes, damage: Counter[str]) -> list[Record]:
    """The records of a piece of a list; what cannot be read is left out and counted."""
    if not text.strip():
        return []
    try:
        return _RECORDS.decode(b"[%b]" % text)
    except DECODE_ERRORS:
        pass
    found = []
    for element in elements(text):
        try:
            found.append(_RECORD.decode(element))
        except DECODE_ERRORS:
            damage["damaged_record"] += 1
    return found


def decode_entries(text: bytes, kind: type[Any], damage: Counter[str]) -> list[Any]:
    """The entries of a list, or the values of an object; those that cannot be read are left out and counted."""
    try:
        found = msgspec.json.decode(text, type=list[kind] | dict[str, kind])  # type: ignore[valid-type]
        return list(found.values()) if isinstance(found, dict) else found
    except DECODE_ERRORS:
        pass
    result = []
    for element in elements(text.strip()[1:-1]):
        try:
            result.append(msgspec.json.decode(element, type=kind))
        except DECODE_ERRORS:
            damage["damaged_description"] += 1
    return result
