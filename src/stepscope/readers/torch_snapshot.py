"""Reader for PyTorch's memory snapshots, as pickled by `torch.cuda.memory._dump_snapshot`, or as JSON.

A snapshot has the allocator's segments at the time it was taken and, for each device, the last events before that. The
totals at each event are computed from the final segments by undoing the events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, NamedTuple

import polars as pl

from stepscope.errors import NotATraceError, UsageError
from stepscope.files import text_of
from stepscope.readers.plain_values import PICKLES, Plain, plain_value
from stepscope.readers.source import Budget, ByteSource, Reader, ReadResult, current
from stepscope.trace.metadata import Device, Metadata, TraceWarning
from stepscope.trace.model import PART_ROWS, StoreWriter
from stepscope.trace.naming import step_number
from stepscope.trace.tables import conform, rows_frame
from stepscope.trace.window import StepRange, Window

LARGEST_SIZE: Final = 1 << 50
MEMORY_ACTIONS: Final = {"alloc": 1, "free_completed": -1, "free": -1}
"""Action -> sign of the change in allocated bytes. A block whose free was only requested is still in use."""
SEGMENT_ACTIONS: Final = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
"""Action -> sign of the change in reserved bytes."""
OUT_OF_MEMORY: Final = "oom"

_PASSED_OVER: Final = frozenset({"free_requested", "snapshot", "user_defined", "workspace_snapshot"})
_NOT_COMPILED: Final = ("", "N/A")
_LARGEST_ADDRESS: Final = (1 << 63) - 1
_LATEST_US: Final = 1 << 53
_MOST_FRAMES: Final = 64
_LONGEST_ENTRY: Final = 400
_LONGEST_NAME: Final = 4_000
_MOST_STACK_BYTES: Final = 256 << 20


class SnapshotEvent(NamedTuple):
    """One event; `stack` is an index into `Stacks` or -1, and `free_bytes` is what the driver had left."""

    time_us: int
    action: str
    address: int
    size: int
    stack: int
    free_bytes: int | None
    compiled: str = ""  # the region of torch.compile that was running, such as "0/1"


class Block(NamedTuple):
    """A block in use when the snapshot was taken."""

    address: int
    size: int
    stack: int


class Stacks:
    """Distinct call stacks, each as the frames "file(line): function", innermost first, joined by ";".

    Attributes:
        texts: by number.
        left_out: call stacks dropped because there was too much text.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.left_out = 0
        self._by_list: dict[int, int] = {}
        self._by_text: dict[str, int] = {}
        self._bytes = 0

    def number(self, frames: Any) -> int:
        """Return the number of these frames' stack; -1 if no frame is from Python.

        Events share lists of frames, which must outlive this object since they are cached by identity.
        """
        if type(frames) is not list or not frames:
            return -1
        known = self._by_list.get(id(frames))
        if known is not None:
            return known
        entries = [entry for frame in frames[: 4 * _MOST_FRAMES] if (entry := _entry(frame))]
        text = ";".join(entries[:_MOST_FRAMES])
        number = self._by_text.get(text, -1) if text else -1
        if text and number < 0:
            number = self._added(text)
        self._by_list[id(frames)] = number
        return number

    def _added(self, text: str) -> int:
        if self._bytes + len(text) > _MOST_STACK_BYTES:
            self.left_out += 1
            return -1
        self._bytes += len(text)
        self._by_text[text] = len(self.texts)
        self.texts.append(text)
        return len(self.texts) - 1


def _entry(frame: Any) -> str:
    """A frame of Python or the autograd engine as "file(line): function"; "" for other frames."""
    if type(frame) is not dict:
        return ""
    file, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
    if type(file) is not str or type(name) is not str or type(line) is not int:
        return ""
    name = name[:_LONGEST_NAME]  # one text may be in a million frames
    if file == "none":  # snapshots that torch converts from a profile have everything in the name
        text = name
    elif file.endswith(".py") or file.startswith("<") or "autograd::Engine" in name:
        text = f"{file[-_LONGEST_ENTRY:]}({min(max(line, 0), 10**8)}): {name}"
    else:
        return ""
    return _utf8(text[:_LONGEST_ENTRY].replace(";", ","))


