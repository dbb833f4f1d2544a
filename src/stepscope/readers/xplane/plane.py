"""A plane of a profile: its lines, and its tables of event and statistic names."""

from __future__ import annotations

import contextlib
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from stepscope.readers.source import current
from stepscope.readers.xplane.content import Content, WireError, fields, signed, text

_LARGEST_NAME_BYTES: Final = 2**26

Value = int | float | str | bytes
"""Value of a statistic."""


@dataclass(slots=True)
class EventName:
    """An event's metadata: name, short name or "", and the statistics common to all events of this name."""

    name: str
    display: str
    stats: dict[str, Value]


@dataclass(slots=True)
class Plane:
    """One device, the host, or the compiled programs.

    `lines` are (start, end) in the file, `stat_names` are by number; `whole` is False if the plane is damaged.
    """

    start: int
    end: int
    number: int = 0
    name: str = ""
    lines: list[tuple[int, int]] = field(default_factory=list)
    stat_names: dict[int, str] = field(default_factory=dict)
    stats: dict[str, Value] = field(default_factory=dict)
    whole: bool = True


def read_plane(content: Content, start: int, end: int) -> Plane:
    """Read a plane except for its events and their names."""
    plane, budget = Plane(start, end), current()
    raw_stats: list[bytes] = []
    try:
        for number, value, first, last in content.fields(start, end):
            if number == 1 and isinstance(value, int):
                plane.number = signed(value)
            elif number == 2 and isinstance(value, bytes):
                plane.name = text(value)
            elif number == 3:
                budget.spend("lines", 1)
                plane.lines.append((first, last))
            elif number == 5 and isinstance(value, bytes):
                budget.spend("names", 1)
                key, entry = _map_entry(value)
                plane.stat_names[key] = next((text(each) for place, _, each in fields(entry) if place == 2), "")
            elif number == 6 and isinstance(value, bytes):
                budget.spend("names", 1)
                raw_stats.append(value)
    except WireError:
        plane.whole = False
    plane.stats = read_stats(raw_stats, plane.stat_names)
    return plane


def event_names(
    content: Content, plane: Plane, damage: Counter[str], large: bool = False
) -> Iterator[tuple[int, EventName]]:
    """Yield the names of a plane's events by number; with `large`, also those with whole programs attached."""
    try:
        for number, value, first, last in content.fields(plane.start, plane.end):
            if number != 4:
                continue
            current().spend("names", 1)
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
    """Return statistics by name; damaged ones are skipped."""
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
    key, entry = 0, b""
    for place, _, value in fields(raw):
        if place == 1 and isinstance(value, int):
            key = signed(value)
        elif place == 2 and isinstance(value, bytes):
            entry = value
    return key, entry


MOST_OPERATIONS: Final = 2_000_000
MOST_BYTES: Final = 2**28
"""Limit for programs, which are kept until all events are read."""
DEEPEST_STACK: Final = 100
_NUMBERED: Final = re.compile(r"(.*)\((\d{1,20})\)", re.DOTALL)
_UNKNOWN_FUNCTION: Final = "<unknown>"


@dataclass(frozen=True, slots=True)
class Operation:
    """The origin of an operation as recorded by the compiler.

    Attributes:
        call_stack: "file(line): function", innermost first, separated by ";"; None if unknown.
        scope: path of names, such as "jit(step)/jvp(Model)/dense/dot_general".
        opcode: HLO opcode, such as "fusion".
    """

    call_stack: str | None = None
    scope: str | None = None
    opcode: str | None = None


NOTHING_KNOWN: Final = Operation()


