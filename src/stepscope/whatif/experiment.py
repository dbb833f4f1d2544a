"""A trace whose steps can be replayed with changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.attribution import Attribution
from stepscope.analysis.communication import collectives, kind_of
from stepscope.analysis.device_time import busy_intervals
from stepscope.analysis.step_view import StepView
from stepscope.threads import cached_property
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows
from stepscope.trace.window import Times, union
from stepscope.whatif.build import build_graph
from stepscope.whatif.graph import Edges, Graph, Record, Replay, concatenated, replay
from stepscope.whatif.host_waits import silent_wait_ns

MOST_UNEXPLAINED: Final = 0.1
"""Share of unexplained waiting in the steps' time above which a replay is not reliable."""


@dataclass(frozen=True, slots=True)
class Outcome:
    step_ns: float  # mean step with the change
    measured_step_ns: float  # mean step without it
    step_count: int  # number of steps; 1 where the trace has none and the whole span counts as one
    replay: Replay

    @property
    def saving_ns(self) -> float:
        """Saving per step; negative where the step becomes longer."""
        return self.measured_step_ns - self.step_ns

    @property
    def saving_share(self) -> float:
        """Saving as a share of the measured step."""
        return self.saving_ns / self.measured_step_ns if self.measured_step_ns else 0.0


