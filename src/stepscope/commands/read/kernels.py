"""`stepscope kernels`: what ran on the devices."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared.reading import add_reading_options, open_from
from stepscope.commands.shared.tables import add_table_options, column_names, write_table
from stepscope.errors import UsageError
from stepscope.report.format import count, printable

if TYPE_CHECKING:
    import polars as pl

    from stepscope.trace import Trace

NAME: Final = "kernels"
HELP: Final = "A table of the kernels and copies that ran on the devices."
_EXAMPLES: Final = """\
examples:
  stepscope kernels trace.json
  stepscope kernels trace.json --group-by name,queue
  stepscope kernels trace.json --launches                    queue depth, launch delays, kernels shorter than a launch
  stepscope kernels trace.json --ncu counters.csv            beside what Nsight Compute measured: ncu --csv --page raw
  stepscope kernels trace.json --format json | jq '.[0]'
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("trace", metavar="TRACE", help="a trace file, or - for standard input")
    parser.add_argument(
        "--group-by",
        metavar="COLUMNS",
        type=column_names,
        default=("name",),
        help="one row for each value of these columns, such as name,queue (default: name)",
    )
    parser.add_argument(
        "--launches", action="store_true", help="how each device was given its work instead: queue depth, delays"
    )
    parser.add_argument(
        "--ncu",
        metavar="FILE",
        help="hardware counters of these kernels, as ncu --csv writes them: throughput, occupancy, tensor pipe",
    )
    add_table_options(parser)
    add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    if arguments.ncu is not None and arguments.launches:
        raise UsageError("--ncu tells of kernels, and --launches of how they were launched: ask for one of them")
    trace = open_from(arguments, arguments.trace)
    if arguments.launches:
        from stepscope.analysis.kernels import launch_table

        write_table(launch_table(trace), arguments, "devices")
    else:
        from stepscope.analysis.kernels import kernel_table

        table = kernel_table(trace, group_by=arguments.group_by)
        write_table(table if arguments.ncu is None else _with_counters(table, trace, arguments), arguments, "kernels")
    return 0


def _with_counters(table: pl.DataFrame, trace: Trace, arguments: argparse.Namespace) -> pl.DataFrame:
    """The table with what Nsight Compute measured; how much of it found its kernel is said."""
    from stepscope.analysis.kernels import join_counters, with_counters
    from stepscope.readers.side_files.ncu import read_ncu

    joined = join_counters(trace, read_ncu(arguments.ncu))
    found = f"{count(joined.matched)} of {count(trace.device_work.height)} works have counters of {arguments.ncu}"
    if joined.ambiguous:
        found += (
            f"; of {count(joined.ambiguous)} the kernel was measured another number of times than it ran, so nothing "
            "tells which measurement is whose"
        )
    if joined.lost:
        found += f"; {count(joined.lost)} of {count(joined.measured)} measurements are of kernels this trace lacks"
    print(f"stepscope: {printable(found)}", file=sys.stderr)
    return with_counters(table, trace, joined, group_by=arguments.group_by)
