"""Shared by rules about memory: sizes in words, and the lines that allocated."""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.diagnosis.finding import Location

_SMALLEST_SHARE: Final = 0.02


_SIZES: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


_TIMES: Final = ((86_400 * 10**9, "days"), (3_600 * 10**9, "hours"), (60 * 10**9, "minutes"), (10**9, "seconds"))


def size_in_words(bytes: float) -> str:
    """An amount of memory such as "1.5 GiB"."""
    unit, word = next((each for each in _SIZES if abs(bytes) >= each[0]), (1, "bytes"))
    return f"{bytes / unit:,.1f} {word}" if unit > 1 else f"{bytes:,.0f} bytes"


def time_in_words(ns: float) -> str:
    """A long time such as "3.2 hours"."""
    unit, word = next((each for each in _TIMES if ns >= each[0]), _TIMES[-1])
    return f"{ns / unit:,.1f} {word}"


def memory_locations(rows: pl.DataFrame, top: int = 3) -> tuple[Location, ...]:
    """The user's lines that allocated most of these bytes.

    Args:
        rows: columns file, line, function, exact_line and bytes; null where the place is unknown.
    """
    total = max(int(rows["bytes"].sum()), 1)
    lines = (
        rows.drop_nulls(["file", "line"])
        .group_by("file", "line", "function")
        .agg(pl.col("bytes").sum(), pl.col("exact_line").any())
        .filter(pl.col("bytes") >= _SMALLEST_SHARE * total)
        .sort(["bytes", "file", "line"], descending=[True, False, False])
        .head(top)
    )
    return tuple(
        Location(file, line, function or "", min(size / total, 1.0), bool(exact))
        for file, line, function, size, exact in lines.iter_rows()
    )
