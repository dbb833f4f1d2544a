"""`stepscope lines`: what each line of the user's code costs, forward and backward."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.output import CommandParser
from stepscope.commands.shared.reading import redactor_of
from stepscope.commands.shared.tables import add_place_options, costs_from, with_short_files, write_places
from stepscope.errors import UsageError

if TYPE_CHECKING:
    import polars as pl

    from stepscope.analysis.places import PlaceCosts

NAME: Final = "lines"
HELP: Final = "What each line of your code costs, forward and backward: time, idle time, calls and memory."
_EXAMPLES: Final = """\
examples:
  stepscope lines trace.json                        the costliest lines of all files
  stepscope lines trace.json model.py               the file, with what each line costs beside it
  stepscope lines trace.json model.py --source-root ~/job    where the file lies here, if not where it was recorded
  stepscope lines trace.json --json - | jq '.lines[0]'
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    if isinstance(parser, CommandParser):
        parser.late = "file"
    parser.add_argument("trace", metavar="TRACE", help="a trace file, a run's name, or - for standard input")
    parser.add_argument("file", metavar="FILE", nargs="?", help="show this source file, line by line")
    source = parser.add_argument_group("the source file")
    source.add_argument("--source-root", metavar="DIR", help="look for the file below DIR, by the end of its path")
    source.add_argument("--all", action="store_true", help="the whole file, not only the lines around costs")
    add_place_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the costliest lines, or a file with its costs."""
    from stepscope.analysis.places import line_table

    if arguments.file == "":
        raise UsageError("the name of the source file is empty")
    if arguments.file is None and (arguments.source_root is not None or arguments.all):
        raise UsageError("--source-root and --all are for one FILE: stepscope lines TRACE FILE")
    costs = costs_from(arguments)
    table = line_table(costs.attribution.trace, costs=costs)
    if arguments.file is not None:
        table, recorded = _of_file(table, arguments.file)
        if not arguments.json and not arguments.csv:
            _print_source(costs, table, recorded, arguments)
            return 0
    write_places(costs, table, "lines", arguments)
    return 0


def _of_file(table: pl.DataFrame, wanted: str) -> tuple[pl.DataFrame, str]:
    import polars as pl

    from stepscope.commands.shared.user_code import recorded_file

    recorded = recorded_file(wanted, table["file"].drop_nulls().unique(maintain_order=True).to_list())
    return table.filter(pl.col("file") == recorded), recorded


def _print_source(costs: PlaceCosts, table: pl.DataFrame, recorded: str, arguments: argparse.Namespace) -> None:
    from stepscope.commands.shared.user_code import source_lines
    from stepscope.report.format import printable
    from stepscope.report.places import source_view

    found = source_lines(recorded, arguments.file, arguments.source_root)
    named = with_short_files(table)
    if arguments.redact:
        named = redactor_of(arguments).redact(named)
    place = named["file"][0] if found is None or arguments.redact else found[0]
    note = _note(costs.attribution.trace.metadata.origin_unix_ns, None if found is None else found[0])
    view = source_view(costs, table, None if found is None else found[1], every=arguments.all, width=output.width())
    output.print_text("\n".join([printable(place) + note, *view]) + "\n")


def _note(recorded_unix_ns: int | None, place: str | None) -> str:
    """What to know of the file before reading it."""
    if place is None:
        return " (the file was not found: --source-root DIR says where it lies)"
    if recorded_unix_ns is not None and os.stat(place).st_mtime_ns > recorded_unix_ns:
        return " (changed since the trace was recorded: lines may have moved)"
    return ""
