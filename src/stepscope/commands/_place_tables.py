"""What `lines` and `modules` share: options, costs, and where the table goes."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Final

from stepscope.commands import _output
from stepscope.commands._reading import add_reading_options, open_from, redactor_of
from stepscope.commands._tables import add_raw_option, whole_number
from stepscope.commands._user_code import add_user_code_options, user_code_from

if TYPE_CHECKING:
    import polars as pl

    from stepscope.analysis.place_costs import PlaceCosts

_TEXT_ROWS: Final = 20


def add_place_options(parser: argparse.ArgumentParser) -> None:
    """--top, --json, --csv, --redact, those of reading and of the user's code."""
    group = parser.add_argument_group("the table")
    group.add_argument("--top", metavar="N", type=whole_number, help=f"rows, 0 for all (text: {_TEXT_ROWS}, else all)")
    formats = group.add_mutually_exclusive_group()
    formats.add_argument(
        "--json", metavar="FILE", type=_output.target, help="sums over the steps, for programs; - for here"
    )
    formats.add_argument("--csv", metavar="FILE", type=_output.target, help="the same as a table; - for here")
    add_raw_option(group)
    group.add_argument("--redact", action="store_true", help="take out paths, host, user and process names")
    add_user_code_options(parser)
    add_reading_options(parser)


def costs_from(arguments: argparse.Namespace) -> PlaceCosts:
    """The costs of the trace that the arguments name."""
    from stepscope.analysis.attribution import attribute
    from stepscope.analysis.place_costs import place_costs

    trace = open_from(arguments, arguments.trace)
    return place_costs(trace, attribution=attribute(trace, user_code=user_code_from(arguments)))


def write_places(costs: PlaceCosts, table: pl.DataFrame, things: str, arguments: argparse.Namespace) -> None:
    """Write the table of lines or modules as the options say."""
    from stepscope.report.json_report import json_bytes
    from stepscope.report.places import places_report, places_text
    from stepscope.report.tables import table_bytes

    top = arguments.top if arguments.top is not None else 0
    if arguments.redact:
        table = redactor_of(arguments).redact(table)
    if arguments.json:
        report = places_report(costs, table, things, top=top)
        if arguments.redact:
            report["trace"] = os.path.basename(report["trace"])
        _output.write_output(arguments.json, json_bytes(report))
    elif arguments.csv:
        _output.write_output(arguments.csv, table_bytes(table.head(top) if top else table, "csv", raw=arguments.raw))
    else:
        rows = arguments.top if arguments.top is not None else _TEXT_ROWS
        text = places_text(costs, with_short_files(table), things, width=_output.width(), top=rows)
        _output.print_text(text)


def with_short_files(table: pl.DataFrame) -> pl.DataFrame:
    """The table with files below the working directory as seen from there."""
    import polars as pl

    here = os.path.join(os.getcwd(), "")
    if "file" not in table.columns:
        return table
    return table.with_columns(pl.col("file").str.strip_prefix(here))
