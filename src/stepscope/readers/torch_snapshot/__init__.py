"""Reader for PyTorch's memory snapshots, as pickled by `torch.cuda.memory._dump_snapshot`, or as JSON.

A snapshot has the allocator's segments at the time it was taken and, for each device, the last events before that. The
totals at each event are computed from the final segments by undoing the events.

Pickles are read by the standard library's unpickler in Python, restricted to plain values. The one in C is six times as
fast, but cannot be limited: a file of nine bytes makes it allocate 16 GiB (a memo index of 2**30), and a key of tuples
nested a million deep overflows its stack, which ends the process.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeAlias

from stepscope.errors import NotATraceError, UsageError
from stepscope.readers.budget import current
from stepscope.readers.source import ByteSource, Found, Reader, text_of
from stepscope.readers.torch_snapshot.device import (
    FIRST_EVENT_NS,
    DeviceEvents,
    Stacks,
    segments_by_device,
    write_tables,
)
from stepscope.trace.metadata import Device, Metadata, TraceWarning
from stepscope.trace.store_writing import StoreWriter
from stepscope.trace.window import StepRange, Window

Plain: TypeAlias = "dict[Any, Any] | list[Any] | tuple[Any, ...] | str | bytes | int | float | bool | None"

_PIECE_BYTES: Final = 1 << 20
"""Bytes of the pickle between two checks of time and memory; each byte may be a value."""
_LONGEST_NUMBER: Final = 16
_KEYS: Final = (str, int, float, bool, type(None))
_OBJECTS: Final = frozenset(b"cRi\x93\x81\x92obPQ\x82\x83\x84\x97\x98")
"""Opcodes that are rejected: GLOBAL, REDUCE, INST, STACK_GLOBAL, NEWOBJ, NEWOBJ_EX, OBJ, BUILD, persistent identifiers,
extensions and buffers.
"""


class _RefusedError(Exception):
    """Why a pickle is rejected, in words that follow "is a Python pickle that "."""


def load(data: bytes, name: str) -> Plain:
    """Return the value of a pickle of protocol 2 to 5.

    Raises NotATraceError if it is damaged or holds more than plain values.
    """
    unpickler = _PlainUnpickler(data)
    try:
        value: Plain = unpickler.load()
        unpickler.account()
    except (_RefusedError, EOFError) as error:
        raise NotATraceError(f"{name} is a Python pickle that {str(error) or 'is cut off'}") from None
    except (
        *(pickle.UnpicklingError, LookupError, struct.error, UnicodeDecodeError, AttributeError, TypeError, ValueError),
        *(OverflowError, MemoryError),
    ) as error:
        raise NotATraceError(
            f"{name} is a Python pickle that is damaged or cut off ({type(error).__name__}: {error})"
        ) from None
    return value


class _Pieces(io.RawIOBase):
    def __init__(self, data: bytes, each: Callable[[], None]) -> None:
        self._rest = memoryview(data)
        self._each = each

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._each()
        piece = self._rest[: min(len(buffer), _PIECE_BYTES)]
        buffer[: len(piece)] = piece
        self._rest = self._rest[len(piece) :]
        return len(piece)


class _PlainUnpickler(pickle._Unpickler):
    """The standard library's unpickler, restricted to plain values, which it counts."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {}  # filled below
    stack: list[Any]
    metastack: list[list[Any]]
    memo: dict[int, Any]
    read: Callable[[int], bytes]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BufferedReader(_Pieces(data, self.account), _PIECE_BYTES))
        self.containers = 0
        self._accounted = 0
        self._budget = current()

    def account(self) -> None:
        """Spend the values made since the last call; each costs one byte of the file, but up to a hundred of memory."""
        made = self.containers + len(self.memo)
        self._budget.spend("values", made - self._accounted)
        self._accounted = made
        self._budget.require("values", len(getattr(self, "stack", ())))
        self._budget.tick()

    def mark(self) -> None:
        self._budget.require("depth", len(self.metastack) + 1)
        pickle._Unpickler.dispatch[pickle.MARK[0]](self)  # type: ignore[arg-type]

    def skip_frame(self) -> None:
        self.read(8)

    def long1(self) -> None:
        length = self.read(1)[0]
        if length > _LONGEST_NUMBER:
            raise _RefusedError("holds a number of more than 16 bytes")
        self.stack.append(int.from_bytes(self.read(length), "little", signed=True))

    def dict_to_mark(self) -> None:
        values = self.pop_mark()
        self.stack.append({})
        self._fill(values)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key, value])

    def set_items(self) -> None:
        self._fill(self.pop_mark())

    def _fill(self, values: list[Any]) -> None:
        """Set items of the dictionary on top of the stack, from alternating keys and values."""
        target = self.stack[-1]
        if type(target) is not dict:
            raise _RefusedError("sets items of something that is no dictionary")
        if len(values) % 2:
            raise _RefusedError("is damaged: a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in _KEYS:  # hashing a deeply nested tuple could overflow the interpreter's stack
                raise _RefusedError("has keys that are neither texts nor numbers")
            target[key] = value


def _refused(code: int) -> Callable[[Any], None]:
    def refuse(_: Any) -> None:
        raise _RefusedError(
            "holds objects of Python classes, which could run code: not read; a memory snapshot holds none"
            if code in _OBJECTS
            else f"has an operation that memory snapshots do not use ({bytes([code])!r})"
        )

    return refuse


def _counted(operation: Callable[[Any], None]) -> Callable[[Any], None]:
    def count(unpickler: _PlainUnpickler) -> None:
        unpickler.containers += 1
        operation(unpickler)

    return count


_CONTAINERS: Final = b"}])tld\x85\x86\x87"
_OTHERS: Final = b"\x80(012aesuN\x88\x89KMJ\x8aG\x8cX\x8dCB\x8e\x94qrhj.\x95"
_OWN: Final[dict[int, Callable[[Any], None]]] = {
    pickle.MARK[0]: _PlainUnpickler.mark,
    pickle.FRAME[0]: _PlainUnpickler.skip_frame,
    pickle.LONG1[0]: _PlainUnpickler.long1,
    pickle.DICT[0]: _PlainUnpickler.dict_to_mark,
    pickle.SETITEM[0]: _PlainUnpickler.set_item,
    pickle.SETITEMS[0]: _PlainUnpickler.set_items,
}
_KNOWN: Final[dict[int, Callable[[Any], None]]] = {**pickle._Unpickler.dispatch, **_OWN}
_PlainUnpickler.dispatch.update({code: _refused(code) for code in range(256)})
_PlainUnpickler.dispatch.update({code: _KNOWN[code] for code in _OTHERS})
_PlainUnpickler.dispatch.update({code: _counted(_KNOWN[code]) for code in _CONTAINERS})


MOST_DEVICES: Final = 1024
MOST_BYTES: Final = 1 << 61
"""Limit for the bytes of all events together; sums are kept in 64 bits."""

_PICKLES: Final = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_EPOCH_US: Final = 10**15
"""Smaller times do not count from 1970."""
_PARTS: Final = ("segments", "device_traces")


def recognises(head: bytes) -> bool:
    """Whether a file starts like a pickle, or like a snapshot as JSON."""
    if head.startswith(_PICKLES):
        return True
    text = text_of(head)[:4096]
    begins = text.startswith(b"{") and b'"traceEvents"' not in text
    return begins and any(f'"{part}"'.encode() in text for part in _PARTS)


def read(source: ByteSource, writer: StoreWriter, window: Window | None, steps: StepRange | None) -> Found:
    """Read a snapshot into the tables of `writer`: memory events with call stacks, driver calls and failed requests.

    Raises:
        NotATraceError: it is not a snapshot, or holds more than plain values.
        UsageError: steps were requested, which a snapshot does not have.
    """
    content = _value(b"".join(source.blocks()), source.name)
    if steps is not None:
        raise UsageError(f"{source.name} is a memory snapshot, which has no steps: choose a part of it with --window")
    segments, traces = _checked(content, source.name)
    stacks = Stacks()
    budget = current()
    parts = segments_by_device(segments, budget)
    devices = [
        DeviceEvents.read(number, parts.get(number, []), events, stacks, budget) for number, events in enumerate(traces)
    ]
    if sum(device.all_bytes for device in devices) > MOST_BYTES:
        raise NotATraceError(f"{source.name} is no memory snapshot: it tells of more memory than there can be")
    devices = [device for device in devices if device.events or device.blocks]
    if not devices:
        raise NotATraceError(f"{source.name} is a memory snapshot without a single allocation")
    origin_us = min((event.time_us for device in devices for event in device.events if event.time_us), default=0)
    write_tables(writer, devices, stacks, origin_us, window)
    metadata = Metadata(
        path=source.name,
        format="torch_snapshot",
        events=sum(len(device.events) for device in devices),
        origin_unix_ns=origin_us * 1000 - FIRST_EVENT_NS if origin_us > _EPOCH_US else None,
        devices=tuple(Device(device=str(device.number)) for device in devices),
        recorded=("memory", *(["stacks"] if stacks.texts else [])),
        window=window,
    )
    return metadata, _warnings(source, devices, stacks)


def _value(data: bytes, name: str) -> Plain:
    if data.startswith(_PICKLES):
        return load(data, name)
    current().require("values", data.count(b"[") + data.count(b"{"))  # a byte or two each, but a hundred in memory
    try:
        value: Plain = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NotATraceError(f"{name} looks like a memory snapshot as JSON, but cannot be read: {error}") from None
    return value


def _checked(content: Plain, name: str) -> tuple[list[Any], list[list[Any]]]:
    """The segments, and the events of each device; `torch.cuda.memory_snapshot()` returns only the segments."""
    if isinstance(content, list):
        content = {"segments": content, "device_traces": []}
    if not isinstance(content, dict) or not any(part in content for part in _PARTS):
        what = "a value" if not isinstance(content, dict) else "a dictionary"
        raise NotATraceError(
            f"{name} is {what} of Python, but no memory snapshot: it has neither 'segments' nor 'device_traces'"
        )
    segments, traces = content.get("segments", []), content.get("device_traces", [])
    if not isinstance(segments, list) or not isinstance(traces, list):
        raise NotATraceError(f"{name} is no memory snapshot: its 'segments' or 'device_traces' are no list")
    if len(traces) > MOST_DEVICES:
        raise NotATraceError(f"{name} is no memory snapshot: it tells of {len(traces):,} devices")
    traces = [events if isinstance(events, list) else [] for events in traces]
    numbers = [each.get("device", 0) for each in segments if isinstance(each, dict)]
    count = max(
        [len(traces), *(number + 1 for number in numbers if isinstance(number, int) and 0 <= number < MOST_DEVICES)]
    )
    return segments, traces + [[]] * (count - len(traces))


def _warnings(source: ByteSource, devices: list[DeviceEvents], stacks: Stacks) -> tuple[TraceWarning, ...]:
    damaged = sum(device.damaged for device in devices)
    found = {
        "call_stacks_left_out": (stacks.left_out, "call stacks were left out, because there was too much text in them"),
        "damaged_event": (damaged, "events without an action, address or size were skipped"),
        "unknown_event": (sum(device.unknown for device in devices), "events of an unknown kind were skipped"),
        "compressed_data": (int(source.damage is not None), f"{source.damage}; what could be unpacked was read"),
    }
    return tuple(TraceWarning(kind, count, detail) for kind, (count, detail) in found.items() if count)


READER: Final = Reader("torch_snapshot", recognises, read)
