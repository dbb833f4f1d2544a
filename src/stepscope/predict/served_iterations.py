"""The iterations of a recorded server on another device: prefill, which ends with the first token, and decoding.

The replays of the steps tell when an iteration begins and ends there. Where the steps cannot be replayed, an iteration
keeps the device's idle time, or hides as much of it as possible: these are the ends of its range.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from stepscope.analysis.serving import PUT_ASIDE, iteration_costs, iteration_table, work_launched_in
from stepscope.predict.operations import Numbers
from stepscope.predict.ranges import with_host
from stepscope.predict.step_replays import StepRange, StepReplays
from stepscope.trace.nesting import Rows
from stepscope.trace.window import Times
from stepscope.whatif.graph import Replay


@dataclass(frozen=True, slots=True)
class ServedPhase:
    """Iterations of one phase, as recorded and on another device; medians, nanoseconds.

    Attributes:
        phase: "prefill", whose length is the time to the first token, "decode", the time per output token, or "mixed".
        count: iterations.
        requests, tokens: in an iteration; None where the trace does not tell.
        measured_ns: from an iteration's start to the next one's, or to the end of its work.
        measured_device_ns, device_ns: in which the device works for it.
        graph_share: of its device work, from captured graphs, 0 to 1.
    """

    phase: str
    count: int
    requests: float | None
    tokens: float | None
    measured_ns: float
    measured_device_ns: float
    ns: float
    low_ns: float
    high_ns: float
    device_ns: float
    graph_share: float


class ServedIterations:
    """Iterations that replays of the steps contain; none in a trace of anything but a server."""

    def __init__(self, replays: StepReplays) -> None:
        self._replays = replays

    def on(self, step: StepRange, factors: tuple[Numbers, Numbers, Numbers]) -> tuple[ServedPhase, ...]:
        """Each phase with the device work scaled.

        Args:
            step: of `StepReplays.with_work` with these factors.
            factors: expected, low and high; each of shape (rows of device_work,).
        """
        if self._table.is_empty():
            return ()
        measured, busy = self._measured_ns, self._measured_busy
        device = [busy * self._mean_factors(each) for each in factors]
        if step.replays:
            lengths = np.stack([self._lengths(each) for each in step.replays])
        else:
            idle = np.maximum(measured - busy, 0)
            ends = np.stack([end for each in device for end in (idle + each, np.maximum(measured, each))])
            lengths = np.stack([idle + device[0], ends.min(axis=0), ends.max(axis=0)])
        lengths = lengths.astype(np.float64)
        low, high = lengths.min(axis=0), lengths.max(axis=0)
        if not (factors[0] == 1.0).all():
            low, high = with_host(lengths[0], device[0], low, high)
        return self._phases(lengths[0], low, high, device[0])

    @cached_property
    def _table(self) -> pl.DataFrame:
        """The served iterations; `follows` says whether the next one's start is an iteration's end."""
        rows = iteration_table(self._replays.experiment.trace)
        rows = rows.filter(pl.col("phase").is_not_null() & ~pl.col("phase").is_in(PUT_ASIDE)).sort("start_ns")
        following = pl.col("phase").shift(-1)
        other = (pl.col("phase") == "decode") & (following != "decode")  # requests may have come after a pause
        return rows.with_columns(follows=following.is_not_null() & ~other)

    @cached_property
    def _work(self) -> pl.DataFrame:
        return work_launched_in(self._replays.experiment.trace, self._table)

    @cached_property
    def _rows(self) -> tuple[Rows, Rows]:
        """Rows of `device_work`, and the iteration of each."""
        return self._work["row"].to_numpy().astype(np.int64), self._work["iteration"].to_numpy().astype(np.int64)

    @cached_property
    def _measured_ns(self) -> Times:
        return self._lengths(self._replays.experiment.measured)

    @cached_property
    def _measured_busy(self) -> Numbers:
        costs = iteration_costs(self._replays.experiment.trace, self._table)
        busy: Numbers = costs["device_ns"].fill_null(0).cast(pl.Float64).to_numpy()
        return busy

    def _mean_factors(self, factors: Numbers) -> Numbers:
        """Time of each iteration's work over its recorded time."""
        rows, iteration = self._rows
        duration = self._replays.experiment.graph.works.duration[rows].astype(np.float64)
        after, before = (
            np.bincount(iteration, weights, minlength=self._table.height)
            for weights in (duration * factors[rows], duration)
        )
        return np.divide(after, before, out=np.ones(len(before)), where=before > 0)

    def _lengths(self, done: Replay) -> Times:
        """Nanoseconds of each iteration in a replay.

        Decoding that no other follows is as long as its host or its work: engines give the next one before that ends.
        """
        lanes = self._table["lane"].to_numpy().astype(np.int32)
        starts = self._table["start_ns"].to_numpy()
        begin, end = (done.host_times(lanes, at) for at in (starts, starts + self._table["duration_ns"].to_numpy()))
        rows, iteration = self._rows
        first, last = np.full(len(begin), np.iinfo(np.int64).max), end.copy()
        np.minimum.at(first, iteration, done.work_start[rows])
        np.maximum.at(last, iteration, done.work_end[rows])
        period = np.maximum(end - begin, last - np.minimum(np.maximum(first, begin), last))
        alone = np.where((self._table["phase"] == "decode").to_numpy(), period, last - begin)
        return np.where(self._table["follows"].to_numpy(), np.append(begin[1:], begin[-1:]) - begin, alone)

    def _phases(self, expected: Numbers, low: Numbers, high: Numbers, device: Numbers) -> tuple[ServedPhase, ...]:
        in_graph = self._work.group_by("iteration").agg(
            share=(pl.col("duration_ns") * pl.col("in_graph")).sum() / pl.col("duration_ns").sum()
        )
        numbered = self._table.with_row_index("iteration").with_columns(pl.col("iteration").cast(pl.Int64))
        rows = numbered.join(in_graph.cast({"iteration": pl.Int64}), on="iteration", how="left").sort("iteration")
        rows = rows.with_columns(
            measured_ns=self._measured_ns, measured_device_ns=self._measured_busy, ns=expected, low_ns=low, high_ns=high
        ).with_columns(device_ns=device)
        medians = ("requests", "tokens", "measured_ns", "measured_device_ns", "ns", "low_ns", "high_ns", "device_ns")
        sums = rows.group_by("phase").agg(pl.len(), pl.col(medians).median(), pl.col("share").fill_null(0.0).mean())
        return tuple(ServedPhase(*row) for row in sums.sort("phase", descending=True).iter_rows())
