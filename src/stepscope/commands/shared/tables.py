"""Write a table as the options of `add_table_options` say: sorted, cut, redacted, in one of several formats."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from stepscope.commands.shared import output
from stepscope.commands.shared.command import suggestion
from stepscope.commands.shared.options import add_output_option, add_raw_option, add_redact_option, add_top_option
from stepscope.commands.shared.reading import redacted
from stepscope.errors import UsageError

if TYPE_CHECKING:
    import polars as pl

    from stepscope.report.tables import TableFormat

FORMATS: Final = ("table", "csv", "json", "parquet")
_ROWS: Final = 20
_ROWS_ON_SCREEN: Final = 1_000
"""Most rows of CSV or JSON on a terminal without --top."""


def add_table_options(parser: argparse.ArgumentParser) -> None:
    """Add --sort, --ascending, --top, --format, --output, --raw and --redact."""
    group = parser.add_argument_group("the table")
    group.add_argument("--sort", metavar="COLUMN", help="sort by this column: the largest numbers first, text from A")
    group.add_argument("--ascending", action="store_true", help="sort the smallest numbers first")
    add_top_option(
        group, f"rows, 0 for all (default: {_ROWS} in a table, {_ROWS_ON_SCREEN:,} of CSV or JSON on a terminal)"
    )
    group.add_argument("--format", choices=FORMATS, help="default: table, or what the ending of --output says")
    add_output_option(group)
    add_raw_option(group)
    add_redact_option(group)


def write_table(frame: pl.DataFrame, arguments: argparse.Namespace, things: str, *, rows: int = _ROWS) -> None:
    """Sort, cut, redact and write a table as the options say.

    Args:
        things: what the rows are called, for "showing 20 of 431 operators".
        rows: rows of a printed table without --top; 0 for all.
    """
    from stepscope.report.tables import showing, table_bytes

    table_format = _format(arguments)
    on_screen = arguments.output == "-" and sys.stdout.isatty()
    total = frame.height
    if arguments.sort is not None:
        frame = _sorted(frame, arguments.sort, ascending=arguments.ascending)
    if arguments.top is not None:
        rows = arguments.top
    elif table_format != "table" and rows:
        rows = _ROWS_ON_SCREEN if on_screen else 0
    frame = redacted(arguments, frame.head(rows) if rows else frame)
    cut = showing(frame.height, total, things)
    if table_format != "table" or arguments.output != "-":
        if cut and on_screen:
            output.say(cut)
        output.write_output(arguments.output, table_bytes(frame, table_format, raw=arguments.raw))
    elif frame.is_empty():
        output.print_text(f"There are no {things} in this trace.\n")
    else:
        text = table_bytes(frame, "table", width=output.width()).decode()
        output.print_text(f"{text}{cut}\n" if cut else text)


def check_columns(names: Sequence[str], known: Sequence[str]) -> None:
    """Raise `UsageError` at the first name that is not a column."""
    for name in names:
        if name not in known:
            guess = suggestion(name, known)
            raise UsageError(f"there is no column {name!r}{guess}; the columns are {', '.join(known)}")


def _format(arguments: argparse.Namespace) -> TableFormat:
    ending = Path(arguments.output).suffix.removeprefix(".")
    chosen = arguments.format or (ending if ending in FORMATS else "table")
    if chosen == "parquet" and arguments.output == "-" and sys.stdout.isatty():
        raise UsageError("Parquet is not for reading on a terminal; name a file with --output")
    return cast("TableFormat", chosen)


def _sorted(frame: pl.DataFrame, column: str, *, ascending: bool) -> pl.DataFrame:
    check_columns((column,), frame.columns)
    if frame.schema[column].is_nested():
        raise UsageError(f"the column {column!r} holds lists, which have no order")
    descending = frame.schema[column].is_numeric() and not ascending
    return frame.sort(column, descending=descending, nulls_last=True, maintain_order=True)
