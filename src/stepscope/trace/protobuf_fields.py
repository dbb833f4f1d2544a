"""Serialise protobuf messages without a dependency on protobuf.

Source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import struct
from typing import Final

_MASK: Final = 2**64 - 1
_SMALL: Final = [bytes((number,)) for number in range(0x80)]
_VARINT, _FIXED64, _LENGTH = 0, 1, 2


def varint(number: int) -> bytes:
    """Encode a 64-bit integer, seven bits per byte; a negative one as its two's complement."""
    if 0 <= number < 0x80:
        return _SMALL[number]
    number &= _MASK
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


class _Keys(dict[int, bytes]):
    def __missing__(self, key: int) -> bytes:
        found = self[key] = varint(key)
        return found


_KEYS: Final = _Keys()


def whole(field: int, number: int) -> bytes:
    return _KEYS[field << 3 | _VARINT] + varint(number)


def double(field: int, number: float) -> bytes:
    return _KEYS[field << 3 | _FIXED64] + struct.pack("<d", number)


def fixed64(field: int, number: int) -> bytes:
    return _KEYS[field << 3 | _FIXED64] + struct.pack("<Q", number & _MASK)


def message(field: int, content: bytes) -> bytes:
    return _KEYS[field << 3 | _LENGTH] + varint(len(content)) + content


def text(field: int, content: str) -> bytes:
    return message(field, content.encode("utf-8", "replace"))


def beginning(field: int, length: int) -> bytes:
    """Encode the tag and length of a message whose `length` bytes follow in pieces."""
    return _KEYS[field << 3 | _LENGTH] + varint(length)
