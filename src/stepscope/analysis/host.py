"""What each host thread was doing at every moment, and whose doing it was.

All slices of a thread (annotations, frames, operators, launches) form one tree. At any time the innermost open slice
describes the thread; its cause is that of the innermost slice around it whose name gives one away.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.causes import CAUSES
from stepscope.analysis.naming import cause_of_name, is_user_file
from stepscope.trace import Trace
from stepscope.trace.intervals import Times
from stepscope.trace.nesting import Rows, enclosing, inherit, open_after, parents

TABLES: Final = ("annotations", "frames", "operators", "launches")
"""Where slices come from; of slices that coincide the earlier table's is outside."""

CAUSE_CODES: Final = {cause: code for code, cause in enumerate(CAUSES)}
_ANNOTATION, _FRAME, _OPERATOR, _LAUNCH = range(4)


@dataclass(frozen=True)
class HostActivity:
    """The slices of all host threads as arrays of shape (n,), and the lanes' time lines.

    Attributes:
        lane: lane of each slice.
        start, end: nanoseconds.
        table: index into TABLES.
        row: row in that table.
        parent: index of the innermost slice that is open when this one starts, -1 for none.
        around: index of the nearest slice around that covers most of this one, -1 for none.
        cause: index into CAUSES, of the slice as innermost of its thread.
        main_lanes: process -> lane of its main thread, where that is known.
    """

    lane: npt.NDArray[np.int32]
    start: Times
    end: Times
    table: npt.NDArray[np.int8]
    row: Rows
    parent: Rows
    around: Rows
    cause: npt.NDArray[np.int16]
    main_lanes: dict[str, int]
    _trace: Trace

    @cached_property
    def timelines(self) -> dict[int, Timeline]:
        """The time line of each lane that has slices."""
        before = np.array([np.iinfo(np.int64).min], np.int64)
        result = {}
        for lane in np.unique(self.lane).tolist():
            mine = np.flatnonzero(self.lane == lane)
            times, innermost = open_after(mine, self.start, self.end, self.parent)
            result[lane] = Timeline(np.concatenate([before, times]), np.concatenate([np.array([-1]), innermost]))
        return result

    @cached_property
    def user_frame(self) -> Rows:
        """For each slice, the row in `frames` of the innermost user's frame around it or itself, -1 for none."""
        own = np.full(len(self.row), -1, np.int64)
        frames = self._trace.frames
        if frames.height:
            files = frames["file"].unique()
            users = [file for file in files if is_user_file(file)]
            is_user = frames["file"].is_in(users).fill_null(False).to_numpy()
            mine = self.table == _FRAME
            own[mine] = np.where(is_user[self.row[mine]], self.row[mine], -1)
        return inherit(own, self.around)

    def cause_of(self, slices: Rows) -> npt.NDArray[np.int16]:
        """The cause of each slice as innermost of its thread, untraced for -1; shape (n,)."""
        cause = np.full(len(slices), CAUSE_CODES["untraced"], np.int16)
        cause[slices >= 0] = self.cause[slices[slices >= 0]]
        return cause

    def slices_of(self, table: str) -> Rows:
        """For each row of a table, the index of its slice, -1 where the row is on no host thread."""
        found = np.full(self._trace.table(table).height, -1, np.int64)
        mine = np.flatnonzero(self.table == TABLES.index(table))
        found[self.row[mine]] = mine
        return found


@dataclass(frozen=True, slots=True)
class Timeline:
    """One thread as consecutive segments: from `times[i]` to `times[i + 1]` the innermost slice is `slices[i]`.

    The first time is the beginning of time; slice -1 means that nothing is open.
    """

    times: Times
    slices: Rows

    def cut(self, starts: Times, ends: Times) -> tuple[Rows, Times, Times, Rows]:
        """Cut intervals where the innermost slice changes.

        Returns:
            For each piece, in order: the interval it is part of, its start, its end, its innermost slice.
        """
        first = np.searchsorted(self.times, starts, side="right") - 1
        last = np.maximum(np.searchsorted(self.times, ends, side="left"), first + 1)
        counts = np.where(ends > starts, last - first, 0)
        interval = np.repeat(np.arange(len(starts)), counts)
        offset = np.arange(len(interval)) - np.repeat(np.cumsum(counts) - counts, counts)
        segment = first[interval] + offset
        following = np.append(self.times[1:], np.iinfo(np.int64).max)
        piece_start = np.maximum(self.times[segment], starts[interval])
        piece_end = np.minimum(following[segment], ends[interval])
        return interval, piece_start, piece_end, self.slices[segment]


