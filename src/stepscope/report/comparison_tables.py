"""The tables of a comparison as people read them, the same in the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import polars as pl

from stepscope.compare.comparison import Comparison, by_name
from stepscope.compare.matching import SAME
from stepscope.report.comparison_sentences import place_words
from stepscope.report.format import count

_TIMES: Final = ("before_ns", "after_ns", "difference_ns")
_LONGEST_TEXT: Final = 120


class ShownTable(NamedTuple):
    """A table, cut to its largest differences.

    Attributes:
        title: what stands above it.
        frame: its rows.
        total: how many there are uncut.
        things: what its rows are called.
    """

    title: str
    frame: pl.DataFrame
    total: int
    things: str


def cause_table(comparison: Comparison) -> pl.DataFrame:
    """Every cause and, last, the whole step: columns cause, before_ns, after_ns, difference_ns, share."""
    rows = comparison.causes.select(pl.format("{}: {}", "kind", "name").alias("cause"), *_TIMES, "share")
    before, after = comparison.before.step_ns, comparison.after.step_ns
    whole = ("the step", before, after, comparison.difference_ns, comparison.difference_ns / max(before, 1.0))
    return pl.concat([rows, pl.DataFrame([whole], schema=rows.schema, orient="row")])


def shown_tables(comparison: Comparison, top: int) -> Iterator[ShownTable]:
    """The tables of what differs, each cut to `top` rows (0 for all); those that hold nothing are left out."""
    tables = (
        ("Lines of your code", _lines(comparison), "lines"),
        ("Operators", _named(comparison.operators), "operators"),
        ("Kernels", _named(comparison.kernels), "kernels"),
        ("Modules", _modules(comparison), "modules"),
        ("Communication", _communication(comparison), "kinds of communication"),
        ("Memory at the peak", _memory(comparison), "categories"),
    )
    for title, frame, things in tables:
        differing = frame.filter(pl.col(frame.columns[3]) != 0)
        if things == "categories":
            differing = frame if differing.height else frame.clear()
        if differing.height:
            cut = differing.head(top) if top and things != "categories" else differing
            yield ShownTable(title, cut, differing.height, things)


def settings_table(comparison: Comparison) -> pl.DataFrame:
    """The settings that differ: columns setting, before, after; "-" where a side has none."""
    return comparison.settings.select(
        pl.col("name").alias("setting"), pl.col("before").fill_null("-"), pl.col("after").fill_null("-")
    )


def _named(table: pl.DataFrame) -> pl.DataFrame:
    shown = by_name(table)
    where = pl.concat_str(
        pl.col("module").fill_null(""), pl.col("input_shapes").fill_null("").str.slice(0, _LONGEST_TEXT), separator=" "
    ).str.strip_chars()
    columns = [pl.col("name"), *map(pl.col, _TIMES), _calls(shown), _match(), where.alias("most of it in")]
    return _without_empty(shown.select(columns))


def _lines(comparison: Comparison) -> pl.DataFrame:
    table = comparison.lines
    names = [
        "(no line of yours)" if row["file"] is None else place_words(row) + ("" if row["exact_line"] else "*")
        for row in table.rows(named=True)
    ]
    return _without_empty(table.select(pl.Series("line", names, pl.String), *_TIMES, _match()))


def _modules(comparison: Comparison) -> pl.DataFrame:
    table = comparison.modules
    if table["module"].is_not_null().sum() == 0:
        table = table.clear()
    name = pl.col("module").fill_null("(outside of modules)")
    return _without_empty(table.select(name, *_TIMES, _match()))


def _communication(comparison: Comparison) -> pl.DataFrame:
    table = comparison.communication
    return _without_empty(table.select("kind", *_TIMES, _calls(table), "ranks", "bytes", "after_bytes", _match()))


def _memory(comparison: Comparison) -> pl.DataFrame:
    table = comparison.memory
    columns = ["category", "before_bytes", "after_bytes", "difference_bytes"]
    if table.is_empty():
        return table.select(columns)
    sums = [pl.col(name).sum() for name in columns[1:]]
    table = table.with_columns(pl.col("category").replace({"before": "from before the recording"}))
    return pl.concat([table.select(columns), table.select(pl.lit("all").alias("category"), *sums)])


def _calls(table: pl.DataFrame) -> pl.Series:
    """Calls a step, as "64 -> 1" where they differ."""
    rows = table.select("before_calls", "after_calls").iter_rows()
    texts = [count(before) if before == after else f"{count(before)} -> {count(after)}" for before, after in rows]
    return pl.Series("calls", texts, pl.String)


def _match() -> pl.Expr:
    return pl.when(pl.col("match") != SAME).then(pl.col("match")).otherwise(pl.lit("")).alias("matched as")


def _without_empty(table: pl.DataFrame) -> pl.DataFrame:
    """Without columns of text or bytes in which nothing stands."""
    empty = [
        name
        for name in table.columns[4:]
        if table[name].null_count() == table.height or (table[name].dtype == pl.String and (table[name] == "").all())
    ]
    return table.drop(empty)
