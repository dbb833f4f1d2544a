"""Reading a rocprofv3 file into a trace store."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from stepscope.errors import NotATraceError, UnreadableTraceError
from stepscope.readers.beginning import text_of
from stepscope.readers.gathering import EXPLANATIONS as COMMON
from stepscope.readers.gathering import Gathering, warnings
from stepscope.readers.rocprof.document import Document, Path, Wanted
from stepscope.readers.rocprof.process import Process
from stepscope.readers.rocprof.records import decode_records
from stepscope.readers.source import ByteSource
from stepscope.trace.model import Device, Metadata, TraceWarning
from stepscope.trace.store import StoreWriter
from stepscope.trace.window import StepRange, Window

_BEGINNING: Final = re.compile(rb'\A\{\s*"rocprofiler-sdk-tool"\s*:')
_ROOT: Final = ("rocprofiler-sdk-tool",)
_ENTERED: Final[tuple[Path, ...]] = (
    (),
    _ROOT,
    (*_ROOT, "[]"),
    (*_ROOT, "[]", "strings"),
    (*_ROOT, "[]", "buffer_records"),
)
_DESCRIPTIONS: Final = ("metadata", "agents", "kernel_symbols")
_SMALL_BYTES: Final = 2**16
_MOST_SMALL_PARTS: Final = 20_000
"""A file has some twenty for each process that the tool followed."""
_STRINGS: Final = ("buffer_records", "marker_api")
_SAMPLES: Final = ("pc_sample_host_trap", "pc_sample_stochastic", "scratch_memory", "memory_allocation")
"""Lists that no table takes: samples inside of kernels, and memory that the driver handed out."""

EXPLANATIONS: Final = {
    **COMMON,
    "truncated": "the file ends before it is complete; the records that stand before that were read",
    "compressed_data": "{}; what could be unpacked was read",
    "damaged_record": "records that are no valid JSON, or without a start and an end, were skipped",
    "damaged_description": "agents, kernels or names that could not be read were left out",
    "unnamed_kernel": "kernels that the file does not describe are called by their number",
    "unnamed_operation": "calls and copies that the file does not name are called by their number",
    "copy_on_host": "copies from host memory to host memory were left out",
    "oversized_value": "values far longer than any that the tool writes were left out",
}


def recognises(head: bytes) -> bool:
    """Whether a file begins like rocprofv3's JSON."""
    return _BEGINNING.match(text_of(head)) is not None


def read(
    source: ByteSource,
    writer: StoreWriter,
    *,
    window: Window | None = None,
    steps: StepRange | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> tuple[Metadata, tuple[TraceWarning, ...]]:
    """Read kernels, copies, calls of HIP and HSA, and roctx ranges into `writer`'s tables.

    Raises:
        NotATraceError: it is of more processes than any profile.
        UnreadableTraceError: the file holds no record that could be read.
        UsageError: steps were asked for that the trace does not have.
    """
    gathering = Gathering(writer.directory)
    document = Document(source, _wanted)
    process = Process(gathering)
    devices: dict[str, Device] = {}
    small = 0
    for path, text in document.parts():
        key = path[-1]
        small += len(text) < _SMALL_BYTES
        if small > _MOST_SMALL_PARTS:
            raise NotATraceError(
                f"{source.name} has more than {_MOST_SMALL_PARTS:,} short lists of records, as no profile does"
            )
        if path[2:-1] == ("buffer_records",):
            process.add(key, decode_records(text, gathering.damage))
        else:
            if key == "metadata":  # the first value of each process
                process = Process(gathering)
            process.describe(key, text)
            devices |= {device.device: device for device in process.devices}
        if progress is not None:
            progress(source.read_bytes, source.total_bytes)
    if not gathering.complete_events:
        raise UnreadableTraceError(
            f"{source.name} is a rocprofv3 profile without a single kernel, copy, call or range: "
            "record with rocprofv3 --runtime-trace --output-format json"
        )
    _count_damage(gathering, document, source)
    window = gathering.write(writer, window, steps)
    metadata = Metadata(
        path=source.name,
        format="rocprof",
        events=gathering.events,
        complete_events=gathering.complete_events,
        devices=tuple(devices.values()),
        window=window,
    )
    return metadata, warnings(gathering.damage, EXPLANATIONS)


def _wanted(path: Path) -> Wanted:
    if path in _ENTERED:
        return "enter"
    parent, key = path[2:-1], path[-1]
    if parent == () and key in _DESCRIPTIONS and len(path) == len(_ROOT) + 2:
        return "whole"
    if parent == ("strings",) and key in _STRINGS:
        return "whole"
    if parent == ("buffer_records",) and key not in _SAMPLES:
        return "pieces"
    return "skip"


def _count_damage(gathering: Gathering, document: Document, source: ByteSource) -> None:
    damage = gathering.damage
    damage["oversized_value"] += document.dropped
    damage["truncated"] += not document.closed
    if source.damage:
        damage[f"compressed_data:{source.damage}"] += 1
