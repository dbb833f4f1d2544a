"""The steps with other durations of device work: everything else stays as it was measured.

Faster devices do not make Python faster. The steps are replayed through their dependency graph, in which each work of a
device takes as long as another device needs for it: the host's waits for the device change with it, waits for batches
do not, and where the device waits for the host, the step stays as long as it is.

Where replays promise nothing, two models of how host and device overlap are the ends of a bracket. With T the measured
step, B the time in which the device worked in it and B' the same on the other device:

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
"""Share of the variance of errors that different PRODUCTS of one kind have in common on a device; for other kinds all.

It is 0.21 for products of all shapes on GPUs that were held out, 0.78 for element-wise work, 0.79 for softmax and 0.30
for normalisation (benchmarks/error_correlation.py). Products of one model are more alike than those of all shapes.
"""
LEAST_LAUNCHED: Final = 0.5
"""Share of the device's time in works that a recorded host thread launched, below which a replay promises nothing."""
HOST_WORK: Final = (
    "input", "graph_tracing", "step_marker", "compilation", "garbage_collection", "checkpoint", "logging", "optimizer",
    "python", "dispatch", "untraced",
)  # fmt: skip
"""Causes of host time that a processor works on, and a faster one works on for less long."""
INPUT: Final = ("input", "host_to_device_copy")  # causes of host time that grows with the batch


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """The mean step with other durations of device work; the replay is None where nothing was replayed."""

    step_ns: float  # how long it takes
    device_ns: float  # in which the busiest device works
    factors: Numbers  # how many times as long each row of `device_work` takes
    replay: Replay | None = None  # when everything happens; None where nothing was replayed


@dataclass(frozen=True, slots=True)
class StepRange:
    """The mean step as expected, and the range in which nine of ten are expected to lie."""

    expected: ReplayedStep  # with the expected durations
    low_ns: float
    high_ns: float


class StepReplays:
    """One trace's steps, replayed with other durations of device work.

    Args:
        experiment: the trace.
        host_factor: how many times as long the host works; its waits stay.
        input_factor: how many times as long batches take to load, and to copy to the device.
    """

    def __init__(self, experiment: Experiment, *, host_factor: float = 1.0, input_factor: float = 1.0) -> None:
        self.experiment = experiment
        self._host_factor = host_factor
        self._input_factor = input_factor
        self.height = experiment.trace.device_work.height

    @cached_property
    def graph(self) -> Graph:
        """What waited for what, with the host's part as it would be there, and the device's as measured."""
        graph = self.experiment.graph
        for cause in HOST_WORK if self._host_factor != 1.0 else ():
            graph = scaled_cause(cause, self._host_factor)(self.experiment, graph)
        for cause in INPUT if self._input_factor != 1.0 else ():
            graph = scaled_cause(cause, self._input_factor)(self.experiment, graph)
        return graph

    def factor_of(self, cause: str) -> float:
        """How many times as long host time of this cause takes."""
        host = self._host_factor if cause in HOST_WORK else 1.0
        return host * self._input_factor if cause in INPUT else host

    @property
    def _host_is_as_measured(self) -> bool:
        return self._host_factor == 1.0 and self._input_factor == 1.0

    @cached_property
    def why_not(self) -> str | None:
        """Why replays of this trace promise nothing, in one sentence; None where they do."""
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

        What lies between them is taken for its work, but may be waiting that no call shows: the range then begins with
        the device's idle time as measured.
        """
        trace = self.experiment.trace
        return self.why_not is None and trace.operators.is_empty() and trace.frames.is_empty()

    @property
    def measured_ns(self) -> float:
        return self.experiment.recorded_ns / self.experiment.step_count

    @cached_property
    def measured_device_ns(self) -> float:
        """In which the busiest device worked in the mean step."""
        return self._busy_ns(self.experiment.measured)

    @cached_property
    def host_ns(self) -> float | None:
        """The mean step of a device that needs no time; None where replays promise nothing.

        It includes what the host waits for besides the device, such as batches.
        """
        if self.why_not is not None:
            return None
        return self._replayed(np.zeros(self.height)).step_ns

    def with_work(self, expected: Numbers, low: Numbers, high: Numbers) -> StepRange:
        """The mean step in which each row of `device_work` takes so many times as long.

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
        """The mean step in which these intervals of host threads take so many times as long; arrays of shape (n,).

        Args:
            without: causes of host time that are gone.
        """
        graph = self.graph
        for cause in without:
            graph = scaled_cause(cause, 0.0)(self.experiment, graph)
        return self._scaled(self.experiment.run(graph.with_host_time(lanes, starts, ends, factors)))

    def _scaled(self, outcome: Outcome) -> float:
        """The step of a replay, relative to the measured one."""
        return self.measured_ns * (outcome.step_ns / outcome.measured_step_ns)

    def _replayed(self, factors: Numbers) -> ReplayedStep:
        if self._host_is_as_measured and (factors == 1.0).all():  # nothing is different: to the nanosecond
            return ReplayedStep(self.measured_ns, self.measured_device_ns, factors, self.experiment.measured)
        outcome = self.experiment.run(self.graph.with_work(np.arange(self.height), factors))
        return ReplayedStep(self._scaled(outcome), self._busy_ns(outcome.replay), factors, outcome.replay)

    def _busy_ns(self, done: Replay) -> float:
        works = self.experiment.works
        busy = union(done.work_start[works], done.work_end[works]).total_ns
        return busy / self.experiment.step_count

    def _bracket(self, expected: Numbers, low: Numbers, high: Numbers) -> StepRange:
        """The mean step between no overlap of host and device and as much as there can be."""
        step_ns, busy_ns = self.measured_ns, self.measured_device_ns
        idle_ns = max(step_ns - busy_ns, 0.0) * self._host_factor
        host_ns = step_ns * self._host_factor
        devices = [busy_ns * self._scale_of(factors) for factors in (expected, low, high)]
        if devices == [busy_ns] * 3 and self._host_is_as_measured:
            return StepRange(ReplayedStep(step_ns, busy_ns, expected), step_ns, step_ns)
        longer = (1.0, self._input_factor)  # nobody knows how much of the idle time was waiting for batches
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
    """The band of each work, narrowed so that all together at an end is as rare as one of them at its own.

    Works of one call, the same operator on the same shapes, have one error, and so have works of one kind that is none
    of PRODUCTS. Errors of different products of a kind share a part of their variance, COMMON; the rest is independent,
    as are errors of different kinds. With d the sum of a call's distances to its end, every band is shortened to
    D / (sum of d) of its length, where D^2 is the sum over kinds of COMMON * (sum of d)^2 + (1 - COMMON) * (sum of
    d^2).

    Args:
        expected, low, high: nanoseconds of each work; shape (n,).
        kinds, calls: what each work is, and a number for each different call; shape (n,).
        rows: the works that count.
    """
    below, above = expected - low, high - expected
    shares = [_narrowing(distances[rows], kinds[rows], calls[rows]) for distances in (below, above)]
    return expected - below * shares[0], expected + above * shares[1]


def _narrowing(distances: Numbers, kinds: Labels, calls: npt.NDArray[np.int64]) -> float:
    """The length of the joint band as a share of the sum of all; 1 for a single call."""
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
