"""Cutting host threads into stretches in which they wait for nobody."""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.host import HostActivity
from stepscope.trace.intervals import Times
from stepscope.trace.nesting import Rows
from stepscope.whatif.graph import Stretches
from stepscope.whatif.host_waits import Handovers, Waits

_GIVEN: Final = -2
"""Instead of a launch: the stretch begins with work that another thread gave."""


def cut_stretches(
    activity: HostActivity, waits: Waits, bursts: Handovers, loading: pl.DataFrame
) -> tuple[Stretches, Rows]:
    """The stretches, and for each of `waits` the stretch that began after it, -1 where it was left out.

    Calls of a data loader come between stretches too, where nothing else is waited for inside them: they are the
    thread's own time, unless workers load batches.

    Args:
        loading: calls of loaders; columns lane, start_ns, duration_ns.
    """
    parts: list[pl.DataFrame] = []
    resumed = bursts.resumed >= 0
    for lane, timeline in activity.timelines.items():
        if len(timeline.times) < 2:
            continue
        mine, its = np.flatnonzero(waits.lane == lane), np.flatnonzero(bursts.lane == lane)
        given = np.flatnonzero(resumed & (bursts.giver == lane))
        pauses = np.concatenate(
            [
                np.column_stack([waits.start[mine], waits.end[mine], waits.own_ns[mine], waits.launch[mine], mine]),
                _silences(bursts.given[given], bursts.resumed[given], bursts.start[given], bursts.end[given]),
                _between(bursts.start[its], bursts.end[its]),
            ]
        )
        pauses = np.concatenate([pauses, _loader_calls(loading.filter(pl.col("lane") == lane), pauses)])
        parts.append(_cut_lane(lane, int(timeline.times[1]), int(timeline.times[-1]), pauses))
    schema = dict.fromkeys(("lane", "start", "end", "own", "launch", "wait", "first"), pl.Int64)
    table = pl.concat([pl.DataFrame(schema=schema), *parts])
    previous = np.where(table["first"].to_numpy() == 1, -1, np.arange(table.height) - 1)
    wait = table["wait"].to_numpy()
    boundaries = np.full(len(waits.start), -1, np.int64)
    boundaries[wait[wait >= 0]] = np.flatnonzero(wait >= 0)
    stretches = Stretches(
        lane=table["lane"].to_numpy().astype(np.int32),
        start=table["start"].to_numpy(),
        end=table["end"].to_numpy(),
        previous=previous,
        own_ns=table["own"].to_numpy(),
        launch=np.maximum(table["launch"].to_numpy(), -1),
        is_given=table["launch"].to_numpy() == _GIVEN,
    )
    return stretches, boundaries


def _silences(given: Times, resumed: Times, start: Times, end: Times) -> Times:
    """Pauses of a thread that waits for others: what of them is not the others' is its own."""
    order = np.lexsort((-end, resumed))
    first = np.unique(resumed[order], return_index=True)[1]
    chosen = order[first]
    given, resumed, start, end = given[chosen], resumed[chosen], start[chosen], end[chosen]
    own = np.maximum(resumed - given - (end - start), 0)
    nothing = np.full(len(given), -1, np.int64)
    return np.column_stack([given, resumed, own, nothing, nothing])


def _between(start: Times, end: Times) -> Times:
    """Pauses of a thread between the bursts that others give it."""
    order = np.argsort(start, kind="stable")
    reached = np.maximum.accumulate(end[order])[:-1] if len(end) > 1 else end[:0]
    begin = start[order][1:]
    apart = begin >= reached
    nothing, given = np.full(int(apart.sum()), -1, np.int64), np.full(int(apart.sum()), _GIVEN, np.int64)
    return np.column_stack([reached[apart], begin[apart], np.zeros(len(nothing), np.int64), given, nothing])


def _loader_calls(calls: pl.DataFrame, pauses: Times) -> Times:
    """The loader's calls in which there is no other pause, as pauses of their whole length."""
    start, duration = calls["start_ns"].to_numpy(), calls["duration_ns"].to_numpy()
    begins, ends = np.sort(pauses[:, 0]), np.sort(pauses[:, 1])
    alone = np.searchsorted(begins, start + duration, side="left") == np.searchsorted(ends, start, side="right")
    start, duration = start[alone], duration[alone]
    nothing = np.full(len(start), -1, np.int64)
    return np.column_stack([start, start + duration, duration, nothing, nothing])


def _cut_lane(lane: int, first: int, last: int, pauses: Times) -> pl.DataFrame:
    """The stretches of one thread between its pauses; of pauses that overlap the first counts."""
    pauses = pauses[np.lexsort((-pauses[:, 1], pauses[:, 0]))]
    reached = np.concatenate([[np.iinfo(np.int64).min], np.maximum.accumulate(pauses[:, 1])])[:-1]
    pauses = pauses[(pauses[:, 0] >= reached) & (pauses[:, 0] >= first)]
    starts = np.concatenate([[first], pauses[:, 1]])
    ends = np.concatenate([pauses[:, 0], [last]])
    return pl.DataFrame(
        {
            "lane": np.full(len(starts), lane, np.int64),
            "start": starts,
            "end": np.maximum(ends, starts),
            "own": np.concatenate([[0], pauses[:, 2]]),
            "launch": np.concatenate([[-1], pauses[:, 3]]),
            "wait": np.concatenate([[-1], pauses[:, 4]]),
            "first": np.concatenate([[1], np.zeros(len(pauses), np.int64)]),
        }
    )
