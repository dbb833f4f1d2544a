"""Read the Chrome trace of an XLA profile by converting it back to the profile it was made from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from stepscope.files import text_of
from stepscope.readers import xplane
from stepscope.readers.gathering import warnings
from stepscope.readers.kineto import EXPLANATIONS as OF_CHROME_TRACES
from stepscope.readers.kineto.events import DECODE_ERRORS, Event, EventStream
from stepscope.readers.source import ByteSource, Progress, Reader, ReadResult
from stepscope.readers.xplane.meanings import DEVICE_PLANE, HOST_PLANES
from stepscope.trace.model import StoreWriter
from stepscope.trace.protobuf_fields import beginning, double, message, text, whole
from stepscope.trace.window import StepRange, Window


def statistic(number: int, value: int | float | str) -> bytes:
    """Serialise an XStat with the number of its name."""
    name = whole(1, number)
    if isinstance(value, str):
        return name + text(5, value)
    if isinstance(value, float):
        return name + double(2, value)
    return name + whole(4 if -(2**63) <= value < 2**63 else 3, value)


def event_message(name: int, offset_ps: int, duration_ps: int, statistics: Iterable[bytes]) -> bytes:
    """Serialise an XEvent as a field of its line."""
    content = [whole(1, name), whole(2, offset_ps), whole(3, duration_ps), *(message(4, each) for each in statistics)]
    return message(4, b"".join(content))


def named(number: int, name: str, display: str = "", statistics: Iterable[bytes] = ()) -> bytes:
    """Serialise an entry of a plane's table of event or statistic names."""
    content = [whole(1, number), text(2, name)]
    if display:
        content.append(text(4, display))
    content += [message(5, each) for each in statistics]
    return whole(1, number) + message(2, b"".join(content))


_INTEGERS: Final = frozenset(
    {
        *("step_num", "correlation_id", "_p", "_c", "run_id", "device_ordinal", "core_type", "size", "index_on_host"),
        *("addr", "allocation_bytes", "requested_bytes", "bytes_allocated", "program_id", "group_id", "bytes_accessed"),
    }
)
"""Statistics that are integers in XLA's profile; the Chrome trace has them all as text."""
_OF_NAMES: Final = ("long_name", "hlo_category", "tf_op", "source", "source_stack", "bytes_accessed", "program_id")
"""Statistics that XLA keeps once for all events of a name."""
_LONG_NAME: Final = "long_name"
_WHOLE: Final = re.compile(r"-?\d{1,20}")
_DERIVED: Final = re.compile(r" - from #\S+$|^Framework |^Source code")
"""Lines that TensorBoard's converter derives from events of other lines."""
_REGION: Final = "ThreadpoolListener::Region"
"""Event that the converter makes from a task's begin and end."""
_NO_TIME_US: Final = 1e-6
"""The converter's duration for instants: a picosecond, so that Chrome's viewer shows them."""
_LATEST_PS: Final = 2**62


class Planes:
    """The events of a trace by process and thread; `events` is their number."""

    def __init__(self, damage: Counter[str]) -> None:
        self._damage = damage
        self._planes: dict[Any, _Plane] = {}
        self.events = 0

    def take(self, events: list[Event]) -> None:
        """Add events; names of processes and threads may follow their events."""
        for event in events:
            if event.ph == "M":
                self._name(event)
            elif event.ph == "X" and event.ts is not None and (event.dur or 0) > _NO_TIME_US and event.name != _REGION:
                self._plane(event.pid).add(event, self._damage)
                self.events += 1

    def _plane(self, process: int | str) -> _Plane:
        found = self._planes.get(process)
        if found is None:
            found = self._planes[process] = _Plane()
        return found

    def _name(self, event: Event) -> None:
        if event.name not in ("process_name", "thread_name"):
            return
        name = _arguments(event).get("name")
        if not isinstance(name, str):
            return
        plane = self._plane(event.pid)
        if event.name == "process_name":
            plane.name = name
        else:
            plane.thread_names[event.tid] = name

    def serialised(self) -> Iterator[bytes]:
        """Yield the profile plane by plane; events of processes other than hosts and devices are counted as damage."""
        for number, plane in enumerate(self._planes.values()):
            if HOST_PLANES.match(plane.name) or DEVICE_PLANE.fullmatch(plane.name):
                yield from plane.serialised(number)
            elif plane.lines:
                self._damage[f"unknown_process:{plane.name[:40]}"] += sum(map(len, plane.lines.values()))


