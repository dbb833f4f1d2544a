"""What the user's lines and modules cost: device time by phase, idle time, calls and memory, summed without loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import polars as pl

from stepscope.analysis.attribution import Attribution, attribute
from stepscope.analysis.idle import idle_time
from stepscope.analysis.operators import operator_costs
from stepscope.analysis.per_slice import at
from stepscope.analysis.phases import OTHER, PHASES
from stepscope.analysis.steps import step_table
from stepscope.analysis.where import slice_index
from stepscope.trace import Trace, Window
from stepscope.trace.nesting import Rows

PHASE_COLUMNS: Final = tuple(f"{phase}_ns" for phase in PHASES)
COST_COLUMNS: Final[dict[str, type[pl.DataType]]] = {
    **dict.fromkeys(PHASE_COLUMNS, pl.Int64),  # device time, or operators' own time where the trace has no device
    "total_ns": pl.Int64,  # the sum of these
    "host_ns": pl.Int64,  # operators' own time on the host
    "idle_ns": pl.Int64,  # device idle time that it caused; null without a device
    "calls": pl.Int64,
    "bytes_allocated": pl.Int64,  # null where the recording kept no allocations
}
_RECORDS: Final = dict.fromkeys(
    ("place", "module", "phase", "ns", "host_ns", "idle_ns", "calls", "bytes_allocated"), pl.Int64
)
_EVER: Final = Window(-(2**62), 2**62)


@dataclass(frozen=True)
class PlaceCosts:
    """What happened in a stretch of a trace, by place, module and phase.

    Attributes:
        basis: "device" where times are those of device work, "host" where they are operators' own time.
        steps: complete steps that the stretch consists of; 0 where it is everything that was recorded.
        window: the stretch: what was launched or began in it counts.
        records: columns place and module (indices into the attribution's, -1 for none), phase (index into PHASES), ns,
            host_ns, idle_ns, calls, bytes_allocated; one row for each combination.
    """

    attribution: Attribution
    basis: Literal["device", "host"]
    steps: int
    window: Window
    records: pl.DataFrame

    @property
    def total_ns(self) -> int:
        """All device time, or operators' own time where the trace has no device."""
        return int(self.records["ns"].sum())

    @property
    def attributed_ns(self) -> int:
        """The part of `total_ns` that has a place in the user's code."""
        return int(self.records.filter(pl.col("place") >= 0)["ns"].sum())

    @property
    def idle_ns(self) -> int | None:
        """All idle time of devices; None without a device."""
        return int(self.records["idle_ns"].sum()) if self.basis == "device" else None


def place_costs(
    trace: Trace,
    *,
    attribution: Attribution | None = None,
    window: Window | None = None,
    idle: pl.DataFrame | None = None,
) -> PlaceCosts:
    """The costs of the complete steps, or of everything where there are none.

    Args:
        attribution: as `attribute` gives it, if it was computed already.
        window: another stretch than the steps'.
        idle: as `idle_time` gives it, likewise.
    """
    attribution = attribute(trace) if attribution is None else attribution
    steps = 0
    if window is None:
        complete = step_table(trace).filter(pl.col("complete"))
        steps = complete.height
        ends = (complete["start_ns"] + complete["duration_ns"]).to_numpy()
        starts = complete["start_ns"].to_numpy()
        window = Window(int(starts.min()), int(ends.max())) if steps else _EVER
    basis: Literal["device", "host"] = "device" if trace.device_work.height else "host"
    parts = [pl.DataFrame(schema=dict(_RECORDS)), _operators(trace, attribution, window, count_time=basis == "host")]
    if basis == "device":
        pieces = idle_time(trace, activity=attribution.activity) if idle is None else idle
        parts += [_work(trace, attribution, window), _idle(attribution, window, pieces)]
    keys = ["place", "module", "phase"]
    records = pl.concat(parts, how="diagonal").group_by(keys).agg(pl.exclude(keys).sum()).sort(keys)
    return PlaceCosts(attribution, basis, steps, window, records)


def cost_sums(costs: PlaceCosts, by: str) -> pl.DataFrame:
    """Columns `by` ("place" or "module") and COST_COLUMNS, one row for each value."""
    phases = [
        pl.col("ns").filter(pl.col("phase") == number).sum().alias(name) for number, name in enumerate(PHASE_COLUMNS)
    ]
    sums = costs.records.group_by(by).agg(
        *phases, pl.col("ns").sum().alias("total_ns"), pl.col("host_ns", "idle_ns", "calls", "bytes_allocated").sum()
    )
    unknown = [] if costs.basis == "device" else [pl.lit(None).alias("idle_ns")]
    if costs.attribution.trace.memory.is_empty():
        unknown.append(pl.lit(None).alias("bytes_allocated"))
    columns = [pl.col(name).cast(dtype) for name, dtype in COST_COLUMNS.items()]
    return sums.with_columns(unknown).select(by, *columns)


def _records(place: Rows, module: Rows, **columns: Rows) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "place": place,
            "module": module,
            **{name: values.astype(np.int64) for name, values in columns.items()},
        }
    )


