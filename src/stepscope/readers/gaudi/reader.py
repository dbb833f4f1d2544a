"""Reading a trace of Intel Gaudi into a trace store."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from stepscope.readers.assembly import Assembly
from stepscope.readers.gathering import warnings
from stepscope.readers.gaudi.columns import GaudiColumns
from stepscope.readers.gaudi.rows import Sorting
from stepscope.readers.kineto import own
from stepscope.readers.kineto import reader as kineto
from stepscope.readers.kineto.chunks import EventStream
from stepscope.readers.source import ByteSource
from stepscope.readers.spill import Spill
from stepscope.trace.model import Device, Metadata, TraceWarning
from stepscope.trace.store import StoreWriter
from stepscope.trace.window import StepRange, Window

EXPLANATIONS: Final = {
    **kineto.EXPLANATIONS,
    "hardware_mark": "hardware events that mark a part of what another event measures whole were left out",
}
_SIGNS: Final = re.compile(
    rb'"cat"\s*:\s*"hpu_op"'
    rb'|"HW event name"\s*:'
    rb'|"(?:name|labels)"\s*:\s*"(?:/device:HPU:\d|Synapse Logger"|Bridge Logs"|Synapse/)'
    rb'|"deviceProperties"\s*:\s*\[\s*\{[^\]]{0,400}"name"\s*:\s*"(?:GAUDI|HL-)',
    re.IGNORECASE,
)
_IS_TRACE: Final = re.compile(rb'"traceEvents"\s*:|"ph"\s*:')


def recognises(head: bytes) -> bool:
    """Whether decompressed text is that of a Chrome trace in which Intel's bridge or its hardware tracer wrote."""
    if not kineto.recognises(head) or own.is_own(head):  # a trace of this kind that stepscope itself wrote
        return False
    return _IS_TRACE.search(head) is not None and _SIGNS.search(head) is not None


def read(
    source: ByteSource,
    writer: StoreWriter,
    *,
    window: Window | None = None,
    steps: StepRange | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> tuple[Metadata, tuple[TraceWarning, ...]]:
    """Read the events of `source` into `writer`'s tables, and say what the file is and what was repaired.

    Raises:
        NotATraceError: the file holds no list of trace events.
        UnreadableTraceError: it holds one, but nothing in it could be read.
        UsageError: steps were asked for that the trace does not have.
    """
    stream = EventStream(source)
    columns = GaudiColumns(stream.damage)  # also what is after the window: what started what follows from all of it
    spill = Spill(writer.directory)
    kineto.gather(source, stream, columns, spill, progress)
    header = kineto.header_of(stream)
    Sorting(columns, spill).sort()
    spill.flush()
    origin_ns, strings = columns.origin_ns or 0, columns.pool.strings()
    assembly = Assembly(strings, spill, writer, stream.damage, origin_ns, window, steps)
    assembly.write(columns.lane_rows())
    spill.clean()
    kineto.count_endings(stream, source)
    metadata = kineto.metadata_of(source.name, header, columns, assembly.window)
    devices = _devices(header.get("deviceProperties"), columns) or metadata.devices
    return replace(metadata, format="gaudi", devices=devices), warnings(stream.damage, EXPLANATIONS)


def _devices(properties: Any, columns: GaudiColumns) -> tuple[Device, ...]:
    """The devices that worked; the bridge describes one of them, without a number."""
    told = next((item for item in properties if isinstance(item, dict)), {}) if isinstance(properties, list) else {}
    name, memory = told.get("name"), told.get("totalGlobalMem")
    memory = int(memory) if isinstance(memory, str) and memory.isdecimal() and len(memory) < 19 else memory
    return tuple(
        Device(
            device=device,
            name=name[:100].encode("utf-8", "replace").decode() if isinstance(name, str) and name else None,
            memory_bytes=memory if isinstance(memory, int) and 0 < memory < 2**62 else None,
        )
        for device in sorted({device for device, _ in columns.queues.values()})
    )
