"""Where events happen: tracks, described anywhere in the file, as lanes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stepscope.readers.gathering import Gathering
from stepscope.readers.perfetto.sequences import plain

if TYPE_CHECKING:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackDescriptor

_DEEPEST: Final = 16
_DEVICE: Final = re.compile(r"(?:GPU|TPU|HPU|device|agent)\W{0,3}(\d{1,9})", re.IGNORECASE)
_QUEUE: Final = re.compile(r"(?:stream|queue)\W{0,3}(\d{1,20})", re.IGNORECASE)


@dataclass(slots=True)
class Track:
    """What the file says of a track; a second description adds to the first."""

    parent: int = 0
    name: str = ""
    process: int | None = None
    process_name: str = ""
    thread: int | None = None
    is_incremental: bool = False
    unit: int = 1


class Tracks:
    """Tracks by number, and threads that old files describe without one.

    A queue is a track on which a device worked; its device and number are those of its first work, else of its names.
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
        """A small number for a track, or for (process, thread)."""
        code = self._codes.get(place)
        if code is None:
            code = self._codes[place] = len(self._places)
            self._places.append(place)
        return code

    def place(self, code: int) -> int | tuple[int, int]:
        """What a small number stands for."""
        return self._places[code]

    def describe(self, packet: TracePacket) -> None:
        """Take a packet's descriptions."""
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
        """Name of a counter's track, whether its values add up, and what they are multiplied with."""
        place = self._places[code]
        track = self._tracks.get(place, Track()) if isinstance(place, int) else Track()
        return track.name or f"counter {place}", track.is_incremental, track.unit

    def works_for(self, code: int, device: str | None, queue: str | None) -> None:
        """Note that a device worked on this track."""
        self._queues.setdefault(code, (device, queue))

    def queue(self, code: int) -> tuple[str, str]:
        """Device and queue of a track on which a device worked."""
        device, queue = self._queues.get(code, (None, None))
        if device is None or queue is None:
            names = [track.name for track in self._around(self._places[code])]
            found = next((match[1] for name in names if (match := _DEVICE.search(name))), None)
            device = found or "0" if device is None else device
            match = _QUEUE.search(names[0]) if names else None
            queue = (match[1] if match else str(self._places[code])) if queue is None else queue
        return device, queue

    def lane(self, code: int, gathering: Gathering, *, is_host: bool) -> int:
        """The lane of a track; `is_host`: whether a thread's operators, calls or frames stand on it."""
        place = self._places[code]
        around = self._around(place)
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

    def _around(self, place: int | tuple[int, int]) -> list[Track]:
        """A track and those it stands below, the innermost first."""
        found: list[Track] = []
        while isinstance(place, int) and place in self._tracks and len(found) < _DEEPEST:
            found.append(self._tracks[place])
            place = self._tracks[place].parent
        return found
