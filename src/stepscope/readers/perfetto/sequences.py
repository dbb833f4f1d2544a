"""State of a packet sequence: definitions in earlier packets that later packets refer to by number."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stepscope.readers.gathering import Gathering

if TYPE_CHECKING:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
        ClockSnapshot,
        DebugAnnotation,
        TracePacket,
        TrackDescriptor,
        TrackEvent,
    )


REALTIME: Final = 1
BOOTTIME: Final = 6
_OF_A_SEQUENCE: Final = range(64, 128)
Clock: TypeAlias = "tuple[int, int]"
"""Sequence and number of a clock; the sequence is 0 for clocks shared by all sequences."""


class Clocks:
    """Converts timestamps to nanoseconds of the trace's main clock, by default the machine's boot time clock.

    Attributes:
        unix_offset_ns: wall clock minus main clock; None without a snapshot of both.
        unknown: number of timestamps per clock that were used unconverted, as no snapshot includes the clock.
    """

    def __init__(self) -> None:
        self.main = BOOTTIME
        self.unix_offset_ns: int | None = None
        self.unknown: defaultdict[Clock, int] = defaultdict(int)
        self._offsets: defaultdict[Clock, list[tuple[int, int]]] = defaultdict(list)
        self._units: dict[Clock, int] = {}
        self._last: dict[Clock, int] = {}

    def add_snapshot(self, sequence: int, snapshot: ClockSnapshot) -> None:
        """Record the values of several clocks at the same moment."""
        if snapshot.primary_trace_clock:
            self.main = snapshot.primary_trace_clock
        shown: dict[int, int] = {}
        for clock in snapshot.clocks:
            key = _clock(sequence, clock.clock_id)
            unit = max(1, clock.unit_multiplier_ns)
            if clock.is_incremental:
                self._last[key] = clock.timestamp * unit
            if clock.is_incremental or unit != 1:
                self._units[key] = unit
            shown[clock.clock_id] = clock.timestamp * unit
        if self.main not in shown:
            return
        now = shown[self.main]
        for number, time in shown.items():
            if number == REALTIME and self.unix_offset_ns is None and self.main != REALTIME:
                self.unix_offset_ns = time - now
            if number != self.main:
                offsets = self._offsets[_clock(sequence, number)]
                offsets.append((time, now - time))
                if len(offsets) > 1 and offsets[-2][0] > time:
                    offsets.sort()

    def time_ns(self, sequence: int, number: int, timestamp: int) -> int:
        """Convert a packet's timestamp on the given clock to nanoseconds of the main clock."""
        if number == self.main and not self._units:
            return timestamp
        key = _clock(sequence, number)
        time = timestamp * self._units.get(key, 1)
        if key in self._last:
            time += self._last[key]
            self._last[key] = time
        if number == self.main:
            return time
        offsets = self._offsets.get(key)
        if not offsets:
            self.unknown[key] += 1
            return time
        return time + offsets[max(0, bisect_right(offsets, (time, 2**63)) - 1)][1]


def _clock(sequence: int, number: int) -> Clock:
    return (sequence if number in _OF_A_SEQUENCE else 0, number)


_CLEARED = 1


def plain(text: str | bytes, damage: Counter[str]) -> str:
    """Replace invalid UTF-8 in a message's text, which protobuf returns as bytes or as a string with surrogates."""
    if isinstance(text, str) and (text.isascii() or _can_be_kept(text)):
        return text
    damage["invalid_utf8"] += 1
    found = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
    return found.decode("utf-8", "replace")


