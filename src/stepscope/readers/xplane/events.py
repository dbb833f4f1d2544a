"""Read the events of a line many at a time, with their fields as arrays.

Fields are varints, decoded for all events together: the first field of each, then the second, and so on. The compiled
scanner does the same event by event where there is one, and leaves to Python what is not written as usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from stepscope.readers.kineto import scanned
from stepscope.readers.xplane.content import (
    PADDING,
    Bytes,
    Content,
    Mask,
    Positions,
    Values,
    WireError,
    fields,
    numbers_of,
    varint,
    varints,
    words_at,
)

EVENT_TAG: Final = 0x22
_STEPS: Final = 16
_BLOCK_BYTES: Final = 2048
_WINDOW_BYTES: Final = 64
"""Bytes of each block that are searched for its first event; most events are shorter."""
_CHECKS: Final = 3
_SETTLING: Final = 8
"""Hops after which a chain that started inside an event, at its statistics, has left it."""
_ROUND: Final = 8
_MOST_ROUNDS: Final = 200
"""Enough for a block of the shortest events; blocks without a start would make chains far longer."""


def _hops() -> Positions:
    """Bytes to the next event by the two bytes after an event's tag; 0 for long events."""
    number = np.arange(2**16)
    first, second = number & 0xFF, number >> 8
    longer = np.where(second < 0x80, ((first & 0x7F) | second << 7) + 3, 0)
    hops: Positions = np.where(first < 0x80, first + 2, longer)
    return hops


_HOPS: Final = _hops()


def event_bounds(data: Bytes, size: int) -> tuple[Positions, Positions, int]:
    """Return starts and ends of the events at the start of `data`, and the position after them.

    `data` must have PADDING bytes after `size`.
    """
    if not size or data[0] != EVENT_TAG:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, 0
    return _in_lockstep(data, size) or _one_by_one(data, size)


def _in_lockstep(data: Bytes, size: int) -> tuple[Positions, Positions, int] | None:
    """Find the bounds in all blocks at once, if all events are short; None if the blocks' chains do not meet."""
    behind: Values = np.ndarray((size + 2,), "<u2", buffer=data.data, offset=1, strides=(1,))
    starts = _block_starts(data, behind, size)
    begin = _follow(behind, starts, np.append(starts[1:], size), size)
    if begin is None:
        return None
    is_event = data.take(begin) == EVENT_TAG
    if not is_event.all():  # the events end here, or a chain went wrong
        begin = begin[: int(np.argmin(is_event)) + 1]
    last = int(begin[-1])
    hop = int(_HOPS[behind[last]])
    end = last + hop
    if not is_event.all() or end > size:
        end = last
    elif hop == 0:
        return None
    ends = np.append(begin[1:], end)
    if end == last:
        begin, ends = begin[:-1], ends[:-1]
    if not len(begin):
        return None
    return begin + 2 + (data.take(begin + 1) >= 0x80), ends, end


def _block_starts(data: Bytes, behind: Values, size: int) -> Positions:
    """Positions that very likely start an event: the first of the data, and one near the start of each block."""
    blocks = (size - _WINDOW_BYTES) // _BLOCK_BYTES
    if blocks < 2:
        return np.zeros(1, np.int64)
    windows = data[: blocks * _BLOCK_BYTES].reshape(blocks, _BLOCK_BYTES)[1:, :_WINDOW_BYTES]
    block, place = np.nonzero(windows == EVENT_TAG)
    at = (block + 1) * _BLOCK_BYTES + place
    for _ in range(_CHECKS):
        at = np.minimum(at + _HOPS.take(behind[at]), size)
        goes_on = data.take(at) == EVENT_TAG
        block, at = block[goes_on], at[goes_on]
    at = at[np.append(True, block[1:] != block[:-1])[: len(block)]]
    for _ in range(_SETTLING):
        at = np.minimum(at + _HOPS.take(behind[at]), size)
    at = at[(at < size) & (data.take(at) == EVENT_TAG)]
    at = at[np.append(True, at[1:] > np.maximum.accumulate(at)[:-1])[: len(at)]]
    return np.append(0, at)


def _follow(behind: Values, starts: Positions, limits: Positions, size: int) -> Positions | None:
    """Positions reached from the starts by hops, each up to its limit; None if a limit is missed or too far.

    Args:
        behind: the two bytes after each position.
        size: the last limit, which need not be met.
    """
    rounds: list[tuple[Positions, Positions]] = []
    chain, at, limit = np.arange(len(starts)), starts, limits
    while len(at):
        reached = np.empty((_ROUND + 1, len(at)), np.int64)
        reached[0] = at
        for before, after in pairwise(reached):
            np.add(before, _HOPS.take(behind[before]), out=after)
            np.minimum(after, size, out=after)
        at = reached[-1]
        if len(rounds) == _MOST_ROUNDS or ((at == reached[-2]) & (at < limit)).any():
            return None
        rounds.append((chain, reached))
        going = at < limit
        if not going.all():
            chain, at, limit = chain[going], at[going], limit[going]
    places = np.full((len(starts), len(rounds) * _ROUND + 1), size)
    for number, (chain, reached) in enumerate(rounds):
        places[chain, number * _ROUND : (number + 1) * _ROUND + 1] = reached.T
    inside = places < limits[:, None]
    met = places[np.arange(len(starts)), inside.sum(axis=1)] == limits
    return places[inside] if met[:-1].all() else None


