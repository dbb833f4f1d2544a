"""Construction of a trace's dependency graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.host import HostActivity, host_activity
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows, row_numbers
from stepscope.trace.window import Times
from stepscope.whatif.graph import (
    Durations,
    Edges,
    Graph,
    HostScale,
    Stretches,
    Works,
    concatenated,
    nothing,
    previous_in,
)
from stepscope.whatif.host_waits import RETURN_NS, Handovers, Waits, device_waits, handovers, host_collectives

_GIVEN: Final = -2
"""Launch value of a stretch that begins with work handed over by another thread."""


def cut_stretches(
    activity: HostActivity, waits: Waits, bursts: Handovers, loading: pl.DataFrame
) -> tuple[Stretches, Rows]:
    """Cut host time into stretches; also returns the stretch after each of `waits`, -1 where it was left out.

    Data loader calls also separate stretches if they contain no other wait: they are the thread's own time, unless
    workers load batches.

    Args:
        loading: loader calls; columns lane, start_ns, duration_ns.
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
    """Pauses of a thread that waits for others; the rest of a pause is its own time."""
    order = np.lexsort((-end, resumed))
    first = np.unique(resumed[order], return_index=True)[1]
    chosen = order[first]
    given, resumed, start, end = given[chosen], resumed[chosen], start[chosen], end[chosen]
    own = np.maximum(resumed - given - (end - start), 0)
    unset = np.full(len(given), -1, np.int64)
    return np.column_stack([given, resumed, own, unset, unset])


def _between(start: Times, end: Times) -> Times:
    """Pauses of a thread between the bursts that others hand to it."""
    order = np.argsort(start, kind="stable")
    reached = np.maximum.accumulate(end[order])[:-1] if len(end) > 1 else end[:0]
    begin = start[order][1:]
    apart = begin >= reached
    own, launch, wait = (np.full(int(apart.sum()), value, np.int64) for value in (0, _GIVEN, -1))
    return np.column_stack([reached[apart], begin[apart], own, launch, wait])


def _loader_calls(calls: pl.DataFrame, pauses: Times) -> Times:
    """Loader calls without another pause inside, as pauses of their whole length."""
    start, duration = calls["start_ns"].to_numpy(), calls["duration_ns"].to_numpy()
    begins, ends = np.sort(pauses[:, 0]), np.sort(pauses[:, 1])
    alone = np.searchsorted(begins, start + duration, side="left") == np.searchsorted(ends, start, side="right")
    start, duration = start[alone], duration[alone]
    unset = np.full(len(start), -1, np.int64)
    return np.column_stack([start, start + duration, duration, unset, unset])


def _cut_lane(lane: int, first: int, last: int, pauses: Times) -> pl.DataFrame:
    """Stretches of one thread between its pauses; of overlapping pauses the first counts."""
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


UNSEEN_NS: Final = 20_000
"""Work later than this waited for something, perhaps for work that ended at most this long before."""


def queue_waits(trace: Trace, works: Works) -> Edges:
    """Edges from work to work of another queue on the device that waits for it; delays are not set yet.

    Waits recorded by the device are used. Otherwise a host call that makes one queue wait for another applies to the
    work that its thread launches next, which waits for the last work launched in each other queue.
    """
    if not len(works.start):
        return nothing(Edges)
    recorded = _recorded(trace)
    calls = trace.launches.with_row_index("launch").filter(pl.col("kind") == "queue_wait")
    told = trace.synchronisations.filter(pl.col("kind") == "queue_wait")["correlation"].drop_nulls()
    untold = calls.filter(~pl.col("correlation").is_in(told.implode()).fill_null(False))
    inferred = _inferred(trace, works, untold)
    source, target = np.concatenate([recorded[0], inferred[0]]), np.concatenate([recorded[1], inferred[1]])
    pairs = np.unique(np.column_stack([source, target]), axis=0)
    return Edges.without_delay(pairs[:, 0], pairs[:, 1])


