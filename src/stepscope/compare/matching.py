"""Which row of one table is which of another's: by name first, then by module and input shapes.

Rows that agree in everything are the same. Of those that are left, rows that agree in less are taken together, step by
step: the same operator in the same module with other shapes, the same operator with the same shapes in another module,
and the same operator elsewhere with other shapes. Of names that are on one side only, those are then taken together
that differ in nothing but a number or a hash. What is then left was added or removed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import PurePosixPath
from typing import Final, NamedTuple

import polars as pl

ONLY_BEFORE: Final = "only before"
ONLY_AFTER: Final = "only after"
SAME: Final = "same"
PARTLY: Final = "partly"
LINE_MOVED: Final = "other line"


class Level(NamedTuple):
    """One way in which two rows can be the same thing.

    Attributes:
        match: what it is called.
        keys: the columns in which they agree; null agrees with null.
    """

    match: str
    keys: tuple[str, ...]


_BY_NAME: Final = (
    Level(SAME, ("name", "family", "module", "input_shapes")),
    Level("other shapes", ("name", "module")),
    Level("other module", ("name", "input_shapes")),
    Level("other module and shapes", ("name",)),
)
_OTHER_NUMBER: Final = (("family", "module", "input_shapes"), ("family", "module"), ("family",))
"""Of what is then left, the keys of what has another number; `family` is the name without numbers."""
OPERATOR_LEVELS: Final = (*_BY_NAME, *(Level("same operator, other number", keys) for keys in _OTHER_NUMBER))
KERNEL_LEVELS: Final = tuple(
    Level(level.match, (*level.keys, "kind"))
    for level in (*_BY_NAME, *(Level("same kernel, other number", keys) for keys in _OTHER_NUMBER))
)
CAUSE_LEVELS: Final = (Level(SAME, ("kind", "name")),)
MODULE_LEVELS: Final = (Level(SAME, ("module",)),)
COMMUNICATION_LEVELS: Final = (Level(SAME, ("kind", "ranks", "bytes")), Level("other sizes", ("kind",)))
MEMORY_LEVELS: Final = (Level(SAME, ("category",)),)


def matched(
    before: pl.DataFrame, after: pl.DataFrame, levels: Sequence[Level], sums: Sequence[str], cost: str
) -> pl.DataFrame:
    """Both tables' rows beside each other.

    Args:
        levels: from the closest to the loosest; the first one's keys are the tables' columns that are no sums.
        sums: columns that are added up where several rows are taken together.
        cost: the one of `sums` by which the row that lends its keys is chosen.

    Returns:
        The key columns as they are before (after, where the row is only there), of the costliest row where several are
        taken together; `after_<key>` for keys that the loosest level leaves open, where it is another one after; match;
        `before_<sum>` and `after_<sum>`, 0 where there is none. Each row of both tables counts in exactly one.
    """
    keys = list(levels[0].keys)
    left, right = (_grouped(table, keys, keys, sums, cost) for table in (before, after))
    parts = []
    for level in levels:
        on = list(level.keys)
        ours, theirs = (_grouped(table, on, keys, sums, cost) for table in (left, right))
        pairs = _renamed(ours, keys, sums, "before").join(
            _renamed(theirs, keys, sums, "after"),
            left_on=on,
            right_on=[f"after_{key}" for key in on],
            how="inner",
            nulls_equal=True,
            coalesce=False,
        )
        parts.append(pairs.with_columns(match=pl.lit(level.match)))
        left, right = (table.join(pairs.select(on), on=on, how="anti", nulls_equal=True) for table in (left, right))
    parts.append(_renamed(left, keys, sums, "before").with_columns(match=pl.lit(ONLY_BEFORE)))
    parts.append(_renamed(right, keys, sums, "after").with_columns(match=pl.lit(ONLY_AFTER)))
    table = pl.concat(parts, how="diagonal")
    counts = [f"{side}_{name}" for side in ("before", "after") for name in sums]
    varying = [key for key in keys if key not in levels[-1].keys]
    is_added = pl.col("match") == ONLY_AFTER
    named = [pl.when(is_added).then(f"after_{key}").otherwise(key).alias(key) for key in keys]
    other = [
        pl.when(~is_added & pl.col(f"after_{key}").ne_missing(pl.col(key))).then(f"after_{key}").alias(f"after_{key}")
        for key in varying
    ]
    return table.select(*named, *other, "match", *(pl.col(name).fill_null(0) for name in counts))


def without_unknown(
    before: pl.DataFrame, after: pl.DataFrame, columns: Sequence[str]
) -> tuple[pl.DataFrame, pl.DataFrame, tuple[str, ...]]:
    """The tables without what only one of them knows, such as shapes that only one recording kept; and its columns."""
    gone = []
    for column in columns:
        known = [bool(table[column].is_not_null().any()) for table in (before, after)]
        if known[0] != known[1] and before.height and after.height:
            gone.append(column)
    nothing = [pl.lit(None, before.schema[column]).alias(column) for column in gone]
    return before.with_columns(nothing), after.with_columns(nothing), tuple(gone)


def _grouped(
    table: pl.DataFrame, by: Sequence[str], keys: Sequence[str], sums: Sequence[str], cost: str
) -> pl.DataFrame:
    """One row for each value of `by`, with the other keys of its costliest row."""
    others = [key for key in keys if key not in by]
    ordered = table.sort([cost, *keys], descending=[True, *[False] * len(keys)], nulls_last=True)
    return ordered.group_by(by, maintain_order=True).agg(
        *(pl.col(key).first() for key in others), *(pl.col(name).sum() for name in sums)
    )


def _renamed(table: pl.DataFrame, keys: Sequence[str], sums: Sequence[str], side: str) -> pl.DataFrame:
    names = {name: f"{side}_{name}" for name in sums}
    return table.rename(names if side == "before" else {**names, **{key: f"after_{key}" for key in keys}})


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


_LONGEST: Final = 2_000
"""Longer names are kept as they are; none that a compiler made is."""
_FEWEST_DIGITS: Final = 4
"""Of a hash among its letters; a word has fewer."""
_COUNTER: Final = re.compile(r"_\d{1,9}(?:_\d[\dcde]{0,200})?$")  # with the kinds of arguments, as Triton 2 had them
_HASH: Final = re.compile(r"(?<![0-9A-Za-z])[0-9a-z]{24,}(?![0-9A-Za-z])")
_ADDRESS: Final = re.compile(r"0x[0-9a-fA-F]{6,16}")
_REGION: Final = re.compile(r"^(Torch-Compiled Region: )\d{1,9}/\d{1,9}")
_TENSILE: Final = re.compile(r"^(Cijk_\w{0,200}?_MT\d{1,5}x\d{1,5}x\d{1,5}(?:_MI[\dx]{1,30})?)_\w+")
_CUTLASS_NUMBER: Final = re.compile(r"(?:(?<=_)|(?<=align))\d{1,6}(?!\w)")


def numberless(name: str) -> str:
    """The name with `#` for numbers and hashes that differ from one compilation, or choice of a library, to the next.

    Such as `triton_poi_fused_add_mul_#`, `CompiledFxGraph #`, `Torch-Compiled Region: #`; of a Tensile kernel what is
    computed and its tile, of a CUTLASS kernel all but the alignment.
    """
    if len(name) > _LONGEST:
        return name
    name = _ADDRESS.sub("#", _HASH.sub(_without_hash, name))
    name = _TENSILE.sub(r"\1_#", _REGION.sub(r"\1#", name))
    if "_fused_" in name:
        name = _COUNTER.sub("_#", name)
    return _CUTLASS_NUMBER.sub("#", name) if "cutlass" in name else name


def with_families(before: pl.DataFrame, after: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The tables with a column `family`: the `numberless` of a `name` that only one of them has, else the name."""
    names = [set(table["name"].to_list()) for table in (before, after)]
    common = names[0] & names[1]
    families = pl.DataFrame(
        [(name, name if name in common else numberless(name)) for name in names[0] | names[1]],
        schema={"name": pl.String, "family": pl.String},
        orient="row",
    )
    left, right = (table.join(families, on="name", how="left", maintain_order="left") for table in (before, after))
    return left, right


def _without_hash(found: re.Match[str]) -> str:
    text = found[0]
    digits = sum(character.isdigit() for character in text)
    return "#" if digits >= _FEWEST_DIGITS and digits < len(text) else text
