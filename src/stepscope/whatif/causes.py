"""What a step would save without each cause: the time that it took against what a replay without it gives."""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.analysis.device_time import busy_intervals
from stepscope.analysis.host_time import host_time
from stepscope.analysis.idle import idle_time
from stepscope.trace import Window
from stepscope.whatif.changes import without_cause
from stepscope.whatif.experiment import Experiment

CAUSE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "cause": pl.String,
    "attributed_ns": pl.Int64,  # per step: the device's idle time of this cause; without a device the main thread's
    "attributed_share": pl.Float64,  # of the step
    "saving_ns": pl.Int64,  # per step: what the replay without the cause gives
    "saving_share": pl.Float64,
}
SMALLEST_SHARE: Final = 0.001
"""Of the span: causes that took less of it, on the device and on the main thread, are not replayed, and those that
neither took nor would save as much are left out."""
_WORK_OF: Final = {"communication": ("communication",), "host_to_device_copy": ("copy_in",)}
"""Device work that a cause stands for as well: without the cause it goes too."""


def cause_table(experiment: Experiment) -> pl.DataFrame:
    """What each cause took of a step and what a step would save without it, the largest saving first.

    Where a device works for other ranks or copies, and computes nothing meanwhile, that counts for communication and
    for copies.

    Returns:
        Columns as in CAUSE_SCHEMA. Savings overlap: they do not add up.
    """
    attributed, count = _attributed(experiment), experiment.step_count
    host = _by_cause(host_time(experiment.trace, window=experiment.span, activity=experiment.activity))
    least = SMALLEST_SHARE * experiment.measured_ns
    rows = []
    for cause in sorted(attributed.keys() | host.keys()):
        mine = attributed.get(cause, 0)
        if max(mine, host.get(cause, 0)) < least:
            continue
        saved = experiment.run(without_cause(cause)(experiment, experiment.graph))
        if max(mine, abs(saved.saving_ns) * count) < least:
            continue
        share = mine / max(experiment.measured_ns, 1)
        rows.append((cause, round(mine / count), share, round(saved.saving_ns), saved.saving_share))
    table = pl.DataFrame(rows, schema=CAUSE_SCHEMA, orient="row")
    return table.sort(["saving_ns", "attributed_ns", "cause"], descending=[True, True, False])


def _attributed(experiment: Experiment) -> dict[str, int]:
    if experiment.device is None:
        return _by_cause(host_time(experiment.trace, window=experiment.span, activity=experiment.activity))
    table = experiment.trace.device_work
    ends = (table["start_ns"] + table["duration_ns"]).to_numpy()[experiment.works]
    span = Window(experiment.span.start_ns, max(experiment.span.end_ns, int(ends.max(initial=0))))
    idle = idle_time(experiment.trace, activity=experiment.activity).filter(pl.col("device") == experiment.device)
    start = pl.col("start_ns").clip(lower_bound=span.start_ns)
    end = (pl.col("start_ns") + pl.col("duration_ns")).clip(upper_bound=span.end_ns)
    pieces = idle.with_columns(duration_ns=end - start).filter(pl.col("duration_ns") > 0)
    result = _by_cause(pieces)
    mine = table.filter(pl.col("device") == experiment.device)
    compute = busy_intervals(mine.filter(pl.col("kind") == "compute"), span)
    for cause, kinds in _WORK_OF.items():
        busy = busy_intervals(mine.filter(pl.col("kind").is_in(kinds)), span)
        alone = busy.total_ns - busy.overlap_ns(compute)
        if alone:
            result[cause] = result.get(cause, 0) + alone
    return result


def _by_cause(pieces: pl.DataFrame) -> dict[str, int]:
    return dict(pieces.group_by("cause").agg(pl.col("duration_ns").sum()).iter_rows())
