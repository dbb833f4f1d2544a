"""`stepscope operators`: what the framework's operators cost on host and device."""

from __future__ import annotations

import argparse
from typing import Final

from stepscope.commands.shared.reading import add_reading_options, open_from
from stepscope.commands.shared.tables import add_table_options, column_names, write_table
from stepscope.commands.shared.user_code import add_user_code_options, user_code_from

NAME: Final = "operators"
HELP: Final = "A table of the framework's operators and their time on host and device."
_EXAMPLES: Final = """\
examples:
  stepscope operators trace.json
  stepscope operators trace.json --group-by name,input_shapes --top 50
  stepscope operators trace.json --output operators.csv
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
        help="one row for each value of these columns, such as name,input_shapes (default: name)",
    )
    add_table_options(parser)
    add_user_code_options(parser)
    add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    from stepscope.analysis.operators import operator_table

    trace = open_from(arguments, arguments.trace)
    table = operator_table(trace, group_by=arguments.group_by, user_code=user_code_from(arguments))
    write_table(table, arguments, "operators")
    return 0