class _Plane:
    def __init__(self) -> None:
        self.name = ""
        self.thread_names: dict[Any, str] = {}
        self.lines: dict[Any, list[bytes]] = {}
        self._names: dict[tuple[Any, ...], int] = {}
        self._statistics: dict[str, int] = {}

    def add(self, event: Event, damage: Counter[str]) -> None:
        start, duration = _picoseconds(event.ts), _picoseconds(event.dur)
        if start is None or duration is None:
            damage["time_out_of_range"] += 1
            return
        arguments = _arguments(event)
        values = [(each, value) for each, raw in arguments.items() if (value := _value(each, raw)) is not None]
        key = (event.name, *(arguments.get(name) for name in _OF_NAMES))
        try:
            name = self._names.setdefault(key, len(self._names) + 1)
        except TypeError:  # an unhashable argument
            name = self._names.setdefault((event.name, *(None for _ in _OF_NAMES)), len(self._names) + 1)
        statistics = [statistic(self._statistic(each), value) for each, value in values if each != _LONG_NAME]
        self.lines.setdefault(event.tid, []).append(event_message(name, start, duration, statistics))

    def _statistic(self, name: str) -> int:
        return self._statistics.setdefault(name, len(self._statistics) + 1)

    def serialised(self, number: int) -> Iterator[bytes]:
        parts = [whole(1, number), text(2, self.name)]
        for place, (thread, events) in enumerate(self.lines.items()):
            name = self.thread_names.get(thread, "")
            if not _DERIVED.search(name):
                identifier = thread if isinstance(thread, int) and 0 < thread < 2**63 else place + 1
                head = whole(1, identifier) + text(2, name)
                parts.append(message(3, head + b"".join(events)))
        for key, code in self._names.items():
            parts.append(message(4, self._name_entry(key, code)))
        parts += [message(5, named(code, name)) for name, code in self._statistics.items()]
        size = sum(map(len, parts))
        yield beginning(1, size)
        yield from parts

    def _name_entry(self, key: tuple[Any, ...], code: int) -> bytes:
        name, long_name = key[0], key[1]
        statistics = [
            statistic(self._statistic(each), value)
            for each, raw in zip(_OF_NAMES[1:], key[2:], strict=True)
            if (value := _value(each, raw)) is not None
        ]
        if isinstance(long_name, str):
            return named(code, long_name, name, statistics)
        return named(code, name, "", statistics)


def _arguments(event: Event) -> dict[str, Any]:
    try:
        return msgspec.json.decode(event.args, type=dict[str, Any])
    except DECODE_ERRORS:
        return {}


def _value(name: str, value: Any) -> int | float | str | None:
    """A statistic's value with the type it has in XLA's profile; None if impossible."""
    if name in _INTEGERS:
        if isinstance(value, str):
            value = int(value) if _WHOLE.fullmatch(value) else None
        return value if isinstance(value, int) and -(2**63) <= value < 2**64 else None
    return value if isinstance(value, (int, float, str)) and not isinstance(value, bool) else None


def _picoseconds(microseconds: Any) -> int | None:
    """Returns 0 for a missing time, None for an impossible one."""
    if microseconds is None:
        return 0
    try:
        found = round(microseconds * 10**6)
    except (ValueError, OverflowError, ArithmeticError):
        return None
    return found if 0 <= found < _LATEST_PS else None


_PROCESS: Final = re.compile(rb'"name"\s*:\s*"/(?:host:(?!metadata)|device:(?:TPU|GPU|CUSTOM|CPU)\b)')
EXPLANATIONS: Final = {
    **OF_CHROME_TRACES,
    "unknown_process": "events of a process that is neither a host nor a device of XLA were left out: {}",
}


def recognises(head: bytes) -> bool:
    """Whether the text is a Chrome trace with XLA's process names, which precede all events."""
    text = text_of(head)
    return text.startswith((b"{", b"[")) and b'"ph"' in text and _PROCESS.search(text) is not None


def read(source: ByteSource, writer: StoreWriter, window: Window | None, steps: StepRange | None) -> ReadResult:
    """Read a trace into the tables of the equivalent `.xplane.pb`; raises the errors of `xplane.read`."""
    profile = _Profile(source)
    metadata, found_warnings = xplane.read(profile, writer, window, steps)  # type: ignore[arg-type]
    return replace(metadata, format="xla_json"), (*found_warnings, *warnings(profile.stream.damage, EXPLANATIONS))


class _Profile:
    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self.name = source.name
        self.plain_path: Path | None = None
        """None, since no file holds the converted bytes."""
        self.stream = EventStream(source)

    @property
    def progress(self) -> Progress:
        return self._source.progress

    @property
    def damage(self) -> str | None:
        return self._source.damage

    @property
    def read_bytes(self) -> int:
        return self._source.read_bytes

    @property
    def total_bytes(self) -> int | None:
        return self._source.total_bytes

    def blocks(self) -> Iterator[bytes]:
        planes = Planes(self.stream.damage)
        for events in self.stream.chunks():
            planes.take(events)
        if not self.stream.closed:
            self.stream.damage["truncated"] += 1
        yield from planes.serialised()


READER: Final = Reader("xla_json", recognises, read)