def _utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


@dataclass
class DeviceEvents:
    """The events of one device's allocator, in order.

    Attributes:
        blocks: in use at the end, and not allocated by one of the events.
        allocated_bytes: in use before the first event.
        reserved_bytes: in segments before the first event.
        all_bytes: sum over all events, blocks and segments, an upper bound of every total.
        damaged, unknown: numbers of skipped events.
        ranges: begin and end in microseconds and name of what the program annotated, in order of the begins.
    """

    number: int
    events: list[SnapshotEvent] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    all_bytes: int = 0
    damaged: int = 0
    unknown: int = 0
    ranges: list[tuple[int, int, str]] = field(default_factory=list)

    @classmethod
    def read(
        cls, number: int, segments: list[dict[Any, Any]], entries: list[Any], stacks: Stacks, budget: Budget
    ) -> DeviceEvents:
        device = cls(number)
        for entry in entries:
            budget.spend("rows", 1)
            device._add(entry, stacks)
        at_end, reserved = _blocks_in_use(segments, stacks, budget)
        device.all_bytes = sum(event.size for event in device.events) + sum(block.size for block in at_end) + reserved
        live: set[int] = set()
        change = reserved_change = 0
        for event in device.events:
            sign = MEMORY_ACTIONS.get(event.action, 0)
            change += sign * event.size
            reserved_change += SEGMENT_ACTIONS.get(event.action, 0) * event.size
            if sign > 0:
                live.add(event.address)
            elif sign < 0:
                live.discard(event.address)
        device.blocks = [block for block in at_end if block.address not in live]
        device.allocated_bytes = max(sum(block.size for block in at_end) - change, sum(b.size for b in device.blocks))
        device.reserved_bytes = max(reserved - reserved_change, 0)
        return device

    def _add(self, entry: Any, stacks: Stacks) -> None:
        action = entry.get("action") if type(entry) is dict else None
        if type(action) is str and action in _PASSED_OVER:
            return
        size = _whole(entry.get("size"), LARGEST_SIZE) if type(entry) is dict else None
        if type(action) is not str or size is None:
            self.damaged += 1
            return
        if action not in MEMORY_ACTIONS and action not in SEGMENT_ACTIONS and action != OUT_OF_MEMORY:
            self.unknown += 1
            return
        address = 0 if action == OUT_OF_MEMORY else _whole(entry.get("addr"), 1 << 64)
        if address is None:
            self.damaged += 1
            return
        # Snapshots that torch converts from a profile have no times: space events a microsecond apart.
        time_us = _whole(entry.get("time_us"), _LATEST_US) or len(self.events) + 1
        free = _whole(entry.get("device_free"), LARGEST_SIZE)
        stack = stacks.number(entry.get("frames"))
        compiled = entry.get("compile_context")
        region = _utf8(compiled[:_LONGEST_ENTRY]) if type(compiled) is str and compiled not in _NOT_COMPILED else ""
        self.events.append(SnapshotEvent(time_us, action, address & _LARGEST_ADDRESS, size, stack, free, region))


def ranges_by_device(entries: Any, latest_us: int, budget: Budget) -> dict[int, list[tuple[int, int, str]]]:
    """What the program annotated, as in `DeviceEvents.ranges`; a range without an end lasts until `latest_us`."""
    found: dict[int, list[tuple[int, int, str]]] = {}
    begun: dict[tuple[int, str], list[int]] = {}
    for entry in entries if type(entries) is list else []:
        budget.spend("rows", 1)
        if type(entry) is not dict:
            continue
        name, stage, device = entry.get("name"), entry.get("stage"), entry.get("device", 0)
        time_us = _whole(entry.get("time_us"), _LATEST_US)
        if type(name) is not str or type(device) is not int or time_us is None:
            continue
        name = _utf8(name[:_LONGEST_NAME])
        if stage == "START":
            begun.setdefault((device, name), []).append(time_us)
        elif stage == "END" and begun.get((device, name)):
            found.setdefault(device, []).append((begun[device, name].pop(), time_us, name))
    for (device, name), times in begun.items():
        found.setdefault(device, []).extend((time_us, max(latest_us, time_us), name) for time_us in times)
    return {device: sorted(ranges) for device, ranges in found.items()}


