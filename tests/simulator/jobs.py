"""Jobs of many ranks with one planted fault, as the summaries that their traces would give.

All ranks run the same steps: they wait for the loader, compute layers with exchanges inside their tensor-parallel or
expert group, reduce gradients with their data-parallel group, and step the optimizer; or they are stages of pipelines.
Every duration has noise of 1 to 5 %, every device a speed of its own (1 %), loaders vary by half, and now and then a
rank is held up by 3 to 6 % of a step. Sizes of the job and of the fault are drawn from a seed; a clean twin is the same
job without the fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.matching import RankCollectives
from stepscope.diagnosis.finding import Finding
from stepscope.diagnosis.rank_summary import RankRecord

US: Final = 1_000
MS: Final = 1_000_000
LISTED: Final = 30
_HICCUPS: Final = 0.3
"""Part of the steps in which some rank is held up a little, in clean twins too."""
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Planted:
    """What was planted: words that the title of the first finding must have, and the rule."""

    fault: str
    rule: str
    words: tuple[str, ...]

    def is_told(self, findings: Sequence[Finding]) -> bool:
        """Whether the first finding is about it."""
        if not findings or findings[0].rule != self.rule:
            return False
        return all(re.search(rf"{re.escape(word)}\b", findings[0].title) for word in self.words)


@dataclass
class Job:
    """A running job: the time of each rank, and what it did since its last exchange."""

    ranks: int
    tensor: int
    stages: int
    per_node: int
    noise: float
    random: np.random.Generator
    speed: Numbers = field(init=False)  # how much longer each device takes
    time: Numbers = field(init=False)
    spent: dict[str, Numbers] = field(default_factory=dict)
    works: Numbers = field(init=False)
    since: Numbers = field(init=False)
    rows: list[list[tuple[Any, ...]]] = field(init=False)
    before: list[list[dict[str, float]]] = field(init=False)
    kernels: dict[tuple[str, str], Numbers] = field(default_factory=dict)
    counts: dict[tuple[str, str], Numbers] = field(default_factory=dict)
    begins: list[Numbers] = field(default_factory=list)
    sums: dict[str, Numbers] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = self.ranks
        self.speed, self.time, self.works = np.ones(count), np.zeros(count), np.zeros(count)
        self.since = np.zeros(count)
        self.rows, self.before = [[] for _ in range(count)], [[] for _ in range(count)]

    @property
    def number(self) -> npt.NDArray[np.int64]:
        return np.arange(self.ranks)

    def group(self, of: str) -> npt.NDArray[np.int64]:
        """Number of each rank's group; ranks of a tensor-parallel group follow each other."""
        number, inner = self.number, self.tensor
        if of == "tp":
            return number // inner
        if of == "dp":
            return number % (inner * self.stages) if self.stages > 1 else number % inner
        return np.zeros(self.ranks, np.int64)

    def _noisy(self, ns: Numbers | float) -> Numbers:
        return np.maximum(ns * (1 + self.noise * self.random.standard_normal(self.ranks)), 0)

    def host(self, cause: str, ns: Numbers | float, ranks: npt.NDArray[np.int64] | None = None) -> None:
        """The device of each rank waits for its host."""
        length = self._noisy(np.zeros(self.ranks) + ns)
        self._spend(cause, length if ranks is None else np.where(np.isin(self.number, ranks), length, 0))

    def compute(
        self, name: str, ns: Numbers | float, grid: npt.NDArray[Any] | int = 128, works: Numbers | int = 1
    ) -> None:
        length = self._noisy(ns * self.speed)
        self._spend("busy", length)
        self.works = self.works + works
        grids = np.broadcast_to(np.asarray(grid), self.ranks)
        for each in np.unique(grids).tolist():
            key, mine = (name, f"[{each}, 1, 1]"), grids == each
            for sums, more in ((self.kernels, length), (self.counts, works)):
                sums.setdefault(key, np.zeros(self.ranks))
                sums[key] = sums[key] + np.where(mine, more, 0)

    def _spend(self, cause: str, length: Numbers) -> None:
        self.spent[cause] = self.spent.get(cause, np.zeros(self.ranks)) + length
        self.sums[cause] = self.sums.get(cause, np.zeros(self.ranks)) + length
        self.time = self.time + length

    def exchange(
        self, kind: str, of: str, size: npt.NDArray[np.int64] | int, ns: float, slow: Numbers | float = 1.0
    ) -> None:
        """Each group's ranks wait for the last of them, then for the transfer."""
        group = self.group(of)
        groups = int(group.max()) + 1
        last = np.full(groups, -np.inf)
        np.maximum.at(last, group, self.time)
        factor = np.full(groups, 0.0)
        np.maximum.at(factor, group, np.zeros(self.ranks) + slow)
        length = ns * factor * np.maximum(1 + self.noise * self.random.standard_normal(groups), 0.1)
        end = (last + length)[group]
        sizes = np.broadcast_to(np.asarray(size), self.ranks)
        members = [self.number[group == each] for each in range(groups)]
        texts = [
            str(each.tolist()) if len(each) <= LISTED else f"{str(each[:LISTED].tolist())[:-1]}, ...]"
            for each in members
        ]
        names = {"tp": "mesh_tp", "dp": "mesh_dp"}.get(of, "")
        for rank in range(self.ranks):
            mine = int(group[rank])
            about = (kind, f"{of}{mine}", names, texts[mine], None, None, int(sizes[rank]), len(members[mine]))
            self._note(rank, about, end[rank])
        self._left(self.number, end)

    def _note(self, rank: int, about: tuple[Any, ...], end: float) -> None:
        start = self.time[rank]
        self.rows[rank].append((*about, int(start), int(end - start), len(self.begins) - 1))
        passed = {cause: values[rank] for cause, values in self.spent.items()}
        self.before[rank].append(passed | {"begin_ns": self.since[rank], "works": self.works[rank]})

    def _left(self, ranks: npt.NDArray[np.int64], end: Numbers) -> None:
        self.time[ranks] = self.since[ranks] = end[ranks]
        self.works[ranks] = 0
        for values in self.spent.values():
            values[ranks] = 0

    def pipeline(self, batches: int, ns: float, slower: dict[int, float]) -> None:
        """One forward and one backward pass of each micro-batch through the stages, in the order of 1F1B."""
        of = (self.number // self.tensor) % self.stages
        ranks = [np.flatnonzero(of == stage) for stage in range(self.stages)]
        orders = []
        for stage in range(self.stages):
            warm = min(self.stages - stage - 1, batches)
            steady = [each for number in range(batches - warm) for each in (("F", warm + number), ("B", number))]
            orders.append([*(("F", number) for number in range(warm)), *steady,
                           *(("B", number) for number in range(batches - warm, batches))])  # fmt: skip
        sent: dict[tuple[str, int, int], tuple[Numbers, list[int]]] = {}
        while any(orders):
            for stage, order in enumerate(orders):
                while order:
                    way, number = order[0]
                    peer = stage - 1 if way == "F" else stage + 1
                    inside = 0 <= peer < self.stages
                    if inside and (way, peer, number) not in sent:
                        break
                    order.pop(0)
                    if inside:
                        self._receive(ranks[stage], ranks[peer], *sent.pop((way, peer, number)))
                    factor = slower.get(stage, 1.0) * (1 if way == "F" else 2)
                    alone = np.where(of == stage, ns * factor, 0)
                    self.compute(f"gemm{way}", alone, works=np.where(of == stage, 1, 0))
                    after = stage + 1 if way == "F" else stage - 1
                    if 0 <= after < self.stages:
                        places = [
                            self._send(rank, to)
                            for rank, to in zip(ranks[stage].tolist(), ranks[after].tolist(), strict=True)
                        ]
                        sent[way, stage, number] = (self.time[ranks[stage]].copy(), places)

    def _send(self, rank: int, to: int) -> int:
        self._note(rank, ("send_receive", "pp", "mesh_pp", "", None, int(to), 8 << 20, self.stages), self.time[rank])
        return len(self.rows[rank]) - 1

    def _receive(
        self, ranks: npt.NDArray[np.int64], peers: npt.NDArray[np.int64], at: Numbers, places: list[int]
    ) -> None:
        end = np.maximum(self.time[ranks], at) + 20 * US
        for number, (rank, peer) in enumerate(zip(ranks, peers, strict=True)):
            about = ("send_receive", "pp", "mesh_pp", "", int(peer), None, 8 << 20, self.stages)
            self._note(rank, about, end[number])
            row = self.rows[peer][places[number]]
            self.rows[peer][places[number]] = (*row[:9], int(end[number] - at[number]), row[10])
        whole = self.time.copy()
        whole[ranks] = end
        self._left(ranks, whole)

    def step(self) -> None:
        self.begins.append(self.time.copy())

    def records(self) -> list[RankRecord]:
        steps = len(self.begins)
        clock = self.random.integers(-MS * 1000, MS * 1000, self.ranks)
        columns = ["kind", "group", "description", "members", "source", "target", "bytes", "group_size", "start_ns",
                   "duration_ns", "step"]  # fmt: skip
        schema = dict.fromkeys(columns, pl.Int64) | dict.fromkeys(
            ("kind", "group", "description", "members"), pl.String
        )
        found = []
        for rank in range(self.ranks):
            table = pl.DataFrame(self.rows[rank], schema=schema, orient="row")
            before = pl.DataFrame(self.before[rank], infer_schema_length=None).fill_null(0)
            order = table["start_ns"].arg_sort()
            table, before = table[order], before[order]
            offset = int(clock[rank])
            table = table.with_columns(start_ns=pl.col("start_ns") + offset)
            before = before.with_columns(begin_ns=pl.col("begin_ns") + offset).cast(pl.Int64)
            kernels = pl.DataFrame(
                [(*key, int(self.counts[key][rank]), int(values[rank])) for key, values in sorted(self.kernels.items())
                 if values[rank]],
                schema={"name": pl.String, "grid": pl.String, "count": pl.Int64, "ns": pl.Int64}, orient="row",
            )  # fmt: skip
            communicates = int(table["duration_ns"].sum()) // steps
            causes = {cause: int(values[rank]) // steps for cause, values in self.sums.items() if cause != "busy"}
            length = int(self.time[rank] - self.begins[0][rank]) // steps
            found.append(
                RankRecord(
                    f"rank {rank}", f"rank{rank}.json", self.ranks, length, steps,
                    RankCollectives(table, 0, before, rank), causes, {}, communicates, True,
                    devices=self.per_node, kernels=kernels,
                )
            )  # fmt: skip
        return found


def drawn(ranks: int, seed: int, fault: str | None) -> tuple[list[RankRecord], Planted | None]:
    """The ranks of a job that is drawn from a seed, and what is planted in it; of a clean twin, None."""
    random = np.random.default_rng(seed)
    per_node = 4 if ranks <= 8 else 8
    name = fault or ""
    tensor = int(random.choice([1, per_node]))
    if name.removeprefix("clean ") in ("bubbles", "slow stage"):
        return _pipelined(ranks, name, random)
    if name.removeprefix("clean ") == "slow link":
        tensor = per_node  # several groups, which can be compared
    job = Job(ranks, tensor, 1, per_node, float(random.uniform(0.01, 0.05)), random)
    layers, steps = int(random.integers(4, 10)), int(random.integers(8, 16))
    layer_ns = float(random.uniform(0.3, 1.5)) * MS
    experts = name.removeprefix("clean ") == "unbalanced experts"
    plant = _FAULTS[name.removeprefix("clean ")](job, random)
    if name.startswith("clean "):
        plant, job.speed = _Plant(None), np.ones(ranks)
    job.speed = job.speed * (1 + 0.01 * random.standard_normal(ranks))
    step_ns = layers * layer_ns * 3
    for step in range(steps):
        job.step()
        job.host("input", 0.02 * step_ns * random.gamma(4, 0.25, ranks))
        if random.random() < _HICCUPS:
            job.host("python", float(random.uniform(0.03, 0.06)) * step_ns, random.integers(ranks, size=1))
        plant.each_step(job, step, step_ns)
        job.host("python", 0.02 * step_ns * plant.host)
        job.host("dispatch", 0.01 * step_ns * plant.host)
        for way in (1, 2):
            for _ in range(layers):
                job.compute("gemm", 0.7 * way * layer_ns)
                job.compute("attention", 0.3 * way * layer_ns * plant.sequence, grid=plant.grid)
                if experts:
                    job.exchange("all_to_all", "ep", plant.tokens, 0.05 * layer_ns)
                    job.compute("experts", 0.5 * way * layer_ns * plant.tokens / (1 << 20), grid=plant.tokens >> 13)
                    job.exchange("all_to_all", "ep", plant.tokens, 0.05 * layer_ns)
                elif tensor > 1:
                    job.exchange("all_reduce", "tp", 4 << 20, 0.05 * layer_ns)
        for _ in range(4):
            job.exchange("all_reduce", "dp", 25 << 20, 0.03 * step_ns, plant.slow_link)
        job.compute("adamw", 0.03 * step_ns)
    return job.records(), plant.planted


def _pipelined(ranks: int, name: str, random: np.random.Generator) -> tuple[list[RankRecord], Planted | None]:
    stages = 4
    job = Job(ranks, 1, stages, 8, float(random.uniform(0.01, 0.05)), random)
    ns, steps = float(random.uniform(0.3, 1.5)) * MS, int(random.integers(4, 8))
    batches, slower, planted = int(random.integers(40, 64)), {}, None
    if name == "bubbles":
        batches = int(random.integers(4, 10))
        planted = Planted(name, "pipeline-bubbles", (f"{batches} micro-batches for {stages} stages",))
    elif name == "slow stage":
        stage = int(random.integers(stages))
        slower = {stage: float(random.uniform(1.3, 1.8))}
        planted = Planted(name, "pipeline-bubbles", (f"stage {stage} computes",))
    for _ in range(steps):
        job.step()
        job.pipeline(batches, ns, slower)
        job.exchange("all_reduce", "dp", 25 << 20, ns)
        job.compute("adamw", ns)
        job.exchange("all_reduce", "world", 4, 20 * US)
    return job.records(), planted


@dataclass
class _Plant:
    planted: Planted | None
    each_step: Callable[[Job, int, float], None] = lambda job, step, step_ns: None
    sequence: Numbers | float = 1.0
    grid: npt.NDArray[np.int64] | int = 128
    host: Numbers | float = 1.0
    tokens: npt.NDArray[np.int64] = field(default_factory=lambda: np.array(1 << 20))
    slow_link: Numbers | float = 1.0


def _one(job: Job, rank: int, value: float) -> Numbers:
    return np.where(job.number == rank, value, 1.0)


def _pause(fault: str, cause: str, words: str, *, wanders: bool = False, every: int = 1) -> Callable[..., _Plant]:
    def plant(job: Job, random: np.random.Generator) -> _Plant:
        rank, share = int(random.integers(job.ranks)), float(random.uniform(0.1, 0.4))

        def each_step(job: Job, step: int, step_ns: float) -> None:
            if step % every == every - 1:
                who = int(random.integers(job.ranks)) if wanders else rank
                job.host(cause, share * every * step_ns, np.array([who]))

        named = () if wanders else (f"rank {rank}",)
        return _Plant(Planted(fault, "late-rank", (*named, words)), each_step)

    return plant


def _slow_device(job: Job, random: np.random.Generator) -> _Plant:
    rank = int(random.integers(job.ranks))
    job.speed = _one(job, rank, float(random.uniform(1.12, 1.5)))
    return _Plant(Planted("slow GPU", "late-rank", (f"rank {rank}", "same kernels")))


def _slow_node(job: Job, random: np.random.Generator) -> _Plant:
    node = int(random.integers(job.ranks // job.per_node))
    job.speed = np.where(job.number // job.per_node == node, float(random.uniform(1.12, 1.5)), 1.0)
    return _Plant(Planted("slow node", "late-rank", (f"node {node}", "same kernels")))


def _longer(job: Job, random: np.random.Generator) -> _Plant:
    rank, more = int(random.integers(job.ranks)), float(random.uniform(1.4, 2.5))
    grid = np.where(job.number == rank, 256, 128)
    planted = Planted("more work", "late-rank", (f"rank {rank}", "larger pieces of work"))
    return _Plant(planted, sequence=_one(job, rank, more), grid=grid)


def _contention(job: Job, random: np.random.Generator) -> _Plant:
    rank = int(random.integers(job.ranks))
    host = _one(job, rank, float(random.uniform(5, 12)))
    return _Plant(Planted("host contention", "late-rank", (f"rank {rank}", "Python code")), host=host)


def _experts(job: Job, random: np.random.Generator) -> _Plant:
    rank = int(random.integers(job.ranks))
    tokens = (_one(job, rank, float(random.uniform(1.4, 2.5))) * (1 << 20)).astype(np.int64)
    planted = Planted("unbalanced experts", "late-rank", (f"rank {rank}", "all-to-all"))
    return _Plant(planted, tokens=tokens)


def _link(job: Job, random: np.random.Generator) -> _Plant:
    rail = int(random.integers(job.tensor))
    slow = np.where(job.number % job.tensor == rail, float(random.uniform(2.5, 6)), 1.0)
    return _Plant(Planted("slow link", "slow-transfer", (f"ranks {rail}, {rail + job.tensor}",)), slow_link=slow)


_FAULTS: Final[dict[str, Callable[[Job, np.random.Generator], _Plant]]] = {
    "loader": _pause("loader", "input", "loading data"),
    "garbage collection": _pause("garbage collection", "garbage_collection", "collecting garbage", wanders=True),
    "checkpoint": _pause("checkpoint", "checkpoint", "checkpoint", every=4),
    "host contention": _contention,
    "slow GPU": _slow_device,
    "slow node": _slow_node,
    "more work": _longer,
    "unbalanced experts": _experts,
    "slow link": _link,
}
FAULTS: Final = (*_FAULTS, "bubbles", "slow stage")
