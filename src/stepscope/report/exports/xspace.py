"""A trace as an XSpace, the profile format of XLA's tools: TensorBoard with xprof opens the folder that holds it.

Each device is a plane "/device:GPU:N" with a line per stream; host threads are the lines of "/host:CPU". A launch and
the work it launched share their `correlation_id`; step annotations carry `step_num` and `_r`, by which xprof finds
the steps. The format has no place for memory, counters and source lines.

Source of the fields and their numbers: openxla/xla, third_party/tsl/tsl/profiler/protobuf/xplane.proto.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any, Final

import polars as pl

from stepscope.readers.event_names import host_slice_table
from stepscope.report.exports.chrome import by_value, identifier
from stepscope.trace import Trace
from stepscope.trace.metadata import Device
from stepscope.trace.protobuf_fields import beginning, double, message, text, whole

_PIECE_BYTES: Final = 2**20
_MEMORY_BYTES: Final = 64 * 2**20
_HOST_TABLES: Final = ("annotations", "frames", "operators", "launches")
_COPY_ENDS: Final = {
    "copy_in": "kind_src:pinned kind_dst:device",
    "copy_out": "kind_src:device kind_dst:pinned",
    "copy_on_device": "kind_src:device kind_dst:device",
}
_UNNAMED: Final = "(no name)"


def xspace(trace: Trace) -> Iterator[bytes]:
    """Yield the pieces of the message, in order."""
    for number, device in enumerate(_devices(trace)):
        yield from _plane(_device_plane(trace, device, number))
    yield from _plane(_host_plane(trace))
    yield from _plane(_environment(trace))
    yield text(4, trace.metadata.host or "localhost")


def _devices(trace: Trace) -> list[str]:
    devices = trace.scan("device_work").select("device").unique().collect()["device"].drop_nulls().to_list()
    return sorted(devices, key=lambda device: (not device.isdecimal(), len(device), device))


class _Plane:
    """A plane being written: names and strings are stored once, long lines spill to disk."""

    def __init__(self, name: str) -> None:
        self._head = text(2, name)
        self._lines: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=_MEMORY_BYTES)  # noqa: SIM115 - kept open
        self._length = 0
        self._events: dict[str, int] = {}
        self._stats: dict[str, int] = {}
        self._own_stats: list[bytes] = []

    def event(self, name: str) -> bytes:
        return whole(1, self._events.setdefault(name, len(self._events) + 1))

    def stat(self, name: str, value: int | float | str, field: int = 4) -> bytes:
        """One stat, as field 4 of an event by default; text is stored once."""
        head = whole(1, self._number(name))
        if isinstance(value, str):
            content = head + whole(7, self._number(value))
        elif isinstance(value, float):
            content = head + double(2, value)
        else:
            content = head + whole(4, value)
        return message(field, content)

    def _number(self, word: str) -> int:
        return self._stats.setdefault(word, len(self._stats) + 1)

    def about(self, name: str, value: int | float | str | None) -> None:
        if value is not None:
            self._own_stats.append(self.stat(name, value, field=6))

    def line(self, identity: int, name: str, events: Iterator[bytes]) -> None:
        """Add a line with these events, each a whole message."""
        content = tempfile.SpooledTemporaryFile(max_size=_MEMORY_BYTES)  # noqa: SIM115 - closed below
        with content:
            length = content.write(whole(1, identity) + text(2, name) + text(11, name))
            for event in events:
                length += content.write(message(4, event))
            content.seek(0)
            self._length += self._lines.write(beginning(3, length))
            for piece in _pieces(content):
                self._length += self._lines.write(piece)

    def pieces(self) -> Iterator[bytes]:
        tables = [_entry(4, number, name) for name, number in self._events.items()]
        tables += [_entry(5, number, name) for name, number in self._stats.items()]
        rest = self._head + b"".join(tables) + b"".join(self._own_stats)
        yield beginning(1, len(rest) + self._length) + rest
        self._lines.seek(0)
        yield from _pieces(self._lines)
        self._lines.close()


def _entry(field: int, number: int, name: str) -> bytes:
    """An entry of a plane's map from numbers to names."""
    return message(field, whole(1, number) + message(2, whole(1, number) + text(2, name)))


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(_PIECE_BYTES):
        yield piece


def _plane(plane: _Plane) -> Iterator[bytes]:
    yield from plane.pieces()


def _events(
    plane: _Plane, rows: pl.DataFrame, stats: Callable[[_Plane, dict[str, Any]], list[bytes]]
) -> Iterator[bytes]:
    for row in rows.iter_rows(named=True):
        times = whole(2, row["start_ns"] * 1000) + whole(3, row["duration_ns"] * 1000)
        yield plane.event(row["name"] or _UNNAMED) + times + b"".join(stats(plane, row))