def _compiled_ranges(events: list[SnapshotEvent]) -> list[tuple[int, int, str]]:
    """From the first to the last event of each run of a region of torch.compile."""
    runs = (list(run) for region, run in groupby(events, key=lambda event: event.compiled) if region)
    return [(run[0].time_us, run[-1].time_us, f"{COMPILED_REGION}{run[0].compiled}") for run in runs]


def segments_by_device(segments: list[Any], budget: Budget) -> dict[int, list[dict[Any, Any]]]:
    found: dict[int, list[dict[Any, Any]]] = {}
    for segment in segments:
        budget.spend("rows", 1)
        number = segment.get("device", 0) if type(segment) is dict else None
        if type(number) is int:
            found.setdefault(number, []).append(segment)
    return found


def _blocks_in_use(segments: list[dict[Any, Any]], stacks: Stacks, budget: Budget) -> tuple[list[Block], int]:
    """A device's blocks in use when the snapshot was taken, and the bytes of its segments."""
    found: list[Block] = []
    reserved = 0
    for segment in segments:
        reserved += _whole(segment.get("total_size"), LARGEST_SIZE) or 0
        address = _whole(segment.get("address"), 1 << 64) or 0
        blocks = segment.get("blocks")
        for block in blocks if type(blocks) is list else []:
            budget.spend("rows", 1)
            if type(block) is not dict:
                continue
            size = _whole(block.get("size"), LARGEST_SIZE) or 0
            begin = _whole(block.get("address"), 1 << 64)
            state = block.get("state")
            if type(state) is str and state.startswith("active"):
                frames, requested = _frames_and_size(block, size)
                place = (address if begin is None else begin) & _LARGEST_ADDRESS
                found.append(Block(place, requested, stacks.number(frames)))
            address += size
    return found, reserved


def _frames_and_size(block: dict[Any, Any], size: int) -> tuple[Any, int]:
    """A block's frames and requested bytes, which old snapshots keep in its history."""
    history = block.get("history")
    if type(history) is list and history and type(history[0]) is dict:
        return history[0].get("frames"), _whole(history[0].get("real_size"), LARGEST_SIZE) or size
    return block.get("frames"), _whole(block.get("requested_size"), LARGEST_SIZE) or size


def _whole(value: Any, limit: int) -> int | None:
    return value if type(value) is int and 0 <= value < limit else None


OUT_OF_MEMORY_NAME: Final = "out of memory"
DEVICE_FREE_NAME: Final = "device free"
FIRST_EVENT_NS: Final = 1_000
"""Time of the first event; blocks allocated before it are at 0."""
_LARGEST_TOTAL: Final = 1 << 62
COMPILED_REGION: Final = "torch.compile: "
"""Begins the names of annotations for regions of torch.compile."""
_THERE_BEFORE: Final = "there before"
_RANGE_SCHEMA: Final = {"time_us": pl.Int64, "end_us": pl.Int64, "name": pl.String}
_EVENT_SCHEMA: Final = {
    "time_us": pl.Int64,
    "action": pl.String,
    "address": pl.Int64,
    "size": pl.Int64,
    "stack": pl.Int64,
    "free_bytes": pl.Int64,
    "compiled": pl.String,
}


