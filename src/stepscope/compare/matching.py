"""Matching of rows in two tables: by name first, then by module and input shapes.

Rows that agree in everything are the same. The rest are matched by fewer and fewer keys: the same operator in the same
module with other shapes, then with the same shapes in another module, then with other shapes anywhere. Names on one
side only are then matched if they differ only in a number or a hash. What is left was added or removed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Final, NamedTuple, TypeAlias

import polars as pl

from stepscope.analysis.operators import arithmetic, kernel_class
from stepscope.analysis.work import base_name

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


# Kernels that took the place of others

CHANGE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    # "fused", "unfused", "other algorithm", "other library", "other number type", "other kernel", "fewer kernels" or
    # "more kernels"
    "change": pl.String,
    "operator": pl.String,  # whose kernels changed; operators that were fused, or are no longer, separated by ", "
    "how": pl.String,  # such as "Winograd -> implicit GEMM"; empty for fusions
    "before_kernel": pl.String,  # the costliest on that side
    "after_kernel": pl.String,
    "before_ns": pl.Float64,  # per step, and so are the next three
    "after_ns": pl.Float64,
    "before_calls": pl.Float64,
    "after_calls": pl.Float64,
    "difference_ns": pl.Float64,
}
_PARTS: Final = {
    r"attention": ("bmm", "baddbmm", "matmul", "_softmax", "softmax", "_safe_softmax"),
    r"(?:layer|rms)_norm": ("mean", "pow", "rsqrt", "var", "var_mean", "std", "sqrt"),
    r"^_fused_(?:adam|sgd|adagrad)": ("addcmul", "addcdiv", "lerp", "_foreach_addcmul", "_foreach_addcdiv",
                                      "_foreach_lerp", "_foreach_mul", "_foreach_add", "_foreach_sqrt",
                                      "_foreach_div"),
    r"^_foreach_": ("addcmul", "addcdiv", "lerp"),
    r"cross_entropy": ("_log_softmax", "nll_loss_forward", "nll_loss"),
    r"^_addmm_activation$": ("addmm", "gelu", "relu"),
    r"convolution_(?:add_)?relu$": ("cudnn_convolution", "convolution", "relu", "clamp_min"),
}  # fmt: skip
"""Operators that do the work of several others: pattern of the base name -> base names of the others."""
_COMPILED: Final = re.compile(r"(?:^|_)fused_(?P<body>\w+?)(?:_\d+)?$")


@dataclass(frozen=True, slots=True)
class _Kernels:
    """Kernels of one operator on one side: names by cost, and their time and calls per step."""

    names: tuple[str, ...]
    ns: float
    calls: float

    @classmethod
    def of(cls, rows: pl.DataFrame) -> _Kernels:
        named = rows.group_by("name").agg(pl.col("ns", "calls").sum()).sort(["ns", "name"], descending=[True, False])
        return cls(tuple(named["name"]), float(named["ns"].sum()), float(named["calls"].sum()))


def kernel_changes(before: pl.DataFrame, after: pl.DataFrame) -> pl.DataFrame:
    """Kernels that took the place of others: fused, no longer fused, or others for the same operator.

    Args:
        before, after: columns name, kind, operator, module, input_shapes, ns and calls per step.

    Returns:
        Columns as in CHANGE_SCHEMA, the largest time first. A kernel is in at most one row.
    """
    launched = (pl.col("kind") == "compute") & pl.col("operator").is_not_null()
    both = [table.filter(launched) for table in (before, after)]
    sides, rows = both, list[dict[str, object]]()
    for keys in (("operator", "module", "input_shapes"), ("operator", "input_shapes"), ("operator",)):
        found, sides = _replaced(sides[0], sides[1], keys)
        rows += found
    told = {str(row["operator"]) for row in rows}
    ours, theirs = _surplus(both[0], both[1], told), _surplus(both[1], both[0], told)
    rows += _fused(ours, theirs, after, "fused")
    rows += _fused(theirs, ours, before, "unfused")
    table = pl.DataFrame(rows, dict(CHANGE_SCHEMA)).sort("before_ns", "after_ns", descending=True)
    sums = pl.col("before_ns", "after_ns", "before_calls", "after_calls", "difference_ns").sum()
    kernels = pl.col("before_kernel", "after_kernel").first()
    table = (
        table.group_by("change", "operator", "how", maintain_order=True).agg(kernels, sums).select(list(CHANGE_SCHEMA))
    )
    return table.sort([pl.max_horizontal("before_ns", "after_ns"), "operator"], descending=[True, False])


def _replaced(
    before: pl.DataFrame, after: pl.DataFrame, keys: Sequence[str]
) -> tuple[list[dict[str, object]], list[pl.DataFrame]]:
    """Operators that agree in these keys: rows for those with other kernels, and what is on one side only."""
    on = list(keys)
    both = before.select(on).unique().join(after.select(on).unique(), on=on, how="semi", nulls_equal=True)
    ours, theirs = (dict(_by(table, both, on)) for table in (before, after))
    found = [row for key in ours for row in _changed(str(key[0]), ours[key], theirs[key])]
    return found, [table.join(both, on=on, how="anti", nulls_equal=True) for table in (before, after)]


def _by(table: pl.DataFrame, wanted: pl.DataFrame, on: list[str]) -> Iterator[tuple[tuple[object, ...], pl.DataFrame]]:
    yield from table.join(wanted, on=on, how="semi", nulls_equal=True).group_by(on, maintain_order=True)


def _changed(operator: str, before: pl.DataFrame, after: pl.DataFrame) -> Iterator[dict[str, object]]:
    families = [{numberless(name) for name in table["name"]} for table in (before, after)]
    family = pl.col("name").map_elements(numberless, pl.String)
    gone, new = (table.filter(~family.is_in(families[0] & families[1])) for table in (before, after))
    if gone.is_empty() and new.is_empty():
        return
    old, young = _Kernels.of(gone), _Kernels.of(new)
    if not old.names or not young.names:
        change = "fewer kernels" if old.names else "more kernels"
        yield _row(change, base_name(operator), "", _Kernels.of(before), _Kernels.of(after))
        return
    change, how = _difference(old.names[0], young.names[0])
    yield _row(change, base_name(operator), how, old, young)


def _difference(before: str, after: str) -> tuple[str, str]:
    """What differs most between two kernels for the same work, and its values."""
    ours, theirs = kernel_class(before), kernel_class(after)
    types = arithmetic(before).precision, arithmetic(after).precision
    for change, old, new in (
        ("other algorithm", ours.algorithm, theirs.algorithm),
        ("other number type", types[0], types[1]),
        ("other library", ours.library, theirs.library),
    ):
        if old and new and old != new:
            return change, f"{old} -> {new}"
    return "other kernel", ""


def _surplus(table: pl.DataFrame, other: pl.DataFrame, told: Collection[str]) -> dict[str, _Kernels]:
    """What a side calls more often than the other, by the operator's base name, without these."""
    ours, theirs = (
        {base_name(str(name)): _Kernels.of(rows) for (name,), rows in side.group_by("operator", maintain_order=True)}
        for side in (table, other)
    )
    nothing = _Kernels((), 0.0, 0.0)
    return {
        name: _Kernels(mine.names, max(mine.ns - both.ns, 0.0), mine.calls - both.calls)
        for name, mine in ours.items()
        for both in (theirs.get(name, nothing),)
        if name not in told and mine.calls > both.calls
    }


