"""Collectives between ranks: message sizes, arrival times and bandwidth; and who holds up ranks that wait for each
other, followed back through the exchanges that passed it on.

A rank is compared with its peers: those whose exchanges in a step are the same, such as one pipeline stage's. What it
does between two exchanges is its own time. It comes late to an exchange because of its own time, or because it left the
one before late, which ended late for all: the cause is then that exchange's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.host import covered_by
from stepscope.analysis.matching import RankCollectives, participants
from stepscope.analysis.work import elements, listed_shapes, shapes_of
from stepscope.trace import Trace, Window
from stepscope.trace.naming import HOST_BACKEND, TELLING, first_match, name_patterns
from stepscope.trace.nesting import beginning_in, inherit
from stepscope.trace.window import IntervalSet, Times, union

COLLECTIVE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "row": pl.Int64,  # row in device_work, or in operators for host-run collectives
    "on_device": pl.Boolean,
    "kind": pl.String,  # one of KINDS
    "group": pl.String,  # group of ranks, "" where unknown
    "ranks": pl.Int64,  # ranks in the group; null where unknown
    "members": pl.String,  # which ranks those are, as the profiler lists them; "" where unknown
    "description": pl.String,  # what the program calls the group; "" where unknown
    "source": pl.Int64,  # of a receive: the rank that sends; else null
    "target": pl.Int64,  # of a send: the rank that receives; else null
    "bytes": pl.Int64,  # message as nccl-tests count it: of one rank, of an all-gather all ranks'; null where unknown
    "algorithm": pl.String,  # such as "tree"; "" where the kernel's name does not tell
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "launch": pl.Int64,  # row in launches; null on the host
}

KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_receive",
                "barrier", "other")  # fmt: skip

_TYPE_BYTES: Final = {
    "float": 4, "half": 2, "bfloat16": 2, "double": 8, "long": 8, "int": 4, "byte": 1, "char": 1, "bool": 1, "short": 2,
}  # fmt: skip
_ON_HOST: Final = (
    r"^c10d::(?:allreduce_|_?allgather_|_?allgather_base_|reduce_scatter_|_reduce_scatter_base_|alltoall_"
    r"|alltoall_base_|broadcast_|reduce_|send|recv_|barrier)$"
)
_OWN: Final = r"^\w+::\w*(?i:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)"
"""Operators of engines that exchange on the device by kernels of their own, such as vllm::all_reduce."""
_MARK: Final = r"^(?:nccl|rccl|xccl|hccl|oneccl|ucc):"
_DEFAULT_BYTES: Final = 4
_MOST_BYTES: Final = 1 << 50


@lru_cache(maxsize=4096)
def kind_of(name: str) -> str:
    """Kind, one of KINDS, in a collective's name."""
    return first_match(name_patterns("collectives.tsv")["kind"], name[:TELLING]) or "other"


@dataclass(frozen=True, slots=True)
class CollectiveClass:
    """What the name of a collective's kernel tells, as data/collectives.tsv knows; "" where it does not.

    Attributes:
        kind: one of KINDS.
        algorithm: such as "ring", "tree" or "NVLS". A kernel of NCCL named RING_LL runs every algorithm but trees, and
            one named TREE_LL every protocol, since NCCL compiles kernels for only some of its functions.
        protocol: "LL", "LL128" or "Simple".
        number_type: such as "bfloat16".
    """

    library: str
    kind: str
    algorithm: str
    protocol: str
    number_type: str


@lru_cache(maxsize=4096)
def collective_class(name: str) -> CollectiveClass:
    tables, name = name_patterns("collectives.tsv"), name[:TELLING]
    library, algorithm, protocol, number_type = (
        first_match(tables[table], name) for table in ("library", "algorithm", "protocol", "type")
    )
    return CollectiveClass(library, kind_of(name), algorithm, protocol, number_type)


