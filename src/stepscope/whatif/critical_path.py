"""The critical path: the chain of host and device work that determines the length of the steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.host import CAUSES, slice_columns
from stepscope.trace.nesting import Rows, conformed, nullable
from stepscope.trace.window import Times
from stepscope.whatif.experiment import Experiment
from stepscope.whatif.graph import Replay, handovers_by_target, launch_offsets, scaled_own, sources_by_target


class _OnDevice(NamedTuple):
    work: int


class _OnHost(NamedTuple):
    """A measured time in a stretch at which the path reaches the thread."""

    stretch: int
    moment: int


_Point = _OnDevice | _OnHost | None


@dataclass
class Chain:
    """Pieces of the path, last first.

    Attributes:
        begin: start of the span in the replay, nanoseconds; earlier pieces are cut there.
        works: row in `device_work`, start, end.
        delays: row in `device_work` of the work that began after the delay, start, end.
        host: lane, measured start and end, start and end in the replay.
    """

    done: Replay
    begin: int
    works: list[tuple[int, int, int]] = field(default_factory=list)
    delays: list[tuple[int, int, int]] = field(default_factory=list)
    host: list[tuple[int, int, int, int, int]] = field(default_factory=list)


def walk_back(experiment: Experiment, done: Replay) -> Chain:
    """Walk back from the end of the span to its beginning."""
    walker = _Walker(experiment, done)
    point = walker.end
    for _ in range(len(done.graph.order) + 1):  # each is visited at most once
        if point is None:
            break
        point = walker.before_work(point.work) if isinstance(point, _OnDevice) else walker.before_moment(*point)
    return walker.chain


class _Walker:
    def __init__(self, experiment: Experiment, done: Replay) -> None:
        self._experiment, self._done = experiment, done
        graph = done.graph
        self._stretches, self._edges = graph.stretches, graph.handovers
        self._host_waits = sources_by_target(graph.host_waits)
        self._handovers = handovers_by_target(graph)
        self._numbers: dict[int, list[int]] = {}
        for number, target in enumerate(graph.handovers.target.tolist()):
            self._numbers.setdefault(target, []).append(number)
        self._offsets, self._own = launch_offsets(graph), scaled_own(graph)
        works = (done.work_start, done.work_end, graph.works.previous, graph.works.stretch, self._offsets)
        columns = (*works, graph.works.latency_ns, graph.works.launched, graph.works.gap_ns)
        self._columns: list[list[int]] = [each.tolist() for each in columns]  # lists are read faster one by one
        begin, self.end = self._span()
        self.chain = Chain(done, begin)

        self._until = np.iinfo(np.int64).max  # clocks may disagree: do not let pieces overlap

    @cached_property
    def _queue_waits(self) -> dict[int, list[tuple[int, int]]]:
        return sources_by_target(self._done.graph.queue_waits)

    def _take_host(self, lane: int, measured: tuple[int, int], start: int, end: int) -> None:
        over = max(end - self._until, 0)
        self.chain.host.append((lane, measured[0], max(measured[1] - over, measured[0]), start, end - over))
        self._until = min(self._until, start)

    def _span(self) -> tuple[int, _Point]:
        """Start of the span in the replay, and the point at which it ends."""
        experiment, done = self._experiment, self._done
        works = experiment.works
        last = int(works[np.argmax(done.work_end[works])]) if len(works) else -1
        if experiment.device is not None and experiment.view.is_on_device:
            return (int(done.work_start[works].min()), _OnDevice(last)) if last >= 0 else (0, None)
        begin, end = experiment.host_ends(done)
        if last >= 0:
            first, finish = int(done.work_start[works].min()), int(done.work_end[last])
            if finish - first > end - begin:
                return first, _OnDevice(last)
            if not experiment.steps.height:
                begin = min(begin, first)
                if finish >= end:
                    return begin, _OnDevice(last)
        lane, moment = np.array([experiment.lane], np.int32), np.array([experiment.span.end_ns], np.int64)
        stretch = int(self._stretches.at(lane, moment)[0])
        if stretch < 0:  # no host thread was recorded: only device work remains
            return begin, _OnDevice(last) if last >= 0 else None
        return begin, _OnHost(stretch, int(moment[0]))

    def before_work(self, work: int) -> _Point:
        """Add a work, and continue with what it waited for."""
        starts, ends, befores, sources, offsets, latencies, launched, gaps = self._columns
        start = starts[work]
        self.chain.works.append((work, start, min(ends[work], self._until)))
        self._until = min(self._until, start)
        if start <= self.chain.begin:
            return None
        previous, source = befores[work], sources[work]
        latest, since, other = _NEVER_BEFORE, 0, -1
        if source >= 0:
            latest = int(self._done.stretch_start[source]) + offsets[work]
            since = latest - latencies[work]
        for wait, delay in self._queue_waits.get(work, ()):
            if ends[wait] + delay > latest:
                latest, since, other = ends[wait] + delay, ends[wait], wait
        if previous >= 0 and ends[previous] + gaps[work] > latest:
            latest, since, other = ends[previous] + gaps[work], ends[previous], previous
        if latest == _NEVER_BEFORE:
            return None
        self.chain.delays.append((work, min(since, start), start))
        self._until = min(self._until, since)
        return _OnDevice(other) if other >= 0 else _OnHost(source, launched[work])

    def before_moment(self, stretch: int, moment: int) -> _Point:
        """Add a thread's time in a stretch up to this time, and continue with what the stretch waited for."""
        done, stretches = self._done, self._stretches
        lane, begin = int(stretches.lane[stretch]), int(stretches.start[stretch])
        at = min(max(moment, begin), int(stretches.end[stretch]))
        start = int(done.stretch_start[stretch])
        scale = done.graph.host_scale
        inside = int(scale.length(stretches.lane[[stretch]], np.array([begin]), np.array([at]))[0])
        beyond = max(moment - at, 0)  # in the pause after the stretch
        if beyond:
            self._take_host(lane, (at, at + beyond), start + inside, start + inside + beyond)
        self._take_host(lane, (begin, at), start, start + inside)
        if start <= self.chain.begin:
            return None
        options: list[tuple[int, int, _Point]] = []
        before = int(stretches.previous[stretch])
        if before >= 0:
            end = int(done.stretch_end[before])
            options.append((end + int(self._own[stretch]), end, _OnHost(before, int(stretches.end[before]))))
        for other, delay in self._host_waits.get(stretch, ()):
            options.append((int(done.work_end[other]) + delay, int(done.work_end[other]), _OnDevice(other)))
        for number, (other, delay) in zip(
            self._numbers.get(stretch, ()), self._handovers.get(stretch, ()), strict=True
        ):
            reached = int(done.stretch_start[other]) + delay
            given = _OnHost(other, int(self._edges.time[number]))
            options.append((reached, reached - int(self._edges.delay_ns[number]), given))
        if not options:
            return None
        _, since, point = max(options, key=lambda option: option[0])
        if since < start:
            self._take_host(lane, (begin - (start - since), begin), since, start)
        return point


