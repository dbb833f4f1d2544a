"""`stepscope steps`: when each step began, how long it took, and how much of it each device worked."""

from __future__ import annotations

import argparse
from typing import Final

from stepscope.commands.shared.reading import add_reading_options, open_from
from stepscope.commands.shared.tables import add_table_options, write_table

NAME: Final = "steps"
HELP: Final = "A table of the steps: their durations, and how much of each the devices worked."
MOST_DEVICES: Final = 16
"""Devices whose duty cycle is shown."""
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
    import polars as pl

    from stepscope.analysis.device_time import step_busy_shares
    from stepscope.analysis.steps import step_table

    trace = open_from(arguments, arguments.trace)
    steps = step_table(trace)
    busy = step_busy_shares(trace, steps)
    if busy.width > MOST_DEVICES:
        busy = busy.select(busy.columns[:MOST_DEVICES])
    write_table(pl.concat([steps, busy], how="horizontal") if busy.width else steps, arguments, "steps")
    return 0
