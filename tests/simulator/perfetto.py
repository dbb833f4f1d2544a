"""Writes a simulated machine's run as a Perfetto trace of another tool's: track events of the Chrome profiler's kind.

Host slices begin and end on their threads' tracks, device work on one track a queue, with the categories and arguments
that the PyTorch profiler gives them. Nothing in the file is stepscope's own.
"""

from __future__ import annotations

import gzip
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TracePacket, TrackEvent

from tests.simulator.kineto import CATEGORIES, SYNCHRONISATION_KINDS, slice_arguments, work_arguments
from tests.simulator.machine import PROCESS_ID, Machine
from tests.simulator.timeline import SYNCHRONISING_CALLS

SEQUENCE = 7
INCREMENTAL_STATE_CLEARED, NEEDS_INCREMENTAL_STATE = 1, 2
PROCESS_TRACK, FIRST_THREAD_TRACK, FIRST_DEVICE_TRACK, OVERHEAD_TRACK = 1_000, 2_000, 3_000, 4_000


@dataclass(frozen=True)
class PerfettoOptions:
    """How a trace is written.

    ``start_ns`` is what the clock shows at machine time 0. ``interned`` keeps names and categories in a table of the
    sequence and refers to them by number. ``shuffle_seed`` writes the packets in another order, as several buffers
    emptied in turn do; it needs names that are not interned.
    """

    start_ns: int = 7_345_221_000_456
    interned: bool = True
    flows: bool = True
    shuffle_seed: int | None = None


def write_perfetto(machine: Machine, path: Path, options: PerfettoOptions | None = None) -> Path:
    """Write a trace; a name that ends in .gz is compressed."""
    data = perfetto_bytes(machine, options)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def perfetto_bytes(machine: Machine, options: PerfettoOptions | None = None) -> bytes:
    """The trace as a serialised message."""
    options = options or PerfettoOptions()
    packets = _Writer(machine, options).packets()
    if options.shuffle_seed is not None:
        packets = _shuffled(packets, random.Random(options.shuffle_seed))
    return bytes(Trace(packet=packets).SerializeToString())


def _shuffled(packets: list[TracePacket], order: random.Random) -> list[TracePacket]:
    """In another order, but for packets of one time: what they mean depends on which stands first."""
    by_time: dict[int, list[TracePacket]] = defaultdict(list)
    for packet in packets:
        by_time[packet.timestamp].append(packet)
    groups = list(by_time.values())
    order.shuffle(groups)
    return [packet for group in groups for packet in group]


