"""Work that a step recorded on a CPU alone would give an accelerator, from the shapes of its operators.

The host's time of each operator is split: the dispatch cost (what a call with almost no work costs) stays on the host
when the work moves to a device; the rest is arithmetic and goes away.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.attribution import operator_places
from stepscope.analysis.host import host_time
from stepscope.analysis.operators import operator_costs
from stepscope.analysis.work import VIEWS, base_name
from stepscope.machine.devices import DevicePeaks, is_nvidia, with_measured_shares
from stepscope.predict.limits import ON_HOST, Limit
from stepscope.predict.operation_times import guessed_band, operation_times, sustained_ns
from stepscope.predict.operations import (
    NO_TF32,
    WORTH_SAYING,
    Cast,
    Numbers,
    Operations,
    Tf32,
    in_precision,
    tf32_of,
    types_on,
)
from stepscope.predict.ranges import step_band, with_host
from stepscope.predict.step_replays import StepReplays
from stepscope.predict.trace_operations import SIDES, described, different_calls, sides_of
from stepscope.trace import Trace, Window
from stepscope.trace.nesting import Rows, inherit
from stepscope.whatif.experiment import Experiment

CPU_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "row": pl.Int64,  # row in `operators`
    "operator": pl.String,
    "phase": pl.String,  # as in `stepscope.analysis.module_paths.PHASES`
    "host_ns": pl.Float64,  # as measured
    "dispatch_ns": pl.Float64,  # the part that stays on the host
    "arithmetic_ns": pl.Float64,  # the part that goes away
    "device_ns": pl.Float64,  # expected on the target; null where the target has no units for the number type
    "low_ns": pl.Float64,
    "high_ns": pl.Float64,
    "basis": pl.String,  # as in `stepscope.predict.operations.OperationTimes`
}

UNCOVERED_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "operator": pl.String,
    "calls": pl.Int64,
    "host_ns": pl.Int64,  # self time, without nested operators
}

_AROUND_OTHERS: Final = frozenset({
    "linear", "matmul", "layer_norm", "softmax", "log_softmax", "scaled_dot_product_attention", "conv1d", "conv2d",
    "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "_convolution", "rms_norm",
    "batch_norm", "_batch_norm_impl_index", "group_norm", "embedding", "clone", "contiguous", "to", "_to_copy",
    "reshape", "dropout", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "zeros", "ones", "full", "zeros_like",
    "ones_like", "full_like", "einsum", "mean", "var", "std",
})  # fmt: skip
"""Operators that call others; a call without nested operators counts itself."""
_WITHOUT_WORK: Final = VIEWS | frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "as_strided", "_reshape_alias", "select",
    "slice", "narrow", "unbind", "unfold", "diagonal", "set", "resize", "resize_as", "item", "_local_scalar_dense",
    "is_nonzero", "resolve_conj", "resolve_neg", "lift_fresh", "result_type", "can_cast", "is_pinned", "record_stream",
    "stride", "size", "sym_size", "expand", "swapaxes", "swapdims", "movedim", "split_with_sizes", "tensor_split", "mT",
    "numpy_T", "requires_grad", "_has_compatible_shallow_copy_type", "output_nr", "is_floating_point", "is_complex",
    "_version", "record_param_comms", "retain_grad", "isnan", "detach", "unsafe_chunk", "unsafe_split", "real",
})  # fmt: skip
"""Operators that create views, allocate or read a number, and launch no device work."""
_OVERHEAD_QUANTILE: Final = 0.05  # quantile of the durations of small operators taken as the dispatch cost
_COMPUTES_ITSELF: Final = 20
"""An operator whose self time is this many times the dispatch cost computes something itself."""
_LEAST_OVERHEAD_NS: Final = 1_000.0  # least dispatch cost, for recordings with a coarse clock
_MANY_TENSORS: Final = 10  # fewest optimizer operators for a note that they run one by one


@dataclass(frozen=True, slots=True)
class CpuOperationTimes:
    """Operators that would launch work on an accelerator, with their times there."""

    table: pl.DataFrame  # one row per call, in order of `row`; columns as in CPU_SCHEMA
    uncovered: pl.DataFrame
    covered_share: float  # share of computing operators' host time that is in `table` with a device time
    overhead_ns: float  # dispatch cost: a call with almost no work
    notes: tuple[str, ...] = ()  # notes for the user, one sentence each


@dataclass(frozen=True, slots=True)
class CpuCalls:
    """Operator calls of a trace without device work that would launch some on an accelerator, whichever it is.

    Attributes:
        rows: in `operators`, ascending; the other arrays are in the same order.
        tf32: whether and where products may run in TF32 on NVIDIA's devices.
        uncovered: computing operators outside of these, by name; columns as in UNCOVERED_SCHEMA.
        overhead_ns: dispatch cost: a call with almost no work.
    """

    rows: Rows
    operators: pl.Series
    phase: pl.Series
    operations: Operations
    host_ns: Numbers
    dispatch_ns: Numbers
    tf32: Tf32
    uncovered: pl.DataFrame
    overhead_ns: float

    @classmethod
    def of(cls, trace: Trace, window: Window | None = None) -> CpuCalls:
        """Those that start in a window; data loading stays on the host and is left out."""
        operators = trace.operators
        phase = operator_places(trace)["phase"].fill_null("other")
        asked = (phase != "input").to_numpy()
        if window is not None:
            asked &= operators["start_ns"].is_between(window.start_ns, window.end_ns, closed="left").to_numpy()
        parent = operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
        operations = described(trace, np.arange(operators.height))
        is_known = np.isfinite(operations.flops) & np.isfinite(operations.bytes) & (operations.kind != "")
        is_around = np.isin(operations.name, list(_AROUND_OTHERS)) & _has_inner(parent)
        chosen = is_known & ~is_around
        rows = np.flatnonzero(chosen & (_nearest_above(chosen, parent) < 0) & asked)
        duration = operators["duration_ns"].to_numpy().astype(np.float64)
        small = duration[is_known & ~_has_inner(parent)]
        overhead = float(np.quantile(small, _OVERHEAD_QUANTILE)) if len(small) else 0.0
        dispatch = np.minimum(duration[rows], overhead * _counted_inside(parent, rows, len(parent)))
        if (trace.launches["kind"] == "launch").any():  # a device computed, although its work was not recorded
            dispatch = duration[rows]
        return cls(
            rows,
            operators["name"][rows],
            phase[rows],
            operations.select(rows),
            duration[rows],
            dispatch,
            tf32_of(trace),
            _uncovered(trace, parent, rows, asked, overhead),
            overhead,
        )


def cpu_operation_times(calls: CpuCalls, target: DevicePeaks, *, precision: str | None = None) -> CpuOperationTimes:
    """Predict device times of operator calls, without the device's own launch latency.

    Args:
        precision: as in `stepscope.predict.work_times.work_times`.

    Raises:
        UsageError: an unknown number type.
    """
    cast = in_precision(calls.operations, precision, stays=(calls.phase == "optimizer").to_numpy())
    added = NO_TF32 if precision in ("fp32", "tf32") or not is_nvidia(target) else calls.tf32
    table = pl.DataFrame(
        {
            "row": calls.rows,
            "operator": calls.operators,
            "phase": calls.phase,
            "host_ns": calls.host_ns,
            "dispatch_ns": calls.dispatch_ns,
            "arithmetic_ns": calls.host_ns - calls.dispatch_ns,
            **_on_target(cast, target, added),
        },
        schema=dict(CPU_SCHEMA),
    )
    covered = float(table.filter(pl.col("device_ns").is_not_null())["host_ns"].sum())
    all_ns = float(table["host_ns"].sum()) + float(calls.uncovered["host_ns"].sum())
    return CpuOperationTimes(
        table,
        calls.uncovered,
        covered / all_ns if all_ns > 0 else 0.0,
        calls.overhead_ns,
        _notes(table, calls.uncovered, target),
    )


def _on_target(cast: Cast, target: DevicePeaks, added: Tf32) -> dict[str, pl.Series]:
    """Columns with the target's times; the band spans the least to the most traffic."""
    expected, least, most = (
        operation_times(types_on(one, target, added), target) for one in (cast.operations, cast.least, cast.most)
    )
    guessed = guessed_band(expected.ns, least.low_ns, most.high_ns, target)
    low, high = np.where(expected.basis == "learned", (least.low_ns, most.high_ns), guessed)
    times = {"device_ns": expected.ns, "low_ns": low, "high_ns": high}
    basis = pl.Series(expected.basis.tolist(), dtype=pl.String)
    return {name: pl.Series(ns).fill_nan(None) for name, ns in times.items()} | {"basis": basis}


