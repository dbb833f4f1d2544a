"""What slow workers, pipeline stages and batches cost a job, from a log of all its ranks' operations.

The steps are replayed with all operations as long as they were, as long as the mean of their kind, and as long as the
mean but for those of one worker or stage. Every step and data-parallel rank has the same dependencies, so an
operation's times are arrays over both. The method and its measures are those of "Understanding Stragglers in Large
Model Training Using What-if Analysis" (OSDI 2025), https://github.com/ByteDance-Seed/StragglerAnalysis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.errors import UnreadableTraceError

FORWARD, BACKWARD = "forward-compute", "backward-compute"
COMPUTE: Final = (FORWARD, BACKWARD)
PIPELINE: Final = ("forward-send", "forward-recv", "backward-send", "backward-recv")
GATHER, SCATTER, SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
DATA_PARALLEL: Final = (GATHER, SCATTER, SEPARATE)
NORMS, EMBEDDING, CLIP = "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "optimizer-clip-main-grad"
OPTIMIZER, COLLECTION = "optimizer", "gc"
_EXCHANGES: Final = frozenset({*PIPELINE, *DATA_PARALLEL, NORMS, EMBEDDING, CLIP})
"""Operations whose usual time is the median, since a single slow one says nothing of the network."""
_CLOCKS_S: Final = 5e-5
"""How far the clocks of two ranks may differ."""
_OVERLAP_S: Final = 1e-2
"""A transfer that ends this much before its last participant began was noted wrongly, and took no time."""
_SLOWEST_PERCENT: Final = 3
"""Part of the workers that the share of the slowest workers is about, at least one."""
_CORRELATED: Final = 0.9
"""Correlation of a micro-batch's forward and backward times from which their lengths differ with the sequences."""

Times: TypeAlias = npt.NDArray[np.float64]


class Operation(NamedTuple):
    type: str
    number: int
    stage: int


Chosen: TypeAlias = Callable[[Operation], "bool | npt.NDArray[np.bool_]"]
"""Which data-parallel ranks of an operation are meant: an array of shape (ranks,), or all or none of them."""


@dataclass(frozen=True)
class Durations:
    """How long each operation computes, or transfers once all have come: arrays of shape (steps, ranks)."""

    of: dict[Operation, Times]

    def mixed(self, other: Durations, chosen: Chosen) -> Durations:
        """Those of `other` for the data-parallel ranks of an operation that are chosen, else these."""
        return Durations({each: np.where(chosen(each), other.of[each], own) for each, own in self.of.items()})


