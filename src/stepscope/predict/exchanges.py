"""Messages between ranks in a step, as work in the dependency graph whose length can be set.

For a rank recorded among several these are its own collectives; for a single device, the buckets that data-parallel
training would send, each as soon as the last of its gradients is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.communication import bus_bytes, collectives, kind_of
from stepscope.errors import UsageError
from stepscope.machine.devices import DevicePeaks
from stepscope.predict.buckets import Buckets, gradients_of, place_of_step
from stepscope.predict.limits import TABLE_ERROR, Link, fitted_link, link_of
from stepscope.predict.work_times import WorkTimes
from stepscope.trace.nesting import Rows
from stepscope.trace.window import IntervalSet, union
from stepscope.whatif.experiment import Experiment, Ranks
from stepscope.whatif.graph import Edges, Graph, Works, concatenated, nothing

Numbers = npt.NDArray[np.float64]
BESIDE: Final = 0.9
ALONE: Final = (
    0.01  # least share of a kernel's time beside messages to count as beside them, and most to count as alone
)
LEAST_CALLS: Final = 2
LEAST_KINDS: Final = 10  # least calls of a kernel on either side, and least kernels, for a comparison


def slowdown_beside_messages(experiment: Experiment) -> float | None:
    """Slowdown of kernels that run beside messages, 1 or more; None where the trace does not show it.

    Calls of one kernel are compared with one another: same name, grid, block and shared memory. With b and a the
    medians of a kernel's calls beside messages and alone, and n the number of those beside, it is the sum of n b over
    the sum of n a.
    """
    if experiment.device is None:
        return None
    table = experiment.trace.device_work.filter(pl.col("device") == experiment.device)
    works = table.filter((pl.col("kind") == "compute") & pl.col("grid").is_not_null() & (pl.col("duration_ns") > 0))
    sent = table.filter(kind="communication")
    messages = union(sent["start_ns"].to_numpy(), (sent["start_ns"] + sent["duration_ns"]).to_numpy())
    if works.is_empty() or not len(messages.starts):
        return None
    share = share_beside(works["start_ns"].to_numpy(), works["duration_ns"].to_numpy(), messages)
    works = works.with_columns(share=share)
    beside = pl.col("duration_ns").filter(pl.col("share") >= BESIDE)
    alone = pl.col("duration_ns").filter(pl.col("share") <= ALONE)
    kernels = works.group_by("name", "grid", "block", "shared_memory_bytes").agg(
        beside=beside.median(), calls=beside.len(), alone=alone.median(), others=alone.len()
    )
    kernels = kernels.filter((pl.col("calls") >= LEAST_CALLS) & (pl.col("others") >= LEAST_CALLS))
    if kernels.height < LEAST_KINDS:
        return None
    calls = kernels["calls"].to_numpy()
    took, takes = (float(kernels[name].to_numpy() @ calls) for name in ("beside", "alone"))
    return max(took / takes, 1.0)


def share_beside(starts: Rows, lengths: Rows, messages: IntervalSet) -> Numbers:
    """Share of each interval that messages cover, 0 to 1; shape (n,)."""
    shares: Numbers = messages.overlap_of(starts, starts + lengths) / np.maximum(lengths, 1)
    return shares


KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter")
"""Collectives that data parallelism needs; others, such as all-to-all, keep their recorded time."""
_NONE: Final = np.iinfo(np.int64).min


class Exchange(Protocol):
    """Messages of the steps, whose transfers can be given any length.

    Attributes:
        experiment: the experiment whose graph has the messages.
        link: link that carried them; None if unknown or without messages.
        ranks: number of devices among which they were recorded; 1 if they were not recorded.
    """

    @property
    def experiment(self) -> Experiment: ...
    @property
    def link(self) -> Link | None: ...
    @property
    def ranks(self) -> int: ...

    def transfers_ns(self, link: Link | None, devices: int) -> Numbers:
        """Duration of each message among this many devices; over the recorded link if None."""

    def graph(self, base: Graph, transfers_ns: Numbers) -> Graph:
        """Graph with messages of these lengths; without messages if all are 0."""


@dataclass(frozen=True)
class RecordedExchange:
    """Collectives of a rank that was recorded among others.

    Attributes:
        table: columns row (of the graph's works), kind, bytes (of the whole message, null where unknown), measured_ns,
            transfer_ns (without waiting for the others).
    """

    experiment: Experiment
    ranks: int
    table: pl.DataFrame

    @cached_property
    def link(self) -> Link | None:
        """Link fitted to the messages of known size; None where no size is known."""
        known = self.table.filter(pl.col("bytes").is_not_null() & (pl.col("transfer_ns") > 0))
        if known.is_empty():
            return None
        kinds, sizes, times = (known[name].to_list() for name in ("kind", "bytes", "transfer_ns"))
        return fitted_link("as recorded", kinds, sizes, times, self.ranks)

    def transfers_ns(self, link: Link | None, devices: int) -> Numbers:
        """Duration of each message among this many devices; over the recorded link if None.

        Raises:
            UsageError: a different link is requested and message sizes are unknown.
        """
        if devices < 2:
            return np.zeros(self.table.height)
        sized = self.table["bytes"].null_count() == 0
        if link is not None and not sized:
            raise UsageError(
                "the trace does not show the size of its messages, so their time over another link is unknown: record "
                "shapes"
            )
        known = list(self.table.select("kind", "bytes", "transfer_ns").iter_rows())
        if link is not None:
            return np.array([link.transfer_ns(kind, size, devices) for kind, size, _ in known])
        own = self.link if sized else None
        if own is None:
            factors = [bus_bytes(kind, 1, devices) / bus_bytes(kind, 1, self.ranks) for kind, _, _ in known]
        else:
            factors = [
                own.transfer_ns(kind, size, devices) / max(own.transfer_ns(kind, size, self.ranks), 1e-9)
                for kind, size, _ in known
            ]
        transfers: Numbers = np.array(factors) * self.table["transfer_ns"].to_numpy()
        return transfers

    def by_link_of(self, device: DevicePeaks | None) -> RecordedExchange:
        """Limit transfers to the time of their bytes over the device's own link: the rest is waiting.

        Messages of unknown size, or without such a link, keep the quickest recorded time.
        """
        link = None if device is None else link_of(device)
        if link is None:
            return self
        shortest = [
            quickest if size is None else min(quickest, link.transfer_ns(kind, size, self.ranks))
            for kind, size, quickest in self.table.select("kind", "bytes", "transfer_ns").iter_rows()
        ]
        return replace(self, table=self.table.with_columns(transfer_ns=pl.Series(shortest, dtype=pl.Float64)))

    @cached_property
    def slowdown(self) -> float | None:
        """Slowdown of kernels beside these messages, as in `slowdown_beside_messages`."""
        return slowdown_beside_messages(self.experiment)

    def _without_sharing(self, base: Graph) -> Graph:
        """Graph in which computation beside these messages takes as long as alone."""
        if self.slowdown is None:
            return base
        works, rows = base.works, self.table["row"].to_numpy()
        messages = union(works.start[rows], works.start[rows] + works.duration[rows])
        table = self.experiment.trace.device_work
        computing = np.flatnonzero((table["kind"] == "compute").fill_null(False).to_numpy())
        share = share_beside(works.start[computing], works.duration[computing], messages)
        return base.with_work(computing, 1 / (1 + share * (self.slowdown - 1)))

    def graph(self, base: Graph, transfers_ns: Numbers) -> Graph:
        """Graph with messages of these lengths; a rank waits for other ranks, if any, as recorded."""
        rows = self.table["row"].to_numpy()
        if not transfers_ns.any():
            return self._without_sharing(base).with_work(rows, 0.0)
        measured, transfer = self.table["measured_ns"].to_numpy(), self.table["transfer_ns"].to_numpy()
        waiting = np.where(transfers_ns > 0, np.maximum(measured - transfer, 0), 0)
        return base.with_work(rows, (waiting + transfers_ns) / np.maximum(measured, 1))


@dataclass(frozen=True)
class AddedExchange:
    """Buckets that a single device would send if it were one of several."""

    experiment: Experiment
    buckets: Buckets  # in sending order
    accumulated: int = 1  # backward passes per step; the gradients of the last one are sent
    at_once: bool = False  # whether only the sum of a step's gradients is known, sent when the last one is ready
    link: Link | None = None
    ranks: int = 1

    def transfers_ns(self, link: Link | None, devices: int) -> Numbers:
        """Duration of each message among this many devices; the link must be given."""
        if link is None:
            raise UsageError(
                "nothing was exchanged in this trace: name the link that joins the devices, such as nvlink4"
            )
        return np.array([link.transfer_ns("all_reduce", size, devices) for size in self.buckets.bytes.tolist()])

    def graph(self, base: Graph, transfers_ns: Numbers) -> Graph:
        return with_buckets(base, self.experiment, self.buckets, transfers_ns) if transfers_ns.any() else base


def recorded_exchange(experiment: Experiment, others: Sequence[Experiment] = ()) -> RecordedExchange | None:
    """Collectives of the complete steps; None if the trace has none, or only one rank.

    The time of a collective without waiting comes from the other ranks' traces, or else from the quickest collective at
    its position in the steps.

    Args:
        others: the same steps of other ranks.
    """
    trace = experiment.trace
    found = collectives(trace, device=experiment.device).filter(pl.col("kind").is_in(KINDS))
    found = found.with_columns(pl.col("ranks").fill_null(pl.lit(trace.metadata.world_size, pl.Int64)))
    if found["ranks"].null_count() == found.height or found["ranks"].max() == 1:
        return None
    ranks = int(found["ranks"].drop_nulls().mode().sort()[-1])
    if found["launch"].null_count() < found.height:  # work launched before the recording belongs to none of its steps
        found = found.filter(pl.col("launch").is_not_null())
    launched = trace.launches["start_ns"].gather(found["launch"])
    found = found.with_columns(given=pl.coalesce(launched, "start_ns"))  # the device may be a step behind
    found = found.with_columns(pl.Series("step", place_of_step(experiment, found["given"].to_numpy())))
    found = _with_sizes(experiment, found, ranks)
    if not found.is_empty() and not found["on_device"][0]:
        found = _host_works(experiment, found)
    found = found.filter((pl.col("step") >= 0) & (pl.col("ranks") == ranks) & (pl.col("duration_ns") > 0))
    if found.is_empty() or ranks < 2:
        return None
    found = found.with_columns(place=pl.int_range(pl.len()).over("step", "kind"))
    same = ["kind", pl.coalesce(pl.col("bytes"), -1 - pl.col("place"))]
    found = found.with_columns(transfer_ns=pl.col("duration_ns").min().over(same))
    found = _without_waiting(experiment, others, found)
    return RecordedExchange(
        experiment, ranks, found.select("row", "kind", "bytes", "transfer_ns", measured_ns="duration_ns")
    )


def _without_waiting(experiment: Experiment, others: Sequence[Experiment], found: pl.DataFrame) -> pl.DataFrame:
    if not others:
        return found
    rows, transfer = Ranks.of([experiment, *others]).meetings
    told = pl.DataFrame({"row": rows[0], "told": transfer[0]}).unique("row")
    joined = found.join(told, on="row", how="left", maintain_order="left")
    return joined.with_columns(transfer_ns=pl.min_horizontal(pl.coalesce("told", "transfer_ns"), "duration_ns"))


def _with_sizes(experiment: Experiment, found: pl.DataFrame, ranks: int) -> pl.DataFrame:
    """Add the bytes of whole messages; an all-reduce without a size gets the gradients since the previous one."""
    trace = experiment.trace
    if found["on_device"].any():
        told = trace.device_work["message_elements"].gather(found["row"]).is_not_null()
        part = (pl.col("kind") == "all_gather") & told  # the profiler records each rank's part
        found = found.with_columns(bytes=pl.when(part).then(pl.col("bytes") * ranks).otherwise("bytes"))
    if not found["bytes"].null_count():
        return found
    try:
        gradients = gradients_of(experiment)
    except UsageError:
        return found
    selected = np.flatnonzero((found["kind"] == "all_reduce").to_numpy() & (found["step"] >= 0).to_numpy())
    given = found["given"].to_numpy()
    selected = selected[np.argsort(given[selected], kind="stable")]
    if not len(selected):
        return found
    place = np.searchsorted(given[selected], gradients.begin, side="left")
    same = (place < len(selected)) & (
        found["step"].to_numpy()[selected[np.minimum(place, len(selected) - 1)]] == gradients.step
    )
    size = np.bincount(place[same], weights=gradients.bytes[same], minlength=len(selected))
    bytes_ = np.full(found.height, -1, np.int64)
    bytes_[selected] = np.where(size > 0, size, -1).astype(np.int64)
    sizes = pl.Series(bytes_)
    return found.with_columns(bytes=pl.coalesce("bytes", pl.when(sizes > 0).then(sizes)))


def _host_works(experiment: Experiment, found: pl.DataFrame) -> pl.DataFrame:
    """Host-run collectives with the indices and lengths of their works; empty where they do not match."""
    graph, first = experiment.graph, experiment.trace.device_work.height
    kinds = [kind_of(name) for name in experiment.trace.annotations["name"].gather(graph.on_host)]
    works = pl.DataFrame({"kind": kinds}, schema={"kind": pl.String}).with_columns(
        row=first + pl.int_range(pl.len()),
        duration_ns=pl.Series(graph.works.duration[first : first + len(kinds)], dtype=pl.Int64),
    )
    place = {"order": pl.int_range(pl.len()).over("kind"), "count": pl.len().over("kind")}
    numbered = found.drop("row", "duration_ns").with_columns(**place)
    on = ["kind", "order", "count"]
    return numbered.join(works.with_columns(**place), on=on, how="inner", maintain_order="left")


def with_buckets(base: Graph, experiment: Experiment, buckets: Buckets, transfers_ns: Numbers) -> Graph:
    """Graph in which each bucket is sent after its gradients and the previous bucket, and before the optimizer.

    On a device a gradient is ready when all work launched before it is done, and work launched after the step's last
    gradient waits for all buckets. Without a device the main thread waits, at the point after its last gradient.
    """
    count, first = len(buckets.ready), len(base.works.start)
    stretch = base.stretches.at(buckets.lane, buckets.ready - 1)
    source, target = _neighbours(base, experiment, buckets)
    known = source >= 0
    duration = np.where(known, base.works.duration[np.maximum(source, 0)] if first else 0, 0) + 1 + np.arange(count)
    begin = base.stretches.start[np.maximum(stretch, 0)]
    start = np.where(known, base.works.start[np.maximum(source, 0)] if first else 0, begin)
    added = Works(
        start=np.maximum.accumulate(start),
        duration=duration,
        queue=np.full(count, int(base.works.queue.max(initial=-1)) + 1),
        stretch=stretch,
        launched=np.where(stretch >= 0, buckets.ready, _NONE),
        latency_ns=np.zeros(count, np.int64),
        previous=np.concatenate([[-1], first + np.arange(count - 1)]),
        gap_ns=np.zeros(count, np.int64),
    )
    number = first + np.arange(count)
    last = np.append(buckets.step[1:] != buckets.step[:-1], True)
    after, waiting = number[last], target[last]
    graph = replace(
        base,
        works=concatenated(base.works, added),
        rendezvous=np.concatenate([base.rendezvous, np.full(count, -1, np.int64)]),
        unexplained_ns=np.concatenate([base.unexplained_ns, np.zeros(count, np.int64)]),
        work_scale=np.concatenate([base.work_scale, transfers_ns / duration]),
    )
    if experiment.device is None:
        return _with_waits(graph, nothing(Edges), _edges(after, waiting))
    return _with_waits(graph, _edges(source, number).with_edges(_edges(after, waiting)), nothing(Edges))


def _edges(source: Rows, target: Rows) -> Edges:
    some = (source >= 0) & (target >= 0)
    nothing = np.zeros(int(some.sum()), np.int64)
    return Edges(source[some], target[some], nothing, nothing)


def _with_waits(graph: Graph, queue: Edges, host: Edges) -> Graph:
    """Add these waits, except those that would go backwards in time, where clocks disagree."""
    stretch, work = graph.places
    queue = queue.select(work[queue.source] < work[queue.target])
    host = host.select(work[host.source] < stretch[host.target])
    return replace(graph, queue_waits=graph.queue_waits.with_edges(queue), host_waits=graph.host_waits.with_edges(host))


def _neighbours(graph: Graph, experiment: Experiment, buckets: Buckets) -> tuple[Rows, Rows]:
    """For each bucket the work that makes its last gradient, and the first work that waits for the buckets; or -1.

    The latter is device work, or without a device the host stretch that begins then.
    """
    none = np.full(len(buckets.ready), -1, np.int64)
    ends = np.zeros(int(buckets.step.max()) + 1, np.int64)
    np.maximum.at(ends, buckets.step, buckets.ready)
    end = ends[buckets.step]
    if experiment.device is None:
        main = np.flatnonzero(graph.stretches.lane == experiment.lane)
        following = np.searchsorted(graph.stretches.start[main], end, side="left")
        if not len(main):
            return none, none
        return none, np.where(following < len(main), main[np.minimum(following, len(main) - 1)], -1)
    table = experiment.trace.device_work
    selected = ((table["device"] == experiment.device) & (table["kind"] != "communication")).fill_null(False).to_numpy()
    selected &= graph.works.launched[: table.height] != _NONE
    rows = np.flatnonzero(selected)
    if not len(rows):
        return none, none
    queue = graph.works.queue[rows]
    rows = rows[queue == np.bincount(queue).argmax()]  # the stream that computes; others may copy batches
    rows = rows[np.argsort(graph.works.launched[rows], kind="stable")]
    launched = graph.works.launched[rows]
    before = np.searchsorted(launched, buckets.ready, side="right") - 1
    after = np.searchsorted(launched, end, side="right")
    source = np.where(before >= 0, rows[np.maximum(before, 0)], -1)
    return source, np.where(after < len(rows), rows[np.minimum(after, len(rows) - 1)], -1)


def with_transfers(times: WorkTimes, exchange: RecordedExchange, source: DevicePeaks, target: DevicePeaks) -> WorkTimes:
    """Predict collectives over the target's link, instead of scaling all their time by link bandwidth.

    Only works with basis "link" are changed.
    """
    rows = exchange.table["row"].to_numpy()
    there = rows < len(times)
    there[there] = times.basis[rows[there]] == "link"
    if not there.any():
        return times
    before, after = (each[there] for each in _transfers(exchange, source, target))
    rows = rows[there]
    share = before.sum() / times.measured_ns[rows].sum()
    others = np.setdiff1d(np.flatnonzero(times.basis == "link"), rows)
    data, longer = times.measured_ns[others] * share, after.sum() / before.sum()
    rows, before, after = (np.concatenate(pair) for pair in ((rows, others), (before, data), (after, data * longer)))
    measured = times.measured_ns[rows]
    ns, low, high = times.ns.copy(), times.low_ns.copy(), times.high_ns.copy()
    ns[rows] = measured - before + after
    low[rows] = np.minimum(after * (1 - TABLE_ERROR), ns[rows])
    high[rows] = np.maximum(measured, ns[rows] + after * TABLE_ERROR)
    return replace(times, ns=ns, low_ns=low, high_ns=high)


def _transfers(exchange: RecordedExchange, source: DevicePeaks, target: DevicePeaks) -> tuple[Numbers, Numbers]:
    links = link_of(source), link_of(target)
    slower = (source.peer_link_bytes_s or 1.0) / (target.peer_link_bytes_s or 1.0)
    factors = [
        slower
        if size is None or links[0] is None or links[1] is None
        else links[1].transfer_ns(kind, size, exchange.ranks) / links[0].transfer_ns(kind, size, exchange.ranks)
        for kind, size in exchange.table.select("kind", "bytes").iter_rows()
    ]
    before = exchange.by_link_of(source).table["transfer_ns"].to_numpy().astype(np.float64)
    return before, before * np.array(factors)
