"""Which row of one table is which of another's: by name first, then by module and input shapes.

Rows that agree in everything are the same. Of those that are left, rows that agree in less are taken together, step by
step: the same operator in the same module with other shapes, the same operator with the same shapes in another module,
and the same operator elsewhere with other shapes. Of names that are on one side only, those are then taken together
that differ in nothing but a number or a hash. What is then left was added or removed.
"""

from __future__ import annotations

from collections.abc import Sequence
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
