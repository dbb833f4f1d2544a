"""Writing protobuf messages, which are numbered fields one after the other: enough of it to need no package.

Source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

_MASK: Final = 2**64 - 1
_VARINT, _FIXED64, _LENGTH = 0, 1, 2


def varint(number: int) -> bytes:
    """A whole number of 64 bits, seven bits a byte; a negative one as its two's complement."""
    number &= _MASK
    if number < 0x80:
        return bytes((number,))
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


@lru_cache(maxsize=1024)
def _key(field: int, kind: int) -> bytes:
    return varint(field << 3 | kind)


def whole(field: int, number: int) -> bytes:
    """A field of an integer or boolean type."""
    return _key(field, _VARINT) + varint(number)


def double(field: int, number: float) -> bytes:
    """A field of type double."""
    return _key(field, _FIXED64) + struct.pack("<d", number)


def fixed64(field: int, number: int) -> bytes:
    """A field of type fixed64."""
    return _key(field, _FIXED64) + struct.pack("<Q", number & _MASK)


def message(field: int, content: bytes) -> bytes:
    """A field that holds a message or bytes."""
    return _key(field, _LENGTH) + varint(len(content)) + content


def text(field: int, content: str) -> bytes:
    """A field of type string."""
    return message(field, content.encode("utf-8", "replace"))


def beginning(field: int, length: int) -> bytes:
    """What stands before a message of that many bytes, which follow in pieces."""
    return _key(field, _LENGTH) + varint(length)
