"""`stepscope kernels`: what ran on the devices."""

from __future__ import annotations

import argparse
from typing import Final

from stepscope.commands._reading import add_reading_options, open_from
from stepscope.commands._tables import add_table_options, column_names, write_table

NAME: Final = "kernels"
HELP: Final = "A table of the kernels and copies that ran on the devices."
_EXAMPLES: Final = """\
examples:
  stepscope kernels trace.json
  stepscope kernels trace.json --group-by name,queue
  stepscope kernels trace.json --launches                    queue depth, launch delays, kernels shorter than a launch
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
    add_table_options(parser)
    add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    trace = open_from(arguments, arguments.trace)
    if arguments.launches:
        from stepscope.analysis.kernels import launch_table

        write_table(launch_table(trace), arguments, "devices")
    else:
        from stepscope.analysis.kernels import kernel_table

        write_table(kernel_table(trace, group_by=arguments.group_by), arguments, "kernels")
    return 0
