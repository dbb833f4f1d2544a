"""The metrics file of Intel Gaudi's PyTorch bridge (PT_HPU_METRICS_FILE): a JSON array of cumulative counts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from stepscope.errors import UsageError
from stepscope.readers.side_files.text import LARGEST_COUNT, MOST_NAMES, lines
from stepscope.trace.evidence import WARM_UP_STEPS, Evidence, Fallback, Tally

_MOST_CHARACTERS: Final = 64 * 2**20
"""Of the file; a program that writes its counts with every step for days comes to as much."""
_LONGEST_NAME: Final = 200
_DECODER: Final = json.JSONDecoder()
_BETWEEN: Final = re.compile(r"[\s,\]]*")
_RANK: Final = re.compile(r"-rank(\d{1,6})(?=\.|$)")


class _Counts:
    """Cumulative numbers; where a program resets them, what they had come to is added."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._before: dict[str, int] = {}

    def take(self, key: str, value: Any) -> int | None:
        """The total up to here of the number behind `key`, None if that is no number."""
        number = _number(value)
        if number is None or (key not in self._last and len(self._last) >= MOST_NAMES):
            return self.total(key)
        if number < self._last.get(key, 0):
            self._before[key] = self._before.get(key, 0) + self._last[key]
        self._last[key] = number
        return self.total(key)

    def total(self, key: str) -> int | None:
        return min(self._before.get(key, 0) + self._last[key], LARGEST_COUNT) if key in self._last else None


def read_gaudi_metrics(path: str | Path) -> Evidence:
    """What the last counts in a metrics file say of the whole run.

    A run that was killed leaves the array open; what was written is read.

    Raises:
        UsageError: it is no such file.
        TraceError: it cannot be read.
    """
    counts, operators = _Counts(), _Counts()
    names: dict[str, None] = {}
    steps, at_warm_up, found = 0, None, False
    for entry in _entries(_text(path)):
        name, statistics = entry.get("metric_name"), entry.get("statistics")
        if not isinstance(name, str) or not isinstance(statistics, dict):
            continue
        found = True
        for key in ("TotalNumber", "TotalTime", "TotalHit", "TotalMiss"):
            counts.take(f"{name}.{key}", statistics.get(key))
        if name == "graph_compilation" and entry.get("triggered_by") == "mark_step":
            steps += 1
            at_warm_up = counts.total("graph_compilation.TotalNumber") if steps == WARM_UP_STEPS else at_warm_up
        fallbacks = statistics.get("FallbackOps")
        for operator, count in fallbacks.items() if isinstance(fallbacks, dict) else ():
            if len(names) < MOST_NAMES or operator in names:
                names[operator] = None
                operators.take(operator, count)
    if not found:
        raise UsageError(
            f"{path} is no metrics file of Intel Gaudi: that is a JSON array of objects with metric_name and "
            "statistics, which a program writes where PT_HPU_METRICS_FILE is set"
        )
    return _evidence(str(path), counts, operators, names, steps, at_warm_up)


def rank_in_name(path: str | Path) -> int | None:
    """The rank that a metrics file's name ends in, as in metrics-rank3.json; None without one."""
    match = _RANK.search(Path(path).name)
    return int(match[1]) if match else None


def _text(path: str | Path) -> str:
    parts, size = [], 0
    for line in lines(path):
        size += len(line) + 1
        if size > _MOST_CHARACTERS:
            raise UsageError(f"{path} is longer than {_MOST_CHARACTERS >> 20} MiB, which no metrics file is: not read")
        parts.append(line)
    return "\n".join(parts)


def _entries(text: str) -> Iterator[dict[str, Any]]:
    """The objects of the array, up to where it is damaged or ends."""
    position = text.find("[") + 1
    if position == 0 or text[: position - 1].strip("\ufeff \t\r\n"):
        return
    while True:
        position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
        if position >= len(text):
            return
        try:
            value, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            return
        if isinstance(value, dict):
            yield value


def _number(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < LARGEST_COUNT:
        return None
    return int(value)


def _evidence(
    path: str, counts: _Counts, operators: _Counts, names: dict[str, None], steps: int, at_warm_up: int | None
) -> Evidence:
    compiled = counts.total("graph_compilation.TotalNumber")
    time_us = counts.total("graph_compilation.TotalTime")
    fallbacks = [Fallback(_qualified(name), operators.total(name)) for name in names]
    return Evidence(
        sources=(path,),
        steps=steps or None,
        compilations=None
        if compiled is None
        else Tally(compiled, None if time_us is None else min(time_us * 1000, LARGEST_COUNT)),
        late_compilations=None if at_warm_up is None or compiled is None else compiled - at_warm_up,
        cached=counts.total("recipe_cache.TotalHit"),
        missed=counts.total("recipe_cache.TotalMiss"),
        fallbacks=tuple(sorted(fallbacks, key=lambda each: (-(each.count or 0), each.operator))),
    )


def _qualified(name: str) -> str:
    name = name[:_LONGEST_NAME].encode("utf-8", "replace").decode()
    return name if "::" in name else f"aten::{name}"


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
            name = _log_qualified(row[2])
            if name in table or len(table) < MOST_NAMES:
                table[name] = max(min(int(row[1]), LARGEST_COUNT), table.get(name, 0))
        elif call := _CALL.search(line):
            name = _log_qualified(call[1])
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


def _log_qualified(name: str) -> str:
    return name if "::" in name else f"aten::{name}"