class Experiment:
    """One trace, its dependency graph, and the span to predict: its complete steps.

    Args:
        recorded: the trace, or a view that selects the device.

    Attributes:
        view: the trace's device, thread, steps and span.
        steps: the complete steps.
        device: the device to evaluate; None where the trace has none.
        lane: thread that drives the steps; -1 if unknown.
        span: the time to evaluate.
        step_count: number of complete steps; 1 where there are none.
    """

    def __init__(self, recorded: Trace | StepView) -> None:
        view = recorded if isinstance(recorded, StepView) else StepView(recorded)
        self.view = view
        self.trace = view.trace
        self.activity = view.activity
        self.steps = view.complete_steps
        self.device = view.device
        self.lane = -1 if view.lane is None else view.lane
        self.span = view.span
        self.step_count = view.step_count

    @property
    def attribution(self) -> Attribution:
        return self.view.attribution

    @cached_property
    def graph(self) -> Graph:
        return build_graph(self.trace, activity=self.activity)

    @cached_property
    def works(self) -> Rows:
        """Rows of the device work of the span."""
        return self.view.work["row"].to_numpy().astype(np.int64)

    def length_ns(self, done: Replay) -> int:
        """Length of the span in a replay: on the host, or on a device that takes longer for its work."""
        starts, ends = done.work_start[self.works], done.work_end[self.works]
        host_start, host_end = self.host_ends(done)
        last = max(host_end, int(ends.max(initial=host_end)))
        # Work may begin earlier, but what then precedes the steps is not part of them.
        soonest = min(host_start, int(self.graph.works.start[self.works].min(initial=last)))
        first = max(int(starts.min(initial=last)), soonest)
        if not self.steps.height:
            return max(last - min(first, host_start), 1)
        first = max(first, min(self.view.backlog_end_ns, last))
        return max(host_end - host_start, last - first, 1)

    def host_ends(self, done: Replay) -> tuple[int, int]:
        """Start and end of the span on the host in a replay; on the device if nothing else marks it."""
        if self.device is not None and self.view.is_on_device:
            return int(done.work_start[self.works].min()), int(done.work_end[self.works].max())
        lanes = np.full(2, self.lane, np.int32)
        start, end = done.host_times(lanes, np.array([self.span.start_ns, self.span.end_ns], np.int64)).tolist()
        return start, end

    @cached_property
    def measured(self) -> Replay:
        """The replay without a change."""
        return replay(self.graph)

    @cached_property
    def measured_ns(self) -> int:
        """Replayed length of the span without a change, nanoseconds."""
        return self.length_ns(self.measured)

    def run(self, graph: Graph) -> Outcome:
        """Replay a changed graph."""
        done = replay(self.from_span_on(graph))
        count = self.step_count
        return Outcome(self.length_ns(done) / count, self.measured_ns / count, count, done)

    def from_span_on(self, graph: Graph) -> Graph:
        """Apply a graph's changes only from the span's start, so that both replays start in the same state."""
        base, begin = self.graph, self.span.start_ns
        stretch, work = base.stretches.start < begin, base.works.start < begin

        def edges(measured: Edges, changed: Edges, early: npt.NDArray[np.bool_]) -> Edges:
            return measured.select(early[measured.target]).with_edges(changed.select(~early[changed.target]))

        early, begun = np.zeros((2, len(graph.works.start)), np.bool_)  # a change may add work
        early[: len(work)] = work
        begun[: len(work)] = base.works.start <= begin  # work at the start of the span, which may not begin earlier
        at = np.flatnonzero(begun)
        latency, gap = graph.works.latency_ns.copy(), graph.works.gap_ns.copy()
        latency[at], gap[at] = base.works.latency_ns[at], base.works.gap_ns[at]
        own = np.where(stretch, base.stretches.own_ns, graph.stretches.own_ns)
        return replace(
            graph,
            stretches=replace(graph.stretches, own_ns=own),
            works=replace(graph.works, latency_ns=latency, gap_ns=gap),
            queue_waits=edges(base.queue_waits, graph.queue_waits, begun),
            host_waits=edges(base.host_waits, graph.host_waits, stretch),
            handovers=edges(base.handovers, graph.handovers, stretch),
            host_scale=graph.host_scale.after(begin),
            work_scale=np.where(early, 1.0, graph.work_scale),
        )

    @cached_property
    def unexplained_share(self) -> float:
        """Share of the span in which the device was idle because work waited for something not in the trace."""
        if self.device is None:
            return 0.0
        table = self.trace.device_work
        late = self.graph.unexplained_ns[: table.height]
        mine = ((table["device"] == self.device).fill_null(False)).to_numpy() & (late > 0)
        start: Times = self.graph.works.start[: table.height][mine]
        waiting = union(start - late[mine], start).clip(self.span.start_ns, self.span.end_ns)
        busy = busy_intervals(table.filter(pl.col("device") == self.device), self.span)
        return (waiting.total_ns - waiting.overlap_ns(busy)) / max(self.span.duration_ns, 1)

    @cached_property
    def why_not(self) -> str | None:
        """Why replays of this trace are not reliable, in one sentence; None where they are."""
        if self.unexplained_share > MOST_UNEXPLAINED:
            return (
                f"the device waited {self.unexplained_share:.0%} of the time for something that the trace does not show"
            )
        silent = silent_wait_ns(self.trace, self.activity, self.lane, self.device, self.span)
        if silent > MOST_UNEXPLAINED * self.span.duration_ns:
            return (
                f"the host waited for the device for {silent / self.span.duration_ns:.0%} of the time in calls that do "
                "not say so"
            )
        if self.steps.height and not len(self.graph.stretches.start):
            return "no host thread was recorded, so the trace does not show what the steps waited for"
        difference = abs(self.measured_ns - self.recorded_ns) / max(self.recorded_ns, 1)
        if difference > 0.01:
            return f"the replay without a change differs from the measured time by {difference:.1%}"
        return None

    @property
    def recorded_ns(self) -> int:
        """Measured length of the span, which the replay without a change reproduces."""
        return max(self.view.window.duration_ns, 1)


Change: TypeAlias = Callable[[Experiment, Graph], Graph]
"""A function that takes a graph and returns the changed one."""


MOST_RANKS = 16
"""Most ranks to replay together, since all of their traces are held in memory."""
_MATCH = ("step", "kind", "group", "order")


