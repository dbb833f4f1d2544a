"""How long the recorded steps would take on another device, how sure that is, and what would limit them then.

Each work of the device gets the time that the target needs for it (`stepscope.predict.trace_operations`), and the steps
are replayed with these times (`step_replay`): the host's part stays as it was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stepscope.analysis.roofline import device_peaks
from stepscope.machine.devices import DevicePeaks
from stepscope.predict.batch import BatchGrowth, batch_change, passes_of_a_step, with_batch
from stepscope.predict.batch import recorded_batch as recorded_batch_of
from stepscope.predict.cpu_operations import step_from_shapes
from stepscope.predict.exchanges import RecordedExchange, recorded_exchange, with_transfers
from stepscope.predict.limits import Limit, MemoryNeed, limit_of, memory_need
from stepscope.predict.step_replay import StepRange, StepReplays, joint_band
from stepscope.predict.trace_operations import WorkKinds
from stepscope.predict.work_times import WorkTimes, work_times
from stepscope.trace import Trace
from stepscope.whatif.experiment import Experiment

Numbers: TypeAlias = npt.NDArray[np.float64]

MOST_UNKNOWN: Final = 0.25
"""Share of the device's time of which nothing tells the target's, or which is taken as measured for want of a link's
bandwidth, from which on no step time is given."""
_WORTH_SAYING: Final = 0.01
"""Share of the device's time of which a sentence tells."""
_FAR: Final = 8.0
"""How many times as large or small a batch is worth a warning."""
_ONLY_LAUNCHES: Final = (
    "launches are all that was recorded of the host: what lies between them is taken for its own work, and the range "
    "begins where it was waiting"
)
_UNKNOWN_BAND: Final = (0.05, 0.95)
"""Works of which nothing is known may be anywhere among those quantiles of the known ones' factors."""


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """The mean step on a device; times in nanoseconds, None where refused or not known.

    Attributes:
        device: the target.
        step_ns, low_ns, high_ns: what is expected, and the band in which nine of ten are expected to lie.
        device_ns: in which the busiest device works.
        host_ns: what the host alone needs, with what it waits for beside the device.
        limit: "compute", "memory bandwidth", "host", "input" or "communication"; None where it cannot be told.
        memory_bytes: the most that the step needs at once.
        fits: whether the device has as much.
        samples_per_s: the batch over the step's time.
        notes: what was refused, widened or assumed, in sentences.
        measured_ns: the mean step as it was recorded; None where the recording ran on no such device.
        limit_share: of the critical path, 0 to 1, that what limits takes.
        limit_cause: of a limit on the host, the cause of most of its time.
        batch_factor: how many times as many samples it takes as the recorded step.
        bases: share of the measured device time by how the target's was found, the largest first; of a trace without
            device work the share of the operators' time.
        predictor: what it came from, which tells the time of each work; None where nothing does.
    """

    device: DevicePeaks
    step_ns: float | None
    low_ns: float | None
    high_ns: float | None
    device_ns: float | None
    host_ns: float | None
    limit: str | None
    memory_bytes: int | None
    fits: bool | None
    samples_per_s: float | None
    notes: tuple[str, ...] = ()
    measured_ns: float | None = None
    limit_share: float | None = None
    limit_cause: str | None = None
    batch_factor: float = 1.0
    bases: tuple[tuple[str, float], ...] = ()
    predictor: StepPredictor | None = field(default=None, compare=False, repr=False)

    @property
    def speed_up(self) -> float | None:
        """How many times as fast as measured, for each sample; None where either time is not known."""
        return self.measured_ns * self.batch_factor / self.step_ns if self.measured_ns and self.step_ns else None

    @property
    def busy_share(self) -> float | None:
        """Share of the step in which the device works, 0 to 1."""
        if self.device_ns is None or not self.step_ns:
            return None
        return min(self.device_ns / self.step_ns, 1.0)


