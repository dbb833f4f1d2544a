"""`stepscope roofline`: what operators reached of what the device allows."""

from __future__ import annotations

import argparse
from typing import Final

from stepscope.commands.shared.reading import add_reading_options, open_from
from stepscope.commands.shared.tables import add_table_options, write_table

NAME: Final = "roofline"
HELP: Final = "A table of the operators by shape: TFLOP/s and GB/s that they reached, as a share of the device's peak."
_EXAMPLES: Final = """\
examples:
  stepscope roofline trace.json
  stepscope roofline trace.json --sort share --ascending     the least efficient first
  stepscope roofline trace.json --tensor-cores               which operators could use tensor cores, and which did
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("trace", metavar="TRACE", help="a trace file, or - for standard input")
    parser.add_argument(
        "--tensor-cores",
        action="store_true",
        help="the operators that tensor cores can work for instead, and whether they used them",
    )
    add_table_options(parser)
    add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    trace = open_from(arguments, arguments.trace)
    if arguments.tensor_cores:
        from stepscope.analysis.roofline import tensor_core_table

        columns = ["operator", "input_shapes", "precision", "used", "calls", "device_ns", "share", "kernel"]
        table = tensor_core_table(trace)
        rest = [name for name in table.columns if name not in columns]
        write_table(table.select(*columns, *rest), arguments, "operators that tensor cores can work for")
    else:
        from stepscope.analysis.roofline import roofline_table

        write_table(roofline_table(trace), arguments, "operators with work on a device")
    return 0
