"""Reader for Perfetto traces: protobuf packets of track events."""

from __future__ import annotations

import re
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

import zstandard

from stepscope.errors import UnreadableTraceError, UsageError
from stepscope.readers.gathering import EXPLANATIONS as COMMON
from stepscope.readers.gathering import Gathering, warnings
from stepscope.readers.perfetto.events import Events
from stepscope.readers.perfetto.sequences import Clocks, Sequence, Tracks
from stepscope.readers.source import ByteSource, Reader, ReadResult, current, is_json
from stepscope.trace.metadata import Metadata
from stepscope.trace.model import StoreWriter
from stepscope.trace.window import StepRange, Window

if TYPE_CHECKING:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TracePacket, TrackEvent


def trace_message() -> type[Trace]:
    """Return Perfetto's message type; raise UsageError without the package, or if protobuf is too old for it."""
    try:
        messages = import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    except _unusable() as error:
        raise UsageError(
            "reading a Perfetto trace needs the packages perfetto and protobuf in compatible versions "
            f"({str(error).partition('. ')[0]}): pip install --upgrade 'stepscope[perfetto]' protobuf"
        ) from error
    found: type[Trace] = messages.Trace
    return found


def _unusable() -> tuple[type[Exception], ...]:
    """The errors raised if the package is missing, or was generated for a newer protobuf."""
    try:
        version = import_module("google.protobuf.runtime_version")
    except ImportError:
        return (ImportError, TypeError)
    return (ImportError, TypeError, version.VersionError)


LARGEST_PACKET_BYTES: Final = 4 * 2**20
"""Packets take hundreds of bytes; decoding one of this size made only of empty messages takes several hundred MB."""
LARGEST_UNPACKED_BYTES: Final = 64 * 2**20
"""Limit for one compressed packet."""
_TOGETHER_BYTES: Final = 2**18
_PACKET_TAG: Final = 0x0A
_EMPTY_PACKETS: Final = re.compile(rb"(?:\n\0){1,60000}")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_TELLING_FIELDS: Final = frozenset(
    {
        (3, _VARINT),  # trusted_uid
        (8, _VARINT),  # timestamp
        (10, _VARINT),  # trusted_packet_sequence_id
        (11, _BYTES),  # track_event
        (12, _BYTES),  # interned_data
        (13, _VARINT),  # sequence_flags
        (33, _BYTES),  # trace_config
        (36, _BYTES),  # synchronization_marker
        (41, _VARINT),  # incremental_state_cleared
        (50, _BYTES),  # compressed_packets
        (58, _VARINT),  # timestamp_clock_id
        (59, _BYTES),  # trace_packet_defaults
        (60, _BYTES),  # track_descriptor
        (89, _BYTES),  # trace_uuid
        (133, _BYTES),  # zstd_compressed_packets
    }
)
"""Fields of a packet that identify a Perfetto trace.

No other protobuf file whose first field is a message has them; XLA's planes have fields 1 to 6.
"""
_MOST_FIELDS: Final = 64
_COMPRESSED: Final = ("compressed_packets", "zstd_compressed_packets")


def recognises(head: bytes) -> bool:
    """Whether a file starts with a packet of a Perfetto trace."""
    if head[:1] != bytes([_PACKET_TAG]) or is_json(head):
        return False
    length, position = _varint(head, 1)
    if length is None or length > 2**32:
        return False
    end = position + length
    for _ in range(_MOST_FIELDS):
        tag, position = _varint(head, position)
        if tag is None or position >= end or not tag >> 3:
            return False
        if (tag >> 3, tag & 7) in _TELLING_FIELDS:
            return True
        skipped = _end_of_value(head, position, tag & 7)
        if skipped is None or skipped > end:
            return False
        position = skipped
    return False


