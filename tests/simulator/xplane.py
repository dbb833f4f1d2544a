"""Writes a simulated machine's run as the XSpace protobuf of XLA's profiler on an NVIDIA device.

Host slices are TraceMe events on their threads' lines, and so are the calls of the device's API; steps are events named
``train`` with their number beside. The fields of the messages are spelt out here, apart from any reader's definitions.
"""

from __future__ import annotations

import gzip
import random
import struct
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.simulator.device import COPY, SET, Work
from tests.simulator.host import Host
from tests.simulator.machine import PROCESS_ID, Machine
from tests.simulator.sight import MODULE_PREFIX
from tests.simulator.timeline import CALL, DRIVER_CALL, FRAME, STEP_PREFIX, Slice

VARINT, FIXED64, BYTES = 0, 1, 2
SPACE_PLANES, SPACE_HOSTNAMES = 1, 4
PLANE_ID, PLANE_NAME, PLANE_LINES, PLANE_EVENT_METADATA, PLANE_STAT_METADATA, PLANE_STATS = 1, 2, 3, 4, 5, 6
LINE_ID, LINE_NAME, LINE_TIMESTAMP_NS, LINE_EVENTS, LINE_DISPLAY_NAME = 1, 2, 3, 4, 11
EVENT_METADATA_ID, EVENT_OFFSET_PS, EVENT_DURATION_PS, EVENT_STATS = 1, 2, 3, 4
STAT_METADATA_ID, STAT_DOUBLE, STAT_UINT64, STAT_INT64, STAT_STRING, STAT_REFERENCE = 1, 2, 3, 4, 5, 7
MAP_KEY, MAP_VALUE, METADATA_ID, METADATA_NAME = 1, 2, 1, 2

OVERHEAD_LINE = 0xDEADBEEF + 6
COPY_NAMES = {"HtoD": "MemcpyH2D", "DtoH": "MemcpyD2H", "DtoD": "MemcpyD2D"}
MEMORY_NAMES = {"Pageable": "pageable", "Pinned": "pinned", "Device": "device"}

Stat = tuple[str, int, "int | float | str"]
"""Name, the field of the value, the value; of a reference the text it stands for."""


@dataclass(frozen=True)
class XPlaneOptions:
    """How a space is written.

    ``start_ns`` is what the clock shows at machine time 0. Each line counts from a time of its own, ``line_lead_ns``
    before its first event. ``shuffle_seed`` writes planes, lines and events in another order.
    """

    start_ns: int = 1_771_595_650_217_823_548
    line_lead_ns: int = 4_321
    shuffle_seed: int | None = None


def write_xplane(machine: Machine, path: Path, options: XPlaneOptions | None = None) -> Path:
    """Write a file; a name that ends in .gz is compressed."""
    data = xplane_bytes(machine, options)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def xplane_bytes(machine: Machine, options: XPlaneOptions | None = None) -> bytes:
    """The XSpace: the host, one plane a device, and what is known of the recording."""
    options = options or XPlaneOptions()
    planes = [_host_plane(machine, options)]
    for device in sorted({work.device for work in machine.works}):
        planes.append(_device_plane(machine, device, options))
    environment = _Plane(0, "Task Environment", options)
    environment.stats.append(("profile_start_time", STAT_UINT64, options.start_ns))
    planes.append(environment)
    written = _shuffled([_field(SPACE_PLANES, plane.encoded()) for plane in planes], options)
    return b"".join(written) + _field(SPACE_HOSTNAMES, "simulated-host")