def collectives(trace: Trace, *, device: str | None = None, window: Window | None = None) -> pl.DataFrame:
    """List a rank's collectives in order of time: those of a device, or else those run by the host.

    Args:
        device: only this device's; by default all devices'.
        window: only collectives that start in it.

    Returns:
        Columns as in COLLECTIVE_SCHEMA.
    """
    work = trace.device_work.with_row_index("row").filter(pl.col("kind") == "communication")
    if device is not None:
        work = work.filter(pl.col("device") == device)
    rows = _of_device(trace, work) if work.height else _of_host(trace)
    return beginning_in(rows, window).sort("start_ns", "row")


def bus_bytes(kind: str, message: int, ranks: int) -> float:
    """Bytes that each rank's link carries for a message, as counted by NCCL's tests.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    if ranks < 2:
        return float(message)
    factor = 2 * (ranks - 1) / ranks if kind == "all_reduce" else 1.0
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        factor = (ranks - 1) / ranks
    return message * factor


def _of_device(trace: Trace, work: pl.DataFrame) -> pl.DataFrame:
    messages = _messages_by_launch(trace)
    called = called_kinds(trace, work["launch"])
    rows = []
    columns = ("row", "name", "collective", "group", "message_elements", "message_type", "start_ns", "duration_ns",
               "launch")  # fmt: skip
    about = ("group_size", "group_ranks", "group_description", "source_rank", "target_rank")
    for own, (row, name, collective, group, count, kind, start, duration, launch), (ranks, members, *others) in zip(
        called, work.select(columns).iter_rows(), work.select(about).iter_rows(), strict=True
    ):
        kind_called = kind_of(collective) if collective else own or kind_of(name)
        size = None if count is None else count * _TYPE_BYTES.get((kind or "").lower().removeprefix("c10::"), 4)
        if size is not None and kind_called == "all_gather":
            size *= ranks or 1  # the recorded count is one rank's part
        size = _known(size if size is not None else messages.get(launch))
        of_group = (group or "", ranks, members or "", others[0] or "", *others[1:])
        algorithm = collective_class(name).algorithm
        rows.append((row, True, kind_called, *of_group, size, algorithm, start, duration, launch))
    return pl.DataFrame(rows, schema=dict(COLLECTIVE_SCHEMA), orient="row")


def called_kinds(trace: Trace, launches: pl.Series) -> list[str | None]:
    """For each row of `launches`, the kind of collective that the program called there; None if unknown.

    Kernel names tell less: NCCL's all-to-all and gather run kernels that send and receive.
    """
    rows = launches.cast(pl.Int64).fill_null(-1).to_numpy()
    by_operator, by_mark = _kinds_by_operator(trace), _kinds_by_mark(trace)
    return [by_operator.get(row) or by_mark.get(row) for row in rows.tolist()]


def _kinds_by_operator(trace: Trace) -> dict[int, str]:
    """By a launch's row, the kind that the nearest c10d operator around it names."""
    operators = trace.operators
    names = operators["name"]
    kinds = {name: kind for name in names.unique() if name.startswith("c10d::") and (kind := kind_of(name)) != "other"}
    if not kinds:
        return {}
    known = list(dict.fromkeys(kinds.values()))
    own = names.replace_strict({name: known.index(kind) for name, kind in kinds.items()}, default=-1).to_numpy()
    parents = operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    nearest = inherit(own.astype(np.int64), parents)
    calls = trace.launches.with_row_index("launch").select("launch", "operator").drop_nulls()
    return {launch: known[nearest[operator]] for launch, operator in calls.iter_rows() if nearest[operator] >= 0}


