"""A trace whose steps can be replayed with changes, and how long they take then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.attribution import Attribution, attribute
from stepscope.analysis.device_time import busy_intervals, device_time
from stepscope.analysis.host import HostActivity, host_activity
from stepscope.analysis.host_time import main_lane
from stepscope.analysis.idle import device_window
from stepscope.analysis.naming import DEFAULT_USER_CODE, UserCode
from stepscope.analysis.steps import are_of_a_device, step_table
from stepscope.trace import Trace, Window
from stepscope.trace.intervals import Times, union
from stepscope.trace.nesting import Rows
from stepscope.whatif.build import build_graph
from stepscope.whatif.graph import Edges, Graph
from stepscope.whatif.replay import Replay, replay
from stepscope.whatif.silent_waits import silent_wait_ns

MOST_UNEXPLAINED: Final = 0.1
"""Where more of the steps' time than this is waiting for no known reason, a replay promises nothing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay gives.

    Attributes:
        step_ns: the mean step's length with the change.
        measured_step_ns: and without it.
        step_count: number of steps; 1 where the trace has none and the whole stretch counts as one.
        replay: when everything happens.
    """

    step_ns: float
    measured_step_ns: float
    step_count: int
    replay: Replay

    @property
    def saving_ns(self) -> float:
        """What a step loses; negative where it becomes longer."""
        return self.measured_step_ns - self.step_ns

    @property
    def saving_share(self) -> float:
        """The same as a share of the measured step."""
        return self.saving_ns / self.measured_step_ns if self.measured_step_ns else 0.0


class Experiment:
    """One trace, its dependency graph, and the stretch whose length counts: its complete steps.

    Args:
        trace: the trace.
        activity, attribution, steps: of the trace, if they were computed already.
        user_code: which files are the user's, beside those that are no library's.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        activity: HostActivity | None = None,
        attribution: Callable[[], Attribution] | None = None,
        steps: pl.DataFrame | None = None,
        user_code: UserCode = DEFAULT_USER_CODE,
    ) -> None:
        self.trace = trace
        self.activity = activity or host_activity(trace, user_code)
        self.steps = (step_table(trace) if steps is None else steps).filter(pl.col("complete"))
        self._attribution = attribution

    @cached_property
    def attribution(self) -> Attribution:
        """The user's line, the module and the phase of everything the host threads did."""
        return self._attribution() if self._attribution is not None else attribute(self.trace, self.activity)

    @cached_property
    def graph(self) -> Graph:
        """What waited for what, as measured."""
        return build_graph(self.trace, activity=self.activity)

    @cached_property
    def lane(self) -> int:
        """The thread that drives the steps; -1 where no thread is known."""
        lane = main_lane(self.trace, self.activity)
        return -1 if lane is None else lane

    @cached_property
    def device(self) -> str | None:
        """The busiest device; None where the trace has none."""
        busy = device_time(self.trace).sort(["busy_ns", "device"], descending=[True, False])
        return busy["device"][0] if busy.height else None

    @cached_property
    def span(self) -> Window:
        """The stretch that counts: all complete steps, or else the whole device or host window."""
        if self.steps.height:
            start = self.steps["start_ns"]
            return Window(int(start.min()), int((start + self.steps["duration_ns"]).max()))  # type: ignore[arg-type]
        if self.device is not None:
            return device_window(self.trace, self.device)
        timeline = self.activity.timelines.get(self.lane)
        if timeline is None or len(timeline.times) < 2:
            return Window(0, 1)
        return Window(int(timeline.times[1]), int(timeline.times[-1]))

    @property
    def step_count(self) -> int:
        """Number of complete steps; 1 where there are none."""
        return max(self.steps.height, 1)

    @cached_property
    def _device_marks_the_span(self) -> bool:
        """Whether nothing but the device tells where the span begins and ends."""
        return not self.steps.height or are_of_a_device(self.trace, self.steps)

    @cached_property
    def works(self) -> Rows:
        """The busiest device's work that was launched in the span, or ran in it where no launch is known."""
        if self.device is None:
            return np.zeros(0, np.int64)
        table = self.trace.device_work
        mine = (table["device"] == self.device).fill_null(False).to_numpy()
        if self._device_marks_the_span:
            start, end = table["start_ns"].to_numpy(), (table["start_ns"] + table["duration_ns"]).to_numpy()
            return np.flatnonzero(mine & (end > self.span.start_ns) & (start < self.span.end_ns))
        launched = self.trace.launches["start_ns"].gather(table["launch"])
        time = pl.select(pl.coalesce(launched, table["start_ns"])).to_series()
        inside = time.is_between(self.span.start_ns, self.span.end_ns, closed="left")
        return np.flatnonzero(inside.to_numpy() & mine)

    def length_ns(self, done: Replay) -> int:
        """How long the span takes in a replay: on the host, or on a device that is still at work when it is done."""
        starts, ends = done.work_start[self.works], done.work_end[self.works]
        host_start, host_end = self.host_ends(done)
        last = max(host_end, int(ends.max(initial=host_end)))
        # Work may begin sooner, but what then lies before the steps is no part of them.
        soonest = min(host_start, int(self.graph.works.start[self.works].min(initial=last)))
        first = max(int(starts.min(initial=last)), soonest)
        return max(host_end - host_start, last - first, 1)

    def host_ends(self, done: Replay) -> tuple[int, int]:
        """When the span begins and ends on the host in a replay; on the device where nothing else marks it."""
        if self.device is not None and self._device_marks_the_span:
            return int(done.work_start[self.works].min()), int(done.work_end[self.works].max())
        lanes = np.full(2, self.lane, np.int32)
        start, end = done.host_times(lanes, np.array([self.span.start_ns, self.span.end_ns], np.int64)).tolist()
        return start, end

    @cached_property
    def measured(self) -> Replay:
        """The replay without a change."""
        return replay(self.graph)

    @cached_property
    def measured_ns(self) -> int:
        """How long the span took."""
        return self.length_ns(self.measured)

    def run(self, graph: Graph) -> Outcome:
        """Replay a changed graph."""
        done = replay(self.from_span_on(graph))
        count = self.step_count
        return Outcome(self.length_ns(done) / count, self.measured_ns / count, count, done)

    def from_span_on(self, graph: Graph) -> Graph:
        """The graph changed from the beginning of the span on: both replays then begin with the same state."""
        base, begin = self.graph, self.span.start_ns
        stretch, work = base.stretches.start < begin, base.works.start < begin

        def edges(measured: Edges, changed: Edges, early: npt.NDArray[np.bool_]) -> Edges:
            return measured.select(early[measured.target]).with_edges(changed.select(~early[changed.target]))

        early, begun = np.zeros((2, len(graph.works.start)), np.bool_)  # a change may add work of its own
        early[: len(work)] = work
        begun[: len(work)] = base.works.start <= begin  # work with which the span begins: it may not begin sooner
        at = np.flatnonzero(begun)
        latency, gap = graph.works.latency_ns.copy(), graph.works.gap_ns.copy()
        latency[at], gap[at] = base.works.latency_ns[at], base.works.gap_ns[at]
        own = np.where(stretch, base.stretches.own_ns, graph.stretches.own_ns)
        return replace(
            graph,
            stretches=replace(graph.stretches, own_ns=own),
            works=replace(graph.works, latency_ns=latency, gap_ns=gap),
            queue_waits=edges(base.queue_waits, graph.queue_waits, begun),
            host_waits=edges(base.host_waits, graph.host_waits, stretch),
            handovers=edges(base.handovers, graph.handovers, stretch),
            host_scale=graph.host_scale.after(begin),
            work_scale=np.where(early, 1.0, graph.work_scale),
        )

    @cached_property
    def unexplained_share(self) -> float:
        """Share of the span in which the device was idle because work waited for what the trace does not show."""
        if self.device is None:
            return 0.0
        table = self.trace.device_work
        late = self.graph.unexplained_ns[: table.height]
        mine = ((table["device"] == self.device).fill_null(False)).to_numpy() & (late > 0)
        start: Times = self.graph.works.start[: table.height][mine]
        waiting = union(start - late[mine], start).clip(self.span.start_ns, self.span.end_ns)
        busy = busy_intervals(table.filter(pl.col("device") == self.device), self.span)
        return (waiting.total_ns - waiting.overlap_ns(busy)) / max(self.span.duration_ns, 1)

    @cached_property
    def why_not(self) -> str | None:
        """Why replays of this trace promise nothing, in one sentence; None where they do."""
        if self.unexplained_share > MOST_UNEXPLAINED:
            return (
                f"the device waited {self.unexplained_share:.0%} of the time for something that the trace does not show"
            )
        silent = silent_wait_ns(self.trace, self.activity, self.lane, self.device, self.span)
        if silent > MOST_UNEXPLAINED * self.span.duration_ns:
            return (
                f"the host waited for the device for {silent / self.span.duration_ns:.0%} of the time in calls that do "
                "not say so"
            )
        if self.steps.height and not len(self.graph.stretches.start):
            return "no host thread was recorded, so that nothing tells what the steps waited for"
        difference = abs(self.measured_ns - self.recorded_ns) / max(self.recorded_ns, 1)
        if difference > 0.01:
            return f"the replay without a change differs from the measured time by {difference:.1%}"
        return None

    @cached_property
    def recorded_ns(self) -> int:
        """How long the span took from the trace itself, which the replay without a change gives back."""
        works = self.graph.works
        ends = (works.start + works.duration)[self.works]
        last = max(self.span.end_ns, int(ends.max(initial=self.span.end_ns)))
        first = int(works.start[self.works].min(initial=last))
        return max(self.span.duration_ns, last - first, 1)


Change: TypeAlias = Callable[[Experiment, Graph], Graph]
"""What would be different: takes a graph and gives the changed one."""
