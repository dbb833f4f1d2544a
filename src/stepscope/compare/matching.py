"""Matching of rows in two tables: by name first, then by module and input shapes.

Rows that agree in everything are the same. The rest are matched by fewer and fewer keys: the same operator in the same
module with other shapes, then with the same shapes in another module, then with other shapes anywhere. Names on one
side only are then matched if they differ only in a number or a hash. What is left was added or removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Final, NamedTuple, TypeAlias

import polars as pl

ONLY_BEFORE: Final = "only before"
ONLY_AFTER: Final = "only after"
SAME: Final = "same"
PARTLY: Final = "partly"
LINE_MOVED: Final = "other line"


class Level(NamedTuple):
    """One way to match two rows: its name, and the columns in which they agree.

    Null agrees with null.
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
"""Keys for names that differ in a number; `family` is the name without numbers."""
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
    """Match both tables' rows side by side.

    Args:
        levels: from the strictest to the loosest; the first has all columns but the sums as keys.
        sums: columns to add up where several rows are combined.
        cost: the one of `sums` that chooses the row whose keys are kept.

    Returns:
        The key columns of the costliest combined row before (or after, for rows that exist only there); `after_<key>`
            where a key outside of the loosest level differs after; match; `before_<sum>` and `after_<sum>`, 0 for a
            missing side. Each row of both tables counts in exactly one.
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
    varying = [key for key in keys if key not in levels[-1].keys]
    return _paired(pl.concat(parts, how="diagonal"), keys, varying, sums)


def _paired(table: pl.DataFrame, keys: Sequence[str], varying: Sequence[str], sums: Sequence[str]) -> pl.DataFrame:
    """Columns of `matched`; `varying` are keys whose value after may differ."""
    is_added = pl.col("match") == ONLY_AFTER
    named = [pl.when(is_added).then(f"after_{key}").otherwise(key).alias(key) for key in keys]
    other = [
        pl.when(~is_added & pl.col(f"after_{key}").ne_missing(pl.col(key))).then(f"after_{key}").alias(f"after_{key}")
        for key in varying
    ]
    counts = [pl.col(f"{side}_{name}").fill_null(0) for side in ("before", "after") for name in sums]
    return table.select(*named, *other, "match", *counts)


def without_unknown(
    before: pl.DataFrame, after: pl.DataFrame, columns: Sequence[str]
) -> tuple[pl.DataFrame, pl.DataFrame, tuple[str, ...]]:
    """Drop columns that only one table has values for, such as recorded shapes; also returns their names."""
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
    """One row per value of `by`, with the other keys of its costliest row."""
    others = [key for key in keys if key not in by]
    ordered = table.sort([cost, *keys], descending=[True, *[False] * len(keys)], nulls_last=True)
    return ordered.group_by(by, maintain_order=True).agg(pl.col(others).first(), pl.col(sums).sum())


def _renamed(table: pl.DataFrame, keys: Sequence[str], sums: Sequence[str], side: str) -> pl.DataFrame:
    names = {name: f"{side}_{name}" for name in sums}
    return table.rename(names if side == "before" else {**names, **{key: f"after_{key}" for key in keys}})


_KEYS: Final = ("file", "line", "function", "exact_line")
_PLACE: Final = ("file", "line")
_Row = dict[str, object]
_Pairs: TypeAlias = Iterator[tuple[_Row | None, _Row | None]]
"""Matched rows of both tables; None where only one table has the line."""


def matched_lines(before: pl.DataFrame, after: pl.DataFrame, sums: Sequence[str]) -> pl.DataFrame:
    """Match both tables' source lines side by side, with the columns of `matched`.

    Args:
        before, after: columns file, line, function, exact_line, operators and `sums`; one row per line, and one row of
            nulls for costs without a line.
    """
    index = pl.DataFrame(
        [[None if row is None else row["row"] for row in pair] for pair in _line_pairs(before, after)],
        schema={"before": pl.UInt32, "after": pl.UInt32},
        orient="row",
    )
    columns = pl.col(*_KEYS, *sums)
    ours, theirs = before.select(columns.gather(index["before"])), after.select(columns.gather(index["after"]))
    table = pl.concat([_renamed(ours, _KEYS, sums, "before"), _renamed(theirs, _KEYS, sums, "after")], how="horizontal")
    match = (
        pl.when(index["before"].is_null())
        .then(pl.lit(ONLY_AFTER))
        .when(index["after"].is_null())
        .then(pl.lit(ONLY_BEFORE))
        .when(pl.col("line").eq_missing(pl.col("after_line")))
        .then(pl.lit(SAME))
        .otherwise(pl.lit(LINE_MOVED))
    )
    return _paired(table.with_columns(match=match), _KEYS, _PLACE, sums)


def _line_pairs(before: pl.DataFrame, after: pl.DataFrame) -> _Pairs:
    left, right = (_by_function(table) for table in (before, after))
    files = _moved_files([file for file, _ in left], [file for file, _ in right])
    for (file, function), ours in left.items():
        yield from _aligned(ours, right.pop((files.get(file, file), function), []))
    yield from ((None, row) for rows in right.values() for row in rows)


def _by_function(table: pl.DataFrame) -> dict[tuple[str | None, str | None], list[_Row]]:
    """Lines of each function in order, with their `row`. A function known only by its definition has one line."""
    result: dict[tuple[str | None, str | None], list[_Row]] = {}
    for row in table.with_row_index("row").sort("file", "function", "line", nulls_last=True).iter_rows(named=True):
        result.setdefault((row["file"], row["function"]), []).append(row)
    return result


def _moved_files(before: Sequence[str | None], after: Sequence[str | None]) -> dict[str | None, str | None]:
    """Map old to new paths of files that moved: same name, with a single candidate on each side."""
    removed: dict[str, set[str]] = {}
    added: dict[str, set[str]] = {}
    for files, others, by_name in ((before, after, removed), (after, before, added)):
        for file in {*files} - {*others} - {None}:
            by_name.setdefault(PurePosixPath(str(file).replace("\\", "/")).name, set()).add(str(file))
    return {
        files.pop(): added[name].pop() for name, files in removed.items() if len(files) == 1 == len(added.get(name, ()))
    }


def _aligned(before: list[_Row], after: list[_Row]) -> _Pairs:
    """Align the lines of one function; if a side knows only the function, its line pairs with the first one."""
    if not (before[0]["exact_line"] and after and after[0]["exact_line"]):
        yield from zip_longest(before, after)
        return
    ours, theirs = ([str(row["operators"] or "") for row in rows] for rows in (before, after))
    matcher = SequenceMatcher(None, ours, theirs, autojunk=False)
    shift = 0
    for kind, begin, end, after_begin, after_end in matcher.get_opcodes():
        if kind == "equal":
            yield from zip(before[begin:end], after[after_begin:after_end], strict=True)
            shift = _number(after[after_end - 1]) - _number(before[end - 1])
            continue
        by_number = {_number(row): row for row in after[after_begin:after_end]}
        yield from [(row, by_number.pop(_number(row) + shift, None)) for row in before[begin:end]]
        yield from ((None, row) for row in by_number.values())


def _number(row: _Row) -> int:
    number = row["line"]
    return number if isinstance(number, int) else 0


_LONGEST: Final = 2_000  # longer names are kept; no compiler generates them
_FEWEST_DIGITS: Final = 4  # fewest digits in a hash; words have fewer
_COUNTER: Final = re.compile(r"_\d{1,9}(?:_\d[\dcde]{0,200})?$")  # with the kinds of arguments, as in Triton 2
_HASH: Final = re.compile(r"(?<![0-9A-Za-z])[0-9a-z]{24,}(?![0-9A-Za-z])")
_ADDRESS: Final = re.compile(r"0x[0-9a-fA-F]{6,16}")
_REGION: Final = re.compile(r"^(Torch-Compiled Region: )\d{1,9}/\d{1,9}")
_TENSILE: Final = re.compile(r"^(Cijk_\w{0,200}?_MT\d{1,5}x\d{1,5}x\d{1,5}(?:_MI[\dx]{1,30})?)_\w+")
_CUTLASS_NUMBER: Final = re.compile(r"(?:(?<=_)|(?<=align))\d{1,6}(?!\w)")


def numberless(name: str) -> str:
    """Replace numbers and hashes that vary between compilations or library choices by `#`.

    Examples: `triton_poi_fused_add_mul_#`, `CompiledFxGraph #`, `Torch-Compiled Region: #`. A Tensile kernel keeps its
    computation and tile, a CUTLASS kernel everything but the alignment.
    """
    if len(name) > _LONGEST:
        return name
    name = _ADDRESS.sub("#", _HASH.sub(_without_hash, name))
    name = _TENSILE.sub(r"\1_#", _REGION.sub(r"\1#", name))
    if "_fused_" in name:
        name = _COUNTER.sub("_#", name)
    return _CUTLASS_NUMBER.sub("#", name) if "cutlass" in name else name


def _without_hash(found: re.Match[str]) -> str:
    digits = sum(character.isdigit() for character in found[0])
    return "#" if _FEWEST_DIGITS <= digits < len(found[0]) else found[0]


def with_families(before: pl.DataFrame, after: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Add a column `family`: `numberless` of a `name` that only one table has, else the name itself."""
    names = [set(table["name"].to_list()) for table in (before, after)]
    families = {name: numberless(name) for name in names[0] ^ names[1]}
    family = pl.col("name").replace(families).alias("family")
    return before.with_columns(family), after.with_columns(family)
