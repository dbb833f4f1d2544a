"""Collectives between ranks: message sizes, arrival times and bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import polars as pl

from stepscope.analysis.host import covered_by
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
    "bytes": pl.Int64,  # message of one rank; null where unknown
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
    columns = ("row", "name", "collective", "group", "group_size", "message_elements", "message_type", "start_ns",
               "duration_ns", "launch")  # fmt: skip
    for own, (row, name, collective, group, ranks, count, kind, start, duration, launch) in zip(
        called, work.select(columns).iter_rows(), strict=True
    ):
        size = None if count is None else count * _TYPE_BYTES.get((kind or "").lower().removeprefix("c10::"), 4)
        size = _known(size if size is not None else messages.get(launch))
        kind_called = kind_of(collective) if collective else own or kind_of(name)
        rows.append((row, True, kind_called, group or "", ranks, size, start, duration, launch))
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
        rows.append((row, False, kind, "", trace.metadata.world_size, size, start, length, None))
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


MATCHED_SCHEMA: Final[dict[str, pl.DataType | type[pl.DataType]]] = {
    "step": pl.Int64,
    "kind": pl.String,
    "bytes": pl.Int64,
    "last": pl.Int64,  # index of the rank that arrived last, in the given order of ranks
    "late_ns": pl.Int64,  # its delay after the second to last
    "waiting_ns": pl.Int64,  # wait of the rank that arrived first
    "waits_ns": pl.List(pl.Int64),  # wait of each rank
    "transfer_ns": pl.Int64,  # from the last arrival to the end
    "arrivals_ns": pl.List(pl.Int64),  # of each rank, on the first rank's clock
    "rows": pl.List(pl.Int64),  # of each rank, in its table
    "shifts_ns": pl.List(pl.Int64),  # how far each rank's clock is ahead of the first one's there
    "apart_ns": pl.List(pl.Int64),  # how much later each rank ends than the median of all, on the first rank's clock
}

_FEWEST_FOR_DRIFT: Final = 20
_LONG_ENOUGH_NS: Final = 1_000_000_000
"""Collectives, and time between the first and the last one, from which clocks that drift are told from noise."""
_BETTER: Final = 0.5
"""What is left of the error with a drift, at most, if the drift is to be believed."""


@dataclass(frozen=True, slots=True)
class RankCollectives:
    """Collectives of one rank.

    Attributes:
        table: columns step, kind, group, bytes, start_ns, duration_ns, in order of time.
        before: what the rank did before each of them, since it left the one before or its steps began: columns
            begin_ns, works (pieces of device work), and nanoseconds by cause; None where unknown.
    """

    table: pl.DataFrame
    clock_ns: int = 0  # offset to the wall clock; 0 where unknown
    before: pl.DataFrame | None = None


def matched_collectives(ranks: Sequence[RankCollectives]) -> pl.DataFrame:
    """Match collectives that all ranks took part in.

    Collectives match by step, kind, group and order in the step. Ranks' clocks differ; a collective ends on all ranks
    at nearly the same time, so each rank's clock is shifted by the median difference of its ends from the first rank's,
    or along a line where the differences grow; see `clocks`.

    Returns:
        Columns as in MATCHED_SCHEMA.
    """
    if len(ranks) < 2:
        return pl.DataFrame(schema=dict(MATCHED_SCHEMA))
    keys = ["step", "kind", "group", "order"]
    tables = [rank.table for rank in ranks]
    counts = [table.height for table in tables]
    whole = (
        pl.concat(
            (table.select("step", "kind", "group", "bytes", "start_ns", "duration_ns") for table in tables),
            how="vertical_relaxed",
        )
        .with_columns(
            pl.col("group").fill_null(""),
            pl.col("start_ns") + np.repeat([rank.clock_ns for rank in ranks], counts),
            rank=np.repeat(np.arange(len(ranks)), counts),
            row=np.concatenate([np.arange(count) for count in counts]),
        )
        .sort("rank", "start_ns", "row")
        .with_columns(order=pl.int_range(pl.len()).over("rank", "step", "kind", "group"))
    )
    common = whole.filter(pl.len().over(keys) == len(ranks))
    first = common.filter(pl.col("rank") == 0).select(*keys, place=pl.int_range(pl.len()))
    joined = common.join(first, on=keys).sort("place", "rank")
    if joined.is_empty():
        return pl.DataFrame(schema=dict(MATCHED_SCHEMA))
    starts, lengths, rows = (
        joined[name].to_numpy().reshape(-1, len(ranks)).T for name in ("start_ns", "duration_ns", "row")
    )
    ends = starts + lengths
    shift = clock_shifts(ends)
    arrivals, ends = starts - shift, ends - shift
    order = np.sort(arrivals, axis=0)
    columns = {
        **{name: joined[name].gather_every(len(ranks)) for name in ("step", "kind", "bytes")},
        "last": np.argmax(arrivals, axis=0),
        "late_ns": order[-1] - order[-2],
        "waiting_ns": np.minimum(order[-1] - order[0], np.max(ends - arrivals, axis=0)),
        "waits_ns": _lists(order[-1] - arrivals),
        "transfer_ns": np.maximum(np.median(ends, axis=0).astype(np.int64) - order[-1], 0),
        "arrivals_ns": _lists(arrivals),
        "rows": _lists(rows),
        "shifts_ns": _lists(shift),
        "apart_ns": _lists(ends - np.median(ends, axis=0).astype(np.int64)),
    }
    return pl.DataFrame(columns, schema=dict(MATCHED_SCHEMA))


def clock_shifts(ends: Times) -> Times:
    """How far each rank's clock is ahead of the first one's at each collective; shape (ranks, collectives)."""
    ahead = ends - ends[0]
    shift = np.repeat(np.median(ahead, axis=1).astype(np.int64)[:, None], ends.shape[1], axis=1)
    time = ends[0] - ends[0, 0]
    if ends.shape[1] < _FEWEST_FOR_DRIFT or time.max() < _LONG_ENOUGH_NS:
        return shift
    third = len(time) // 3
    for rank in range(1, len(ends)):
        early, late = (np.median(ahead[rank, part]) for part in (slice(None, third), slice(-third, None)))
        drift = (late - early) / (np.median(time[-third:]) - np.median(time[:third]))
        line = drift * time
        line = (line + np.median(ahead[rank] - line)).astype(np.int64)
        before, after = (np.median(np.abs(ahead[rank] - one)) for one in (shift[rank], line))
        if after <= _BETTER * before:
            shift[rank] = line
    return shift


class Clock(NamedTuple):
    """How a rank's clock compares with the first rank's.

    Attributes:
        ahead_ns: at the first collective.
        drift: how much faster it runs, as a share; 0 unless the collectives show it.
        error_ns: median distance of the ends of its collectives from those of all ranks, which remains.
    """

    ahead_ns: int
    drift: float
    error_ns: int


def clocks(matched: pl.DataFrame) -> list[Clock]:
    """The clock of each rank, by the ends of matched collectives; none without any."""
    if matched.is_empty():
        return []
    shifts, apart, arrivals = (np.array(matched[name].to_list()).T for name in ("shifts_ns", "apart_ns", "arrivals_ns"))
    length = max(int(arrivals[0, -1] - arrivals[0, 0]), 1)
    return [
        Clock(int(shift[0]), float(shift[-1] - shift[0]) / length, int(np.median(np.abs(left))))
        for shift, left in zip(shifts, apart, strict=True)
    ]


def _lists(values: Times) -> pl.Series:
    """A list of all ranks' values for each collective; values of shape (ranks, collectives)."""
    lists: pl.Series = pl.Series(np.ascontiguousarray(values.T)).cast(pl.List(pl.Int64))
    return lists


def of_ranks(matched: pl.DataFrame, name: str) -> Times:
    """A column of lists in `matched_collectives` as numbers; shape (collectives, ranks)."""
    lists = matched[name]
    values: Times = lists.list.to_array(len(lists[0])).to_numpy()
    return values
