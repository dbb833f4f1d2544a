"""What every command that prints a table shares: sorting, cutting, formats."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from stepscope.commands.shared import output
from stepscope.commands.shared.output import suggestion
from stepscope.commands.shared.reading import add_reading_options, open_from, redactor_of
from stepscope.commands.shared.user_code import add_user_code_options, user_code_from
from stepscope.errors import UsageError

if TYPE_CHECKING:
    import polars as pl

    from stepscope.analysis.picture import StepPicture
    from stepscope.analysis.places import PlaceCosts
    from stepscope.report.tables import TableFormat
    from stepscope.trace import Trace, Window


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
        "--output", metavar="FILE", type=output.target, default="-", help="write to a file instead of the terminal"
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
        from stepscope.commands.shared.reading import redactor_of

        frame = redactor_of(arguments).redact(frame)
    if table_format != "table" or arguments.output != "-":
        output.write_output(arguments.output, table_bytes(frame, table_format, raw=arguments.raw))
        return
    if frame.is_empty():
        output.print_text(f"There are no {things} in this trace.\n")
        return
    output.print_text(table_bytes(frame, "table", width=output.width()).decode())
    cut = showing(frame.height, total, things)
    if cut:
        output.print_text(f"{cut}\n")


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


_TEXT_ROWS: Final = 20


def add_place_options(parser: argparse.ArgumentParser) -> None:
    """--top, --json, --csv, --redact, those of reading and of the user's code."""
    group = parser.add_argument_group("the table")
    group.add_argument("--top", metavar="N", type=whole_number, help=f"rows, 0 for all (text: {_TEXT_ROWS}, else all)")
    formats = group.add_mutually_exclusive_group()
    formats.add_argument(
        "--json", metavar="FILE", type=output.target, help="sums over the steps, for programs; - for here"
    )
    formats.add_argument("--csv", metavar="FILE", type=output.target, help="the same as a table; - for here")
    add_raw_option(group)
    group.add_argument("--redact", action="store_true", help="take out paths, host, user and process names")
    add_user_code_options(parser)
    add_reading_options(parser)


def costs_from(arguments: argparse.Namespace) -> PlaceCosts:
    """The costs of the trace that the arguments name."""
    from stepscope.analysis.attribution import attribute
    from stepscope.analysis.places import place_costs

    trace = open_from(arguments, arguments.trace)
    return place_costs(trace, attribution=attribute(trace, user_code=user_code_from(arguments)))


def write_places(costs: PlaceCosts, table: pl.DataFrame, things: str, arguments: argparse.Namespace) -> None:
    """Write the table of lines or modules as the options say."""
    from stepscope.report.json import json_bytes
    from stepscope.report.places import places_document, places_json
    from stepscope.report.tables import table_bytes
    from stepscope.report.text import text_of

    top = arguments.top if arguments.top is not None else 0
    if arguments.redact:
        table = redactor_of(arguments).redact(table)
    if arguments.json:
        report = places_json(costs, table, things, top=top)
        if arguments.redact:
            report["trace"] = os.path.basename(report["trace"])
        output.write_output(arguments.json, json_bytes(report))
    elif arguments.csv:
        output.write_output(arguments.csv, table_bytes(table.head(top) if top else table, "csv", raw=arguments.raw))
    else:
        rows = arguments.top if arguments.top is not None else _TEXT_ROWS
        document = places_document(costs, with_short_files(table), things, top=rows)
        output.print_text(text_of(document, width=output.width()))


def with_short_files(table: pl.DataFrame) -> pl.DataFrame:
    """The table with files below the working directory as seen from there."""
    import polars as pl

    here = os.path.join(os.getcwd(), "")
    if "file" not in table.columns:
        return table
    return table.with_columns(pl.col("file").str.strip_prefix(here))


def compared_picture(trace: Trace) -> StepPicture:
    """The typical step, or everything; without a device, the causes are the main thread's, as of one without a name."""
    from stepscope.analysis.idle import idle_time
    from stepscope.analysis.picture import step_picture, typical_step
    from stepscope.analysis.steps import step_table

    causes = _main_thread(trace) if trace.device_work.is_empty() else idle_time(trace)
    return step_picture(trace, typical_step(step_table(trace), causes) or _whole(trace), causes)


def _main_thread(trace: Trace) -> pl.DataFrame:
    """Its time by cause in the form of idle time: without what it computed, as a device's is without its busy time."""
    import polars as pl

    from stepscope.analysis.host import host_time

    pieces = host_time(trace).filter(pl.col("cause") != "compute")
    no_device, no_trigger = pl.lit("").alias("device"), pl.lit(None, pl.String).alias("trigger")
    return pieces.select(no_device, "start_ns", "duration_ns", "cause", no_trigger)


def _whole(trace: Trace) -> Window:
    """From the first device work, or operator, to the end of the last one."""
    import polars as pl

    from stepscope.trace import Window

    work = trace.operators if trace.device_work.is_empty() else trace.device_work
    if work.is_empty():
        return Window(0, 1)
    start, end = work.select(
        pl.col("start_ns").min(), (pl.col("start_ns") + pl.col("duration_ns")).max().alias("e")
    ).row(0)
    return Window(start, max(end, start + 1))
