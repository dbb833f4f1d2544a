"""Only rules whose promises were measured and kept may be sure of them.

The measured promises are the pairs of docs/accuracy.md, as `benchmarks/whatif_accuracy.py --markdown` printed them.
"""

from __future__ import annotations

import ast
import inspect
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Final

from stepscope.diagnosis.rule import Rule
from stepscope.diagnosis.rules import RULES

ACCURACY: Final = Path(__file__).parents[3] / "docs" / "accuracy.md"
FEWEST, MEDIAN, WORST = 2, 0.10, 0.30
_PAIR: Final = re.compile(r"^\| [^|]+ \| `([\w-]+)` \| [^|]+ \| [^|]+ \| (\d+)% \|")


def errors() -> dict[str, list[float]]:
    """The relative errors of measured promises, by the one rule that made them."""
    found = defaultdict(list)
    for line in ACCURACY.read_text(encoding="utf-8").splitlines():
        if pair := _PAIR.match(line):
            found[pair[1]].append(int(pair[2]) / 100)
    return found


def is_sure(rule: Rule) -> bool:
    """Whether the rule's module makes a finding that may have high confidence, other than a note or a failed run."""
    tree = ast.parse(inspect.getsource(sys.modules[rule.check.__module__]))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Found"]
    given = [{word.arg: word.value for word in call.keywords} for call in calls]
    return any("'high'" in ast.unparse(words["confidence"]) for words in given if "severity" not in words)


def test_some_rules_are_sure_of_what_was_measured_and_most_are_not() -> None:
    sure = {rule.id for rule in RULES if is_sure(rule)}

    for rule in sure:
        measured = errors()[rule]
        assert len(measured) >= FEWEST, f"promises of {rule} were not measured often enough"
        assert statistics.median(measured) <= MEDIAN, rule
        assert max(measured) <= WORST, rule
    assert {"garbage-collection", "exposed-copy"} <= sure
    assert {"input-bound", "launch-bound", "thread-oversubscription"}.isdisjoint(sure)
