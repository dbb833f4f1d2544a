"""Format tables as text, CSV, JSON and Parquet."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, get_args

import msgspec
import polars as pl
from rich.cells import cell_len, set_cell_size

from stepscope.report.format import cell, filled, printable, printable_json
from stepscope.trace.csv_text import csv_text

TableFormat: TypeAlias = Literal["table", "csv", "json", "parquet"]
FORMATS: Final[tuple[str, ...]] = get_args(TableFormat)

_GAP: Final = 2
_NARROWEST_TEXT: Final = 28
_TOLD_BY_THE_END: Final = ("line", "file", "source_file")
"""Columns of paths, shortened at the beginning to keep the file name and line."""


def table_bytes(frame: pl.DataFrame, table_format: TableFormat, *, width: int = 120, raw: bool = False) -> bytes:
    """Format the table, in UTF-8 unless the format is binary.

    CSV and JSON hold the exact values; NaN is empty in CSV and null in JSON, and nested values are JSON in CSV.

    Args:
        raw: keep text in CSV that a spreadsheet would read as a formula, as `csv_text` does.
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
    """The table as lines of text, the heading first: numbers right-aligned, long names cut with an ellipsis.

    Paths are cut at the beginning. Columns that do not fit are left out from the right, and the last lines say which.

    Args:
        whole: the option that shows all columns.
    """
    columns = [_Column(heading(name, frame.columns), frame[name]) for name in frame.columns]
    shown = _fitting(columns, width)
    lines = [
        (" " * _GAP).join(column.line(position) for column in shown).rstrip() for position in range(frame.height + 1)
    ]
    left_out = [column.name for column in columns[len(shown) :]]
    if left_out and frame.height == 1:  # one row reads better from top to bottom
        return _sideways(columns, width)
    if left_out:
        names = ", ".join(map(printable, left_out))
        lines += filled(f"(no room for {names}; a wider terminal or {whole} shows them)", width, following=" ")
    return lines


def showing(shown: int, total: int, things: str) -> str:
    """Say what was cut from a table and how to see it; empty if nothing was."""
    return "" if shown >= total else f"showing {shown:,} of {total:,} {things}, --top 0 for all"


def heading(column_name: str, among: Sequence[str] = ()) -> str:
    """A column's heading: its name without the unit, which its cells carry.

    With `among`, "_share" is dropped too, unless another of those columns has the same stem. A column whose heading
    would equal another column's name, as in a query with aliases, keeps its own name.
    """
    short = re.sub(r"_(ns|bytes)$", "", column_name)
    name = short.removesuffix("_share")
    if name != short and among and not {f"{name}_ns", f"{name}_bytes", name} & set(among):
        short = name
    short = "time" if column_name == "ns" else short
    return printable((column_name if short in among else short).replace("_", " "))


def _sideways(columns: Sequence[_Column], width: int) -> list[str]:
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
    """The leftmost columns that fit, with their widths set: text columns shrink first, the widest most."""
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
