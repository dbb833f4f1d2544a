"""The list of all rules, `stepscope/diagnosis/rules/__init__.py`, as it follows from the files in its folder."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import stepscope
from stepscope.diagnosis.rules import RULES

LIST: Final = Path(stepscope.__file__).parent / "diagnosis" / "rules" / "__init__.py"
_HEAD: Final = '''\
"""Every rule, in the order in which they run. Written by scripts/generate_docs; a new rule goes to the end."""
# ruff: noqa: I001
# fmt: off

from __future__ import annotations

from typing import Final

from stepscope.diagnosis.rule import Rule
from stepscope.diagnosis.rules import (
'''


def rule_list() -> str:
    """The module that lists every rule of the folder: those listed now in their order, then the new ones."""
    there = sorted(path.stem for path in LIST.parent.glob("[a-z]*.py"))
    listed = [rule.id.replace("-", "_") for rule in RULES]
    names = [name for name in listed if name in there] + [name for name in there if name not in listed]
    rules = _lines(f"{name}.RULE" for name in names)
    return f"{_HEAD}{_lines(sorted(names))}\n)\n\nRULES: Final[tuple[Rule, ...]] = (\n{rules}\n)\n"


def _lines(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(names) + ",", width=120, initial_indent="    ", subsequent_indent="    ")
