"""Columns that refer to rows, as arrays: -1 represents a table's null."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.trace.nesting import Rows, inherit
from stepscope.trace.window import Window

_T = TypeVar("_T")


def row_numbers(column: pl.Series) -> Rows:
    """Convert a column of row numbers to an array, -1 for null; shape (n,)."""
    numbers: Rows = column.cast(pl.Int64).fill_null(-1).to_numpy()
    return numbers


def nullable(rows: Rows) -> pl.Series:
    """Convert rows to a column of UInt32, null for -1."""
    numbers = pl.Series(rows, dtype=pl.Int64)
    return pl.select(pl.when(numbers >= 0).then(numbers).cast(pl.UInt32)).to_series()


def at(values: npt.NDArray[np.signedinteger[Any]], index: Rows) -> Rows:
    """Values at these positions, -1 for position -1."""
    if not len(values):
        return np.full(len(index), -1, np.int64)
    return np.where(index >= 0, values[np.maximum(index, 0)], -1).astype(np.int64)


def gathered(table: pl.DataFrame, rows: Rows) -> pl.DataFrame:
    """Rows of a table, null for -1."""
    known = nullable(rows)
    return pl.DataFrame([table[name].gather(known) for name in table.columns])


def inside(rows: Rows, parent: Rows) -> npt.NDArray[np.bool_]:
    """Whether each row is one of these or nested in one; shape of `parent`."""
    own = np.full(len(parent), -1, np.int64)
    own[rows] = 1
    return inherit(own, parent) > 0


def outermost(rows: Rows, parent: Rows) -> Rows:
    """Rows that are not nested in another one of them."""
    return rows[at(inside(rows, parent).astype(np.int8), parent[rows]) <= 0]


def by_value(table: pl.DataFrame | pl.Series, number_of: Callable[..., int]) -> Rows:
    """Number each row, calling `number_of` once per distinct value in order of appearance; -1 for null."""
    table = table if isinstance(table, pl.DataFrame) else table.to_frame()
    different = table.unique(maintain_order=True)
    numbers = [-1 if set(row) == {None} else number_of(*row) for row in different.iter_rows()]
    known = different.with_columns(pl.Series("number", numbers, dtype=pl.Int64))
    return row_numbers(
        table.join(known, on=table.columns, how="left", nulls_equal=True, maintain_order="left")["number"]
    )


def conformed(table: pl.DataFrame, schema: Mapping[str, type[pl.DataType]]) -> pl.DataFrame:
    """Select and cast a table's columns to the schema, in its order."""
    return table.select(pl.col(name).cast(dtype) for name, dtype in schema.items())


def beginning_in(table: pl.DataFrame, window: Window | None) -> pl.DataFrame:
    """Rows that start in the window; all rows without a window."""
    if window is None:
        return table
    return table.filter(pl.col("start_ns").is_between(window.start_ns, window.end_ns, closed="left"))


class Numbering(Generic[_T]):
    """Assigns consecutive numbers from 0 to distinct things."""

    def __init__(self) -> None:
        self._numbers: dict[_T, int] = {}

    def __getitem__(self, thing: _T) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))

    @property
    def words(self) -> tuple[_T, ...]:
        """The things in order of their numbers."""
        return tuple(self._numbers)
