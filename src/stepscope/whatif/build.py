"""Building the dependency graph of a trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.host import HostActivity, host_activity
from stepscope.trace import Trace
from stepscope.trace.intervals import Times
from stepscope.trace.nesting import Rows
from stepscope.whatif.arrays import concatenated
from stepscope.whatif.graph import Durations, Edges, Graph, Stretches, Works
from stepscope.whatif.host_collectives import host_collectives
from stepscope.whatif.host_scale import HostScale
from stepscope.whatif.host_waits import RETURN_NS, Handovers, Waits, device_waits, handovers
from stepscope.whatif.loader_calls import loader_calls
from stepscope.whatif.queue_waits import queue_waits, with_unseen_waits
from stepscope.whatif.stretches import cut_stretches

EARLY_NS: Final = 10_000
"""Work launched so long before the one ahead of it ended was held up by its queue alone."""
USUAL_LATENCY_NS: Final = 6_000
USUAL_GAP_NS: Final = 1_000
"""Used where a trace has no launch, or no queue, that shows its own."""
LONGEST_USUAL_NS: Final = 100_000
"""A longer delay is waiting for something."""
SLOW_CALL_NS: Final = 50_000
NONE: Final = np.iinfo(np.int64).min


def build_graph(trace: Trace, *, activity: HostActivity | None = None) -> Graph:
    """What waited for what in a trace; its replay gives back the measured times."""
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
        host_scale=HostScale.none(),
        work_scale=np.ones(len(works.start)),
    )
    return _in_order(graph)


def _in_order(graph: Graph) -> Graph:
    """The graph without dependencies on what comes later; of what happens at once, some come in circles."""
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
    """The device's work with its launches and queues; delays are still unknown."""
    calls = trace.launches.select(
        called="start_ns", returned=pl.col("start_ns") + pl.col("duration_ns"), calling="lane"
    ).with_row_index("launch")
    work = trace.device_work.select("start_ns", "duration_ns", "lane", "device", "queue", "launch")
    # A long call that was over when its work began gave it to the device in the end: it loaded code, say.
    slow = (pl.col("returned") - pl.col("called") > SLOW_CALL_NS) & (pl.col("returned") <= pl.col("start_ns"))
    work = work.join(calls, on="launch", how="left", maintain_order="left").with_columns(
        launched=pl.when(slow).then("returned").otherwise("called")
    )
    queue = work.select(pl.struct("device", "queue").rank("dense"))["device"].to_numpy().astype(np.int64)
    start, duration = work["start_ns"].to_numpy(), work["duration_ns"].to_numpy()
    order = np.lexsort((start + duration, start, queue))
    previous = np.full(len(order), -1, np.int64)
    same = queue[order][1:] == queue[order][:-1]
    previous[order[1:][same]] = order[:-1][same]
    launched, lane = _launches(work, order, queue, start)
    stretch = stretches.at(lane, launched)
    unknown = np.zeros(len(start), np.int64)
    return Works(start, duration, queue, stretch, launched, unknown, previous, unknown)


def _launches(work: pl.DataFrame, order: Rows, queue: Rows, start: Times) -> tuple[Times, npt.NDArray[np.int32]]:
    """When and by which thread each work was launched.

    Work whose launch is not in the trace, between some whose launch is, was launched before the next one in its queue.
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
    """Delays with which the replay gives the measured starts; and by how much each start stays unexplained.

    Of what a work waited for, that which came last explains its start. The others' delays are the usual ones, or
    shorter where the start came sooner.
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
    """The median of the delays that decided a start, else the shortest one observed, but no more than usual."""
    decided = decided[decided <= LONGEST_USUAL_NS]
    if len(decided):
        return max(int(np.median(decided)), 0)
    return max(min(int(observed.min()), most), 0) if len(observed) else most


def _host_wait_edges(works: Works, stretches: Stretches, waits: Waits, boundaries: Rows) -> tuple[Edges, int]:
    """Work -> the stretch after the wait for it; and how many waits the measured times contradict."""
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
    """Moments of a thread -> the stretches of others that began then, and the other way round where it waited."""
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