def with_unseen_waits(trace: Trace, works: Works, waits: Edges, unexplained_ns: Durations) -> Edges:
    """Add waits that only the times show.

    Work that began late for no known reason, right after earlier-launched work in another queue of its device, waited
    for that work.
    """
    end = works.start + works.duration
    device = device_numbers(trace)
    late = np.flatnonzero((unexplained_ns > UNSEEN_NS) & (works.stretch >= 0))
    sources, targets = [waits.source], [waits.target]
    for number in np.unique(device[late]).tolist():
        its = np.flatnonzero(device == number)
        its = its[np.argsort(end[its], kind="stable")]
        mine = late[device[late] == number]
        position = np.searchsorted(end[its], works.start[mine], side="right") - 1
        source = its[np.maximum(position, 0)]
        fits = (position >= 0) & (works.start[mine] - end[source] <= UNSEEN_NS) & (source != mine)
        fits &= (works.queue[source] != works.queue[mine]) & (works.launched[source] <= works.launched[mine])
        sources.append(source[fits])
        targets.append(mine[fits])
    return Edges.without_delay(np.concatenate(sources), np.concatenate(targets))


def _recorded(trace: Trace) -> tuple[Rows, Rows]:
    """Pairs from the device's record: the last work before the event, and the first after the wait."""
    waits = trace.synchronisations.filter(
        (pl.col("kind") == "queue_wait")
        & pl.col("waited_queue").is_not_null()
        & pl.col("waited_correlation").is_not_null()
    )
    calls = trace.launches.filter(pl.col("correlation").is_not_null()).unique("correlation", keep="first")
    at = calls.select("correlation", call="start_ns")
    event = at.rename({"correlation": "waited_correlation", "call": "event"})
    waits = waits.select("device", "queue", "waited_queue", "correlation", "waited_correlation")
    waits = waits.join(at, on="correlation", how="inner").join(event, on="waited_correlation", how="inner")
    launched = (
        trace.device_work.with_row_index("work")
        .join(trace.launches.with_row_index("launch").select("launch", time="start_ns"), on="launch", how="inner")
        .select("work", "device", "queue", "time")
        .sort("time", "work")
    )
    before = waits.sort("event").join_asof(
        launched.rename({"queue": "waited_queue", "work": "source"}),
        left_on="event",
        right_on="time",
        by=["device", "waited_queue"],
        strategy="backward",
        check_sortedness=False,
    )
    both = before.sort("call").join_asof(
        launched.rename({"work": "target"}),
        left_on="call",
        right_on="time",
        by=["device", "queue"],
        strategy="forward",
        check_sortedness=False,
        suffix="_after",
    )
    both = both.filter(pl.col("source").is_not_null() & pl.col("target").is_not_null())
    return both["source"].to_numpy().astype(np.int64), both["target"].to_numpy().astype(np.int64)


def device_numbers(trace: Trace) -> Rows:
    """A number for the device of each work; 0 where a damaged file has lost it."""
    return trace.device_work["device"].rank("dense").fill_null(0).to_numpy().astype(np.int64)


def _inferred(trace: Trace, works: Works, calls: pl.DataFrame) -> tuple[Rows, Rows]:
    """For each call the work that its thread launched next, and the work launched last in each other queue."""
    none = np.zeros(0, np.int64)
    lane = row_numbers(trace.launches["lane"].gather(trace.device_work["launch"]))
    device = device_numbers(trace)
    known = np.flatnonzero(works.stretch >= 0)
    if calls.is_empty() or not len(known):
        return none, none
    order = known[np.argsort(works.launched[known], kind="stable")]
    call_lane, call_time = calls["lane"].cast(pl.Int64).to_numpy(), calls["start_ns"].to_numpy()
    target = np.full(len(call_time), -1, np.int64)
    for number in np.unique(call_lane).tolist():
        mine = order[lane[order] == number]
        its = np.flatnonzero(call_lane == number)
        position = np.searchsorted(works.launched[mine], call_time[its], side="left")
        inside = position < len(mine)
        target[its[inside]] = mine[position[inside]]
    has = target >= 0
    target, call_time = target[has], call_time[has]
    sources, targets = [none], [none]
    for queue in np.unique(works.queue).tolist():
        its = order[works.queue[order] == queue]
        if not len(its):
            continue
        position = np.searchsorted(works.launched[its], call_time, side="left") - 1
        fits = (position >= 0) & (works.queue[target] != queue)
        source = its[np.maximum(position, 0)]
        fits &= device[source] == device[target]
        sources.append(source[fits])
        targets.append(target[fits])
    return np.concatenate(sources), np.concatenate(targets)


