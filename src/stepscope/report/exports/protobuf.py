"""A trace as protobuf: a Perfetto trace, exact to the nanosecond, or an XSpace for TensorBoard with xprof.

Perfetto: docs/formats/perfetto.md describes the file. The numbers of fields are those of Perfetto's own definitions:
https://github.com/google/perfetto/tree/main/protos/perfetto/trace

XSpace: TensorBoard opens the folder that holds it. Each device is a plane "/device:GPU:N" with a line per stream; host
threads are the lines of "/host:CPU". A launch and the work it launched share their `correlation_id`; step annotations
carry `step_num` and `_r`, by which xprof finds the steps. The format has no place for memory, counters and source
lines. Source of the fields and their numbers: openxla/xla, third_party/tsl/tsl/profiler/protobuf/xplane.proto.
"""

from __future__ import annotations

import heapq
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.readers.perfetto.events import ANNOTATIONS, MEMORY_NAME, category
from stepscope.report.exports.chrome import by_value, identifier
from stepscope.report.tables import parts
from stepscope.trace import Trace
from stepscope.trace.metadata import Device
from stepscope.trace.naming import host_slice_table
from stepscope.trace.nesting import Rows, parents
from stepscope.trace.protobuf_fields import beginning, double, fixed64, message, text, varint, whole
from stepscope.trace.tables import SCHEMAS, SLICE_TABLES

_MEMORY: Final = "memory"
_TRIED: Final = 64
"""Layers tried for a slice before it gets a new one, which bounds the time if everything overlaps."""


class Tracks:
    """Assigns track numbers, from 1 on.

    Attributes:
        counters: (lane, name, series) -> the counter's track.
    """

    def __init__(self, trace: Trace) -> None:
        self._next = 1
        self._lanes = [self.fresh() for _ in range(trace.lanes.height)]
        self._named: list[tuple[int, int, str]] = []
        self._rows = {table: self._of_table(trace, table) for table in SLICE_TABLES}
        memory = trace.scan(_MEMORY).select("lane").unique().collect()["lane"].sort().to_list()
        self._memory = {lane: self._track(lane, _MEMORY) for lane in memory}
        counters = trace.scan("counters").select("lane", "name", "series").unique(maintain_order=True).collect()
        self.counters: dict[tuple[int, str | None, str | None], int] = {
            counter: self.fresh() for counter in counters.iter_rows()
        }

    def fresh(self) -> int:
        """Take the next unused track number."""
        self._next += 1
        return self._next - 1

    def of_lane(self, lane: int) -> int:
        """The parent track of a lane's other tracks."""
        return self._lanes[lane]

    def of_rows(self, table: str, first: int, count: int) -> list[int]:
        """The tracks of `count` rows of a slice table, from row `first` on."""
        found: list[int] = self._rows[table][first : first + count].tolist()
        return found

    def of_memory(self, lane: int) -> int:
        """The track of a lane's allocations."""
        return self._memory[lane]

    def named(self) -> Iterator[tuple[int, int, str]]:
        """Track, lane and name of each track of slices and allocations."""
        yield from self._named

    def _track(self, lane: int, name: str) -> int:
        track = self.fresh()
        self._named.append((track, lane, name))
        return track

    def _of_table(self, trace: Trace, table: str) -> npt.NDArray[np.int64]:
        rows = trace.scan(table).select("lane", "start_ns", "duration_ns").collect()
        lanes, starts, durations = (rows[name].to_numpy() for name in ("lane", "start_ns", "duration_ns"))
        result = np.zeros(len(lanes), np.int64)
        for lane in np.unique(lanes).tolist():
            mine = np.flatnonzero(lanes == lane)
            layers = _layers(starts[mine], durations[mine])
            tracks = [
                self._track(lane, table if layer == 0 else f"{table} {layer + 1}") for layer in range(max(layers) + 1)
            ]
            result[mine] = np.array(tracks)[layers]
        return result