class Job:
    """The operations of a job and how they depend on each other.

    Args:
        log: columns as in `stepscope.readers.operation_log.LOG_SCHEMA`.

    Raises:
        UnreadableTraceError: steps or data-parallel ranks have different operations, or no order explains them.
    """

    def __init__(self, log: pl.DataFrame) -> None:
        self.steps = log["step"].unique().sort().to_list()
        self.ranks = log["dp_rank"].unique().sort().to_list()
        self.stages = int(log["stage"].to_numpy().max()) + 1
        ordered = log.sort("optype", "seq_id", "stage", "step", "dp_rank")
        shape = (len(self.steps), len(self.ranks))
        if log.select("optype", "seq_id", "stage", "step", "dp_rank").is_duplicated().any():
            raise UnreadableTraceError("an operation of a worker was logged twice in the same step")
        self.start: dict[Operation, Times] = {}
        self.end: dict[Operation, Times] = {}
        for key, mine in ordered.group_by("optype", "seq_id", "stage", maintain_order=True):
            each = Operation(str(key[0]), int(str(key[1])), int(str(key[2])))
            if mine.height != shape[0] * shape[1]:
                raise UnreadableTraceError(
                    f"{each.type[:50]} {each.number} of stage {each.stage} was logged {mine.height} times in "
                    f"{shape[0]} steps of {shape[1]} data-parallel ranks: only steps that are alike can be compared"
                )
            self.start[each] = mine["start_s"].to_numpy().reshape(shape)
            self.end[each] = self.start[each] + mine["duration_s"].to_numpy().reshape(shape)
        first = log.filter((pl.col("dp_rank") == self.ranks[0]) & (pl.col("step") == self.steps[0]))
        self._rows = first.with_columns(end_s=pl.col("start_s") + pl.col("duration_s"))
        self._after: dict[Operation, list[Operation]] = defaultdict(list)
        self._together: list[tuple[Operation, ...]] = []
        self._link()

    # ---- what waits for what, by the operations of one data-parallel rank in one step

    def _of(self, stage: int, *types: str) -> list[dict[str, Any]]:
        rows = self._rows.filter((pl.col("stage") == stage) & pl.col("optype").is_in(types))
        return rows.sort("start_s", "seq_id", "optype").to_dicts()

    def _chain(self, operations: Sequence[Operation], after: Sequence[Operation] = ()) -> None:
        before = list(after)
        for each in operations:
            self._after[each] += before
            before = [each]

    def _link(self) -> None:
        pairs: dict[tuple[str, int, int], list[Operation]] = defaultdict(list)
        for stage in range(self.stages):
            compute = self._of(stage, *COMPUTE)
            for kind in COMPUTE:
                if all(row["optype"] != kind for row in compute):
                    raise UnreadableTraceError(f"stage {stage} has no {kind}: only steps of training are replayed")
            self._chain([_operation(row) for row in compute])
            self._link_pipeline(stage, compute, pairs)
            if len(self.ranks) > 1:
                self._link_gathers(stage, compute)
            self._link_end(stage, _operation(max(compute, key=lambda row: row["end_s"])))
        self._together += [tuple(pair) for pair in pairs.values()]
        alone = [each for each in self.start if each.type in DATA_PARALLEL] if len(self.ranks) > 1 else []
        self._together += [(each,) for each in alone]
        ends = sorted({0, self.stages - 1})
        for kind, stages in ((EMBEDDING, ends), (CLIP, range(self.stages))):
            self._together.append(tuple(each for stage in stages if (each := Operation(kind, 0, stage)) in self.start))
        self._together = [group for group in self._together if group]

    def _link_pipeline(
        self, stage: int, compute: list[dict[str, Any]], pairs: dict[tuple[str, int, int], list[Operation]]
    ) -> None:
        """Sends follow what they send, receives are followed by what needs them, and both meet their peers."""
        chunks = self.stages * (int(self._rows["mc"].to_numpy().max()) + 1)
        for kind in PIPELINE:
            mine = self._of(stage, kind)
            self._chain([_operation(row) for row in mine])
            way, sends = kind.partition("-")[0], kind.endswith("send")
            partners = [row for row in compute if row["optype"] == f"{way}-compute"]
            latest = max(row["start_s"] for row in partners) + _CLOCKS_S
            earliest = min(row["end_s"] for row in partners) - _CLOCKS_S
            meant = [row for row in mine if (row["end_s"] >= earliest if sends else row["start_s"] <= latest)]
            missing = len(partners) - len(meant)
            if meant and missing not in ((0,) if sends else (0, 1)):
                raise UnreadableTraceError(f"stage {stage} has {len(meant)} {kind} for {len(partners)} computations")
            toward = 1 if (way == "forward") == sends else -1
            number = 0
            for row, partner in zip(meant, partners[missing if meant else 0 :], strict=False):
                own, work = _operation(row), _operation(partner)
                if sends:
                    self._after[own].append(work)
                else:
                    self._after[work].append(own)
                    if work.number:
                        self._after[own].append(work._replace(number=work.number - 1))
                peer_chunk = int(partner["gmc"]) + toward
                if partner["gmc"] >= 0 and not 0 <= peer_chunk < chunks:
                    continue  # nothing is sent beyond the ends of the model
                peer = (stage + toward) % self.stages
                pairs[way, stage if sends else peer, number].append(own)
                number += 1
        before = next((place for place, row in enumerate(compute) if row["optype"] == BACKWARD), 0)
        if before >= 2:  # the pipeline asks for gradients one forward pass ahead
            for kind in PIPELINE[2:]:
                if (first := Operation(kind, 0, stage)) in self.start:
                    self._after[first].append(_operation(compute[before - 2]))

    def _link_gathers(self, stage: int, compute: list[dict[str, Any]]) -> None:
        """Parameters are gathered before their chunk's first forward pass; gradients follow its last backward pass."""
        self._chain([_operation(row) for row in self._of(stage, GATHER, SCATTER)])
        for row in {row["mc"]: row for row in self._of(stage, GATHER)}.values():
            users = [each for each in compute if each["optype"] == FORWARD and row["mc"] in (each["mc"], -1)]
            if users:
                self._after[_operation(min(users, key=lambda each: each["start_s"]))].append(_operation(row))
        if self._is_overlapped:
            for row in {row["mc"]: row for row in reversed(self._of(stage, SCATTER))}.values():
                makers = [each for each in compute if each["optype"] == BACKWARD and row["mc"] in (each["mc"], -1)]
                if makers:
                    self._after[_operation(row)].append(_operation(max(makers, key=lambda each: each["end_s"])))

    @cached_property
    def _is_overlapped(self) -> bool:
        """Whether gradients are reduced while the backward pass goes on."""
        return any(each.type == SEPARATE for each in self.start)

    def _link_end(self, stage: int, last: Operation) -> None:
        """What follows the last computation, in order."""
        scatters = [_operation(row) for row in self._of(stage, SCATTER)]
        after = [last]
        late = [Operation(kind, 0, stage) for kind in (CLIP, OPTIMIZER)]
        collection = Operation(COLLECTION, 0, stage)
        if collection in self.start:
            self._after[collection].append(last)
            after = [collection]
        middle = [Operation(kind, 0, stage) for kind in (NORMS, EMBEDDING)]
        if self._is_overlapped:
            after += scatters[-1:]
            middle.append(Operation(SEPARATE, 0, stage))
        elif len(self.ranks) > 1:
            middle += scatters
        self._chain([each for each in (*middle, *late) if each in self.start], after)

    # ---- replay

    @cached_property
    def _nodes(self) -> list[tuple[Operation, ...]]:
        """The operations in an order in which each follows what it waits for; those that end together as one."""
        group_of = {each: group for group in self._together for each in group}
        nodes = list(dict.fromkeys(group_of.get(each, (each,)) for each in self.start))
        waits = {node: {group_of.get(one, (one,)) for each in node for one in self._after[each]} for node in nodes}
        try:
            return list(TopologicalSorter(waits).static_order())
        except CycleError as error:
            raise UnreadableTraceError("the logged operations wait for each other in a circle") from error

    def _is_exchange(self, node: tuple[Operation, ...]) -> bool:
        return node[0].type in (*PIPELINE, EMBEDDING, CLIP) or node[0].type in DATA_PARALLEL

    def _come(self, node: tuple[Operation, ...], starts: Sequence[Times]) -> Times:
        """When all participants have come."""
        last: Times = np.maximum.reduce(starts)
        everyone = len(self.ranks) > 1 and node[0].type in (*DATA_PARALLEL, CLIP)
        return last.max(axis=1, keepdims=True) + np.zeros_like(last) if everyone else last

    @cached_property
    def logged(self) -> Durations:
        """The durations as logged; of exchanges the part after all participants have come."""
        found = {}
        for node in self._nodes:
            come = self._come(node, [self.start[each] for each in node]) if self._is_exchange(node) else None
            for each in node:
                length = self.end[each] - (self.start[each] if come is None else come)
                found[each] = np.where(length <= -_OVERLAP_S, 0.0, length)
        return Durations(found)

    @cached_property
    def usual(self) -> Durations:
        """Every operation as long as the mean of its type, exchanges as long as the median."""
        by_type: dict[str, list[Times]] = defaultdict(list)
        for each, length in self.logged.of.items():
            by_type[each.type].append(length.ravel())
        typical = {kind: float(np.median(np.concatenate(all_)) if kind in _EXCHANGES else np.mean(np.concatenate(all_)))
                   for kind, all_ in by_type.items()}  # fmt: skip
        return Durations({each: np.full_like(length, typical[each.type]) for each, length in self.logged.of.items()})

    @cached_property
    def _means(self) -> dict[tuple[str, int], Times]:
        alike: dict[tuple[str, int], list[Times]] = defaultdict(list)
        for each, length in self.logged.of.items():
            alike[each.type, each.stage].append(length)
        return {key: np.mean(lengths, axis=(0, 1)) for key, lengths in alike.items()}

    def mean_of_worker(self, operation: Operation) -> Times:
        """The mean over steps and micro-batches of a worker's operations of this type, for each data-parallel rank."""
        mean = self._means[operation.type, operation.stage]
        return np.broadcast_to(mean, self.logged.of[operation].shape)

    def step_times(self, durations: Durations) -> Times:
        """The time of each step with these durations, seconds, shape (steps,); nothing else delays an operation."""
        end: dict[Operation, Times] = {}
        none = np.zeros((len(self.steps), len(self.ranks)))
        for node in self._nodes:
            starts = [
                np.maximum.reduce([end[one] for one in self._after[each]]) if self._after[each] else none
                for each in node
            ]
            come = self._come(node, starts) if self._is_exchange(node) else starts[0]
            for each in node:
                end[each] = come + durations.of[each]
        latest: Times = np.maximum.reduce(list(end.values())).max(axis=1)
        return latest


