"""Build JSON text from columns without a Python object per row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import polars as pl

PART_ROWS: Final = 100_000


def parts(rows: pl.LazyFrame, height: int) -> Iterator[pl.DataFrame]:
    """Yield the rows in batches of about PART_ROWS, so that memory stays bounded."""
    for first in range(0, height, PART_ROWS):
        yield rows.slice(first, PART_ROWS).collect()


def by_value(column: pl.Series, function: Callable[[Any], Any], dtype: type[pl.DataType]) -> pl.Series:
    """Map values with `function`, called once for each distinct value; null stays null."""
    different = column.unique().drop_nulls()
    made = pl.Series([function(value) for value in different], dtype=dtype)
    if different.is_empty():
        return pl.Series([None] * len(column), dtype=dtype)
    found: pl.Series = column.replace_strict(different, made, default=None, return_dtype=dtype)
    return found


def quoted(column: pl.Series) -> pl.Series:
    """Text as JSON strings; null stays null."""
    return by_value(column, json.dumps, pl.String)


def identifiers(column: pl.Series) -> pl.Series:
    """Text as JSON numbers if it is a canonical integer, else as strings, which is how profilers write pid and tid."""
    return by_value(column, lambda text: json.dumps(identifier(text)), pl.String)


def identifier(text: str) -> int | str:
    """The integer that a text spells in canonical form; else the text."""
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 19 and str(int(text)) == text else text


def numbers(column: pl.Series) -> pl.Series:
    """Numbers as JSON; null for null, NaN and infinities."""
    if column.dtype.is_integer():
        text: pl.Series = column.cast(pl.String)
        return text
    return by_value(column, lambda value: repr(value) if abs(value) < 1e300 else None, pl.String)


def microseconds(ns: pl.Expr) -> pl.Expr:
    """Nanoseconds as microseconds with three decimals, without floating point."""
    return pl.concat_str(ns // 1000, pl.lit("."), (ns % 1000).cast(pl.String).str.zfill(3))


def members(columns: Mapping[str, pl.Series]) -> pl.Series:
    """One JSON object per row from columns of JSON text; null members are left out."""
    if not columns:
        raise ValueError("an object of no columns has no length")
    frame = pl.DataFrame([column.alias(f"{number}") for number, column in enumerate(columns.values())])
    pairs = [
        pl.when(pl.col(f"{number}").is_not_null()).then(
            pl.concat_str(pl.lit(f"{json.dumps(name)}: "), pl.col(f"{number}"))
        )
        for number, name in enumerate(columns)
    ]
    listed = pl.concat_str(pairs, separator=", ", ignore_nulls=True)
    found: pl.Series = frame.select(object=pl.concat_str(pl.lit("{"), listed, pl.lit("}")))["object"]
    return found


def lines(rows: pl.DataFrame, *pieces: str | pl.Expr) -> bytes:
    """One line per row, joined from literal text and columns without nulls."""
    line = pl.concat_str([pl.lit(piece) if isinstance(piece, str) else piece for piece in pieces])
    return "".join(rows.select(line.alias("line"))["line"]).encode()
