"""The pictures of steps that reports of several traces draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

    from stepscope.analysis.picture import StepPicture
    from stepscope.trace import Trace, Window


def compared_picture(trace: Trace) -> StepPicture:
    """The typical step, or everything; without a device, the causes are the main thread's, as of one without a name."""
    from stepscope.analysis.idle import idle_time
    from stepscope.analysis.picture import step_picture
    from stepscope.analysis.steps import step_table
    from stepscope.analysis.typical_step import typical_step

    causes = _main_thread(trace) if trace.device_work.is_empty() else idle_time(trace)
    return step_picture(trace, typical_step(step_table(trace), causes) or _whole(trace), causes)


def _main_thread(trace: Trace) -> pl.DataFrame:
    """Its time by cause in the form of idle time: without what it computed, as a device's is without its busy time."""
    import polars as pl

    from stepscope.analysis.host_time import host_time

    pieces = host_time(trace).filter(pl.col("cause") != "compute")
    no_device, no_trigger = pl.lit("").alias("device"), pl.lit(None, pl.String).alias("trigger")
    return pieces.select(no_device, "start_ns", "duration_ns", "cause", no_trigger)


def _whole(trace: Trace) -> Window:
    """From the first device work, or operator, to the end of the last one."""
    import polars as pl

    from stepscope.trace import Window

    work = trace.operators if trace.device_work.is_empty() else trace.device_work
    if work.is_empty():
        return Window(0, 1)
    start, end = work.select(
        pl.col("start_ns").min(), (pl.col("start_ns") + pl.col("duration_ns")).max().alias("e")
    ).row(0)
    return Window(start, max(end, start + 1))
