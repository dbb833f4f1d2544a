"""Shared by rules about the program's own operators: which these are, the pauses between them, their work's minimum
time, and their copies between host and device, including round trips through the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.loops import Loop
from stepscope.analysis.module_paths import BACKWARD_NAME
from stepscope.analysis.patterns import WrittenOutAttention, written_out_attention
from stepscope.analysis.work import ARITHMETIC, PLAIN, REDUCTIONS, VIEWS, Shape, base_name
from stepscope.analysis.work import tensor_shapes_of as shapes_of
from stepscope.diagnosis.finding import Interval
from stepscope.diagnosis.view import View, once, rows_of
from stepscope.trace.nesting import Rows, by_level, containing, depths, inherit, row_numbers
from stepscope.trace.window import Times
from stepscope.whatif import Change
from stepscope.whatif.changes import Lanes, scaled_host_time, scaled_operators, scaled_slices, scaled_work, together

_RECURRENT: Final = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_PRODUCTS: Final = frozenset({"mm", "bmm", "addmm", "matmul", "linear", "baddbmm", "mv", "dot"})
_ELEMENTWISE: Final = PLAIN | ARITHMETIC | REDUCTIONS
_GOOD: Final = 0.9
"""Quantile that counts as the best rate; the very best may be a clock error."""
_SHORT: Final = 0.05
"""Quantile of lengths that counts as an operator's overhead."""
_SLICING: Final = frozenset({"select", "slice", "narrow", "index", "index_select", "unbind", "split", "chunk"})


class WorkLeft:
    """Estimates the least time that operators' work takes, from the trace's own rates."""

    def __init__(self, view: View) -> None:
        self._operators = view.trace.operators
        self._names_and_shapes = self._operators.select("name", "input_shapes")
        self._parents = view.parents
        self._working = working_ns(view)
        self._on_device = view.device is not None

    def ns(self, rows: Rows) -> float:
        """Sum over operators that run one after the other, nanoseconds.

        Matrix products are estimated from their operations and element-wise operators from the data they move;
        slicing counts as zero; other operators lose the overhead of the operators inside them.
        """
        columns = self._names_and_shapes[rows]
        result = 0.0
        for (name, shapes), taken, operators in zip(
            columns.iter_rows(), self._working[rows].tolist(), self._inner[rows].tolist(), strict=True
        ):
            base = base_name(name)
            if base in VIEWS or base in _SLICING:
                continue
            tensors = shapes_of(shapes)
            if base in _RECURRENT and tensors and self._ns_per_operation:
                left = _of_weights(tensors) * self._ns_per_operation
            elif base in _PRODUCTS and (work := operations(tensors)) and self._ns_per_operation:
                left = work * self._ns_per_operation
            elif base in PLAIN and tensors and self._ns_per_element:
                left = _elements(tensors) * self._ns_per_element
            else:
                left = taken - operators * self.overhead_ns
            result += min(max(left, 0.0), taken)
        return result

    def product_ns(self, operations: int) -> float:
        """Time of this many operations in matrix products; 0 if the trace has none."""
        return operations * self._ns_per_operation

    def elementwise_ns(self, elements: int) -> float:
        """Time of moving this many elements in elementwise operators; 0 if the trace has none."""
        return elements * self._ns_per_element

    @cached_property
    def overhead_ns(self) -> float:
        """Cost of a call that does no work."""
        idle = self._working > 0 if self._on_device else (self._inner == 1) & self._is(_ELEMENTWISE)
        lengths = self._working[idle]
        return float(np.quantile(lengths, _SHORT)) if len(lengths) else 0.0

    @cached_property
    def _inner(self) -> Rows:
        """Number of operators inside each operator, itself included."""
        count = np.ones(len(self._parents), np.int64)
        for rows in by_level(depths(self._parents))[:0:-1]:
            np.add.at(count, self._parents[rows], count[rows])
        return count

    def _is(self, names: frozenset[str]) -> npt.NDArray[np.bool_]:
        base = self._operators["name"].str.extract(r"([^:]*?)_?$").fill_null("")
        return base.is_in(list(names)).to_numpy()

    @cached_property
    def _ns_per_operation(self) -> float:
        return self._best_rate(_PRODUCTS, operations)

    @cached_property
    def _ns_per_element(self) -> float:
        return self._best_rate(PLAIN, _elements)

    def _best_rate(self, names: frozenset[str], amount: Callable[[tuple[Shape, ...]], int]) -> float:
        """Nanoseconds per unit of `amount` at these operators' best rate; equal operators count by their median."""
        alike = (
            self._operators.select("name", "input_shapes", working=pl.Series(self._working))
            .filter(pl.Series(self._is(names)) & (pl.col("working") > 0) & pl.col("input_shapes").is_not_null())
            .group_by("name", "input_shapes")
            .agg(pl.col("working").median().cast(pl.Int64))
        )
        rates = [
            taken / work
            for shapes, taken in alike.select("input_shapes", "working").iter_rows()
            if (work := amount(shapes_of(shapes))) and taken > 2 * self.overhead_ns
        ]
        return float(np.quantile(rates, 1 - _GOOD)) if rates else 0.0


