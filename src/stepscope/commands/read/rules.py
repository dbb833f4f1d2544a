"""`stepscope rules` and `explain`: what a diagnosis looks for, and what a finding means."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Final

from stepscope.commands.read.tables import add_table_options, write_table
from stepscope.commands.shared import output
from stepscope.commands.shared.options import Command, CommandParser, suggestion
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.diagnosis.rule import Rule

_SCALES: Final = {"%": 0.01, "ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def rule_named(name: str) -> Rule:
    """The rule with this id.

    Raises:
        UsageError: no rule has it.
    """
    from stepscope.diagnosis.rules import RULES

    rules = {rule.id: rule for rule in RULES}
    if name not in rules:
        raise UsageError(f"there is no rule {name!r}{suggestion(name, rules)} (stepscope rules lists them)")
    return rules[name]


def parsed_setting(text: str) -> tuple[str, float]:
    """Parse "rule.threshold=5%" into ("rule.threshold", value); units: %, ns, us, ms, s, KiB, MiB, GiB.

    Raises:
        UsageError: no such rule or threshold, or no number.
    """
    match = re.fullmatch(r"\s*([\w-]+)\.(\w+)\s*=\s*(-?\d{1,15}(?:\.\d{1,9})?(?:e-?\d{1,2})?)\s*([A-Za-z%]*)\s*", text)
    if match is None or (match[4] and match[4] not in _SCALES):
        raise UsageError(f"{text!r} sets no threshold: write RULE.THRESHOLD=VALUE, such as input-bound.share=10%")
    thresholds = rule_named(match[1]).thresholds
    if match[2] not in thresholds:
        guess = suggestion(match[2], thresholds) or f"; it has {', '.join(thresholds) or 'none'}"
        raise UsageError(f"the rule {match[1]} has no threshold {match[2]!r}{guess}")
    return f"{match[1]}.{match[2]}", float(match[3]) * _SCALES.get(match[4], 1)


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
    from stepscope.diagnosis.rule import rule_page

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
  stepscope rules                                            all of them
  stepscope explain input-bound
""",
)
