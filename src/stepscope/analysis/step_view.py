"""What a trace's steps are measured on: the device, the thread that drives it, and the stretch of time."""

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
        trace: the trace.
        user_code: which files are the user's, beside those that are no library's.
        device: the device to look at, if it worked; otherwise the busiest.
    """

    def __init__(self, trace: Trace, *, user_code: UserCode = DEFAULT_USER_CODE, device: str | None = None) -> None:
        self.trace = trace
        self.user_code = user_code
        self._wanted_device = device

    @cached_property
    def activity(self) -> HostActivity:
        """What the host threads did."""
        return host_activity(self.trace, self.user_code)

    @cached_property
    def attribution(self) -> Attribution:
        """The user's line, the module and the phase of everything the host threads did."""
        return attribute(self.trace, self.activity)

    @cached_property
    def steps(self) -> pl.DataFrame:
        """As `step_table`."""
        return step_table(self.trace)

    @cached_property
    def complete_steps(self) -> pl.DataFrame:
        """The steps that lie inside the recording."""
        return self.steps.filter(pl.col("complete"))

    @property
    def step_count(self) -> int:
        """Number of complete steps; 1 where there are none and the whole span counts as one."""
        return max(self.complete_steps.height, 1)

    @cached_property
    def device_time(self) -> pl.DataFrame:
        """As `stepscope.analysis.device_time.device_time`."""
        return device_time(self.trace)

    @cached_property
    def device(self) -> str | None:
        """The wanted device if it worked, else the busiest; None if none worked."""
        wanted = pl.col("device") == pl.lit(self._wanted_device, pl.String)
        busy = self.device_time.sort(wanted.fill_null(False), "busy_ns", "device", descending=[True, True, False])
        return busy["device"][0] if busy.height else None

    @cached_property
    def lane(self) -> int | None:
        """The thread that drives the steps; None where no thread is known."""
        return main_lane(self.trace, self.activity)

    @cached_property
    def span(self) -> Window:
        """The stretch that counts: all complete steps, or else the whole device or host window."""
        steps = span_of(self.complete_steps)
        if steps is not None:
            return steps
        if self.device is not None:
            return device_window(self.trace, self.device)
        window = host_window(self.trace, self.activity)
        return window if window.duration_ns else Window(0, 1)