class Programs:
    """Operations by program and name; each program is parsed when first needed."""

    def __init__(self, content: Content, plane: Plane | None, damage: Counter[str]) -> None:
        self._by_number: dict[int, bytes] = {}
        self._by_name: dict[str, bytes] = {}
        self._read: dict[int | str, Mapping[str, Operation]] = {}
        self._damage = damage
        self._left = MOST_OPERATIONS
        self._bytes = MOST_BYTES
        if plane is not None:
            for number, name in event_names(content, plane, damage, large=True):
                self._add(number, name)

    def _add(self, number: int, name: EventName) -> None:
        proto = name.stats.get("Hlo Proto")
        if not isinstance(proto, bytes):
            return
        self._bytes -= len(proto)
        if self._bytes < 0:
            self._damage["program_left_out"] += 1
            return
        match = _NUMBERED.fullmatch(name.name)
        program = name.stats.get("program_id")
        for key in (number & 0xFFFFFFFFFFFFFFFF, program, int(match[2]) if match else None):
            if isinstance(key, int):
                self._by_number[key] = proto
        self._by_name[match[1] if match else name.name] = proto

    def files(self) -> list[str]:
        found: dict[str, None] = {}
        for proto in {id(proto): proto for proto in self._by_name.values()}.values():
            with contextlib.suppress(WireError):
                for number, index in _parts(proto):
                    if number == 17:
                        found.update(dict.fromkeys(_Stacks(index).files))
        return list(found)

    def operation(self, program: int | None, module: str | None, name: str) -> Operation:
        """Return an operation's origin, by its program's number, else by its module's name."""
        key: int | str | None = None if program is None else program & 0xFFFFFFFFFFFFFFFF
        if key is None or key not in self._by_number:
            key = module
        if key is None:
            return NOTHING_KNOWN
        if key not in self._read:
            proto = self._by_number.get(key) if isinstance(key, int) else self._by_name.get(key)
            self._read[key] = {} if proto is None else self._operations(proto)
        return self._read[key].get(name, NOTHING_KNOWN)

    def _operations(self, proto: bytes) -> dict[str, Operation]:
        found: dict[str, Operation] = {}
        try:
            stacks = _Stacks(next((value for number, value in _parts(proto) if number == 17), b""))
            for number, computation in _parts(proto):
                if number != 3:
                    continue
                for inner, _, instruction in fields(computation):
                    if inner == 2 and isinstance(instruction, bytes) and self._left > 0:
                        self._left -= 1
                        name, operation = _operation(instruction, stacks)
                        found[name] = operation
        except WireError:
            self._damage["damaged_program"] += 1
        return found


def _parts(proto: bytes) -> Iterator[tuple[int, bytes]]:
    module = next((value for number, _, value in fields(proto) if number == 1), b"")
    for number, _, value in fields(module if isinstance(module, bytes) else b""):
        if isinstance(value, bytes):
            yield number, value


def _operation(instruction: bytes, stacks: _Stacks) -> tuple[str, Operation]:
    name = ""
    opcode = scope = stack = None
    for number, _, value in fields(instruction):
        if number == 1:
            name = text(value)
        elif number == 2:
            opcode = text(value)
        elif number == 7 and isinstance(value, bytes):
            scope, stack = _origin(value, stacks)
            break
    return name, Operation(stack, scope, opcode)


def _origin(metadata: bytes, stacks: _Stacks) -> tuple[str | None, str | None]:
    scope = file = None
    line = frame = 0
    for number, _, value in fields(metadata):
        if number == 2:
            scope = text(value) or None
        elif number == 3:
            file = text(value) or None
        elif number == 4 and isinstance(value, int):
            line = value
        elif number == 15 and isinstance(value, int):
            frame = value
    stack = stacks.of(frame) or (entry(file, line, None) if file and 0 < line < 10**9 else None)
    return scope, stack


def entry(file: str, line: int, function: str | None) -> str:
    """Format one frame of a call stack as in the tables."""
    return f"{file}({line}): {function or _UNKNOWN_FUNCTION}".replace(";", ",")


def stack_of_text(written: str) -> str | None:
    """Convert a call stack of "file:line:column" lines, outermost first, which TPU profiles attach to operations."""
    entries = []
    for each in written.split("\n")[:DEEPEST_STACK]:
        parts = each.rsplit(":", 2)
        if len(parts) == 3 and parts[1].isdecimal() and len(parts[1]) < 10 and parts[0]:
            entries.append(entry(parts[0], int(parts[1]), None))
    return ";".join(reversed(entries)) or None


class _Stacks:
    def __init__(self, index: bytes) -> None:
        self.files: list[str] = []
        functions: list[str] = []
        locations: list[tuple[int, int, int]] = []
        self._frames: list[tuple[int, int]] = []
        for number, _, value in fields(index):
            if number == 1:
                self.files.append(text(value))
            elif number == 2:
                functions.append(text(value))
            elif number in (3, 4) and isinstance(value, bytes):
                numbers = {place: each for place, _, each in fields(value) if isinstance(each, int)}
                if number == 3:
                    locations.append((numbers.get(1, 0), numbers.get(2, 0), numbers.get(3, 0)))
                else:
                    self._frames.append((numbers.get(1, 0), numbers.get(2, 0)))
        self._locations = [
            entry(self.files[file - 1], line, functions[function - 1] if 0 < function <= len(functions) else None)
            if 0 < file <= len(self.files) and line < 10**9
            else None
            for file, function, line in locations
        ]
        self._known: dict[int, str | None] = {}

    def of(self, frame: int) -> str | None:
        """The stack that ends in a frame, innermost first."""
        if frame not in self._known:
            entries: list[str | None] = []
            at = frame
            while 0 < at <= len(self._frames) and len(entries) < DEEPEST_STACK:
                location, around = self._frames[at - 1]
                if 0 < location <= len(self._locations) and self._locations[location - 1] is not None:
                    entries.append(self._locations[location - 1])
                at = around if around < at else 0  # only outwards, so that a damaged file cannot cause a cycle
            self._known[frame] = ";".join(each for each in entries if each) or None
        return self._known[frame]
