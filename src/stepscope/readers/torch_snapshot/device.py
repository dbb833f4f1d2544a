"""One device's part of a snapshot: its events in order, its blocks at the end, and what follows for every moment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import polars as pl

from stepscope.readers.budget import Budget
from stepscope.trace.store import PART_ROWS, StoreWriter
from stepscope.trace.tables import conform
from stepscope.trace.window import Window

LARGEST_SIZE: Final = 1 << 50
MEMORY_ACTIONS: Final = {"alloc": 1, "free_completed": -1, "free": -1}
"""Action -> what it does to the allocated bytes. A block whose return was only requested is still in use."""
SEGMENT_ACTIONS: Final = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
"""Action -> what it does to the reserved bytes."""
OUT_OF_MEMORY: Final = "oom"

_PASSED_OVER: Final = frozenset({"free_requested", "snapshot", "user_defined", "workspace_snapshot"})
_LARGEST_ADDRESS: Final = (1 << 63) - 1
_LATEST_US: Final = 1 << 53
_MOST_FRAMES: Final = 64
_LONGEST_ENTRY: Final = 400
_LONGEST_NAME: Final = 4_000
_MOST_STACK_BYTES: Final = 256 << 20


class SnapshotEvent(NamedTuple):
    """One event; `stack` is a number in `Stacks`, -1 for none, and `free_bytes` what the driver had left."""

    time_us: int
    action: str
    address: int
    size: int
    stack: int
    free_bytes: int | None


class Block(NamedTuple):
    """A block in use when the snapshot was taken."""

    address: int
    size: int
    stack: int


class Stacks:
    """The different call stacks, each as "file(line): function" of its frames, innermost first, separated by ";".

    Attributes:
        texts: by number.
        left_out: call stacks that were not kept, because there was too much of them.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.left_out = 0
        self._by_list: dict[int, int] = {}
        self._by_text: dict[str, int] = {}
        self._bytes = 0

    def number(self, frames: Any) -> int:
        """The number of these frames' stack; -1 where no frame of Python is among them.

        Lists of frames stand in several events; they must live as long as this object is asked.
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
    """A frame of Python, or of the autograd engine, as "file(line): function"; "" for another."""
    if type(frame) is not dict:
        return ""
    file, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
    if type(file) is not str or type(name) is not str or type(line) is not int:
        return ""
    name = name[:_LONGEST_NAME]  # one text may stand in a million frames
    if file == "none":  # snapshots that torch makes of a profile have all in the name
        text = name
    elif file.endswith(".py") or file.startswith("<") or "autograd::Engine" in name:
        text = f"{file[-_LONGEST_ENTRY:]}({min(max(line, 0), 10**8)}): {name}"
    else:
        return ""
    return text[:_LONGEST_ENTRY].replace(";", ",").encode("utf-8", "replace").decode()


@dataclass
class DeviceEvents:
    """The events of one device's allocator.

    Attributes:
        number: of the device.
        events: in the order in which they happened.
        blocks: in use at the end, and not allocated by one of the events.
        allocated_bytes: in use before the first event.
        reserved_bytes: in segments before the first event.
        all_bytes: of all events, blocks and segments together, which no sum over some of them passes.
        damaged, unknown: events that were passed over.
    """

    number: int
    events: list[SnapshotEvent] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    all_bytes: int = 0
    damaged: int = 0
    unknown: int = 0

    @classmethod
    def read(
        cls, number: int, segments: list[dict[Any, Any]], entries: list[Any], stacks: Stacks, budget: Budget
    ) -> DeviceEvents:
        """What a snapshot says of one device, whose segments these are."""
        device = cls(number)
        for entry in entries:
            budget.spend("rows", 1)
            device._add(entry, stacks)
        at_end, reserved = _at_end(segments, stacks, budget)
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
        # Without times, as in snapshots that torch makes of a profile, events are a microsecond apart.
        time_us = _whole(entry.get("time_us"), _LATEST_US) or len(self.events) + 1
        free = _whole(entry.get("device_free"), LARGEST_SIZE)
        stack = stacks.number(entry.get("frames"))
        self.events.append(SnapshotEvent(time_us, action, address & _LARGEST_ADDRESS, size, stack, free))


def segments_by_device(segments: list[Any], budget: Budget) -> dict[int, list[dict[Any, Any]]]:
    """The segments of each device's number."""
    found: dict[int, list[dict[Any, Any]]] = {}
    for segment in segments:
        budget.spend("rows", 1)
        number = segment.get("device", 0) if type(segment) is dict else None
        if type(number) is int:
            found.setdefault(number, []).append(segment)
    return found


def _at_end(segments: list[dict[Any, Any]], stacks: Stacks, budget: Budget) -> tuple[list[Block], int]:
    """A device's blocks in use when the snapshot was taken, and what its segments hold in all."""
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
                frames, requested = _of_block(block, size)
                place = (address if begin is None else begin) & _LARGEST_ADDRESS
                found.append(Block(place, requested, stacks.number(frames)))
            address += size
    return found, reserved


