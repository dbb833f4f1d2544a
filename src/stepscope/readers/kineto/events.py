"""Decode the events of a file piece by piece, with times as integer nanoseconds."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from stepscope.errors import NotATraceError, UnreadableTraceError
from stepscope.files import text_of
from stepscope.readers.source import ByteSource, computed_ahead, current, spare_threads

if TYPE_CHECKING:
    from stepscope.readers.kineto.scanned import Scan

LATEST_NS: Final = 2**61
"""Year 2043; differences of such times can be added and doubled in 64 bits, which nesting does."""
EARLIEST_NS: Final = -(2**59)
LONGEST_NS: Final = 2**60
DOUBLE_LIMIT: Final = 2.0**41
"""Microseconds up to which adjacent doubles are less than half a nanosecond apart."""
_MOST_DIGITS: Final = 19


def nanoseconds(microseconds: Sequence[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Convert microseconds to exact int64 nanoseconds; also return a mask of those that fit.

    Args:
        microseconds: int, Decimal, or float below DOUBLE_LIMIT.
    """
    if not microseconds:
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    first = type(microseconds[0])
    if first is float or first is int:
        try:
            values = np.array(microseconds)
        except (ValueError, OverflowError):
            values = np.zeros(0, np.bool_)
        lowest, highest = values.min(initial=0), values.max(initial=0)
        if values.dtype == np.int64 and lowest > EARLIEST_NS // 1000 and highest < LATEST_NS // 1000:
            return values * 1000, np.ones(len(values), np.bool_)
        if values.dtype == np.float64 and lowest > EARLIEST_NS / 1000 and highest < DOUBLE_LIMIT:
            return np.rint(values * 1000).astype(np.int64), np.ones(len(values), np.bool_)
    exact = [_exact_nanoseconds(value) for value in microseconds]
    fits = np.array([value is not None for value in exact])
    return np.array([0 if value is None else value for value in exact], np.int64), fits


def difference(later: Any, earlier: Any) -> Any:
    """Subtract two times of a file; damage or size may have made one a Decimal and left the other a float."""
    if type(later) is type(earlier):
        return later - earlier
    return Decimal(later) - Decimal(earlier)


def _exact_nanoseconds(value: Any) -> int | None:
    try:
        exact = Decimal(value) * 1000
        number = int(exact.to_integral_value()) if exact.adjusted() < _MOST_DIGITS else LATEST_NS
    except (ArithmeticError, ValueError):
        return None
    return number if EARLIEST_NS < number < LATEST_NS else None


_NO_ARGUMENTS: Final = msgspec.Raw(b"{}")
_SALVAGE_BYTES: Final = 2**16
_BOUNDARY = re.compile(rb',\s*\{\s*"(?:ph|name|cat|pid|ts|tid|dur|args|id)"\s*:')
_EVENT_START = re.compile(r'\{\s*"(?:ph|name|cat|pid|ts|tid|dur|args|id)"\s*:')
_EVENT_AFTER_COMMA = re.compile(r"(?<=[\],])\s*" + _EVENT_START.pattern)
_AFTER_ARRAY = re.compile(rb'\]\s*(?:,\s*"|\})')
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_TOO_DEEP_LIMIT: Final = 20
_REST_CHARACTERS: Final = 4096
_ENDING: Final = b" \t\r\n\0"
_LENIENT: Final = json.JSONDecoder(strict=False, parse_float=Decimal, parse_constant=lambda _: None)
_PADDING = " \t\r\n,"