def _operation(row: dict[str, Any]) -> Operation:
    return Operation(str(row["optype"]), int(row["seq_id"]), int(row["stage"]))


Cause: TypeAlias = Literal["workers", "last_stage", "sequences", "micro_batches", "garbage_collection"]


@dataclass(frozen=True, slots=True)
class Worker:
    """A pipeline stage of one data-parallel rank.

    Attributes:
        slowdown: the step over the usual one, if only this rank and stage had their own durations.
        compute_ratio: its mean computation over the median of its stage's other workers'; 1 where there are none,
            or they compute nothing.
    """

    dp_rank: int
    stage: int
    rank: int
    slowdown: float
    compute_ratio: float


@dataclass(frozen=True, slots=True)
class Stragglers:
    """What a job loses to operations that last longer than others of their type; times in seconds, a mean step's.

    Attributes:
        step_s: the step, replayed with the logged durations.
        usual_s: the same with usual ones; see `Job.usual`.
        delay_s: what the logged step takes beyond the replayed one, because of what was not logged.
        workers: all of them, the slowest first.
        slowest: the workers that `shares` means by "workers": 3 % of them, at least one.
        shares: part of `step_s` - `usual_s` that is saved if only these operations were as usual, by cause; "sequences"
            or "micro_batches" where the computations of each worker differ from one micro-batch to the next. A job of
            one stage has no "last_stage", a job of one worker no "workers".
        types: slowdown by operation type, if only these had their own durations.
        correlation: of forward and backward times of the same micro-batch, within each worker; None if they are equal.
        stage_ratio: mean computation of a micro-batch on the last stage over that of the other stages.
        spread: standard deviation of a worker's forward times over their mean.
    """

    step_s: float
    usual_s: float
    delay_s: float
    steps: int
    workers: tuple[Worker, ...]
    slowest: tuple[Worker, ...]
    shares: dict[Cause, float]
    types: dict[str, float]
    correlation: float | None
    stage_ratio: float
    spread: float

    @property
    def slowdown(self) -> float:
        return self.step_s / self.usual_s