@once
def work_left(view: View) -> WorkLeft:
    """The estimates of a view, with what they rest on computed once for all rules."""
    return WorkLeft(view)


def _elements(tensors: tuple[Shape, ...]) -> int:
    return sum(map(prod, tensors))


def _of_weights(tensors: tuple[Shape, ...]) -> int:
    """Multiplications and additions of a recurrent layer's inputs with its weights, which are its matrices."""
    return 2 * prod(tensors[0][:-1]) * sum(prod(shape) for shape in tensors[1:] if len(shape) == 2)


def operations(tensors: tuple[Shape, ...]) -> int:
    """Multiplications and additions of a matrix product of these inputs; 0 if the shapes are unclear.

    The inputs are those of mm, bmm, matmul and linear (two matrices first), addmm (a bias, then two matrices), or of mv
    and dot, which end with a vector.
    """
    if len(tensors) == 2 and len(tensors[1]) == 1 and tensors[0][-1:] == tensors[1]:
        return 2 * prod(tensors[0])
    matrices = [shape for shape in tensors if len(shape) >= 2]
    if len(matrices) < 2:
        return 0
    left, right = matrices[-2], matrices[-1]
    if left[-1] not in right[-2:]:
        return 0
    return 2 * prod(left) * (right[-1] if left[-1] == right[-2] else right[-2])


@once
def attention_by_hand(view: View) -> list[WrittenOutAttention]:
    """The attention in the span whose scores are separate tensors."""
    return written_out_attention(view.trace, rows_of(view.operators))


HostTime: TypeAlias = tuple[Lanes, Times, Times]
"""Threads, starts and ends (nanoseconds) of intervals, each of shape (n,)."""
LONGEST_PAUSE_NS: Final = 50_000
"""Longest pause between consecutive operators that counts: Python needs no longer to reach the next one."""


@once
def called_from_python(view: View) -> Rows:
    """Rows of the forward operators in the span that no library operator called, in order.

    Operators inside a custom autograd function of the program count as the program's.
    """
    operators = view.operators
    parents = view.trace.operators["name"].gather(operators["parent"])
    libraries = parents.str.contains("::") | parents.str.contains(BACKWARD_NAME)
    return rows_of(operators.filter(~libraries.fill_null(False) & ~operators["name"].str.contains(BACKWARD_NAME)))


def working_ns(view: View) -> Rows:
    """For each row of `operators`, the time of its work: on the device, or without a device on the thread."""
    if view.device is None:
        return view.trace.operators["duration_ns"].to_numpy()
    return view.operator_costs["device_total_ns"].to_numpy()


def length_ns(view: View, time: HostTime) -> int:
    """Total length of a thread's pauses; 0 with a device."""
    _, start, end = time
    return int((end - start).sum()) if view.device is None else 0


def pauses(view: View, *sequences: Rows) -> HostTime:
    """A thread's time between each operator and the next one of its sequence; needs at least one operator."""
    operators = view.trace.operators
    starts, durations = operators["start_ns"].to_numpy(), operators["duration_ns"].to_numpy()
    row = np.concatenate([rows[:-1] for rows in sequences])
    following = np.concatenate([rows[1:] for rows in sequences])
    end = starts[row] + durations[row]
    return operators["lane"].to_numpy()[row], end, np.clip(starts[following], end, end + LONGEST_PAUSE_NS)


def engine_pauses(view: View, rows: Rows) -> HostTime:
    """The time after each of these outermost operators until the next operator of its thread begins."""
    outermost = view.trace.operators.with_row_index("row").filter(pl.col("parent").is_null()).sort("lane", "row")
    end = pl.col("start_ns") + pl.col("duration_ns")
    pause = (pl.col("start_ns").shift(-1).over("lane") - end).fill_null(0).clip(0, LONGEST_PAUSE_NS)
    following = outermost.select(pl.col("row").cast(pl.Int64), "lane", end=end, pause=pause)
    mine = following.filter(pl.col("row").is_in(pl.Series(rows, dtype=pl.Int64).implode()))
    ends = mine["end"].to_numpy()
    return mine["lane"].to_numpy(), ends, ends + mine["pause"].to_numpy()