def _layers(starts: npt.NDArray[np.int64], durations: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each slice, in order of start, the first layer in which it overlaps no other slice partly."""
    ends = starts + durations
    around = parents(np.zeros(len(starts), np.int32), starts, durations)
    inside = around >= 0
    result = np.zeros(len(starts), np.int64)
    if not (ends[inside] > ends[around[inside]]).any():
        return result
    layers: list[list[int]] = []  # for each layer, the end times of its open slices
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        number = next((number for number, layer in enumerate(layers[:_TRIED]) if _fits(layer, start, end)), len(layers))
        if number == len(layers):
            layers.append([])
        layers[number].append(end)
        result[row] = number
    return result


def _fits(layer: list[int], start: int, end: int) -> bool:
    """Whether a slice nests inside the layer's open slices, after closing those that have ended."""
    while layer and layer[-1] <= start:
        layer.pop()
    return not layer or end <= layer[-1]


_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
_PIECE_BYTES: Final = 2**20
_SEQUENCE: Final = whole(10, 1)
_CLEARED: Final = _SEQUENCE + whole(13, 3) + whole(87, 1)
"""Flags of the first packet: state is clear, and later packets need it."""
_GOES_ON: Final = _SEQUENCE + whole(13, 2)
_NAMES, _CATEGORIES, _ANNOTATIONS, _VALUES = 2, 1, 3, 29
"""Fields of InternedData."""
_REFERRING: Final = {_NAMES: 10, _CATEGORIES: 3, _ANNOTATIONS: 1, _VALUES: 17}
"""Kind of interned data -> the field of an event or annotation that refers to it."""
_AT: Final = _GOES_ON + whole(8, 0)[:-1]
_BEGINS, _ENDS = (whole(9, kind) + whole(11, 0)[:-1] for kind in (_BEGIN, _END))
"""Bytes before an event's variable numbers: its time, and its track."""
_LARGEST_PID: Final = 2**31
_FLOW_OF_LINK: Final = 2**40


def perfetto(trace: Trace) -> Iterator[bytes]:
    """Yield the pieces of the file, in order."""
    tracks = Tracks(trace)
    yield _packet(_CLEARED + message(12, b""))
    yield b"".join(_packet(_SEQUENCE + message(60, descriptor)) for descriptor in _descriptors(trace, tracks))
    interned = _Interned()
    flows = _Flows(trace)
    for table in SLICE_TABLES:
        yield from _in_pieces(_slices(trace, table, tracks, interned, flows))
    yield from _in_pieces(_memory(trace, tracks, interned))
    yield from _in_pieces(_counters(trace, tracks))


def _packet(content: bytes) -> bytes:
    return message(1, content)


def _in_pieces(packets: Iterator[bytes]) -> Iterator[bytes]:
    held, size = list[bytes](), 0
    for packet in packets:
        held.append(packet)
        size += len(packet)
        if size > _PIECE_BYTES:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


class _Interned:
    """Text that is written once and then referred to by number; new text goes into the packet that first uses it."""

    def __init__(self) -> None:
        self._references: dict[tuple[int, str], bytes] = {}
        self._fresh: list[bytes] = []

    def reference(self, kind: int, word: str) -> bytes:
        """The field that refers to a word of that kind of interned data."""
        found = self._references.get((kind, word))
        if found is None:
            number = len(self._references) + 1
            found = self._references[kind, word] = whole(_REFERRING[kind], number)
            self._fresh.append(message(kind, whole(1, number) + text(2, word)))
        return found

    def annotation(self, word: str, value: int | float | str) -> bytes:
        name = self.reference(_ANNOTATIONS, word)
        if isinstance(value, str):
            return message(4, name + self.reference(_VALUES, value))
        return message(4, name + (double(5, value) if isinstance(value, float) else whole(4, value)))

    def fresh(self) -> bytes:
        """The packet field that holds the words added since the last packet."""
        if not self._fresh:
            return b""
        found = message(12, b"".join(self._fresh))
        self._fresh.clear()
        return found


def _descriptors(trace: Trace, tracks: Tracks) -> Iterator[bytes]:
    """One track for each process, each lane below its process, and each table and counter below its lane."""
    processes: dict[str, int] = {}
    for row in trace.lanes.iter_rows(named=True):
        process = row["process"] or ""
        if process not in processes:
            processes[process] = tracks.fresh()
            name = row["process_name"] or (f"device {row['device']}" if row["device"] is not None else "process")
            told = identifier(process)
            pid = told if isinstance(told, int) and 0 < told < _LARGEST_PID else _LARGEST_PID - len(processes)
            yield whole(1, processes[process]) + message(3, whole(1, pid) + text(6, f"{name} {process}".strip()))
        name = row["name"] or row["thread"] or f"lane {row['lane']}"
        lane = whole(1, tracks.of_lane(row["lane"])) + whole(5, processes[process]) + text(2, name)
        numbers = identifier(process), identifier(row["thread"] or "")
        if row["kind"] == "host_thread" and all(isinstance(number, int) for number in numbers):
            pid, tid = (int(number) % _LARGEST_PID for number in numbers)
            lane += message(4, whole(1, pid) + whole(2, tid) + text(5, name))
        yield lane
    for track, number, name in tracks.named():
        yield whole(1, track) + whole(5, tracks.of_lane(number)) + text(2, name)
    for (number, counter, series), track in tracks.counters.items():
        name = f"{counter or ''} {series or ''}".strip() or "counter"
        yield whole(1, track) + whole(5, tracks.of_lane(number)) + text(2, name) + message(8, b"")


class _Flows:
    """Arrows from launches to device work (id: the work's row) and from forward to backward operators (higher ids).

    Several arrows may start at the same call or operator.
    """

    def __init__(self, trace: Trace) -> None:
        launch = trace.scan("device_work").select("launch").collect()["launch"]
        self._is_launched = launch.is_not_null().to_numpy()
        flow = pl.col("flow").cast(pl.Int64)
        begun = launch.to_frame().with_row_index("flow").with_columns(flow).drop_nulls()
        links = trace.links.with_row_index("flow").with_columns(flow + _FLOW_OF_LINK)
        links = links.drop_nulls(["source", "target"])
        self._begin = {"launches": _by_row(begun, "launch"), "operators": _by_row(links, "source")}
        self._end = {"operators": _by_row(links, "target")}

    def of(self, table: str, first: int, count: int) -> list[bytes]:
        """The flow fields of `count` rows, from row `first` on."""
        found = [b""] * count
        if table == "device_work":
            for place in np.flatnonzero(self._is_launched[first : first + count]).tolist():
                found[place] = fixed64(48, first + place + 1)
        for field, numbers in ((47, self._begin.get(table)), (48, self._end.get(table))):
            if numbers is not None:
                low, high = np.searchsorted(numbers[0], [first, first + count])
                for row, flow in zip(numbers[0][low:high].tolist(), numbers[1][low:high].tolist(), strict=True):
                    found[row - first] += fixed64(field, flow + 1)
        return found


def _by_row(flows: pl.DataFrame, row: str) -> tuple[Rows, Rows]:
    """Row numbers in order, and the flow at each."""
    ordered = flows.sort(row, maintain_order=True)
    return ordered[row].cast(pl.Int64).to_numpy(), ordered["flow"].to_numpy()


def _slices(trace: Trace, table: str, tracks: Tracks, interned: _Interned, flows: _Flows) -> Iterator[bytes]:
    height = trace.scan(table).select(pl.len()).collect().item()
    columns = [column for column in ANNOTATIONS[table] if column in SCHEMAS[table]]
    words = [ANNOTATIONS[table][column] for column in columns]
    first = 0
    for rows in parts(trace.scan(table), height):
        places = tracks.of_rows(table, first, rows.height)
        arrows = flows.of(table, first, rows.height)
        kinds = rows["kind"].to_list() if "kind" in rows.columns else [None] * rows.height
        chosen = rows.select("start_ns", "duration_ns", "name", *columns).iter_rows()
        first += rows.height
        for (start, duration, name, *values), track, kind, arrow in zip(chosen, places, kinds, arrows, strict=True):
            event = _BEGINS + varint(track) + interned.reference(_CATEGORIES, category(table, kind))
            if name is not None:
                event += interned.reference(_NAMES, name)
            event += _annotations(words, values, interned) + arrow
            yield _packet(_AT + varint(start) + interned.fresh() + message(11, event))
            yield _packet(_AT + varint(start + duration) + message(11, _ENDS + varint(track)))


def _annotations(words: list[str], values: list[Any], interned: _Interned) -> bytes:
    return b"".join(
        [interned.annotation(word, value) for word, value in zip(words, values, strict=True) if value is not None]
    )


def _memory(trace: Trace, tracks: Tracks, interned: _Interned) -> Iterator[bytes]:
    words = ANNOTATIONS["memory"]
    height = trace.scan("memory").select(pl.len()).collect().item()
    for rows in parts(trace.scan("memory").select("start_ns", "lane", *words), height):
        for start, lane, *values in rows.iter_rows():
            place = whole(9, _INSTANT) + whole(11, tracks.of_memory(lane))
            name = interned.reference(_CATEGORIES, category("memory", None))
            name += interned.reference(_NAMES, MEMORY_NAME)
            event = place + name + _annotations(list(words.values()), values, interned)
            yield _packet(_GOES_ON + whole(8, start) + interned.fresh() + message(11, event))


def _counters(trace: Trace, tracks: Tracks) -> Iterator[bytes]:
    height = trace.scan("counters").select(pl.len()).collect().item()
    for rows in parts(trace.scan("counters").select("start_ns", "value", "lane", "name", "series"), height):
        for start, value, *counter in rows.iter_rows():
            event = whole(9, _COUNTER) + whole(11, tracks.counters[tuple(counter)])
            event += b"" if value is None else double(44, value)
            yield _packet(_GOES_ON + whole(8, start) + message(11, event))


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
    plane: _Plane, rows: Iterable[dict[str, Any]], stats: Callable[[_Plane, dict[str, Any]], list[bytes]]
) -> Iterator[bytes]:
    for row in rows:
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
    copies = pl.col("kind").str.starts_with("copy").all().alias("copies")
    lanes = work.group_by("lane").agg(pl.col("queue").first(), copies).sort("lane").collect()
    for lane, known_queue, are_copies in lanes.iter_rows():
        queue = known_queue or str(lane)
        told = identifier(queue)
        kinds = "Memcpy" if are_copies else "Kernel"
        identity = told if isinstance(told, int) else lane
        rows = (row for part in _parts_of(work, lane) for row in part.iter_rows(named=True))
        plane.line(identity, f"Stream #{queue}({kinds})", _events(plane, rows, _work_stats))
    return plane