def _one_by_one(data: Bytes, size: int) -> tuple[Positions, Positions, int]:
    """Find the bounds of events of any length: mark all positions that may start an event, and keep those reached."""
    begin = np.flatnonzero(data[:size] == EVENT_TAG)
    first, second = (data[begin + number].astype(np.int64) for number in (1, 2))
    length = np.where(first < 0x80, first, (first & 0x7F) | (second & 0x7F) << 7)
    head = np.where(first < 0x80, 2, 3)
    longer = np.flatnonzero((first >= 0x80) & (second >= 0x80))
    for row in longer.tolist():
        try:
            number, behind = varint(data[begin[row] + 1 : begin[row] + 6].tobytes(), 0)
        except WireError:
            number, behind = size, 1
        length[row], head[row] = number, behind + 1
    follows = begin + head + length
    inside = follows <= size
    begin, follows, head = begin[inside], follows[inside], head[inside]
    if not len(begin) or begin[0] != 0:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, 0
    chain = _chain(begin, follows, size)
    return begin[chain] + head[chain], follows[chain], int(follows[chain[-1]])


def _chain(begin: Positions, follows: Positions, size: int) -> Positions:
    """Indices of the possible starts that are reached from the first one."""
    count = len(begin)
    number = np.full(size + 1, count, np.int64)
    number[begin] = np.arange(count)
    following = np.append(number[follows], count)
    leap = following
    for _ in range(4):  # sixteen per step
        leap = leap[leap]
    anchors, item, at = [], leap.item, 0
    while at != count:
        anchors.append(at)
        at = item(at)
    reached = np.empty((_STEPS, len(anchors)), np.int64)
    reached[0] = anchors
    for step in range(1, _STEPS):
        reached[step] = following[reached[step - 1]]
    chain = reached.T.ravel()
    result: Positions = chain[chain != count]
    return result


CHUNK_BYTES: Final = 2**21
_TOGETHER: Final = 8192
"""Events per step, so that their numbers fit into a processor's cache."""
LONGEST_EVENT_BYTES: Final = 2**24
_MOST_STATISTICS: Final = 1000
"""Limit per event, which usually has about ten; further ones are dropped."""
_STAT_ID, _DOUBLE, _UNSIGNED, _SIGNED, _TEXT, _BYTES, _REFERENCE = 0x08, 0x11, 0x18, 0x20, 0x2A, 0x32, 0x38
LATEST_PS: Final = 2**62
MOST_WORDS: Final = 1_000_000


class Words:
    """Texts of statistics: names from the plane's table, or text written with an event."""

    def __init__(self, table: dict[int, str]) -> None:
        self._table = table
        self._written: dict[str, int] = {}
        self._order: list[str] = []

    def number(self, word: str) -> int:
        """Return the number of text written with an event: below -1, or -1 above MOST_WORDS texts."""
        known = self._written.get(word)
        if known is None:
            if len(self._order) >= MOST_WORDS:
                return -1
            known = self._written[word] = -2 - len(self._order)
            self._order.append(word)
        return known

    def of(self, number: int) -> str | None:
        if number >= 0:
            return self._table.get(number)
        return self._order[-2 - number] if number < -1 else None


@dataclass(slots=True)
class Stats:
    """Values of the wanted statistics, one per row: role, event in the batch, and wire `tag`.

    `number` is the varint or the bits of a double, `content` the position where text begins.
    """

    role: Positions
    event: Positions
    tag: Bytes
    number: Values
    content: Positions