@dataclass(frozen=True)
class Ranks:
    """The same steps of several ranks, whose devices meet in collectives.

    Collectives match by step, kind, group and order in the step. Ranks' clocks differ: each is shifted by the median
    difference of its collectives' ends from the first rank's. A collective then has two parts: until the last recorded
    rank arrives, and from there to its end on each rank, which is the transfer and waiting for unrecorded ranks.
    Without device collectives, host-run ones such as gloo's are matched.
    """

    experiments: tuple[Experiment, ...]  # one per rank

    @classmethod
    def of(cls, experiments: Sequence[Experiment]) -> Ranks:
        return cls(tuple(experiments))

    @cached_property
    def _matched(self) -> pl.DataFrame:
        """Collectives that all ranks took part in: row0, start0, end0, row1, ..."""
        tables = [_collectives(experiment, place) for place, experiment in enumerate(self.experiments)]
        joined = tables[0]
        for table in tables[1:]:
            joined = joined.join(table, on=_MATCH, how="inner", maintain_order="left")
        return joined

    @cached_property
    def _columns(self) -> tuple[Rows, Times, Times]:
        """Rows, starts and ends of matched collectives; shape (ranks, n)."""
        places = range(len(self.experiments))
        rows, starts, ends = (
            np.stack([self._matched[f"{name}{place}"].to_numpy() for place in places])
            for name in ("row", "start", "end")
        )
        return rows, starts, ends

    @cached_property
    def shifts_ns(self) -> list[int]:
        """Nanoseconds to subtract from each rank's times to match the first rank's clock."""
        _, _, ends = self._columns
        if not ends.shape[1]:
            return [0] * len(self.experiments)
        return [int(shift) for shift in np.median(ends - ends[0], axis=1)]

    @cached_property
    def meetings(self) -> tuple[Rows, Times]:
        """Collectives in which all ranks wait together: works and transfer times of each rank.

        Both of shape (ranks, n). A collective that ends on one rank before another arrives does not make them wait
        together.
        """
        rows, starts, ends = self._columns
        shift = np.array(self.shifts_ns, np.int64)[:, None]
        last = (starts - shift).max(axis=0, initial=np.iinfo(np.int64).min)
        transfer = ends - shift - last
        together = (transfer > 0).all(axis=0) & (rows >= 0).all(axis=0)
        return rows[:, together], transfer[:, together]

    def run(self, changes: Sequence[Change | None]) -> list[Outcome]:
        """Replay every rank's steps, each graph with its own change or None."""
        graphs = [
            experiment.from_span_on(change(experiment, experiment.graph)) if change is not None else experiment.graph
            for experiment, change in zip(self.experiments, changes, strict=True)
        ]
        result = []
        for experiment, done in zip(self.experiments, self._replayed(graphs), strict=True):
            count = experiment.step_count
            result.append(Outcome(experiment.length_ns(done) / count, experiment.measured_ns / count, count, done))
        return result

    def _replayed(self, graphs: Sequence[Graph]) -> list[Replay]:
        done = replay(_joined(self._met(graphs), self.shifts_ns))
        stretch = np.cumsum([len(graph.stretches.start) for graph in graphs])[:-1]
        work = np.cumsum([len(graph.works.start) for graph in graphs])[:-1]
        columns = [np.split(each, stretch) for each in (done.stretch_start, done.stretch_end)]
        columns += [np.split(each, work) for each in (done.work_start, done.work_end)]
        return [
            Replay(graph, *(times + shift for times in part))
            for graph, shift, *part in zip(graphs, self.shifts_ns, *columns, strict=True)
        ]

    def _met(self, graphs: Sequence[Graph]) -> list[Graph]:
        """Graphs with collective numbers set, in which collectives last from the last arrival on."""
        rows, transfer = self.meetings
        result = []
        for graph, mine, lasts in zip(graphs, rows, transfer, strict=True):
            number, duration = graph.rendezvous.copy(), graph.works.duration.copy()
            number[mine], duration[mine] = np.arange(len(mine)), lasts
            result.append(replace(graph, rendezvous=number, works=replace(graph.works, duration=duration)))
        return result


