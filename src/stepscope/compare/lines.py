"""Which line of the user's code is which after an edit, when all that is known is where lines are and what they call.

Lines of one function of one file are aligned in order by the operators they call (as `diff` aligns text). Lines
between two aligned ones are the same where they stand as far behind the one before; the others were added or removed.
Files are the same where their paths are, or where only one file on each side has the name.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import PurePosixPath
from typing import Final

import polars as pl

from stepscope.compare.matching import LINE_MOVED, ONLY_AFTER, ONLY_BEFORE, SAME

_KEYS: Final = ("file", "line", "function", "exact_line")
_PLACE: Final = ("file", "line")
_Row = dict[str, object]


def matched_lines(before: pl.DataFrame, after: pl.DataFrame, sums: Sequence[str]) -> pl.DataFrame:
    """Both tables' lines beside each other, as `stepscope.compare.matching.matched` gives them.

    Args:
        before, after: columns file, line, function, exact_line, operators and `sums`; one row a line, and one with
            nulls for what has no line.
    """
    left, right = (_by_function(table) for table in (before, after))
    files = _same_files([file for file, _ in left], [file for file, _ in right])
    pairs: list[tuple[_Row | None, _Row | None]] = []
    for (file, function), ours in left.items():
        theirs = right.pop((files.get(file, file), function), [])
        pairs += _aligned(ours, theirs)
    pairs += [(None, row) for rows in right.values() for row in rows]
    return _table(pairs, before, sums)


def _by_function(table: pl.DataFrame) -> dict[tuple[str | None, str | None], list[_Row]]:
    """The lines of each function in order. A function of which only the definition is known has one line."""
    result: dict[tuple[str | None, str | None], list[_Row]] = {}
    for row in table.sort("file", "function", "line", nulls_last=True).iter_rows(named=True):
        result.setdefault((row["file"], row["function"]), []).append(row)
    return result


def _same_files(before: Sequence[str | None], after: Sequence[str | None]) -> dict[str | None, str | None]:
    """For each file before its path after, where it has another one."""
    ours, theirs = (dict.fromkeys(file for file in files if file is not None) for files in (before, after))
    by_name: dict[str, list[str]] = {}
    for file in theirs:
        if file not in ours:
            by_name.setdefault(_name(file), []).append(file)
    moved: dict[str, list[str]] = {}
    for file in ours:
        if file not in theirs:
            moved.setdefault(_name(file), []).append(file)
    return {
        files[0]: by_name[name][0] for name, files in moved.items() if len(files) == 1 == len(by_name.get(name, ()))
    }


def _name(file: str) -> str:
    return PurePosixPath(file.replace("\\", "/")).name


def _aligned(before: list[_Row], after: list[_Row]) -> list[tuple[_Row | None, _Row | None]]:
    if not (before[0]["exact_line"] and after and after[0]["exact_line"]):
        return _in_order(before, after)
    matcher = SequenceMatcher(None, [_print(row) for row in before], [_print(row) for row in after], autojunk=False)
    pairs: list[tuple[_Row | None, _Row | None]] = []
    shift = 0
    for kind, begin, end, after_begin, after_end in matcher.get_opcodes():
        ours, theirs = before[begin:end], after[after_begin:after_end]
        if kind == "equal":
            pairs += list(zip(ours, theirs, strict=True))
            shift = _number(theirs[-1]) - _number(ours[-1])
            continue
        by_number = {_number(row): row for row in theirs}
        for row in ours:
            pairs.append((row, by_number.pop(_number(row) + shift, None)))
        pairs += [(None, row) for row in by_number.values()]
    return pairs


def _in_order(before: list[_Row], after: list[_Row]) -> list[tuple[_Row | None, _Row | None]]:
    """Functions of which a line is known only on one side, or on none: as a whole, the first with the first."""
    paired: list[tuple[_Row | None, _Row | None]] = list(zip(before, after))  # noqa: B905
    paired += [(row, None) for row in before[len(after) :]]
    return paired + [(None, row) for row in after[len(before) :]]


def _print(row: _Row) -> tuple[str, ...]:
    return (str(row["operators"] or ""),)


def _number(row: _Row) -> int:
    number = row["line"]
    return number if isinstance(number, int) else 0


def _table(pairs: Sequence[tuple[_Row | None, _Row | None]], like: pl.DataFrame, sums: Sequence[str]) -> pl.DataFrame:
    rows = []
    for ours, theirs in pairs:
        known = ours or theirs or {}
        row: _Row = {key: known.get(key) for key in _KEYS}
        moved = {f"after_{key}": theirs[key] for key in _PLACE if ours and theirs and theirs[key] != ours[key]}
        row |= {**moved, "match": _match(ours, theirs)}
        row |= {f"before_{name}": (ours or {}).get(name, 0) for name in sums}
        row |= {f"after_{name}": (theirs or {}).get(name, 0) for name in sums}
        rows.append(row)
    schema = {key: like.schema[key] for key in _KEYS}
    schema |= {f"after_{key}": like.schema[key] for key in _PLACE}
    schema["match"] = pl.String()
    schema |= {f"{side}_{name}": like.schema[name] for side in ("before", "after") for name in sums}
    return pl.DataFrame(rows, schema=schema)


def _match(ours: _Row | None, theirs: _Row | None) -> str:
    if ours is None or theirs is None:
        return ONLY_AFTER if ours is None else ONLY_BEFORE
    return SAME if ours["line"] == theirs["line"] else LINE_MOVED
