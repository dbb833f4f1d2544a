"""A source file with what its lines cost beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import polars as pl

from stepscope.analysis.place_costs import PlaceCosts
from stepscope.report.format import cell, printable
from stepscope.report.places import heading, per_step
from stepscope.report.tables import heading as column_heading

AROUND: Final = 3
"""Lines shown before and after one that costs something."""
_ALWAYS: Final = ("total_ns", "forward_ns", "backward_ns")
_COLUMNS: Final = (*_ALWAYS, "idle_ns", "calls", "allocated_bytes")


def source_view(
    costs: PlaceCosts, table: pl.DataFrame, source: Sequence[str] | None, *, every: bool, width: int
) -> list[str]:
    """The lines of text: a heading, then the file with its costs for one step.

    Args:
        table: rows of `line_table` of this file.
        source: the file's lines; None where it was not found, and then only the costs are shown.
        every: show the whole file, not only the neighbourhood of lines that cost anything.
    """
    means = per_step(table, costs).rename({"bytes_allocated": "allocated_bytes"})
    columns = [name for name in _COLUMNS if name in _ALWAYS or means[name].fill_null(0).sum() > 0]
    rows = {row["line"]: row for row in _by_line(means).iter_rows(named=True)}
    shown = _shown(rows, source, every=every)
    cells = [[_cell(rows.get(line), name) for name in columns] for line in shown]
    heads = [column_heading(name) for name in columns]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    number_width = len(str(max(shown, default=1))) + 1
    lines = [heading(costs), "", _line(heads, widths, "".rjust(number_width), "")]
    before = 0
    for line, values in zip(shown, cells, strict=True):
        if before and line > before + 1:
            lines.append(_line(["" for _ in widths], widths, "…".rjust(number_width), ""))
        before = line
        row = rows.get(line)
        mark = "*" if row is not None and not row["exact_line"] else " "
        text = source[line - 1] if source is not None and line <= len(source) else _function(row)
        lines.append(_line(values, widths, f"{line}{mark}".rjust(number_width), text)[: max(width, 60)].rstrip())
    if (~table["exact_line"]).any():
        lines += ["", "* a whole function: the trace tells which, not which of its lines. stepscope run records lines."]
    return lines


def _by_line(table: pl.DataFrame) -> pl.DataFrame:
    """One row for each line; a comprehension's functions stand in one line with what is around them."""
    sums = [pl.col(name).sum() for name in table.columns if name not in ("file", "line", "function", "exact_line")]
    return table.group_by("line").agg(pl.col("function").first(), pl.col("exact_line").all(), *sums)


def _shown(rows: dict[int, Any], source: Sequence[str] | None, *, every: bool) -> list[int]:
    if source is None:
        return sorted(rows)
    if every:
        return list(range(1, len(source) + 1))
    near = {line + offset for line in rows for offset in range(-AROUND, AROUND + 1)}
    return sorted({*(line for line in near if 1 <= line <= len(source)), *rows})


def _cell(row: dict[str, Any] | None, name: str) -> str:
    value = None if row is None else row[name]
    return cell(name, value) if value else ""


def _function(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"({row['function']})"


def _line(values: Sequence[str], widths: Sequence[int], number: str, text: str) -> str:
    cells = [value.rjust(width) for value, width in zip(values, widths, strict=True)]
    return "  ".join([*cells, number, printable(text.expandtabs(4))]).rstrip()
