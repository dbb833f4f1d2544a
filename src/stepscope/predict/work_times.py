"""Time of every piece of a trace's device work on another device.

Measured times are scaled by the predicted ratio of target to source; both predictions err in the same direction, so
much of the error cancels. The first basis that applies counts:

    same device     the target is the source, and the number type stays: as measured
    learned ratio   kernels of an operator whose shapes give its work: about measured x predicted on the target /
                    predicted on the source (`stepscope.predict.operation_times`), one factor for a call's kernels
    shapes          the same where the source is unknown: the target's prediction, divided among the call's kernels as
                    they were measured, unless these took so long that no device explains it (IMPLAUSIBLE)
    roofline ratio  the first, where no model was learned for the work, between devices of one maker: the constant of
                    the roofline cancels
    datasheet       the target's roofline times a constant, where no model was learned, for shapes without a known
                    source, and for targets that do not run the recorded kernels
    wave scaling    other kernels, also those without a learned model between devices of different makers, by bandwidth
                    and arithmetic of the devices (`stepscope.predict.operation_times`)
    bandwidth       copies, by the bandwidth of the memory or of the link to the host; the band of those over the link
                    reaches to no change, as pageable memory shows
    link            communication, by the bandwidth between devices; the band reaches to no change, since waiting for
                    other ranks does not get shorter (`stepscope.predict.exchanges` separates data from waiting)
    unchanged       copies and communication over a link of unknown bandwidth: the band begins at the target
                    link's least time if known, else at zero
    unknown         everything else
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.operators import arithmetic
from stepscope.analysis.roofline import device_peaks
from stepscope.machine.devices import DevicePeaks, is_nvidia, with_measured_shares
from stepscope.predict.memory_times import least_ns
from stepscope.predict.operation_times import Factors, guessed_band, scaled_ns, sustained_bandwidth, wave_factors
from stepscope.predict.operations import (
    NO_TF32,
    WORTH_SAYING,
    Names,
    Numbers,
    OperationTimes,
    Tf32,
    changes_traffic,
    check_precision,
    is_low,
    tf32_of,
    types_on,
)
from stepscope.predict.trace_operations import CalledOperations
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows

Mask: TypeAlias = npt.NDArray[np.bool_]

BASES: Final = (
    "same device", "learned ratio", "shapes", "roofline ratio", "datasheet", "wave scaling", "bandwidth", "link",
    "unchanged", "unknown",
)  # fmt: skip
"""Ways to find a time, as described in the module docstring."""
KNOWLEDGE: Final = {
    "same device": "measured there",
    "learned ratio": "learned",
    "shapes": "learned",
    "roofline ratio": "transferred",
    "datasheet": "datasheet times a constant",
    "wave scaling": "transferred",
    "bandwidth": "transferred",
    "link": "transferred",
    "unchanged": "transferred",
    "unknown": "unknown",
}
"""What a time is, by its basis: learned from measurements of such devices, or transferred from the recorded kernels."""
_KERNEL_MAKERS: Final = ("NVIDIA", "AMD", "")
"""Makers whose devices run kernels written for CUDA or ROCm; an unknown maker's may."""

NOT_CARRIED: Final = 0.5
"""Share of a call's excess over its prediction that does not carry over to other devices; near the least error on
timings of the same calls on five GPUs (`benchmarks/wave_scaling_accuracy.py`).
"""
LEAST_SPREAD: Final = 1.15
"""Factor either way that holds nine of ten element-wise and row-wise calls of more than 0.1 ms among five GPUs."""
IMPLAUSIBLE: Final = 20.0
"""Ratio of measured time to the target's prediction at which an unknown device must have done something else than the
shapes say. Between the T4 and the H200, seven years apart, memory bandwidth and peak FP16 arithmetic differ 15
times.
"""
RECORDED_SHARE: Final = 0.5
"""Share of a recorded kernel's band that counts against the target's own model where makers differ: of the values from
0.25 to 1 that either of two programs recorded on both makers' devices chooses (`benchmarks/unmeasured_makers.py`).
"""
_HOST_COPIES: Final = ("copy_in", "copy_out")
_DEVICE_MOVES: Final = ("copy_on_device", "set")


