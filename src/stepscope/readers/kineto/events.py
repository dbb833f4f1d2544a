"""One event as it stands in the file, and how a piece of the event array becomes events.

`decode_events` is the fast path and the only place where well-formed text is decoded: everything before it cuts
text, everything after it builds columns. `salvage_events` stands in where the text is damaged.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from decimal import Decimal
from typing import Any, Final

import msgspec

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
    """The fields of an event that are wanted; times in microseconds as written."""

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
    """What was skipped or repaired, by kind."""


def decode_events(text: bytes, *, exact: bool) -> list[Event]:
    """The events of comma-separated, well-formed text.

    Args:
        text: any number of JSON objects with commas between them.
        exact: decode times to Decimal, for numbers a double cannot hold.

    Raises:
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError: the text is not that.
    """
    decoder = _EXACT if exact else _FAST
    return decoder.decode(b"[%b]" % text)  # type: ignore[return-value]


def decode_damaged(text: bytes, *, exact: bool, is_last: bool, damage: Damage) -> tuple[list[Event], bytes | None]:
    """The events of text that `decode_events` refused, and what follows the array if it ends inside, else None.

    Halves the text until the damage stands in a small piece, and salvages only that. `is_last` says that no more
    text follows.
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
    """Position of the bracket that ends the array in text that `decode_events` refused with `error`, else None."""
    found = _TRAILING.search(str(error))
    if found is None:
        return None
    position = text.rfind(b"]", 0, int(found[1]) - 1)  # the error counts the bracket put before the text
    return position if position >= 0 and _ends_array(text, position, is_last=is_last) else None


def _ends_array(text: bytes, position: int, *, is_last: bool) -> bool:
    """Whether the bracket is no stray one, by what follows it."""
    return _AFTER_ARRAY.match(text, position) is not None or (is_last and not text[position + 1 :].strip(_ENDING))


def salvage_events(text: bytes, *, is_last: bool, damage: Damage) -> tuple[list[Event], bytes | None]:
    """Whatever events can be read from damaged text one by one, and what follows the array if it ends inside."""
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
            if isinstance(value, dict):  # anything else may have swallowed the beginning of an event
                position = end
            events.append(lenient_event(value, damage))
            continue
        except ValueError:
            following = _EVENT_START.search(string, max(start, position))
        except RecursionError:  # every brace inside would fail the same way, slowly: go on at the next event
            too_deep += 1
            following = _EVENT_AFTER_COMMA.search(string, start) if too_deep < _TOO_DEEP_LIMIT else None
        damage["damaged_event"] += 1
        if following is None:
            break
        position = following.start()
    return events, None


def lenient_event(value: Any, damage: Damage) -> Event:
    """An event from any JSON value; fields of a wrong type are left out.

    Raises:
        ValueError: the value is no object, or no event at all.
    """
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