def _of_block(block: dict[Any, Any], size: int) -> tuple[Any, int]:
    """A block's frames and the bytes that were asked for, in old snapshots by its history."""
    history = block.get("history")
    if type(history) is list and history and type(history[0]) is dict:
        return history[0].get("frames"), _whole(history[0].get("real_size"), LARGEST_SIZE) or size
    return block.get("frames"), _whole(block.get("requested_size"), LARGEST_SIZE) or size


def _whole(value: Any, limit: int) -> int | None:
    return value if type(value) is int and 0 <= value < limit else None


OUT_OF_MEMORY_NAME: Final = "out of memory"
DEVICE_FREE_NAME: Final = "device free"
FIRST_EVENT_NS: Final = 1_000
"""What was there before the first event stands before it, at 0."""
_LARGEST_TOTAL: Final = 1 << 62


def write_tables(
    writer: StoreWriter, devices: list[DeviceEvents], stacks: Stacks, origin_us: int, window: Window | None
) -> None:
    """Write lanes, memory, launches, annotations and counters.

    Args:
        origin_us: the first event's time.
        window: what is wanted of it.
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
    parts: dict[str, list[pl.DataFrame]] = {"memory": [], "launches": [], "annotations": [], "counters": []}
    for lane, device in enumerate(devices):
        parts["memory"].append(_memory(lane, device, texts, origin_us))
        for table, frame in _others(lane, device, texts, origin_us).items():
            parts[table].append(frame)
    for table, frames in parts.items():
        rows = pl.concat(frames).sort("start_ns", maintain_order=True)
        if window is not None:
            rows = rows.filter(pl.col("start_ns").is_between(window.start_ns, window.end_ns, closed="left"))
        for first in range(0, rows.height, PART_ROWS):
            writer.write_part(table, rows.slice(first, PART_ROWS))


def _time(time_us: int, origin_us: int) -> int:
    return max(time_us - origin_us, 0) * 1_000 + FIRST_EVENT_NS


def _memory(lane: int, device: DeviceEvents, texts: pl.Series, origin_us: int) -> pl.DataFrame:
    """Every block handed out or given back, after those that were there before, with the totals after each."""
    start, address, size, stack, allocated, reserved = ([] for _ in range(6))  # type: ignore[var-annotated]
    held = device.allocated_bytes - sum(block.size for block in device.blocks)
    for block in device.blocks:
        held += block.size
        for column, value in zip(
            (start, address, size, stack, allocated, reserved),
            (0, block.address, block.size, block.stack, held, device.reserved_bytes),
            strict=True,
        ):
            column.append(value)
    in_segments = device.reserved_bytes
    for event in device.events:
        in_segments += SEGMENT_ACTIONS.get(event.action, 0) * event.size
        sign = MEMORY_ACTIONS.get(event.action)
        if sign is None:
            continue
        held += sign * event.size
        start.append(_time(event.time_us, origin_us))
        address.append(event.address)
        size.append(sign * event.size)
        stack.append(event.stack)
        allocated.append(min(max(held, 0), _LARGEST_TOTAL))
        reserved.append(min(max(in_segments, 0), _LARGEST_TOTAL))
    frame = pl.DataFrame(
        {
            "start_ns": start,
            "address": address,
            "bytes": size,
            "total_allocated": allocated,
            "total_reserved": reserved,
        },
        schema=dict.fromkeys(("start_ns", "address", "bytes", "total_allocated", "total_reserved"), pl.Int64),
    )
    return conform("memory", frame.with_columns(_texts(texts, stack), lane=lane, device=pl.lit(str(device.number))))


def _others(lane: int, device: DeviceEvents, texts: pl.Series, origin_us: int) -> dict[str, pl.DataFrame]:
    """Calls of the driver and requests that failed."""
    launches: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    counters: list[dict[str, Any]] = []
    stacks: list[int] = []
    for event in device.events:
        failed = event.action == OUT_OF_MEMORY
        if not failed and event.action not in SEGMENT_ACTIONS:
            continue
        slice_ = {"start_ns": _time(event.time_us, origin_us), "duration_ns": 0, "lane": lane}
        name = OUT_OF_MEMORY_NAME if failed else event.action
        launches.append({**slice_, "name": name, "kind": "allocate", "bytes": event.size})
        if failed:
            annotations.append({**slice_, "name": name, "kind": "device"})
            stacks.append(event.stack)
        if failed and event.free_bytes is not None:
            series = {"name": DEVICE_FREE_NAME, "series": "", "value": float(event.free_bytes)}
            counters.append({"start_ns": slice_["start_ns"], "lane": lane, **series})
    failures = pl.DataFrame(annotations)
    if failures.width:
        failures = failures.with_columns(_texts(texts, stacks))
    return {
        "launches": conform("launches", pl.DataFrame(launches)),
        "annotations": conform("annotations", failures),
        "counters": conform("counters", pl.DataFrame(counters)),
    }


def _texts(texts: pl.Series, numbers: Iterable[int]) -> pl.Series:
    """The call stacks of these numbers, null for -1."""
    index = pl.Series("at", list(numbers), dtype=pl.Int64)
    known = pl.select(pl.when(index >= 0).then(index)).to_series()
    return texts.gather(known).alias("call_stack")
