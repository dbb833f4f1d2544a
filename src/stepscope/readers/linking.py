"""How rows belong together: their final order, which slice is inside which, which call gave a device which work."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.trace.nesting import innermost_at, parents

PART_ROWS: Final = 100_000
"""Rows that are worked on at a time where that bounds the memory."""
_SHORT_RUN: Final = 16
"""Rows in order of time that make it worth to merge such runs."""
_LAUNCHING: Final = ("launch", "graph_launch", "copy", "set")


def is_sorted(frame: pl.DataFrame) -> bool:
    if not frame["start_ns"].is_sorted():
        return False
    if "duration_ns" not in frame.columns:
        return True
    start, duration = frame["start_ns"].to_numpy(), frame["duration_ns"].to_numpy()
    return not bool(((start[1:] == start[:-1]) & (duration[1:] > duration[:-1])).any())


def in_order(frame: pl.DataFrame) -> pl.DataFrame:
    """The rows by start, longer slices first; column by column, so that only one stands in memory twice."""
    order = _order(frame)
    return pl.DataFrame([frame.drop_in_place(name).rechunk().gather(order) for name in frame.columns])


def _order(frame: pl.DataFrame) -> pl.Series:
    """The rows' numbers by start, then longest first, then as they stand."""
    start = frame["start_ns"].to_numpy()
    if np.count_nonzero(start[1:] < start[:-1]) > len(start) // _SHORT_RUN:
        by = [name for name in ("start_ns", "duration_ns") if name in frame.columns]
        return frame.select(pl.arg_sort_by(by, descending=[False, True][: len(by)], maintain_order=True)).to_series()
    rows = np.argsort(start, kind="stable")  # merges what is in order already, as threads one after another are
    if "duration_ns" in frame.columns:
        start, duration = start[rows], frame["duration_ns"].to_numpy()[rows]
        tied = start[1:] == start[:-1]
        wrong = np.flatnonzero(tied & (duration[1:] > duration[:-1]))
        if wrong.size:
            group = np.append(0, np.cumsum(~tied))
            has_wrong = np.zeros(int(group[-1]) + 1, np.bool_)
            has_wrong[group[wrong]] = True
            places = np.flatnonzero(has_wrong[group])
            rows[places] = rows[places][np.lexsort((-duration[places], group[places]))]
    return pl.Series(rows.astype(np.uint32))


def _arrays(frame: pl.DataFrame) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return frame["lane"].to_numpy(), frame["start_ns"].to_numpy(), frame["duration_ns"].to_numpy()


def _rows_or_null(rows: npt.NDArray[np.int64]) -> pl.Series:
    found = pl.Series(rows.astype(np.uint32))
    return pl.select(pl.when(pl.Series(rows >= 0)).then(found)).to_series()


def parent_rows(frame: pl.DataFrame) -> pl.Series:
    """Row of the slice around each; lane by lane and, where none is open, piece by piece, which bounds the memory."""
    lanes, starts, durations = _arrays(frame)
    result = np.full(len(lanes), -1, np.int64)
    for rows in _rows_of_lanes(lanes):
        for piece in _separate_pieces(rows, starts, durations):
            found = parents(lanes[piece], starts[piece], durations[piece])
            result[piece] = np.where(found >= 0, piece[found], -1)
    return _rows_or_null(result)


def _rows_of_lanes(lanes: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int64]]:
    """The rows of each lane."""
    small = len(lanes) > 0 and lanes.min() >= 0 and lanes.max() < 2**15
    order = np.argsort(lanes.astype(np.int16) if small else lanes, kind="stable")  # small numbers take a fifth
    ordered = lanes[order]
    return np.split(order, np.flatnonzero(ordered[1:] != ordered[:-1]) + 1)


def _separate_pieces(
    rows: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], durations: npt.NDArray[np.int64]
) -> list[npt.NDArray[np.int64]]:
    """One lane's rows, sorted by start, cut into about PART_ROWS at a time where everything before has ended."""
    if len(rows) <= PART_ROWS:
        return [rows]
    start = starts[rows]
    open_until = durations[rows]
    open_until += start
    np.maximum.accumulate(open_until, out=open_until)
    gaps = np.flatnonzero(start[1:] > open_until[:-1]) + 1
    places = np.searchsorted(gaps, np.arange(PART_ROWS, len(rows), PART_ROWS))
    return np.split(rows, np.unique(gaps[places[places < len(gaps)]]))


def operator_rows(launches: pl.DataFrame, operators: pl.DataFrame) -> pl.Series:
    """Row of the innermost operator around each launch, in the same pieces as `parent_rows`."""
    asked_lanes, times, _ = _arrays(launches)
    lanes, starts, durations = _arrays(operators)
    parent = operators["parent"].to_numpy()  # float with NaN where null
    result = np.full(len(times), -1, np.int64)
    for lane in np.unique(asked_lanes):
        asked = np.flatnonzero(asked_lanes == lane)
        pieces = _separate_pieces(np.flatnonzero(lanes == lane), starts, durations)
        if not len(pieces[0]):
            continue
        piece_of = np.searchsorted([starts[piece[0]] for piece in pieces], times[asked], side="right") - 1
        for number, piece in enumerate(pieces):
            mine = asked[piece_of == number]
            around = parent[piece]
            inside = np.where(np.isnan(around), -1, np.searchsorted(piece, around))
            found = innermost_at(asked_lanes[mine], times[mine], lanes[piece], starts[piece], durations[piece], inside)
            result[mine] = np.where(found >= 0, piece[found], -1)
    return _rows_or_null(result)


def launch_rows(work: pl.DataFrame, launches: pl.DataFrame, flows: pl.DataFrame) -> pl.Series:
    """Row of the call that gave each work: by correlation number, or by flow in files without such numbers."""
    if work["correlation"].null_count() < work.height:
        calls = (
            launches.lazy()
            .with_row_index("launch")
            .select("launch", "correlation", preferred=pl.col("kind").is_in(_LAUNCHING))
            .filter(pl.col("correlation").is_not_null())
            .sort("preferred", "launch", descending=[True, False])
            .unique("correlation", keep="first")
            .select("launch", "correlation")
        )
        return (
            work.lazy()
            .select("correlation")
            .join(calls, on="correlation", how="left", maintain_order="left")
            .collect()["launch"]
        )
    if not flows.width:
        return pl.Series([None] * work.height, dtype=pl.UInt32)
    keys = ["lane", "start_ns"]
    calls = launches.lazy().with_row_index("launch").select("launch", *keys)
    sources = flows.lazy().join(calls, on=keys).select("flow", "launch").unique("flow", keep="first")
    targets = (
        flows.lazy().select("flow", *keys).join(sources, on="flow").select(*keys, "launch").unique(keys, keep="first")
    )
    return work.lazy().select(keys).join(targets, on=keys, how="left", maintain_order="left").collect()["launch"]
