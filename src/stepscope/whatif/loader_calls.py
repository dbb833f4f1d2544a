"""The calls in which the program asks its data loader for a batch."""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.trace import Trace

_NEXT: Final = r"^enumerate\(DataLoader\)|DataLoader\.__next__|DataLoaderIter\.__next__"


def loader_calls(trace: Trace) -> pl.DataFrame:
    """Each call that gives a batch, by time: columns lane, start_ns, duration_ns, name; none inside another."""
    calls = trace.annotations.filter(
        (pl.col("kind") == "host") & pl.col("name").str.contains(_NEXT) & (pl.col("duration_ns") > 0)
    )
    calls = calls.select("lane", "start_ns", "duration_ns", "name").sort("lane", "start_ns")
    reached = (pl.col("start_ns") + pl.col("duration_ns")).cum_max().shift(1).over("lane")
    return calls.filter(reached.is_null() | (pl.col("start_ns") >= reached)).sort("start_ns")
