"""Reader for XLA's profiles, `.xplane.pb`, recorded by JAX, PyTorch/XLA and TensorFlow on TPU, GPU and CPU."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from stepscope.errors import NotATraceError, UnreadableTraceError
from stepscope.readers.gathering import EXPLANATIONS as COMMON_EXPLANATIONS
from stepscope.readers.gathering import Gathering, warnings
from stepscope.readers.source import ByteSource, Found, Reader, is_json
from stepscope.readers.xplane import meanings
from stepscope.readers.xplane.content import Content, WireError, text
from stepscope.readers.xplane.device import DeviceReader, described, device_of
from stepscope.readers.xplane.host import HostFacts, HostReader, paired
from stepscope.readers.xplane.plane import Plane, Programs, event_names, read_plane
from stepscope.trace.metadata import Device, Metadata
from stepscope.trace.model import StoreWriter
from stepscope.trace.window import StepRange, Window

EXPLANATIONS: Final = {
    **COMMON_EXPLANATIONS,
    "truncated": "the file ends in the middle of a plane, which was left out together with what would have followed",
    "damaged_plane": "planes could be read in part only, for their bytes are no message from some place on",
    "damaged_line": "lines could be read in part only, for their bytes are no message from some place on",
    "damaged_event": "events whose fields make no sense were skipped",
    "damaged_name": "names of events could not be read",
    "unnamed_event": "events whose name the file lacks were skipped",
    "damaged_program": "compiled programs could not be read: what they compute has no source lines",
    "program_left_out": "compiled programs were left out, because there was too much of them",
    "recorder": "the profiler says: {}",
    "compressed_data": "{}; what could be unpacked was read",
}
_MOST_PLANES: Final = 100_000
_MOST_REMARKS: Final = 100
_LONGEST_REMARK: Final = 500
_EPOCH_NS: Final = 10**17
"""Times above this count from 1970, those below from the start of the profile."""
_REPLACEMENT: Final = b"\xef\xbf\xbd"
"""The UTF-8 replacement character, which text conversions write for invalid bytes."""


def recognises(head: bytes) -> bool:
    """Whether a file starts with a plane: a length-delimited field with a plane's name near its start."""
    if head[:1] not in (b"\n", b"\x12", b"\x1a", b"\x22") or is_json(head):
        return False
    return meanings.KNOWN_PLANE.search(head[: 2**20]) is not None


def read(source: ByteSource, writer: StoreWriter, window: Window | None, steps: StepRange | None) -> Found:
    """Read a profile into the tables of `writer`.

    Raises:
        NotATraceError: no plane has events.
        UnreadableTraceError: the first plane is damaged.
        UsageError: the requested steps do not exist.
    """
    damage: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=writer.directory, prefix="unpacked-") as folder:
        content = Content(source, Path(folder))
        try:
            if source.damage is not None:
                damage[f"compressed_data:{source.damage}"] += 1
            profile = _Profile(source.name, content, damage)
            gathering = Gathering(Path(folder), damage=damage)
            profile.read(gathering)
            read_window = gathering.write(writer, window, steps)
        finally:
            content.close()
    return profile.metadata(gathering, read_window), warnings(damage, EXPLANATIONS)


class _Profile:
    def __init__(self, name: str, content: Content, damage: Counter[str]) -> None:
        self._name = name
        self._content = content
        self._damage = damage
        self._hosts: list[str] = []
        self._planes = self._find_planes()
        self._devices: dict[str, Device] = {}
        self._facts = HostFacts()
        self._environment = next((each.stats for each in self._planes if each.name == meanings.ENVIRONMENT_PLANE), {})

    def _find_planes(self) -> list[Plane]:
        planes: list[Plane] = []
        try:
            for number, value, start, end in self._content.fields(0, self._content.size):
                if number == 1 and end > start:
                    planes.append(read_plane(self._content, start, end))
                elif number in (2, 3) and isinstance(value, bytes) and len(self._damage) < _MOST_REMARKS:
                    self._damage[f"recorder:{text(value)[:_LONGEST_REMARK]}"] += 1
                elif number == 4 and isinstance(value, bytes):
                    self._hosts.append(text(value))
                if len(planes) > _MOST_PLANES:
                    raise NotATraceError(f"{self._name} has more than {_MOST_PLANES:,} planes, as no profile does")
        except WireError as error:
            if not any(plane.name and plane.whole for plane in planes):
                raise UnreadableTraceError(self._refusal(error)) from None
            self._damage["truncated"] += 1
        self._damage["damaged_plane"] += sum(not plane.whole for plane in planes)
        return planes

    def _refusal(self, error: WireError) -> str:
        replaced = self._content.read(0, 2**20).count(_REPLACEMENT)
        why = (
            f"it was converted as if it were text, which replaced bytes in {replaced:,} places of its first MiB: copy "
            "the profile again, as it is"
            if replaced > 10
            else "copy or record the profile again"
        )
        return f"{self._name} begins like an XLA profile (.xplane.pb), but is damaged or cut off: {error}; {why}"

    def read(self, gathering: Gathering) -> None:
        """Gather the events of all planes, hosts first, since their calls explain the devices' copies.

        Raises NotATraceError if there are no events.
        """
        by_name = {plane.name: plane for plane in self._planes}
        programs = Programs(self._content, by_name.get(meanings.METADATA_PLANE), self._damage)
        host = HostReader(self._content, gathering, programs, self._facts, self._hosts[0] if self._hosts else None)
        for plane in self._planes:
            if meanings.HOST_PLANES.match(plane.name):
                host.read(plane, dict(event_names(self._content, plane, self._damage)))
        device = DeviceReader(self._content, gathering, programs, self._facts)
        for plane in self._planes:
            if meanings.DEVICE_PLANE.fullmatch(plane.name):
                number, part = device_of(plane.name)
                if not part or number not in self._devices:
                    self._devices[number] = described(plane, number)
                device.read(plane, dict(event_names(self._content, plane, self._damage)))
        if self._facts.memory:
            gathering.add("memory", paired(self._facts.memory))
        if not gathering.events:
            found = ", ".join(repr(plane.name[:50]) for plane in self._planes[:5]) or "none"
            raise NotATraceError(f"{self._name} is an XLA profile without a single event (its planes: {found})")

    def metadata(self, gathering: Gathering, window: Window | None) -> Metadata:
        begin = self._environment.get("profile_start_time")
        first = gathering.origin_ns or 0
        origin = first if first > _EPOCH_NS else begin + first if isinstance(begin, int) and begin > 0 else None
        recorded = [*(["stacks"] if self._facts.frames else []), *(["memory"] if self._facts.memory else [])]
        return Metadata(
            path=self._name,
            format="xplane",
            events=gathering.events,
            complete_events=gathering.complete_events,
            origin_unix_ns=origin,
            host=self._hosts[0] if self._hosts else None,
            devices=tuple(self._devices[number] for number in sorted(self._devices)),
            recorded=tuple(recorded),
            window=window,
        )


READER: Final = Reader("xplane", recognises, read)