@dataclass(slots=True)
class Batch:
    """Some events of a line, in the file's order; arrays of shape (n,).

    `name` is the number of its metadata, `start_ns` counts from the line's start, `lasts` is False for instants.
    """

    name: Positions
    start_ns: Positions
    duration_ns: Positions
    lasts: Mask
    stats: Stats
    data: Bytes = field(repr=False)

    def integers(self, role: int) -> tuple[Positions, Mask]:
        """Return each event's integer of that role, also from decimal text, and whether it has one."""
        result, has = np.zeros(len(self.name), np.int64), np.zeros(len(self.name), np.bool_)
        rows = np.flatnonzero(self.stats.role == role)
        tag = self.stats.tag[rows]
        whole = rows[(tag == _UNSIGNED) | (tag == _SIGNED)]
        result[self.stats.event[whole]] = self.stats.number[whole].astype(np.int64)
        has[self.stats.event[whole]] = True
        for row in rows[(tag == _TEXT)].tolist():
            written = self._text(row)
            if written.isascii() and written.isdigit() and len(written) < 19:
                result[self.stats.event[row]], has[self.stats.event[row]] = int(written), True
        return result, has

    def numbers(self, role: int) -> tuple[npt.NDArray[np.float64], Mask]:
        """Return each event's number of that role as a float, and whether it has one."""
        whole, has = self.integers(role)
        result = whole.astype(np.float64)
        rows = np.flatnonzero((self.stats.role == role) & (self.stats.tag == _DOUBLE))
        result[self.stats.event[rows]] = self.stats.number[rows].view(np.float64)
        has[self.stats.event[rows]] = True
        return result, has

    def texts(self, role: int, words: Words) -> Positions:
        """Return each event's text of that role, as its number in `words`; -1 for none."""
        result = np.full(len(self.name), -1, np.int64)
        rows = np.flatnonzero(self.stats.role == role)
        tag = self.stats.tag[rows]
        references = rows[tag == _REFERENCE]
        numbers = np.minimum(self.stats.number[references], np.uint64(LATEST_PS)).astype(np.int64)
        result[self.stats.event[references]] = numbers
        written = rows[tag == _TEXT]
        for row in written[np.argsort(self.stats.event[written], kind="stable")].tolist():  # numbers follow the file
            result[self.stats.event[row]] = words.number(self._text(row))
        return result

    def _text(self, row: int) -> str:
        start, length = int(self.stats.content[row]), int(self.stats.number[row])
        return self.data[start : start + length].tobytes().decode("utf-8", "replace")


class LineReader:
    """Reads one line of a plane: its own fields into `head`, by number, and its events in batches."""

    def __init__(self, content: Content, start: int, end: int, roles: Positions, damage: Counter[str]) -> None:
        self.head: dict[int, int | bytes] = {}
        self.damage = damage
        self._content = content
        self._at = start
        self._end = end
        self._roles = np.ascontiguousarray(roles, np.int64)
        self._written_roles = self._roles.tobytes()

    def read_head(self) -> None:
        """Read the fields before the events; raise WireError if it is not a line."""
        for number, value, start, end in self._content.fields(self._at, self._end):
            if number == 4:
                return
            if value is not None:
                self.head[number] = value
            self._at = max(start, end)
        self._at = self._end

    def batches(self) -> Iterator[Batch]:
        """Yield the events; raise WireError if the line is damaged."""
        size = CHUNK_BYTES
        while self._at < self._end:
            raw = self._content.read(self._at, min(size, self._end - self._at))
            found = scanned.xplane_events(raw, self._written_roles)
            if found is not None and found[0]:
                yield batch_of(raw, found)
                self._at += found[0]
                size = CHUNK_BYTES
                continue
            data = np.frombuffer(raw + bytes(PADDING), np.uint8)
            starts, ends, behind = event_bounds(data, len(raw))
            if len(starts):
                yield read_events(data, starts, ends, self._roles, self.damage)
                self._at += behind
                size = CHUNK_BYTES
            elif raw[:1] != bytes([EVENT_TAG]):
                self._other_field()
            elif 4 * size > LONGEST_EVENT_BYTES or self._at + len(raw) >= self._end:
                raise WireError("an event is longer than its line")
            else:
                size *= 4

    def _other_field(self) -> None:
        for number, value, start, end in self._content.fields(self._at, self._end):
            if value is not None:
                self.head[number] = value
            self._at = max(start, end)
            return


