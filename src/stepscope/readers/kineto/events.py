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
_AFTER_ARRAY = re.compile(r'\]\s*(?:,\s*"|\}|$)')
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


def decode_damaged(text: bytes, *, exact: bool, damage: Damage) -> tuple[list[Event], bytes | None]:
    """The events of text that `decode_events` refused, and what follows the array if it ends inside, else None.

    Halves the text until the damage stands in a small piece, and salvages only that.
    """
    try:
        return decode_events(text, exact=exact), None
    except DECODE_ERRORS:
        pass
    middle = _boundary_near_middle(text) if len(text) > _SALVAGE_BYTES else None
    if middle is None:
        return salvage_events(text, damage)
    events, rest = decode_damaged(text[:middle], exact=exact, damage=damage)
    if rest is not None:
        return events, rest + text[middle:]
    more, rest = decode_damaged(text[middle + 1 :], exact=exact, damage=damage)
    return events + more, rest


def _boundary_near_middle(text: bytes) -> int | None:
    half = len(text) // 2
    match = _BOUNDARY.search(text, half) or _BOUNDARY.search(text, 0, half)
    return match.start() if match and match.start() > 0 else None


def salvage_events(text: bytes, damage: Damage) -> tuple[list[Event], bytes | None]:
    """Whatever events can be read from damaged text one by one, and what follows the array if it ends inside."""
    string = text.decode("utf-8", "replace")
    if "\ufffd" in string:
        damage["invalid_utf8"] += string.count("\ufffd")
    decoder = json.JSONDecoder(strict=False, parse_float=Decimal, parse_constant=lambda _: None)
    events: list[Event] = []
    position = 0
    while position < len(string):
        if string[position] in _PADDING:
            position += 1
            continue
        if string[position] == "]" and _AFTER_ARRAY.match(string, position):
            return events, string[position:].encode()
        try:
            value, position = decoder.raw_decode(string, position)
            events.append(lenient_event(value, damage))
        except (ValueError, RecursionError):
            damage["damaged_event"] += 1
            following = _EVENT_START.search(string, position + 1)
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
        ph=value["ph"],
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
