"""Steps replayed with the times that their device work takes on another device.

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
import polars as pl

from stepscope.analysis.host import host_time
from stepscope.diagnosis.recording_costs import Contention, contention_of
from stepscope.predict.operations import WORTH_SAYING, Numbers
from stepscope.predict.ranges import with_host
from stepscope.trace.window import Times, union
from stepscope.whatif.changes import scaled_cause
from stepscope.whatif.experiment import Experiment, Outcome
from stepscope.whatif.graph import Graph, Replay

_NEVER: Final = np.iinfo(np.int64).min
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
    """Mean step as expected, and its range (`stepscope.predict.ranges.HELD`)."""

    expected: ReplayedStep  # with expected durations
    low_ns: float
    high_ns: float
    replays: tuple[Replay, ...] = ()  # with expected, low and high durations; none where steps cannot be replayed


def _ranged(step: ReplayedStep, low: float, high: float, replays: tuple[Replay, ...] = ()) -> StepRange:
    """With the host's uncertainty beside the device's."""
    ends = with_host(step.step_ns, step.device_ns, low, high)
    return StepRange(step, float(ends[0]), float(ends[1]), replays)


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
        """Dependency graph with the host's part scaled, undisturbed and without `once_ns`; the device's as measured."""
        graph = self.experiment.graph
        if self.once_ns:
            graph = scaled_cause("once", 0.0)(self.experiment, graph)
        if self.contention is not None:
            graph = self.contention.change(self.experiment, graph)
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
        return self._host_factor == 1.0 and self._input_factor == 1.0 and self.is_as_recorded

    @property
    def is_as_recorded(self) -> bool:
        """Whether nothing of the recorded steps is left out."""
        return self.contention is None and not self.once_ns

    @cached_property
    def contention(self) -> Contention | None:
        """What other programs or a quota took of the recorded steps, which replays leave out; None if little."""
        return contention_of(self.experiment)

    @cached_property
    def once_ns(self) -> float:
        """One-off work of the host in the mean step, such as first launches, which is left out; 0 if it is little."""
        experiment = self.experiment
        if experiment.activity.once.is_empty():
            return 0.0
        pieces = host_time(experiment.trace, window=experiment.span, activity=experiment.activity)
        found = float(pieces.filter(pl.col("cause") == "once")["duration_ns"].sum()) / experiment.step_count
        return found if found >= WORTH_SAYING * self.measured_ns else 0.0

    @cached_property
    def steady_ns(self) -> float:
        """Mean step without what is left out of it, nanoseconds."""
        if self.is_as_recorded:
            return self.measured_ns
        if self.why_not is not None:
            return max(self.measured_ns - self.once_ns, self.measured_device_ns)
        scaled = self._host_factor != 1.0 or self._input_factor != 1.0
        replays = StepReplays(self.experiment) if scaled else self
        return replays._replayed(np.ones(self.height)).step_ns

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
        return "no launches of the device's work were recorded on a host thread, so what it waited for is unknown"

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
        replays = tuple(each.replay for each in (step, least, most) if each.replay is not None)
        if step.step_ns == self.measured_ns and (step.factors == 1.0).all():  # the recorded device itself
            return StepRange(step, shortest, most.step_ns, replays)
        return _ranged(step, shortest, most.step_ns, replays)

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
        step_ns, busy_ns = max(self.measured_ns - self.once_ns, self.measured_device_ns), self.measured_device_ns
        idle_ns = max(step_ns - busy_ns, 0.0) * self._host_factor
        host_ns = step_ns * self._host_factor
        devices = [busy_ns * self._scale_of(factors) for factors in (expected, low, high)]
        if devices == [busy_ns] * 3 and self._host_is_as_measured:
            return StepRange(ReplayedStep(step_ns, busy_ns, expected), step_ns, step_ns)
        longer = (1.0, self._input_factor)  # how much of the idle time was waiting for batches is unknown
        ends = [end for each in devices for k in longer for end in (k * idle_ns + each, max(k * host_ns, each))]
        return _ranged(ReplayedStep(idle_ns + devices[0], devices[0], expected), min(ends), max(ends))

    def _scale_of(self, factors: Numbers) -> float:
        works = self.experiment.works
        durations = self.experiment.graph.works.duration[works].astype(np.float64)
        total = durations.sum()
        if not total or (factors[works] == 1.0).all():
            return 1.0
        return float((durations * factors[works]).sum() / total)
