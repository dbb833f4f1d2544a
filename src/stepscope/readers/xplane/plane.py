"""A plane of a profile: its lines, and the tables that its events and statistics are named by."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from stepscope.errors import NotATraceError
from stepscope.readers.xplane.content import Content
from stepscope.readers.xplane.wire import WireError, fields, signed, text

MOST_NAMES: Final = 4_000_000
"""Of all tables of a file; more are made to exhaust a machine."""
MOST_LINES: Final = 50_000
"""Of all planes of a file: real ones have one a thread and queue, some hundreds."""
_LARGEST_NAME_BYTES: Final = 2**26

Value = int | float | str | bytes
"""Of a statistic."""


@dataclass(slots=True)
class EventName:
    """What an event's metadata says of it.

    Attributes:
        display: the short name, where there is one beside the full one.
        stats: of every event of this name, by the statistic's name.
    """

    name: str
    display: str
    stats: dict[str, Value]


@dataclass(slots=True)
class Plane:
    """One device, the host, or what was compiled.

    Attributes:
        start, end: of the plane in the file.
        lines: start and end of each.
        stat_names: by their number.
        stats: of the plane itself.
        whole: whether it could be read to its end.
    """

    start: int
    end: int
    number: int = 0
    name: str = ""
    lines: list[tuple[int, int]] = field(default_factory=list)
    stat_names: dict[int, str] = field(default_factory=dict)
    stats: dict[str, Value] = field(default_factory=dict)
    whole: bool = True


class Budget:
    """How many names and lines a file may still have."""

    def __init__(self, source_name: str) -> None:
        self._left = MOST_NAMES
        self._lines_left = MOST_LINES
        self._name = source_name

    def take(self) -> None:
        """Count one.

        Raises:
            NotATraceError: there are too many.
        """
        self._left -= 1
        if self._left < 0:
            raise NotATraceError(f"{self._name} has more than {MOST_NAMES:,} names in its tables, as no profile does")

    def take_line(self) -> None:
        """Count a line.

        Raises:
            NotATraceError: there are too many.
        """
        self._lines_left -= 1
        if self._lines_left < 0:
            raise NotATraceError(f"{self._name} has more than {MOST_LINES:,} lines of events, as no profile does")


def read_plane(content: Content, start: int, end: int, budget: Budget) -> Plane:
    """A plane without its events and their names."""
    plane = Plane(start, end)
    raw_stats: list[bytes] = []
    try:
        for number, value, first, last in content.fields(start, end):
            if number == 1 and isinstance(value, int):
                plane.number = signed(value)
            elif number == 2 and isinstance(value, bytes):
                plane.name = text(value)
            elif number == 3:
                budget.take_line()
                plane.lines.append((first, last))
            elif number == 5 and isinstance(value, bytes):
                budget.take()
                key, entry = _map_entry(value)
                plane.stat_names[key] = next((text(each) for place, _, each in fields(entry) if place == 2), "")
            elif number == 6 and isinstance(value, bytes):
                budget.take()
                raw_stats.append(value)
    except WireError:
        plane.whole = False
    plane.stats = read_stats(raw_stats, plane.stat_names)
    return plane


def event_names(
    content: Content, plane: Plane, budget: Budget, damage: Counter[str], large: bool = False
) -> Iterator[tuple[int, EventName]]:
    """The names of a plane's events, by number.

    Args:
        large: read also those that come with programs.
    """
    try:
        for number, value, first, last in content.fields(plane.start, plane.end):
            if number != 4:
                continue
            budget.take()
            if value is None and large and last - first <= _LARGEST_NAME_BYTES:
                value = content.read(first, last - first)
            if isinstance(value, bytes):
                try:
                    yield _event_name(value, plane.stat_names)
                except WireError:
                    damage["damaged_name"] += 1
    except WireError:
        return


def read_stats(raws: list[bytes], names: dict[int, str]) -> dict[str, Value]:
    """Statistics by name; damaged ones are left out."""
    found: dict[str, Value] = {}
    for raw in raws:
        try:
            number, value = _stat(raw, names)
        except (WireError, struct.error):
            continue
        if value is not None and number in names:
            found[names[number]] = value
    return found


def _stat(raw: bytes, names: dict[int, str]) -> tuple[int, Value | None]:
    number, found = 0, None
    for place, _, value in fields(raw):
        if place == 1 and isinstance(value, int):
            number = value
        elif place == 2 and isinstance(value, bytes):
            found = struct.unpack("<d", value)[0]
        elif place == 3:
            found = value
        elif place == 4 and isinstance(value, int):
            found = signed(value)
        elif place == 5:
            found = text(value)
        elif place == 6:
            found = value
        elif place == 7 and isinstance(value, int):
            found = names.get(value)
    return number, found


def _event_name(raw: bytes, names: dict[int, str]) -> tuple[int, EventName]:
    key, entry = _map_entry(raw)
    name = display = ""
    stats: list[bytes] = []
    for place, _, value in fields(entry):
        if place == 2:
            name = text(value)
        elif place == 4:
            display = text(value)
        elif place == 5 and isinstance(value, bytes):
            stats.append(value)
    return key, EventName(name, display, read_stats(stats, names) if stats else {})


def _map_entry(raw: bytes) -> tuple[int, bytes]:
    """Key and value of an entry of a protobuf map."""
    key, entry = 0, b""
    for place, _, value in fields(raw):
        if place == 1 and isinstance(value, int):
            key = signed(value)
        elif place == 2 and isinstance(value, bytes):
            entry = value
    return key, entry