class Packets:
    """The packets of a file, in order; `damage` counts those that could not be read."""

    def __init__(self, source: ByteSource, damage: Counter[str]) -> None:
        self._source = source
        self._damage = damage

    def __iter__(self) -> Iterator[tuple[str | None, TracePacket]]:
        """Yield decoded packets with what they are (`data`), including those in compressed packets.

        Raises TooLargeError or UsageError.
        """
        trace = trace_message()
        for text in self._framed():
            for packet in self._decoded(text, trace):
                kind = packet.WhichOneof("data")
                if kind not in _COMPRESSED:
                    yield kind, packet
                    continue
                for part in self._whole_packets(self._decompressed(packet)):
                    for each in self._decoded(part, trace):
                        kind = each.WhichOneof("data")
                        if kind in _COMPRESSED:
                            self._damage["damaged_packet"] += 1
                        else:
                            yield kind, each

    def _framed(self) -> Iterator[bytes]:
        rest, skip = b"", 0
        for block in self._source.blocks():
            if skip >= len(block):
                skip -= len(block)
                continue
            data = rest + block[skip:]
            skip = begin = position = 0
            while True:
                end = _end_of_packet(data, position)
                if end is None:  # not a packet
                    self._damage["not_packets"] += 1
                    if position > begin:
                        yield data[begin:position]
                    return
                if end - position > LARGEST_PACKET_BYTES:
                    self._damage["oversized_packet"] += 1
                    if position > begin:
                        yield data[begin:position]
                    begin = position = min(end, len(data))
                    skip = end - position
                    if skip:
                        break
                    continue
                if not end or end > len(data):
                    break
                position = end
                if position - begin >= _TOGETHER_BYTES:
                    yield data[begin:position]
                    begin = position
            if position > begin:
                yield data[begin:position]
            rest = data[position:]
        if rest or skip:
            self._damage["truncated"] += 1

    def _whole_packets(self, text: bytes) -> Iterator[bytes]:
        """Yield whole packets of decompressed text, several at a time, since decoding multiplies the size."""
        begin = position = 0
        while position < len(text):
            end = _end_of_packet(text, position)
            if not end or end > len(text):
                self._damage["damaged_packet"] += 1
                break
            empty = _EMPTY_PACKETS.match(text, position)
            is_oversized = end - position > LARGEST_PACKET_BYTES
            if empty is not None or is_oversized:
                self._damage["oversized_packet"] += is_oversized
                if position > begin:
                    yield text[begin:position]
                begin = position = end if empty is None else empty.end()
                continue
            position = end
            if position - begin >= _TOGETHER_BYTES:
                yield text[begin:position]
                begin = position
        if position > begin:
            yield text[begin:position]

    def _decoded(self, text: bytes, trace: type[Trace]) -> Iterator[TracePacket]:
        from google.protobuf.message import DecodeError

        try:
            yield from trace.FromString(text).packet
            return
        except DecodeError:
            pass
        position = 0
        while position < len(text):
            end = _end_of_packet(text, position)
            if not end or end > len(text):
                self._damage["damaged_packet"] += 1
                return
            try:
                yield from trace.FromString(text[position:end]).packet
            except DecodeError:
                self._damage["damaged_packet"] += 1
            position = end

    def _decompressed(self, packet: TracePacket) -> bytes:
        """The serialised trace in a compressed packet."""
        try:
            if packet.HasField("compressed_packets"):
                unpacked = zlib.decompressobj().decompress(packet.compressed_packets, LARGEST_UNPACKED_BYTES)
            else:
                unpacked = (
                    zstandard.ZstdDecompressor()
                    .decompressobj(read_across_frames=False)
                    .decompress(_bounded(packet.zstd_compressed_packets))
                )
        except (zlib.error, zstandard.ZstdError, MemoryError):
            self._damage["damaged_packet"] += 1
            return b""
        current().unpack(len(unpacked), self._source.read_bytes)
        return unpacked


def _bounded(data: bytes) -> bytes:
    """Return compressed data if it declares an acceptable size, else raise zstandard.ZstdError."""
    size = zstandard.frame_content_size(data)
    if not 0 <= size <= LARGEST_UNPACKED_BYTES:
        raise zstandard.ZstdError("the size is missing or too large")
    return data


