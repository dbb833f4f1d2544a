"""`stepscope idle`: why the devices were idle."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.reading import add_reading_options, open_from
from stepscope.commands.shared.tables import add_table_options, check_columns, column_names, write_table

if TYPE_CHECKING:
    import polars as pl

NAME: Final = "idle"
HELP: Final = "A table of the devices' idle time and its causes."
_EXAMPLES: Final = """\
examples:
  stepscope idle trace.json                                  by cause and trigger
  stepscope idle trace.json --pieces --sort duration_ns      the longest waits, one by one
  stepscope idle trace.json --group-by cause,lane
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("trace", metavar="TRACE", help="a trace file, or - for standard input")
    detail = parser.add_mutually_exclusive_group()
    detail.add_argument("--pieces", action="store_true", help="one row for each piece of idle time")
    detail.add_argument(
        "--group-by",
        metavar="COLUMNS",
        type=column_names,
        default=("device", "cause", "trigger"),
        help="one row for each value of these columns of --pieces (default: device,cause,trigger)",
    )
    add_table_options(parser)
    add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    from stepscope.analysis.idle import idle_time

    trace = open_from(arguments, arguments.trace)
    pieces = idle_time(trace)
    if pieces.is_empty() and trace.device_work.is_empty() and not arguments.format and arguments.output == "-":
        output.print_text(
            "No device was recorded, so none was idle; stepscope diagnose says where the host's time went.\n"
        )
        return 0
    if arguments.pieces:
        write_table(pieces, arguments, "pieces of idle time")
        return 0
    write_table(_grouped(pieces, arguments.group_by), arguments, "causes of idle time")
    return 0


def _grouped(pieces: pl.DataFrame, columns: tuple[str, ...]) -> pl.DataFrame:
    """Columns as asked for, then count, ns, idle_share (of all idle time); the largest first."""
    import polars as pl

    check_columns(columns, pieces.columns)
    sums = pieces.group_by(columns).agg(pl.len().alias("count"), pl.col("duration_ns").sum().alias("ns"))
    total = max(int(sums["ns"].sum()), 1)
    return sums.with_columns(idle_share=pl.col("ns") / total).sort(
        "ns", *columns, descending=[True] + [False] * len(columns)
    )