_NEXT: Final = r"^enumerate\(DataLoader\)|DataLoader\.__next__|DataLoaderIter\.__next__"


def loader_calls(trace: Trace) -> pl.DataFrame:
    """Calls that return a batch, by time: columns lane, start_ns, duration_ns, name; nested calls are left out."""
    calls = trace.annotations.filter(
        (pl.col("kind") == "host") & pl.col("name").str.contains(_NEXT) & (pl.col("duration_ns") > 0)
    )
    calls = calls.select("lane", "start_ns", "duration_ns", "name").sort("lane", "start_ns")
    reached = (pl.col("start_ns") + pl.col("duration_ns")).cum_max().shift(1).over("lane")
    return calls.filter(reached.is_null() | (pl.col("start_ns") >= reached)).sort("start_ns")


EARLY_NS: Final = 10_000
"""Work launched this long before the end of its predecessor was held up by its queue alone."""
USUAL_LATENCY_NS: Final = 6_000
USUAL_GAP_NS: Final = 1_000
"""Gap for traces whose launches or queues do not show their own."""
LONGEST_USUAL_NS: Final = 100_000
"""A longer delay counts as waiting."""
SLOW_CALL_NS: Final = 50_000
NONE: Final = np.iinfo(np.int64).min


def build_graph(trace: Trace, *, activity: HostActivity | None = None) -> Graph:
    """Build the dependency graph of a trace; its replay reproduces the measured times."""
    activity = activity or host_activity(trace)
    bursts, beside = handovers(trace, activity), host_collectives(trace, activity)
    waits = concatenated(device_waits(trace), beside.waits(trace.device_work.height))
    stretches, boundaries = cut_stretches(activity, waits, bursts, loader_calls(trace))
    works = _works(trace, stretches)
    sources = queue_waits(trace, works)
    _, _, unexplained = _calibrated(works, sources)
    sources = with_unseen_waits(trace, works, sources, unexplained)
    works, waited, unexplained = _calibrated(works, sources)
    added = beside.works(stretches, len(works.start), int(works.queue.max(initial=-1)) + 1)
    works = concatenated(works, added)
    unexplained = np.concatenate([unexplained, np.zeros(len(added.start), np.int64)])
    host, dropped = _host_wait_edges(works, stretches, waits, boundaries)
    graph = Graph(
        stretches=stretches,
        works=works,
        queue_waits=waited,
        host_waits=host,
        handovers=_handover_edges(stretches, bursts),
        rendezvous=np.full(len(works.start), -1, np.int64),
        on_host=beside.row,
        unexplained_ns=unexplained,
        dropped=dropped,
        host_scale=nothing(HostScale),
        work_scale=np.ones(len(works.start)),
    )
    return _in_order(graph)


def _in_order(graph: Graph) -> Graph:
    """Drop dependencies that go backwards in time; simultaneous ones may form cycles."""
    stretch, work = graph.places
    waits, hosts, hands, works = graph.queue_waits, graph.host_waits, graph.handovers, graph.works
    queued = (works.previous >= 0) & (work[works.previous] < work) if len(work) else works.previous >= 0
    kept = [
        work[waits.source] < work[waits.target],
        work[hosts.source] < stretch[hosts.target],
        stretch[hands.source] < stretch[hands.target],
    ]
    stretches = graph.stretches
    lost = np.union1d(hosts.target[~kept[1]], hands.target[~kept[2]])
    own = stretches.own_ns.copy()
    own[lost] = np.where(stretches.previous[lost] >= 0, (stretches.start - stretches.end[stretches.previous])[lost], 0)
    measured = (works.launched != NONE) & (works.stretch >= 0)
    loose = np.union1d(np.flatnonzero((works.previous >= 0) & ~queued), waits.target[~kept[0]])
    latency = works.latency_ns.copy()
    latency[loose] = np.where(measured[loose], (works.start - works.launched)[loose], latency[loose])
    return replace(
        graph,
        stretches=replace(stretches, own_ns=own),
        works=replace(works, previous=np.where(queued, works.previous, -1), latency_ns=latency),
        queue_waits=waits.select(kept[0]),
        host_waits=hosts.select(kept[1]),
        handovers=hands.select(kept[2]),
    )