def scaled_with_pauses(rows: Rows, between: Sequence[HostTime], factor: float) -> Change:
    """Multiply the time of these operators, on the host and the device, and of the pauses between them."""
    return together(scaled_operators(rows, factor), *(scaled_host_time(*each, factor) for each in between))


def outermost_in_order(view: View) -> tuple[Rows, Rows]:
    """All outermost operators, by thread and time, and each operator's position in that order, -1 for others."""
    ordered = rows_of(view.trace.operators.with_row_index("row").filter(pl.col("parent").is_null()).sort("lane", "row"))
    position = np.full(view.trace.operators.height, -1, np.int64)
    position[ordered] = np.arange(len(ordered))
    return ordered, position


NORMS: Final = frozenset({"linalg_vector_norm", "norm", "frobenius_norm"})
_AROUND_NORMS: Final = NORMS | {"detach", "item", "pow", "square", "sum", "add", "to", "mul", "_to_copy"}


def reported_elsewhere(found: Sequence[Loop]) -> list[Loop]:
    """Loops that other rules report: zeroing gradients, clipping them, and hand-written updates."""
    clips = any(is_clipping(loop) for loop in found)
    return [
        loop
        for loop in found
        if is_zeroing(loop) or is_clipping(loop) or is_update(loop) or (clips and is_scaling(loop))
    ]


def is_zeroing(loop: Loop) -> bool:
    names = {base_name(name) for name in loop.body}
    return "zero" in names and names <= {"zero", "detach", "requires_grad"}


def is_clipping(loop: Loop) -> bool:
    names = {base_name(name) for name in loop.body}
    is_norm = not names.isdisjoint(NORMS) or {"pow", "sum"} <= names or {"square", "sum"} <= names
    return is_norm and names <= _AROUND_NORMS


def is_scaling(loop: Loop) -> bool:
    return set(loop.body) <= {"aten::mul_", "aten::detach", "aten::to"} and "aten::mul_" in loop.body


def is_update(loop: Loop) -> bool:
    changed = {base_name(name) for name in loop.body if name.endswith("_")}
    return any(base_name(name) == "sqrt" for name in loop.body) and not changed.isdisjoint({"addcdiv", "sub", "add"})


SHORT_KERNEL_NS: Final = 5_000
"""Upper limit for creating a tensor on the device: a kernel that fills a megabyte, or a launch gap."""


def copies(view: View) -> pl.DataFrame:
    """The span's copies that operators made, in order of time.

    Columns row (the outermost operator that copies), launch, lane, start_ns (of the operator), end_ns (of the
    operator or of the copy, whichever ends later), direction (copy_in or copy_out), bytes, copy_ns (the device's
    time), step.
    """
    work = view.work.filter(pl.col("kind").is_in(["copy_in", "copy_out"]) & pl.col("launch").is_not_null())
    launch = work["launch"].to_numpy().astype(np.int64)
    row = np.append(outermost_of(view), -1)[view.launching[launch]]
    end_ns = pl.col("start_ns") + pl.col("duration_ns")
    found = work.select("bytes", direction="kind", copy_ns="duration_ns", end_ns=end_ns).with_columns(
        row=pl.Series(row, dtype=pl.Int64), launch=pl.Series(launch), lane=view.trace.launches["lane"].gather(launch)
    )
    found = found.filter(pl.col("row") >= 0)
    operators = view.trace.operators[found["row"]]
    start = operators["start_ns"]
    return found.with_columns(
        start_ns=start,
        end_ns=pl.max_horizontal("end_ns", start + operators["duration_ns"]),
        step=pl.Series(np.searchsorted(view.steps["start_ns"].to_numpy(), start.to_numpy(), side="right")),
    ).sort("start_ns", "launch")


def outermost_of(view: View) -> Rows:
    """For each operator, the row of the outermost operator around it, or its own row."""
    return inherit(np.where(view.parents < 0, np.arange(len(view.parents)), -1), view.parents)


def work_of(view: View, launches: Sequence[int]) -> Rows:
    """Rows of `device_work` of these calls."""
    mine = view.trace.device_work["launch"].is_in(pl.Series(launches, dtype=pl.UInt32).implode())
    return np.flatnonzero(mine.fill_null(False).to_numpy())