class Event(msgspec.Struct, gc=False):
    """The wanted fields of an event; times in microseconds as written."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: int | float | None = None
    dur: int | float | None = None
    pid: int | str = ""
    tid: int | str = ""
    id: int | str | None = None
    args: msgspec.Raw = _NO_ARGUMENTS


class ExactEvent(Event, gc=False):
    """An event whose times keep every digit."""

    ts: Decimal | None = None  # type: ignore[assignment]
    dur: Decimal | None = None  # type: ignore[assignment]


_FAST = msgspec.json.Decoder(list[Event])
_EXACT = msgspec.json.Decoder(list[ExactEvent])
DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Damage(Counter[str]):
    """Counts of what was skipped or repaired, by kind."""


def decode_events(text: bytes, *, exact: bool) -> list[Event]:
    """Decode comma-separated JSON objects, with times as Decimal if `exact`; raise one of DECODE_ERRORS."""
    decoder = _EXACT if exact else _FAST
    return decoder.decode(b"[%b]" % text)  # type: ignore[return-value]


def decode_damaged(text: bytes, *, exact: bool, is_last: bool, damage: Damage) -> tuple[list[Event], bytes | None]:
    """Decode text that `decode_events` rejected; also return the text after the array if it ends inside, else None.

    Halves the text until the damage is in a small piece, and salvages only that piece.
    """
    try:
        return decode_events(text, exact=exact), None
    except DECODE_ERRORS:
        pass
    middle = _boundary_near_middle(text) if len(text) > _SALVAGE_BYTES else None
    if middle is None:
        return salvage_events(text, is_last=is_last, damage=damage)
    events, rest = decode_damaged(text[:middle], exact=exact, is_last=False, damage=damage)
    if rest is not None:
        return events, rest + text[middle:]
    more, rest = decode_damaged(text[middle + 1 :], exact=exact, is_last=is_last, damage=damage)
    return events + more, rest


def _boundary_near_middle(text: bytes) -> int | None:
    half = len(text) // 2
    match = _BOUNDARY.search(text, half)
    if match is None:
        for match in _BOUNDARY.finditer(text, 0, half):  # noqa: B007 - the last one is wanted
            pass
    return match.start() if match and match.start() > 0 else None


def end_of_array(error: Exception, text: bytes, *, is_last: bool) -> int | None:
    """Return the position of the bracket that ends the array in text that `decode_events` rejected, or None.

    Args:
        error: the error of `decode_events`, which contains the position.
    """
    found = _TRAILING.search(str(error))
    if found is None:
        return None
    position = text.rfind(b"]", 0, int(found[1]) - 1)  # the error's position includes the bracket added before the text
    return position if position >= 0 and _ends_array(text, position, is_last=is_last) else None


def _ends_array(text: bytes, position: int, *, is_last: bool) -> bool:
    return _AFTER_ARRAY.match(text, position) is not None or (is_last and not text[position + 1 :].strip(_ENDING))


def salvage_events(text: bytes, *, is_last: bool, damage: Damage) -> tuple[list[Event], bytes | None]:
    """Read what events it can from damaged text, one by one; also return the text after the array if it ends inside."""
    string = text.decode("utf-8", "replace")
    if replaced := string.count("\ufffd") - text.count("\ufffd".encode()):
        damage["invalid_utf8"] += replaced
    events: list[Event] = []
    position = too_deep = 0
    while position < len(string):
        if string[position] in _PADDING:
            position += 1
            continue
        if string[position] == "]":
            rest = string[position : position + _REST_CHARACTERS].encode("utf-8", "replace")
            if _ends_array(rest, 0, is_last=is_last):
                return events, string[position:].encode("utf-8", "replace")
        start = position + 1
        try:
            value, end = _LENIENT.raw_decode(string, position)
            if isinstance(value, dict):  # any other value may have swallowed the start of an event
                position = end
            events.append(lenient_event(value, damage))
            continue
        except ValueError:
            following = _EVENT_START.search(string, max(start, position))
        except RecursionError:  # every inner brace would fail too, slowly: skip to the next event
            too_deep += 1
            following = _EVENT_AFTER_COMMA.search(string, start) if too_deep < _TOO_DEEP_LIMIT else None
        damage["damaged_event"] += 1
        if following is None:
            break
        position = following.start()
    return events, None


def lenient_event(value: Any, damage: Damage) -> Event:
    """Build an event from any JSON value, dropping fields of a wrong type; raise ValueError if it is not an event."""
    if not isinstance(value, dict) or not isinstance(value.get("ph"), str):
        raise ValueError("no event")
    damage["repaired_event"] += 1
    return Event(
        ph=_text(value["ph"]),
        cat=_text(value.get("cat")),
        name=_text(value.get("name")),
        ts=_number(value.get("ts")),
        dur=_number(value.get("dur")),
        pid=_identifier(value.get("pid")),
        tid=_identifier(value.get("tid")),
        id=_identifier(value.get("id")),
        args=msgspec.Raw(json.dumps(value.get("args"), default=float).encode("utf-8", "replace")),
    )


def _text(value: Any) -> str:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _number(value: Any) -> Any:
    return value if isinstance(value, (int, Decimal)) and not isinstance(value, bool) else None


def _identifier(value: Any) -> int | str:
    return value if isinstance(value, int) else _text(value)


CHUNK_BYTES: Final = 4 * 2**20
_SMALL_CHUNKS: Final = 8
"""After these, chunks are twice as large: making columns of them takes a third less time, but more memory."""
MAXIMUM_EVENT_BYTES: Final = 64 * 2**20
MAXIMUM_HEADER_BYTES: Final = 16 * 2**20
"""Bytes kept of the text before and after the events; the search for the events continues beyond it."""
_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BEFORE_BRACE = re.compile(rb",\s*\{\s*$")
_GENERAL = re.compile(rb'\}\s*(,)\s*\{\s*(?:"[A-Za-z_]|\})')
_SEARCH_BYTES: Final = 2**20
_OVERLAP_BYTES: Final = 256
"""Longer than any text that is searched for, including white space."""
_BACKWARD_TRIES: Final = 1000


_Events = TypeVar("_Events", "list[Event]", "list[Event] | Scan")


class _Piece(NamedTuple):
    """Whole events, comma-separated; the last piece may include what follows the array.

    Attributes:
        is_skipped: whether it is too long without an event that begins in it; the next piece goes on after it.
    """

    text: bytes
    is_last: bool = False
    is_skipped: bool = False


class Scanner(Protocol):
    """Reads a text of whole events in another way than `decode_events`; None if it cannot."""

    def __call__(self, text: bytes, *, exact: bool) -> Scan | None: ...


class EventStream:
    """The events of a document, in chunks.

    Attributes:
        before: text before the array, from the document's opening brace; empty for a bare list.
        after: text after the array, from its closing bracket.
        closed: whether the end of the array was seen.
    """

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._blocks = source.blocks(ahead=True)
        self._exact = False
        self._seen = 0
        self._comma = b""
        self.before = b""
        self.after = b""
        self.closed = False
        self.damage = Damage()

    def chunks(self) -> Iterator[list[Event]]:
        """Yield the events of each chunk; times that a double cannot hold to the nanosecond are Decimal.

        Raises NotATraceError.
        """
        for piece in self._pieces():
            if self._has_events(piece):
                yield self._counted(self._exactly_decoded(piece.text, is_last=piece.is_last))

    def scans(self, scanner: Scanner) -> Iterator[list[Event] | Scan]:
        """Yield the events of each chunk as the scanner returns them, or else decoded; raise NotATraceError.

        Threads scan pieces ahead, which is in vain for one after the array, and again if times turn out to be large.
        """

        def scanned(piece: _Piece) -> tuple[bool, Scan | None]:
            exact = self._exact
            return exact, None if piece.is_skipped else scanner(piece.text, exact=exact)

        for piece, (exact, scan) in computed_ahead(scanned, self._pieces(), spare_threads()):
            if self._has_events(piece):
                text, is_last = piece.text, piece.is_last
                if exact is not self._exact:
                    scan = scanner(text, exact=self._exact)
                if scan is not None and self._accepts(scan, text, is_last=is_last):
                    yield self._counted(scan)
                else:
                    yield self._counted(self._exactly_decoded(text, is_last=is_last))

    def _pieces(self) -> Iterator[_Piece]:
        return self._texts(self._find_array())

    def _has_events(self, piece: _Piece) -> bool:
        """Whether events of the array may begin in a piece; other pieces are counted or kept as what follows it."""
        has_events = not self.closed and not piece.is_skipped
        if self.closed:
            self._keep_after(self._comma + piece.text)
        elif piece.is_skipped:
            self.damage["oversized_event"] += 1
        self._comma = b"" if piece.is_skipped else b","
        return has_events

    def _counted(self, events: _Events) -> _Events:
        self._seen += len(events)
        current().require("rows", self._seen)  # also those that are skipped
        return events

    def _accepts(self, scan: Scan, text: bytes, *, is_last: bool) -> bool:
        """Whether a scan of the text counts; sets `closed` and `after` if the array ends in it."""
        if scan.end is not None:
            if not _ends_array(text, scan.end, is_last=is_last):
                return False
            self._close(text[scan.end :])
        self._exact = scan.exact
        return True

    def _exactly_decoded(self, text: bytes, *, is_last: bool) -> list[Event]:
        damage = self.damage.copy()
        events = self._decode(text, is_last=is_last)
        if not self._exact and _needs_decimals(events):
            self._exact, self.closed = True, False
            self.damage.clear()
            self.damage.update(damage)
            events = self._decode(text, is_last=is_last)
        return events

    def _keep_after(self, text: bytes) -> None:
        room = MAXIMUM_HEADER_BYTES - len(self.after)
        if len(text) > room:
            self.damage["oversized_header"] = 1
        self.after += text[: max(0, room)]

    def _find_array(self) -> bytes:
        """Return the text read so far, from the first event of the array on."""
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

    def _texts(self, first: bytes) -> Iterator[_Piece]:
        """Yield pieces of about CHUNK_BYTES; the comma between two is left out."""
        parts, searched, cuts = [first], 0, 0
        for block in self._blocks:
            parts.append(block)
            size = sum(map(len, parts))
            if size < (CHUNK_BYTES if cuts < _SMALL_CHUNKS else 2 * CHUNK_BYTES):
                continue
            cut = _cut(parts, searched)
            searched = len(parts) - 1  # a boundary may straddle the end of the last part
            if cut is not None:
                text, rest = cut
                yield _Piece(text)
                parts, searched, cuts = [rest], 0, cuts + 1
            elif size > MAXIMUM_EVENT_BYTES:
                text = b"".join(parts)
                yield _Piece(text[:-_SEARCH_BYTES], is_skipped=True)
                parts, searched = [text[-_SEARCH_BYTES:]], 0
        yield _Piece(b"".join(parts), is_last=True)

    def _decode(self, text: bytes, *, is_last: bool) -> list[Event]:
        """Decode a text; set `closed` and `after` if the array ends in it."""
        try:
            return decode_events(text, exact=self._exact)
        except DECODE_ERRORS as error:
            end = end_of_array(error, text, is_last=is_last)
        if end is not None:
            with contextlib.suppress(*DECODE_ERRORS):  # the other of two brackets may be stray
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
    """Split at the last event boundary, dropping the comma; None if no event begins after `searched` parts."""
    for index in range(len(parts) - 1, searched - 1, -1):
        following = b"".join(parts[index + 1 :])
        part = parts[index] + following[:_OVERLAP_BYTES] if following else parts[index]
        cut = _last_boundary(part)
        if cut is not None:
            text = b"".join([*parts[:index], part[:cut]])
            return text, (parts[index] + following)[cut + 1 :] if following else part[cut + 1 :]
    return None


def _last_boundary(text: bytes) -> int | None:
    """Return the position of the comma before the last event that begins in the text."""
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
