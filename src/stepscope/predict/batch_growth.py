"""How much longer each work of a trace's devices takes with another batch size.

With r the new batch over the recorded one: operators of known work take the predicted time for the grown shapes over
that for the recorded ones; copies to the device r times as long; the optimizer, communication (of gradients) and copies
to the host what they took. Of kernels without shapes nobody knows: they change as the others do, with a band from not
at all to r times.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.attribution import operator_places
from stepscope.devices import DevicePeaks
from stepscope.predict.batch import BatchChange, with_batch
from stepscope.predict.operation_times import operation_times
from stepscope.predict.operations import Numbers, Operations
from stepscope.predict.precision import in_precision, types_on
from stepscope.predict.work_kinds import WorkKinds
from stepscope.trace import Trace


@dataclass(frozen=True, slots=True)
class Growth:
    """How many times as long works take; arrays as the rows of `device_work`.

    Attributes:
        expected, low, high: the factor, and the band in which it lies.
        is_known: whether shapes or the work's kind tell.
    """

    expected: Numbers
    low: Numbers
    high: Numbers
    is_known: npt.NDArray[np.bool_]


class BatchGrowth:
    """What another batch size makes of a trace's device work.

    Args:
        kinds: the trace's, as recorded.
    """

    def __init__(self, trace: Trace, kinds: WorkKinds, change: BatchChange) -> None:
        self._trace, self._kinds, self._change = trace, kinds, change
        self.grown_trace = with_batch(trace, change)
        self._grown = WorkKinds(self.grown_trace)

    def on(self, target: DevicePeaks, precision: str | None) -> Growth:
        """How much longer works take on a device."""
        work, factor = self._trace.device_work, self._change.factor
        kind = work["kind"].fill_null("other").to_numpy()
        expected = np.where(kind == "copy_in", factor, np.ones(len(kind)))
        low, high = expected.copy(), expected.copy()
        stays = self._in_optimizer | np.isin(kind, ("communication", "copy_out"))
        known = stays | (kind == "copy_in")
        ratios = self._ratios(target, precision)
        mine = ~known & np.isfinite(ratios[0])
        for array, ratio in zip((expected, low, high), ratios, strict=True):
            array[mine] = ratio[mine]
        known = known | mine
        duration = work["duration_ns"].to_numpy().astype(np.float64)
        computing = known & ~stays & (kind != "copy_in")
        total = float(duration[computing].sum())
        mean = float((expected * duration)[computing].sum() / total) if total else factor
        expected[~known], low[~known], high[~known] = mean, min(mean, 1.0), max(mean, factor, 1.0)
        return Growth(expected, low, high, known)

    def _ratios(self, target: DevicePeaks, precision: str | None) -> tuple[Numbers, Numbers, Numbers]:
        """Of works whose operators are known, grown time over recorded; expected, low and high."""
        call = self._kinds.call
        if not len(self._kinds.operations):
            nothing = np.full(len(call), np.nan)
            return nothing, nothing, nothing
        before = operation_times(_as_run(self._kinds.operations, target, precision), target)
        after = operation_times(_as_run(self._grown.operations, target, precision), target)
        # A batch r times as large is at most as many batches of the recorded size, one after the other, as r is rounded
        # up; within that the ratio may be as wrong as the model is.
        ends = min(1.0, 1 / np.ceil(1 / self._change.factor)), max(1.0, np.ceil(self._change.factor))
        ratio = np.clip(after.ns / before.ns, *ends)
        low = np.clip(ratio * after.low_ns / after.ns, *ends)
        high = np.clip(ratio * after.high_ns / after.ns, *ends)
        same = self._grown.operations.bytes == self._kinds.operations.bytes
        low, high = np.where(same, ratio, np.minimum(low, ratio)), np.where(same, ratio, np.maximum(high, ratio))
        place = np.maximum(call, 0)
        found = tuple(np.where(call >= 0, one[place], np.nan) for one in (ratio, low, high))
        return found[0], found[1], found[2]

    @cached_property
    def _in_optimizer(self) -> npt.NDArray[np.bool_]:
        """Which works operators in an optimizer's step launched."""
        launch = self._trace.device_work["launch"].cast(pl.Int64)
        operator = self._trace.launches["operator"].cast(pl.Int64).gather(launch).fill_null(-1).to_numpy()
        phases = operator_places(self._trace)["phase"]
        inside = np.append((phases == "optimizer").fill_null(False).to_numpy(), False)
        result: npt.NDArray[np.bool_] = inside[operator]
        return result


def _as_run(operations: Operations, device: DevicePeaks, precision: str | None) -> Operations:
    return types_on(in_precision(operations, precision).operations, device)