def _notes(table: pl.DataFrame, uncovered: pl.DataFrame, target: DevicePeaks) -> tuple[str, ...]:
    notes = []
    if table.is_empty():
        notes.append("no operator of the trace shows what it computes: record shapes to predict them")
    total = int(uncovered["host_ns"].sum())
    share = total / max(total + float(table["host_ns"].sum()), 1.0)
    if share >= WORTH_SAYING:
        calls = int(uncovered["calls"].sum())
        notes.append(
            f"operators of unknown work have no prediction: {calls:,} call{'s'[: calls != 1]}, {share:.0%} of the "
            "operators' time"
        )
    if lacking := table["device_ns"].null_count():
        notes.append(f"{target.name} has no units for the number type of {lacking:,} call{'s'[: lacking != 1]}")
    single = (table["phase"] == "optimizer") & ~table["operator"].str.contains(r"::_(?:foreach|fused)_")
    if single.sum() > _MANY_TENSORS:
        notes.append(
            "the optimizer is predicted tensor by tensor, as it ran; on a device PyTorch updates many at a time"
        )
    return tuple(notes)


def _has_inner(parent: Rows) -> npt.NDArray[np.bool_]:
    result = np.zeros(len(parent), np.bool_)
    result[parent[parent >= 0]] = True
    return result


