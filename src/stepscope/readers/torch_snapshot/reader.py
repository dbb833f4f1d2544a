"""Reading a memory snapshot into a trace store.

A snapshot has the allocator's segments as they were when it was taken, and for each device the last events before that.
The totals at each event follow from the segments at the end, by undoing the events one after the other.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from stepscope.errors import NotATraceError, UsageError
from stepscope.readers.budget import current
from stepscope.readers.source import ByteSource, text_of
from stepscope.readers.torch_snapshot.device import (
    FIRST_EVENT_NS,
    DeviceEvents,
    Stacks,
    segments_by_device,
    write_tables,
)
from stepscope.trace.model import Device, Metadata, TraceWarning
from stepscope.trace.store import StoreWriter
from stepscope.trace.window import StepRange, Window

Plain: TypeAlias = "dict[Any, Any] | list[Any] | tuple[Any, ...] | str | bytes | int | float | bool | None"

_TICK_BYTES: Final = 1 << 20
"""Of the pickle between two looks at the clock and the memory; each byte may be a value."""
_LONGEST_NUMBER: Final = 16
_KEYS: Final = (str, int, float, bool, type(None))
_OBJECTS: Final = frozenset(b"cRi\x93\x81\x92obPQ\x82\x83\x84\x97\x98")
"""GLOBAL, REDUCE, INST, STACK_GLOBAL, NEWOBJ, NEWOBJ_EX, OBJ, BUILD, persistent identifiers, extensions, buffers."""


class _Broken(Exception):
    """What is wrong, in words that follow "at byte N "."""


def load(data: bytes, name: str) -> Plain:
    """The value that a pickle of protocol 2 to 5 holds.

    Args:
        name: of the file, for messages.

    Raises:
        NotATraceError: it holds more than plain values, or is damaged.
    """
    machine = _Machine(data)
    try:
        return machine.run()
    except _Broken as error:
        raise NotATraceError(f"{name} is a Python pickle that {error} (at byte {machine.position})") from None
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, ValueError, KeyError, MemoryError) as error:
        detail = f"{type(error).__name__} at byte {machine.position}"
        raise NotATraceError(f"{name} is a Python pickle that is damaged or cut off ({detail})") from None


class _Machine:
    """The stack machine: `stack` holds the values of the innermost open container, `outer` those around it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._containers = 0
        self._accounted = 0
        self._budget = current()

    def run(self) -> Plain:
        """Work through the operations up to STOP."""
        data, operations = self._data, _OPERATIONS
        look_at = 0
        while True:
            if self.position >= look_at:
                if self.position >= len(data):
                    raise _Broken("is cut off")
                look_at = min(self.position + _TICK_BYTES, len(data))
                self._account()
            code = data[self.position]
            self.position += 1
            if code == _STOP:
                self._account()
                result: Plain = self._stack.pop()
                return result
            operation = operations[code]
            if operation is None:
                raise _Broken(
                    "holds objects of Python classes, which could run code: not read; a memory snapshot holds none"
                    if code in _OBJECTS
                    else f"has an operation that memory snapshots do not use ({bytes([code])!r})"
                )
            operation(self)

    def _account(self) -> None:
        """Count the values made since the last time: each costs a byte of the file, and up to a hundred of memory."""
        made = self._containers + len(self._memo)
        self._budget.spend("values", made - self._accounted)
        self._accounted = made
        self._budget.require("values", len(self._stack))
        self._budget.tick()

    def _take(self, count: int) -> bytes:
        """The next bytes of the file."""
        begin, end = self.position, self.position + count
        if count < 0 or end > len(self._data):
            raise _Broken("is cut off")
        self.position = end
        return self._data[begin:end]

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop_to_mark(self) -> list[Any]:
        values = self._stack
        self._stack = self._outer.pop()
        return values

    def mark(self) -> None:
        self._budget.require("depth", len(self._outer) + 1)
        self._outer.append(self._stack)
        self._stack = []

    def skip(self, size: int) -> None:
        self._take(size)

    def text(self, size: int) -> None:
        self._push(self._take(self._number(size)).decode("utf-8", "surrogatepass"))

    def bytes(self, size: int) -> None:
        self._push(self._take(self._number(size)))

    def unsigned(self, size: int) -> None:
        self._push(self._number(size))

    def signed(self) -> None:
        self._push(int.from_bytes(self._take(4), "little", signed=True))

    def long(self, size: int) -> None:
        length = self._number(size)
        if length > _LONGEST_NUMBER:
            raise _Broken("holds a number of more than 16 bytes")
        self._push(int.from_bytes(self._take(length), "little", signed=True))

    def real(self) -> None:
        self._push(struct.unpack(">d", self._take(8))[0])

    def constant(self, value: Any) -> None:
        self._push(value)

    def _push_container(self, value: Any) -> None:
        self._containers += 1
        self._push(value)

    def empty(self, kind: Callable[[], Any]) -> None:
        self._push_container(kind())

    def tuple_of(self, count: int) -> None:
        values = [self._stack.pop() for _ in range(count)]
        self._push_container(tuple(reversed(values)))

    def tuple_to_mark(self) -> None:
        values = self._pop_to_mark()
        self._push_container(tuple(values))

    def list_to_mark(self) -> None:
        values = self._pop_to_mark()
        self._push_container(values)

    def dict_to_mark(self) -> None:
        values = self._pop_to_mark()
        made: dict[Any, Any] = {}
        _fill(made, values)
        self._push_container(made)

    def append(self) -> None:
        value = self._stack.pop()
        _list(self._stack[-1]).append(value)

    def appends(self) -> None:
        values = self._pop_to_mark()
        _list(self._stack[-1]).extend(values)

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        _fill(_dict(self._stack[-1]), [key, value])

    def set_items(self) -> None:
        values = self._pop_to_mark()
        _fill(_dict(self._stack[-1]), values)

    def _remember(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def memoize(self) -> None:
        self._remember(len(self._memo))

    def put(self, size: int) -> None:
        self._remember(self._number(size))

    def get(self, size: int) -> None:
        self._push(self._memo[self._number(size)])

    def pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_to_mark()

    def pop_mark(self) -> None:
        self._pop_to_mark()

    def duplicate(self) -> None:
        self._push(self._stack[-1])


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise _Broken("appends to something that is no list")
    return value


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise _Broken("sets items of something that is no dictionary")
    return value


def _fill(target: dict[Any, Any], values: list[Any]) -> None:
    if len(values) % 2:
        raise _Broken("is damaged: a key without a value")
    for key, value in zip(values[::2], values[1::2], strict=True):
        if type(key) not in _KEYS:  # a tuple nested very deep could overflow the interpreter's stack when hashed
            raise _Broken("has keys that are neither texts nor numbers")
        target[key] = value


_Operation: TypeAlias = Callable[[_Machine], None]


def _with(method: Callable[[_Machine, Any], None], argument: Any) -> _Operation:
    return lambda machine: method(machine, argument)


_STOP: Final = ord(".")
_KNOWN: Final[dict[bytes, _Operation]] = {
    b"\x80": _with(_Machine.skip, 1),  # protocol
    b"\x95": _with(_Machine.skip, 8),  # frame
    b"(": _Machine.mark,
    b"0": _Machine.pop,
    b"1": _Machine.pop_mark,
    b"2": _Machine.duplicate,
    b"}": _with(_Machine.empty, dict),
    b"]": _with(_Machine.empty, list),
    b")": _with(_Machine.empty, tuple),
    b"t": _Machine.tuple_to_mark,
    b"l": _Machine.list_to_mark,
    b"d": _Machine.dict_to_mark,
    b"\x85": _with(_Machine.tuple_of, 1),
    b"\x86": _with(_Machine.tuple_of, 2),
    b"\x87": _with(_Machine.tuple_of, 3),
    b"a": _Machine.append,
    b"e": _Machine.appends,
    b"s": _Machine.set_item,
    b"u": _Machine.set_items,
    b"N": _with(_Machine.constant, None),
    b"\x88": _with(_Machine.constant, True),
    b"\x89": _with(_Machine.constant, False),
    b"K": _with(_Machine.unsigned, 1),
    b"M": _with(_Machine.unsigned, 2),
    b"J": _Machine.signed,
    b"\x8a": _with(_Machine.long, 1),
    b"\x8b": _with(_Machine.long, 4),
    b"G": _Machine.real,
    b"\x8c": _with(_Machine.text, 1),
    b"X": _with(_Machine.text, 4),
    b"\x8d": _with(_Machine.text, 8),
    b"C": _with(_Machine.bytes, 1),
    b"B": _with(_Machine.bytes, 4),
    b"\x8e": _with(_Machine.bytes, 8),
    b"\x94": _Machine.memoize,
    b"q": _with(_Machine.put, 1),
    b"r": _with(_Machine.put, 4),
    b"h": _with(_Machine.get, 1),
    b"j": _with(_Machine.get, 4),
}
_OPERATIONS: Final = [_KNOWN.get(bytes([code])) for code in range(256)]
"""By code; None where the operation is not known."""


MOST_DEVICES: Final = 1024
MOST_BYTES: Final = 1 << 61
"""Of all events together; sums are kept in 64 bits."""

_PICKLES: Final = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_EPOCH_US: Final = 10**15
"""Smaller times count from something else than 1970."""
_PARTS: Final = ("segments", "device_traces")


def recognises(head: bytes) -> bool:
    """Whether a file begins like a pickle, or like a snapshot as JSON."""
    if head.startswith(_PICKLES):
        return True
    text = text_of(head)[:4096]
    begins = text.startswith(b"{") and b'"traceEvents"' not in text
    return begins and any(f'"{part}"'.encode() in text for part in _PARTS)


def read(
    source: ByteSource,
    writer: StoreWriter,
    *,
    window: Window | None = None,
    steps: StepRange | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> tuple[Metadata, tuple[TraceWarning, ...]]:
    """Read a snapshot into `writer`'s tables: memory events with call stacks, calls of the driver, failed requests.

    Raises:
        NotATraceError: it is no snapshot, holds more than plain values.
        UsageError: steps were asked for, which a snapshot does not have.
    """
    content = _value(_all(source, progress), source.name)
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


def _all(source: ByteSource, progress: Callable[[int, int | None], None] | None) -> bytes:
    blocks = []
    for block in source.blocks():
        blocks.append(block)
        if progress is not None:
            progress(source.read_bytes, source.total_bytes)
    return b"".join(blocks)


def _value(data: bytes, name: str) -> Plain:
    if data.startswith(_PICKLES):
        return load(data, name)
    current().require("values", data.count(b"[") + data.count(b"{"))  # a byte or two here, and a hundred of memory each
    try:
        value: Plain = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NotATraceError(f"{name} looks like a memory snapshot as JSON, but cannot be read: {error}") from None
    return value


def _checked(content: Plain, name: str) -> tuple[list[Any], list[list[Any]]]:
    """The segments, and the events of each device.

    Snapshots of `torch.cuda.memory_snapshot()` are the list of segments alone.
    """
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
