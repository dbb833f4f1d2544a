"""Prediction of the mean step on another device, with its uncertainty and its limit there.

Each piece of device work gets its time on the target (`stepscope.predict.work_times`), and the steps are replayed with
these times (`stepscope.predict.work_times`): host work keeps its measured time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stepscope.analysis.roofline import device_peaks
from stepscope.diagnosis.recording_costs import MOST_CONTENDED, Contention
from stepscope.errors import UsageError
from stepscope.machine.devices import DevicePeaks
from stepscope.predict.batch import BatchGrowth, MemoryNeed, batch_change, memory_need, passes_of_a_step, with_batch
from stepscope.predict.batch import recorded_batch as recorded_batch_of
from stepscope.predict.cpu_operations import StepFromShapes
from stepscope.predict.exchanges import RecordedExchange, recorded_exchange, with_transfers
from stepscope.predict.limits import Limit, limit_of
from stepscope.predict.operations import WORTH_SAYING
from stepscope.predict.ranges import step_band
from stepscope.predict.served_iterations import ServedIterations, ServedPhase
from stepscope.predict.step_replays import StepReplays
from stepscope.predict.trace_operations import CalledOperations
from stepscope.predict.work_times import KNOWLEDGE, WorkTimes, work_times
from stepscope.trace import Trace, TraceWarning
from stepscope.trace.model import Displayed
from stepscope.whatif.experiment import Experiment

if TYPE_CHECKING:
    from stepscope.diagnosis.finding import Unreadable

Numbers: TypeAlias = npt.NDArray[np.float64]

MOST_UNKNOWN: Final = 0.25
"""Share of device time without a model for the target, or kept as measured because a link's bandwidth is unknown, above
which no step time is given.
"""
_MOSTLY: Final = 0.5  # share of one-off work above which what is left of a recording without steps is doubtful
_LAUNCHES: Final = ("launch", "graph_launch")
_CUT: Final = ("truncated", "compressed_data")  # kinds of warnings about a file that ends too early
_FAR: Final = 8.0  # a batch this many times larger or smaller deserves a note
_ONLY_LAUNCHES: Final = (
    "only the host's launches were recorded: the time between them is assumed to be its own work, and the range "
    "begins where it was waiting"
)
_GUESSED: Final = "from the datasheet's figures times a constant, with a range as wide as such guesses were off"
_UNKNOWN_BAND: Final = (0.05, 0.95)  # quantiles of the factors of known work that bound those of unknown work


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """Mean step on a device; times in nanoseconds, None where refused or unknown.

    Attributes:
        step_ns, low_ns, high_ns: the estimate, and its range (`stepscope.predict.ranges.HELD`).
        bases: share of the measured device time by how the target's was found, the largest first; of a trace without
            device work the share of the operators' time.
        phases: iterations of a recorded server; empty for other programs.
        predictor: the predictor that made it, which has the time of each work.
    """

    device: DevicePeaks  # target
    step_ns: float | None = None
    low_ns: float | None = None
    high_ns: float | None = None
    device_ns: float | None = None  # time in which the busiest device works
    host_ns: float | None = None  # time that the host alone needs, including its waits for anything but the device
    limit: str | None = None  # "compute", "memory bandwidth", "host", "input" or "communication"
    memory_bytes: int | None = None  # peak memory that the step needs
    fits: bool | None = None  # whether the device has enough memory
    samples_per_s: float | None = None  # batch over step time
    notes: tuple[str, ...] = ()  # what was refused, widened or assumed, in sentences
    measured_ns: float | None = None  # mean recorded step without what is left out of it; None if it ran elsewhere
    limit_share: float | None = None  # the limit's share of the critical path, 0 to 1
    limit_cause: str | None = None  # for a host limit, the cause of most of its time
    batch_factor: float = 1.0  # samples per step over those of the recorded step
    bases: tuple[tuple[str, float], ...] = ()
    phases: tuple[ServedPhase, ...] = ()
    predictor: StepPredictor | None = field(default=None, compare=False, repr=False)

    @property
    def speed_up(self) -> float | None:
        """Speed-up over the measured step, per sample; None where either time is unknown."""
        return self.measured_ns * self.batch_factor / self.step_ns if self.measured_ns and self.step_ns else None

    @property
    def knowledge(self) -> dict[str, float]:
        """Share of `bases` by what it rests on, one of the values of `stepscope.predict.work_times.KNOWLEDGE`."""
        shares: dict[str, float] = {}
        for basis, share in self.bases:
            shares[KNOWLEDGE[basis]] = shares.get(KNOWLEDGE[basis], 0.0) + share
        return shares

    @property
    def busy_share(self) -> float | None:
        """Share of the step in which the device works, 0 to 1."""
        if self.device_ns is None or not self.step_ns:
            return None
        return min(self.device_ns / self.step_ns, 1.0)


class StepPredictor:
    """Predicts the mean step of one trace for any device.

    Args:
        precision: number type of the arithmetic on the target, one of `stepscope.machine.devices.NUMBER_TYPES`;
            None for the recorded one.
        batch: samples per step on the target; None for the recorded number.
        recorded_batch: samples of the recorded step, where the trace does not say.
        source: recorded device, where the trace does not say.
        host_factor: time of host work on the target over the recorded time.
        sampled_memory_bytes: peak memory in use from telemetry, for a trace without allocations.

    Raises:
        UsageError: the number type is unknown, or `batch` is given and the recorded batch size is unknown.
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
        self._predicted: dict[DevicePeaks, StepPrediction] = {}
        self._last_times: tuple[DevicePeaks, tuple[WorkTimes, tuple[str, ...]]] | None = None

    @property
    def trace(self) -> Trace:
        return self.experiment.trace

    @property
    def batch_factor(self) -> float:
        return 1.0 if self.change is None else self.change.factor

    @cached_property
    def batch(self) -> int | None:
        if self.change is not None:
            return self.change.wanted
        return self._recorded_batch or recorded_batch_of(self.trace)

    @cached_property
    def samples(self) -> int | None:
        """Samples per step: the batch size, if a step has a single forward pass or their number is unknown."""
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
        return CalledOperations.of(self.trace)

    @cached_property
    def recorded_device(self) -> DevicePeaks | None:
        """Recorded device; None where its figures are unknown."""
        device = self.experiment.device
        return self.source if self.source is not None or device is None else device_peaks(self.trace, device)

    def on(self, target: DevicePeaks) -> StepPrediction:
        """Predict the mean step on a device, once; without a time if too much of the recorded steps went to others."""
        if target not in self._predicted:
            self._predicted[target] = self._on(target)
        return self._predicted[target]

    def _on(self, target: DevicePeaks) -> StepPrediction:
        if self._lost_work is not None:
            return replace(self._without_time(target, ()), notes=(self._lost_work,))
        contention = self.replays.contention
        if contention is not None and contention.is_too_much:
            return replace(self._without_time(target, ()), notes=(_disturbed(contention, is_left_out=False),))
        found = self._from_shapes(target) if self.experiment.device is None else self._of_works(target)
        notes = found.notes
        if contention is not None:
            is_left_out = found.step_ns is not None and self.replays.why_not is None
            notes = (_disturbed(contention, is_left_out=is_left_out), *notes)
        if self.replays.once_ns:
            notes = (self._once_note, *notes)
        return replace(found, measured_ns=self.replays.steady_ns, notes=notes)

    @cached_property
    def _lost_work(self) -> str | None:
        """Why the work of the recorded device must be missing, so that operators are no processor's own."""
        trace = self.trace
        if self.experiment.device is not None:
            return None
        if trace.launches["kind"].is_in(_LAUNCHES).any():
            return "the recording has launches of a device's work, but not that work: no step time is given"
        is_cut = any(each.kind.partition(":")[0] in _CUT for each in trace.warnings)
        if is_cut and trace.metadata.devices:
            return "the file is cut off before the work of its device, which it names: no step time is given"
        return None

    @property
    def _once_note(self) -> str:
        share, stepped = self.replays.once_ns / self.measured_ns, self.experiment.steps.height > 0
        text = (
            f"{share:.0%} of the {'steps' if stepped else 'recording'} is one-off work of the host, such as first "
            "launches: times and speed-ups leave it out"
        )
        if stepped or share < _MOSTLY:
            return text
        return f"{text}, and what is left may not be typical: record later steps"

    def _of_works(self, target: DevicePeaks) -> StepPrediction:
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
            phases=self._served.on(found, factors),
            notes=(*notes, *times.notes, *_guessed(base), *self._batch_notes),
        )

    def times_on(self, target: DevicePeaks) -> tuple[WorkTimes, tuple[str, ...]]:
        """Times of device work in the requested number type and batch size, with notes."""
        if self._last_times is None or self._last_times[0] != target:  # asked for again with several of the device
            self._last_times = target, self._times_on(target)
        return self._last_times[1]

    def _times_on(self, target: DevicePeaks) -> tuple[WorkTimes, tuple[str, ...]]:
        times = work_times(self.trace, target, precision=self.precision, source=self.source)
        source = self.recorded_device
        if source is not None and (times.basis == "link").any() and self._exchange is not None:
            times = with_transfers(times, self._exchange, source, target)
        return self._grown(times, target)

    @cached_property
    def _exchange(self) -> RecordedExchange | None:
        return recorded_exchange(self.experiment)

    @cached_property
    def _served(self) -> ServedIterations:
        return ServedIterations(self.replays)

    def _grown(self, times: WorkTimes, target: DevicePeaks) -> tuple[WorkTimes, tuple[str, ...]]:
        if self._growth is None:
            return times, ()
        growth = self._growth.on(target, self.precision)
        unknown = self._share_of(~growth.is_known)
        grown = replace(
            times, ns=times.ns * growth.expected, low_ns=times.low_ns * growth.low, high_ns=times.high_ns * growth.high
        )
        note = f"how {unknown:.0%} of the device's time grows with the batch is unknown: its band is wider"
        return grown, (note,) if unknown >= WORTH_SAYING else ()

    @property
    def _batch_notes(self) -> tuple[str, ...]:
        if 1 / _FAR <= self.batch_factor <= _FAR:
            return ()
        return ("the batch is far from the recorded one: libraries may choose other kernels, and loading may change",)

    @cached_property
    def _shapes(self) -> StepFromShapes:
        grown = None if self.change is None else with_batch(self.trace, self.change)
        return StepFromShapes(self.replays, precision=self.precision, grown=grown)

    def _from_shapes(self, target: DevicePeaks) -> StepPrediction:
        found = self._shapes.on(target)
        guessed = found.guessed_share
        parts = (
            ("shapes", found.covered_share - guessed),
            ("datasheet", guessed),
            ("unknown", 1 - found.covered_share),
        )
        base = self._without_time(target, tuple(part for part in parts if part[1] > 0))
        return replace(
            _with_limit(base, found.limit),
            step_ns=found.step_ns,
            low_ns=found.low_ns,
            high_ns=found.high_ns,
            device_ns=found.device_ns,
            host_ns=found.host_ns,
            samples_per_s=self._throughput(found.step_ns),
            notes=found.notes if found.step_ns is None else (*found.notes, *_guessed(base), *self._batch_notes),
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
        """Factors on the duration of each work (expected, low and high), with notes."""
        measured = times.measured_ns
        known = np.isfinite(times.ns) & (measured > 0)
        low, high = step_band(
            np.where(known, times.ns, 0.0),
            np.where(known, times.low_ns, 0.0),
            np.where(known, times.high_ns, 0.0),
            np.where(times.basis == "datasheet", "datasheet", self._calls.kinds),
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
            part = self._share_of(unknown)
            note = f"{part:.0%} of the device's time is of unknown kind: it changes like the rest, with a wider band"
            notes = (note,) if part >= WORTH_SAYING else ()
        return (factors[0], factors[1], factors[2]), notes

    def _share_of(self, rows: npt.NDArray[np.bool_]) -> float:
        """Share of the busiest device's time in the steps spent in these rows of `device_work`."""
        works = self.experiment.works
        durations = self.experiment.graph.works.duration[works].astype(np.float64)
        total = float(durations.sum())
        return float(durations[rows[works]].sum() / total) if total else 0.0

    def _bases(self, times: WorkTimes) -> tuple[tuple[str, float], ...]:
        shares = [(str(basis), self._share_of(times.basis == basis)) for basis in np.unique(times.basis)]
        return tuple(sorted((each for each in shares if each[1] > 0), key=lambda each: (-each[1], each[0])))


def _disturbed(contention: Contention, *, is_left_out: bool) -> str:
    """The note about a recording on a busy machine: what of it the prediction leaves out."""
    by = "a container's quota took" if contention.by_quota else "waiting for a processor took"
    text = f"{by} {contention.share:.0%} of the recorded steps"
    if contention.is_too_much:
        return f"{text}, more than {MOST_CONTENDED:.0%}, so no step time is given: record while the machine is quiet"
    if is_left_out:
        return (
            f"{text}; prediction and speed-up leave that out, as the operating system counted it: they are for a quiet "
            "machine"
        )
    return f"{text}, and the times given here hold it: record while the machine is quiet"


def _guessed(prediction: StepPrediction) -> tuple[str, ...]:
    """The note about the part that nothing was measured for."""
    share = dict(prediction.bases).get("datasheet", 0.0)
    if share < WORTH_SAYING:
        return ()
    return (f"nobody has measured this kind of work on that device for us: {share:.0%} of the time is {_GUESSED}",)


def _with_limit(base: StepPrediction, limit: Limit | None) -> StepPrediction:
    if limit is None:
        return base
    return replace(base, limit=limit.name, limit_share=limit.share, limit_cause=limit.cause)


def _quantiles(values: Numbers, weights: Numbers) -> tuple[float, float]:
    """Values at the _UNKNOWN_BAND quantiles of the weights."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    low, high = (values[order][min(int(np.searchsorted(reached, part)), len(order) - 1)] for part in _UNKNOWN_BAND)
    return float(low), float(high)


def _refusal(unknown: float, unchanged: float, target: DevicePeaks, *, is_known: bool) -> str:
    links = "copies and communication over links of unknown bandwidth"
    why = ""
    if unchanged >= WORTH_SAYING:
        why = f" ({unchanged:.0%} are {links})" if unknown >= WORTH_SAYING else f" ({links})"
    needs = f"for {unknown + unchanged:.0%} of the device's time there is no model for the {target.name}{why}"
    return f"{needs}: no step time is given" + ("" if is_known else "; --from names the recorded device")


@dataclass(frozen=True, slots=True, repr=False)
class PredictedSteps(Displayed):
    """The steps as recorded, and predicted on other devices.

    Attributes:
        predictions: fastest first, then devices without enough memory, then refused predictions.
    """

    path: str
    format: str  # path, format: of the trace
    stepped: bool  # whether the trace has steps; else the whole recording counts as one
    step_count: int  # complete steps; 1 without steps
    measured_ns: float  # mean step as recorded
    device: str | None  # recorded device, by its maker's or the trace's name; None where unknown
    devices: int  # number of devices in the trace; the busiest one counts
    busy_share: float | None  # share of the measured step in which the device worked, 0 to 1; None without a device
    from_shapes: bool  # whether the trace has no device work, so that all of it is predicted from shapes
    why_not: str | None  # why the steps cannot be replayed, in one sentence; None where they can
    precision: str | None  # requested number type; None for the recorded one
    batch: int | None
    recorded_batch: int | None  # batch, recorded_batch: samples per step, requested and recorded; None where unknown
    memory: MemoryNeed  # memory needed per step
    predictions: tuple[StepPrediction, ...]
    warnings: tuple[TraceWarning, ...] = ()  # what was skipped or repaired while reading the trace
    unreadable: tuple[Unreadable, ...] = ()  # files of other ranks, which are missing
    unrecorded_ns: int | None = None  # a step of the same run that was not recorded; None where unknown
    steady_ns: float | None = None  # mean step without what predictions leave out, as notes say; None if nothing


def predicted_steps(predictor: StepPredictor, targets: Sequence[DevicePeaks]) -> PredictedSteps:
    """Predict the steps of a trace on each of these devices.

    Raises:
        UsageError: nothing recorded takes time.
    """
    experiment, trace = predictor.experiment, predictor.trace
    graph = experiment.graph
    if not len(graph.stretches.start) and not len(graph.works.start):
        raise UsageError("the trace contains nothing that takes time: there is nothing to predict")
    predictions = [predictor.on(target) for target in targets]
    busy = predictor.replays.measured_device_ns / max(predictor.measured_ns, 1.0)
    unrecorded = trace.metadata.unrecorded
    return PredictedSteps(
        path=trace.metadata.path,
        unrecorded_ns=None if unrecorded is None else unrecorded.step_ns,
        steady_ns=None if predictor.replays.is_as_recorded else predictor.replays.steady_ns,
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
    """Name of the busiest device in the table, else in the trace."""
    device = predictor.experiment.device
    if device is None:
        return None
    if predictor.recorded_device is not None:
        return predictor.recorded_device.name
    names = {one.name for one in predictor.trace.metadata.devices if one.device == device}
    return names.pop() if len(names) == 1 else None
