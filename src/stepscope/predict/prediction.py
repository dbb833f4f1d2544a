"""How long the recorded steps would take on another device, how sure that is, and what would limit them there.

Each work of the device gets the time that the target needs for it (`stepscope.predict.work_times`), and the steps are
replayed with these times (`stepscope.predict.step_replay`): the host's part stays as it was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stepscope.analysis.roofline import device_peaks
from stepscope.errors import UsageError
from stepscope.machine.devices import DevicePeaks
from stepscope.predict.batch import BatchGrowth, batch_change, passes_of_a_step, with_batch
from stepscope.predict.batch import recorded_batch as recorded_batch_of
from stepscope.predict.cpu_operations import step_from_shapes
from stepscope.predict.exchanges import RecordedExchange, recorded_exchange, with_transfers
from stepscope.predict.limits import Limit, MemoryNeed, limit_of, memory_need
from stepscope.predict.step_replay import StepReplays, joint_band
from stepscope.predict.trace_operations import CalledOperations
from stepscope.predict.work_times import WorkTimes, work_times
from stepscope.trace import Trace, TraceWarning
from stepscope.whatif.experiment import Experiment

Numbers: TypeAlias = npt.NDArray[np.float64]

MOST_UNKNOWN: Final = 0.25
"""Share of device time without a model for the target, or taken as measured because a link's bandwidth is unknown,
above which no step time is given."""
_WORTH_SAYING: Final = 0.01  # share of device time that is worth a note
_FAR: Final = 8.0  # A batch this many times larger or smaller is worth a note
_ONLY_LAUNCHES: Final = (
    "launches are all that was recorded of the host: what lies between them is taken for its own work, and the range "
    "begins where it was waiting"
)
_UNKNOWN_BAND: Final = (0.05, 0.95)  # the factors of unknown work are between these quantiles of those of known work


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """The mean step on a device; times in nanoseconds, None where refused or unknown.

    Attributes:
        step_ns, low_ns, high_ns: the estimate, and the band in which nine of ten are expected to lie.
        bases: share of the measured device time by how the target's was found, the largest first; of a trace without
            device work the share of the operators' time.
        predictor: what it came from, which has the time of each work.
    """

    device: DevicePeaks  # the target
    step_ns: float | None = None
    low_ns: float | None = None
    high_ns: float | None = None
    device_ns: float | None = None  # in which the busiest device works
    host_ns: float | None = None  # what the host alone needs, including what it waits for besides the device
    limit: str | None = None  # "compute", "memory bandwidth", "host", "input" or "communication"
    memory_bytes: int | None = None  # the most that the step needs at once
    fits: bool | None = None  # whether the device has as much
    samples_per_s: float | None = None  # the batch over the step's time
    notes: tuple[str, ...] = ()  # what was refused, widened or assumed, in sentences
    measured_ns: float | None = None  # the mean step as recorded; None where the recording ran on no such device
    limit_share: float | None = None  # the limit's share of the critical path, 0 to 1
    limit_cause: str | None = None  # of a limit on the host, the cause of most of its time
    batch_factor: float = 1.0  # how many times as many samples it takes as the recorded step
    bases: tuple[tuple[str, float], ...] = ()
    predictor: StepPredictor | None = field(default=None, compare=False, repr=False)

    @property
    def speed_up(self) -> float | None:
        """How many times as fast as measured, per sample; None where either time is unknown."""
        return self.measured_ns * self.batch_factor / self.step_ns if self.measured_ns and self.step_ns else None

    @property
    def busy_share(self) -> float | None:
        """Share of the step in which the device works, 0 to 1."""
        if self.device_ns is None or not self.step_ns:
            return None
        return min(self.device_ns / self.step_ns, 1.0)


class StepPredictor:
    """Predicts the mean step of one trace for any device.

    Args:
        precision: number type of the arithmetic there, one of `stepscope.machine.devices.NUMBER_TYPES`;
            None for the recorded one.
        batch: samples of a step there; None for the recorded.
        recorded_batch: those of the recorded step, where the trace does not have them.
        source: the device that the trace was recorded on, where the trace does not have it.
        host_factor: how many times as long the host works there.
        sampled_memory_bytes: the most that telemetry saw in use, for a trace without allocations.

    Raises:
        UsageError: an unknown number type, or another batch size where the recorded one is unknown.
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
        self._recorded_batch = recorded_batch
        self._sampled_memory_bytes = sampled_memory_bytes
        self.replays = StepReplays(experiment, host_factor=host_factor, input_factor=self.batch_factor)

    @property
    def trace(self) -> Trace:
        return self.experiment.trace

    @property
    def batch_factor(self) -> float:
        return 1.0 if self.change is None else self.change.factor

    @cached_property
    def batch(self) -> int | None:
        """Samples of a batch; None where unknown."""
        if self.change is not None:
            return self.change.wanted
        return self._recorded_batch or recorded_batch_of(self.trace)

    @cached_property
    def samples(self) -> int | None:
        """Samples of a step: the batch, if a step goes through the model once or that cannot be seen."""
        if not self.experiment.steps.height:
            return None
        passes = passes_of_a_step(self.trace, self.experiment.step_count, self.experiment.span)
        return self.batch if passes is None or passes == 1 or self._recorded_batch is not None else None

    @cached_property
    def _growth(self) -> BatchGrowth | None:
        return None if self.change is None else BatchGrowth(self.trace, self._calls, self.change)

    @cached_property
    def memory(self) -> MemoryNeed:
        return memory_need(
            self.trace, self.experiment.device, batch_factor=self.batch_factor, sampled_bytes=self._sampled_memory_bytes
        )

    @cached_property
    def measured_ns(self) -> float:
        return self.replays.measured_ns

    @cached_property
    def _calls(self) -> CalledOperations:
        return CalledOperations(self.trace)

    @cached_property
    def recorded_device(self) -> DevicePeaks | None:
        """None where its figures are unknown."""
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
        found = self.replays.with_work(*factors)
        is_unchanged = found.low_ns == found.high_ns == self.measured_ns
        notes += grown
        notes += (_ONLY_LAUNCHES,) if self.replays.shows_only_launches and not is_unchanged else ()
        return replace(
            _with_limit(base, limit_of(self.experiment, found.expected, self._calls.sides(target, self.precision))),
            step_ns=found.expected.step_ns,
            low_ns=found.low_ns,
            high_ns=found.high_ns,
            device_ns=found.expected.device_ns,
            host_ns=self.replays.host_ns,
            samples_per_s=self._throughput(found.expected.step_ns),
            notes=(*notes, *times.notes, *self._batch_notes),
        )

    def times_on(self, target: DevicePeaks) -> tuple[WorkTimes, tuple[str, ...]]:
        """The times of device work in the requested number type and with the requested batch, and notes on them."""
        times = work_times(self.trace, target, precision=self.precision, source=self.source)
        source = self.recorded_device
        if source is not None and (times.basis == "link").any() and self._exchange is not None:
            times = with_transfers(times, self._exchange, source, target)
        return self._grown(times, target)

    @cached_property
    def _exchange(self) -> RecordedExchange | None:
        return recorded_exchange(self.experiment)

    def _grown(self, times: WorkTimes, target: DevicePeaks) -> tuple[WorkTimes, tuple[str, ...]]:
        if self._growth is None:
            return times, ()
        growth = self._growth.on(target, self.precision)
        unknown = self._share_of(~growth.is_known)
        grown = replace(
            times, ns=times.ns * growth.expected, low_ns=times.low_ns * growth.low, high_ns=times.high_ns * growth.high
        )
        note = f"for {unknown:.0%} of the device's time it is unknown how it grows with the batch: its band is wider"
        return grown, (note,) if unknown >= _WORTH_SAYING else ()

    @property
    def _batch_notes(self) -> tuple[str, ...]:
        if 1 / _FAR <= self.batch_factor <= _FAR:
            return ()
        return ("the batch is far from the recorded one: libraries may choose other kernels, and loading other ways",)

    def _from_shapes(self, target: DevicePeaks) -> StepPrediction:
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
        return StepPrediction(
            device=target,
            memory_bytes=self.memory.bytes,
            predictor=self,
            fits=self.memory.fits(target),
            measured_ns=self.measured_ns,
            batch_factor=self.batch_factor,
            bases=bases,
        )

    def _factors(self, times: WorkTimes) -> tuple[tuple[Numbers, Numbers, Numbers], tuple[str, ...]]:
        """The factors on the duration of each work: expected, low and high; and notes on them."""
        measured = times.measured_ns
        known = np.isfinite(times.ns) & (measured > 0)
        low, high = joint_band(
            np.where(known, times.ns, 0.0),
            np.where(known, times.low_ns, 0.0),
            np.where(known, times.high_ns, 0.0),
            self._calls.kinds,
            self._calls.calls,
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
        shares = [(str(basis), self._share_of(times.basis == basis)) for basis in np.unique(times.basis)]
        return tuple(sorted((each for each in shares if each[1] > 0), key=lambda each: (-each[1], each[0])))


def _with_limit(base: StepPrediction, limit: Limit | None) -> StepPrediction:
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
    links = "copies and communication over links of unknown bandwidth"
    why = ""
    if unchanged >= _WORTH_SAYING:
        why = f" ({unchanged:.0%} are {links})" if unknown >= _WORTH_SAYING else f" ({links})"
    needs = f"for {unknown + unchanged:.0%} of the device's time there is no model for the {target.name}{why}"
    return f"{needs}: no step time is given" + ("" if is_known else "; --from says what was recorded on")


@dataclass(frozen=True, slots=True)
class PredictedSteps:
    """The steps as recorded, and on other devices.

    Attributes:
        predictions: the fastest first; then those that do not fit, and those that were refused.
    """

    path: str
    format: str  # with path: of the trace
    stepped: bool  # whether there are steps; else the whole recording counts as one
    step_count: int  # complete steps; 1 where there are none
    measured_ns: float  # the mean step as recorded
    device: str | None  # what it was recorded on, by its maker's or the trace's name; None where unknown
    devices: int  # how many devices the trace has; the busiest one counts
    busy_share: float | None  # share of the measured step in which the device worked, 0 to 1; None without one
    from_shapes: bool  # whether the trace has no device work, so that all of it is predicted from shapes
    why_not: str | None  # why replays promise nothing here, in one sentence; None where they do
    precision: str | None  # the number type asked for; None for the recorded one
    batch: int | None
    recorded_batch: int | None  # with batch: samples of a step there and as recorded; None where unknown
    memory: MemoryNeed  # what a step needs
    predictions: tuple[StepPrediction, ...]
    warnings: tuple[TraceWarning, ...] = ()  # what was skipped or repaired while reading the trace


def predicted_steps(predictor: StepPredictor, targets: Sequence[DevicePeaks]) -> PredictedSteps:
    """The steps of a trace on each of these devices.

    Raises:
        UsageError: nothing was recorded that takes time.
    """
    experiment, trace = predictor.experiment, predictor.trace
    graph = experiment.graph
    if not len(graph.stretches.start) and not len(graph.works.start):
        raise UsageError("nothing was recorded in this trace that takes time: there is nothing to predict")
    predictions = [predictor.on(target) for target in targets]
    busy = predictor.replays.measured_device_ns / max(predictor.measured_ns, 1.0)
    return PredictedSteps(
        path=trace.metadata.path,
        format=trace.metadata.format,
        stepped=experiment.steps.height > 0,
        step_count=experiment.step_count,
        measured_ns=predictor.measured_ns,
        device=_device_name(predictor),
        devices=trace.device_work["device"].n_unique(),
        busy_share=None if experiment.device is None else min(busy, 1.0),
        from_shapes=experiment.device is None,
        why_not=predictor.replays.why_not,
        precision=predictor.precision,
        batch=predictor.batch,
        recorded_batch=predictor.batch if predictor.change is None else predictor.change.recorded,
        memory=predictor.memory,
        predictions=tuple(sorted(predictions, key=_order)),
        warnings=trace.warnings,
    )


def _order(prediction: StepPrediction) -> tuple[bool, bool, float, str]:
    step_ns = prediction.step_ns
    return step_ns is None, prediction.fits is False, step_ns or 0.0, prediction.device.name


def _device_name(predictor: StepPredictor) -> str | None:
    """The busiest device's name in the table, else in the trace."""
    device = predictor.experiment.device
    if device is None:
        return None
    if predictor.recorded_device is not None:
        return predictor.recorded_device.name
    names = {one.name for one in predictor.trace.metadata.devices if one.device == device}
    return names.pop() if len(names) == 1 else None
