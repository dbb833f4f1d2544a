"""Gradients of a step, and the buckets in which data-parallel training would send them.

A gradient is ready when autograd accumulates it (`AccumulateGrad`, whose input is the gradient). PyTorch's
DistributedDataParallel fills buckets in the order in which gradients become ready, one set per number type; a bucket is
full at its limit, which is 1 MiB for the first and 25 MiB for the others (`bucket_cap_mb` and
`_DEFAULT_FIRST_BUCKET_BYTES` of torch; Li et al., "PyTorch Distributed", VLDB 2020).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.work import ELEMENT_BYTES, elements, listed_shapes, shapes_of, types_of
from stepscope.errors import UsageError
from stepscope.trace.nesting import Rows
from stepscope.trace.window import Times
from stepscope.whatif.experiment import Experiment
from stepscope.whatif.graph import Graph, Stretches

FIRST_BUCKET_BYTES: Final = 1 << 20
BUCKET_BYTES: Final = 25 << 20
ACCUMULATE: Final = "torch::autograd::AccumulateGrad"
_FUSED: Final = r"^aten::_fused_(?:adam|adamw|sgd|adagrad)_$"  # optimizers that take all parameters in one call
_USUAL_BYTES: Final = 4  # bytes of a parameter in such a list, whose number type the profiler does not record
_MOST_PIECES: Final = 1 << 20
_MOST_BYTES: Final = 1 << 40  # largest plausible gradient: more is damage, and sums would not fit into 64 bits


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of complete steps in the order in which they become ready; arrays of shape (n,)."""

    step: Rows  # index of the complete step; 0 where the trace has no steps
    lane: npt.NDArray[np.int32]  # thread that accumulates them
    begin: Times
    time: Times  # begin, time: when the host begins to accumulate them, and when they are ready, nanoseconds
    bytes: Rows
    number_type: npt.NDArray[np.str_]  # as the profiler names it, such as "float"
    accumulated: int = 1  # backward passes per step; the gradients are those of the last one
    at_once: bool = False  # whether only their sum is known, assumed to be ready when the last one is


@dataclass(frozen=True, slots=True)
class Buckets:
    """Buckets to send; arrays of shape (n,), sorted by step and time."""

    step: Rows
    lane: npt.NDArray[np.int32]  # step, lane: as in `Gradients`
    ready: Times  # when the last of its gradients is ready on the host, nanoseconds
    bytes: Rows  # sum over its gradients
    gradients: Rows  # number of gradients