def predict_step(
    recorded: Experiment | Trace,
    target: DevicePeaks,
    *,
    precision: str | None = None,
    batch: int | None = None,
    recorded_batch: int | None = None,
    source: DevicePeaks | None = None,
    host_factor: float = 1.0,
) -> StepPrediction:
    """The mean step of a trace on another device; for several devices give the same `Experiment`.

    Args:
        precision: number type of the arithmetic there, one of `stepscope.machine.devices.NUMBER_TYPES`;
            None for the recorded.
        batch: samples of a step there; None for the recorded.
        recorded_batch: those of the recorded one, where the trace does not tell.
        source: the device that the trace was recorded on, where the trace does not tell it.
        host_factor: how many times as long the host works there.

    Raises:
        UsageError: an unknown number type, or another batch size and nothing tells the recorded one.
    """
    experiment = recorded if isinstance(recorded, Experiment) else Experiment(recorded)
    predictor = StepPredictor(
        experiment,
        precision=precision,
        batch=batch,
        recorded_batch=recorded_batch,
        source=source,
        host_factor=host_factor,
    )
    return predictor.on(target)


class StepPredictor:
    """What predictions of one trace for several devices share; arguments as of `predict_step`.

    Args:
        sampled_memory_bytes: the most that telemetry saw in use, for a trace without allocations.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        precision: str | None = None,
        batch: int | None = None,
        recorded_batch: int | None = None,
        source: DevicePeaks | None = None,
        host_factor: float = 1.0,
        sampled_memory_bytes: int | None = None,
    ) -> None:
        self.experiment = experiment
        self.precision = precision
        self.source = source
        self.change = None if batch is None else batch_change(experiment.trace, batch, recorded_batch)
        self._told_batch = recorded_batch
        self._sampled_memory_bytes = sampled_memory_bytes
        self.replays = StepReplays(experiment, host_factor=host_factor, input_factor=self.batch_factor)

    @property
    def trace(self) -> Trace:
        """What was recorded."""
        return self.experiment.trace

    @property
    def batch_factor(self) -> float:
        """How many times as large the batch is."""
        return 1.0 if self.change is None else self.change.factor

    @cached_property
    def batch(self) -> int | None:
        """Samples of a batch; None where nothing tells."""
        if self.change is not None:
            return self.change.wanted
        return self._told_batch or recorded_batch_of(self.trace)

    @cached_property
    def samples(self) -> int | None:
        """Samples of a step: the batch, where a step goes through the model once, or nobody can see."""
        if not self.experiment.steps.height:
            return None
        passes = passes_of_a_step(self.trace, self.experiment.step_count, self.experiment.span)
        return self.batch if passes is None or passes == 1 or self._told_batch is not None else None

    @cached_property
    def _growth(self) -> BatchGrowth | None:
        return None if self.change is None else BatchGrowth(self.trace, self._kinds, self.change)

    @cached_property
    def memory(self) -> MemoryNeed:
        """What a step needs of a device's memory."""
        return memory_need(
            self.trace,
            self.experiment.device,
            batch_factor=self.batch_factor,
            sampled_bytes=self._sampled_memory_bytes,
        )

    @cached_property
    def measured_ns(self) -> float:
        """The mean step as it was recorded."""
        return self.replays.measured_ns

    @cached_property
    def _kinds(self) -> WorkKinds:
        return WorkKinds(self.trace)

    @cached_property
    def recorded_device(self) -> DevicePeaks | None:
        """The recorded device; None where its figures are not known."""
        device = self.experiment.device
        return self.source if self.source is not None or device is None else device_peaks(self.trace, device)

    def on(self, target: DevicePeaks) -> StepPrediction:
        """The mean step on a device."""
        if self.experiment.device is None:
            return self._from_shapes(target)
        times, grown = self.times_on(target)
        unknown, unchanged = self._share_of(~np.isfinite(times.ns)), self._share_of(times.basis == "unchanged")
        base = self._without_time(target, self._bases(times))
        if unknown + unchanged > MOST_UNKNOWN:
            refusal = _refusal(unknown, unchanged, target, is_known=self.recorded_device is not None)
            return replace(base, notes=(*times.notes, refusal))
        factors, notes = self._factors(times)
        notes += grown
        found = self.replays.with_work(*factors)
        limit = limit_of(self.experiment, found.expected, self._kinds.sides(target, self.precision))
        base = replace(base, samples_per_s=self._throughput(found.expected.step_ns))
        notes += (_ONLY_LAUNCHES,) if self.replays.shows_only_launches and not self._stays(found) else ()
        return _with_step(base, found, limit, (*notes, *times.notes, *self._batch_notes), self.replays.host_ns)

    def times_on(self, target: DevicePeaks) -> tuple[WorkTimes, tuple[str, ...]]:
        """The times of the device's work in the number type and with the batch that were asked for, and notes on it."""
        times = work_times(self.trace, target, precision=self.precision, source=self.source)
        source = self.recorded_device
        if source is not None and (times.basis == "link").any() and self._exchange is not None:
            times = with_transfers(times, self._exchange, source, target)
        return self._grown(times, target)

    @cached_property
    def _exchange(self) -> RecordedExchange | None:
        """What this rank exchanged with others."""
        return recorded_exchange(self.experiment)

    def _grown(self, times: WorkTimes, target: DevicePeaks) -> tuple[WorkTimes, tuple[str, ...]]:
        """The times with the batch that was asked for, and what to say about it."""
        if self._growth is None:
            return times, ()
        growth = self._growth.on(target, self.precision)
        unknown = self._share_of(~growth.is_known)
        grown = replace(
            times,
            ns=times.ns * growth.expected,
            low_ns=times.low_ns * growth.low,
            high_ns=times.high_ns * growth.high,
        )
        note = f"for {unknown:.0%} of the device's time nothing tells how it grows with the batch: its band is wider"
        return grown, (note,) if unknown >= _WORTH_SAYING else ()

    def _stays(self, found: StepRange) -> bool:
        """Whether the step is what was measured."""
        return found.low_ns == found.high_ns == self.measured_ns

    @property
    def _batch_notes(self) -> tuple[str, ...]:
        if 1 / _FAR <= self.batch_factor <= _FAR:
            return ()
        return ("the batch is far from the recorded one: libraries may choose other kernels, and loading other ways",)

    def _from_shapes(self, target: DevicePeaks) -> StepPrediction:
        """The mean step of a trace without device work."""
        grown = None if self.change is None else with_batch(self.trace, self.change)
        found = step_from_shapes(self.replays, target, precision=self.precision, grown=grown)
        parts = (("shapes", found.covered_share), ("unknown", 1 - found.covered_share))
        base = self._without_time(target, tuple(part for part in parts if part[1] > 0))
        return replace(
            _with_limit(base, found.limit),
            step_ns=found.step_ns,
            low_ns=found.low_ns,
            high_ns=found.high_ns,
            device_ns=found.device_ns,
            host_ns=found.host_ns,
            samples_per_s=self._throughput(found.step_ns),
            notes=(*found.notes, *self._batch_notes),
        )

    def _throughput(self, step_ns: float | None) -> float | None:
        return self.samples / step_ns * 1e9 if self.samples and step_ns else None

    def _without_time(self, target: DevicePeaks, bases: tuple[tuple[str, float], ...]) -> StepPrediction:
        """All but the step's time."""
        return StepPrediction(
            device=target,
            step_ns=None,
            low_ns=None,
            high_ns=None,
            device_ns=None,
            host_ns=None,
            limit=None,
            memory_bytes=self.memory.bytes,
            predictor=self,
            fits=self.memory.fits(target),
            samples_per_s=None,
            measured_ns=self.measured_ns,
            batch_factor=self.batch_factor,
            bases=bases,
        )

    def _factors(self, times: WorkTimes) -> tuple[tuple[Numbers, Numbers, Numbers], tuple[str, ...]]:
        """By how much each work's duration is multiplied: expected, low and high; and what to say about it."""
        measured = times.measured_ns
        known = np.isfinite(times.ns) & (measured > 0)
        low, high = joint_band(
            np.where(known, times.ns, 0.0),
            np.where(known, times.low_ns, 0.0),
            np.where(known, times.high_ns, 0.0),
            self._kinds.kinds,
            self._kinds.calls,
            self.experiment.works,
        )
        factors = [np.ones(len(measured)) for _ in range(3)]
        for factor, ns in zip(factors, (times.ns, low, high), strict=True):
            np.divide(ns, measured, out=factor, where=known)
        unknown = ~np.isfinite(times.ns) & (measured > 0)
        notes: tuple[str, ...] = ()
        if unknown.any() and known.any():
            weights = measured[known]
            mean = float((factors[0][known] * weights).sum() / weights.sum())
            low_factor, high_factor = _quantiles(factors[0][known], weights)
            for factor, value in zip(factors, (mean, min(low_factor, mean), max(high_factor, mean)), strict=True):
                factor[unknown] = value
            part = f"{self._share_of(unknown):.0%}"
            notes = (f"{part} of the device's time is of unknown kind: it changes as the rest does, with a wider band",)
        return (factors[0], factors[1], factors[2]), notes

    def _share_of(self, rows: npt.NDArray[np.bool_]) -> float:
        """Share of the busiest device's time in the steps that these rows of `device_work` take."""
        works = self.experiment.works
        durations = self.experiment.graph.works.duration[works].astype(np.float64)
        total = float(durations.sum())
        return float(durations[rows[works]].sum() / total) if total else 0.0

    def _bases(self, times: WorkTimes) -> tuple[tuple[str, float], ...]:
        shares = {str(basis): self._share_of(times.basis == basis) for basis in np.unique(times.basis)}
        found = [(basis, part) for basis, part in shares.items() if part > 0]
        return tuple(sorted(found, key=lambda each: (-each[1], each[0])))


