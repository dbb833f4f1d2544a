"""Counters of the hardware that another tool measured, joined to the kernels of a trace by name, size and order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import polars as pl

from stepscope.trace import Trace, Window

_KEYS: Final = ("name", "grid", "block")
_ANONYMOUS: Final = re.compile(r"\(anonymous namespace\)|<unnamed>|\(anonymous\)|\{anonymous\}")
_CAST: Final = re.compile(
    r"\((?:unsigned |signed )?(?:bool|char|short|int|long|long long|float|double|[\w:]+)\)(?=-?\d)"
)
_SUFFIX: Final = re.compile(r"(?<=\d)(?:ull|ul|u|ll|l)\b", re.IGNORECASE)
_WORDS: Final = {"true": "1", "false": "0"}


@dataclass(frozen=True)
class Joined:
    """Counters of a trace's device work.

    Attributes:
        counters: a row for each row of device_work; the counters of the launch that is its own, else null.
        measured: launches that were measured.
        matched: rows of device_work with counters.
        ambiguous: rows whose kernel was measured, but not so that one measurement is theirs.
        lost: measured launches whose kernel the trace does not have.
    """

    counters: pl.DataFrame
    measured: int
    matched: int
    ambiguous: int
    lost: int


def join_counters(trace: Trace, launches: pl.DataFrame) -> Joined:
    """Find for each kernel of the trace the measurement that is its own.

    Kernels are the same if their names without parameters are, and the sizes of their grids and blocks. Where the trace
    has as many launches of a kernel as were measured, or a whole multiple (the same step several times), they
    belong together in order. Where it has another number nothing tells which is which: they stay without counters.

    Args:
        launches: name, grid and block ("x,y,z") and counters, in order, as `readers.side_files.ncu` gives them.
    """
    names = [column for column in launches.columns if column not in _KEYS]
    measured = _keyed(launches).with_row_index("launch")
    work = _keyed(trace.device_work.select("start_ns", *_KEYS)).with_row_index("row")
    sized = measured["size"].null_count() == 0
    keys = ["kernel", "size"] if sized else ["kernel"]
    counts = measured.group_by(keys).agg(measured=pl.len())
    found = work.join(counts, on=keys, how="left", maintain_order="left", nulls_equal=True)
    place = pl.int_range(pl.len()).over(keys)
    fits = pl.len().over(keys) % pl.col("measured") == 0
    found = found.with_columns(place=place % pl.col("measured"), fits=fits)
    orders = measured.with_columns(place=pl.int_range(pl.len()).over(keys)).select(*keys, "place", *names)
    joined = found.join(
        orders.with_columns(fits=pl.lit(True)),
        on=[*keys, "place", "fits"],
        how="left",
        maintain_order="left",
        nulls_equal=True,
    )
    known = measured.join(work.select(keys).unique(), on=keys, how="semi", nulls_equal=True)
    return Joined(
        joined.select(names),
        measured.height,
        int((found["fits"] & found["measured"].is_not_null()).sum()),
        int((~found["fits"] & found["measured"].is_not_null()).sum()),
        measured.height - known.height,
    )


def _keyed(frame: pl.DataFrame) -> pl.DataFrame:
    """With the columns kernel and size, by which kernels are the same."""
    names = frame["name"].unique()
    keys = [kernel_key(name or "") for name in names]
    kernels = pl.DataFrame({"name": names, "kernel": pl.Series(keys, dtype=pl.String)})
    size = pl.concat_str(*(_sizes(column) for column in ("grid", "block")), separator=" ")
    return frame.join(kernels, on="name", how="left", maintain_order="left").with_columns(size=size)


def _sizes(column: str) -> pl.Expr:
    """ "x,y,z" of a size as any tool writes it."""
    return pl.col(column).str.extract_all(r"\d+").list.join(",")


@lru_cache(maxsize=65536)
def kernel_key(name: str) -> str:
    """A kernel's name as all tools write it: without parameters, return type, blanks and casts."""
    text = _CAST.sub("", _ANONYMOUS.sub("{}", name.strip()))
    text = _SUFFIX.sub("", _without_parameters(text))
    text = re.sub(r"\b(?:true|false)\b", lambda match: _WORDS[match[0]], text)
    return re.sub(r"\s+", "", text.removeprefix("void ")).removesuffix(".kd")


def _without_parameters(text: str) -> str:
    """Up to the parenthesis that stands outside of all angle brackets."""
    depth = 0
    for place, letter in enumerate(text):
        if letter == "<":
            depth += 1
        elif letter == ">" and text[place - 1 : place] != "-":
            depth -= 1
        elif letter == "(" and depth <= 0 and place:
            return text[:place]
    return text


def with_counters(
    table: pl.DataFrame, trace: Trace, joined: Joined, *, group_by: Sequence[str], window: Window | None = None
) -> pl.DataFrame:
    """A table of kernels with each counter's mean over the launches that have it, weighted by time; null if none."""
    work = pl.concat([trace.device_work, joined.counters], how="horizontal")
    if window is not None:
        work = work.filter(pl.col("start_ns").is_between(window.start_ns, window.end_ns, closed="left"))
    names = joined.counters.columns
    means = [
        ((pl.col(name) * pl.col("duration_ns")).sum() / pl.col("duration_ns").filter(pl.col(name).is_not_null()).sum())
        .fill_nan(None)
        .alias(name)
        for name in names
    ]
    found = work.group_by(list(group_by)).agg(means)
    return table.join(found, on=list(group_by), how="left", maintain_order="left", nulls_equal=True)