_NEVER_BEFORE: Final = -(2**63)
PATH_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    # "host" or "launch_latency"; a device's "compute", "communication" or "copy"; "wait" for something not in the trace
    "kind": pl.String,
    "cause": pl.String,  # host time: one of CAUSES, or "compute" for operators of a machine without a device
    "lane": pl.Int32,  # thread of host time, queue of device work
    "device": pl.String,
    "queue": pl.String,
    "table": pl.String,  # table of `row`: "device_work", or that of the thread's innermost slice; null if there is none
    "row": pl.UInt32,
    "name": pl.String,
}
RESOURCE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "kind": pl.String,
    "cause": pl.String,  # for host time, else null
    "ns": pl.Int64,
    "share": pl.Float64,  # of the path, 0 to 1
}
_OF_WORK: Final = {"communication": "communication", "copy_in": "copy", "copy_out": "copy", "copy_on_device": "copy"}


def critical_path(experiment: Experiment, done: Replay | None = None) -> pl.DataFrame:
    """Critical path of the steps in a replay, by default the one without a change.

    Returns:
        Columns as in PATH_SCHEMA, in order of time. From the beginning of the first complete step to the end of the
        last one or of its device work, without gaps; in a trace without steps, over the device's window.
    """
    chain = walk_back(experiment, done or experiment.measured)
    return _path(experiment, chain, _host_rows(experiment, chain)).sort("start_ns", maintain_order=True)