class _Writer:
    def __init__(self, machine: Machine, options: PerfettoOptions) -> None:
        self.machine = machine
        self.options = options
        self._packets: list[TracePacket] = []
        self._timed: list[tuple[int, int, int, TracePacket]] = []
        self._names: dict[str, int] = {}
        self._categories: dict[str, int] = {}

    def packets(self) -> list[TracePacket]:
        """Descriptions of the tracks, then events in order of time."""
        self._tracks()
        launched = {work.correlation for work in self.machine.works}
        for number, host in enumerate(self.machine.hosts):
            for depth, slice_ in enumerate(host.slices):
                flow = slice_.correlation if slice_.correlation in launched else None
                place = (FIRST_THREAD_TRACK + number, CATEGORIES[slice_.category], slice_.name)
                times = (slice_.start_ns, slice_.closed_ns, depth)
                self._slice(*place, *times, slice_arguments(slice_), starts=flow)
                if slice_.name in SYNCHRONISING_CALLS:
                    self._synchronisation(slice_)
        for work in self.machine.works:
            track, arguments = self._queue_track(work.device, work.queue), work_arguments(work)
            flow = work.correlation if work.launch else None
            self._slice(track, CATEGORIES[work.kind], work.name, work.start_ns, work.end_ns, 0, arguments, ends=flow)
        for start_ns, end_ns in self.machine.ledger.overheads:
            self._slice(OVERHEAD_TRACK, "overhead", "Buffer Flush", start_ns, end_ns, 0, {})
        timed = [packet for *_, packet in sorted(self._timed, key=lambda entry: entry[:3])]
        if timed or self._packets:
            first = (self._packets or timed)[0]
            first.sequence_flags = INCREMENTAL_STATE_CLEARED | NEEDS_INCREMENTAL_STATE
            if self.options.interned:
                self._intern(first)
        return [*self._packets, *timed]

    def _tracks(self) -> None:
        process = self._track(PROCESS_TRACK)
        process.process.pid, process.process.process_name = PROCESS_ID, "python3"
        for number, host in enumerate(self.machine.hosts):
            track = self._track(FIRST_THREAD_TRACK + number, PROCESS_TRACK)
            track.thread.pid, track.thread.tid = PROCESS_ID, host.thread_id
            track.thread.thread_name = host.name
        for device in sorted({work.device for work in self.machine.works}):
            self._track(FIRST_DEVICE_TRACK + device * 100).name = f"GPU {device}"
        for device, queue in dict.fromkeys((work.device, work.queue) for work in self.machine.works):
            track = self._track(self._queue_track(device, queue), FIRST_DEVICE_TRACK + device * 100)
            track.name = f"stream {queue}"
        if self.machine.ledger.overheads:
            self._track(OVERHEAD_TRACK).name = "profiler"

    def _queue_track(self, device: int, queue: int) -> int:
        return FIRST_DEVICE_TRACK + device * 100 + queue + 1

    def _track(self, uuid: int, parent: int | None = None) -> Any:
        packet = self._packet()
        packet.track_descriptor.uuid = uuid
        if parent is not None:
            packet.track_descriptor.parent_uuid = parent
        self._packets.append(packet)
        return packet.track_descriptor

    def _packet(self) -> TracePacket:
        packet = TracePacket()
        packet.trusted_packet_sequence_id = SEQUENCE
        packet.sequence_flags = NEEDS_INCREMENTAL_STATE
        return packet

    def _synchronisation(self, slice_: Any) -> None:
        device = slice_.device or 0
        kind = SYNCHRONISATION_KINDS[slice_.name]
        arguments = {"cuda_sync_kind": kind, "correlation": slice_.correlation, "device": device}
        if slice_.queue is not None:
            arguments["stream"] = slice_.queue
        track = FIRST_DEVICE_TRACK + device * 100 + 99 - len(kind) % 7
        if all(packet.track_descriptor.uuid != track for packet in self._packets):
            self._track(track, FIRST_DEVICE_TRACK + device * 100).name = f"waits: {kind}"
        self._slice(track, "cuda_sync", kind, slice_.start_ns, slice_.closed_ns, 0, arguments)

    def _slice(
        self,
        track: int,
        category: str,
        name: str,
        start_ns: int,
        end_ns: int,
        depth: int,
        arguments: dict[str, Any],
        *,
        starts: int | None = None,
        ends: int | None = None,
    ) -> None:
        """A begin and an end: of events at one time the ends stand first, the innermost before those around it."""
        begin = self._event(track, TrackEvent.Type.TYPE_SLICE_BEGIN, start_ns)
        event = begin.track_event
        if self.options.interned:
            event.name_iid = self._names.setdefault(name, len(self._names) + 1)
            event.category_iids.append(self._categories.setdefault(category, len(self._categories) + 1))
        else:
            event.name = name
            event.categories.append(category)
        for key, value in arguments.items():
            if value is not None:
                _annotate(event.debug_annotations.add(name=key), value)
        if self.options.flows and starts is not None:
            event.flow_ids.append(starts)
        if self.options.flows and ends is not None:
            event.terminating_flow_ids.append(ends)
        end = self._event(track, TrackEvent.Type.TYPE_SLICE_END, end_ns)
        self._timed.append((start_ns, 1, depth, begin))
        empty = start_ns == end_ns
        self._timed.append((end_ns, 1 if empty else 0, depth if empty else -depth, end))

    def _event(self, track: int, kind: Any, time_ns: int) -> TracePacket:
        packet = self._packet()
        packet.timestamp = time_ns + self.options.start_ns
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet

    def _intern(self, packet: TracePacket) -> None:
        for name, number in self._names.items():
            packet.interned_data.event_names.add(iid=number, name=name)
        for name, number in self._categories.items():
            packet.interned_data.event_categories.add(iid=number, name=name)


def _annotate(annotation: Any, value: Any) -> None:
    if isinstance(value, bool):
        annotation.bool_value = value
    elif isinstance(value, int):
        annotation.int_value = value
    elif isinstance(value, float):
        annotation.double_value = value
    elif isinstance(value, (list, tuple)):
        for each in value:
            _annotate(annotation.array_values.add(), each)
    else:
        annotation.string_value = str(value)
