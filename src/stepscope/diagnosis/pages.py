"""The rules' pages as Markdown: the contents of docs/rules and the output of `stepscope explain`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from stepscope.diagnosis.rule import Rule, Threshold

SECTIONS: Final = (
    "What it finds",
    "Why it costs time",
    "How it is measured",
    "Known false positives",
    "What to do",
    "Reference",
)
"""The headings of every rule's docstring, in order."""


def rule_page(rule: Rule) -> str:
    """The page of one rule: title, identifier, the sections of its docstring, and its thresholds."""
    sections = re.sub("^# ", "## ", rule.page, flags=re.MULTILINE)
    parts = [f"# {rule.title}", f"Rule `{rule.id}`", sections, *_thresholds(rule)]
    return "\n\n".join(part for part in parts if part) + "\n"


def rule_index(rules: Iterable[Rule]) -> str:
    """The list of the rules, in the order in which they run."""
    rows = [f"| [{rule.id}]({rule.id}.md) | {rule.title} | {_first_sentence(rule)} |" for rule in rules]
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


def _first_sentence(rule: Rule) -> str:
    found = rule.page.partition("\n\n")[0].removeprefix(f"# {SECTIONS[0]}\n")
    return " ".join(found.split())


def _thresholds(rule: Rule) -> Iterator[str]:
    if not rule.thresholds:
        return
    rows = [
        f"| `{rule.id}.{name}` | {_amount(threshold)} | {threshold.meant()} |"
        for name, threshold in rule.thresholds.items()
    ]
    yield "## Thresholds"
    yield "\n".join(["| threshold | default | meaning |", "|---|---|---|", *rows])
    name, threshold = next(iter(rule.thresholds.items()))
    yield "Set one when diagnosing:"
    yield f"    stepscope diagnose TRACE --set {rule.id}.{name}={threshold.value:g}"


def _amount(threshold: Threshold) -> str:
    if threshold.unit == "share":
        return f"{threshold.value:g} (a share: {threshold.value:.0%})"
    return f"{threshold.value:g}" if threshold.unit == "count" else f"{threshold.value:g} {threshold.unit}"