def gradients_of(experiment: Experiment) -> Gradients:
    """Find the gradients of the complete steps.

    Raises:
        UsageError: the trace has no gradients, or not their sizes.
    """
    rows = experiment.trace.operators.filter(pl.col("name") == ACCUMULATE).sort("start_ns")
    if rows.is_empty():
        optimizer = experiment.trace.operators.filter(pl.col("name").str.contains(_FUSED)).sort("start_ns")
        found = _at_once(experiment, optimizer["start_ns"].to_numpy(), optimizer["lane"].to_numpy(), last=False)
        if found is not None:
            return found
        raise UsageError("the trace has no gradients (no AccumulateGrad of PyTorch): what devices exchange is unknown")
    time = (rows["start_ns"] + rows["duration_ns"]).to_numpy()
    begin = rows["start_ns"].to_numpy()
    step = place_of_step(experiment, begin)
    sized = [_sized(shapes, types) for shapes, types in rows.select("input_shapes", "input_types").iter_rows()]
    size = np.array([each[0] for each in sized], np.int64)
    kept = np.flatnonzero(step >= 0)
    if not len(kept):
        raise UsageError("no complete step of the trace has gradients: what devices exchange is unknown")
    if not (size[kept] > 0).any():
        found = _at_once(experiment, time, rows["lane"].to_numpy(), last=True)
        if found is not None:
            return found
        raise UsageError(
            "the trace does not show the size of its gradients: record shapes (record_shapes=True, or stepscope run)"
        )
    kinds = np.array([each[1] for each in sized], np.str_)
    passes = _passes(step[kept], size[kept])
    if passes > 1 and int(size[kept].sum()) == (_gradient_bytes(experiment) or 0) * len(np.unique(step[kept])):
        passes = 1  # equal blocks of layers, not passes
    if passes > 1:
        by_step = [kept[step[kept] == each] for each in np.unique(step[kept])]
        kept = np.concatenate([rows[len(rows) - len(rows) // passes :] for rows in by_step])
    kept = kept[size[kept] > 0]
    lane = rows["lane"].to_numpy()
    return Gradients(step[kept], lane[kept], begin[kept], time[kept], size[kept], kinds[kept], passes)


def _at_once(experiment: Experiment, times: Times, lanes: npt.NDArray[np.int32], *, last: bool) -> Gradients | None:
    """Treat a step's gradients as ready at the first or last of these times in it; None where their sum is unknown."""
    total, step = _sum_of_gradients(experiment), place_of_step(experiment, times - int(last))
    kept = np.flatnonzero(step >= 0)
    if not 0 < total < _MOST_BYTES or not len(kept):
        return None
    if last:
        kept = kept[::-1]
    kept = np.sort(kept[np.unique(step[kept], return_index=True)[1]])
    pieces = [BUCKET_BYTES] * (total // BUCKET_BYTES) + [total % BUCKET_BYTES] * (total % BUCKET_BYTES > 0)
    if len(pieces) * len(kept) > _MOST_PIECES:
        return None
    many = np.repeat(kept, len(pieces))
    sizes = np.tile(np.array(pieces, np.int64), len(kept))
    kinds = np.full(len(many), "", np.str_)
    return Gradients(step[many], lanes[many], times[many], times[many], sizes, kinds, at_once=True)


def _sum_of_gradients(experiment: Experiment) -> int:
    """Bytes of a step's gradients, from the program's facts or a fused optimizer's tensors; 0 if unknown."""
    calls = experiment.trace.operators.filter(pl.col("name").str.contains(_FUSED))
    steps = place_of_step(experiment, calls["start_ns"].to_numpy())
    found = 0
    for shapes, step in zip(calls["input_shapes"].to_list(), steps.tolist(), strict=True):
        if step == steps.max(initial=0):
            found += sum(elements(shape) for shape in listed_shapes(shapes)) * _USUAL_BYTES
    return _gradient_bytes(experiment) or found


def _gradient_bytes(experiment: Experiment) -> int | None:
    program = experiment.trace.metadata.program
    return program.model.gradient_bytes if program is not None and program.model is not None else None


def place_of_step(experiment: Experiment, times: Times) -> Rows:
    """Index of the complete step at each time, -1 outside of steps; 0 where the trace has no steps."""
    steps = experiment.steps.sort("start_ns")
    if steps.is_empty():
        return np.zeros(len(times), np.int64)
    starts = steps["start_ns"].to_numpy()
    ends = starts + steps["duration_ns"].to_numpy()
    place = np.searchsorted(starts, times, side="right") - 1
    return np.where((place >= 0) & (times < ends[np.maximum(place, 0)]), place, -1)


def _sized(shapes: str | None, types: str | None) -> tuple[int, str]:
    """Bytes and number type of the first input; 0 bytes where they are not known."""
    shape, kind = shapes_of(shapes)[:1], types_of(types)[:1]
    if not shape or not kind or kind[0] not in ELEMENT_BYTES:
        return 0, ""
    size = elements(shape[0]) * ELEMENT_BYTES[kind[0]]
    return (size, kind[0]) if 0 < size < _MOST_BYTES else (0, "")


def _passes(step: Rows, size: Rows) -> int:
    """Number of backward passes per step: how often the sizes repeat from the beginning, the same in all steps."""
    numbers = {_repetitions(size[step == each]) for each in np.unique(step)}
    return numbers.pop() if len(numbers) == 1 else 1


def _repetitions(sizes: Rows) -> int:
    count = len(sizes)
    if count < 2 or (sizes == sizes[0]).all():  # repetitions may be equal layers, not passes
        return 1
    for period in range(2, count // 2 + 1):
        if count % period == 0 and (sizes[period:] == sizes[:-period]).all():
            return count // period
    return 1


def buckets_of(
    gradients: Gradients, *, bucket_bytes: int = BUCKET_BYTES, first_bytes: int = FIRST_BUCKET_BYTES
) -> Buckets:
    """Fill buckets as DistributedDataParallel does; the first of each step and type is full at `first_bytes`."""
    found: list[tuple[int, int, int, int, int]] = []
    filling: dict[str, tuple[int, int]] = {}
    full: set[str] = set()
    columns = (gradients.step, gradients.lane, gradients.time, gradients.bytes, gradients.number_type)
    rows = list(zip(*(each.tolist() for each in columns), strict=True))
    for index, (step, lane, time, size, kind) in enumerate(rows):
        held, count = filling.get(kind, (0, 0))
        filling[kind] = (held + size, count + 1)
        if filling[kind][0] >= (bucket_bytes if kind in full else min(first_bytes, bucket_bytes)):
            found.append((step, lane, time, *filling.pop(kind)))
            full.add(kind)
        if index + 1 == len(rows) or rows[index + 1][0] != step:
            found += [(step, lane, time, *rest) for rest in filling.values()]
            filling, full = {}, set()
    table = np.array(found, np.int64).reshape(-1, 5)
    return Buckets(table[:, 0], table[:, 1].astype(np.int32), table[:, 2], table[:, 3], table[:, 4])


class CutExperiment(Experiment):
    """A trace whose dependency graph has additional cut points; replayed without a change it takes the same time.

    Args:
        lanes, times: threads and times of the cuts; shape (n,).
    """

    def __init__(self, experiment: Experiment, lanes: npt.NDArray[np.int32], times: Times) -> None:
        super().__init__(experiment.view)
        self._uncut = experiment
        self._borders = lanes, times

    @cached_property
    def graph(self) -> Graph:
        """Dependency graph as measured."""
        return with_borders(self._uncut.graph, *self._borders)


def with_borders(graph: Graph, lanes: npt.NDArray[np.int32], times: Times) -> Graph:
    """Split the stretches of these threads that span these times in two; arrays of shape (n,)."""
    old = graph.stretches
    if not len(old.start) or not len(times):
        return graph
    inside = old.at(lanes, times)
    index = np.maximum(inside, 0)
    fits = (inside >= 0) & (old.start[index] < times) & (times < old.end[index])
    cuts = np.unique(np.column_stack([inside[fits], times[fits]]), axis=0)
    if not len(cuts):
        return graph
    stretches, first = _cut(old, cuts[:, 0], cuts[:, 1])

    def at(stretch: Rows, time: Times) -> Rows:
        lane = old.lane[np.maximum(stretch, 0)]
        found = stretches.at(lane, np.maximum(time, old.start[np.maximum(stretch, 0)]))
        return np.where(stretch >= 0, found, -1)

    works, hands, hosts = graph.works, graph.handovers, graph.host_waits
    return replace(
        graph,
        stretches=stretches,
        works=replace(works, stretch=at(works.stretch, np.where(works.stretch >= 0, works.launched, 0))),
        host_waits=replace(hosts, target=first[hosts.target]),
        handovers=replace(hands, source=at(hands.source, hands.time), target=first[hands.target]),
    )


def _cut(old: Stretches, stretch: Rows, time: Times) -> tuple[Stretches, Rows]:
    """Split stretches, keeping their order; also returns the index of each old one's first piece.

    Args:
        stretch, time: sorted; times inside of stretches.
    """
    count = len(old.start)
    before = np.searchsorted(stretch, np.arange(count), side="left")
    first = np.arange(count) + before
    pieces = np.searchsorted(stretch, np.arange(count), side="right") - before
    last = first + pieces
    origin = np.repeat(np.arange(count), pieces + 1)
    added = np.ones(len(origin), np.bool_)
    added[first] = False
    start, end = old.start[origin].copy(), old.end[origin].copy()
    start[added] = time
    end[np.flatnonzero(added) - 1] = time
    previous = np.where(old.previous >= 0, last[np.maximum(old.previous, 0)], -1)[origin]
    previous[added] = np.flatnonzero(added) - 1
    return (
        Stretches(
            lane=old.lane[origin],
            start=start,
            end=end,
            previous=previous,
            own_ns=np.where(added, 0, old.own_ns[origin]),
            launch=np.where(added, -1, old.launch[origin]),
            is_given=np.where(added, False, old.is_given[origin]),
        ),
        first,
    )
