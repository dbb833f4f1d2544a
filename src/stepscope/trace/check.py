"""The promises a trace's tables make, checked."""

from __future__ import annotations

import polars as pl

from stepscope.errors import InconsistentTraceError
from stepscope.trace.model import Trace
from stepscope.trace.tables import REFERENCES, SCHEMAS, SLICE_TABLES, VOCABULARY


def check(trace: Trace) -> None:
    """Raise `InconsistentTraceError`, naming the table, at the first broken promise.

    Promised are: the columns and types of the schema; words of the vocabulary; lanes that exist; tables sorted by
    start; no negative time; row references that resolve; and a parent on the same lane that is open when its child
    starts. That device work starts after its launch was called is not promised: clocks of host and device may differ.
    """
    for name, schema in SCHEMAS.items():
        frame = trace.table(name)
        if dict(frame.schema) != {column: dtype() for column, dtype in schema.items()}:
            raise InconsistentTraceError(f"table {name} has other columns than its schema: {dict(frame.schema)}")
        _check_times(name, frame)
        _check_lanes(name, frame, trace)
    for (name, column), words in VOCABULARY.items():
        foreign = trace.table(name).filter(~pl.col(column).is_in(words) | pl.col(column).is_null())
        _fail_if(foreign.height > 0, name, f"{column} holds words outside its vocabulary", foreign)
    for name, column, target in REFERENCES:
        beyond = trace.table(name).filter(pl.col(column) >= trace.table(target).height)
        _fail_if(beyond.height > 0, name, f"{column} points past the end of {target}", beyond)
    for name in ("operators", "frames"):
        _check_nesting(name, trace.table(name))


def _fail_if(broken: bool, table: str, what: str, rows: pl.DataFrame) -> None:
    if broken:
        raise InconsistentTraceError(f"table {table}: {what}, for example {rows.row(0, named=True)}")


def _check_times(name: str, frame: pl.DataFrame) -> None:
    if "start_ns" not in frame.columns or frame.is_empty():
        return
    if not frame["start_ns"].is_sorted():
        raise InconsistentTraceError(f"table {name} is not sorted by start_ns")
    missing = frame.filter(pl.col("start_ns").is_null() | (pl.col("start_ns") < 0))
    _fail_if(missing.height > 0, name, "start_ns is missing or negative", missing)
    if name in SLICE_TABLES:
        negative = frame.filter(pl.col("duration_ns").is_null() | (pl.col("duration_ns") < 0))
        _fail_if(negative.height > 0, name, "duration_ns is missing or negative", negative)


def _check_lanes(name: str, frame: pl.DataFrame, trace: Trace) -> None:
    if "lane" not in frame.columns:
        return
    if name == "lanes":
        if frame["lane"].to_list() != list(range(frame.height)):
            raise InconsistentTraceError("table lanes is not numbered by row")
        return
    lost = frame.filter(pl.col("lane").is_null() | (pl.col("lane") < 0) | (pl.col("lane") >= trace.lanes.height))
    _fail_if(lost.height > 0, name, "lane is missing or does not exist", lost)


def _check_nesting(name: str, frame: pl.DataFrame) -> None:
    children = frame.filter(pl.col("parent").is_not_null())
    around = frame[children["parent"]]
    pairs = pl.DataFrame(
        {
            "start_ns": children["start_ns"],
            "parent": children["parent"],
            "same_lane": children["lane"] == around["lane"],
            "begins_after": around["start_ns"] <= children["start_ns"],
            "inside": around["start_ns"] + around["duration_ns"] >= children["start_ns"],
        }
    )
    broken = pairs.filter(~(pl.col("same_lane") & pl.col("begins_after") & pl.col("inside")))
    _fail_if(broken.height > 0, name, "a parent is not open on its child's lane when the child starts", broken)