def _works(trace: Trace, stretches: Stretches) -> Works:
    """Device work with launches and queues; delays are not set yet."""
    calls = trace.launches.select(
        called="start_ns", returned=pl.col("start_ns") + pl.col("duration_ns"), calling="lane"
    ).with_row_index("launch")
    work = trace.device_work.select("start_ns", "duration_ns", "lane", "device", "queue", "launch")
    # A long call that ended before its work began submitted it at its end: it loaded code, for example.
    slow = (pl.col("returned") - pl.col("called") > SLOW_CALL_NS) & (pl.col("returned") <= pl.col("start_ns"))
    work = work.join(calls, on="launch", how="left", maintain_order="left").with_columns(
        launched=pl.when(slow).then("returned").otherwise("called")
    )
    queue = work.select(pl.struct("device", "queue").rank("dense"))["device"].to_numpy().astype(np.int64)
    start, duration = work["start_ns"].to_numpy(), work["duration_ns"].to_numpy()
    order = np.lexsort((start + duration, start, queue))
    launched, lane = _launches(work, order, queue, start)
    unknown = np.zeros(len(start), np.int64)
    previous = previous_in(queue, start, start + duration)
    return Works(start, duration, queue, stretches.at(lane, launched), launched, unknown, previous, unknown)


def _launches(work: pl.DataFrame, order: Rows, queue: Rows, start: Times) -> tuple[Times, npt.NDArray[np.int32]]:
    """Launch time and launching thread of each work.

    Work without a recorded launch, between works with one, counts as launched before the next one in its queue.
    """
    told = (
        pl.DataFrame({"queue": queue, "start": start, "launched": work["launched"], "lane": work["calling"]})[order]
        .with_columns(
            following=pl.col("launched").backward_fill().over("queue"),
            its_lane=pl.col("lane").backward_fill().over("queue"),
            preceding=pl.col("launched").forward_fill().over("queue"),
        )
        .with_columns(between=pl.col("preceding").is_not_null() & pl.col("following").is_not_null())
    )
    guess = pl.max_horizontal(pl.min_horizontal("following", pl.col("start") - USUAL_LATENCY_NS), "preceding")
    told = told.select(
        launched=pl.coalesce("launched", pl.when("between").then(guess)),
        lane=pl.coalesce("lane", pl.when("between").then(pl.col("its_lane"))),
    )
    launched, lane = np.empty(len(order), np.int64), np.empty(len(order), np.int32)
    launched[order] = told["launched"].fill_null(NONE).to_numpy()
    lane[order] = told["lane"].fill_null(-1).to_numpy()
    return launched, lane


