"""Small XLA profiles written field by field, for tests whose expected values are literals."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

VARINT, FIXED64, LENGTH = 0, 1, 2


@dataclass(frozen=True)
class Text:
    """A text that stands beside an event itself, not in the table of names."""

    text: str


Stat = int | float | str | bytes | Text
"""Of text, a reference into the table of names."""


def varint(value: int) -> bytes:
    """A number as protobuf writes it, negative ones as 64 bits."""
    value %= 1 << 64
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*result, value])


def part(number: int, value: int | bytes | str | float) -> bytes:
    """A field of a message."""
    if isinstance(value, float):
        return varint(number << 3 | FIXED64) + struct.pack("<d", value)
    if isinstance(value, int):
        return varint(number << 3 | VARINT) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | LENGTH) + varint(len(data)) + data


@dataclass
class PlaneWriter:
    """A plane; names get numbers at their first mention. Times are nanoseconds on the profile's clock."""

    name: str
    number: int = 1
    origin_ns: int = 0
    stats: dict[str, Stat] = field(default_factory=dict)
    _names: dict[str, int] = field(default_factory=dict)
    _about: dict[str, tuple[str, dict[str, Stat]]] = field(default_factory=dict)
    _words: dict[str, int] = field(default_factory=dict)
    _lines: dict[str, list[bytes]] = field(default_factory=dict)

    def about(self, name: str, display: str = "", **stats: Stat) -> None:
        """What the table of names says of all events of a name."""
        self._about[name] = (display, stats)

    def line(self, name: str) -> None:
        """A line, also one without events."""
        self._lines.setdefault(name, [])

    def event(self, line: str, name: str, start_ns: int, duration_ns: int | None, **stats: Stat) -> None:
        """An event; an instant where it has no duration."""
        body = part(1, self._names.setdefault(name, len(self._names) + 1)) + part(2, start_ns * 1000)
        if duration_ns is not None:
            body += part(3, duration_ns * 1000)
        body += b"".join(part(4, self._stat(key, value)) for key, value in stats.items())
        self._lines.setdefault(line, []).append(body)

    def raw(self, line: str, body: bytes) -> None:
        """The bytes of an event."""
        self._lines.setdefault(line, []).append(body)

    def encoded(self) -> bytes:
        """The plane's message, in the order that XLA writes."""
        lines = [
            part(
                3,
                part(1, number)
                + part(2, name)
                + part(3, self.origin_ns)
                + b"".join(part(4, event) for event in events),
            )
            for number, (name, events) in enumerate(self._lines.items(), 1)
        ]
        names = [self._name(name, number) for name, number in self._names.items()]
        stats = [part(6, self._stat(key, value)) for key, value in self.stats.items()]
        words = [
            part(5, part(1, number) + part(2, part(1, number) + part(2, word))) for word, number in self._words.items()
        ]
        return b"".join([part(1, self.number), part(2, self.name), *lines, *names, *words, *stats])

    def _name(self, name: str, number: int) -> bytes:
        display, stats = self._about.get(name, ("", {}))
        body = part(1, number) + part(2, name) + (part(4, display) if display else b"")
        body += b"".join(part(5, self._stat(key, value)) for key, value in stats.items())
        return part(4, part(1, number) + part(2, body))

    def _word(self, word: str) -> int:
        return self._words.setdefault(word, len(self._words) + 1)

    def _stat(self, key: str, value: Stat) -> bytes:
        head = part(1, self._word(key))
        if isinstance(value, Text):
            return head + part(5, value.text)
        if isinstance(value, str):
            return head + part(7, self._word(value))
        if isinstance(value, bytes):
            return head + part(6, value)
        return head + part(2 if isinstance(value, float) else 4, value)


def space(*planes: PlaneWriter, host: str = "") -> bytes:
    """A whole profile."""
    return b"".join(part(1, plane.encoded()) for plane in planes) + (part(4, host) if host else b"")


def program(operations: dict[str, tuple[str, int]], frames: list[tuple[str, int, str, int]]) -> bytes:
    """An HLO proto.

    Args:
        operations: name -> scope and the number of its frame, from 1 on.
        frames: file, line, function and the number of the frame around, 0 for none.
    """
    files = sorted({file for file, *_ in frames})
    functions = sorted({function for _, _, function, _ in frames})
    index = b"".join(part(1, file) for file in files) + b"".join(part(2, function) for function in functions)
    for file, line, function, _ in frames:
        index += part(3, part(1, files.index(file) + 1) + part(2, functions.index(function) + 1) + part(3, line))
    for number, (*_, around) in enumerate(frames, 1):
        index += part(4, part(1, number) + (part(2, around) if around else b""))
    computation = part(1, "main") + b"".join(
        part(2, part(1, name) + part(2, "fusion") + part(7, part(2, scope) + part(15, frame)))
        for name, (scope, frame) in operations.items()
    )
    return part(1, part(1, "jit_step") + part(3, computation) + part(17, index))
