"""Traces written down slice by slice, for tests whose expected values are literals."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from stepscope.trace import Metadata, Trace, TraceWarning
from stepscope.trace.tables import SCHEMAS


@dataclass
class Recording:
    """What a profiler saw. Times are in units of so many nanoseconds; parents and launching operators follow from them.

    Lane 0 is the main thread of process 1. `trace()` sorts the tables and checks their promises.
    """

    metadata: Metadata = field(default_factory=Metadata)
    warnings: tuple[TraceWarning, ...] = ()
    unit_ns: int = 1
    _rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {name: [] for name in SCHEMAS})

    def __post_init__(self) -> None:
        self.thread("1")

    def thread(self, thread: str, process: str = "1", name: str = "") -> int:
        """A further host thread's lane."""
        return self._lane(kind="host_thread", process=process, thread=thread, name=name or f"thread {thread}")

    def queue(self, queue: str = "7", device: str = "0") -> int:
        """A device queue's lane, made at its first mention."""
        for row in self._rows["lanes"]:
            if (row.get("device"), row.get("queue")) == (device, queue):
                return int(row["lane"])
        return self._lane(kind="queue", process=device, thread=queue, device=device, queue=queue)

    def allocator(self, device: str = "0") -> int:
        """The lane of a device's allocator in a memory snapshot."""
        return self._lane(kind="other", name=f"allocator of device {device}", device=device)

    def _lane(self, **columns: str) -> int:
        lane = len(self._rows["lanes"])
        self._rows["lanes"].append({"lane": lane, **columns})
        return lane

    def operator(self, start_ns: int, duration_ns: int, name: str, lane: int = 0, **more: Any) -> None:
        self._slice("operators", start_ns, duration_ns, name, lane, more)

    def frame(self, start_ns: int, duration_ns: int, name: str, lane: int = 0, **more: Any) -> None:
        """A Python frame called "file(line): function"."""
        file, _, rest = name.partition("(")
        line, _, function = rest.partition("): ")
        parts = {"file": file, "line": int(line), "function": function} if function else {}
        self._slice("frames", start_ns, duration_ns, name, lane, {**parts, **more})

    def line(self, start_ns: int, duration_ns: int, name: str, lane: int = 0) -> None:
        """A line of the user's code, called "file(line): function"."""
        file, _, rest = name.partition("(")
        number, _, function = rest.partition("): ")
        parts = {"file": file, "line": int(number), "function": function}
        self._slice("lines", start_ns, duration_ns, name, lane, parts)

    def module(self, start_ns: int, duration_ns: int, name: str, lane: int = 0, **more: Any) -> None:
        """A call of a module, by its qualified name."""
        self._slice("modules", start_ns, duration_ns, name, lane, more)

    def link(self, source: int, target: int) -> None:
        """From a forward operator to its backward node, by their rows."""
        self._rows["links"].append({"kind": "forward_backward", "source": source, "target": target})

    def annotation(self, start_ns: int, duration_ns: int, name: str, lane: int = 0, **more: Any) -> None:
        self._slice("annotations", start_ns, duration_ns, name, lane, {"kind": "host", **more})

    def step(self, start_ns: int, duration_ns: int, number: int, lane: int = 0) -> None:
        self.annotation(start_ns, duration_ns, f"ProfilerStep#{number}", lane, step=number)

    def launch(
        self,
        start_ns: int,
        duration_ns: int,
        correlation: int,
        lane: int = 0,
        name: str = "cudaLaunchKernel",
        kind: str = "launch",
    ) -> None:
        more = {"kind": kind, "correlation": correlation}
        self._slice("launches", start_ns, duration_ns, name, lane, more)

    def work(
        self,
        start_ns: int,
        duration_ns: int,
        name: str,
        correlation: int | None = None,
        *,
        queue: str = "7",
        device: str = "0",
        kind: str = "compute",
        **more: Any,
    ) -> None:
        """Device work, launched by the call of the same correlation."""
        lane = self.queue(queue, device)
        columns = {"kind": kind, "device": device, "queue": queue, "correlation": correlation, **more}
        self._slice("device_work", start_ns, duration_ns, name, lane, columns)

    def launched(self, call_ns: int, start_ns: int, duration_ns: int, name: str, correlation: int, **more: Any) -> None:
        """A launch call of 2 ns with its work."""
        self.launch(call_ns, 2, correlation)
        self.work(start_ns, duration_ns, name, correlation, **more)

    def allocation(self, start_ns: int, byte_count: int, lane: int = 0, **more: Any) -> None:
        """A block handed out, or given back where the number of bytes is negative."""
        self._rows["memory"].append({"start_ns": start_ns, "lane": lane, "device": "0", "bytes": byte_count, **more})

    def block(self, start_ns: int, end_ns: int | None, byte_count: int, lane: int = 0, **more: Any) -> None:
        """A block at an address of its own, given back at `end_ns` if it is."""
        address = 4096 * (len(self._rows["memory"]) + 1)
        self.allocation(start_ns, byte_count, lane, address=address, **more)
        if end_ns is not None:
            self.allocation(end_ns, -byte_count, lane, address=address, **more)

    def out_of_memory(self, start_ns: int, asked: int, free: int | None, lane: int, call_stack: str) -> None:
        """A request for memory of a device that failed, as a memory snapshot tells of it."""
        name, call = "out of memory", {"kind": "allocate", "bytes": asked, "correlation": None}
        self._slice("launches", start_ns, 0, name, lane, call)
        self._slice("annotations", start_ns, 0, name, lane, {"kind": "device", "call_stack": call_stack})
        if free is not None:
            counter = {"start_ns": start_ns, "lane": lane, "name": "device free", "value": free}
            self._rows["counters"].append(counter)

    def _slice(self, table: str, start_ns: int, duration_ns: int, name: str, lane: int, more: dict[str, Any]) -> None:
        times = {"start_ns": start_ns * self.unit_ns, "duration_ns": duration_ns * self.unit_ns}
        self._rows[table].append({**times, "name": name, "lane": lane, **more})

    def trace(self) -> Trace:
        for name, rows in self._rows.items():
            if name not in ("lanes", "links"):
                rows.sort(key=lambda row: (row["start_ns"], -row.get("duration_ns", 0)))
        operators, frames = self._rows["operators"], self._rows["frames"]
        for inner, outer, column in (
            (operators, operators, "parent"),
            (frames, frames, "parent"),
            (self._rows["launches"], operators, "operator"),
        ):
            for row, around in zip(inner, _around(inner, outer), strict=True):
                row[column] = around
        calls = {row["correlation"]: number for number, row in enumerate(self._rows["launches"])}
        for row in self._rows["device_work"]:
            row["launch"] = calls.get(row["correlation"])
        tables = {
            name: pl.DataFrame(rows, schema={column: SCHEMAS[name][column] for column in _columns(rows, name)})
            for name, rows in self._rows.items()
            if rows
        }
        trace = Trace.from_tables(tables, self.metadata, self.warnings)
        trace.check()
        return trace


def saved(folder: Path, trace: Trace, name: str = "trace") -> str:
    """Where the trace was saved, as a command takes it."""
    trace.save(folder / name)
    return str(folder / name)


def _columns(rows: list[dict[str, Any]], table: str) -> list[str]:
    used = {column for row in rows for column in row}
    assert used <= set(SCHEMAS[table]), used - set(SCHEMAS[table])
    return [column for column in SCHEMAS[table] if column in used]


def _around(inner: list[dict[str, Any]], outer: list[dict[str, Any]]) -> list[int | None]:
    """For each row of `inner` the innermost of `outer` that is open when it starts; both are sorted."""
    found, following = [], 0
    by_lane: dict[int, list[int]] = {}
    for row in inner:
        now = row["start_ns"]
        while following < len(outer) and outer[following] is not row and outer[following]["start_ns"] <= now:
            by_lane.setdefault(outer[following]["lane"], []).append(following)
            following += 1
        is_open = [
            number
            for number in by_lane.get(row["lane"], ())
            if now < outer[number]["start_ns"] + outer[number]["duration_ns"]
        ]
        by_lane[row["lane"]] = is_open
        found.append(is_open[-1] if is_open else None)
    return found
