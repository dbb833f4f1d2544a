"""`stepscope rules` and `stepscope explain`: what stepscope looks for, and what a finding means."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.command import Command, CommandParser, suggestion
from stepscope.commands.shared.tables import add_table_options, write_table
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.diagnosis.rule import Rule


def rule_named(name: str) -> Rule:
    """The rule with this id.

    Raises:
        UsageError: there is none.
    """
    from stepscope.diagnosis.rules import RULES

    rules = {rule.id: rule for rule in RULES}
    if name not in rules:
        raise UsageError(f"there is no rule {name!r}{suggestion(name, rules)} (stepscope rules lists them)")
    return rules[name]


def _list(arguments: argparse.Namespace) -> int:
    import polars as pl

    from stepscope.diagnosis.rules import RULES

    rows = [(rule.id, rule.title) for rule in RULES]
    frame = pl.DataFrame(rows, schema={"rule": pl.String, "title": pl.String}, orient="row")
    write_table(frame, arguments, "rules", rows=0)
    return 0


def _prepare_explain(parser: CommandParser) -> None:
    parser.add_argument("rule", metavar="RULE", help="a rule, as findings and `stepscope rules` name them")


def _explain(arguments: argparse.Namespace) -> int:
    from stepscope.diagnosis.pages import rule_page

    output.print_text(rule_page(rule_named(arguments.rule)))
    return 0


RULES: Final = Command(
    "rules",
    "A list of everything stepscope looks for.",
    add_table_options,
    _list,
    """\
examples:
  stepscope rules
  stepscope explain input-bound                              what one of them means
  stepscope diagnose trace.json --rule input-bound           only that one
""",
)
EXPLAIN: Final = Command(
    "explain",
    "What a finding means, how it is measured, when it is wrong and what to do.",
    _prepare_explain,
    _explain,
    """\
examples:
  stepscope rules                                            which ones there are
  stepscope explain input-bound
""",
)
