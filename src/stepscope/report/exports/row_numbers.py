"""Links, and those numbers of rows that do not follow from times and correlation numbers, for files that are read back.

A reader of our own works out parents, operators and launches as for any file; what differs is told beside the events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import polars as pl

from stepscope.readers import linking
from stepscope.readers.kineto import own
from stepscope.trace import Trace

_ENTRIES: Final = 10_000
"""Rows that one entry tells of: it is read in one piece."""


def entries(trace: Trace) -> Iterator[dict[str, Any]]:
    """Objects as `stepscope.readers.kineto.own.Rows` describes them."""
    yield from _links(trace)
    yield from _references(trace)


def _links(trace: Trace) -> Iterator[dict[str, Any]]:
    for first in range(0, trace.links.height, _ENTRIES):
        part = trace.links.slice(first, _ENTRIES)
        columns = {"kinds": part["kind"], "sources": part["source"], "targets": part["target"]}
        yield {"table": "links", **{key: column.to_list() for key, column in columns.items()}}


def _references(trace: Trace) -> Iterator[dict[str, Any]]:
    slices = ["lane", "start_ns", "duration_ns"]
    operators = trace.scan("operators").select(*slices, "parent").collect()
    parents = linking.parent_rows(operators)
    yield from _different("operators", operators["parent"], parents)
    frames = trace.scan("frames").select(*slices, "parent").collect()
    yield from _different("frames", frames["parent"], linking.parent_rows(frames))
    launches = trace.scan("launches").select(*slices, "kind", "correlation", "operator").collect()
    around = operators.with_columns(parent=parents)
    found = linking.operator_rows(launches, around) if operators.height else _nothing(launches)
    yield from _different("launches", launches["operator"], found)
    work = trace.scan("device_work").select("correlation", "launch").collect()
    by_number = linking.launch_rows(work, launches, pl.DataFrame()) if launches.height else _nothing(work)
    yield from _different("device_work", work["launch"], by_number)


def _nothing(rows: pl.DataFrame) -> pl.Series:
    return pl.Series([None] * rows.height, dtype=pl.UInt32)


def _different(table: str, told: pl.Series, follows: pl.Series) -> Iterator[dict[str, Any]]:
    rows = told.ne_missing(follows).arg_true()
    for first in range(0, len(rows), _ENTRIES):
        part = rows.slice(first, _ENTRIES)
        targets = told.gather(part).to_list()
        yield {"table": table, "column": own.REFERENCES[table], "rows": part.to_list(), "targets": targets}
