"""`stepscope steps`: when each step began and how long it took."""

from __future__ import annotations

import argparse
from typing import Final

from stepscope.commands._reading import add_reading_options, open_from
from stepscope.commands._tables import add_table_options, write_table

NAME: Final = "steps"
HELP: Final = "A table of the steps and their durations."
_EXAMPLES: Final = """\
examples:
  stepscope steps trace.json
  stepscope steps trace.json --sort duration_ns --top 5      the slowest ones
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("trace", metavar="TRACE", help="a trace file, or - for standard input")
    add_table_options(parser)
    add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    from stepscope.analysis.steps import step_table

    write_table(step_table(open_from(arguments, arguments.trace)), arguments, "steps")
    return 0
