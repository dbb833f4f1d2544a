"""Several ranks replayed together: a collective ends for all of them when the last has come to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import polars as pl

from stepscope.analysis.communication import collectives, kind_of
from stepscope.trace.intervals import Times
from stepscope.trace.nesting import Rows
from stepscope.whatif.arrays import concatenated
from stepscope.whatif.experiment import Change, Experiment, Outcome
from stepscope.whatif.graph import Graph
from stepscope.whatif.replay import Replay, replay

MOST_RANKS = 16
"""So many are replayed together: all of their traces are held at once."""
_MATCH = ("step", "kind", "group", "order")


@dataclass(frozen=True, slots=True)
class RankProspect:
    """What a step of one rank would take.

    Attributes:
        name: of the rank, such as "rank 3", or its file.
        measured_step_ns: as recorded.
        step_ns: with the changes on every rank, each waiting for the others in their collectives.
        alone_step_ns: with the changes on this rank alone, the others as recorded.
    """

    name: str
    measured_step_ns: float
    step_ns: float
    alone_step_ns: float


@dataclass(frozen=True)
class Ranks:
    """The same steps of several ranks, whose devices meet in collectives.

    Collectives match by step, kind, group and order in the step. Ranks' clocks differ: each is shifted by the median of
    what its collectives end later than the first rank's. A collective then has two parts: until the last rank of those
    that were recorded has come, and from there to its end on each rank, which is the transfer and waiting for ranks
    that were not recorded. Where no device has any, collectives that the host runs, as gloo's, are matched.

    Attributes:
        experiments: one a rank.
    """

    experiments: tuple[Experiment, ...]

    @classmethod
    def of(cls, experiments: Sequence[Experiment]) -> Ranks:
        """The ranks of these traces, each with its own steps."""
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
        """What to take off each rank's times to have them on the first rank's clock."""
        _, _, ends = self._columns
        if not ends.shape[1]:
            return [0] * len(self.experiments)
        return [int(shift) for shift in np.median(ends - ends[0], axis=1)]

    @cached_property
    def meetings(self) -> tuple[Rows, Times]:
        """Of collectives that all ranks wait in together: each rank's works, and each rank's transfer.

        Both of shape (ranks, n). One that ends on a rank before another has come does not bring the two together.
        """
        rows, starts, ends = self._columns
        shift = np.array(self.shifts_ns, np.int64)[:, None]
        last = (starts - shift).max(axis=0, initial=np.iinfo(np.int64).min)
        transfer = ends - shift - last
        together = (transfer > 0).all(axis=0) & (rows >= 0).all(axis=0)
        return rows[:, together], transfer[:, together]

    def run(self, changes: Sequence[Change | None]) -> list[Outcome]:
        """What each rank's steps take when each rank's graph is changed in its own way, None for not at all."""
        graphs = [
            experiment.from_span_on(change(experiment, experiment.graph)) if change is not None else experiment.graph
            for experiment, change in zip(self.experiments, changes, strict=True)
        ]
        result = []
        for experiment, done in zip(self.experiments, self._replayed(graphs), strict=True):
            count = experiment.step_count
            result.append(Outcome(experiment.length_ns(done) / count, experiment.measured_ns / count, count, done))
        return result

    def prospects(self, changes: Sequence[Change | None]) -> tuple[RankProspect, ...]:
        """What a step of each rank takes with its own change, None for none: with the others', and without them."""
        result = []
        for place, outcome in enumerate(self.run(changes)):
            others = [change if number == place else None for number, change in enumerate(changes)]
            alone = self.run(others)[place]
            metadata = self.experiments[place].trace.metadata
            name = f"rank {metadata.rank}" if metadata.rank is not None else metadata.path
            result.append(RankProspect(name, outcome.measured_step_ns, outcome.step_ns, alone.step_ns))
        return tuple(result)

    def _replayed(self, graphs: Sequence[Graph]) -> list[Replay]:
        done = replay(_joined(self._met(graphs), self.shifts_ns))
        parts, stretch, work = [], 0, 0
        for graph, shift in zip(graphs, self.shifts_ns, strict=True):
            stretches, works = (
                slice(stretch, stretch + len(graph.stretches.start)),
                slice(work, work + len(graph.works.start)),
            )
            stretch, work = stretches.stop, works.stop
            parts.append(
                Replay(
                    graph,
                    done.stretch_start[stretches] + shift,
                    done.stretch_end[stretches] + shift,
                    done.work_start[works] + shift,
                    done.work_end[works] + shift,
                )
            )
        return parts

    def _met(self, graphs: Sequence[Graph]) -> list[Graph]:
        """The graphs with the numbers of collectives, which last from the last arrival on."""
        rows, transfer = self.meetings
        result = []
        for graph, mine, lasts in zip(graphs, rows, transfer, strict=True):
            number, duration = graph.rendezvous.copy(), graph.works.duration.copy()
            number[mine], duration[mine] = np.arange(len(mine)), lasts
            result.append(replace(graph, rendezvous=number, works=replace(graph.works, duration=duration)))
        return result


def _collectives(experiment: Experiment, place: int) -> pl.DataFrame:
    """A rank's collectives: the columns of _MATCH, and work, start and end with the rank's place behind the name."""
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
    """The collectives that the host runs, whose works stand behind the device's."""
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
    """All graphs as one, on one clock."""
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
    """A graph on another clock, with its numbers behind those of the graphs before it."""

    def behind(rows: Rows, first: int) -> Rows:
        return np.where(rows >= 0, rows + first, -1)

    stretches, works, scale = graph.stretches, graph.works, graph.host_scale
    return replace(
        graph,
        stretches=replace(
            stretches,
            lane=(stretches.lane + lane).astype(np.int32),
            start=stretches.start - shift,
            end=stretches.end - shift,
            previous=behind(stretches.previous, stretch),
        ),
        works=replace(
            works,
            start=works.start - shift,
            queue=works.queue + queue,
            stretch=behind(works.stretch, stretch),
            launched=np.where(works.stretch >= 0, works.launched - shift, works.launched),
            previous=behind(works.previous, work),
        ),
        queue_waits=replace(
            graph.queue_waits, source=graph.queue_waits.source + work, target=graph.queue_waits.target + work
        ),
        host_waits=replace(
            graph.host_waits, source=graph.host_waits.source + work, target=graph.host_waits.target + stretch
        ),
        handovers=replace(
            graph.handovers,
            source=graph.handovers.source + stretch,
            target=graph.handovers.target + stretch,
            time=graph.handovers.time - shift,
        ),
        host_scale=replace(
            scale, lane=(scale.lane + lane).astype(np.int32), start=scale.start - shift, end=scale.end - shift
        ),
    )
