"""What every command that prints a table shares: sorting, cutting, formats."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from stepscope.commands import _output
from stepscope.commands._parser import suggestion
from stepscope.errors import UsageError

if TYPE_CHECKING:
    import polars as pl

    from stepscope.report.tables import TableFormat

FORMATS: Final = ("table", "csv", "json", "parquet")
DEFAULT_TOP: Final = 20
MOST_ON_SCREEN: Final = 1_000
"""Rows of CSV or JSON that a terminal is given where --top says nothing."""


def add_table_options(parser: argparse.ArgumentParser) -> None:
    """--sort, --ascending, --top, --format, --output and --redact."""
    group = parser.add_argument_group("the table")
    group.add_argument("--sort", metavar="COLUMN", help="sort by this column: the largest numbers first, text from A")
    group.add_argument("--ascending", action="store_true", help="sort the smallest numbers first")
    group.add_argument(
        "--top",
        metavar="N",
        type=whole_number,
        help=f"rows, 0 for all (default: {DEFAULT_TOP} in a table, {MOST_ON_SCREEN:,} of CSV or JSON on a terminal)",
    )
    group.add_argument("--format", choices=FORMATS, help="default: table, or what the ending of --output says")
    group.add_argument(
        "--output", metavar="FILE", type=_output.target, default="-", help="write to a file instead of the terminal"
    )
    add_raw_option(group)
    group.add_argument("--redact", action="store_true", help="take out paths, host, user and process names")


def add_raw_option(group: argparse._ActionsContainer) -> None:
    """--raw, where a command writes CSV."""
    group.add_argument(
        "--raw",
        action="store_true",
        help="CSV: write text as it is, also what spreadsheets take for formulas, which else gets an apostrophe",
    )


def whole_number(text: str) -> int:
    """A number of rows from the command line."""
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of rows")
    return int(text)


def column_names(text: str) -> tuple[str, ...]:
    """Columns from the command line, separated by commas; one that is named twice counts once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise argparse.ArgumentTypeError("name at least one column")
    return names


def write_table(frame: pl.DataFrame, arguments: argparse.Namespace, things: str) -> None:
    """Sort, cut, redact and write a table as the options say."""
    from stepscope.report.tables import showing, table_bytes

    table_format = _format(arguments)
    total = frame.height
    if arguments.sort is not None:
        frame = _sorted(frame, arguments.sort, ascending=arguments.ascending)
    on_screen = arguments.output == "-" and sys.stdout.isatty()
    default = DEFAULT_TOP if table_format == "table" else MOST_ON_SCREEN if on_screen else 0
    top = default if arguments.top is None else arguments.top
    frame = frame.head(top) if top else frame
    if on_screen and table_format != "table" and (cut := showing(frame.height, total, things)):
        print(f"stepscope: {cut}", file=sys.stderr)
    if arguments.redact:
        from stepscope.commands._reading import redactor_of

        frame = redactor_of(arguments).redact(frame)
    if table_format != "table" or arguments.output != "-":
        _output.write_output(arguments.output, table_bytes(frame, table_format, raw=arguments.raw))
        return
    if frame.is_empty():
        _output.print_text(f"There are no {things} in this trace.\n")
        return
    _output.print_text(table_bytes(frame, "table", width=_output.width()).decode())
    cut = showing(frame.height, total, things)
    if cut:
        _output.print_text(f"{cut}\n")


def check_columns(names: tuple[str, ...], known: list[str]) -> None:
    """Raise `UsageError` at the first name that is no column."""
    for name in names:
        if name not in known:
            raise UsageError(
                f"there is no column {name!r}{suggestion(name, known)}; the columns are {', '.join(known)}"
            )


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
