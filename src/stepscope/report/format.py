"""Format numbers, and phrases that several reports share, for terminals and pages."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from stepscope.trace import TraceWarning

_DURATIONS: Final = ((1_000_000_000, "s", 2), (1_000_000, "ms", 1), (1_000, "us", 1), (1, "ns", 0))

_SIZES: Final = ((1 << 40, "TiB", 2), (1 << 30, "GiB", 2), (1 << 20, "MiB", 1), (1 << 10, "KiB", 1), (1, "B", 0))

_IDENTIFIERS: Final = frozenset(
    {"index", "step", "rank", "line", "lane", "device", "queue", "row", "correlation", "address", "python_id", "parent"}
)

_SHARES: Final = ("share", "occupancy", "utilisation")

_UNKNOWN: Final = "-"

_SMALLEST_SPREAD: Final = 0.02
"""A plot spans at least this share of the step, so that noise does not look large."""

_ABOVE_ASCII: Final = re.compile(r"[^\x00-\x7e]")


def duration(ns: float) -> str:
    """A time in nanoseconds as "1.23 s", "54.1 ms", "8.3 us" or "540 ns"."""
    return _scaled(ns, _DURATIONS)


def clock(seconds: float | None) -> str:
    """A time in seconds within a run, with minutes and hours if there are any."""
    if seconds is None:
        return _UNKNOWN
    if seconds < 120:
        return duration(seconds * 1e9)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def span(seconds: float) -> str:
    """A planned or remaining time in whole seconds: "10 s", "10 min", "1 min 30 s" or "1 h 30 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min"), (0 if hours else rest, "s"))
    return " ".join(f"{number} {unit}" for number, unit in parts if number) or "0 s"


def plot_range(times_ns: Sequence[float]) -> tuple[float, float]:
    """Range of a plot's time axis, never so narrow that noise looks large."""
    low, high = min(times_ns), max(times_ns)
    short = max(_SMALLEST_SPREAD * high, 1.0) - (high - low)
    return (max(low - short / 2, 0.0), high + short / 2) if short > 0 else (low, high)


def size(bytes: float) -> str:
    """An amount of memory as "1.50 GiB", "23.4 MiB", "1.5 KiB" or "512 B"."""
    return _scaled(bytes, _SIZES)


def share(x: float) -> str:
    """A share (0 to 1) as "47.2 %"; values that would round to zero are "<0.1 %" or ">-0.1 %"."""
    if not math.isfinite(x):
        return _UNKNOWN
    if 0 < abs(x) < 0.0005:
        return "<0.1 %" if x > 0 else ">-0.1 %"
    return f"{x * 100 + 0.0:,.1f} %"


def count(n: float) -> str:
    """A count as "1,234,567"; fractions keep up to three digits."""
    if not math.isfinite(n):
        return _UNKNOWN
    if n == int(n):
        return f"{int(n):,}"
    return f"{n:,.0f}" if abs(n) >= 1000 else f"{n:.3g}"


def dollars(usd: float) -> str:
    """An amount in US dollars as "$1,234.56", "$0.74" or "$0.0031"; without cents above a hundred thousand."""
    if not math.isfinite(usd):
        return _UNKNOWN
    if abs(usd) >= 100_000:
        return f"${usd:,.0f}"
    return f"${usd:,.2f}" if abs(usd) >= 0.095 or not usd else f"${usd:.2g}"


