"""Numbers, sentences and tables as people read them, in a terminal, CSV, JSON and Parquet."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, get_args

import msgspec
import polars as pl
from rich.cells import cell_len, set_cell_size

from stepscope.trace.csv_text import csv_text

_DURATIONS: Final = ((1_000_000_000, "s", 2), (1_000_000, "ms", 1), (1_000, "us", 1), (1, "ns", 0))
_SIZES: Final = ((1 << 40, "TiB", 2), (1 << 30, "GiB", 2), (1 << 20, "MiB", 1), (1 << 10, "KiB", 1), (1, "B", 0))
_IDENTIFIERS: Final = frozenset(
    {"index", "step", "rank", "line", "lane", "device", "queue", "row", "correlation", "address", "python_id", "parent"}
)
_SHARES: Final = ("share", "occupancy", "utilisation")
_UNKNOWN: Final = "-"
_ABOVE_ASCII: Final = re.compile(r"[^\x00-\x7e]")


def duration(ns: float) -> str:
    """A time in nanoseconds as "1.23 s", "54.1 ms", "8.3 us" or "540 ns"."""
    return _scaled(ns, _DURATIONS)


def size(bytes: float) -> str:
    """An amount of memory as "1.50 GiB", "23.4 MiB", "1.5 KiB" or "512 B"."""
    return _scaled(bytes, _SIZES)


def share(x: float) -> str:
    """A share from 0 to 1 as "47.2 %"; what would round to nothing is "<0.1 %", of a negative one ">-0.1 %"."""
    if not math.isfinite(x):
        return _UNKNOWN
    if 0 < abs(x) < 0.0005:
        return "<0.1 %" if x > 0 else ">-0.1 %"
    return f"{x * 100 + 0.0:,.1f} %"


def count(n: float) -> str:
    """A number of things as "1,234,567"; fractions keep up to three digits."""
    if not math.isfinite(n):
        return _UNKNOWN
    if n == int(n):
        return f"{int(n):,}"
    return f"{n:,.0f}" if abs(n) >= 1000 else f"{n:.3g}"


def dollars(usd: float) -> str:
    """An amount of money as "$1,234.56", "$0.74" or "$0.0031"; above a hundred thousand without cents."""
    if not math.isfinite(usd):
        return _UNKNOWN
    if abs(usd) >= 100_000:
        return f"${usd:,.0f}"
    return f"${usd:,.2f}" if abs(usd) >= 0.095 or not usd else f"${usd:.2g}"


def cell(column_name: str, value: object) -> str:
    """A value of a table, its unit taken from the column's name; null is empty, and strings are made printable.

    Columns ending in `_ns` are times, in `bytes` amounts of memory, in `share`, `occupancy` or `utilisation` shares,
    in `usd` or `usd_h` money;
    `start_ns` keeps microseconds, so that a moment can be found again.
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
    r"""The text with every control, invisible or direction-changing character written out, such as \x1b.

    Names come from traces, which may be anyone's: printed raw, they could move the cursor or recolour the terminal.
    """
    if text is None:  # a damaged file has no name there
        return "unnamed"
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode("ascii") for mark in text)


def printable_json(data: bytes) -> bytes:
    r"""The same JSON with every control, invisible or direction-changing character as an escape such as \u202e.

    The values stay what they are, and the text can be read on a terminal.
    """
    if data.isascii() and b"\x7f" not in data:
        return data  # JSON has the other controls escaped
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
        # A unit is used from where its smaller neighbour would round up to it: 999.96 ms is "1.00 s".
        smaller = units[min(position + 1, len(units) - 1)]
        if round(abs(value) / smaller[0], smaller[2]) * smaller[0] >= unit or position == len(units) - 1:
            return f"{round(value / unit, digits) + 0.0:,.{digits}f} {word}"  # never "-0"
    raise AssertionError("the last unit takes every value")


_BEFORE_UNIT: Final = re.compile(r"(?<=\d) (?=(?:%|x|[num]?s|min|h|days|[KMGT]iB|B|GB/s|W|[mk]?J|kWh|k?g|times)(?!\w))")
_KEPT: Final = "\xa0"
"""No-break space: it keeps a number and its unit on one line while lines are made."""


def filled(text: str, width: int, first: str = "", following: str = "") -> list[str]:
    """The text as lines of at most so many characters; longer words stay whole, and so do numbers with their unit.

    Args:
        first, following: what the first line and the others begin with.
    """
    lines = textwrap.wrap(
        _BEFORE_UNIT.sub(_KEPT, text),
        width,
        initial_indent=first,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_KEPT, " ") for line in lines]


TableFormat: TypeAlias = Literal["table", "csv", "json", "parquet"]
FORMATS: Final[tuple[str, ...]] = get_args(TableFormat)

_GAP: Final = 2
_NARROWEST_TEXT: Final = 28
_TOLD_BY_THE_END: Final = ("line", "file", "source_file")
"""Columns of paths: what is too long loses its beginning, not the file's name and line."""


