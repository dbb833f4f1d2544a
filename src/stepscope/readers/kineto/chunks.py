"""Cutting a Chrome-trace JSON document into the text before its events, pieces of the event array, and the text after.

The text `,{"ph"` (with white space between) cannot stand inside a JSON string, since its quotes would be escaped, so
the array may be cut there without reading it. Files whose events begin with another key are cut at `},{"` followed
by a letter, which no string can hold either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from stepscope.errors import NotATraceError, UnreadableTraceError
from stepscope.readers.kineto.events import DECODE_ERRORS, Damage, Event, decode_damaged, decode_events
from stepscope.readers.source import ByteSource

CHUNK_BYTES: Final = 8 * 2**20
MAXIMUM_EVENT_BYTES: Final = 64 * 2**20
_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BEFORE_BRACE = re.compile(rb",\s*\{\s*$")
_GENERAL = re.compile(rb'\}\s*(,)\s*\{\s*"[A-Za-z_]')
_ARRAY_END = re.compile(rb'\}\s*\](?=\s*(?:,\s*"|\}\s*$))')
_END_SEARCH_BYTES: Final = 2**20
_BOM: Final = b"\xef\xbb\xbf"
_BACKWARD_TRIES: Final = 1000
_DOUBLE_LIMIT: Final = 2.0**41
"""Microseconds up to which a double's spacing is below half a nanosecond."""


class EventStream:
    """The events of a document, chunk by chunk; the texts around the array once all were taken.

    Attributes:
        before: text before the array, from the document's opening brace; empty for a bare list.
        after: text after the array's closing bracket.
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
        buffer = self._find_array()
        for text in self._texts(buffer):
            events = self._decode(text)
            if not self._exact and any(type(event.ts) is float and event.ts > _DOUBLE_LIMIT for event in events):
                self._exact = True
                events = self._decode(text)
            yield events
            if self.closed:
                break
        for block in self._blocks:  # what follows the array, if it is long
            if len(self.after) < MAXIMUM_EVENT_BYTES:
                self.after += block

    def _find_array(self) -> bytes:
        buffer = b""
        for block in self._blocks:
            buffer += block
            text = buffer.removeprefix(_BOM).lstrip()
            if text.startswith(b"["):
                return text[1:]
            if match := _ARRAY.search(buffer):
                self.before = buffer[: match.start()].removeprefix(_BOM).lstrip()
                return buffer[match.end() :]
            if len(buffer) > MAXIMUM_EVENT_BYTES or (text and not text.startswith(b"{")):
                break
        if self._source.damage and not buffer:
            raise UnreadableTraceError(f"{self._source.name} cannot be unpacked: {self._source.damage}")
        raise NotATraceError(f"{self._source.name} is not a trace: no list of trace events was found in it")

    def _texts(self, buffer: bytes) -> Iterator[bytes]:
        """Comma-separated whole events, about CHUNK_BYTES at a time; the last text may end in what follows them."""
        for block in self._blocks:
            buffer += block
            if len(buffer) < CHUNK_BYTES:
                continue
            cut = _last_boundary(buffer)
            if cut is not None:
                text, buffer = buffer[:cut], buffer[cut + 1 :]
                yield text
                if self.closed:
                    self.after += b"," + buffer
                    return
            elif len(buffer) > MAXIMUM_EVENT_BYTES:
                self.damage["oversized_event"] += 1
                buffer = buffer[-_END_SEARCH_BYTES:]
        yield buffer

    def _decode(self, text: bytes) -> list[Event]:
        try:
            return decode_events(text, exact=self._exact)
        except DECODE_ERRORS:
            pass
        for end in _array_ends(text):
            try:
                events = decode_events(text[:end], exact=self._exact)
            except DECODE_ERRORS:
                continue
            self.closed, self.after = True, text[end:]
            return events
        events, rest = decode_damaged(text, exact=self._exact, damage=self.damage)
        if rest is not None:
            self.closed, self.after = True, rest
        return events


def _last_boundary(buffer: bytes) -> int | None:
    """Position of the comma before the last event that begins in the buffer."""
    end = len(buffer)
    for _ in range(_BACKWARD_TRIES):
        end = buffer.rfind(b'"ph"', 0, end)
        if end < 0:
            break
        match = _BEFORE_BRACE.search(buffer, max(0, end - 64), end)
        if match:
            return match.start()
    matches = list(_GENERAL.finditer(buffer, max(0, len(buffer) - _END_SEARCH_BYTES)))
    return matches[-1].start(1) if matches else None


def _array_ends(text: bytes) -> list[int]:
    """Positions where the array may end, likeliest first."""
    start = max(0, len(text) - _END_SEARCH_BYTES)
    found = [match.start() + 1 for match in _ARRAY_END.finditer(text, start)]
    if (stripped := text.rstrip()).endswith(b"]"):  # a bare list
        found.append(len(stripped) - 1)
    return found[::-1][:4]
