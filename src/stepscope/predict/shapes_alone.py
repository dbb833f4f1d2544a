"""The steps of a trace in which no device worked, on a device: from the shapes of its operators alone.

What the device needs is the sum of its operators' predicted times, one after the other. What the host needs comes from
a replay in which each of these operators takes what a call costs that has next to nothing to do, and a launch; Python,
waits for batches and operators of unknown work stay as they were measured.

The host runs ahead of the device until it asks for a value: the step then takes the longer of the two. Where it asks
early and often, neither hides the other: the range ends where they add up. An optimizer that ran tensor by tensor, as
PyTorch's do on a CPU, would give a device many at a time: at the range's low end it costs the host nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.host_time import host_time
from stepscope.devices import DevicePeaks
from stepscope.predict.cpu_operations import CpuOperationTimes, cpu_operation_times
from stepscope.predict.limits import ON_HOST, Limit
from stepscope.predict.operations import Operations
from stepscope.predict.precision import in_precision
from stepscope.predict.step_replay import Numbers, StepReplays, joint_band
from stepscope.predict.trace_operations import described
from stepscope.predict.work_kinds import SIDES, different_calls, sides_of
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows
from stepscope.whatif.experiment import Experiment

LAUNCH_CALL_NS: Final = (3_300.0, 6_500.0, 11_000.0)
"""Least, median and most of the median times that the host's call that launches a kernel takes in ten public traces of
NVIDIA's GPUs, from an H100's host to that of four V100s, all of them recorded by a profiler."""
_MANY_TENSORS: Final = r"_foreach_|_fused_"
"""Operators that take many tensors at a time, as optimizers do by default on devices but not on a CPU."""
LEAST_COVERED: Final = 0.75
"""Share of the time in operators that compute, below which no step time is given."""


@dataclass(frozen=True, slots=True)
class ShapesStep:
    """A step from shapes alone; nanoseconds, None where too little is known.

    Attributes:
        step_ns, low_ns, high_ns: what is expected, and the range.
        device_ns: in which the device works.
        host_ns: what the host needs.
        limit: what limits it.
        covered_share: of the host's time in operators that compute, that of operators with a predicted time.
        notes: what the user should know of it, in sentences.
    """

    step_ns: float | None
    low_ns: float | None
    high_ns: float | None
    device_ns: float | None
    host_ns: float | None
    limit: Limit | None
    covered_share: float
    notes: tuple[str, ...]


def step_from_shapes(
    replays: StepReplays, target: DevicePeaks, *, precision: str | None = None, grown: Trace | None = None
) -> ShapesStep:
    """The mean step of a trace without device work.

    Args:
        grown: the trace with the shapes of another batch size.

    Raises:
        UsageError: an unknown number type.
    """
    experiment = replays.experiment
    trace = grown or experiment.trace
    times = cpu_operation_times(trace, target, precision=precision, window=experiment.span)
    if times.covered_share < LEAST_COVERED:
        return ShapesStep(
            None, None, None, None, None, None, times.covered_share, (*times.notes, _refusal(experiment, times, target))
        )
    table = times.table.filter(times.table["device_ns"].is_not_null())
    rows: Rows = table["row"].to_numpy()
    operations = described(trace, rows)
    expected, low, high = (table[name].to_numpy() for name in ("device_ns", "low_ns", "high_ns"))
    low, high = joint_band(expected, low, high, operations.kind, different_calls(operations), np.arange(len(rows)))
    count = experiment.step_count
    device = [float(each.sum()) / count for each in (low, expected, high)]
    measured, dispatch = table["host_ns"].to_numpy(), table["dispatch_ns"].to_numpy()
    factors = [(dispatch + launch) / np.maximum(measured, 1.0) for launch in LAUNCH_CALL_NS]
    by_tensor = ~table["operator"].str.contains(_MANY_TENSORS) & (table["phase"] == "optimizer")
    factors[0][by_tensor.to_numpy()] = 0.0
    host = [
        _host_ns(replays, rows, each, without=("optimizer",) if not number and by_tensor.any() else ())
        for number, each in enumerate(factors)
    ]
    note = "predicted from shapes alone: the range reaches from host and device side by side to one after the other"
    note += ", and at its low end the host needs no time for the optimizer" if by_tensor.any() else ""
    return ShapesStep(
        step_ns=max(host[1], device[1]),
        low_ns=max(host[0], device[0]),
        high_ns=host[2] + device[2],
        device_ns=device[1],
        host_ns=host[1],
        limit=_limit(replays, host[1], device[1], expected, in_precision(operations, precision).operations, target),
        covered_share=times.covered_share,
        notes=(note, *times.notes),
    )


def _host_ns(replays: StepReplays, rows: Rows, factors: Numbers, *, without: tuple[str, ...]) -> float:
    """The mean step in which these operators take so many times as long, with all that is inside them."""
    operators = replays.experiment.trace.operators
    lanes = operators["lane"].to_numpy()[rows].astype(np.int32)
    starts = operators["start_ns"].to_numpy()[rows]
    ends = starts + operators["duration_ns"].to_numpy()[rows]
    return replays.with_host_time(lanes, starts, ends, factors, without=without)


def _limit(
    replays: StepReplays,
    host_ns: float,
    device_ns: float,
    times: Numbers,
    operations: Operations,
    target: DevicePeaks,
) -> Limit:
    whole = host_ns + device_ns
    if host_ns < device_ns:
        sides = sides_of(operations, target)
        compute = float(times[sides == SIDES[0]].sum())
        return Limit(SIDES[0] if 2 * compute > float(times.sum()) else SIDES[1], device_ns / whole)
    experiment = replays.experiment
    spent = host_time(experiment.trace, window=experiment.span, activity=experiment.activity)
    spent = spent.filter(pl.col("cause") != "compute").group_by("cause").agg(pl.col("duration_ns").sum())
    causes = {cause: ns * replays.factor_of(cause) / experiment.step_count for cause, ns in spent.iter_rows()}
    causes["dispatch"] = causes.get("dispatch", 0.0) + max(host_ns - sum(causes.values()), 0.0)
    # Python between operators and their dispatch are one: the program's own loop, over however many operators.
    loop = {cause: causes.pop(cause) for cause in ("python", "dispatch") if cause in causes}
    cause, most = max(sorted(causes.items()), key=lambda each: each[1], default=("", 0.0))
    if sum(loop.values()) >= most:
        return Limit("host", host_ns / whole, max(sorted(loop), key=lambda one: loop[one]))
    if cause in ON_HOST:
        return Limit(ON_HOST[cause], most / whole)
    return Limit("host", host_ns / whole, cause)


def _refusal(experiment: Experiment, times: CpuOperationTimes, target: DevicePeaks) -> str:
    known = f"{times.covered_share:.0%} of the time of operators that compute"
    without = times.table["device_ns"].null_count()
    if without and times.table.height:
        return f"only for {known} the {target.name} has units for the number type: no step time is given"
    how = ": record with record_shapes=True" if experiment.trace.metadata.format == "kineto" else ""
    return f"no device worked, and only for {known} shapes tell what one would have to do{how}"
