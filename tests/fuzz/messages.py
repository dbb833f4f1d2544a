"""Damage to protobuf messages, on any level of their nesting, so that the levels around it stay valid."""

from __future__ import annotations

import struct
from random import Random

from tests.fuzz.values import NUMBERS, TEXTS

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
Field = tuple[int, int, "int | bytes"]
"""Number, wire type, value."""
_WHOLE = [number for number in NUMBERS if isinstance(number, int)]


def encoded(number: int) -> bytes:
    """A varint."""
    number &= 2**64 - 1
    result = bytearray()
    while number > 127:
        result.append(number & 127 | 128)
        number >>= 7
    return bytes([*result, number])


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[place] & 127) << shift
        place, shift = place + 1, shift + 7
        if data[place - 1] < 128:
            return value, place
        if shift > 63:
            raise ValueError("longer than any number")


def fields(data: bytes) -> list[Field] | None:
    """The fields of a message; None where the bytes are none."""
    found: list[Field] = []
    place = 0
    try:
        while place < len(data):
            tag, place = _varint(data, place)
            kind = tag & 7
            if not tag >> 3 or kind not in (VARINT, FIXED64, BYTES, FIXED32):
                return None
            if kind == VARINT:
                value, place = _varint(data, place)
                found.append((tag >> 3, kind, value))
                continue
            size = {FIXED64: 8, FIXED32: 4}.get(kind, 0)
            if kind == BYTES:
                size, place = _varint(data, place)
            if place + size > len(data):
                return None
            found.append((tag >> 3, kind, data[place : place + size]))
            place += size
    except (IndexError, ValueError):
        return None
    return found


def message(parts: list[Field]) -> bytes:
    """The bytes of the fields."""
    result = []
    for number, kind, value in parts:
        result.append(encoded(number << 3 | kind))
        if isinstance(value, int):
            result.append(encoded(value))
        else:
            result.append(encoded(len(value)) + value if kind == BYTES else value)
    return b"".join(result)


def changed_message(random: Random, data: bytes) -> bytes:
    """The message after one to five changes to fields somewhere in it."""
    if random.random() < 0.03:
        return _planted(random, data, random.choice((0.05, 0.5)))
    for _ in range(random.choice((1, 1, 2, 5))):
        data = _changed(random, data, 0)
    return data


def _planted(random: Random, data: bytes, share: float) -> bytes:
    """The message with hostile texts in place of a share of what looks like text."""
    parts = fields(data)
    if parts is None or (data.isascii() and data.decode().isprintable()):
        return random.choice(TEXTS).encode("utf-8", "surrogatepass") if random.random() < share else data
    return message(
        [(n, k, _planted(random, v, share) if k == BYTES and isinstance(v, bytes) else v) for n, k, v in parts]
    )


def _changed(random: Random, data: bytes, depth: int) -> bytes:
    parts = fields(data)
    if not parts:
        return _changed_text(random, data)
    place = random.randrange(len(parts))
    number, kind, value = parts[place]
    if kind == BYTES and isinstance(value, bytes) and value and depth < 12 and random.random() < 0.8:
        parts[place] = number, kind, _changed(random, value, depth + 1)
    else:
        _change_field(random, parts, place)
    return message(parts)


def _change_field(random: Random, parts: list[Field], place: int) -> None:
    number, kind, value = parts[place]
    match random.randrange(10):
        case 0:
            del parts[place]
        case 1:
            parts.insert(random.randint(0, len(parts)), parts[place])
        case 2:
            parts.insert(random.randint(0, len(parts)), parts.pop(place))
        case 3:
            parts[place] = max(1, number + random.choice((-1, 1, 2, 500))), kind, value
        case 4:  # another wire type
            parts[place] = random.choice(
                (
                    (number, VARINT, random.choice(_WHOLE)),
                    (number, BYTES, random.choice(TEXTS).encode("utf-8", "surrogatepass")),
                    (number, FIXED64, struct.pack("<d", random.choice((float("nan"), float("inf"), -1e308, 0.5)))),
                    (number, FIXED32, struct.pack("<I", random.getrandbits(32))),
                )
            )
        case 5 if isinstance(value, bytes) and kind == BYTES:  # deep in itself
            for _ in range(random.choice((1, 20, 200))):
                value = message([(number, BYTES, value)])
            parts[place] = number, BYTES, value
        case 6:  # another field's value
            same = [each for each in parts if each[1] == kind]
            parts[place] = number, kind, random.choice(same)[2]
        case 7:  # one change to all fields of this number
            new = random.choice(_WHOLE)
            parts[:] = [(n, k, new) if (n, k) == (number, VARINT) else (n, k, v) for n, k, v in parts]
        case _:
            if isinstance(value, int):
                near = (value + 1, value - 1, value * 1000, -value, value ^ (1 << random.randrange(64)))
                parts[place] = number, kind, random.choice((*near, random.choice(_WHOLE)))
            else:
                changed = _changed_text(random, value)
                parts[place] = number, kind, changed if kind == BYTES else (changed + bytes(8))[: len(value)]


def _changed_text(random: Random, data: bytes) -> bytes:
    cut = random.randint(0, len(data))
    planted = random.choice(TEXTS).encode("utf-8", "surrogatepass")
    flipped = data[:cut] + bytes([random.randrange(256)]) + data[cut + 1 :]
    return random.choice((planted, data[:cut], data[:cut] + planted + data[cut:], flipped, b"\xff" + data))