def _parts_of(rows: pl.LazyFrame, lane: int) -> Iterator[pl.DataFrame]:
    """The rows of one lane, a part at a time."""
    for part in parts(rows, rows.select(pl.len()).collect().item()):
        yield part.filter(pl.col("lane") == lane)


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
        rows = _host_rows(trace, lane["lane"])
        first = next(rows, None)
        if first is None:
            continue
        told = identifier(lane["thread"] or "")
        identity = told if isinstance(told, int) and told not in numbers else 2**62 + lane["lane"]
        numbers.add(identity)
        name = f"{lane['name'] or 'thread'}"
        plane.line(identity, name, _events(plane, itertools.chain([first], rows), _host_stats))
    return plane


def _host_rows(trace: Trace, lane: int) -> Iterator[dict[str, Any]]:
    """The slices of one thread in the order of their start, longer ones first."""
    tables = (_in_order(_host_parts(trace, table, lane)) for table in _HOST_TABLES)
    return heapq.merge(*tables, key=lambda row: (row["start_ns"], -row["duration_ns"]))


def _in_order(rows: Iterator[pl.DataFrame]) -> Iterator[dict[str, Any]]:
    """Rows in parts that are sorted by start, longer ones first among those with the same start."""
    held = None
    for part in rows:
        part = part if held is None else pl.concat([held, part])
        held = part.filter(pl.col("start_ns") == pl.col("start_ns").max())  # the next part may have longer ones
        yield from _longer_first(part.head(part.height - held.height))
    if held is not None:
        yield from _longer_first(held)


def _longer_first(rows: pl.DataFrame) -> Iterator[dict[str, Any]]:
    ordered = rows.sort("start_ns", "duration_ns", descending=[False, True], maintain_order=True)
    return ordered.iter_rows(named=True)


def _host_parts(trace: Trace, table: str, lane: int) -> Iterator[pl.DataFrame]:
    rows = trace.scan(table)
    if table == "annotations":
        rows = rows.filter(pl.col("kind") == "host")
    there = SCHEMAS[table]
    columns = {"correlation": pl.Int64, "step": pl.Int64, "input_shapes": pl.String}
    chosen = [pl.col(name) if name in there else pl.lit(None, dtype).alias(name) for name, dtype in columns.items()]
    for part in _parts_of(rows.select("start_ns", "duration_ns", "name", "lane", *chosen), lane):
        if table == "frames":
            part = part.with_columns(name=by_value(part["name"], _frame_name, pl.String))
        yield part


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
