"""The device, thread, steps and time window that a trace's steps are measured on."""

from __future__ import annotations

from functools import cached_property

import polars as pl

from stepscope.analysis.attribution import Attribution, attribute
from stepscope.analysis.device_time import device_time
from stepscope.analysis.host import HostActivity, host_activity, host_window, main_lane
from stepscope.analysis.idle import device_window
from stepscope.analysis.steps import span_of, step_table
from stepscope.trace import Trace, Window
from stepscope.trace.naming import DEFAULT_USER_CODE, UserCode


class StepView:
    """One trace's device, thread, steps and span, each computed once, for diagnosis and for replays.

    Args:
        user_code: which files are the user's, besides those outside of libraries.
        device: device to use if it worked; otherwise the busiest.
    """

    def __init__(self, trace: Trace, *, user_code: UserCode = DEFAULT_USER_CODE, device: str | None = None) -> None:
        self.trace = trace
        self.user_code = user_code
        self._wanted_device = device

    @cached_property
    def activity(self) -> HostActivity:
        """Activity of the host threads."""
        return host_activity(self.trace, self.user_code)

    @cached_property
    def attribution(self) -> Attribution:
        """Source line, module and phase of all host activity."""
        return attribute(self.trace, self.activity)

    @cached_property
    def steps(self) -> pl.DataFrame:
        """Steps of the trace, as from `step_table`."""
        return step_table(self.trace)

    @cached_property
    def complete_steps(self) -> pl.DataFrame:
        """Steps entirely inside the recording."""
        return self.steps.filter(pl.col("complete"))

    @property
    def step_count(self) -> int:
        """Number of complete steps; 1 where there are none and the whole span counts as one."""
        return max(self.complete_steps.height, 1)

    @cached_property
    def device_time(self) -> pl.DataFrame:
        """Time of each device, as from `stepscope.analysis.device_time.device_time`."""
        return device_time(self.trace)

    @cached_property
    def device(self) -> str | None:
        """The requested device if it worked, else the busiest; None if none worked."""
        wanted = pl.col("device") == pl.lit(self._wanted_device, pl.String)
        busy = self.device_time.sort(wanted.fill_null(False), "busy_ns", "device", descending=[True, True, False])
        return busy["device"][0] if busy.height else None

    @cached_property
    def lane(self) -> int | None:
        """Thread that drives the steps; None if unknown."""
        return main_lane(self.trace, self.activity)

    @cached_property
    def span(self) -> Window:
        """Time to measure: all complete steps, or else the whole device or host window."""
        steps = span_of(self.complete_steps)
        if steps is not None:
            return steps
        if self.device is not None:
            return device_window(self.trace, self.device)
        window = host_window(self.trace, self.activity)
        return window if window.duration_ns else Window(0, 1)
