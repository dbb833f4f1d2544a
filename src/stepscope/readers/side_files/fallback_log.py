"""The log of operators that fell back to the CPU on Intel Gaudi (LOG_LEVEL_PT_FALLBACK=1), among other output."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Final

from stepscope.errors import UsageError
from stepscope.readers.side_files.text import LARGEST_COUNT, MOST_NAMES, lines
from stepscope.trace.evidence import Evidence, Fallback

_CALL: Final = re.compile(r"CPU fallback (?:for )?([\w:.]{1,200})\s*:?\s*(.{0,1000})")
_TABLE: Final = "Frequency of op and op name that were executed on CPU"
_ROW: Final = re.compile(r"^\s*(\d{1,18})\s+([\w:.]{1,200})\s*$")
_LONGEST_TYPES: Final = 200


def read_fallback_log(path: str | Path) -> Evidence:
    """Which operators ran on the CPU, how often, and with inputs of which types.

    Calls are logged one by one, and counted in a table when the process ends; the table is right where both are there.

    Raises:
        UsageError: there is no such log in the file.
        TraceError: it cannot be read.
    """
    calls: Counter[str] = Counter()
    types: dict[str, str] = {}
    table: dict[str, int] = {}
    in_table = False
    for line in lines(path):
        if _TABLE in line:
            in_table = True
        elif in_table and (row := _ROW.match(line)):
            name = _qualified(row[2])
            if name in table or len(table) < MOST_NAMES:
                table[name] = max(min(int(row[1]), LARGEST_COUNT), table.get(name, 0))
        elif call := _CALL.search(line):
            name = _qualified(call[1])
            if name in calls or len(calls) < MOST_NAMES:
                calls[name] += 1
                if call[2]:
                    types.setdefault(name, call[2].strip()[:_LONGEST_TYPES])
        elif in_table and line.strip() and not line.startswith("("):
            in_table = False
    if not calls and not table:
        raise UsageError(
            f"{path} holds no log of operators on the CPU: it has lines that begin with 'CPU fallback', which Intel "
            "Gaudi's PyTorch prints where LOG_LEVEL_PT_FALLBACK=1 is set"
        )
    counts = {**calls, **table}
    found = [Fallback(name, count, types.get(name)) for name, count in counts.items()]
    return Evidence(
        sources=(str(path),),
        fallbacks=tuple(sorted(found, key=lambda each: (-(each.count or 0), each.operator))),
    )


def _qualified(name: str) -> str:
    return name if "::" in name else f"aten::{name}"