def _device_plane(trace: Trace, device: str, number: int) -> _Plane:
    ordinal = int(device) if device.isdecimal() and len(device) < 10 else number
    plane = _Plane(f"/device:GPU:{ordinal}")
    known = next((each for each in trace.metadata.devices if each.device == device), Device(device))
    major, _, minor = (known.compute_capability or "").partition(".")
    plane.about("device_vendor", _vendor(trace))
    plane.about("device_type_string", known.name)
    plane.about("memory_size", known.memory_bytes)
    plane.about("core_count", known.multiprocessors)
    plane.about("compute_cap_major", int(major) if major.isdecimal() else None)
    plane.about("compute_cap_minor", int(minor) if minor.isdecimal() else None)
    work = trace.scan("device_work").filter(pl.col("device") == device)
    for lane in work.select("lane").unique().collect()["lane"].sort().to_list():
        rows = work.filter(pl.col("lane") == lane).collect()
        queue = rows["queue"][0] or str(lane)
        told = identifier(queue)
        kinds = "Memcpy" if rows["kind"].str.starts_with("copy").all() else "Kernel"
        identity = told if isinstance(told, int) else lane
        plane.line(identity, f"Stream #{queue}({kinds})", _events(plane, rows, _work_stats))
    return plane


def _vendor(trace: Trace) -> str | None:
    """The vendor whose API launched the work, which xprof asks for."""
    names = trace.scan("launches").select("name").unique().collect()["name"]
    for vendor, prefix in (("AMD", "hip"), ("Nvidia", "cu")):
        if names.str.starts_with(prefix).any():
            return vendor
    return None


def _work_stats(plane: _Plane, row: dict[str, Any]) -> list[bytes]:
    stats = [] if row["correlation"] is None else [plane.stat("correlation_id", row["correlation"])]
    if row["kind"] in _COPY_ENDS and row["bytes"] is not None:
        stats.append(plane.stat("memcpy_details", f"{_COPY_ENDS[row['kind']]} size:{row['bytes']} dest:0 async:1"))
    elif row["kind"] == "set" and row["bytes"] is not None:
        stats.append(plane.stat("memset_details", f"kind:device size:{row['bytes']} value:0 async:1"))
    elif row["grid"] is not None and row["block"] is not None:
        grid, block = (row[name].strip("[]").replace(" ", "") for name in ("grid", "block"))
        occupancy = 100 * (row["occupancy"] or 0.0)
        details = (
            f"regs:{row['registers'] or 0} static_shared:{row['shared_memory_bytes'] or 0} dynamic_shared:0 "
            f"grid:{grid} block:{block} occ_pct:{occupancy:g}"
        )
        stats.append(plane.stat("kernel_details", details))
    return stats


def _host_plane(trace: Trace) -> _Plane:
    plane = _Plane("/host:CPU")
    numbers = set()
    for lane in trace.lanes.filter(pl.col("kind") == "host_thread").iter_rows(named=True):
        rows = pl.concat([_host_rows(trace, table, lane["lane"]) for table in _HOST_TABLES])
        if rows.is_empty():
            continue
        rows = rows.sort("start_ns", "duration_ns", descending=[False, True], maintain_order=True)
        told = identifier(lane["thread"] or "")
        identity = told if isinstance(told, int) and told not in numbers else 2**62 + lane["lane"]
        numbers.add(identity)
        name = f"{lane['name'] or 'thread'}"
        plane.line(identity, name, _events(plane, rows, _host_stats))
    return plane


def _host_rows(trace: Trace, table: str, lane: int) -> pl.DataFrame:
    rows = trace.scan(table).filter(pl.col("lane") == lane)
    if table == "annotations":
        rows = rows.filter(pl.col("kind") == "host")
    schema = rows.collect_schema()
    columns = {"correlation": pl.Int64, "step": pl.Int64, "input_shapes": pl.String}
    found = rows.select(
        "start_ns",
        "duration_ns",
        "name",
        *(pl.col(name) if name in schema else pl.lit(None, dtype).alias(name) for name, dtype in columns.items()),
    ).collect()
    if table == "frames":
        found = found.with_columns(name=by_value(found["name"], _frame_name, pl.String))
    return found


def _frame_name(name: str) -> str:
    """Mark a Python frame with "$" as JAX does, unless its name already shows that it is one."""
    return name if host_slice_table(name) == "frames" else f"${name}"


def _host_stats(plane: _Plane, row: dict[str, Any]) -> list[bytes]:
    stats = [] if row["correlation"] is None else [plane.stat("correlation_id", row["correlation"])]
    if row["step"] is not None:
        stats += [plane.stat("step_num", row["step"]), plane.stat("_r", 1)]
    if row["input_shapes"] is not None:
        stats.append(plane.stat("shape", row["input_shapes"]))
    return stats


def _environment(trace: Trace) -> _Plane:
    plane = _Plane("Task Environment")
    origin_ns = trace.metadata.origin_unix_ns or 0
    ends = [
        trace.scan(table).select((pl.col("start_ns") + pl.col("duration_ns")).max()).collect().item()
        for table in (*_HOST_TABLES, "device_work")
    ]
    plane.about("profile_start_time", origin_ns)
    plane.about("profile_stop_time", origin_ns + max((end for end in ends if end is not None), default=0))
    return plane