def _end_of_packet(data: bytes, position: int) -> int | None:
    """The end of the field at `position`, maybe beyond the data; 0 if not known yet, None if it is not a packet."""
    if position + 3 <= len(data) and data[position] == _PACKET_TAG:  # of nearly all packets the length is short, too
        first, second = data[position + 1], data[position + 2]
        if first < 0x80:
            return position + 2 + first
        if second < 0x80:
            return position + 3 + (first & 0x7F | second << 7)
    tag, after_tag = _varint(data, position)
    if tag is None:
        return 0 if len(data) - position < 10 else None
    if tag >> 3 == 0 or tag >> 3 > 2**29 - 1:
        return None
    if tag & 7 == _BYTES:
        length, after_length = _varint(data, after_tag)
        if length is None:
            return 0 if len(data) - after_tag < 10 else None
        return after_length + length if length < 2**40 else None
    if tag & 7 == _VARINT:
        value, end = _varint(data, after_tag)
        return end if value is not None else (0 if len(data) - after_tag < 10 else None)
    size = {_FIXED64: 8, _FIXED32: 4}.get(tag & 7)
    return None if size is None else after_tag + size


def _varint(data: bytes, position: int) -> tuple[int | None, int]:
    """A number and the position after it; None if it does not end within the data and ten bytes."""
    value = shift = 0
    for place in range(position, min(position + 10, len(data))):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    return None, position


def _end_of_value(data: bytes, position: int, wire_type: int) -> int | None:
    """The position after a field's value; None for unknown types."""
    if wire_type == _BYTES:
        length, begin = _varint(data, position)
        return None if length is None else begin + length
    if wire_type == _VARINT:
        value, end = _varint(data, position)
        return None if value is None else end
    return {_FIXED64: position + 8, _FIXED32: position + 4}.get(wire_type)


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
    "truncated": "the file is truncated within a packet; the packets before it were read",
    "not_packets": "the file continues with something other than packets; the packets before that were read",
    "compressed_data": "{}; what could be unpacked was read",
    "damaged_packet": "packets that cannot be decoded were skipped",
    "oversized_packet": "packets of more than 8 MiB were skipped",
    "invalid_utf8": "bytes that are not UTF-8 were replaced",
    "lost_name": "events have no name, because the packet with their names is lost",
    "lost_packets": "the recorder says that packets before others were lost",
    "unknown_category": "slices of an unknown category were classified by their names: {}",
    "unknown_event": "track events of an unknown type were skipped",
    "unused_instant": "instants were left out: a trace has no table for them",
    "unused_packet": "packets of kinds that a trace has no table for were left out: {}",
    "unmatched_end": "ends of slices that had begun before the recording were left out",
    "unclosed_slice": "slices that did not end before the recording did were left out",
    "unknown_clock": "events are on a clock that the file does not relate to others; their times were used as they are",
    "too_many_sequences": "packets of more than 100,000 sequences were skipped",
}


def read(source: ByteSource, writer: StoreWriter, window: Window | None, steps: StepRange | None) -> ReadResult:
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
        for kind, packet in Packets(source, gathering.damage):
            content.take(kind, packet)
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

    def take(self, kind: str | None, packet: TracePacket) -> None:
        number = packet.trusted_packet_sequence_id
        sequence = self._sequences.get(number)
        if sequence is None:
            if len(self._sequences) >= _MOST_SEQUENCES:
                self._damage["too_many_sequences"] += 1
                return
            sequence = self._sequences[number] = Sequence(number, self._damage)
        sequence.learn(kind, packet)
        if packet.previous_packet_dropped and packet.HasField("timestamp"):
            self._damage["lost_packets"] += 1
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
        if (timestamp := packet.timestamp) or packet.HasField("timestamp"):
            clock = packet.timestamp_clock_id or sequence.clock
            return min(self._clocks.time_ns(sequence.number, clock, timestamp), 2**62)
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
        return f"{name} is a Perfetto trace without a single complete slice of a track; it contains {', '.join(other)}"
    early = any(key.partition(":")[0] in _ENDS_EARLY for key, count in damage.items() if count)
    why = ": the file is truncated, copy it again" if early else ""
    return f"{name} is a Perfetto trace without a single slice that begins and ends on a track{why}"


READER: Final = Reader("perfetto", recognises, read)
