"""The rules' pages in the user's guide, as Markdown: what stands in docs/rules and what `stepscope explain` prints."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Final

from stepscope.diagnosis.finding import Threshold
from stepscope.diagnosis.rules import RULES

SECTIONS: Final = (
    "What it finds",
    "Why it costs time",
    "How it is measured",
    "Known false positives",
    "What to do",
    "Reference",
)
"""The headings of every rule's docstring, in order."""


def rule_page(rule: ModuleType) -> str:
    """The page of one rule: its title and identifier, the sections of its docstring, and its thresholds."""
    sections = re.sub("^# ", "## ", inspect.cleandoc(rule.__doc__ or ""), flags=re.MULTILINE)
    parts = [f"# {rule.TITLE}", f"Rule `{rule.ID}`", sections, *_thresholds(rule.ID, rule.THRESHOLDS)]
    return "\n\n".join(part for part in parts if part) + "\n"


def rule_index() -> str:
    """The list of all rules, in the order in which they are asked."""
    rows = [f"| [{rule.ID}]({rule.ID}.md) | {rule.TITLE} | {_first_sentence(rule)} |" for rule in RULES]
    return "\n".join(
        [
            "# The rules",
            "",
            "What stepscope looks for. These pages are generated from the rules by `scripts/generate_docs`;",
            "`stepscope explain RULE` prints them.",
            "",
            "| rule | title | what it finds |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def _first_sentence(rule: ModuleType) -> str:
    found = inspect.cleandoc(rule.__doc__ or "").partition("\n\n")[0].removeprefix(f"# {SECTIONS[0]}\n")
    return " ".join(found.split())


def _thresholds(identifier: str, thresholds: dict[str, Threshold]) -> Iterator[str]:
    if not thresholds:
        return
    rows = [
        f"| `{identifier}.{name}` | {_amount(threshold)} | {threshold.meaning} |"
        for name, threshold in thresholds.items()
    ]
    yield "## Thresholds"
    yield "\n".join(["| threshold | default | meaning |", "|---|---|---|", *rows])
    name, threshold = next(iter(thresholds.items()))
    yield "Set one when diagnosing:"
    yield f"    stepscope diagnose TRACE --set {identifier}.{name}={threshold.value:g}"


def _amount(threshold: Threshold) -> str:
    if threshold.unit == "share":
        return f"{threshold.value:g} (a share: {threshold.value:.0%})"
    return f"{threshold.value:g}" if threshold.unit == "count" else f"{threshold.value:g} {threshold.unit}"
