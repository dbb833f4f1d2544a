"""What the recorded steps would take on several devices, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.analysis.roofline import device_peaks
from stepscope.errors import UsageError
from stepscope.machine.devices import DevicePeaks
from stepscope.predict.limits import MemoryNeed
from stepscope.predict.prediction import StepPrediction, StepPredictor
from stepscope.trace import TraceWarning


@dataclass(frozen=True, slots=True)
class PredictedSteps:
    """The steps as they were recorded, and on other devices.

    Attributes:
        path, format: of the trace.
        stepped: whether there are steps; else the whole recording counts as one.
        step_count: number of complete steps; 1 where there are none.
        measured_ns: the mean step as it was recorded.
        device: what it was recorded on, by its maker's or the trace's name; None where the trace does not tell.
        devices: how many devices the trace shows; the busiest one counts.
        busy_share: of the measured step in which the device worked, 0 to 1; None without one.
        from_shapes: whether the trace has no device's work, so that all of it is predicted from shapes.
        why_not: why replays promise nothing here, in one sentence; None where they do.
        precision: the number type asked for; None for the recorded one.
        batch, recorded_batch: samples of a step there and as recorded; None where nothing tells.
        memory: what a step needs.
        predictions: the fastest first; behind them those that do not fit, and those that were refused.
        warnings: what was skipped or repaired while reading the trace.
    """

    path: str
    format: str
    stepped: bool
    step_count: int
    measured_ns: float
    device: str | None
    devices: int
    busy_share: float | None
    from_shapes: bool
    why_not: str | None
    precision: str | None
    batch: int | None
    recorded_batch: int | None
    memory: MemoryNeed
    predictions: tuple[StepPrediction, ...]
    warnings: tuple[TraceWarning, ...] = ()


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
    if predictor.source is not None:
        return predictor.source.name
    known = device_peaks(predictor.trace, device)
    if known is not None:
        return known.name
    names = {one.name for one in predictor.trace.metadata.devices if one.device == device}
    return names.pop() if len(names) == 1 else None