def _collectives(experiment: Experiment, place: int) -> pl.DataFrame:
    """Collectives of a rank: the columns of _MATCH, and work, start and end suffixed with the rank's index."""
    found = collectives(experiment.trace, device=experiment.device).filter(pl.col("on_device"))
    if found.is_empty():
        found = _of_host(experiment)
    steps = experiment.steps.sort("start_ns")
    index = np.searchsorted(steps["start_ns"].to_numpy(), found["start_ns"].to_numpy(), side="right") - 1
    number = np.where(index >= 0, steps["index"].to_numpy()[np.maximum(index, 0)], -1) if steps.height else index
    return found.select(
        pl.Series("step", number, dtype=pl.Int64),
        "kind",
        pl.col("group").fill_null(""),
        pl.col("row").alias(f"row{place}"),
        pl.col("start_ns").alias(f"start{place}"),
        (pl.col("start_ns") + pl.col("duration_ns")).alias(f"end{place}"),
    ).with_columns(order=pl.int_range(pl.len()).over("step", "kind", "group"))


def _of_host(experiment: Experiment) -> pl.DataFrame:
    """Host-run collectives, whose works follow the device's."""
    graph, first = experiment.graph, experiment.trace.device_work.height
    works = slice(first, first + len(graph.on_host))
    names = experiment.trace.annotations["name"].gather(graph.on_host)
    return pl.DataFrame(
        {
            "row": np.arange(works.start, works.stop),
            "kind": [kind_of(name) for name in names],
            "start_ns": graph.works.start[works],
            "duration_ns": graph.works.duration[works],
        },
        schema_overrides={"row": pl.Int64, "kind": pl.String},
    ).with_columns(group=pl.lit(""))


def _joined(graphs: Sequence[Graph], shifts: Sequence[int]) -> Graph:
    """Combine all graphs on one clock."""
    stretch, work, queue, lane = 0, 0, 0, 0
    parts = []
    for graph, shift in zip(graphs, shifts, strict=True):
        parts.append(_moved(graph, shift, stretch, work, queue, lane))
        stretch, work = stretch + len(graph.stretches.start), work + len(graph.works.start)
        queue += int(graph.works.queue.max(initial=0)) + 1
        lane += int(graph.stretches.lane.max(initial=0)) + 1
    return Graph(
        stretches=concatenated(*(part.stretches for part in parts)),
        works=concatenated(*(part.works for part in parts)),
        queue_waits=concatenated(*(part.queue_waits for part in parts)),
        host_waits=concatenated(*(part.host_waits for part in parts)),
        handovers=concatenated(*(part.handovers for part in parts)),
        rendezvous=np.concatenate([part.rendezvous for part in parts]),
        on_host=np.zeros(0, np.int64),
        unexplained_ns=np.concatenate([part.unexplained_ns for part in parts]),
        dropped=sum(part.dropped for part in parts),
        host_scale=concatenated(*(part.host_scale for part in parts)),
        work_scale=np.concatenate([part.work_scale for part in parts]),
    )


def _moved(graph: Graph, shift: int, stretch: int, work: int, queue: int, lane: int) -> Graph:
    """Shift a graph to another clock, and its indices behind those of the previous graphs."""

    def behind(rows: Rows, first: int) -> Rows:
        return np.where(rows >= 0, rows + first, -1)

    stretches = _plus(graph.stretches, lane=lane, start=-shift, end=-shift)
    works = _plus(graph.works, start=-shift, queue=queue)
    launched = np.where(works.stretch >= 0, works.launched - shift, works.launched)
    previous, launching = behind(works.previous, work), behind(works.stretch, stretch)
    return replace(
        graph,
        stretches=replace(stretches, previous=behind(stretches.previous, stretch)),
        works=replace(works, stretch=launching, launched=launched, previous=previous),
        queue_waits=_plus(graph.queue_waits, source=work, target=work),
        host_waits=_plus(graph.host_waits, source=work, target=stretch),
        handovers=_plus(graph.handovers, source=stretch, target=stretch, time=-shift),
        host_scale=_plus(graph.host_scale, lane=lane, start=-shift, end=-shift),
    )


def _plus(record: Record, **amounts: int) -> Record:
    columns = {name: getattr(record, name) + amount for name, amount in amounts.items()}
    return replace(record, **columns)  # type: ignore[type-var]