def _kinds_by_mark(trace: Trace) -> dict[int, str]:
    """By a launch's row, the kind that the backend's mark around it names (nccl:all_to_all)."""
    marks = trace.annotations.filter(pl.col("name").str.contains(_MARK) & (pl.col("kind") == "host"))
    marks = marks.select("lane", "name", mark_ns="start_ns", end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    calls = trace.launches.with_row_index("launch").select("launch", "lane", "start_ns").sort("start_ns")
    found = calls.join_asof(
        marks.sort("mark_ns"), left_on="start_ns", right_on="mark_ns", by="lane", check_sortedness=False
    ).filter(pl.col("start_ns") < pl.col("end_ns"))
    named = ((launch, kind_of(name)) for launch, name in found.select("launch", "name").iter_rows())
    return {launch: kind for launch, kind in named if kind != "other"}


def _messages_by_launch(trace: Trace) -> dict[int, int]:
    """Bytes of the first tensors for launches inside an operator that exchanges; empty without shapes."""
    operators = trace.operators.with_row_index("operator").filter(
        pl.col("name").str.contains(f"{_ON_HOST}|{_OWN}") | (pl.col("name") == "record_param_comms")
    )
    if operators.is_empty():
        return {}
    sizes = {row: _bytes(shapes, types) for row, shapes, types in
             operators.select("operator", "input_shapes", "input_types").iter_rows()}  # fmt: skip
    calls = trace.launches.with_row_index("launch").select("launch", "operator").drop_nulls()
    return {launch: sizes[operator] for launch, operator in calls.iter_rows() if sizes.get(operator)}


def exposed_on_host(trace: Trace, window: Window) -> int:
    """Nanoseconds in which host-run collectives are active and no operator computes on any thread."""
    return exposed_intervals_on_host(trace, window).total_ns


def exposed_intervals_on_host(trace: Trace, window: Window) -> IntervalSet:
    """Times in which host-run collectives are active and no operator computes on any thread."""
    running = trace.annotations.filter(pl.col("name").str.contains(HOST_BACKEND) & (pl.col("kind") == "host"))
    operators = trace.operators.with_row_index("row")
    inner = operators.filter(~pl.col("row").is_in(operators["parent"].drop_nulls().unique().implode()))
    inner = inner.filter(~pl.col("name").str.contains(r"^c10d::|^record_param_comms$"))
    waiting, computing = covered_by(running), covered_by(inner)
    elsewhere = waiting.complement(window.start_ns, window.end_ns)
    others = union(np.append(elsewhere.starts, computing.starts), np.append(elsewhere.ends, computing.ends))
    return others.complement(window.start_ns, window.end_ns)


def _of_host(trace: Trace) -> pl.DataFrame:
    """Operators that begin collectives; they last until the collective's end if the backend recorded it."""
    operators = trace.operators.with_row_index("row").filter(pl.col("name").str.contains(_ON_HOST))
    running = trace.annotations.filter(pl.col("name").str.contains(HOST_BACKEND) & (pl.col("kind") == "host"))
    ends: dict[str, list[tuple[int, int]]] = {}
    for name, start, duration in running.sort("start_ns").select("name", "start_ns", "duration_ns").iter_rows():
        ends.setdefault(kind_of(name), []).append((start, duration))
    numbers: dict[str, int] = {}
    calls = dict(operators.group_by("name").len().iter_rows())
    rows = []
    columns = ("row", "name", "input_shapes", "input_types", "start_ns", "duration_ns")
    for row, name, shapes, types, start, duration in operators.sort("start_ns").select(columns).iter_rows():
        kind = kind_of(name)
        number = numbers[kind] = numbers.get(kind, -1) + 1
        noted = ends.get(kind, [])
        length = duration
        if len(noted) == calls[name]:
            length = max(noted[number][0] + noted[number][1] - start, duration)
        size = _known(_bytes(shapes, types) or None)
        of_group = ("", trace.metadata.world_size, "", "", None, None)
        rows.append((row, False, kind, *of_group, size, "", start, length, None))
    return pl.DataFrame(rows, schema=dict(COLLECTIVE_SCHEMA), orient="row")


def _known(size: int | None) -> int | None:
    """Replace an impossible message size by None."""
    return size if size is not None and 0 <= size < _MOST_BYTES else None


def _bytes(shapes: str | None, types: str | None) -> int:
    """Bytes of a collective's tensors; lists have no recorded number type, so four bytes per number are assumed."""
    listed = listed_shapes(shapes) or shapes_of(shapes)[:1]
    count = sum(elements(shape) for shape in listed if shape)
    half = types is not None and ('["c10::BFloat16"' in types or '["c10::Half"' in types)
    return count * (2 if half else _DEFAULT_BYTES)


_FEW: Final = 3
"""So many peers are compared by the mean of the others, more by the median of all."""
_NOISE: Final = 0.1
"""Spread of own times, at most, that is noise: beyond it ranks differ."""
_PART: Final = 0.5
"""Part of a delay that a rank's own time, or a transfer, must make up for it to begin there."""
_PER_DEVIATION: Final = 1.4826
"""Standard deviation of what is normally distributed over the median distance from its median."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """Parts of ranks in exchanges, and what ranks wait for.

    Attributes:
        parts: a row for each exchange of each rank, also those that did not match. Columns rank (index), row (in its
            table), step, peers (that it was compared with, itself among them), place (number of the place in the step
            that they share), usual_ns (time since it left the exchange before, median of the peers), more_ns (its own
            beyond that of the others) and held_ns (the same, or how much later it came where nothing is known of the
            one before).
        root: for each matched exchange, the row of `parts` where the delay of the rank that came last begins.
        is_network: whether that is the transfer before it, not what its rank did.
        noise: relative spread of own times from step to step, at most 10 %.
    """

    parts: pl.DataFrame
    root: npt.NDArray[np.int64]
    is_network: npt.NDArray[np.bool_]
    noise: float

    @property
    def deviations(self) -> npt.NDArray[np.float64]:
        """How many deviations of the noise each part's own time is longer than its peers'."""
        usual = np.maximum(self.parts["usual_ns"].to_numpy(), 1)
        found: npt.NDArray[np.float64] = self.parts["held_ns"].to_numpy() / (usual * max(self.noise, 1e-3))
        return found


def lateness(ranks: Sequence[RankCollectives], matched: pl.DataFrame) -> Lateness:
    """Where the waiting in each of the matched exchanges begins; `matched` as from `matched_collectives`."""
    parts, before = _parts(ranks)
    taken = participants(matched)
    offsets = np.cumsum([0, *(rank.table.height for rank in ranks[:-1])])
    place = taken["row"].to_numpy() + offsets[taken["rank"].to_numpy()]
    exchange, arrival = np.full(parts.height, -1), np.zeros(parts.height, np.int64)
    exchange[place], arrival[place] = taken["exchange"].to_numpy(), taken["arrival_ns"].to_numpy()
    transfer = np.where(exchange >= 0, matched["transfer_ns"].to_numpy()[exchange], 0)
    parts = parts.with_columns(
        pl.Series("arrival_ns", arrival), pl.Series("transfer_ns", transfer), pl.Series("is_matched", exchange >= 0)
    )
    parts = parts.with_columns(
        _beyond("own_ns", "place").alias("more_ns"),
        pl.col("own_ns").median().over("place").cast(pl.Int64).alias("usual_ns"),
        pl.when("is_matched").then(_beyond("arrival_ns", "place", "is_matched")).alias("late_ns"),
        _beyond("transfer_ns", "place", "is_matched").alias("slower_ns"),
    )
    is_first = (before < 0) | (exchange[before] < 0)
    held = np.where(is_first, np.maximum(parts["late_ns"].fill_null(0), parts["more_ns"]), parts["more_ns"])
    parts = parts.with_columns(held_ns=pl.Series(held))
    last = np.full(matched.height, -1)
    is_last = taken["rank"].to_numpy() == matched["last"].to_numpy()[taken["exchange"].to_numpy()]
    last[taken["exchange"].to_numpy()[is_last]] = place[is_last]
    root, is_network = _roots(parts, last, before, exchange)
    columns = ("rank", "row", "step", "peers", "place", "usual_ns", "more_ns", "held_ns")
    return Lateness(parts.select(columns), root, is_network, _noise(parts))


def _noise(parts: pl.DataFrame) -> float:
    """Relative spread of own times from step to step, or, of fewer than three steps, from peer to peer."""
    told = parts.filter((pl.col("peers") > 1) & (pl.col("own_ns") > 0) & (pl.col("usual_ns") > 0))
    more = pl.col("more_ns") / pl.col("usual_ns")
    usual = pl.when(pl.len().over("rank", "slot") >= _FEW).then(more.median().over("rank", "slot")).otherwise(0)
    spread = told.select((more - usual).abs().median()).item()
    return min(_PER_DEVIATION * (spread or 0.0), _NOISE)


def left_before(starts: Times, ends: Times) -> Times:
    """For each of a rank's exchanges, which one it left last before it came to this one; -1 for none."""
    order = np.argsort(ends, kind="stable")
    place = np.searchsorted(ends[order], starts, side="right") - 1
    return np.where(place >= 0, order[place], -1) if len(ends) else ends


def _parts(ranks: Sequence[RankCollectives]) -> tuple[pl.DataFrame, Times]:
    """Each rank's exchanges with its own time before, and the row of the exchange that it left last before, or -1."""
    tables, own, before = [], [], []
    offset = 0
    for number, rank in enumerate(ranks):
        table = rank.table
        starts = table["start_ns"].to_numpy()
        ends = starts + table["duration_ns"].to_numpy()
        left = left_before(starts, ends)
        begin = starts if rank.before is None else rank.before["begin_ns"].to_numpy()
        own.append(np.where(left >= 0, starts - ends[left], starts - begin) if len(ends) else ends)
        before.append(np.where(left >= 0, left + offset, -1))
        known = [name for name in ("group_size", "description", "source", "target") if name in table.columns]
        tables.append(table.select("step", "kind", *known, rank=pl.lit(number), row=pl.int_range(pl.len())))
        offset += len(ends)
    empty = pl.DataFrame(schema={"step": pl.Int64, "kind": pl.String, "group_size": pl.Int64, "description": pl.String,
                                 "source": pl.Int64, "target": pl.Int64})  # fmt: skip
    parts = pl.concat([empty, *tables], how="diagonal_relaxed")
    parts = parts.with_columns(
        pl.Series("own_ns", np.concatenate(own)), slot=pl.int_range(pl.len()).over("rank", "step")
    )
    what = pl.struct(
        "kind", "group_size", "description", pl.col("source").is_null(), pl.col("target").is_null(), "slot"
    )
    parts = parts.with_columns(signature=what.hash().sum().over("rank", "step"))
    place = pl.struct("step", "signature", "slot").rank("dense").cast(pl.Int64) - 1
    parts = parts.with_columns(place=place).with_columns(peers=pl.len().over("place").cast(pl.Int64))
    return parts.drop("signature", "group_size", "description", "source", "target"), np.concatenate(before)


def _beyond(name: str, *keys: str) -> pl.Expr:
    """How much larger a value is than that of the others in a place."""
    value, count = pl.col(name), pl.len().over(keys)
    others = (value.sum().over(keys) - value) / (count - 1).clip(1)
    usual = pl.when(count <= _FEW).then(others).otherwise(value.median().over(keys))
    return pl.when(count > 1).then((value - usual).cast(pl.Int64)).otherwise(0)


def _roots(
    parts: pl.DataFrame, last: Times, before: Times, exchange: Times
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """For each exchange, the part where the delay of its last rank begins, and whether the network is the cause."""
    more, late, slower, arrival = (
        parts[name].fill_null(0).to_list() for name in ("more_ns", "late_ns", "slower_ns", "arrival_ns")
    )
    lasts, befores, exchanges = last.tolist(), before.tolist(), exchange.tolist()
    root, is_network = list(lasts), [False] * len(lasts)
    for number in sorted(range(len(lasts)), key=lambda each: arrival[lasts[each]]):
        part = lasts[number]
        left = befores[part]
        inherited = late[part] - more[part]
        if left < 0 or exchanges[left] < 0 or more[part] >= _PART * late[part] or inherited <= 0:
            continue
        if slower[left] >= _PART * inherited:
            root[number], is_network[number] = left, True
        else:
            earlier = exchanges[left]
            root[number], is_network[number] = root[earlier], is_network[earlier]
    return np.array(root, np.int64), np.array(is_network, np.bool_)