def stragglers(log: pl.DataFrame) -> Stragglers:
    """What slow workers, stages and micro-batches cost a job.

    Args:
        log: columns as in `stepscope.readers.operation_log.LOG_SCHEMA`.

    Raises:
        UnreadableTraceError: the log's steps cannot be compared or replayed.
    """
    job = Job(log)
    logged, usual = job.logged, job.usual
    step_s, usual_s = (float(job.step_times(each).mean()) for each in (logged, usual))
    if step_s <= 0 or usual_s <= 0:
        raise UnreadableTraceError("the logged operations take no time")
    ranks = np.arange(len(job.ranks))

    def slowed_by(chosen: Chosen) -> float:
        return float(job.step_times(usual.mixed(logged, chosen)).mean()) / usual_s

    def saved_without(durations: Durations) -> float:
        lost = step_s - usual_s
        return (step_s - float(job.step_times(durations).mean())) / lost if lost > 0 else 0.0

    def is_stage(one: int) -> Chosen:
        return lambda each: each.stage == one

    def is_rank(place: int) -> Chosen:
        return lambda each: ranks == place

    def is_type(kind: str) -> Chosen:
        return lambda each: each.type == kind

    by_rank = [slowed_by(is_rank(place)) for place in ranks.tolist()]
    by_stage = [slowed_by(is_stage(stage)) for stage in range(job.stages)]
    workers = _workers(job, log, by_rank, by_stage)
    slowest = workers[: -(-len(workers) * _SLOWEST_PERCENT // 100)]
    are_slow = {stage: np.isin(job.ranks, [each.dp_rank for each in slowest if each.stage == stage])
                for stage in range(job.stages)}  # fmt: skip
    correlation, spread = _within_workers(job)
    evened = Durations(
        {each: job.mean_of_worker(each) if each.type in COMPUTE else length for each, length in logged.of.items()}
    )
    batches: Cause = "sequences" if correlation is not None and correlation >= _CORRELATED else "micro_batches"
    shares: dict[Cause, float] = {
        "workers": saved_without(logged.mixed(usual, lambda each: are_slow[each.stage])),
        "last_stage": saved_without(logged.mixed(usual, is_stage(job.stages - 1))),
        batches: saved_without(evened),
        "garbage_collection": saved_without(logged.mixed(usual, is_type(COLLECTION))),
    }
    if job.stages < 2:
        del shares["last_stage"]
    if len(workers) < 2:
        del shares["workers"]
    types = {kind: slowed_by(is_type(kind)) for kind in sorted({each.type for each in logged.of})}
    begins = np.minimum.reduce([each.min(axis=1) for each in job.start.values()])
    ends = np.maximum.reduce([each.max(axis=1) for each in job.end.values()])
    return Stragglers(
        step_s,
        usual_s,
        float((ends - begins).mean()) - step_s,
        len(job.steps),
        tuple(workers),
        tuple(slowest),
        dict(sorted(shares.items(), key=lambda each: -each[1])),
        dict(sorted(types.items(), key=lambda each: -each[1])),
        correlation,
        _stage_ratio(job),
        spread,
    )


def _workers(job: Job, log: pl.DataFrame, by_rank: Sequence[float], by_stage: Sequence[float]) -> list[Worker]:
    known = {
        (rank, stage): number for rank, stage, number in log.select("dp_rank", "stage", "rank").unique().iter_rows()
    }
    lengths = {
        stage: sum(
            job.logged.of[each].mean(axis=0) for each in job.start if each.type in COMPUTE and each.stage == stage
        )
        for stage in range(job.stages)
    }
    found = []
    for place, rank in enumerate(job.ranks):
        for stage in range(job.stages):
            others = np.delete(lengths[stage], place)
            usual = float(np.median(others)) if len(others) else 0.0
            ratio = float(lengths[stage][place]) / usual if usual > 0 else 1.0
            score = min(by_rank[place], by_stage[stage])
            found.append(Worker(rank, stage, known[rank, stage], score, ratio))
    return sorted(found, key=lambda each: (-each.slowdown, each.rank))


def _within_workers(job: Job) -> tuple[float | None, float]:
    """Correlation of forward and backward times of the same micro-batch, and the spread of forward times."""
    pairs = [(job.logged.of[each] - job.mean_of_worker(each), job.logged.of[back] - job.mean_of_worker(back))
             for each in job.start if each.type == FORWARD
             and (back := each._replace(type=BACKWARD)) in job.start]  # fmt: skip
    forward, backward = (np.concatenate([pair[side].ravel() for pair in pairs]) for side in (0, 1))
    means = np.concatenate([job.mean_of_worker(each).ravel() for each in job.start if each.type == FORWARD])
    spread = float(forward.std() / means.mean()) if means.mean() > 0 else 0.0
    if not forward.std() or not backward.std():
        return None, spread
    return float(np.corrcoef(forward, backward)[0, 1]), spread


def _stage_ratio(job: Job) -> float:
    sums: dict[bool, list[float]] = {True: [], False: []}
    for each in job.start:
        if each.type in COMPUTE:
            sums[each.stage == job.stages - 1].append(float(job.logged.of[each].mean()))
    others = float(np.mean(sums[False])) if sums[False] else 0.0
    return float(np.mean(sums[True])) / others if others > 0 else 1.0
