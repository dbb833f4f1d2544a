"""The device, thread, steps and time window that a trace's steps are measured on, and how rows of its tables belong
together.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.attribution import Attribution, attribute
from stepscope.analysis.device_time import busy_intervals, device_time
from stepscope.analysis.host import HostActivity, host_activity, host_window, main_lane
from stepscope.analysis.idle import clipped, device_window, idle_time
from stepscope.analysis.input_pipeline import input_table
from stepscope.analysis.memory import DeviceMemory, device_memories
from stepscope.analysis.module_paths import backward_source
from stepscope.analysis.operators import operator_costs
from stepscope.analysis.serving import iteration_table
from stepscope.analysis.steps import StepSummary, are_of_a_device, span_of, step_summary, step_table, typical_run
from stepscope.threads import cached_property
from stepscope.trace import Trace, Window
from stepscope.trace.naming import DEFAULT_USER_CODE, UserCode
from stepscope.trace.nesting import Rows, beginning_in, inside, outermost, those
from stepscope.trace.window import Times

_LAUNCHES_RECORDED: Final = 0.9
"""If more of a queue's work has a known launch, work before all of it was launched before the recording."""


class StepView:
    """One trace's device, thread, steps and span, each computed once, for diagnosis and for replays.

    The steps are measured on the host's clock, from the first one's start to the last one's end. Device work launched
    before them is a backlog: neither it nor an initial wait for it belongs to the steps. If the device takes longer for
    the steps' own work than the host for the steps, the device sets the pace: the steps then last from the start of
    that work to its end.

    Args:
        user_code: which files are the user's, besides those outside of libraries.
        device: device to use if it worked; otherwise the busiest.
    """

    def __init__(self, trace: Trace, *, user_code: UserCode = DEFAULT_USER_CODE, device: str | None = None) -> None:
        self.trace = trace
        self.user_code = user_code
        self.wanted_device = device

    @cached_property
    def activity(self) -> HostActivity:
        return host_activity(self.trace, self.user_code, self.steps)

    @cached_property
    def attribution(self) -> Attribution:
        """Source line, module and phase of all host activity."""
        return attribute(self.trace, self.activity)

    @cached_property
    def iterations(self) -> pl.DataFrame:
        """Iterations of an engine that serves, or of a loop that generates; see `serving.iteration_table`."""
        return iteration_table(self.trace)

    @cached_property
    def steps(self) -> pl.DataFrame:
        return step_table(self.trace, self.iterations)

    @cached_property
    def complete_steps(self) -> pl.DataFrame:
        """Steps entirely inside the recording, without outliers; see `typical_run`."""
        return typical_run(self.steps.filter(pl.col("complete")))

    @property
    def step_count(self) -> int:
        """Number of complete steps; 1 where there are none and the whole span counts as one."""
        return max(self.complete_steps.height, 1)

    @cached_property
    def device_time(self) -> pl.DataFrame:
        return device_time(self.trace)

    @cached_property
    def device(self) -> str | None:
        """The requested device if it worked, else the busiest; None if none worked."""
        wanted = pl.col("device") == pl.lit(self.wanted_device, pl.String)
        busy = self.device_time.sort(wanted.fill_null(False), "busy_ns", "device", descending=[True, True, False])
        return busy["device"][0] if busy.height else None

    @cached_property
    def lane(self) -> int | None:
        """Thread that drives the steps; None if unknown."""
        return main_lane(self.trace, self.activity)

    @cached_property
    def is_on_device(self) -> bool:
        """Whether the device marks the span: its steps are device times, or nothing was recorded on the host."""
        if self.complete_steps.height:
            return are_of_a_device(self.trace, self.complete_steps)
        return self.device is not None and (
            self.lane is None
            or self.trace.device_work.filter(pl.col("device") == self.device)["launch"].is_null().all()
        )

    @cached_property
    def span(self) -> Window:
        """Time in which the steps' work was launched: all complete steps, or else all that was recorded."""
        steps = span_of(self.complete_steps)
        if steps is not None:
            return steps if self.is_on_device else self._without_waiting(steps)
        if self.device is not None and self.is_on_device:
            return device_window(self.trace, self.device)
        window = host_window(self.trace, self.activity)
        return window if window.duration_ns else Window(0, 1)

    def _without_waiting(self, steps: Window) -> Window:
        """The steps without an initial wait for the backlog, such as the one when a profiler starts."""
        if self.device is None:
            return steps
        split = self._split(self.device, steps)
        done, own = _last_end(split.filter("is_backlog")), split.filter("is_own")
        first = int(own["launch_start_ns"].drop_nulls().to_numpy().min(initial=steps.end_ns))
        begins = pl.col("start_ns").is_between(steps.start_ns, min(done, first), closed="left")
        waits = self.trace.launches.filter((pl.col("kind") == "synchronise") & begins)
        start_ns = min(max(_last_end(waits), steps.start_ns), done)
        # A wait that outlasts the steps, as on another thread, leaves nothing to measure.
        return Window(start_ns, steps.end_ns) if waits.height and start_ns < steps.end_ns else steps

    @cached_property
    def work(self) -> pl.DataFrame:
        """Device work that was launched in the span (or ran in it, if its launch is unknown), with `row`."""
        return self._classified.filter("is_own").drop("is_own", "is_backlog")

    @cached_property
    def window(self) -> Window:
        """Time that the steps took: the span, or the device's time for them if that is longer; see the class."""
        return self.window_of(self.device)

    def window_of(self, device: str | None) -> Window:
        """The same for another device; None for the host alone."""
        span = self.span
        if device is None:
            return span
        split = self._classified if device == self.device else self._split(device, span)
        own = split.filter("is_own")
        last = _last_end(own, span.end_ns)
        first = int(own["start_ns"].to_numpy().min(initial=last))
        if not self.complete_steps.height:
            return Window(min(first, span.start_ns), last)
        first = max(first, min(_last_end(split.filter("is_backlog")), last))
        return Window(first, last) if last - first > span.duration_ns else span

    @cached_property
    def backlog_end_ns(self) -> int:
        """When the device finished what was launched before the span; 0 if there was nothing."""
        return _last_end(self._classified.filter("is_backlog"))

    @cached_property
    def windows(self) -> dict[str, Window]:
        """Time that the steps took, for each device that worked."""
        return {device: self.window_of(device) for device in self.trace.working_devices}

    @cached_property
    def idle(self) -> pl.DataFrame:
        """Idle pieces of every device, from its first to its last work."""
        return self._idle_in({device: device_window(self.trace, device) for device in self.windows})

    @cached_property
    def idle_in_steps(self) -> pl.DataFrame:
        """Idle pieces of every device over the time that the steps took."""
        return self._idle_in(self.windows)

    def _idle_in(self, windows: dict[str, Window]) -> pl.DataFrame:
        idle = self._idle_in_all
        own = (
            (those(idle, (idle["device"] == device).fill_null(False).to_numpy()), window)
            for device, window in windows.items()
        )
        parts = [clipped(pieces, window) for pieces, window in own]
        return pl.concat([idle.clear(), *parts])

    @cached_property
    def _idle_in_all(self) -> pl.DataFrame:
        both = {}
        for device, window in self.windows.items():
            own = device_window(self.trace, device)
            both[device] = Window(min(window.start_ns, own.start_ns), max(window.end_ns, own.end_ns))
        return idle_time(self.trace, window=both, activity=self.activity)

    def backlog(self, device: str) -> pl.DataFrame:
        """The device's work that ran in its window, but was launched before the span; with `row`."""
        window = self.windows[device]
        late = (pl.col("start_ns") + pl.col("duration_ns")) > window.start_ns
        split = self._classified if device == self.device else self._split(device, self.span)
        return split.filter("is_backlog", late, pl.col("start_ns") < window.end_ns)

    @cached_property
    def _classified(self) -> pl.DataFrame:
        return self._split(self.device, self.span)

    def _split(self, device: str | None, span: Window) -> pl.DataFrame:
        """All work of a device, in order, with `row`, `launch_start_ns`, `is_own` and `is_backlog`."""
        calls = self.trace.launches.select(launch_start_ns="start_ns").with_row_index("launch")
        rows = self.trace.device_work.with_row_index("row").filter(pl.col("device") == pl.lit(device, pl.String))
        rows = rows.join(calls, on="launch", how="left", maintain_order="left")
        time = pl.col("start_ns") if self.is_on_device else pl.coalesce("launch_start_ns", "start_ns")
        earlier = self._launched_before(rows) if self.complete_steps.height else pl.lit(False)
        own = time.is_between(span.start_ns, span.end_ns, closed="left") & ~earlier
        before = ((time < span.start_ns) | earlier) & (not self.is_on_device)
        return rows.with_columns(is_own=own, is_backlog=before)

    def _launched_before(self, rows: pl.DataFrame) -> pl.Series:
        """Which work was launched before the recording: that before all work with a known launch in its queue."""
        if self.is_on_device or not rows["launch"].null_count():
            return pl.Series(np.zeros(rows.height, np.bool_))
        known = pl.col("launch").is_not_null()
        first = pl.col("start_ns").filter(known).min().over("lane")
        later = pl.col("start_ns") >= first
        recorded = (known & later).sum().over("lane") >= _LAUNCHES_RECORDED * later.sum().over("lane")
        return rows.select((~later & recorded).fill_null(False)).to_series()

    @cached_property
    def summary(self) -> StepSummary:
        """Summary of the measured steps; of all of them if none is complete."""
        return step_summary(self.complete_steps if self.complete_steps.height else self.steps)

    @cached_property
    def memories(self) -> tuple[DeviceMemory, ...]:
        return device_memories(self.trace, steps=self.steps, attribution=self.attribution)

    @cached_property
    def operator_costs(self) -> pl.DataFrame:
        return operator_costs(self.trace)

    @cached_property
    def input_functions(self) -> pl.DataFrame:
        """Functions of the input pipeline in the span; see `stepscope.analysis.input_pipeline.input_table`."""
        return input_table(self.trace, activity=self.activity, window=self.span)

    @cached_property
    def operators(self) -> pl.DataFrame:
        """Operators of all threads that begin in the span, with their `row` in the trace's table."""
        rows = self.trace.operators.with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
        return self.begin_in_span(rows)

    @cached_property
    def parents(self) -> Rows:
        """For each operator, the row of the operator around it, -1 for none."""
        parents: Rows = self.trace.operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
        return parents

    @cached_property
    def launching(self) -> Rows:
        """For each launch, the row of the operator that made it, -1 for none."""
        operators: Rows = self.trace.launches["operator"].cast(pl.Int64).fill_null(-1).to_numpy()
        return operators

    def launched_in(self, rows: Rows) -> Rows:
        """Rows of the launches made inside these rows of `operators`."""
        if not len(self.launching):
            return self.launching
        return np.flatnonzero((self.launching >= 0) & self.inside(rows)[np.maximum(self.launching, 0)])

    def begin_in_span(self, table: pl.DataFrame) -> pl.DataFrame:
        return beginning_in(table, self.span)

    def steps_with(self, starts: Times) -> int:
        """Number of complete steps that contain at least one of these times; 1 without steps."""
        bounds = self.complete_steps["start_ns"].to_numpy()
        return len(np.unique(np.searchsorted(bounds, starts, side="right"))) if len(bounds) else 1

    def inside(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which operators are among these rows of `operators` or run inside one of them; shape (operators,)."""
        return inside(rows, self.parents)

    def outermost(self, rows: Rows) -> Rows:
        """The rows of `operators` among these that run inside no other of them."""
        return outermost(rows, self.parents)

    def backward_of(self, rows: Rows) -> Rows:
        """Rows of the outermost backward operators of these forward operators and the operators inside them."""
        operators = self.trace.operators
        caused = self.backward_source
        wanted = self.inside(rows)
        found = np.flatnonzero((caused >= 0) & wanted[np.maximum(caused, 0)]) if operators.height else caused
        return self.outermost(found)

    @cached_property
    def backward_source(self) -> Rows:
        """For each backward operator, the row of its forward operator, -1 for none."""
        return backward_source(self.trace)

    def exposed_ns(self, kinds: tuple[str, ...]) -> int:
        """Time in the span when the device ran these kinds of work and no computation."""
        mine = self.trace.device_work.filter(pl.col("device") == pl.lit(self.device, pl.String))
        wanted = busy_intervals(mine.filter(pl.col("kind").is_in(kinds)), self.window)
        compute = busy_intervals(mine.filter(pl.col("kind") == "compute"), self.window)
        return wanted.total_ns - wanted.overlap_ns(compute)

    def slices_of_operators(self, rows: Rows) -> Rows:
        """Indices in `activity` of the slices of these rows of `operators`."""
        return self.activity.slices_of("operators")[rows]

    def slices_of_launches(self, launches: pl.Series) -> Rows:
        """Indices in `activity` of the slices of these rows of `launches`, -1 for null."""
        slices = np.append(self.activity.slices_of("launches"), -1)
        found: Rows = slices[launches.cast(pl.Int64).fill_null(-1).to_numpy()]
        return found


def _last_end(rows: pl.DataFrame, least: int = 0) -> int:
    return int((rows["start_ns"] + rows["duration_ns"]).to_numpy().max(initial=least))
