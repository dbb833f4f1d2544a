"""The events of a snapshot as the tables of a trace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import polars as pl

from stepscope.readers.torch_snapshot.device import (
    MEMORY_ACTIONS,
    OUT_OF_MEMORY,
    SEGMENT_ACTIONS,
    DeviceEvents,
    Stacks,
)
from stepscope.trace.store import PART_ROWS, StoreWriter
from stepscope.trace.tables import conform
from stepscope.trace.window import Window

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
