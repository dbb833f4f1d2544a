"""Reading the Chrome trace of an XLA profile: as the profile that it was made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from stepscope.readers import xplane
from stepscope.readers.beginning import text_of
from stepscope.readers.gathering import warnings
from stepscope.readers.kineto.chunks import EventStream
from stepscope.readers.kineto.reader import EXPLANATIONS as OF_CHROME_TRACES
from stepscope.readers.source import ByteSource
from stepscope.readers.xla_json.planes import Planes
from stepscope.trace.model import Metadata, TraceWarning
from stepscope.trace.store import StoreWriter
from stepscope.trace.window import StepRange, Window

_PROCESS: Final = re.compile(rb'"name"\s*:\s*"/(?:host:(?!metadata)|device:(?:TPU|GPU|CUSTOM|CPU)\b)')
EXPLANATIONS: Final = {
    **OF_CHROME_TRACES,
    "unknown_process": "events of a process that is neither a host nor a device of XLA were left out: {}",
}


def recognises(head: bytes) -> bool:
    """Whether a Chrome trace names its processes as XLA does, which it does before all events."""
    text = text_of(head)
    return text.startswith((b"{", b"[")) and b'"ph"' in text and _PROCESS.search(text) is not None


def read(
    source: ByteSource,
    writer: StoreWriter,
    *,
    window: Window | None = None,
    steps: StepRange | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> tuple[Metadata, tuple[TraceWarning, ...]]:
    """Read a trace into `writer`'s tables, the same ones that the profile's `.xplane.pb` gives.

    Raises:
        NotATraceError: it holds no event of a host or a device.
        UsageError: steps were asked for that the trace does not have.
    """
    profile = _Profile(source)
    metadata, told = xplane.read(profile, writer, window=window, steps=steps, progress=progress)  # type: ignore[arg-type]
    return replace(metadata, format="xla_json"), (*told, *warnings(profile.stream.damage, EXPLANATIONS))


class _Profile:
    """The profile's bytes, as a source gives them."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self.name = source.name
        self.plain_path: Path | None = None
        """No file holds the content as it is."""
        self.stream = EventStream(source)

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