def _can_be_kept(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Sequence:
    """State of one packet sequence: its default clock and track, its legacy thread descriptor, and interned names."""

    def __init__(self, number: int, damage: Counter[str]) -> None:
        self.number = number
        self._damage = damage
        self.clear()
        self.thread: tuple[int, int] | None = None
        self.time_us: int | None = None

    def clear(self) -> None:
        """Reset the defaults and forget all interned names."""
        self.clock = BOOTTIME
        self.track: int | None = None
        self._names: dict[int, str] = {}
        self._categories: dict[int, str] = {}
        self._annotation_names: dict[int, str] = {}
        self._strings: dict[int, str] = {}
        self._stages: dict[int, str] = {}

    def learn(self, kind: str | None, packet: TracePacket) -> None:
        """Apply a packet's definitions and defaults to itself and to later packets; `kind` is its `data`."""
        if packet.sequence_flags & _CLEARED or packet.incremental_state_cleared:
            self.clear()
        if packet.HasField("trace_packet_defaults"):
            defaults = packet.trace_packet_defaults
            if defaults.timestamp_clock_id:
                self.clock = defaults.timestamp_clock_id
            if defaults.track_event_defaults.HasField("track_uuid"):
                self.track = defaults.track_event_defaults.track_uuid
        if kind == "thread_descriptor":
            thread = packet.thread_descriptor
            self.thread = (thread.pid, thread.tid)
            if thread.HasField("reference_timestamp_us"):
                self.time_us = thread.reference_timestamp_us
        if packet.HasField("interned_data"):
            data = packet.interned_data
            for entry in data.event_names:
                self._names[entry.iid] = plain(entry.name, self._damage)
            for entry in data.event_categories:
                self._categories[entry.iid] = plain(entry.name, self._damage)
            for entry in data.debug_annotation_names:
                self._annotation_names[entry.iid] = plain(entry.name, self._damage)
            for entry in data.gpu_specifications:
                self._stages[entry.iid] = plain(entry.name, self._damage)
            for text in data.debug_annotation_string_values:
                self._strings[text.iid] = text.str.decode("utf-8", "replace")

    def name(self, event: TrackEvent) -> str | None:
        """Return the event's name; None if its definition is lost."""
        if event.name_iid:
            return self._names.get(event.name_iid)
        if event.name or not event.legacy_event.name_iid:
            return plain(event.name, self._damage)
        return self._names.get(event.legacy_event.name_iid)

    def category(self, event: TrackEvent) -> str:
        """Return the event's first category, or an empty string."""
        if event.category_iids:
            return self._categories.get(event.category_iids[0], "")
        return plain(event.categories[0], self._damage) if event.categories else ""

    def stage(self, number: int, otherwise: str) -> str:
        """Return the name of a stage or queue of GPU work, or `otherwise` if unknown."""
        return self._stages.get(number) or otherwise

    def annotation_name(self, annotation: DebugAnnotation) -> str:
        if annotation.name_iid:
            return self._annotation_names.get(annotation.name_iid, "")
        return plain(annotation.name, self._damage)

    def value(self, annotation: DebugAnnotation, depth: int = 0) -> Any:
        """Return an argument's value as a number, text, list or dictionary; None for other values."""
        kind = annotation.WhichOneof("value")
        if kind == "string_value_iid":
            return self._strings.get(annotation.string_value_iid)
        if kind is not None and kind in _PLAIN:
            value = getattr(annotation, kind)
            return plain(value, self._damage) if isinstance(value, (str, bytes)) else value
        if depth > _DEEPEST:
            return None
        if annotation.array_values:
            return [self.value(each, depth + 1) for each in annotation.array_values]
        if annotation.dict_entries:
            return {self.annotation_name(each): self.value(each, depth + 1) for each in annotation.dict_entries}
        return None


NUMBERS: Final = frozenset({"bool_value", "uint_value", "int_value", "double_value", "pointer_value"})
"""Values of a debug annotation that are numbers."""
_PLAIN: Final = NUMBERS | {"string_value", "legacy_json_value"}
_DEEPEST = 8


_TRACKS_DEEPEST: Final = 16
_DEVICE: Final = re.compile(r"(?:GPU|TPU|HPU|device|agent)\W{0,3}(\d{1,9})", re.IGNORECASE)
_QUEUE: Final = re.compile(r"(?:stream|queue)\W{0,3}(\d{1,20})", re.IGNORECASE)


@dataclass(slots=True)
class Track:
    """The file's description of a track; later descriptors add to earlier ones."""

    parent: int = 0
    name: str = ""
    process: int | None = None
    process_name: str = ""
    thread: int | None = None
    is_incremental: bool = False
    unit: int = 1


class Tracks:
    """Tracks by number, and threads that old files describe without a track.

    A track with device work is a queue; its device and queue come from its first work, else from the names of tracks.
    """

    def __init__(self, damage: Counter[str]) -> None:
        self._damage = damage
        self._tracks: dict[int, Track] = {}
        self._codes: dict[int | tuple[int, int], int] = {}
        self._places: list[int | tuple[int, int]] = []
        self._thread_names: dict[tuple[int, int], str] = {}
        self._process_names: dict[int, str] = {}
        self._queues: dict[int, tuple[str | None, str | None]] = {}

    def code(self, place: int | tuple[int, int]) -> int:
        """Return a small number for a track, or for (process, thread)."""
        code = self._codes.get(place)
        if code is None:
            code = self._codes[place] = len(self._places)
            self._places.append(place)
        return code

    def place(self, code: int) -> int | tuple[int, int]:
        """Return the track, or (process, thread), for a code."""
        return self._places[code]

    def describe(self, packet: TracePacket) -> None:
        """Record a packet's descriptions of tracks, threads and processes."""
        kind = packet.WhichOneof("data")
        if kind == "track_descriptor":
            self._describe_track(packet.track_descriptor)
        elif kind == "thread_descriptor":
            thread = packet.thread_descriptor
            self._thread_names.setdefault((thread.pid, thread.tid), self._plain(thread.thread_name))
        elif kind == "process_descriptor":
            process = packet.process_descriptor
            self._process_names.setdefault(process.pid, self._plain(process.process_name))
        elif kind == "process_tree":
            for each in packet.process_tree.processes:
                if each.cmdline:
                    self._process_names.setdefault(each.pid, self._plain(each.cmdline[0]))
            for each in packet.process_tree.threads:
                self._thread_names.setdefault((each.tgid, each.tid), self._plain(each.name))

    def _plain(self, text: str | bytes) -> str:
        return plain(text, self._damage)

    def _describe_track(self, descriptor: TrackDescriptor) -> None:
        track = self._tracks.setdefault(descriptor.uuid, Track())
        track.parent = descriptor.parent_uuid or track.parent
        track.name = self._plain(descriptor.name or descriptor.static_name or descriptor.atrace_name) or track.name
        if descriptor.HasField("process"):
            track.process = descriptor.process.pid
            track.process_name = self._plain(descriptor.process.process_name) or track.process_name
        if descriptor.HasField("thread"):
            track.process, track.thread = descriptor.thread.pid, descriptor.thread.tid
            track.name = self._plain(descriptor.thread.thread_name) or track.name
        if descriptor.HasField("counter"):
            track.is_incremental = descriptor.counter.is_incremental
            track.unit = max(1, descriptor.counter.unit_multiplier)

    def counter(self, code: int) -> tuple[str, bool, int]:
        """Return a counter track's name, whether its values are increments, and the unit they are multiplied by."""
        place = self._places[code]
        track = self._tracks.get(place, Track()) if isinstance(place, int) else Track()
        return track.name or f"counter {place}", track.is_incremental, track.unit

    def works_for(self, code: int, device: str | None, queue: str | None) -> None:
        """Record that a device worked on this track."""
        self._queues.setdefault(code, (device, queue))

    def queue(self, code: int) -> tuple[str, str]:
        """Return device and queue of a track with device work."""
        device, queue = self._queues.get(code, (None, None))
        if device is None or queue is None:
            names = [track.name for track in self._with_ancestors(self._places[code])]
            found = next((match[1] for name in names if (match := _DEVICE.search(name))), None)
            device = found or "0" if device is None else device
            match = _QUEUE.search(names[0]) if names else None
            queue = (match[1] if match else str(self._places[code])) if queue is None else queue
        return device, queue

    def lane(self, code: int, gathering: Gathering, *, is_host: bool) -> int:
        """Return the lane of a track; tracks below a thread's track share its lane.

        Args:
            is_host: whether the track has operators, calls or frames.
        """
        place = self._places[code]
        around = self._with_ancestors(place)
        thread_track = next((number for number, track in enumerate(around) if track.thread is not None), 0)
        for _ in range(thread_track):
            place = around.pop(0).parent
        process, thread = self._process_and_thread(place, around)
        name = around[0].name if around else self._thread_names.get(place, "") if isinstance(place, tuple) else ""
        process_name = next((track.process_name for track in around if track.process_name), None)
        if process_name is None and process is not None:
            process_name = self._process_names.get(process)
        if code in self._queues:
            device, queue = self.queue(code)
            return gathering.lane(
                place, kind="queue", process=device, thread=queue, name=name or queue, device=device, queue=queue
            )
        top = around[-1].name if len(around) > 1 else ""
        return gathering.lane(
            place,
            kind="host_thread" if is_host or thread is not None else "other",
            process=top if process is None else str(process),
            process_name=process_name or None,
            thread=name or str(place) if thread is None else str(thread),
            name=name or (f"track {place}" if thread is None else f"thread {thread}"),
        )

    def _process_and_thread(self, place: int | tuple[int, int], around: list[Track]) -> tuple[int | None, int | None]:
        if isinstance(place, tuple):
            return place
        process = next((track.process for track in around if track.process is not None), None)
        return process, around[0].thread if around else None

    def _with_ancestors(self, place: int | tuple[int, int]) -> list[Track]:
        """A track and its ancestors, innermost first."""
        found: list[Track] = []
        while isinstance(place, int) and place in self._tracks and len(found) < _TRACKS_DEEPEST:
            found.append(self._tracks[place])
            place = self._tracks[place].parent
        return found
