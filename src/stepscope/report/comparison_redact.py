"""Taking out of a comparison what tells who measured and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from stepscope.compare.comparison import Comparison, SideSummary
from stepscope.report.comparison_json import TABLES
from stepscope.report.redact import Redactor


def redacted_comparison(
    comparison: Comparison, redactor_of: Callable[[Sequence[str], Sequence[str]], Redactor] = Redactor
) -> Comparison:
    """The comparison without paths, host, user and process names.

    Args:
        redactor_of: makes a `Redactor` that knows these names and paths too.

    The traces of its sides are left as they are: draw from them what the same `Redactor` is applied to.
    """
    hosts = [side.trace.metadata.host for side in (comparison.before, comparison.after)]
    redactor = redactor_of([*filter(None, hosts)], list(_paths(comparison)))
    tables: dict[str, Any] = {name: redactor.table(getattr(comparison, name)) for name in TABLES}
    tables["settings"] = tables["settings"].filter(pl.col("name") != "machine")
    sides = [_side(side, redactor) for side in (comparison.before, comparison.after)]
    notes = tuple(map(redactor.text, comparison.notes))
    return replace(comparison, before=sides[0], after=sides[1], notes=notes, **tables)


def _side(side: SideSummary, redactor: Redactor) -> SideSummary:
    return replace(side, name=redactor.text(side.name), paths=tuple(map(redactor.path, side.paths)))


def _paths(comparison: Comparison) -> Iterator[str]:
    for side in (comparison.before, comparison.after):
        yield from (side.name, *side.paths)
    for column in ("file", "after_file"):
        yield from comparison.lines.select(pl.col(column).drop_nulls().unique()).to_series()