def write_tables(
    writer: StoreWriter, devices: list[DeviceEvents], stacks: Stacks, origin_us: int, window: Window | None
) -> None:
    """Write lanes, memory, launches, annotations and counters, with times relative to `origin_us`.

    Args:
        origin_us: the time of the first event of any device.
    """
    lanes = [
        {
            "lane": lane,
            "kind": "other",
            "process": str(device.number),
            "thread": "allocator",
            "name": f"allocator of device {device.number}",
            "device": str(device.number),
        }
        for lane, device in enumerate(devices)
    ]
    writer.write_part("lanes", conform("lanes", pl.DataFrame(lanes)))
    texts = pl.Series(stacks.texts, dtype=pl.String)
    tables = [_tables(lane, device, texts, origin_us) for lane, device in enumerate(devices)]
    for table in ("memory", "launches", "annotations", "counters"):
        rows = pl.concat([conform(table, found[table]) for found in tables]).sort("start_ns", maintain_order=True)
        if window is not None:
            rows = rows.filter(pl.col("start_ns").is_between(window.start_ns, window.end_ns, closed="left"))
        for first in range(0, rows.height, PART_ROWS):
            writer.write_part(table, rows.slice(first, PART_ROWS))


def _tables(lane: int, device: DeviceEvents, texts: pl.Series, origin_us: int) -> dict[str, pl.DataFrame]:
    """Memory with the totals after each allocation and free, driver calls, failed requests, and free device memory."""
    before = [SnapshotEvent(0, _THERE_BEFORE, block.address, block.size, block.stack, None) for block in device.blocks]
    held_before = device.allocated_bytes - sum(block.size for block in device.blocks)
    action, size = pl.col("action"), pl.col("size")
    change = size * action.replace_strict({_THERE_BEFORE: 1, **MEMORY_ACTIONS}, default=None, return_dtype=pl.Int64)
    reserved = size * action.replace_strict(SEGMENT_ACTIONS, default=0, return_dtype=pl.Int64)
    since_first_us = (pl.col("time_us") - origin_us).clip(lower_bound=0)
    rows = rows_frame([*before, *device.events], _EVENT_SCHEMA)
    stack = rows.select(pl.when(pl.col("stack") >= 0).then("stack")).to_series()
    rows = rows.with_columns(
        texts.gather(stack).alias("call_stack"),
        start_ns=pl.when(action == _THERE_BEFORE).then(0).otherwise(since_first_us * 1000 + FIRST_EVENT_NS),
        duration_ns=pl.lit(0),
        lane=pl.lit(lane),
        device=pl.lit(str(device.number)),
        bytes=change,
        total_allocated=(held_before + change.fill_null(0).cum_sum()).clip(0, _LARGEST_TOTAL),
        total_reserved=(device.reserved_bytes + reserved.cum_sum()).clip(0, _LARGEST_TOTAL),
    )
    calls = rows.filter(action.is_in([*SEGMENT_ACTIONS, OUT_OF_MEMORY]))
    name = pl.when(action == OUT_OF_MEMORY).then(pl.lit(OUT_OF_MEMORY_NAME)).otherwise(action)
    failures = calls.filter(action == OUT_OF_MEMORY)
    free = failures.drop_nulls("free_bytes")
    ranges = rows_frame(sorted([*device.ranges, *_compiled_ranges(device.events)]), _RANGE_SCHEMA)
    begin = (pl.col("time_us") - origin_us).clip(lower_bound=0) * 1000 + FIRST_EVENT_NS
    annotations = ranges.select(
        "name",
        start_ns=begin,
        duration_ns=(pl.col("end_us") - pl.max_horizontal("time_us", origin_us)).clip(lower_bound=0) * 1000,
        lane=pl.lit(lane),
        kind=pl.lit("host"),
        step=pl.Series([step_number(name) for name in ranges["name"]], dtype=pl.Int64),
    )
    failed = failures.with_columns(name=name, kind=pl.lit("device"))
    return {
        "memory": rows.filter(pl.col("bytes").is_not_null()),
        "launches": calls.drop("call_stack").with_columns(name=name, kind=pl.lit("allocate"), bytes="size"),
        "annotations": pl.concat([conform("annotations", failed), conform("annotations", annotations)]),
        "counters": free.with_columns(name=pl.lit(DEVICE_FREE_NAME), series=pl.lit(""), value="free_bytes"),
    }