def path_in_sum(experiment: Experiment, done: Replay | None = None) -> pl.DataFrame:
    """The pieces of `critical_path` in no order; those of host threads are added up by cause, without a row."""
    chain = walk_back(experiment, done or experiment.measured)
    return _path(experiment, chain, _host_rows(experiment, chain, is_named=False))


def _path(experiment: Experiment, chain: Chain, host: pl.DataFrame) -> pl.DataFrame:
    path = pl.concat([_device_rows(experiment, chain), host, _other_rows(experiment, chain)])
    path = _cut_at(chain.begin, path)
    first = int(path["start_ns"].to_numpy().min(initial=np.iinfo(np.int64).max))
    if path.height and first > chain.begin:  # what the earliest piece waited for is not in the trace
        unknown = pl.DataFrame({"start_ns": [chain.begin], "duration_ns": [first - chain.begin]})
        path = pl.concat([_conform(unknown.with_columns(kind=pl.lit("wait"))), path])
    return path


def _cut_at(begin: int, rows: pl.DataFrame) -> pl.DataFrame:
    start = pl.max_horizontal("start_ns", pl.lit(begin))
    end = pl.col("start_ns") + pl.col("duration_ns")
    return rows.with_columns(start_ns=start, duration_ns=end - start).filter(pl.col("duration_ns") > 0)


def resources(path: pl.DataFrame) -> pl.DataFrame:
    """Time on the path by resource, columns as in RESOURCE_SCHEMA, largest first: what limits the steps."""
    total = max(int(path["duration_ns"].sum()), 1)
    table = path.group_by("kind", "cause").agg(ns=pl.col("duration_ns").sum())
    table = table.with_columns(share=pl.col("ns") / total)
    table = table.sort(["ns", "kind", "cause"], descending=[True, False, False])
    return conformed(table, RESOURCE_SCHEMA)


def _taken(rows: list[tuple[int, int, int]]) -> pl.DataFrame:
    return pl.DataFrame(rows, {"row": pl.Int64, "start": pl.Int64, "end": pl.Int64}, orient="row")


def _device_rows(experiment: Experiment, chain: Chain) -> pl.DataFrame:
    """Device work on the path, and the delays between dependencies and starts.

    Delays are latency and an unexplained rest.
    """
    work = experiment.trace.device_work.with_row_index("row").select(
        pl.col("row").cast(pl.Int64), "lane", "device", "queue", "name",
        does=pl.col("kind").replace_strict(_OF_WORK, default="compute"),
    )  # fmt: skip
    unexplained = pl.Series(experiment.graph.unexplained_ns)
    delays = _taken(chain.delays).filter(pl.col("row") < work.height)
    late = unexplained.gather(delays["row"]).clip(upper_bound=(delays["end"] - delays["start"]).clip(0))
    parts = [
        _taken(chain.works).with_columns(kind=pl.lit(None, pl.String)),
        delays.with_columns(end=pl.col("end") - late, kind=pl.lit("launch_latency")),
        delays.with_columns(start=pl.col("end") - late, kind=pl.lit("wait")),
    ]
    rows = pl.concat(parts).join(work, on="row", how="inner")
    duration = pl.col("end") - pl.col("start")
    kind = pl.coalesce("kind", "does")
    return _conform(rows.with_columns(kind=kind, start_ns="start", duration_ns=duration, table=pl.lit("device_work")))


