"""How long every piece of a trace's device work would take on another device.

What was measured is scaled by how much longer or shorter the target takes than the source; what is predicted of both
errs in the same direction, so that much of the error cancels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.roofline import device_peaks
from stepscope.devices import DevicePeaks
from stepscope.predict.operation_times import OperationTimes, operation_times
from stepscope.predict.operations import Names, Numbers, Operations
from stepscope.predict.precision import NO_TF32, Cast, Tf32, check_precision, in_precision, tf32_of, types_on
from stepscope.predict.trace_operations import in_optimizer, operations_of_calls
from stepscope.predict.wave_scaling import is_nvidia, scaled_ns, wave_factors
from stepscope.trace import Trace, Window
from stepscope.trace.nesting import Rows

BASES: Final = (
    "same device",  # as measured
    "learned ratio",  # measured, times the predicted time on the target over the predicted one on the source
    "shapes",  # the predicted time on the target alone: the source is unknown
    "wave scaling",  # measured, scaled by bandwidth and arithmetic of the two devices
    "bandwidth",  # measured, scaled by the memory's or the host link's bandwidth
    "link",  # measured, scaled by the bandwidth between devices
    "unchanged",  # as measured, because nothing tells how it would change
    "unknown",
)

_HOST_COPIES: Final = ("copy_in", "copy_out")
_DEVICE_MOVES: Final = ("copy_on_device", "set")


@dataclass(frozen=True, slots=True)
class WorkTimes:
    """Nanoseconds of every row of `device_work`; arrays of shape (n,).

    Attributes:
        measured_ns: as recorded.
        ns: what is expected on the target; not-a-number where the basis is "unknown".
        low_ns, high_ns: the band around it.
        basis: one of BASES.
        notes: what the user should know of it, one sentence each.
    """

    measured_ns: Numbers
    ns: Numbers
    low_ns: Numbers
    high_ns: Numbers
    basis: Names
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ns)


class _Times:
    """WorkTimes under construction: rows that no step has answered stay unknown."""

    def __init__(self, measured: Numbers) -> None:
        self.measured = measured
        self.ns, self.low, self.high = (np.full(len(measured), np.nan) for _ in range(3))
        self.basis = np.full(len(measured), "unknown", dtype="U16")
        self.notes: dict[str, None] = {}
        self.refused = np.zeros(len(measured), np.bool_)

    def answer(self, rows: Rows, basis: str, ns: Numbers, low: Numbers, high: Numbers) -> None:
        """Set those of these rows that were not answered and whose time is a number."""
        new = (self.basis[rows] == "unknown") & np.isfinite(ns) & (ns >= 0)
        mine = rows[new]
        self.ns[mine], self.basis[mine] = ns[new], basis
        self.low[mine] = np.clip(np.where(np.isfinite(low), low, ns)[new], 0, ns[new])
        self.high[mine] = np.maximum(np.where(np.isfinite(high), high, ns)[new], ns[new])

    def scale(self, rows: Rows, basis: str, factor: Numbers, low: Numbers, high: Numbers) -> None:
        """Answer by measured times whose start and end stay as they are, and the rest is multiplied."""
        measured = self.measured[rows]
        self.answer(rows, basis, *(scaled_ns(measured, one) for one in (factor, low, high)))

    def open(self, which: npt.NDArray[np.bool_]) -> Rows:
        """Rows of the mask that nothing has answered and that may be."""
        return np.flatnonzero(which & (self.basis == "unknown") & ~self.refused)


def work_times(
    trace: Trace,
    target: DevicePeaks,
    *,
    precision: str | None = None,
    source: DevicePeaks | None = None,
    window: Window | None = None,
) -> WorkTimes:
    """Predict how long each piece of device work would take on the target.

    Args:
        precision: the number type that the step would compute in, as `stepscope.predict.precision`; None for that of
            the recording.
        source: the device that the trace was recorded on, of which the table or the trace itself tells by default.
        window: only operators that start in it are described, and only work that starts in it is answered.

    Returns:
        Arrays over all rows of `trace.device_work`.

    Raises:
        UsageError: an unknown number type.
    """
    if precision is not None:
        check_precision(precision)
    work = trace.device_work
    times = _Times(np.maximum(work["duration_ns"].to_numpy().astype(np.float64), 0.0))
    asked = np.ones(work.height, np.bool_)
    if window is not None:
        asked = work["start_ns"].is_between(window.start_ns, window.end_ns, closed="left").to_numpy()
    for device in work["device"].unique(maintain_order=True).to_list():
        mine = asked & (work["device"] == device).fill_null(False).to_numpy()
        known = source if source is not None else device_peaks(trace, device or "")
        _answer_device(trace, times, mine, known, target, precision, window)
    return WorkTimes(times.measured, times.ns, times.low, times.high, times.basis, tuple(times.notes))


def _answer_device(
    trace: Trace,
    times: _Times,
    mine: npt.NDArray[np.bool_],
    source: DevicePeaks | None,
    target: DevicePeaks,
    precision: str | None,
    window: Window | None,
) -> None:
    kind = trace.device_work["kind"].fill_null("other").to_numpy()
    if source is not None and source.name == target.name and precision is None:
        rows = np.flatnonzero(mine)
        times.answer(rows, "same device", *(times.measured[rows],) * 3)
        return
    _answer_moves(times, mine, kind, source, target)
    _answer_communication(times, times.open(mine & (kind == "communication")), source, target)
    computing = mine & (kind == "compute")
    _answer_operators(trace, times, computing, source, target, precision, window)
    if source is None:
        if times.open(mine).size:
            times.notes["the device of the recording is unknown, so work without shapes has no prediction"] = None
        return
    _answer_waves(trace.device_work, times, times.open(computing), source, target, precision)


# Copies and communication


def _answer_moves(
    times: _Times, mine: npt.NDArray[np.bool_], kind: Names, source: DevicePeaks | None, target: DevicePeaks
) -> None:
    """Copies by the bandwidth of what they go through."""
    copies = np.flatnonzero(mine & np.isin(kind, _HOST_COPIES))
    before = None if source is None else source.host_link_bytes_s
    after = target.host_link_bytes_s
    if before and after:
        _scale_alike(times, copies, "bandwidth", before / after)
    elif copies.size:
        _unchanged(times, copies, "copies between host and device are taken as measured: a link's bandwidth is unknown")
    moves = np.flatnonzero(mine & np.isin(kind, _DEVICE_MOVES))
    if source is not None:
        _scale_alike(times, moves, "bandwidth", source.bandwidth_bytes_s / target.bandwidth_bytes_s)


def _answer_communication(times: _Times, rows: Rows, source: DevicePeaks | None, target: DevicePeaks) -> None:
    """Collectives by the bandwidth between devices; while they wait for other ranks no link shortens them."""
    before = None if source is None else source.peer_link_bytes_s
    after = target.peer_link_bytes_s
    if before and after:
        factor = before / after
        ones = np.ones(len(rows))
        times.scale(rows, "link", ones * factor, ones * min(factor, 1.0), ones * max(factor, 1.0))
    elif rows.size:
        _unchanged(times, rows, "communication is taken as measured: a link's bandwidth between devices is unknown")


def _scale_alike(times: _Times, rows: Rows, basis: str, factor: float) -> None:
    """All by one factor; the band reaches to no change, which is what a copy too small for the bandwidth sees."""
    ones = np.ones(len(rows))
    times.scale(rows, basis, ones * factor, ones * factor, ones * factor)


def _unchanged(times: _Times, rows: Rows, note: str) -> None:
    times.notes[note] = None
    times.answer(rows, "unchanged", *(times.measured[rows],) * 3)


# Operators of known work


def _answer_operators(
    trace: Trace,
    times: _Times,
    computing: npt.NDArray[np.bool_],
    source: DevicePeaks | None,
    target: DevicePeaks,
    precision: str | None,
    window: Window | None,
) -> None:
    """Kernels of operators whose work is known on both devices; all kernels of a call by the same factor."""
    called, operations = operations_of_calls(trace, window=window)
    operator = _operator_of_work(trace)
    rows = times.open(computing & (operator >= 0))
    if not len(called) or not rows.size:
        return
    place = np.searchsorted(called, operator[rows])
    found = (place < len(called)) & (called[np.minimum(place, len(called) - 1)] == operator[rows])
    rows, place = rows[found], place[found]
    cast = in_precision(operations, precision, stays=in_optimizer(trace)[called])
    added = _added_tf32(trace, source, target, precision)
    if added.convolutions and ((operations.kind == "convolution") & (operations.number_type == "fp32")).any():
        times.notes[f"convolutions of 32-bit numbers run as TF32 on {target.name}, as PyTorch does by default"] = None
    after = _band(cast, target, added, _known(operations))
    if source is not None:
        before = operation_times(types_on(operations, source), source)
        factor = _ratio(before, after)
        measured = times.measured[rows]
        times.answer(rows, "learned ratio", *(_floored(measured, one[place]) for one in factor))
        _refuse_types(times, rows, place, after, cast.operations, target)
    else:
        share = _shares(times.measured[rows], place, len(called))
        expected = (after.ns, after.low_ns, after.high_ns)
        times.answer(rows, "shapes", *(one[place] * share for one in expected))


def _refuse_types(
    times: _Times, rows: Rows, place: Rows, after: OperationTimes, operations: Operations, target: DevicePeaks
) -> None:
    """Nothing is said of products in a number type that the target has no units for: it might not run them at all."""
    types = types_on(operations, target).number_type
    lacking = (operations.flops > 0) & np.isnan(after.ns) & ~np.isin(types, list(target.flops_s)) & (types != "")
    refused = lacking[place]
    times.refused[rows[refused]] = True
    for kind in np.unique(types[place[refused]]).tolist():
        times.notes[f"{target.name} has no units for {kind}, in which matrix products of the recording run"] = None


def _added_tf32(trace: Trace, source: DevicePeaks | None, target: DevicePeaks, precision: str | None) -> Tf32:
    """What the target would run in TF32 that the source could not."""
    could = source is not None and ("tf32" in source.flops_s or not is_nvidia(source))
    if (
        source is None
        or could
        or precision in ("fp32", "tf32")
        or "tf32" not in target.flops_s
        or not is_nvidia(target)
    ):
        return NO_TF32
    return tf32_of(trace)


def _known(operations: Operations) -> npt.NDArray[np.bool_]:
    known: npt.NDArray[np.bool_] = (
        np.isfinite(operations.flops) & np.isfinite(operations.bytes) & (operations.kind != "")
    )
    return known


def _band(cast: Cast, target: DevicePeaks, added: Tf32, known: npt.NDArray[np.bool_]) -> OperationTimes:
    """The times on the target, the band from the least traffic to the most."""
    expected, least, most = (
        operation_times(types_on(one, target, added), target) for one in (cast.operations, cast.least, cast.most)
    )
    ns, low, high = (np.where(known, one, np.nan) for one in (expected.ns, least.low_ns, most.high_ns))
    return OperationTimes(ns, low, high, expected.basis)


def _ratio(before: OperationTimes, after: OperationTimes) -> tuple[Numbers, Numbers, Numbers]:
    """Target over source; the band is that of the target alone, since what the two err in alike was measured."""
    factor = after.ns / before.ns
    return factor, factor * (after.low_ns / after.ns), factor * (after.high_ns / after.ns)


def _floored(measured: Numbers, factor: Numbers) -> Numbers:
    """Measured times scaled, but not below a kernel's start and end, which no device shortens."""
    least = scaled_ns(measured, np.zeros(len(measured)))
    return np.where(np.isfinite(factor), np.maximum(measured * factor, least), np.nan)


