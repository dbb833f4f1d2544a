"""`stepscope input`: the functions of the input pipeline and what they cost."""

from __future__ import annotations

import argparse
from typing import Final

from stepscope.commands.shared.reading import add_reading_options, open_from
from stepscope.commands.shared.tables import add_table_options, write_table

NAME: Final = "input"
HELP: Final = "The functions that load the data: items, transforms, collate, in the process and in its workers."
_EXAMPLES: Final = """\
examples:
  stepscope input trace.json                     the costliest first
  stepscope input trace.json --sort total_ns     with the functions that they call
  stepscope input trace.json --output input.csv
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("trace", metavar="TRACE", help="a trace file, a run's name, or - for standard input")
    add_table_options(parser)
    add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    from stepscope.analysis.input_pipeline import input_table

    trace = open_from(arguments, arguments.trace)
    write_table(input_table(trace), arguments, "functions of an input pipeline")
    return 0
