"""Reading a memory snapshot into a trace store.

A snapshot has the allocator's segments as they were when it was taken, and for each device the last events before that.
The totals at each event follow from the segments at the end, by undoing the events one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from stepscope.errors import NotATraceError, UsageError
from stepscope.readers.beginning import text_of
from stepscope.readers.budget import current
from stepscope.readers.source import ByteSource
from stepscope.readers.torch_snapshot.device import DeviceEvents, Stacks, segments_by_device
from stepscope.readers.torch_snapshot.plain_pickle import Plain, load
from stepscope.readers.torch_snapshot.tables import FIRST_EVENT_NS, write_tables
from stepscope.trace.model import Device, Metadata, TraceWarning
from stepscope.trace.store import StoreWriter
from stepscope.trace.window import StepRange, Window

MOST_DEVICES: Final = 1024
MOST_BYTES: Final = 1 << 61
"""Of all events together; sums are kept in 64 bits."""

_PICKLES: Final = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_EPOCH_US: Final = 10**15
"""Smaller times count from something else than 1970."""
_PARTS: Final = ("segments", "device_traces")


def recognises(head: bytes) -> bool:
    """Whether a file begins like a pickle, or like a snapshot as JSON."""
    if head.startswith(_PICKLES):
        return True
    text = text_of(head)[:4096]
    begins = text.startswith(b"{") and b'"traceEvents"' not in text
    return begins and any(f'"{part}"'.encode() in text for part in _PARTS)


def read(
    source: ByteSource,
    writer: StoreWriter,
    *,
    window: Window | None = None,
    steps: StepRange | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> tuple[Metadata, tuple[TraceWarning, ...]]:
    """Read a snapshot into `writer`'s tables: memory events with call stacks, calls of the driver, failed requests.

    Raises:
        NotATraceError: it is no snapshot, holds more than plain values.
        UsageError: steps were asked for, which a snapshot does not have.
    """
    content = _value(_all(source, progress), source.name)
    if steps is not None:
        raise UsageError(f"{source.name} is a memory snapshot, which has no steps: choose a part of it with --window")
    segments, traces = _checked(content, source.name)
    stacks = Stacks()
    budget = current()
    parts = segments_by_device(segments, budget)
    devices = [
        DeviceEvents.read(number, parts.get(number, []), events, stacks, budget) for number, events in enumerate(traces)
    ]
    if sum(device.all_bytes for device in devices) > MOST_BYTES:
        raise NotATraceError(f"{source.name} is no memory snapshot: it tells of more memory than there can be")
    devices = [device for device in devices if device.events or device.blocks]
    if not devices:
        raise NotATraceError(f"{source.name} is a memory snapshot without a single allocation")
    origin_us = min((event.time_us for device in devices for event in device.events if event.time_us), default=0)
    write_tables(writer, devices, stacks, origin_us, window)
    metadata = Metadata(
        path=source.name,
        format="torch_snapshot",
        events=sum(len(device.events) for device in devices),
        origin_unix_ns=origin_us * 1000 - FIRST_EVENT_NS if origin_us > _EPOCH_US else None,
        devices=tuple(Device(device=str(device.number)) for device in devices),
        recorded=("memory", *(["stacks"] if stacks.texts else [])),
        window=window,
    )
    return metadata, _warnings(source, devices, stacks)


def _all(source: ByteSource, progress: Callable[[int, int | None], None] | None) -> bytes:
    blocks = []
    for block in source.blocks():
        blocks.append(block)
        if progress is not None:
            progress(source.read_bytes, source.total_bytes)
    return b"".join(blocks)


def _value(data: bytes, name: str) -> Plain:
    if data.startswith(_PICKLES):
        return load(data, name)
    current().require("values", data.count(b"[") + data.count(b"{"))  # a byte or two here, and a hundred of memory each
    try:
        value: Plain = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NotATraceError(f"{name} looks like a memory snapshot as JSON, but cannot be read: {error}") from None
    return value


def _checked(content: Plain, name: str) -> tuple[list[Any], list[list[Any]]]:
    """The segments, and the events of each device.

    Snapshots of `torch.cuda.memory_snapshot()` are the list of segments alone.
    """
    if isinstance(content, list):
        content = {"segments": content, "device_traces": []}
    if not isinstance(content, dict) or not any(part in content for part in _PARTS):
        what = "a value" if not isinstance(content, dict) else "a dictionary"
        raise NotATraceError(
            f"{name} is {what} of Python, but no memory snapshot: it has neither 'segments' nor 'device_traces'"
        )
    segments, traces = content.get("segments", []), content.get("device_traces", [])
    if not isinstance(segments, list) or not isinstance(traces, list):
        raise NotATraceError(f"{name} is no memory snapshot: its 'segments' or 'device_traces' are no list")
    if len(traces) > MOST_DEVICES:
        raise NotATraceError(f"{name} is no memory snapshot: it tells of {len(traces):,} devices")
    traces = [events if isinstance(events, list) else [] for events in traces]
    numbers = [each.get("device", 0) for each in segments if isinstance(each, dict)]
    count = max(
        [len(traces), *(number + 1 for number in numbers if isinstance(number, int) and 0 <= number < MOST_DEVICES)]
    )
    return segments, traces + [[]] * (count - len(traces))


def _warnings(source: ByteSource, devices: list[DeviceEvents], stacks: Stacks) -> tuple[TraceWarning, ...]:
    damaged = sum(device.damaged for device in devices)
    found = {
        "call_stacks_left_out": (stacks.left_out, "call stacks were left out, because there was too much text in them"),
        "damaged_event": (damaged, "events without an action, address or size were skipped"),
        "unknown_event": (sum(device.unknown for device in devices), "events of an unknown kind were skipped"),
        "compressed_data": (int(source.damage is not None), f"{source.damage}; what could be unpacked was read"),
    }
    return tuple(TraceWarning(kind, count, detail) for kind, (count, detail) in found.items() if count)