def _work(trace: Trace, attribution: Attribution, window: Window) -> pl.DataFrame:
    work = trace.device_work
    launched = trace.launches["start_ns"].gather(work["launch"])
    start = pl.select(pl.coalesce(launched, work["start_ns"])).to_series().to_numpy()
    rows = _records(
        attribution.work_place,
        attribution.work_module,
        phase=attribution.work_phase.astype(np.int64),
        ns=work["duration_ns"].to_numpy(),
    )
    return rows.filter(pl.Series((start >= window.start_ns) & (start < window.end_ns)))


def _operators(trace: Trace, attribution: Attribution, window: Window, *, count_time: bool) -> pl.DataFrame:
    costs = operator_costs(trace)
    slices = attribution.operator_slices
    own = costs["host_self_ns"].to_numpy()
    phase = np.where(slices >= 0, at(attribution.phase.astype(np.int64), slices), OTHER)
    rows = _records(
        at(attribution.place, slices),
        at(attribution.module, slices),
        phase=phase,
        ns=own if count_time else np.zeros(len(own), np.int64),
        host_ns=own,
        calls=_is_call(trace, attribution),
        bytes_allocated=costs["bytes_allocated"].to_numpy(),
    )
    start = trace.operators["start_ns"].to_numpy()
    return rows.filter(pl.Series((start >= window.start_ns) & (start < window.end_ns)))


def _is_call(trace: Trace, attribution: Attribution) -> Rows:
    """1 for operators that a line called itself: not inside another one of the same line, nor as its backward."""
    slices = attribution.operator_slices
    place = at(attribution.place, slices)
    parent = trace.operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    caused = (slices >= 0) & (at(attribution.caused.astype(np.int64), slices) > 0)
    outermost = (parent < 0) | (at(place, parent) != place)
    result: Rows = (outermost & ~caused).astype(np.int64)
    return result


def _idle(attribution: Attribution, window: Window, pieces: pl.DataFrame) -> pl.DataFrame:
    """Idle time under the slice that the host was in, else the line it was at, else the launch that ended the gap."""
    start = pl.col("start_ns").clip(lower_bound=window.start_ns)
    end = (pl.col("start_ns") + pl.col("duration_ns")).clip(upper_bound=window.end_ns)
    pieces = pieces.with_columns(ns=end - start).filter(pl.col("ns") > 0)
    slices = slice_index(attribution.activity, pieces["slice_table"], pieces["slice_row"])
    launch = pieces["launch"].cast(pl.Int64).fill_null(-1).to_numpy()
    launching = at(attribution.activity.slices_of("launches"), launch)
    rows = _records(
        at(attribution.place, slices),
        at(attribution.module, slices),
        phase=np.full(len(slices), OTHER),
        idle_ns=pieces["ns"].to_numpy(),
    ).with_columns(
        line=pl.Series(_lines(attribution, pieces)), launch_place=pl.Series(at(attribution.place, launching))
    )
    place, line = pl.col("place"), pl.col("line")
    found = pl.when(place >= 0).then(place).when(line >= 0).then(line).otherwise(pl.col("launch_place"))
    return rows.with_columns(place=found).drop("line", "launch_place")


def _lines(attribution: Attribution, pieces: pl.DataFrame) -> Rows:
    """The place of pieces in which the recording's lines tell what the host did, -1 for others."""
    rows = pl.select(pl.when(pieces["slice_table"] == "lines").then(pieces["slice_row"])).to_series()
    return at(attribution.line_place, rows.cast(pl.Int64).fill_null(-1).to_numpy())
