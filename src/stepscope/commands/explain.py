"""`stepscope explain`: what a finding means, how it is measured and what to do."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Final

from stepscope.commands import _output
from stepscope.commands._parser import suggestion
from stepscope.errors import UsageError
from stepscope.report.format import count, duration, share, size

NAME: Final = "explain"
HELP: Final = "What a finding means, how it is measured, when it is wrong and what to do."
_EXAMPLES: Final = """\
examples:
  stepscope rules                                            which ones there are
  stepscope explain input-bound
"""
_UNITS: Final = {"ns": duration, "bytes": size, "share": share}


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("rule", metavar="RULE", help="a rule, as findings and `stepscope rules` name them")


def run(arguments: argparse.Namespace) -> int:
    """Print the rule's page."""
    rule = rule_named(arguments.rule)
    _output.print_text("\n".join(_page(rule)) + "\n")
    return 0


def rule_named(name: str) -> ModuleType:
    """The rule of that name.

    Raises:
        UsageError: there is none.
    """
    from stepscope.diagnosis.rules import RULES

    rules: dict[str, ModuleType] = {rule.ID: rule for rule in RULES}
    if name not in rules:
        raise UsageError(f"there is no rule {name!r}{suggestion(name, rules)} (stepscope rules lists them)")
    return rules[name]


def _page(rule: ModuleType) -> Iterator[str]:
    yield f"{rule.ID}: {rule.TITLE}"
    yield ""
    yield inspect.cleandoc(rule.__doc__ or "")
    if rule.THRESHOLDS:
        yield ""
        yield "Thresholds"
        for name, threshold in rule.THRESHOLDS.items():
            value = _UNITS.get(threshold.unit, count)(threshold.value)
            yield f"  {rule.ID}.{name} = {value}"
            yield f"      {threshold.meaning}"
        yield ""
        yield f"Set one with: stepscope diagnose TRACE --set {rule.ID}.{next(iter(rule.THRESHOLDS))}=VALUE"