def _nearest_above(chosen: npt.NDArray[np.bool_], parent: Rows) -> Rows:
    """For each operator the row of its nearest chosen ancestor, -1 if it has none."""
    nearest = inherit(np.where(chosen, np.arange(len(parent)), -1), parent)
    return np.where(parent >= 0, nearest[np.maximum(parent, 0)], -1)


def _counted_inside(parent: Rows, rows: Rows, count: int) -> Rows:
    """Number of operators in each of these subtrees, the root included."""
    own = np.full(count, -1, np.int64)
    own[rows] = np.arange(len(rows))
    group = inherit(own, parent)
    return np.bincount(group[group >= 0], minlength=len(rows)).astype(np.int64)


def _uncovered(
    trace: Trace, parent: Rows, rows: Rows, asked: npt.NDArray[np.bool_], overhead_ns: float
) -> pl.DataFrame:
    """Computing operators outside of the covered ones, by name.

    These are the innermost operators, and others whose self time is far above the dispatch cost; views and allocations
    do not count.
    """
    covered = np.zeros(len(parent), np.bool_)
    covered[rows] = True
    inside = covered | (_nearest_above(covered, parent) >= 0)
    idle = np.array([base_name(name) in _WITHOUT_WORK for name in trace.operators["name"].to_list()], np.bool_)
    computes = trace.operators["name"].str.starts_with("aten::").fill_null(False).to_numpy() & ~idle
    own = operator_costs(trace)["host_self_ns"].to_numpy()
    busy = ~_has_inner(parent) | (own > _COMPUTES_ITSELF * max(overhead_ns, _LEAST_OVERHEAD_NS))
    left = np.flatnonzero(computes & ~inside & asked & busy)
    table = trace.operators[left].with_columns(own=pl.Series(own[left]))
    table = table.group_by("name").agg(calls=pl.len(), host_ns=pl.col("own").sum())
    table = table.rename({"name": "operator"}).sort(["host_ns", "operator"], descending=[True, False])
    return table.select(pl.col(name).cast(kind) for name, kind in UNCOVERED_SCHEMA.items())


LAUNCH_CALL_NS: Final = (3_300.0, 6_500.0, 11_000.0)
"""Least, middle and greatest of the median durations of launch calls in ten public NVIDIA traces, from the host of an
H100 to that of four V100s, all recorded with a profiler.
"""
_ALONE_MANY_TENSORS: Final = r"_foreach_|_fused_"
"""Operators that take many tensors at once, as optimizers do by default on devices but not on a CPU."""
LEAST_COVERED: Final = 0.75  # least share of computing operators' time that must be covered to give a step time


@dataclass(frozen=True, slots=True)
class ShapesStep:
    """A step predicted from shapes alone; nanoseconds, None where too little is known."""

    step_ns: float | None
    low_ns: float | None
    high_ns: float | None
    device_ns: float | None  # time in which the device works
    host_ns: float | None  # time that the host needs
    limit: Limit | None
    covered_share: float  # share of computing operators' host time with a predicted time
    notes: tuple[str, ...]  # notes for the user, in sentences
    guessed_share: float = 0.0  # share with a time from the datasheet alone


