"""The few messages of an XLA profile that a Chrome trace can be turned back into, as bytes on the wire."""

from __future__ import annotations

import struct
from collections.abc import Iterable

_VARINT, _DOUBLE, _BYTES = 0, 1, 2
_WORD = 2**64


def varint(value: int) -> bytes:
    """A number of 64 bits."""
    value %= _WORD
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def whole(field: int, value: int) -> bytes:
    """A field with a whole number."""
    return bytes([field << 3 | _VARINT]) + varint(value)


def data(field: int, value: bytes) -> bytes:
    """A field with text or a message."""
    return bytes([field << 3 | _BYTES]) + varint(len(value)) + value


def statistic(number: int, value: int | float | str) -> bytes:
    """An XStat: number of its name and value."""
    name = whole(1, number)
    if isinstance(value, str):
        return name + data(5, value.encode("utf-8", "replace"))
    if isinstance(value, float):
        return name + bytes([2 << 3 | _DOUBLE]) + struct.pack("<d", value)
    return name + whole(4 if -(2**63) <= value < 2**63 else 3, value)


def event(name: int, offset_ps: int, duration_ps: int, statistics: Iterable[bytes]) -> bytes:
    """An XEvent as a field of its line."""
    content = [whole(1, name), whole(2, offset_ps), whole(3, duration_ps), *(data(4, each) for each in statistics)]
    return data(4, b"".join(content))


def named(number: int, name: str, display: str = "", statistics: Iterable[bytes] = ()) -> bytes:
    """An entry of a plane's table of names: of events, or of statistics."""
    content = [whole(1, number), data(2, name.encode("utf-8", "replace"))]
    if display:
        content.append(data(4, display.encode("utf-8", "replace")))
    content += [data(5, each) for each in statistics]
    return whole(1, number) + data(2, b"".join(content))
