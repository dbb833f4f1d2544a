"""`stepscope lines` and `stepscope modules`: what each line of the user's code, or module of the network, costs."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.command import Command, CommandParser
from stepscope.commands.shared.options import (
    add_raw_option,
    add_reading_options,
    add_redact_option,
    add_report_options,
    add_top_option,
    add_trace,
    add_user_code_options,
    user_code_from,
)
from stepscope.commands.shared.reading import open_from, redacted
from stepscope.commands.shared.values import whole
from stepscope.errors import UsageError

if TYPE_CHECKING:
    import polars as pl

    from stepscope.analysis.places import PlaceCosts
    from stepscope.report.document import Document

_TEXT_ROWS: Final = 20


def _add_place_options(parser: CommandParser) -> None:
    group = parser.add_argument_group("the table")
    add_top_option(group, f"rows, 0 for all (text: {_TEXT_ROWS}, else all)")
    add_report_options(
        group.add_mutually_exclusive_group(),
        json="sums over the steps, for programs; - for here",
        csv="the same as a table; - for here",
    )
    add_raw_option(group)
    add_redact_option(group)
    add_user_code_options(parser)
    add_reading_options(parser)


def _costs(arguments: argparse.Namespace) -> PlaceCosts:
    from stepscope.analysis.attribution import attribute
    from stepscope.analysis.places import place_costs

    trace = open_from(arguments, arguments.trace)
    return place_costs(trace, attribution=attribute(trace, user_code=user_code_from(arguments)))


def _write(costs: PlaceCosts, table: pl.DataFrame, things: str, arguments: argparse.Namespace) -> None:
    from stepscope.report.places import places_document, places_json
    from stepscope.report.tables import table_bytes

    table = redacted(arguments, table)
    top = arguments.top or 0

    def report() -> dict[str, Any]:
        content = places_json(costs, table, things, top=top)
        if arguments.redact:
            content["trace"] = os.path.basename(content["trace"])
        return content

    def document() -> Document:
        rows = _TEXT_ROWS if arguments.top is None else top
        return places_document(costs, _with_short_files(table), things, top=rows)

    def csv() -> bytes:
        return table_bytes(table.head(top) if top else table, "csv", raw=arguments.raw)

    is_printed = not (arguments.json or arguments.csv)
    output.write_reports(arguments, document, is_printed=is_printed, json=report, csv=csv)


def _with_short_files(table: pl.DataFrame) -> pl.DataFrame:
    """Make paths below the working directory relative to it."""
    import polars as pl

    here = os.path.join(os.getcwd(), "")
    return table.with_columns(pl.col("file").str.strip_prefix(here)) if "file" in table.columns else table


def _prepare_modules(parser: CommandParser) -> None:
    add_trace(parser)
    parser.add_argument(
        "--depth", metavar="N", type=whole(1, 999_999), help="levels of the tree to show (default: all)"
    )
    _add_place_options(parser)


def _run_modules(arguments: argparse.Namespace) -> int:
    from stepscope.analysis.places import module_table

    costs = _costs(arguments)
    table = module_table(costs.attribution.trace, costs=costs, depth=arguments.depth)
    _write(costs, table, "modules", arguments)
    return 0


def _prepare_lines(parser: CommandParser) -> None:
    parser.late = "file"
    add_trace(parser)
    parser.add_argument("file", metavar="FILE", nargs="?", help="show this source file, line by line")
    source = parser.add_argument_group("the source file")
    source.add_argument("--source-root", metavar="DIR", help="look for the file below DIR, by the end of its path")
    source.add_argument("--all", action="store_true", help="the whole file, not only the lines around costs")
    _add_place_options(parser)


def _run_lines(arguments: argparse.Namespace) -> int:
    from stepscope.analysis.places import line_table

    if arguments.file == "":
        raise UsageError("the name of the source file is empty")
    if arguments.file is None and (arguments.source_root is not None or arguments.all):
        raise UsageError("--source-root and --all are for one FILE: stepscope lines TRACE FILE")
    costs = _costs(arguments)
    table = line_table(costs.attribution.trace, costs=costs)
    if arguments.file is not None:
        table, recorded = _of_file(table, arguments.file)
        if not arguments.json and not arguments.csv:
            _print_source(costs, table, recorded, arguments)
            return 0
    _write(costs, table, "lines", arguments)
    return 0


def _of_file(table: pl.DataFrame, wanted: str) -> tuple[pl.DataFrame, str]:
    import polars as pl

    from stepscope.commands.shared.sources import recorded_file

    recorded = recorded_file(wanted, table["file"].drop_nulls().unique(maintain_order=True).to_list())
    return table.filter(pl.col("file") == recorded), recorded


def _print_source(costs: PlaceCosts, table: pl.DataFrame, recorded: str, arguments: argparse.Namespace) -> None:
    from stepscope.commands.shared.sources import source_lines
    from stepscope.report.format import printable
    from stepscope.report.places import source_view

    place, lines = source_lines(recorded, arguments.file, arguments.source_root) or (None, None)
    shown = place
    if place is None or arguments.redact:
        shown = redacted(arguments, _with_short_files(table))["file"][0]
    note = _note(costs.attribution.trace.metadata.origin_unix_ns, place)
    view = source_view(costs, table, lines, every=arguments.all, width=output.width())
    output.print_text("\n".join([printable(shown) + note, *view]) + "\n")


def _note(recorded_unix_ns: int | None, place: str | None) -> str:
    """Caveats about the file, printed above it."""
    if place is None:
        return " (the file was not found: --source-root DIR says where it lies)"
    if recorded_unix_ns is not None and os.stat(place).st_mtime_ns > recorded_unix_ns:
        return " (changed since the trace was recorded: lines may have moved)"
    return ""


MODULES: Final = Command(
    "modules",
    "What each module of the network costs, as a tree: time forward and backward, calls and memory.",
    _prepare_modules,
    _run_modules,
    """\
examples:
  stepscope modules trace.json
  stepscope modules trace.json --depth 2 --top 0
  stepscope modules trace.json --csv modules.csv
""",
)
LINES: Final = Command(
    "lines",
    "What each line of your code costs, forward and backward: time, idle time, calls and memory.",
    _prepare_lines,
    _run_lines,
    """\
examples:
  stepscope lines trace.json                        the costliest lines of all files
  stepscope lines trace.json model.py               the file, with what each line costs beside it
  stepscope lines trace.json model.py --source-root ~/job    where the file lies here, if not where it was recorded
  stepscope lines trace.json --json - | jq '.lines[0]'
""",
)
