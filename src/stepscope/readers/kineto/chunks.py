"""Cutting a Chrome-trace JSON document into the text before its events, pieces of the event array, and the text after.

The text `,{"ph"` (with white space between) cannot stand inside a JSON string, since its quotes would be escaped, so
the array may be cut there without reading it. Files whose events begin with another key are cut at `},{"` followed
by a letter, which no string can hold either.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Final

from stepscope.errors import NotATraceError, UnreadableTraceError
from stepscope.readers.beginning import text_of
from stepscope.readers.kineto.events import (
    DECODE_ERRORS,
    Damage,
    Event,
    decode_damaged,
    decode_events,
    end_of_array,
)
from stepscope.readers.kineto.times import DOUBLE_LIMIT
from stepscope.readers.source import ByteSource

CHUNK_BYTES: Final = 4 * 2**20
MAXIMUM_EVENT_BYTES: Final = 64 * 2**20
MAXIMUM_HEADER_BYTES: Final = 16 * 2**20
"""How much text before and after the events is kept; the search for the events goes on beyond it."""
_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BEFORE_BRACE = re.compile(rb",\s*\{\s*$")
_GENERAL = re.compile(rb'\}\s*(,)\s*\{\s*(?:"[A-Za-z_]|\})')
_SEARCH_BYTES: Final = 2**20
_OVERLAP_BYTES: Final = 256
"""More than any text that is searched for takes, its white space included."""
_BACKWARD_TRIES: Final = 1000


class EventStream:
    """The events of a document, chunk by chunk; the texts around the array once all were taken.

    Attributes:
        before: text before the array, from the document's opening brace; empty for a bare list.
        after: text after the array, from its closing bracket.
        closed: whether the array's end was seen.
        damage: what was skipped or repaired.
    """

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._blocks = source.blocks()
        self._exact = False
        self.before = b""
        self.after = b""
        self.closed = False
        self.damage = Damage()

    def chunks(self) -> Iterator[list[Event]]:
        """The events of each chunk; times that a double cannot hold to the nanosecond come as Decimal.

        Raises:
            NotATraceError: there is no event array.
        """
        for text, is_last in self._texts(self._find_array()):
            damage = self.damage.copy()
            events = self._decode(text, is_last=is_last)
            if not self._exact and _needs_decimals(events):
                self._exact, self.closed = True, False
                self.damage.clear()
                self.damage.update(damage)
                events = self._decode(text, is_last=is_last)
            yield events
        for block in self._blocks:  # what follows the array, if it is long
            self._keep_after(block)

    def _keep_after(self, text: bytes) -> None:
        room = MAXIMUM_HEADER_BYTES - len(self.after)
        if len(text) > room:
            self.damage["oversized_header"] = 1
        self.after += text[: max(0, room)]

    def _find_array(self) -> bytes:
        """The text from the array's first event on, as far as it was read."""
        seen = b""
        for block in self._blocks:
            if not seen:
                block = text_of(block)
                if block.startswith(b"["):
                    return block[1:]
                if block and not block.startswith(b"{"):
                    break
            text = seen[-_OVERLAP_BYTES:] + block
            if match := _ARRAY.search(text):
                self.before = (seen[:-_OVERLAP_BYTES] + text[: match.start()])[:MAXIMUM_HEADER_BYTES]
                return text[match.end() :]
            seen += block
            if len(seen) > MAXIMUM_EVENT_BYTES:
                break
        if self._source.damage and not seen:
            raise UnreadableTraceError(f"{self._source.name} cannot be unpacked: {self._source.damage}")
        raise NotATraceError(f"{self._source.name} is not a trace: no list of trace events was found in it")

    def _texts(self, first: bytes) -> Iterator[tuple[bytes, bool]]:
        """Comma-separated whole events, about CHUNK_BYTES at a time, and whether it is the last text.

        The last one, or the one after which `closed` is set, may end in what follows the events.
        """
        parts, searched = [first], 0
        for block in self._blocks:
            parts.append(block)
            size = sum(map(len, parts))
            if size < CHUNK_BYTES:
                continue
            cut = _cut(parts, searched)
            searched = len(parts) - 1  # the last part's end may hold the beginning of a boundary
            if cut is not None:
                text, rest = cut
                yield text, False
                if self.closed:  # the text was the last, and what was cut off belongs to what follows the array
                    self._keep_after(b"," + rest)
                    return
                parts, searched = [rest], 0
            elif size > MAXIMUM_EVENT_BYTES:
                self.damage["oversized_event"] += 1
                parts, searched = [b"".join(parts)[-_SEARCH_BYTES:]], 0
        yield b"".join(parts), True

    def _decode(self, text: bytes, *, is_last: bool) -> list[Event]:
        """The events of a text; sets `closed` and `after` if the array ends in it."""
        try:
            return decode_events(text, exact=self._exact)
        except DECODE_ERRORS as error:
            end = end_of_array(error, text, is_last=is_last)
        if end is not None:
            with contextlib.suppress(*DECODE_ERRORS):  # of two brackets, one is stray
                events = decode_events(text[:end], exact=self._exact)
                self._close(text[end:])
                return events
        events, rest = decode_damaged(text, exact=self._exact, is_last=is_last, damage=self.damage)
        if rest is not None:
            self._close(rest)
        return events

    def _close(self, rest: bytes) -> None:
        self.closed, self.after = True, b""
        self._keep_after(rest)


def _needs_decimals(events: list[Event]) -> bool:
    """Whether a time is a double that is off by more than half a nanosecond."""
    times = [event.ts for event in events]
    if max(filter(None, times), default=0) <= DOUBLE_LIMIT:
        return False
    return float in set(map(type, times)) and any(type(time) is float and time > DOUBLE_LIMIT for time in times)


def _cut(parts: list[bytes], searched: int) -> tuple[bytes, bytes] | None:
    """The parts as whole events and the rest, without the comma between; None if no event begins in them.

    The first `searched` parts are known to hold no boundary.
    """
    for index in range(len(parts) - 1, searched - 1, -1):
        following = b"".join(parts[index + 1 :])
        part = parts[index] + following[:_OVERLAP_BYTES] if following else parts[index]
        cut = _last_boundary(part)
        if cut is not None:
            text = b"".join([*parts[:index], part[:cut]])
            return text, (parts[index] + following)[cut + 1 :] if following else part[cut + 1 :]
    return None


def _last_boundary(text: bytes) -> int | None:
    """Position of the comma before the last event that begins in the text."""
    end = len(text)
    for _ in range(_BACKWARD_TRIES):
        end = text.rfind(b'"ph"', 0, end)
        if end < 0:
            break
        match = _BEFORE_BRACE.search(text, max(0, end - 64), end)
        if match:
            return match.start()
    matches = list(_GENERAL.finditer(text, max(0, len(text) - _SEARCH_BYTES)))
    return matches[-1].start(1) if matches else None