@dataclass(frozen=True, slots=True)
class WorkTimes:
    """Nanoseconds of every row of `device_work`; arrays of shape (n,)."""

    measured_ns: Numbers  # as recorded
    ns: Numbers  # expected on the target; not-a-number where the basis is "unknown"
    low_ns: Numbers
    high_ns: Numbers
    basis: Names  # one of BASES
    notes: tuple[str, ...] = ()  # notes for the user, one sentence each

    def __len__(self) -> int:
        return len(self.ns)


def work_times(
    trace: Trace, target: DevicePeaks, *, precision: str | None = None, source: DevicePeaks | None = None
) -> WorkTimes:
    """Predict the time of each piece of device work on the target.

    Args:
        precision: the number type to compute in (`stepscope.predict.operations`); None for the recorded one.
        source: recorded device; by default from the table or the trace itself.

    Returns:
        Arrays over all rows of `trace.device_work`.

    Raises:
        UsageError: the number type is unknown.
    """
    if precision is not None:
        check_precision(precision)
    work = trace.device_work
    times = _Times(np.maximum(work["duration_ns"].fill_null(0).to_numpy().astype(np.float64), 0.0))
    calls = CalledOperations.of(trace, precision)
    for device in work["device"].unique(maintain_order=True).to_list():
        rows = (work["device"] == device).fill_null(False).to_numpy()
        known = source if source is not None else device_peaks(trace, device or "")
        known = None if known is None else with_measured_shares(known)
        _Device(calls, times, known, with_measured_shares(target), precision).answer(rows)
    return WorkTimes(times.measured, times.ns, times.low, times.high, times.basis, tuple(times.notes))


class _Times:
    """WorkTimes under construction: rows without an answer stay unknown."""

    def __init__(self, measured: Numbers) -> None:
        self.measured = measured
        self.ns, self.low, self.high = (np.full(len(measured), np.nan) for _ in range(3))
        self.basis = np.full(len(measured), "unknown", dtype="U16")
        self.refused = np.zeros(len(measured), np.bool_)
        self.notes: dict[str, None] = {}

    def answer(self, rows: Rows, basis: str, ns: Numbers, low: Numbers, high: Numbers) -> None:
        """Set the rows that have no answer yet and whose time is a number."""
        new = (self.basis[rows] == "unknown") & np.isfinite(ns) & (ns >= 0)
        at, expected = rows[new], ns[new]
        self.ns[at], self.basis[at] = expected, basis
        self.low[at] = np.clip(np.where(np.isfinite(low), low, ns)[new], 0, expected)
        self.high[at] = np.maximum(np.where(np.isfinite(high), high, ns)[new], expected)

    def keep(self, rows: Rows, basis: str) -> None:
        self.answer(rows, basis, *(self.measured[rows],) * 3)

    def scale(self, rows: Rows, basis: str, *factors: Numbers | float) -> None:
        """Scale measured times, except for a kernel's start and end, by the expected, low and high factors."""
        ns, low, high = (scaled_ns(self.measured[rows], np.broadcast_to(one, len(rows))) for one in factors)
        self.answer(rows, basis, ns, low, high)

    def open(self, which: Mask) -> Rows:
        """Rows of the mask without an answer that may have one."""
        return np.flatnonzero(which & (self.basis == "unknown") & ~self.refused)

    def note(self, text: str) -> None:
        self.notes[text] = None