class _Plane:
    """A plane being written: names get numbers at their first mention."""

    def __init__(self, number: int, name: str, options: XPlaneOptions) -> None:
        self.number = number
        self.name = name
        self.options = options
        self.stats: list[Stat] = []
        self._lines: dict[int, str] = {}
        self._events: dict[int, list[tuple[int, int, int, list[Stat]]]] = defaultdict(list)
        self._event_names: dict[str, int] = {}
        self._stat_names: dict[str, int] = {}

    def line(self, number: int, name: str) -> None:
        self._lines.setdefault(number, name)

    def event(self, line: int, name: str, start_ns: int, end_ns: int, stats: Iterable[Stat] = ()) -> None:
        metadata = self._event_names.setdefault(name, len(self._event_names) + 1)
        self._events[line].append((start_ns, end_ns - start_ns, metadata, list(stats)))

    def encoded(self) -> bytes:
        lines = [self._line(number, name) for number, name in self._lines.items()]
        stats = [_field(PLANE_STATS, self._stat(stat)) for stat in self.stats]
        parts = [_field(PLANE_ID, self.number), _field(PLANE_NAME, self.name), *_shuffled(lines, self.options)]
        for field, names in (
            (PLANE_EVENT_METADATA, self._event_names),
            (PLANE_STAT_METADATA, self._stat_names),
        ):
            for name, number in names.items():
                value = _field(METADATA_ID, number) + _field(METADATA_NAME, name)
                parts.append(_field(field, _field(MAP_KEY, number) + _field(MAP_VALUE, value)))
        return b"".join([*parts, *stats])

    def _line(self, number: int, name: str) -> bytes:
        events = self._events[number]
        origin_ns = min((start_ns for start_ns, *_ in events), default=0) - self.options.line_lead_ns
        written = [
            _field(LINE_EVENTS, self._event(start_ns - origin_ns, duration_ns, metadata, stats))
            for start_ns, duration_ns, metadata, stats in events
        ]
        head = _field(LINE_ID, number) + _field(LINE_NAME, name) + _field(LINE_DISPLAY_NAME, name)
        clock = _field(LINE_TIMESTAMP_NS, origin_ns + self.options.start_ns)
        return _field(PLANE_LINES, head + clock + b"".join(_shuffled(written, self.options)))

    def _event(self, offset_ns: int, duration_ns: int, metadata: int, stats: list[Stat]) -> bytes:
        body = _field(EVENT_METADATA_ID, metadata) + _field(EVENT_OFFSET_PS, offset_ns * 1000)
        if duration_ns:  # a default value is left out
            body += _field(EVENT_DURATION_PS, duration_ns * 1000)
        return body + b"".join(_field(EVENT_STATS, self._stat(stat)) for stat in stats)

    def _stat(self, stat: Stat) -> bytes:
        name, field, value = stat
        if field == STAT_REFERENCE:
            value = self._stat_name(str(value))
        return _field(STAT_METADATA_ID, self._stat_name(name)) + _field(field, value)

    def _stat_name(self, name: str) -> int:
        return self._stat_names.setdefault(name, len(self._stat_names) + 1)


def _host_plane(machine: Machine, options: XPlaneOptions) -> _Plane:
    plane = _Plane(1, "/host:CPU", options)
    plane.stats.append(("process_id", STAT_INT64, PROCESS_ID))
    for host in machine.hosts:
        line = _line_number(host)
        plane.line(line, "python" if host.is_main else f"{host.name}/{line}")
        for slice_ in host.slices:
            _host_event(plane, line, slice_)
    return plane


def _line_number(host: Host) -> int:
    """A thread's line has a hash for its number, not the number that the system knows it by."""
    return (1_085_180_131_661_504_713 * (host.thread_id + 1)) % (1 << 62)


def _host_event(plane: _Plane, line: int, slice_: Slice) -> None:
    stats: list[Stat] = []
    name = slice_.name
    if slice_.category == FRAME:
        if name.startswith(MODULE_PREFIX):
            return
        file, _, rest = name.partition("(")
        number, _, function = rest.partition("): ")
        name = f"${file.rpartition('/')[2]}:{number} {function}"
    elif slice_.category in (CALL, DRIVER_CALL):
        stats = [("device_id", STAT_UINT64, slice_.device or 0)]
        stats += [("correlation_id", STAT_UINT64, slice_.correlation or 0), ("context_id", STAT_STRING, "$$1")]
    elif name.startswith(STEP_PREFIX):
        stats = [("_r", STAT_INT64, 1), ("step_num", STAT_INT64, int(name.removeprefix(STEP_PREFIX)))]
        name = "train"
    plane.event(line, name, slice_.start_ns, slice_.closed_ns, stats)