def host_activity(trace: Trace) -> HostActivity:
    """The slices of every host thread as one tree a thread, with causes."""
    threads = trace.lanes.filter(pl.col("kind") == "host_thread")["lane"].implode()
    parts = []
    for code, table in enumerate(TABLES):
        rows = trace.table(table).with_row_index("row")
        if table == "annotations":
            rows = rows.filter(pl.col("kind") == "host")
        rows = rows.filter(pl.col("lane").is_in(threads))
        parts.append(
            rows.select("lane", "start_ns", "duration_ns", "name", pl.col("row").cast(pl.Int64)).with_columns(
                table=pl.lit(code, pl.Int8)
            )
        )
    slices = pl.concat(parts)
    lane, start = slices["lane"].to_numpy(), slices["start_ns"].to_numpy()
    duration, table_codes = slices["duration_ns"].to_numpy(), slices["table"].to_numpy()
    parent = parents(lane, start, duration)
    around = enclosing(parent, start, duration)
    return HostActivity(
        lane=lane,
        start=start,
        end=start + duration,
        table=table_codes,
        row=slices["row"].to_numpy(),
        parent=parent,
        around=around,
        cause=_causes(trace, slices, table_codes, around),
        main_lanes=_main_lanes(trace),
        _trace=trace,
    )


def _causes(trace: Trace, slices: pl.DataFrame, table: npt.NDArray[np.int8], around: Rows) -> npt.NDArray[np.int16]:
    names = slices["name"].unique()
    known = pl.DataFrame(
        {"name": names, "own": [CAUSE_CODES.get(cause_of_name(name) or "", -1) for name in names]},
        schema={"name": pl.String, "own": pl.Int64},
    )
    own = slices.select("name").join(known, on="name", how="left", maintain_order="left")["own"].to_numpy().copy()
    launches = np.flatnonzero(table == _LAUNCH)
    own[launches] = _launch_causes(trace)[slices["row"].to_numpy()[launches]]
    definite = inherit(own, around)
    inside_operator = inherit(np.where((table == _OPERATOR) | (table == _LAUNCH), 1, -1), around) > 0
    inside_frame = inherit(np.where(table == _FRAME, 1, -1), around) > 0
    fallback = np.where(
        inside_operator,
        CAUSE_CODES["dispatch"],
        np.where(inside_frame, CAUSE_CODES["python"], CAUSE_CODES["untraced"]),
    )
    return np.where(definite >= 0, definite, fallback).astype(np.int16)


def _launch_causes(trace: Trace) -> Rows:
    """The cause each row of `launches` gives away, -1 for none.

    A wait inside the operator that copies to the device belongs to that copy.
    """
    copies = trace.device_work.filter(pl.col("kind").is_in(["copy_in", "copy_out"]) & pl.col("launch").is_not_null())
    directions = copies.group_by(pl.col("launch").alias("row")).agg(pl.col("kind").first().alias("direction"))
    calls = trace.launches.with_row_index("row").select("row", "kind", "operator")
    calls = calls.join(directions, on="row", how="left", maintain_order="left")
    into = calls.filter((pl.col("direction") == "copy_in") & pl.col("operator").is_not_null())["operator"]
    copying = pl.col("operator").is_in(into.unique().implode())
    cause = (
        pl.when(pl.col("direction") == "copy_in")
        .then(pl.lit("host_to_device_copy"))
        .when((pl.col("direction") == "copy_out") & (pl.col("kind") == "copy"))
        .then(pl.lit("synchronisation"))
        .when((pl.col("kind") == "synchronise") & copying.fill_null(False))
        .then(pl.lit("host_to_device_copy"))
        .when(pl.col("kind") == "synchronise")
        .then(pl.lit("synchronisation"))
        .when(pl.col("kind") == "allocate")
        .then(pl.lit("allocation"))
        .when(pl.col("kind") == "compile")
        .then(pl.lit("compilation"))
    )
    codes = calls.select(
        cause.replace_strict(CAUSE_CODES, default=-1, return_dtype=pl.Int64).fill_null(-1).alias("code")
    )
    return codes["code"].to_numpy()


def _main_lanes(trace: Trace) -> dict[str, int]:
    """Each process's main thread: the one with step annotations, else the framework's, else the process's first."""
    lanes = trace.lanes.filter(pl.col("kind") == "host_thread").select(
        "lane", "process", first=pl.col("thread") == pl.col("process")
    )
    marks = (
        trace.annotations.filter(pl.col("kind") == "host")
        .group_by("lane")
        .agg(steps=pl.col("step").is_not_null().sum(), marks=pl.col("name").str.contains("DataLoader|Optimizer").sum())
    )
    ranked = (
        lanes.join(marks, on="lane", how="left")
        .with_columns(pl.col("steps", "marks").fill_null(0), pl.col("first").fill_null(False))
        .filter((pl.col("steps") > 0) | (pl.col("marks") > 0) | pl.col("first"))
        .sort("steps", "marks", "first", "lane", descending=[True, True, True, False])
        .unique("process", keep="first", maintain_order=True)
    )
    return dict(zip(ranked["process"].to_list(), ranked["lane"].to_list(), strict=True))
