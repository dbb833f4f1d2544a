"""`stepscope modules`: what each module of the network costs, forward and backward."""

from __future__ import annotations

import argparse
from typing import Final

from stepscope.commands.shared.tables import add_place_options, costs_from, write_places

NAME: Final = "modules"
HELP: Final = "What each module of the network costs, as a tree: time forward and backward, calls and memory."
_EXAMPLES: Final = """\
examples:
  stepscope modules trace.json
  stepscope modules trace.json --depth 2 --top 0
  stepscope modules trace.json --csv modules.csv
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("trace", metavar="TRACE", help="a trace file, a run's name, or - for standard input")
    parser.add_argument("--depth", metavar="N", type=_levels, help="levels of the tree to show (default: all)")
    add_place_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the tree."""
    from stepscope.analysis.places import module_table

    costs = costs_from(arguments)
    table = module_table(costs.attribution.trace, costs=costs, depth=arguments.depth)
    write_places(costs, table, "modules", arguments)
    return 0


def _levels(text: str) -> int:
    if not text.isdecimal() or not 1 <= len(text) <= 6 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of levels: write 1, 2, 3, ...")
    return int(text)
