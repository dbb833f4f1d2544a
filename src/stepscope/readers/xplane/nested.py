"""Operations that run others, such as loops: their time is that of what they run, and what is left between."""

from __future__ import annotations

import numpy as np
import polars as pl

from stepscope.trace.nesting import parents


def uncovered(work: pl.DataFrame) -> pl.DataFrame:
    """The work of one queue, in which operations that run others are replaced by the pieces when none of those ran.

    Args:
        work: rows of device_work with the column `is_container`, which the result lacks.

    Returns:
        The rows by start; the union of their times is as before, and no time is counted twice.
    """
    start, duration = work["start_ns"].to_numpy(), work["duration_ns"].to_numpy()
    end = start + duration
    parent = parents(work["lane"].to_numpy(), start, duration)
    is_container = work["is_container"].to_numpy() | np.isin(np.arange(len(parent)), parent)
    inner = np.flatnonzero(parent >= 0)
    inner = inner[np.lexsort((start[inner], parent[inner]))]
    around = parent[inner]
    first = np.append(True, around[1:] != around[:-1]) if len(inner) else np.zeros(0, np.bool_)
    reached = _reached(np.minimum(end[inner], end[around]), first)
    begin = np.where(first, start[around], np.append(0, reached[:-1]) if len(inner) else reached)
    last = np.append(first[1:], True) if len(inner) else first
    childless = np.flatnonzero(is_container & ~np.isin(np.arange(len(parent)), parent))
    owner = np.concatenate([around, around[last], childless])
    piece_start = np.concatenate([begin, reached[last], start[childless]])
    piece_end = np.concatenate([start[inner], end[around[last]], end[childless]])
    kept = piece_end > piece_start
    pieces = work[owner[kept]].with_columns(
        start_ns=pl.Series(piece_start[kept]), duration_ns=pl.Series((piece_end - piece_start)[kept])
    )
    whole = work.filter(pl.Series(~is_container))
    return pl.concat([whole, pieces]).sort("start_ns", maintain_order=True).drop("is_container")


def _reached(ends: np.ndarray[tuple[int], np.dtype[np.int64]], first: np.ndarray[tuple[int], np.dtype[np.bool_]]):  # type: ignore[no-untyped-def]
    """Up to where each run of rows has come, the largest end so far within the run."""
    result = ends.copy()
    bounds = np.append(np.flatnonzero(first), len(ends))
    for begin, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        np.maximum.accumulate(ends[begin:stop], out=result[begin:stop])
    return result