def _device_plane(machine: Machine, device: int, options: XPlaneOptions) -> _Plane:
    plane = _Plane(device + 2, f"/device:GPU:{device}", options)
    plane.stats += [
        ("device_vendor", STAT_STRING, "Nvidia"),
        ("gpu_device_name", STAT_STRING, "Simulated Device 80GB"),
        ("clock_rate", STAT_INT64, 1_980_000),
        ("core_count", STAT_INT64, 132),
        ("memory_bandwidth", STAT_UINT64, 3_352_000_000_000),
        ("memory_size", STAT_UINT64, 80 << 30),
        ("compute_cap_major", STAT_INT64, 9),
        ("compute_cap_minor", STAT_INT64, 0),
    ]
    mine = [work for work in machine.works if work.device == device]
    kinds: dict[int, dict[str, None]] = defaultdict(dict)
    for work in mine:
        kinds[work.queue][_kind_name(work)] = None
    for queue, names in kinds.items():
        plane.line(queue, f"Stream #{queue}({','.join(names)})")
    for work in mine:
        _device_event(plane, work)
    if device == min(work.device for work in machine.works):
        for start_ns, end_ns in machine.ledger.overheads:
            plane.line(OVERHEAD_LINE, "CUPTI overhead")
            plane.event(OVERHEAD_LINE, "BUFFER_FLUSH", start_ns, end_ns)
    return plane


def _kind_name(work: Work) -> str:
    if work.kind == COPY:
        return COPY_NAMES[work.name.split(" ")[1]]
    return "Memset" if work.kind == SET else "Compute"


def _device_event(plane: _Plane, work: Work) -> None:
    stats: list[Stat] = [("correlation_id", STAT_UINT64, work.correlation), ("context_id", STAT_STRING, "$$1")]
    name = work.name
    if work.kind == COPY:
        _, direction, memories = work.name.split(" ", 2)
        source, target = (MEMORY_NAMES[side] for side in memories.strip("()").split(" -> "))
        details = f"kind_src:{source} kind_dst:{target} size:{work.bytes} dest:0 async:1"
        stats.append(("memcpy_details", STAT_REFERENCE, details))
        name = COPY_NAMES[direction]
    elif work.kind == SET:
        stats.append(("memset_details", STAT_REFERENCE, f"kind:device num_bytes:{work.bytes} async:1"))
        name = "Memset"
    else:
        details = "regs:32 static_shared:0 dynamic_shared:0 grid:132,1,1 block:128,1,1 occ_pct:50"
        stats += [("theoretical_occupancy_pct", STAT_DOUBLE, 50.0), ("kernel_details", STAT_REFERENCE, details)]
    if work.launch is not None and work.launch.call.name == "cudaGraphLaunch":
        stats.append(("cuda_graph_id", STAT_UINT64, 1))
    plane.event(work.queue, name, work.start_ns, work.end_ns, stats)


def _shuffled(parts: list[bytes], options: XPlaneOptions) -> list[bytes]:
    if options.shuffle_seed is not None:
        random.Random(options.shuffle_seed).shuffle(parts)
    return parts


def _field(number: int, value: bytes | str | int | float) -> bytes:
    """A field of a message in protobuf's wire format."""
    if isinstance(value, float):
        return _varint(number << 3 | FIXED64) + struct.pack("<d", value)
    if isinstance(value, int):
        return _varint(number << 3 | VARINT) + _varint(value % (1 << 64))
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | BYTES) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