def cell(column_name: str, value: object) -> str:
    """Format a table cell with the unit that the column's name implies; null is empty, and strings are made printable.

    Columns ending in `_ns` are times, in `bytes` amounts of memory, in `share`, `occupancy` or `utilisation` shares, in
    `usd` or `usd_h` money. `start_ns` keeps microseconds, so that a moment can be found again.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return _number(column_name, value)
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(column_name, item) for item in value)
    return printable(str(value))


def printable(text: str | None) -> str:
    r"""Escape every control, invisible or direction-changing character, such as \x1b.

    Names from traces are untrusted: printed raw, they could move the cursor or recolour the terminal.
    """
    if text is None:  # a damaged file may have null as a name
        return "unnamed"
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode("ascii") for mark in text)


def printable_json(data: bytes) -> bytes:
    r"""Escape every control, invisible or direction-changing character in JSON, such as \u202e.

    The values do not change, and the text is safe to print on a terminal.
    """
    if data.isascii() and b"\x7f" not in data:
        return data  # JSON already escapes the other controls
    return _ABOVE_ASCII.sub(lambda match: _escaped(match[0]), data.decode("utf-8", "surrogatepass")).encode()


def _escaped(mark: str) -> str:
    if mark.isprintable():
        return mark
    units = mark.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place]:02x}{units[place + 1]:02x}" for place in range(0, len(units), 2))


def _number(column_name: str, value: float) -> str:
    if column_name in _IDENTIFIERS:
        return str(value)
    if column_name == "start_ns":
        return f"{value / 1e6:,.3f} ms"
    if column_name.endswith("_ns") or column_name == "ns":
        return duration(value)
    if column_name.endswith("bytes"):
        return size(value)
    if column_name.endswith(_SHARES):
        return share(value)
    if column_name.endswith(("usd", "usd_h")):
        return dollars(value)
    return count(value)


def _scaled(value: float, units: tuple[tuple[int, str, int], ...]) -> str:
    if not math.isfinite(value):
        return _UNKNOWN
    for position, (unit, word, digits) in enumerate(units):
        # Use the larger unit where the smaller one would round up to it: 999.96 ms is "1.00 s".
        smaller = units[min(position + 1, len(units) - 1)]
        if round(abs(value) / smaller[0], smaller[2]) * smaller[0] >= unit or position == len(units) - 1:
            return f"{round(value / unit, digits) + 0.0:,.{digits}f} {word}"  # never "-0"
    raise AssertionError("the last unit takes every value")


_BEFORE_UNIT: Final = re.compile(r"(?<=\d) (?=(?:%|x|[num]?s|min|h|days|[KMGT]iB|B|GB/s|W|[mk]?J|kWh|k?g|times)(?!\w))")

_KEPT: Final = "\xa0"
"""No-break space: keeps a number and its unit together while lines are wrapped."""


def filled(text: str, width: int, first: str = "", following: str = "", *, break_words: bool = False) -> list[str]:
    """Wrap text to at most `width` characters per line, keeping each number with its unit.

    Args:
        first, following: prefix of the first line and of the others.
        break_words: break words longer than a line, which otherwise stay whole.
    """
    lines = textwrap.wrap(
        _BEFORE_UNIT.sub(_KEPT, text),
        width,
        initial_indent=first,
        subsequent_indent=following,
        break_long_words=break_words,
        break_on_hyphens=False,
    )
    return [line.replace(_KEPT, " ") for line in lines]


_MANY_TIMES: Final = 9.0
"""Larger changes are given as a multiple."""


def file_name(path: str) -> str:
    """The last part of a path on any operating system."""
    return path.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]


def warning_sentence(warning: TraceWarning) -> str:
    return f"{count(warning.count)} x {warning.kind}: {warning.detail}"


def change_words(change: float) -> str:
    """A change as "21.8 % less", "3.0 % more" or "the same"."""
    if change == 0:
        return "the same"
    return f"{share(abs(change))} {'more' if change > 0 else 'less'}"


def interval_words(low: float, high: float) -> str:
    """An interval of changes: "20.1 % to 23.4 % less", "2.1 % less to 2.9 % more", "5.0 % less to 12 times as long"."""
    if high <= 0:
        return f"{share(-high)} to {share(-low)} less"
    most = f"{share(high)} more" if high < _MANY_TIMES else f"{count(round(1 + high))} times as long"
    if low >= 0:
        least = share(low) if high < _MANY_TIMES else f"{share(low)} more"
        return f"{least} to {most}"
    return f"{share(-low)} less to {most}"


def share_of(confidence: float) -> str:
    """A confidence as "95 %"."""
    return f"{count(round(confidence * 100, 2))} %"