def _other_rows(experiment: Experiment, chain: Chain) -> pl.DataFrame:
    """Host-run collectives, and batches loaded by workers in a changed replay, with their delays."""
    first, on_host = experiment.trace.device_work.height, chain.done.graph.on_host
    annotations = experiment.trace.annotations
    taken = pl.concat([_taken(chain.works), _taken(chain.delays)]).filter(pl.col("row") >= first)
    taken = taken.select(number=pl.col("row") - first, start_ns="start", duration_ns=pl.col("end") - pl.col("start"))
    sent = taken.filter(pl.col("number") < len(on_host))
    sent = sent.with_columns(
        row=pl.Series(on_host).gather(sent["number"]), kind=pl.lit("communication"), table=pl.lit("annotations")
    )
    named = [annotations[name].gather(sent["row"]) for name in ("lane", "name")]
    loaded = taken.filter(pl.col("number") >= len(on_host)).with_columns(
        kind=pl.lit("host"), cause=pl.lit("input"), name=pl.lit("a batch loaded by a worker process")
    )
    return pl.concat([_conform(sent.with_columns(named)), _conform(loaded)])


def _host_rows(experiment: Experiment, chain: Chain, *, is_named: bool = True) -> pl.DataFrame:
    """Host time, cut where the thread's activity changes."""
    activity, scale = experiment.activity, chain.done.graph.host_scale
    on_host = experiment.device is None
    parts = [pl.DataFrame(schema=dict(PATH_SCHEMA))]
    pieces = np.array(chain.host, np.int64).reshape(-1, 5)
    for lane in np.unique(pieces[:, 0]).tolist():
        mine = pieces[pieces[:, 0] == lane]
        cut = activity.cut(lane, mine[:, 1], mine[:, 2])
        interval, begins, ends = (cut[name].to_numpy() for name in ("interval", "start", "end"))
        lanes = np.full(len(interval), lane, np.int32)
        since = scale.length(lanes, mine[interval, 1], begins)
        until = scale.length(lanes, mine[interval, 1], ends)
        whole = scale.length(np.full(len(mine), lane, np.int32), mine[:, 1], mine[:, 2])
        gone = whole <= 0  # removed time that still passes while the thread waits
        since = np.where(gone[interval], begins - mine[interval, 1], since)
        until = np.where(gone[interval], ends - mine[interval, 1], until)
        whole = np.where(gone, np.maximum(mine[:, 2] - mine[:, 1], 1), whole)
        stretched = ((mine[:, 4] - mine[:, 3]) / whole)[interval]
        begin = mine[interval, 3]
        start, end = (begin + np.rint(at * stretched).astype(np.int64) for at in (since, until))
        frame = pl.DataFrame({"start_ns": start, "duration_ns": end - start, "lane": lanes, "cause": cut["cause"]})
        if is_named:
            table, row = slice_columns(activity, cut)
            name = activity.name.gather(nullable(cut["slice"].to_numpy()))
            frame = frame.with_columns(table.alias("table"), row.alias("row"), name=name)
        else:
            begun = np.maximum(start, chain.begin)
            frame = _by_cause(lane, begun, np.maximum(end - begun, 0), cut["cause"])
        cause = pl.col("cause").cast(pl.String)
        parts.append(
            _conform(
                frame.with_columns(
                    kind=pl.lit("host"), cause=cause.replace({"dispatch": "compute"}) if on_host else cause
                )
            )
        )
    return pl.concat(parts)


def _by_cause(lane: int, starts: Times, durations: Times, causes: pl.Series) -> pl.DataFrame:
    """Sum of each cause, from the first start on."""
    codes = causes.to_physical().to_numpy()
    sums = np.bincount(codes, durations)  # exact: less than 2^53 ns
    found = np.flatnonzero(sums)
    first = int(starts[durations > 0].min(initial=np.iinfo(np.int64).max))
    lasts = sums[found].astype(np.int64)
    names = pl.Series(list(CAUSES)).gather(found)
    return pl.DataFrame({"start_ns": np.full(len(found), first), "duration_ns": lasts, "cause": names}).with_columns(
        lane=pl.lit(lane)
    )


def _conform(table: pl.DataFrame) -> pl.DataFrame:
    missing = [pl.lit(None).alias(name) for name in PATH_SCHEMA if name not in table.columns]
    return conformed(table.with_columns(missing), PATH_SCHEMA)


