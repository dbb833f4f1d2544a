"""Replay of the steps with other durations of device work; everything else keeps its measured time.

Faster devices do not make Python faster. The steps are replayed through their dependency graph, in which each piece of
device work takes its time on another device: host waits for the device change with it, waits for batches do not, and
where the device waits for the host, the step keeps its length.

Where a replay is not reliable, two models of the overlap of host and device are the ends of a bracket. With T the
measured step, B the time in which the device worked in it and B' the same on the other device:

    nothing overlaps     T' = T - B + B'     the device's idle time stays as it is
    all of it overlaps   T' = max(T, B')     the host needs as long as the step took
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from stepscope.trace.nesting import Rows
from stepscope.trace.window import Times, union
from stepscope.whatif.changes import scaled_cause
from stepscope.whatif.experiment import Experiment, Outcome
from stepscope.whatif.graph import Graph, Replay

Numbers = npt.NDArray[np.float64]
Labels = npt.NDArray[np.str_]

_NEVER: Final = np.iinfo(np.int64).min

PRODUCTS: Final = ("matrix", "convolution", "attention")
COMMON: Final = 0.5
"""Share of the error variance that different PRODUCTS of one kind share on a device; other kinds share all of it.

It is 0.21 for products of all shapes on GPUs that were held out, 0.78 for element-wise work, 0.79 for softmax and 0.30
for normalisation (benchmarks/error_correlation.py). Products of one model are more alike than those of all shapes.
"""
LEAST_LAUNCHED: Final = 0.5
"""Share of device time launched by a recorded host thread, below which a replay is not reliable."""
HOST_WORK: Final = (
    "input", "graph_tracing", "step_marker", "compilation", "garbage_collection", "checkpoint", "logging", "optimizer",
    "python", "dispatch", "untraced",
)  # fmt: skip
"""Causes of host time spent computing, which a faster processor shortens."""
INPUT: Final = ("input", "host_to_device_copy")  # causes of host time that grow with the batch


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """Mean step with other durations of device work."""

    step_ns: float
    device_ns: float  # time in which the busiest device works
    factors: Numbers  # factor on each row of `device_work`
    replay: Replay | None = None  # when everything happens; None without a replay


@dataclass(frozen=True, slots=True)
class StepRange:
    """Mean step as expected, and the range in which nine of ten are expected to lie."""

    expected: ReplayedStep  # with expected durations
    low_ns: float
    high_ns: float


class StepReplays:
    """Replay one trace's steps with other durations of device work.

    Args:
        host_factor: factor on host work; host waits keep their time.
        input_factor: factor on loading batches and copying them to the device.
    """

    def __init__(self, experiment: Experiment, *, host_factor: float = 1.0, input_factor: float = 1.0) -> None:
        self.experiment = experiment
        self._host_factor = host_factor
        self._input_factor = input_factor
        self.height = experiment.trace.device_work.height

    @cached_property
    def graph(self) -> Graph:
        """Dependency graph with the host's part scaled, and the device's as measured."""
        graph = self.experiment.graph
        for cause in HOST_WORK if self._host_factor != 1.0 else ():
            graph = scaled_cause(cause, self._host_factor)(self.experiment, graph)
        for cause in INPUT if self._input_factor != 1.0 else ():
            graph = scaled_cause(cause, self._input_factor)(self.experiment, graph)
        return graph

    def factor_of(self, cause: str) -> float:
        """Factor on host time of this cause."""
        host = self._host_factor if cause in HOST_WORK else 1.0
        return host * self._input_factor if cause in INPUT else host

    @property
    def _host_is_as_measured(self) -> bool:
        return self._host_factor == 1.0 and self._input_factor == 1.0

    @cached_property
    def why_not(self) -> str | None:
        """Why this trace cannot be replayed reliably, in one sentence; None where it can."""
        if self.experiment.why_not is not None:
            return self.experiment.why_not
        works, graph = self.experiment.works, self.experiment.graph
        if not len(works):
            return None
        duration = graph.works.duration[works].astype(np.float64)
        known = (graph.works.launched[works] != _NEVER) & (graph.works.stretch[works] >= 0)
        if duration[known].sum() >= LEAST_LAUNCHED * duration.sum():
            return None
        return (
            "no launches of the device's work were recorded on a host thread, so that it is unknown what it waited for"
        )

    @cached_property
    def shows_only_launches(self) -> bool:
        """Whether launches are all that was recorded of the host.

        The time between them counts as host work, but may be unrecorded waiting: the range then begins with the
        device's idle time as measured.
        """
        trace = self.experiment.trace
        return self.why_not is None and trace.operators.is_empty() and trace.frames.is_empty()

    @property
    def measured_ns(self) -> float:
        return self.experiment.recorded_ns / self.experiment.step_count

    @cached_property
    def measured_device_ns(self) -> float:
        """Time in which the busiest device worked in the mean step."""
        return self._busy_ns(self.experiment.measured)

    @cached_property
    def host_ns(self) -> float | None:
        """Mean step on a device that needs no time; None where the replay is not reliable.

        It includes host waits for anything but the device, such as batches.
        """
        if self.why_not is not None:
            return None
        return self._replayed(np.zeros(self.height)).step_ns

    def with_work(self, expected: Numbers, low: Numbers, high: Numbers) -> StepRange:
        """Mean step with each row of `device_work` scaled by these factors.

        Args:
            expected, low, high: factors on the measured durations, shape (rows of device_work,).
        """
        if self.why_not is not None:
            return self._bracket(expected, low, high)
        least, most = (self._replayed(factors) for factors in (low, high))
        step, shortest = self._replayed(expected), least.step_ns
        if self.shows_only_launches:
            idle_ns = max(self.measured_ns - self.measured_device_ns, 0.0) * self._host_factor
            shortest = min(shortest, idle_ns + least.device_ns)
        ends = step.step_ns, shortest, most.step_ns
        return StepRange(step, min(ends), max(ends))

    def with_host_time(
        self,
        lanes: npt.NDArray[np.int32],
        starts: Times,
        ends: Times,
        factors: Numbers,
        *,
        without: tuple[str, ...] = (),
    ) -> float:
        """Mean step with these intervals of host threads scaled by these factors; arrays of shape (n,).

        Args:
            without: causes of host time to remove.
        """
        graph = self.graph
        for cause in without:
            graph = scaled_cause(cause, 0.0)(self.experiment, graph)
        return self._scaled(self.experiment.run(graph.with_host_time(lanes, starts, ends, factors)))

    def _scaled(self, outcome: Outcome) -> float:
        """Step of a replay, relative to the measured one."""
        return self.measured_ns * (outcome.step_ns / outcome.measured_step_ns)

    def _replayed(self, factors: Numbers) -> ReplayedStep:
        if self._host_is_as_measured and (factors == 1.0).all():  # nothing differs: exact to the nanosecond
            return ReplayedStep(self.measured_ns, self.measured_device_ns, factors, self.experiment.measured)
        outcome = self.experiment.run(self.graph.with_work(np.arange(self.height), factors))
        return ReplayedStep(self._scaled(outcome), self._busy_ns(outcome.replay), factors, outcome.replay)

    def _busy_ns(self, done: Replay) -> float:
        works = self.experiment.works
        busy = union(done.work_start[works], done.work_end[works]).total_ns
        return busy / self.experiment.step_count

    def _bracket(self, expected: Numbers, low: Numbers, high: Numbers) -> StepRange:
        """Mean step between no overlap of host and device and the most possible overlap."""
        step_ns, busy_ns = self.measured_ns, self.measured_device_ns
        idle_ns = max(step_ns - busy_ns, 0.0) * self._host_factor
        host_ns = step_ns * self._host_factor
        devices = [busy_ns * self._scale_of(factors) for factors in (expected, low, high)]
        if devices == [busy_ns] * 3 and self._host_is_as_measured:
            return StepRange(ReplayedStep(step_ns, busy_ns, expected), step_ns, step_ns)
        longer = (1.0, self._input_factor)  # it is unknown how much of the idle time was waiting for batches
        ends = [end for each in devices for k in longer for end in (k * idle_ns + each, max(k * host_ns, each))]
        return StepRange(ReplayedStep(idle_ns + devices[0], devices[0], expected), min(ends), max(ends))

    def _scale_of(self, factors: Numbers) -> float:
        works = self.experiment.works
        durations = self.experiment.graph.works.duration[works].astype(np.float64)
        total = durations.sum()
        if not total or (factors[works] == 1.0).all():
            return 1.0
        return float((durations * factors[works]).sum() / total)


def joint_band(
    expected: Numbers, low: Numbers, high: Numbers, kinds: Labels, calls: npt.NDArray[np.int64], rows: Rows
) -> tuple[Numbers, Numbers]:
    """Narrow the band of each work so that all works together at an end are as rare as one of them at its own.

    Works of one call (the same operator on the same shapes) have one error, and so have works of one kind outside of
    PRODUCTS. Errors of different products of a kind share a part of their variance, COMMON; the rest is independent, as
    are errors of different kinds. With d the sum of a call's distances to its end, every band is shortened to D / (sum
    of d) of its length, where D^2 is the sum over kinds of COMMON * (sum of d)^2 + (1 - COMMON) * (sum of d^2).

    Args:
        expected, low, high: nanoseconds of each work; shape (n,).
        kinds, calls: kind of each work, and the index of its distinct call; shape (n,).
        rows: the works that count.
    """
    below, above = expected - low, high - expected
    shares = [_narrowing(distances[rows], kinds[rows], calls[rows]) for distances in (below, above)]
    return expected - below * shares[0], expected + above * shares[1]


def _narrowing(distances: Numbers, kinds: Labels, calls: npt.NDArray[np.int64]) -> float:
    """Length of the joint band as a share of the sum of all; 1 for a single call."""
    total = float(distances.sum())
    if total <= 0:
        return 1.0
    squared = 0.0
    for kind in np.unique(kinds).tolist():
        chosen = kinds == kind
        _, number = np.unique(calls[chosen], return_inverse=True)
        sums = np.bincount(number.ravel(), distances[chosen])
        common = COMMON if kind in PRODUCTS else 1.0
        squared += common * float(sums.sum()) ** 2 + (1 - common) * float((sums**2).sum())
    return float(np.sqrt(squared)) / total
