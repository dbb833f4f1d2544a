"""What a sequence of packets has told so far, and later packets refer to by number."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from stepscope.readers.perfetto.clocks import BOOTTIME

if TYPE_CHECKING:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import DebugAnnotation, TracePacket, TrackEvent

_CLEARED = 1


def plain(text: str | bytes, damage: Counter[str]) -> str:
    """Text of a message with what was no UTF-8 replaced: protobuf gives that as bytes, or as what no table can hold."""
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
    """The state of one sequence.

    Attributes:
        number: of the sequence.
        clock: number of the clock that its timestamps are on, where a packet does not say.
        track: its track, where an event does not say.
        thread: (process, thread) of the old thread descriptor, None without one.
        time_us: of the last event in files whose events have their own times, in microseconds.
    """

    def __init__(self, number: int, damage: Counter[str]) -> None:
        self.number = number
        self._damage = damage
        self.clear()
        self.thread: tuple[int, int] | None = None
        self.time_us: int | None = None

    def clear(self) -> None:
        """Forget what was told by number."""
        self.clock = BOOTTIME
        self.track: int | None = None
        self._names: dict[int, str] = {}
        self._categories: dict[int, str] = {}
        self._annotation_names: dict[int, str] = {}
        self._strings: dict[int, str] = {}
        self._stages: dict[int, str] = {}

    def learn(self, packet: TracePacket) -> None:
        """Take what a packet tells for those after it, and for itself."""
        if packet.incremental_state_cleared or packet.sequence_flags & _CLEARED:
            self.clear()
        if packet.HasField("trace_packet_defaults"):
            defaults = packet.trace_packet_defaults
            if defaults.timestamp_clock_id:
                self.clock = defaults.timestamp_clock_id
            if defaults.track_event_defaults.HasField("track_uuid"):
                self.track = defaults.track_event_defaults.track_uuid
        if packet.HasField("thread_descriptor"):
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
        """The event's name, None where the file has lost it."""
        if event.name_iid:
            return self._names.get(event.name_iid)
        if event.name or not event.legacy_event.name_iid:
            return plain(event.name, self._damage)
        return self._names.get(event.legacy_event.name_iid)

    def category(self, event: TrackEvent) -> str:
        """The event's category; the first of several, empty without one."""
        if event.category_iids:
            return self._categories.get(event.category_iids[0], "")
        return plain(event.categories[0], self._damage) if event.categories else ""

    def stage(self, number: int, otherwise: str) -> str:
        """What a stage or a queue of graphics work is called."""
        return self._stages.get(number) or otherwise

    def annotation_name(self, annotation: DebugAnnotation) -> str:
        """What an event's argument is called."""
        if annotation.name_iid:
            return self._annotation_names.get(annotation.name_iid, "")
        return plain(annotation.name, self._damage)

    def value(self, annotation: DebugAnnotation, depth: int = 0) -> Any:
        """An argument's value: a number, text, a list or a dictionary; None for what is none of these."""
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


_PLAIN = frozenset(
    {"bool_value", "uint_value", "int_value", "double_value", "pointer_value", "string_value", "legacy_json_value"}
)
_DEEPEST = 8
