"""`stepscope explain`: what a finding means, how it is measured and what to do."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.output import suggestion
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.diagnosis.rule import Rule

NAME: Final = "explain"
HELP: Final = "What a finding means, how it is measured, when it is wrong and what to do."
_EXAMPLES: Final = """\
examples:
  stepscope rules                                            which ones there are
  stepscope explain input-bound
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("rule", metavar="RULE", help="a rule, as findings and `stepscope rules` name them")


def run(arguments: argparse.Namespace) -> int:
    """Print the rule's page."""
    from stepscope.diagnosis.pages import rule_page

    output.print_text(rule_page(rule_named(arguments.rule)))
    return 0


def rule_named(name: str) -> Rule:
    """The rule of that name.

    Raises:
        UsageError: there is none.
    """
    from stepscope.diagnosis.rules import RULES

    rules = {rule.id: rule for rule in RULES}
    if name not in rules:
        raise UsageError(f"there is no rule {name!r}{suggestion(name, rules)} (stepscope rules lists them)")
    return rules[name]