def _with_step(
    base: StepPrediction, found: StepRange, limit: Limit | None, notes: tuple[str, ...], host_ns: float | None
) -> StepPrediction:
    return replace(
        _with_limit(base, limit),
        step_ns=found.expected.step_ns,
        low_ns=found.low_ns,
        high_ns=found.high_ns,
        device_ns=found.expected.device_ns,
        host_ns=host_ns,
        notes=notes,
    )


def _with_limit(base: StepPrediction, limit: Limit | None) -> StepPrediction:
    """With what limits the step; as it is where that cannot be told."""
    if limit is None:
        return base
    return replace(base, limit=limit.name, limit_share=limit.share, limit_cause=limit.cause)


def _quantiles(values: Numbers, weights: Numbers) -> tuple[float, float]:
    """The values below which _UNKNOWN_BAND of the weight lies."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    low, high = (values[order][min(int(np.searchsorted(reached, part)), len(order) - 1)] for part in _UNKNOWN_BAND)
    return float(low), float(high)


def _refusal(unknown: float, unchanged: float, target: DevicePeaks, *, is_known: bool) -> str:
    """Why no step time is given, by the shares of the device's time that are unknown and unchanged."""
    share, part = unknown + unchanged, "copies and communication over links of unknown bandwidth"
    links = "" if unchanged < _WORTH_SAYING else f" ({part})"
    if links and unknown >= _WORTH_SAYING:
        links = f" ({unchanged:.0%} are {part})"
    needs = f"for {share:.0%} of the device's time nothing tells what the {target.name} needs{links}"
    told = "no step time is given"
    return f"{needs}: {told}" if is_known else f"{needs}: {told}; --from says what was recorded on"
