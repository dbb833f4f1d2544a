"""A table as the pages' templates need it: what stands in each cell, and what it is sorted by."""

from __future__ import annotations

import polars as pl

from stepscope.report.format import cell
from stepscope.report.html_picture import View
from stepscope.report.tables import heading


def table_view(frame: pl.DataFrame) -> View:
    """For the macro `table` of parts.html.j2; every name and value is made printable."""
    numeric = [dtype.is_numeric() for dtype in frame.dtypes]
    columns = [
        {"heading": heading(name), "numeric": is_number} for name, is_number in zip(frame.columns, numeric, strict=True)
    ]
    rows = [
        [
            {"text": cell(name, value), "value": value if is_number else None, "numeric": is_number}
            for (name, value), is_number in zip(row.items(), numeric, strict=True)
        ]
        for row in frame.iter_rows(named=True)
    ]
    return {"columns": columns, "rows": rows}