@dataclass(frozen=True)
class _Device:
    """Predictor for the work of one of the trace's devices."""

    calls: CalledOperations
    times: _Times
    source: DevicePeaks | None
    target: DevicePeaks
    precision: str | None

    def answer(self, chosen: Mask) -> None:
        times, work = self.times, self.calls.trace.device_work
        kind = work["kind"].fill_null("other").to_numpy()
        if self._is_same:
            stays = chosen if self.precision is None else chosen & (kind != "compute")
            if self.source is not None and self.source.peer_link_bytes_s != self.target.peer_link_bytes_s:
                stays = stays & (kind != "communication")  # the same device, but with another interconnect
            times.keep(times.open(stays), "same device")
        copies, messages = (
            times.open(chosen & np.isin(kind, _HOST_COPIES)),
            times.open(chosen & (kind == "communication")),
        )
        what = "copies between host and device are"
        self._answer_link(copies, "bandwidth", "host_link_bytes_s", what, known_bytes=True)
        self._answer_moves(times.open(chosen & np.isin(kind, _DEVICE_MOVES)))
        self._answer_link(messages, "link", "peer_link_bytes_s", "communication is", known_bytes=False)
        computing = chosen & (kind == "compute")
        if computing.any():
            self._answer_operators(times.open(computing & (self.calls.of_work >= 0)))
        self._answer_waves(times.open(computing))
        if self.source is None and times.open(chosen).size:
            times.note("the device of the recording is unknown, so work without shapes has no prediction")

    @property
    def _runs_kernels(self) -> bool:
        return self.target.vendor in _KERNEL_MAKERS

    @property
    def _is_same(self) -> bool:
        return self.source is not None and self.source.name == self.target.name

    def _answer_link(self, rows: Rows, basis: str, link: str, what: str, *, known_bytes: bool) -> None:
        """Scale by link bandwidth, with a band that reaches to no change; keep measured times where that is unknown."""
        before = None if self.source is None else getattr(self.source, link)
        after = getattr(self.target, link)
        if before and after:
            factor = before / after
            self.times.scale(rows, basis, factor, min(factor, 1.0), max(factor, 1.0))
            return
        if not rows.size:
            return
        self.times.note(
            f"{what} kept as measured: a link's bandwidth{'' if known_bytes else ' between devices'} is unknown"
        )
        measured, least = self.times.measured[rows], np.zeros(len(rows))
        if after and known_bytes:
            least = self.calls.trace.device_work["bytes"].gather(rows).fill_null(0).to_numpy() / after * 1e9
        self.times.answer(rows, "unchanged", measured, np.minimum(least, measured), np.maximum(least, measured))

    def _answer_moves(self, rows: Rows) -> None:
        if self.source is not None:
            factor = sustained_bandwidth(self.source) / sustained_bandwidth(self.target)
            self.times.scale(rows, "bandwidth", factor, factor / LEAST_SPREAD, factor * LEAST_SPREAD)

    def _answer_operators(self, rows: Rows) -> None:
        """Answer kernels of operators with known work; all kernels of a call get the same factor."""
        if not rows.size:
            return
        calls, times = self.calls, self.times
        place = calls.of_work[rows]
        if self._is_same:
            times.keep(rows[~calls.cast.changed[place] & calls.known[place]], "same device")
        after = self._on_target()
        measured = times.measured[rows]
        if self.source is None:
            self._answer_by_shapes(rows, place, after)
            return
        before = calls.times_on(self.source)
        total = np.bincount(place, measured, len(after.ns)).astype(np.float64)
        factors = ratios_of(total, before, after, alike=are_alike(self.source, self.target))
        ends = tuple(_floored(measured, one[place]) for one in factors)
        learned = ((before.basis == "learned") & (after.basis == "learned"))[place]
        self._answer_known(rows, learned, "learned ratio", ends)
        if self.source.vendor == self.target.vendor:
            self._answer_known(rows, ~learned, "roofline ratio", ends)
        else:
            carries_over = self._runs_kernels and self.source.vendor in _KERNEL_MAKERS
            guessed = calls.cast.changed[place] if carries_over else np.ones(len(rows), np.bool_)
            self._answer_known(rows, ~learned & guessed, "datasheet", ends)
            if carries_over:
                self._answer_between_makers(times.open(np.isin(np.arange(len(times.ns)), rows[~learned])), after)
        self._refuse(rows, place, after)

    def _answer_between_makers(self, rows: Rows, after: OperationTimes) -> None:
        """Answer calls whose kernels another maker's replace: between the recorded ones, scaled, and its own model.

        Each counts by the inverse of its band's square, so what was learned of the target counts most. The band holds
        what both are expected to err, and a share of what they differ.
        """
        assert self.source is not None
        place, count = self.calls.of_work[rows], len(after.ns)
        factors = wave_factors(self.calls.trace.device_work[rows], self.source, self.target)
        scaled, low, high = self._scaled(rows, factors)
        sums = [np.bincount(place, one, count).astype(np.float64) for one in (scaled, low, high)]
        with np.errstate(divide="ignore", invalid="ignore"):
            apart = np.log(after.ns / sums[0])
            recorded, own = (np.log(most / least) / 2 for least, most in (sums[1:], (after.low_ns, after.high_ns)))
            weight = 1 / (1 + (own / (RECORDED_SHARE * recorded)) ** 2)
            width = np.sqrt((1 - weight) * recorded**2 + weight * (1 - weight) * apart**2)
        factor = np.exp(weight * apart)[place]
        spread = np.exp(width)[place]
        self.times.answer(rows, "wave scaling", scaled * factor, scaled * factor / spread, scaled * factor * spread)

    def _answer_known(self, rows: Rows, chosen: Mask, basis: str, ends: tuple[Numbers, ...]) -> None:
        ns, low, high = (one[chosen] for one in ends)
        if basis == "datasheet":
            low, high = guessed_band(ns, low, high, self.target)
        self.times.answer(rows[chosen], basis, ns, low, high)

    def _answer_by_shapes(self, rows: Rows, place: Rows, after: OperationTimes) -> None:
        """Use the target's predictions alone, except for calls that took too long for their shapes."""
        times, count = self.times, len(after.ns)
        measured = times.measured[rows]
        total = np.bincount(place, measured, count).astype(np.float64)
        plausible = (~(total > IMPLAUSIBLE * after.ns))[place]
        if not plausible.all():
            times.refused[rows[~plausible]] = True
            part = measured[~plausible].sum() / max(measured.sum(), 1.0)
            times.note(
                f"for {part:.0%} of the time of operators with shapes the recorded device, which is unknown, needed "
                f"more than {IMPLAUSIBLE:.0f} times what shapes predict for the {self.target.name}: they do not "
                "describe that work"
            )
        # Each kernel's share of its call's measured time; equal shares where nothing was measured.
        calls = np.bincount(place, minlength=count)[place]
        share = np.where(total[place] > 0, measured / np.maximum(total[place], 1.0), 1.0 / calls)
        ends = (one[place] * share for one in (after.ns, after.low_ns, after.high_ns))
        learned, found = (after.basis == "learned")[place], tuple(ends)
        self._answer_known(rows, plausible & learned, "shapes", found)
        self._answer_known(rows, plausible & ~learned, "datasheet", found)

    def _on_target(self) -> OperationTimes:
        times = self.calls.cast_times_on(self.target, self._added_tf32)
        ns, low, high = (np.where(self.calls.known, one, np.nan) for one in (times.ns, times.low_ns, times.high_ns))
        return OperationTimes(ns, low, high, times.basis)

    @property
    def _added_tf32(self) -> Tf32:
        """Operations that run in TF32 on the target but could not on the source."""
        source, target = self.source, self.target
        if source is None or not is_nvidia(source) or not is_nvidia(target) or self.precision in ("fp32", "tf32"):
            return NO_TF32
        if "tf32" in source.flops_s or "tf32" not in target.flops_s:
            return NO_TF32
        added = tf32_of(self.calls.trace)
        operations = self.calls.cast.operations
        if added.convolutions and ((operations.kind == "convolution") & (operations.number_type == "fp32")).any():
            self.times.note(f"convolutions of 32-bit numbers run as TF32 on {target.name}, as PyTorch does by default")
        return added

    def _refuse(self, rows: Rows, place: Rows, after: OperationTimes) -> None:
        """Give no time to products in a number type that the target has no units for: it might not run them."""
        operations = types_on(self.calls.cast.operations, self.target)
        types = operations.number_type
        has_units = np.isin(types, list(self.target.flops_s)) | (types == "")
        refused = ((operations.flops > 0) & np.isnan(after.ns) & ~has_units)[place]
        self.times.refused[rows[refused]] = True
        self._note_lacking(types[place[refused]].tolist())

    def _note_lacking(self, kinds: Iterable[str]) -> None:
        for kind in sorted({kind for kind in kinds if kind} - set(self.target.flops_s)):
            self.times.note(f"{self.target.name} has no units for {kind}, in which matrix products would run")

    def _answer_waves(self, rows: Rows) -> None:
        if self.source is None or not rows.size:
            return
        if not self._runs_kernels:
            part = self.times.measured[rows].sum() / max(self.times.measured.sum(), 1.0)
            if part >= WORTH_SAYING:
                self.times.note(
                    f"{part:.0%} of the device's work is known by the launch alone, and has no time there: "
                    f"{self.target.name} runs no CUDA or ROCm kernels"
                )
            return
        work, traffic = self.calls.trace.device_work[rows], (1.0, 1.0)
        if self.precision is not None:
            low = is_low(self.calls.operations)
            if low is None:
                low = _kernels_are_low(work)
            if changes_traffic(self.precision, is_low=low):
                traffic = (1.0, 2.0) if self.precision == "fp32" else (0.5, 1.0)
                self.times.note("kernels without shapes may change with the number type, which their band allows for")
        factors = wave_factors(work, self.source, self.target, precision=self.precision, traffic=traffic)
        names = work["name"].filter(pl.Series(np.isnan(factors.factor))).drop_nulls().unique().to_list()
        self._note_lacking(one.precision or "" for one in map(arithmetic, names) if one.is_matrix)
        if self._is_same and traffic == (1.0, 1.0):
            self.times.keep(rows[factors.factor == 1], "same device")
        self.times.answer(rows, "wave scaling", *self._scaled(rows, factors))

    def _scaled(self, rows: Rows, factors: Factors) -> tuple[Numbers, Numbers, Numbers]:
        """Measured times as expected, and the ends of their band, with the target's start of a kernel."""
        assert self.source is not None
        starts, measured = (least_ns(self.source), least_ns(self.target)), self.times.measured[rows]
        ns, low, high = (scaled_ns(measured, one, starts) for one in (factors.factor, factors.low, factors.high))
        return ns, low, high