def read_events(data: Bytes, starts: Positions, ends: Positions, roles: Positions, damage: Counter[str]) -> Batch:
    """Decode the fields of events.

    Args:
        data: with PADDING after the last event.
        starts, ends: bounds of the events' bytes.
        roles: statistic number -> role, 0 if unwanted.
    """
    words = words_at(data)
    at = starts.copy()
    name, offset, duration = (np.empty(len(starts), np.int64) for _ in range(3))
    lasts = np.empty(len(starts), np.bool_)
    for first in range(0, len(starts), _TOGETHER):
        some = slice(first, first + _TOGETHER)
        for target, tag in ((name, 0x08), (offset, 0x10), (duration, 0x18)):
            target[some], length, lasts[some] = numbers_of(data, words, at[some], ends[some], tag)
            at[some] += length
    event, stat_start, stat_end = _stat_bounds(data, words, at, ends)
    broken = at != ends
    for row in np.flatnonzero(broken).tolist():  # fields in another order, or unknown fields
        broken[row] = not _read_oddly(data, int(starts[row]), int(ends[row]), row, name, offset, duration, lasts)
    impossible = (offset < 0) | (offset > LATEST_PS) | (duration < 0) | (duration > LATEST_PS)
    broken |= impossible
    stats = _read_stats(data, words, event, stat_start, stat_end, roles)
    if broken.any():
        damage["damaged_event"] += int(broken.sum())
        kept = np.flatnonzero(~broken)
        position = np.full(len(name), -1, np.int64)
        position[kept] = np.arange(len(kept))
        mine = position[stats.event] >= 0
        stats = Stats(
            stats.role[mine], position[stats.event[mine]], stats.tag[mine], stats.number[mine], stats.content[mine]
        )
        name, offset, duration, lasts = name[kept], offset[kept], duration[kept], lasts[kept]
    start_ns = offset // 1000
    return Batch(name, start_ns, (offset + duration) // 1000 - start_ns, lasts, stats, data)


def batch_of(raw: bytes, found: scanned.XplaneEvents) -> Batch:
    """The events that the scanner decoded."""
    _, names, starts, durations, lasts, (roles, events, tags, numbers, contents) = found
    name, start_ns, duration_ns, role, event, content = (
        np.frombuffer(each, np.int64) for each in (names, starts, durations, roles, events, contents)
    )
    tag, number = np.frombuffer(tags, np.uint8), np.frombuffer(numbers, np.uint64)
    stats = Stats(role, event, tag, number, content)
    return Batch(name, start_ns, duration_ns, np.frombuffer(lasts, np.bool_), stats, np.frombuffer(raw, np.uint8))


def _stat_bounds(data: Bytes, words: Values, at: Positions, ends: Positions) -> tuple[Positions, Positions, Positions]:
    """Event, start and end of each statistic; moves `at` past the last one."""
    nothing = np.zeros(0, np.int64)
    found: list[tuple[Positions, Positions, Positions]] = [(nothing, nothing, nothing)]
    rows = np.flatnonzero((at < ends) & (data[at] == EVENT_TAG))
    for _ in range(_MOST_STATISTICS):
        if not rows.size:
            break
        place, end = at[rows], ends[rows]
        length = data[place + 1].astype(np.int64)
        begin = place + 2
        longer = np.flatnonzero(length >= 0x80)
        if longer.size:
            value, size = varints(data, words, place[longer] + 1)
            length[longer] = np.minimum(value, np.uint64(2**40)).astype(np.int64)
            begin[longer] = place[longer] + 1 + size
        behind = begin + length
        inside = behind <= end
        if not inside.all():
            rows, begin, behind, end = rows[inside], begin[inside], behind[inside], end[inside]
        found.append((rows, begin, behind))
        at[rows] = behind
        rows = rows[(behind < end) & (data[behind] == EVENT_TAG)]
    event, begin, behind = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return event, begin, behind


def _read_stats(
    data: Bytes, words: Values, event: Positions, starts: Positions, ends: Positions, roles: Positions
) -> Stats:
    number = data[starts + 1].astype(np.int64)
    at = starts + 2
    longer = np.flatnonzero(number >= 0x80)
    if longer.size:
        value, length = varints(data, words, starts[longer] + 1)
        number[longer] = np.minimum(value, np.uint64(len(roles))).astype(np.int64)
        at[longer] = starts[longer] + 1 + length
    known = (data[starts] == _STAT_ID) & (number < len(roles)) & (at < ends)
    role = np.where(known, roles[np.where(known, number, 0)], 0)
    rows = np.flatnonzero(role > 0)
    event, at, role = event[rows], at[rows], role[rows]
    tag = data[at]
    values, length = varints(data, words, at + 1)
    is_double = tag == _DOUBLE
    values[is_double] = words[at[is_double] + 1]
    end = at + 1 + np.where(is_double, 8, length)
    text = (tag == _TEXT) | (tag == _BYTES)
    whole = (end + np.where(text, np.minimum(values, np.uint64(2**40)).astype(np.int64), 0)) <= ends[rows]
    whole &= is_double | (length > 0)
    return Stats(role[whole], event[whole], tag[whole], values[whole], end[whole])


def _read_oddly(
    data: Bytes, start: int, end: int, row: int, name: Positions, offset: Positions, duration: Positions, lasts: Mask
) -> bool:
    """Read one event field by field; False if it is damaged or only counts occurrences."""
    known = {1: name, 2: offset, 3: duration}
    try:
        for number, _, value in fields(data[start:end].tobytes()):
            if number == 5:
                return False
            if number in known and isinstance(value, int):
                known[number][row] = min(value, LATEST_PS + 1)
                if number == 3:
                    lasts[row] = True
    except WireError:
        return False
    return True