def _shares(measured: Numbers, group: Rows, count: int) -> Numbers:
    """What share of its group's measured time each row has; alike where nothing was measured."""
    total = np.bincount(group, measured, count)[group]
    rows = np.bincount(group, minlength=count)[group]
    return np.where(total > 0, measured / np.maximum(total, 1.0), 1.0 / rows)


def _operator_of_work(trace: Trace) -> Rows:
    """Row in `operators` of the call that launched each piece of work, -1 for none."""
    launch = trace.device_work["launch"].cast(pl.Int64)
    found: Rows = trace.launches["operator"].cast(pl.Int64).gather(launch).fill_null(-1).to_numpy()
    return found


# Kernels that only their launch describes


def _answer_waves(
    work: pl.DataFrame, times: _Times, rows: Rows, source: DevicePeaks, target: DevicePeaks, precision: str | None
) -> None:
    factors = wave_factors(work[rows], source, target)
    low = factors.low
    if precision not in (None, "fp32"):
        times.notes["kernels without shapes may get faster by the other number type, which the band allows for"] = None
        low = low / _MOST_BY_TYPE
    times.scale(rows, "wave scaling", factors.factor, low, factors.high)


_MOST_BY_TYPE: Final = 2.0
"""By how much less traffic a kernel may get faster when its numbers become half as long."""