def _calibrated(works: Works, waits: Edges) -> tuple[Works, Edges, Durations]:
    """Delays that make the replay reproduce the measured starts, and the unexplained part of each start.

    The last dependency to finish explains a start. The other delays are the usual ones, or shorter where the start came
    sooner.
    """
    start, end = works.start, works.start + works.duration
    known, has_previous = works.stretch >= 0, works.previous >= 0
    free = np.where(has_previous, end[works.previous] if len(end) else end, NONE)
    launched = np.where(known, works.launched, NONE)
    waits = waits.select(end[waits.source] <= start[waits.target])
    awaited = np.full(len(start), NONE)
    np.maximum.at(awaited, waits.target, end[waits.source])
    early = known & has_previous & (launched + EARLY_NS < free) & (awaited < free)
    idle = known & (launched > free) & (awaited < launched)
    gap = _usual(start[early] - free[early], (start - free)[has_previous], USUAL_GAP_NS)
    latency = _usual(start[idle] - launched[idle], (start - launched)[known], USUAL_LATENCY_NS)
    ready = np.column_stack(
        [
            np.where(known, launched + latency, NONE),
            np.where(has_previous, free + gap, NONE),
            np.where(awaited > NONE, awaited + gap, NONE),
        ]
    )
    last = np.argmax(ready, axis=1)
    some = known | has_previous | (awaited > NONE)
    latency_ns = np.where(known, np.minimum(start - launched, np.where(last == 0, np.iinfo(np.int64).max, latency)), 0)
    gap_ns = np.where(has_previous, np.minimum(start - free, np.where(last == 1, np.iinfo(np.int64).max, gap)), 0)
    measured = start[waits.target] - end[waits.source]
    decides = (last[waits.target] == 2) & (end[waits.source] == awaited[waits.target])
    delay = np.where(decides, measured, np.minimum(measured, gap))
    unexplained = np.where(some, np.maximum(start - ready.max(axis=1, initial=NONE), 0), 0)
    return (
        Works(start, works.duration, works.queue, works.stretch, launched, latency_ns, works.previous, gap_ns),
        Edges(waits.source, waits.target, delay, waits.time),
        unexplained,
    )


def _usual(decided: Durations, observed: Durations, most: int) -> int:
    """Median of the delays that determined a start, else the shortest observed, at most the usual one."""
    decided = decided[decided <= LONGEST_USUAL_NS]
    if len(decided):
        return max(int(np.median(decided)), 0)
    return max(min(int(observed.min()), most), 0) if len(observed) else most


def _host_wait_edges(works: Works, stretches: Stretches, waits: Waits, boundaries: Rows) -> tuple[Edges, int]:
    """Edges from work to the stretch after the wait for it, and the number of waits that measured times contradict."""
    kept = boundaries >= 0
    source, target = waits.work[kept], boundaries[kept]
    end = works.start[source] + works.duration[source]
    measured = stretches.start[target] - end
    possible = measured >= 0
    before = stretches.end[stretches.previous[target]]
    decides = before + stretches.own_ns[target] < stretches.start[target]
    delay = np.where(decides, measured, np.minimum(measured, RETURN_NS))
    edges = Edges(source, target, delay, np.zeros(len(source), np.int64))
    return edges.select(possible), int((~possible).sum())


def _handover_edges(stretches: Stretches, bursts: Handovers) -> Edges:
    """Edges from times on a thread to stretches of others that began then, and back where the giver waited."""
    given = bursts.giver >= 0
    start_of_burst = _starting_at(stretches, bursts.lane, bursts.start)
    forth = _edges(stretches, bursts.giver[given], bursts.given[given], start_of_burst[given])
    waited = given & (bursts.resumed >= 0)
    resumed = _starting_at(stretches, bursts.giver, np.where(waited, bursts.resumed, NONE))
    back = _edges(stretches, bursts.lane[waited], bursts.end[waited], resumed[waited])
    return forth.with_edges(back)


def _edges(stretches: Stretches, lanes: npt.NDArray[np.int32], times: Times, target: Rows) -> Edges:
    source = stretches.at(lanes, times)
    some = (source >= 0) & (target >= 0)
    source, target, times = source[some], target[some], times[some]
    at = np.clip(times, stretches.start[source], stretches.end[source])
    delay = stretches.start[target] - at
    edges = Edges(source, target, delay, at)
    return edges.select((delay >= 0) & (stretches.start[source] <= stretches.start[target]) & (source != target))


def _starting_at(stretches: Stretches, lanes: npt.NDArray[np.int32], times: Times) -> Rows:
    found = stretches.at(lanes, times)
    index = np.maximum(found, 0)
    exact = (found >= 0) & (stretches.start[index] == times) if len(stretches.start) else found >= 0
    return np.where(exact, found, -1)
