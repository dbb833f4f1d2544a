"""Reader for the PyTorch profiler's Chrome-trace JSON, which Kineto writes for CUDA, ROCm, MTIA and the CPU."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from stepscope.errors import UnreadableTraceError
from stepscope.files import text_of
from stepscope.readers.assembly import Assembly, Spill
from stepscope.readers.gathering import EXPLANATIONS as COMMON
from stepscope.readers.gathering import warnings
from stepscope.readers.kineto.arguments import RECORDED
from stepscope.readers.kineto.columns import Columns
from stepscope.readers.kineto.events import DECODE_ERRORS, Damage, Event, EventStream
from stepscope.readers.kineto.scanned import Scan, scan
from stepscope.readers.source import ByteSource, Reader, ReadResult
from stepscope.trace.metadata import Device, Metadata
from stepscope.trace.model import StoreWriter
from stepscope.trace.program_facts import KEY, from_header
from stepscope.trace.window import StepRange, Window

_WANTED: Final = frozenset(
    {*RECORDED, KEY, "traceEvents", "distributedInfo", "deviceProperties", "baseTimeNanoseconds", "host_name"}
)
_LONGEST_NAME: Final = 100
_LENIENT_BYTES: Final = 2**21
_BLANK: Final = b" \t\r\n\0"
_UNIX_EPOCH_LIMIT_NS: Final = 10**18

EXPLANATIONS: Final = {
    **COMMON,
    "truncated": "the file is truncated within its list of events; the events before that were read",
    "compressed_data": "{}; what could be unpacked was read",
    "damaged_event": "events that are not valid JSON were skipped",
    "repaired_event": "events next to damaged text were read one by one",
    "damaged_arguments": "events' arguments could not be read and were left out",
    "damaged_argument": "single arguments of a wrong type were left out",
    "invalid_utf8": "bytes that are not UTF-8 were replaced",
    "incomplete_event": "events without a start or a duration were skipped",
    "event_without_time": "events with start and duration 0 were skipped",
    "oversized_event": "text without an event boundary for 64 MiB was skipped",
    "repeated_events": "a second list of events in the same file was left out",
    "oversized_header": "the file's header is longer than 16 MiB, and the rest of it was left out",
    "damaged_header": "the file's header could not be read",
    "unknown_category": "events of an unknown category were kept as annotations: {}",
    "uncategorised": "events without a category were classified by their names",
    "unclosed": "slices that begin (B, b) and do not end in the file were left out",
    "unopened": "ends (E, e) of slices that do not begin in the file were left out",
    "unsupported_phase": "events of a phase this reader does not use were skipped: {}",
}


def recognises(head: bytes) -> bool:
    """Whether decompressed text starts like a Chrome trace: an object, or a list of objects with a phase."""
    text = text_of(head)
    if text.startswith(b"["):
        return re.match(rb"\[\s*(?:\{|$)", text) is not None and (b'"ph"' in text or len(text) < len(head) // 2)
    return text.startswith(b"{")


def read(source: ByteSource, writer: StoreWriter, window: Window | None, steps: StepRange | None) -> ReadResult:
    """Read the events of `source` into the tables of `writer`.

    Raises:
        NotATraceError: there is no list of trace events.
        UnreadableTraceError: there is a list, but nothing in it could be read.
        UsageError: the requested steps do not exist.
    """
    stream = EventStream(source)
    columns = Columns(stream.damage, window.end_ns if window else 2**62)
    spill = Spill(writer.directory)
    gather(source.name, stream.scans(scan), columns, spill)
    header = header_of(stream)
    spill.flush()
    origin_ns = columns.origin_ns or 0
    strings = columns.pool.strings()
    assembly = Assembly(strings, spill, writer, stream.damage, origin_ns, window, steps)
    assembly.write(columns.lane_rows())
    spill.clean()
    count_endings(stream, source)
    metadata = metadata_of(source.name, header, columns, assembly.window)
    return metadata, warnings(stream.damage, EXPLANATIONS)


def gather(name: str, chunks: Iterable[list[Event] | Scan], columns: Columns, spill: Spill) -> None:
    """Convert all events to rows of `spill`; raise UnreadableTraceError if no event has a start and a duration."""
    for events in chunks:
        spill.add(columns.batch(events))
    columns.pairs.finish()
    if not columns.complete_events:
        raise UnreadableTraceError(f"{name} is a trace without a single event that has a start and a duration")


def count_endings(stream: EventStream, source: ByteSource) -> None:
    """Count in `damage` whether the event list, the document or the compressed data ends early."""
    if not (stream.closed and (not stream.before or stream.after.rstrip(_BLANK).endswith(b"}"))):
        stream.damage["truncated"] += 1
    if source.damage:
        stream.damage[f"compressed_data:{source.damage}"] += 1


def header_of(stream: EventStream) -> dict[str, Any]:
    """Return the wanted keys of the document outside the event list; the first of a repeated key counts."""
    before, after, damage = stream.before, stream.after, stream.damage
    found: dict[str, Any] = {}
    texts = []
    if opened := before.strip().rstrip(b",").strip().removeprefix(b"{").strip():
        texts.append(b"{" + opened + b"}")
    if closed := after.strip(_BLANK).removeprefix(b"]").strip(_BLANK).removeprefix(b",").strip(_BLANK):
        texts.append(b"{" + closed if closed != b"}" else b"{}")
    for text in texts:
        for key, value in _values(text, damage).items():
            found.setdefault(key, value)
    if "traceEvents" in found:
        damage["repeated_events"] += 1
    return found


def _values(text: bytes, damage: Damage) -> dict[str, Any]:
    """Return the wanted values of a JSON object, without decoding the others, which may be long."""
    try:
        raws = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        wanted = {key: bytes(raw) for key, raw in raws.items() if key in _WANTED}
        return {key: json.loads(raw) if key != "traceEvents" else None for key, raw in wanted.items()}
    except (*DECODE_ERRORS, ValueError):
        pass
    try:
        value = json.loads(text[:_LENIENT_BYTES].decode("utf-8", "replace"), strict=False)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        damage["damaged_header"] += 1
        return {}
    return {key: item for key, item in value.items() if key in _WANTED}


def metadata_of(path: str, header: dict[str, Any], columns: Columns, window: Window | None) -> Metadata:
    distributed = header.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    recorded = tuple(word for key, word in RECORDED.items() if header.get(key))
    origin_ns = columns.origin_ns or 0
    base_ns = _whole_number(header.get("baseTimeNanoseconds"))
    unix_ns = origin_ns + base_ns if base_ns else (origin_ns if origin_ns > _UNIX_EPOCH_LIMIT_NS else None)
    return Metadata(
        path=path,
        format="kineto",
        events=columns.events,
        complete_events=columns.complete_events,
        rank=_whole_number(distributed.get("rank")),
        world_size=_whole_number(distributed.get("world_size")),
        backend=_text(distributed.get("backend")),
        origin_unix_ns=unix_ns if unix_ns is None or unix_ns < 2**63 else None,
        host=_text(header.get("host_name")),
        devices=_devices(header.get("deviceProperties")),
        recorded=recorded or None,
        window=window,
        program=from_header(header.get(KEY)),
    )


def _devices(properties: Any) -> tuple[Device, ...]:
    if not isinstance(properties, list):
        return ()
    found = []
    for item in properties:
        if isinstance(item, dict) and "id" in item:
            major, minor = _whole_number(item.get("computeMajor")), _whole_number(item.get("computeMinor"))
            found.append(
                Device(
                    device=str(item["id"])[:_LONGEST_NAME].encode("utf-8", "replace").decode(),
                    name=_text(item.get("name")) or None,
                    memory_bytes=_whole_number(item.get("totalGlobalMem")),
                    compute_capability=None if major is None or minor is None else f"{major}.{minor}",
                    multiprocessors=_whole_number(item.get("numSms")),
                )
            )
    return tuple(found)


def _whole_number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**62 else None


def _text(value: Any) -> str | None:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None


READER: Final = Reader("kineto", recognises, read)
