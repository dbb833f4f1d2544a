"""Every table of a trace as a file, CSV or Parquet, for spreadsheets, data frames and databases.

Each table has its row numbers as the column `row`, so that what refers to rows (`parent`, `operator`, `launch`,
`source`, `target`) can be joined; `trace.json` holds the metadata and the warnings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import polars as pl

from stepscope.report.exports.json_text import parts
from stepscope.trace import Trace
from stepscope.trace.csv_text import csv_text
from stepscope.trace.store import disk_errors
from stepscope.trace.tables import SCHEMAS

FORMATS: Final = ("csv", "parquet")


def write_tables(trace: Trace, folder: Path, kind: str, *, raw: bool = False) -> None:
    """Write a file a table, `operators.csv` and so on, and `trace.json`, into a folder that exists.

    Args:
        kind: "csv" or "parquet". In CSV null is empty, and text without a character is "".
        raw: keep text in CSV that a spreadsheet takes for a formula, as `csv_text` does.

    Raises:
        OSError: a file cannot be written.
    """
    about = {"metadata": trace.metadata, "warnings": trace.warnings}
    (folder / "trace.json").write_bytes(msgspec.json.format(msgspec.json.encode(about), indent=2) + b"\n")
    with disk_errors():
        for table in SCHEMAS:
            path = folder / f"{table}.{kind}"
            if kind == "csv":
                _write_csv(trace, table, path, raw=raw)
            else:
                _write_parquet(trace, table, path)


def _write_csv(trace: Trace, table: str, path: Path, *, raw: bool) -> None:
    rows = trace.scan(table).with_row_index("row")
    height = trace.scan(table).select(pl.len()).collect().item()
    with path.open("wb") as file:
        file.write(csv_text(rows.head(0).collect(), raw=raw))
        for part in parts(rows, height):
            file.write(csv_text(part, raw=raw, header=False))


def _write_parquet(trace: Trace, table: str, path: Path) -> None:
    trace.scan(table).with_row_index("row").sink_parquet(path, compression="zstd")
