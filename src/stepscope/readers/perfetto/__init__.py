"""Reader for Perfetto traces: protobuf packets of track events."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepscope.errors import UnreadableTraceError
from stepscope.readers.gathering import EXPLANATIONS as COMMON
from stepscope.readers.gathering import Gathering, warnings
from stepscope.readers.perfetto.events import Events
from stepscope.readers.perfetto.packets import Packets, recognises
from stepscope.readers.perfetto.sequences import Clocks, Sequence, Tracks
from stepscope.readers.source import ByteSource, Found, Reader
from stepscope.trace.metadata import Metadata
from stepscope.trace.store_writing import StoreWriter
from stepscope.trace.window import StepRange, Window

if TYPE_CHECKING:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

_UNIX_EPOCH_LIMIT_NS: Final = 10**18
_MOST_SEQUENCES: Final = 100_000
_DESCRIPTIONS: Final = frozenset({"track_descriptor", "thread_descriptor", "process_descriptor", "process_tree"})
_UNUSED: Final = {
    "ftrace_events": "events of the kernel (ftrace)",
    "gpu_counter_event": "counters of graphics work",
    "perf_sample": "samples of the processor",
    "streaming_profile_packet": "samples of the processor",
    "vulkan_api_event": "calls of Vulkan",
    "vulkan_memory_event": "memory of Vulkan",
    "android_log": "Android's log",
    "chrome_events": "events of old versions of Chrome",
}
"""Packets of other data sources that a user may expect to see."""

_ENDS_EARLY: Final = ("truncated", "compressed_data", "not_packets")

EXPLANATIONS: Final = {
    **COMMON,
    "truncated": "the file ends in the middle of a packet; what was written before that was read",
    "not_packets": "from some place on the file holds no packets any more; what was written before that was read",
    "compressed_data": "{}; what could be unpacked was read",
    "damaged_packet": "packets that cannot be decoded were skipped",
    "oversized_packet": "packets of more than 8 MiB were skipped",
    "invalid_utf8": "bytes that are no UTF-8 were replaced",
    "lost_name": "events have no name, because the packet that holds it is lost",
    "lost_packets": "the recorder says that packets before others were lost",
    "unknown_category": "slices of a category that tells nothing here were kept by their names: {}",
    "unknown_event": "track events of an unknown type were skipped",
    "unused_instant": "instants were left out: no table holds moments without a duration",
    "unused_packet": "packets that no table holds were left out: {}",
    "unmatched_end": "ends of slices that had begun before the recording were left out",
    "unclosed_slice": "slices that did not end before the recording did were left out",
    "unknown_clock": "events are on a clock that the file does not relate to the others, and were taken as they are",
    "too_many_sequences": "packets of more than 100,000 sequences were skipped",
}


def read(source: ByteSource, writer: StoreWriter, window: Window | None, steps: StepRange | None) -> Found:
    """Read the slices, counters, flows and memory instants of the track events into the tables of `writer`.

    Raises:
        NotATraceError: the packets unpack to far more than any trace does.
        UnreadableTraceError: there are no slices.
        UsageError: the requested steps do not exist.
    """
    gathering = Gathering(writer.directory)
    aside = Path(writer.directory) / "begun"
    aside.mkdir()
    try:
        content = _Content(gathering, aside)
        for packet in Packets(source, gathering.damage):
            content.take(packet)
        content.finish(source)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    if not gathering.complete_events:
        raise UnreadableTraceError(_nothing(source.name, gathering.damage))
    window = gathering.write(writer, window, steps)
    metadata = Metadata(
        path=source.name,
        format="perfetto",
        events=gathering.events,
        complete_events=gathering.complete_events,
        origin_unix_ns=content.origin_unix_ns(),
        window=window,
    )
    return metadata, warnings(gathering.damage, EXPLANATIONS)


class _Content:
    def __init__(self, gathering: Gathering, aside: Path) -> None:
        self._gathering = gathering
        self._damage: Counter[str] = gathering.damage
        self._sequences: dict[int, Sequence] = {}
        self._clocks = Clocks()
        self._tracks = Tracks(self._damage)
        self._events = Events(gathering, self._tracks, aside)

    def take(self, packet: TracePacket) -> None:
        number = packet.trusted_packet_sequence_id
        sequence = self._sequences.get(number)
        if sequence is None:
            if len(self._sequences) >= _MOST_SEQUENCES:
                self._damage["too_many_sequences"] += 1
                return
            sequence = self._sequences[number] = Sequence(number, self._damage)
        sequence.learn(packet)
        self._damage["lost_packets"] += packet.previous_packet_dropped and bool(packet.HasField("timestamp"))
        kind = packet.WhichOneof("data")
        if kind == "track_event":
            self._events.add(packet.track_event, sequence, self._time_ns(packet, packet.track_event, sequence))
        elif kind in _DESCRIPTIONS:
            self._tracks.describe(packet)
        elif kind == "clock_snapshot":
            self._clocks.add_snapshot(sequence.number, packet.clock_snapshot)
        elif kind == "gpu_render_stage_event" and packet.gpu_render_stage_event.duration:
            clock = packet.timestamp_clock_id or sequence.clock
            time_ns = min(self._clocks.time_ns(sequence.number, clock, packet.timestamp), 2**62)
            self._events.add_stage(packet.gpu_render_stage_event, sequence, time_ns)
        elif kind in _UNUSED:
            self._damage[f"unused_packet:{_UNUSED[kind]}"] += 1

    def _time_ns(self, packet: TracePacket, event: TrackEvent, sequence: Sequence) -> int:
        if packet.HasField("timestamp"):
            clock = packet.timestamp_clock_id or sequence.clock
            return min(self._clocks.time_ns(sequence.number, clock, packet.timestamp), 2**62)
        if event.timestamp_absolute_us:
            return int(event.timestamp_absolute_us) * 1000
        sequence.time_us = (sequence.time_us or 0) + event.timestamp_delta_us
        return max(-(2**62), min(sequence.time_us * 1000, 2**62))

    def finish(self, source: ByteSource) -> None:
        self._damage["unknown_clock"] += sum(self._clocks.unknown.values()) if self._mixes_clocks() else 0
        if source.damage:
            self._damage[f"compressed_data:{source.damage}"] += 1
        self._events.finish()

    def _mixes_clocks(self) -> bool:
        return len(self._clocks.unknown) > 1 or (bool(self._clocks.unknown) and self._clocks.unix_offset_ns is not None)

    def origin_unix_ns(self) -> int | None:
        origin_ns = self._gathering.origin_ns or 0
        if self._clocks.unix_offset_ns is not None:
            origin_ns += self._clocks.unix_offset_ns
        return origin_ns if _UNIX_EPOCH_LIMIT_NS < origin_ns < 2**63 else None


def _nothing(name: str, damage: Counter[str]) -> str:
    other = sorted({key.partition(":")[2] for key in damage if key.startswith("unused_packet:")})
    if other:
        return f"{name} is a Perfetto trace without a single complete slice of a track; it holds {', '.join(other)}"
    early = any(key.partition(":")[0] in _ENDS_EARLY for key, count in damage.items() if count)
    why = ": the file ends before one does, copy it again" if early else ""
    return f"{name} is a Perfetto trace without a single slice that begins and ends on a track{why}"


READER: Final = Reader("perfetto", recognises, read)