def lost_ns(view: View, starts: Sequence[int], ends: Sequence[int], launches: Sequence[int]) -> int:
    """The device's idle time in these stretches, and the idle time that these calls caused later.

    Args:
        starts, ends: disjoint stretches of the host's time, in order.
        launches: the copying calls; idle time while one of them waited, or in the refill after it, is charged to it.
    """
    pieces = view.pieces
    begin = pieces["start_ns"].to_numpy()
    position = np.searchsorted(np.array(starts, np.int64), begin, side="right") - 1
    inside = (position >= 0) & (begin < np.array(ends, np.int64)[np.maximum(position, 0)]) if len(starts) else begin < 0
    copying = view.launching[list(launches)]
    calls = np.flatnonzero(np.isin(view.launching, copying[copying >= 0])).astype(np.uint32)
    caused = pieces["trigger_launch"].is_in(pl.Series(calls).implode()).fill_null(False).to_numpy()
    return int(pieces["duration_ns"].to_numpy()[inside | caused].sum())


_SMALLEST_BYTES: Final = 64
"""Smaller copies are numbers that the program reads, not data that it works on."""


_NO_WORK: Final = VIEWS | {
    "to",
    "_to_copy",
    "copy",
    "item",
    "empty",
    "empty_strided",
    "empty_like",
    "contiguous",
    "clone",
    "lift_fresh",
    "zeros",
    "ones",
    "full",
    "arange",
    "tensor",
    "scalar_tensor",
    "select",
    "slice",
}
"""Operators between two copies that do not show that the host worked on the copied data."""


_WORKING_SHARE: Final = 0.1
"""Share of the time between two copies that operators on the host must take to count as its use."""


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """A copy to the host and the next copy to the device on the same thread.

    Attributes:
        out, back: rows of `copies`.
        on_host: rows of the operators between them that worked on the host.
    """

    out: dict[str, int]
    back: dict[str, int]
    on_host: tuple[int, ...]

    def both(self, column: str) -> tuple[int, int]:
        """Values of a column for the two copies."""
        return self.out[column], self.back[column]

    def interval(self, what: str) -> Interval:
        """The interval from the first copy's operator to the end of the second copy."""
        return Interval(self.out["start_ns"], self.back["end_ns"] - self.out["start_ns"], what)


def round_trips(view: View) -> list[RoundTrip]:
    """Round trips in order of time; data loading and the optimizer's operators end one."""
    found = copies(view)
    ordered, position = outermost_in_order(view)
    launching = containing(row_numbers(view.trace.launches["operator"].drop_nulls()), view.parents)
    names, durations = view.trace.operators["name"], view.trace.operators["duration_ns"].to_numpy()
    working = names.is_in(list(filter(_works_on_host, names.unique()))).to_numpy() & ~launching
    trips: list[RoundTrip] = []
    for _, mine in found.group_by("lane", "step", maintain_order=True):
        out: dict[str, int] | None = None
        for copy in mine.iter_rows(named=True):
            if (copy["bytes"] or 0) < _SMALLEST_BYTES:
                continue
            if copy["direction"] == "copy_out":
                out = copy
            elif out is not None:
                between = ordered[int(position[out["row"]]) + 1 : int(position[copy["row"]])]
                on_host = between[working[between]]
                if durations[on_host].sum() < _WORKING_SHARE * (copy["start_ns"] - out["start_ns"]):
                    on_host = on_host[:0]
                # A copy of a different size is no return trip, unless the host computed it from this data.
                if copy["bytes"] == out["bytes"] or len(on_host):
                    trips.append(RoundTrip(out, copy, tuple(on_host.tolist())))
                out = None
    return trips


def _works_on_host(name: str) -> bool:
    return base_name(name) not in _NO_WORK and name.startswith(("aten::", "torchvision::"))


def cost_ns(view: View, trips: list[RoundTrip]) -> int:
    """The device's idle time during the trips and after their waits, and its time for the copies."""
    launches = [launch for trip in trips for launch in trip.both("launch")]
    idle = lost_ns(view, [trip.out["start_ns"] for trip in trips], [trip.back["end_ns"] for trip in trips], launches)
    return idle + sum(sum(trip.both("copy_ns")) for trip in trips)


def without_trips(view: View, trips: list[RoundTrip]) -> Change:
    """Remove the copies and their waits; each operator that worked on the host becomes a short kernel."""
    rows = np.array([row for trip in trips for row in (*trip.both("row"), *trip.on_host)], np.int64)
    kernels = SHORT_KERNEL_NS * sum(len(trip.on_host) for trip in trips)
    left = kernels / max(sum(sum(trip.both("copy_ns")) for trip in trips), 1)
    work = work_of(view, [launch for trip in trips for launch in trip.both("launch")])
    return together(scaled_slices(view.slices_of_operators(rows), 0.0), scaled_work(work, min(left, 1.0)))
