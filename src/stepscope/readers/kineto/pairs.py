"""Beginnings and ends as complete events: of slices of a thread (B and E), and of what runs beside others (b and e)."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Final

import msgspec

from stepscope.readers.kineto.events import Damage, Event

MOST_OPEN: Final = 1_000_000
"""Beginnings that are remembered; a recording has a few on each thread."""
_EMPTY: Final = (b"{}", b"null")


_BEGINNINGS: Final = frozenset({"B", "b", "S"})
_ENDS: Final = frozenset({"E", "e", "F"})


class Pairs:
    """Joins each end to the last beginning of its row that is open and has its name.

    What runs beside others is told apart by category and id, and stands on a row of its own for each category.
    """

    def __init__(self, damage: Damage) -> None:
        self._damage = damage
        self._open: dict[tuple[Any, ...], list[Event]] = {}
        self._count = 0

    def closed(self, events: list[Event]) -> list[Event]:
        """The events with each end as the complete event that it closes, and without beginnings."""
        if _BEGINNINGS.isdisjoint(phases := {event.ph for event in events}) and _ENDS.isdisjoint(phases):
            return events
        result = []
        for event in events:
            if event.ph in _BEGINNINGS:
                self._begin(event)
            elif event.ph not in _ENDS:
                result.append(event)
            elif (whole := self._end(event)) is not None:
                result.append(whole)
        return result

    def finish(self) -> None:
        """Count what was never closed."""
        if self._count:
            self._damage["unclosed"] += self._count

    def _begin(self, event: Event) -> None:
        if event.ts is None or self._count >= MOST_OPEN:
            self._damage["incomplete_event"] += 1
            return
        self._open.setdefault(_row(event), []).append(event)
        self._count += 1

    def _end(self, event: Event) -> Event | None:
        stack = self._open.get(_row(event), [])
        place = len(stack) - 1
        while event.name and place >= 0 and stack[place].name != event.name and len(stack) - place < 100:
            place -= 1
        if place < 0 or event.ts is None or (event.name and stack[place].name != event.name):
            self._damage["unopened"] += 1
            return None
        begin = stack.pop(place)
        self._count -= 1
        begin.ph, begin.dur = "X", _elapsed(begin.ts, event.ts)
        begin.cat = begin.cat or event.cat
        if event.ph != "E":
            begin.tid = f"async {begin.cat}".rstrip()
        begin.args = _joined(begin.args, event.args)
        return begin


def _elapsed(begin: int | float | Decimal | None, end: int | float | Decimal) -> Any:
    """From one time to the other; exact also where only one of them had too many digits for a double."""
    if begin is None:
        return 0
    if isinstance(begin, Decimal) or isinstance(end, Decimal):
        return Decimal(end) - Decimal(begin)
    return end - begin


def _row(event: Event) -> tuple[Any, ...]:
    return (event.pid, event.tid) if event.ph in "BE" else (event.pid, event.cat, event.id)


def _joined(first: msgspec.Raw, second: msgspec.Raw) -> msgspec.Raw:
    """The arguments of both, the end's where both have one; what cannot be read is the reader's to count."""
    if bytes(second) in _EMPTY:
        return first
    if bytes(first) in _EMPTY:
        return second
    try:
        values = msgspec.json.decode(first, type=dict[str, msgspec.Raw])
        values.update(msgspec.json.decode(second, type=dict[str, msgspec.Raw]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return second
    return msgspec.Raw(msgspec.json.encode(values))