class StepFromShapes:
    """Predicts the mean step of a trace without device work on one device after another.

    Args:
        grown: the trace with the shapes of another batch size.
    """

    def __init__(self, replays: StepReplays, *, precision: str | None = None, grown: Trace | None = None) -> None:
        self._replays, self._precision = replays, precision
        self._calls = CpuCalls.of(grown or replays.experiment.trace, replays.experiment.span)
        self._hosts: dict[bytes, list[float]] = {}

    def on(self, target: DevicePeaks) -> ShapesStep:
        """Predict the step.

        Raises:
            UsageError: an unknown number type.
        """
        experiment = self._replays.experiment
        times = cpu_operation_times(self._calls, with_measured_shares(target), precision=self._precision)
        if times.covered_share < LEAST_COVERED:
            notes = (*times.notes, _refusal(experiment, times, target))
            return ShapesStep(None, None, None, None, None, None, times.covered_share, notes)
        is_known = times.table["device_ns"].is_not_null().to_numpy()
        table, operations = times.table.filter(is_known), self._calls.operations.select(np.flatnonzero(is_known))
        expected, low, high = (table[name].to_numpy() for name in ("device_ns", "low_ns", "high_ns"))
        guessed = (table["basis"] != "learned").to_numpy()
        kinds = np.where(guessed, "datasheet", operations.kind)
        low, high = step_band(expected, low, high, kinds, different_calls(operations), np.arange(len(expected)))
        device = [sustained_ns(float(each.sum()) / experiment.step_count) for each in (low, expected, high)]
        measured, by_tensor = table["host_ns"].to_numpy(), _by_tensor(table)
        host = self._host_ns(table)
        step_ns = max(host[1], device[1])
        shortest, longest = with_host(step_ns, device[1], max(host[0], device[0]), host[2] + device[2])
        note = "predicted from shapes alone: the range reaches from host and device in parallel to one after the other"
        note += ", and at its low end the host needs no time for the optimizer" if by_tensor.any() else ""
        work = in_precision(operations, self._precision).operations
        return ShapesStep(
            step_ns=step_ns,
            low_ns=float(shortest),
            high_ns=float(longest),
            device_ns=device[1],
            host_ns=host[1],
            limit=self._limit(host[1], device[1], expected, work, target),
            covered_share=times.covered_share,
            notes=(note, *times.notes),
            guessed_share=times.covered_share * float(measured[guessed].sum() / max(measured.sum(), 1.0)),
        )

    def _host_ns(self, table: pl.DataFrame) -> list[float]:
        """Least, expected and greatest mean step of the host alone, whose operators only dispatch and launch.

        These differ between devices only where one lacks units for some of the work.
        """
        rows = table["row"].to_numpy()
        if rows.tobytes() not in self._hosts:
            measured, dispatch = table["host_ns"].to_numpy(), table["dispatch_ns"].to_numpy()
            factors = [(dispatch + launch) / np.maximum(measured, 1.0) for launch in LAUNCH_CALL_NS]
            by_tensor = _by_tensor(table)
            factors[0][by_tensor] = 0.0
            gone = ("optimizer",) if by_tensor.any() else ()
            called = self._replays.experiment.trace.operators[rows]
            starts = called["start_ns"].to_numpy()
            ends, lanes = starts + called["duration_ns"].to_numpy(), called["lane"].to_numpy().astype(np.int32)
            self._hosts[rows.tobytes()] = [
                self._replays.with_host_time(lanes, starts, ends, each, without=gone if at == 0 else ())
                for at, each in enumerate(factors)
            ]
        return self._hosts[rows.tobytes()]

    def _limit(
        self, host_ns: float, device_ns: float, times: Numbers, operations: Operations, target: DevicePeaks
    ) -> Limit:
        whole = host_ns + device_ns
        if host_ns < device_ns:
            sides = sides_of(operations, target)
            compute = float(times[sides == SIDES[0]].sum())
            return Limit(SIDES[0] if 2 * compute > float(times.sum()) else SIDES[1], device_ns / whole)
        causes = dict(self._host_causes)
        causes["dispatch"] = causes.get("dispatch", 0.0) + max(host_ns - sum(causes.values()), 0.0)
        # Python between operators and operator dispatch count together: both are the program's own loop.
        loop = {cause: causes.pop(cause) for cause in ("python", "dispatch") if cause in causes}
        cause, most = max(sorted(causes.items()), key=lambda each: each[1], default=("", 0.0))
        if sum(loop.values()) >= most:
            return Limit("host", host_ns / whole, max(sorted(loop), key=lambda one: loop[one]))
        if cause in ON_HOST:
            return Limit(ON_HOST[cause], most / whole)
        return Limit("host", host_ns / whole, cause)

    @cached_property
    def _host_causes(self) -> dict[str, float]:
        """Nanoseconds of the host per step by cause, without computing."""
        experiment = self._replays.experiment
        spent = host_time(experiment.trace, window=experiment.span, activity=experiment.activity)
        spent = spent.filter(pl.col("cause") != "compute").group_by("cause").agg(pl.col("duration_ns").sum())
        count = experiment.step_count
        return {cause: ns * self._replays.factor_of(cause) / count for cause, ns in spent.iter_rows()}


def _by_tensor(table: pl.DataFrame) -> npt.NDArray[np.bool_]:
    """Operators of an optimizer that takes one tensor after another."""
    alone = ~table["operator"].str.contains(_ALONE_MANY_TENSORS) & (table["phase"] == "optimizer")
    found: npt.NDArray[np.bool_] = alone.to_numpy()
    return found


def _refusal(experiment: Experiment, times: CpuOperationTimes, target: DevicePeaks) -> str:
    known = f"{times.covered_share:.0%} of the time of operators that compute"
    without = times.table["device_ns"].null_count()
    if without and times.table.height:
        return f"the {target.name} has units for the number type of only {known}: no step time is given"
    how = ": record with record_shapes=True" if experiment.trace.metadata.format == "kineto" else ""
    return f"no device worked, and shapes show what one would do for only {known}{how}"