def _kernels_are_low(work: pl.DataFrame) -> bool:
    """Whether products take most of their time in 16 bits or less, by kernel names."""
    by_name = [arithmetic(name or "") for name in work["name"].to_list()]
    ns = work["duration_ns"].fill_null(0).to_numpy() * np.array([one.is_matrix for one in by_name], np.bool_)
    low = np.array([one.precision in ("fp16", "bf16", "fp8", "int8") for one in by_name], np.bool_)
    return bool(ns[low].sum() > ns.sum() / 2)


def are_alike(source: DevicePeaks, target: DevicePeaks) -> bool:
    """Whether devices share a compute capability, or an architecture where they have no capability."""
    if source.capability is None or target.capability is None:
        return source.architecture == target.architecture != ""
    return (source.vendor, source.capability) == (target.vendor, target.capability)


def ratios_of(
    measured: Numbers, before: OperationTimes, after: OperationTimes, *, alike: bool
) -> tuple[Numbers, Numbers, Numbers]:
    """Factors on each call's kernels, with the band.

    A call that took longer than predicted on the source will also do so on the target, except for the share NOT_CARRIED
    of what its band explains, which is specific to the source, unless both devices run the same code. The band is the
    root mean square of the two devices' own, no narrower than LEAST_SPREAD.
    """
    deviation = np.log(np.maximum(measured, 1.0) / before.ns)
    longest, shortest = np.log(before.high_ns / before.ns), np.log(before.low_ns / before.ns)
    stays = 0.0 if alike else NOT_CARRIED
    factor = after.ns / before.ns * np.exp(-stays * np.clip(deviation, shortest, longest))
    up = np.sqrt((np.log(after.high_ns / after.ns) ** 2 + shortest**2) / 2)
    down = np.sqrt((np.log(after.low_ns / after.ns) ** 2 + longest**2) / 2)
    least = 0.0 if alike else np.log(LEAST_SPREAD)
    return factor, factor * np.exp(-np.maximum(down, least)), factor * np.exp(np.maximum(up, least))


def _floored(measured: Numbers, factor: Numbers) -> Numbers:
    """Scale measured times, but keep a kernel's start and end, which no device shortens."""
    least = scaled_ns(measured, np.zeros(len(measured)))
    return np.where(np.isfinite(factor), np.maximum(measured * factor, least), np.nan)