def _fused(
    parts: dict[str, _Kernels], wholes: dict[str, _Kernels], kernels: pl.DataFrame, change: str
) -> Iterator[dict[str, object]]:
    """Operators that one side calls more often, and operators or kernels of the other that do them together.

    Args:
        kernels: all kernels of the side with the wholes, also those that no operator launched.
    """
    compiled = kernels.filter(pl.col("name").str.contains(_COMPILED.pattern.replace("?P<body>", "")))
    wholes = wholes | {str(name): _Kernels.of(rows) for (name,), rows in compiled.group_by("name")}
    for name, whole in sorted(wholes.items(), key=lambda each: (-each[1].ns, each[0])):
        mine = sorted(part for part in parts if _is_part(part, name))
        calls = sum(parts[part].calls for part in mine)
        if len(mine) > 1 and calls > whole.calls:
            found = [parts.pop(part) for part in mine]
            names = max(found, key=lambda each: each.ns).names
            joined = _Kernels(names, sum(each.ns for each in found), calls)
            pair = (joined, whole) if change == "fused" else (whole, joined)
            yield _row(change, ", ".join(mine), "", *pair)


def _is_part(part: str, whole: str) -> bool:
    compiled = _COMPILED.search(whole)
    if compiled:
        return f"_{part.strip('_')}_" in f"_{compiled['body']}_"
    base = base_name(whole)
    return any(re.search(pattern, base) and part in parts and part != base for pattern, parts in _PARTS.items())


def _row(change: str, operator: str, how: str, before: _Kernels, after: _Kernels) -> dict[str, object]:
    return {
        "change": change,
        "operator": operator,
        "how": how,
        "before_kernel": before.names[0] if before.names else "",
        "after_kernel": after.names[0] if after.names else "",
        "before_ns": before.ns,
        "after_ns": after.ns,
        "before_calls": before.calls,
        "after_calls": after.calls,
        "difference_ns": after.ns - before.ns,
    }