SLACK_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "row": pl.UInt32,  # row in operators
    "name": pl.String,
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "device_ns": pl.Int64,  # device work launched directly in it
    "slack_ns": pl.Int64,  # smaller of how much later it could end on the host, and its work on the device
}
_NEVER: Final = np.iinfo(np.int64).max // 4
"""Later than any time: nothing waits for this."""


def slack_of_operators(experiment: Experiment) -> pl.DataFrame:
    """Slack of every operator that begins in the complete steps, in order of time; columns as in SLACK_SCHEMA.

    Slack 0 means that the operator is on the critical path. If nothing in the steps waits for an operator, its slack
    reaches to their end.
    """
    done = experiment.measured
    work_late, host_late = _latest(experiment, done)
    work_slack = work_late - done.work_end
    operators = experiment.trace.operators.with_row_index("row")
    start = operators["start_ns"].to_numpy()
    rows = np.flatnonzero((start >= experiment.span.start_ns) & (start < experiment.span.end_ns))
    lanes, ends = operators["lane"].to_numpy()[rows], (start + operators["duration_ns"].to_numpy())[rows]
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
    return conformed(result.sort("start_ns", "row"), SLACK_SCHEMA)


def slack_by_name(slack: pl.DataFrame) -> pl.DataFrame:
    """Slack by operator name: columns name, calls, critical (calls without slack), duration_ns, median_slack_ns.

    Sorted by critical time, largest first.
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
    """Slack of times on host threads."""

    def __init__(self, experiment: Experiment, stretch: Rows, offset: Times, slack: Times) -> None:
        self._stretches = experiment.graph.stretches
        order = np.lexsort((offset, stretch))
        table = pl.DataFrame({"stretch": stretch[order], "offset": offset[order], "slack": slack[order]})
        least = table.select(pl.col("slack").cum_min(reverse=True).over("stretch"))["slack"].to_numpy()
        self._stretch, self._offset, self._least = stretch[order], offset[order], least

    def at(self, lanes: npt.NDArray[np.int32], times: Times) -> Times:
        """Slack of these times: the least slack of what depends on the thread from then on, in the same stretch."""
        stretches = self._stretches
        if not len(stretches.start):
            return np.full(len(times), _NEVER)
        found = stretches.at(lanes, times)
        index = np.maximum(found, 0)
        offset = np.minimum(times, stretches.end[index]) - stretches.start[index]
        first, last = (np.searchsorted(self._stretch, index, side=side) for side in ("left", "right"))
        position = first + _count_below(self._stretch, self._offset, index, offset)
        known = (found >= 0) & (position < last)
        least = np.append(self._least, _NEVER)  # sentinel in case there is no host wait
        return np.where(known, least[np.minimum(position, len(self._least))], _NEVER)


def _count_below(stretch: Rows, offset: Times, index: Rows, limit: Times) -> Rows:
    """For each (stretch, limit) the number of that stretch's entries below the limit; entries are sorted."""
    widest = int(max(offset.max(initial=0), limit.max(initial=0))) + 1
    entries = stretch.astype(np.float64) * widest + offset
    wanted = index.astype(np.float64) * widest + limit
    return np.searchsorted(entries, wanted, side="left") - np.searchsorted(stretch, index, side="left")


def _end_of_span(experiment: Experiment, done: Replay) -> int:
    last = int(done.work_end[experiment.works].max(initial=0))
    return max(experiment.host_ends(done)[1], last)


def _latest(experiment: Experiment, done: Replay) -> tuple[Times, _HostLatest]:
    """Latest end of each work, and slack of host times, that do not delay the end of the span."""
    graph, end = done.graph, _end_of_span(experiment, done)
    stretches, works, count = graph.stretches, graph.works, len(graph.stretches.start)
    work_late = np.full(len(works.start), _NEVER)
    work_late[experiment.works] = end
    work_late = work_late.tolist()
    start_late = [_NEVER] * count
    moments: tuple[list[int], list[int], list[int]] = ([], [], [])  # stretch, offset, slack
    at_end = stretches.at(np.array([experiment.lane], np.int32), np.array([experiment.span.end_ns], np.int64))[0]
    if at_end >= 0 and not experiment.view.is_on_device:
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
