"""`stepscope rules`: what stepscope looks for."""

from __future__ import annotations

import argparse
from typing import Final

from stepscope.commands.shared.tables import add_table_options, write_table

NAME: Final = "rules"
HELP: Final = "A list of everything stepscope looks for."
_EXAMPLES: Final = """\
examples:
  stepscope rules
  stepscope explain input-bound                              what one of them means
  stepscope diagnose trace.json --rule input-bound           only that one
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    add_table_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the list."""
    import polars as pl

    from stepscope.diagnosis.rules import RULES

    if arguments.top is None:
        arguments.top = 0
    rows = [(rule.id, rule.title) for rule in RULES]
    write_table(pl.DataFrame(rows, schema={"rule": pl.String, "title": pl.String}, orient="row"), arguments, "rules")
    return 0