MOST_DEVICES: Final = 1024
MOST_BYTES: Final = 1 << 61
"""Limit for the bytes of all events together; sums are kept in 64 bits."""

_EPOCH_US: Final = 10**15
"""Smaller times do not count from 1970."""
_PARTS: Final = ("segments", "device_traces")


def recognises(head: bytes) -> bool:
    """Whether a file starts like a pickle, or like a snapshot as JSON."""
    if head.startswith(PICKLES):
        return True
    text = text_of(head)[:4096]
    begins = text.startswith(b"{") and b'"traceEvents"' not in text
    return begins and any(f'"{part}"'.encode() in text for part in _PARTS)


def read(source: ByteSource, writer: StoreWriter, window: Window | None, steps: StepRange | None) -> ReadResult:
    """Read a snapshot into the tables of `writer`: memory events with call stacks, driver calls and failed requests.

    Raises:
        NotATraceError: it is not a snapshot, or holds more than plain values.
        UsageError: steps were requested, which a snapshot does not have.
    """
    content = plain_value(b"".join(source.blocks()), source.name, "looks like a memory snapshot as JSON")
    if steps is not None:
        raise UsageError(f"{source.name} is a memory snapshot, which has no steps: choose a part of it with --window")
    segments, traces, annotated = _checked(content, source.name)
    stacks = Stacks()
    budget = current()
    parts = segments_by_device(segments, budget)
    devices = [
        DeviceEvents.read(number, parts.get(number, []), events, stacks, budget) for number, events in enumerate(traces)
    ]
    latest_us = max((event.time_us for device in devices for event in device.events), default=0)
    ranges = ranges_by_device(annotated, latest_us, budget)
    for device in devices:
        device.ranges = ranges.get(device.number, [])
    if sum(device.all_bytes for device in devices) > MOST_BYTES:
        raise NotATraceError(f"{source.name} is not a memory snapshot: it lists more memory than can exist")
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


def _checked(content: Plain, name: str) -> tuple[list[Any], list[list[Any]], Any]:
    """Segments, each device's events, and annotations; `torch.cuda.memory_snapshot()` returns only the segments."""
    if isinstance(content, list):
        content = {"segments": content, "device_traces": []}
    if not isinstance(content, dict) or not any(part in content for part in _PARTS):
        what = "a value" if not isinstance(content, dict) else "a dictionary"
        raise NotATraceError(
            f"{name} is {what} of Python, but not a memory snapshot: it has neither 'segments' nor 'device_traces'"
        )
    segments, traces = content.get("segments", []), content.get("device_traces", [])
    if not isinstance(segments, list) or not isinstance(traces, list):
        raise NotATraceError(f"{name} is not a memory snapshot: its 'segments' or 'device_traces' is not a list")
    if len(traces) > MOST_DEVICES:
        raise NotATraceError(f"{name} is not a memory snapshot: it lists {len(traces):,} devices")
    traces = [events if isinstance(events, list) else [] for events in traces]
    numbers = [each.get("device", 0) for each in segments if isinstance(each, dict)]
    count = max(
        [len(traces), *(number + 1 for number in numbers if isinstance(number, int) and 0 <= number < MOST_DEVICES)]
    )
    return segments, traces + [[]] * (count - len(traces)), content.get("external_annotations")


def _warnings(source: ByteSource, devices: list[DeviceEvents], stacks: Stacks) -> tuple[TraceWarning, ...]:
    damaged = sum(device.damaged for device in devices)
    found = {
        "call_stacks_left_out": (stacks.left_out, "call stacks were left out, because there was too much text in them"),
        "damaged_event": (damaged, "events without an action, address or size were skipped"),
        "unknown_event": (sum(device.unknown for device in devices), "events of an unknown kind were skipped"),
        "compressed_data": (int(source.damage is not None), f"{source.damage}; what could be unpacked was read"),
    }
    return tuple(TraceWarning(kind, count, detail) for kind, (count, detail) in found.items() if count)


READER: Final = Reader("torch_snapshot", recognises, read)