def table_bytes(frame: pl.DataFrame, table_format: TableFormat, *, width: int = 120, raw: bool = False) -> bytes:
    """The table in one of the formats, in UTF-8 where it is text.

    CSV and JSON hold the exact values; what is no number (NaN) is empty in CSV and null in JSON, and nested values
    are JSON in CSV.

    Args:
        raw: keep text in CSV that a spreadsheet takes for a formula, as `csv_text` does.
    """
    match table_format:
        case "csv":
            return csv_text(_flat(frame), raw=raw)
        case "json":
            rows = b",\n".join(msgspec.json.encode(row, enc_hook=str) for row in frame.iter_rows(named=True))
            return printable_json(b"[\n" + rows + b"\n]\n") if rows else b"[]\n"
        case "parquet":
            buffer = io.BytesIO()
            frame.write_parquet(buffer)
            return buffer.getvalue()
        case "table":
            return ("\n".join(table_lines(frame, width=width)) + "\n").encode()


def table_lines(frame: pl.DataFrame, *, width: int, whole: str = "--format csv") -> list[str]:
    """The table as lines of text, the heading first: numbers right, long names cut with an ellipsis.

    Paths lose their beginning. Columns that do not fit are left out from the right, and the last lines say which.

    Args:
        whole: the option that shows all columns.
    """
    columns = [_Column(heading(name, frame.columns), frame[name]) for name in frame.columns]
    shown = _fitting(columns, width)
    lines = [
        (" " * _GAP).join(column.line(position) for column in shown).rstrip() for position in range(frame.height + 1)
    ]
    left_out = [column.name for column in columns[len(shown) :]]
    if left_out and frame.height == 1:  # one row reads as well from top to bottom
        return _sideways(columns, width)
    if left_out:
        names = ", ".join(map(printable, left_out))
        lines += filled(f"(no room for {names}; a wider terminal or {whole} shows them)", width, following=" ")
    return lines


def showing(shown: int, total: int, things: str) -> str:
    """What was cut from a table and how to see it; empty where nothing was."""
    return "" if shown >= total else f"showing {shown:,} of {total:,} {things}, --top 0 for all"


def heading(column_name: str, among: Sequence[str] = ()) -> str:
    """What stands above a column: its name without the unit, which its cells carry.

    "share" goes as well where no other of the columns `among` which it stands has the same name. A column that would be
    called like another, as a query may call them, keeps its name.
    """
    short = re.sub(r"_(ns|bytes)$", "", column_name)
    name = short.removesuffix("_share")
    if name != short and among and not {f"{name}_ns", f"{name}_bytes", name} & set(among):
        short = name
    short = "time" if column_name == "ns" else short
    return printable((column_name if short in among else short).replace("_", " "))


def _sideways(columns: Sequence[_Column], width: int) -> list[str]:
    """The only row from top to bottom, a line for each column."""
    names = max(cell_len(column.cells[0]) for column in columns)
    room = max(width - names - _GAP, 2)
    lines = []
    for column in columns:
        name, value = column.cells
        if cell_len(value) > room:
            value = set_cell_size(value, room - 1) + "…"
        lines.append(f"{set_cell_size(name, names)}{' ' * _GAP}{value}".rstrip())
    return lines


class _Column:
    """One column's heading and cells as text."""

    def __init__(self, heading: str, values: pl.Series) -> None:
        name = self.name = values.name
        self.is_text = not (values.dtype.is_numeric() or values.dtype in (pl.Boolean, pl.Null))
        self.cells = [heading, *(cell(name, value) for value in values.to_list())]
        self.wanted = max(cell_len(text) for text in self.cells)
        self.width = self.wanted

    def line(self, position: int) -> str:
        text = self.cells[position]
        length = cell_len(text)
        if length > self.width and self.name in _TOLD_BY_THE_END and position:
            return "…" + set_cell_size(text[::-1], self.width - 1)[::-1]
        if length > self.width:
            return set_cell_size(text, self.width - 1) + "…"
        padding = " " * (self.width - length)
        return text + padding if self.is_text else padding + text


def _fitting(columns: Sequence[_Column], width: int) -> list[_Column]:
    """As many columns from the left as fit, with their widths set: text gives way first, the widest most."""
    shown = list(columns)
    while len(shown) > 1 and _least_width(shown) > width:
        shown.pop()
    excess = sum(column.wanted for column in shown) + _GAP * (len(shown) - 1) - width
    while excess > 0:
        widest = max((column for column in shown if column.is_text), key=lambda column: column.width, default=None)
        if widest is None or widest.width <= 2:
            break
        widest.width -= 1
        excess -= 1
    return shown


def _least_width(columns: Sequence[_Column]) -> int:
    least = (min(column.wanted, _NARROWEST_TEXT) if column.is_text else column.wanted for column in columns)
    return sum(least) + _GAP * (len(columns) - 1)


def _flat(frame: pl.DataFrame) -> pl.DataFrame:
    nested = [
        pl.Series(
            name,
            [None if value is None else msgspec.json.encode(value).decode() for value in frame[name].to_list()],
            pl.String,
        )
        for name, dtype in frame.schema.items()
        if dtype.is_nested()
    ]
    floats = [pl.col(name).fill_nan(None) for name, dtype in frame.schema.items() if dtype.is_float()]
    return frame.with_columns(nested).with_columns(floats)
