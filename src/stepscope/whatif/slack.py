"""Slack: how much later things could end without making the steps longer."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.trace.intervals import Times
from stepscope.trace.nesting import Rows
from stepscope.whatif.experiment import Experiment
from stepscope.whatif.replay import Replay, handovers_by_target, launch_offsets, scaled_own, sources_by_target

SLACK_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "row": pl.UInt32,  # in operators
    "name": pl.String,
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "device_ns": pl.Int64,  # of the device work launched directly in it
    "slack_ns": pl.Int64,  # by which it could end later on the host, or its work on the device; the smaller of both
}
_NEVER: Final = np.iinfo(np.int64).max // 4
"""Later than anything: nothing waits for it."""


def slack_of_operators(experiment: Experiment) -> pl.DataFrame:
    """The slack of every operator that begins in the complete steps, in order of time; columns as in SLACK_SCHEMA.

    Slack 0 means that the operator is on the critical path. An operator for which nothing in the steps waits has as
    much slack as there is time until their end.
    """
    done = experiment.measured
    work_late, host_late = _latest(experiment, done)
    work_slack = work_late - done.work_end
    operators = experiment.trace.operators.with_row_index("row")
    start = operators["start_ns"].to_numpy()
    rows = np.flatnonzero((start >= experiment.span.start_ns) & (start < experiment.span.end_ns))
    lanes, ends = (
        operators["lane"].to_numpy()[rows],
        (operators["start_ns"] + operators["duration_ns"]).to_numpy()[rows],
    )
    slack = np.minimum(host_late.at(lanes, ends), _end_of_span(experiment, done) - ends)
    calls = experiment.trace.launches["operator"].cast(pl.Int64)
    table = experiment.trace.device_work.select(
        pl.Series("row", calls.gather(experiment.trace.device_work["launch"])),
        slack=pl.Series(work_slack[: experiment.trace.device_work.height]),
        device_ns="duration_ns",
    )
    its = table.drop_nulls("row").group_by("row").agg(pl.col("slack").min(), pl.col("device_ns").sum())
    result = operators[rows].select("row", "name", "start_ns", "duration_ns").with_columns(host=slack)
    result = result.join(its.with_columns(pl.col("row").cast(pl.UInt32)), on="row", how="left", maintain_order="left")
    result = result.with_columns(
        slack_ns=pl.min_horizontal("host", "slack").clip(lower_bound=0), device_ns=pl.col("device_ns").fill_null(0)
    )
    return result.sort("start_ns", "row").select([pl.col(name).cast(dtype) for name, dtype in SLACK_SCHEMA.items()])


def slack_by_name(slack: pl.DataFrame) -> pl.DataFrame:
    """Slack of operators by name: columns name, calls, critical (calls without slack), duration_ns, median_slack_ns.

    The most critical time first.
    """
    is_critical = pl.col("slack_ns") == 0
    table = slack.group_by("name").agg(
        calls=pl.len().cast(pl.Int64),
        critical=is_critical.sum().cast(pl.Int64),
        duration_ns=pl.col("duration_ns").sum(),
        critical_ns=(pl.col("duration_ns") * is_critical).sum(),
        median_slack_ns=pl.col("slack_ns").median().cast(pl.Int64),
    )
    return table.sort(["critical_ns", "duration_ns", "name"], descending=[True, True, False])


class _HostLatest:
    """By how much each moment of a host thread could come later."""

    def __init__(self, experiment: Experiment, stretch: Rows, offset: Times, slack: Times) -> None:
        self._stretches = experiment.graph.stretches
        order = np.lexsort((offset, stretch))
        table = pl.DataFrame({"stretch": stretch[order], "offset": offset[order], "slack": slack[order]})
        least = table.select(pl.col("slack").cum_min(reverse=True).over("stretch"))["slack"].to_numpy()
        self._stretch, self._offset, self._least = stretch[order], offset[order], least

    def at(self, lanes: npt.NDArray[np.int32], times: Times) -> Times:
        """The slack of these moments: the least of what depends on the thread then or later, in the same stretch."""
        stretches = self._stretches
        if not len(stretches.start):
            return np.full(len(times), _NEVER)
        found = stretches.at(lanes, times)
        index = np.maximum(found, 0)
        offset = np.minimum(times, stretches.end[index]) - stretches.start[index]
        first, last = (np.searchsorted(self._stretch, index, side=side) for side in ("left", "right"))
        position = first + _count_below(self._stretch, self._offset, index, offset)
        known = (found >= 0) & (position < last)
        least = np.append(self._least, _NEVER)  # where nothing waits for any thread there is no other entry
        return np.where(known, least[np.minimum(position, len(self._least))], _NEVER)


def _count_below(stretch: Rows, offset: Times, index: Rows, limit: Times) -> Rows:
    """For each (stretch, limit) how many entries of that stretch have a smaller offset; entries are sorted."""
    widest = int(max(offset.max(initial=0), limit.max(initial=0))) + 1
    entries = stretch.astype(np.float64) * widest + offset
    wanted = index.astype(np.float64) * widest + limit
    return np.searchsorted(entries, wanted, side="left") - np.searchsorted(stretch, index, side="left")


def _end_of_span(experiment: Experiment, done: Replay) -> int:
    last = int(done.work_end[experiment.works].max(initial=0))
    return max(experiment.host_ends(done)[1], last)


def _latest(experiment: Experiment, done: Replay) -> tuple[Times, _HostLatest]:
    """The latest end of each work, and the slack of host moments, with which the span ends no later."""
    graph, end = done.graph, _end_of_span(experiment, done)
    stretches, works, count = graph.stretches, graph.works, len(graph.stretches.start)
    work_late = np.full(len(works.start), _NEVER)
    work_late[experiment.works] = end
    work_late = work_late.tolist()
    start_late = [_NEVER] * count
    moments: tuple[list[int], list[int], list[int]] = ([], [], [])  # stretch, offset, slack
    at_end = stretches.at(np.array([experiment.lane], np.int32), np.array([experiment.span.end_ns], np.int64))[0]
    if at_end >= 0 and experiment.steps.height:
        start_late[at_end] = end - (experiment.host_ends(done)[1] - int(done.stretch_start[at_end]))
        _note(moments, int(at_end), experiment.span.end_ns - int(stretches.start[at_end]),
              start_late[at_end] - int(done.stretch_start[at_end]))  # fmt: skip
    offsets, own = launch_offsets(graph).tolist(), scaled_own(graph).tolist()
    queue_waits, host_waits = sources_by_target(graph.queue_waits), sources_by_target(graph.host_waits)
    hands = handovers_by_target(graph)
    begin, lengths = done.stretch_start.tolist(), (done.stretch_end - done.stretch_start).tolist()
    duration = (done.work_end - done.work_start).tolist()
    for item in graph.order[::-1].tolist():
        if item >= count:
            work = item - count
            latest = work_late[work] - duration[work]
            source, before = int(works.stretch[work]), int(works.previous[work])
            if before >= 0:
                work_late[before] = min(work_late[before], latest - int(works.gap_ns[work]))
            for other, delay in queue_waits.get(work, ()):
                work_late[other] = min(work_late[other], latest - delay)
            if source >= 0:
                start_late[source] = min(start_late[source], latest - offsets[work])
                _note(
                    moments, source, offsets[work] - int(works.latency_ns[work]), latest - offsets[work] - begin[source]
                )
            continue
        latest, before = start_late[item], int(stretches.previous[item])
        if before >= 0:
            reached = latest - own[item] - lengths[before]
            start_late[before] = min(start_late[before], reached)
            _note(moments, before, lengths[before], reached - begin[before])
        for other, delay in host_waits.get(item, ()):
            work_late[other] = min(work_late[other], latest - delay)
        for other, delay in hands.get(item, ()):
            start_late[other] = min(start_late[other], latest - delay)
            _note(moments, other, delay, latest - delay - begin[other])
    table = [np.array(column, np.int64) for column in moments]
    return np.array(work_late, np.int64), _HostLatest(experiment, *table)


def _note(moments: tuple[list[int], list[int], list[int]], stretch: int, offset: int, slack: int) -> None:
    for column, value in zip(moments, (stretch, offset, slack), strict=True):
        column.append(value)
