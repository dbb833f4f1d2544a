"""The few messages of an XLA profile that a Chrome trace can be turned back into, as bytes on the wire."""

from __future__ import annotations

from collections.abc import Iterable

from stepscope.protobuf_fields import double, message, text, whole


def statistic(number: int, value: int | float | str) -> bytes:
    """An XStat: number of its name and value."""
    name = whole(1, number)
    if isinstance(value, str):
        return name + text(5, value)
    if isinstance(value, float):
        return name + double(2, value)
    return name + whole(4 if -(2**63) <= value < 2**63 else 3, value)


def event(name: int, offset_ps: int, duration_ps: int, statistics: Iterable[bytes]) -> bytes:
    """An XEvent as a field of its line."""
    content = [whole(1, name), whole(2, offset_ps), whole(3, duration_ps), *(message(4, each) for each in statistics)]
    return message(4, b"".join(content))


def named(number: int, name: str, display: str = "", statistics: Iterable[bytes] = ()) -> bytes:
    """An entry of a plane's table of names: of events, or of statistics."""
    content = [whole(1, number), text(2, name)]
    if display:
        content.append(text(4, display))
    content += [message(5, each) for each in statistics]
    return whole(1, number) + message(2, b"".join(content))
