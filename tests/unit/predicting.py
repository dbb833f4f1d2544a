"""The mean step of a trace on another device."""

from __future__ import annotations

from typing import Any

from stepscope.machine.devices import DevicePeaks
from stepscope.predict.prediction import StepPrediction, StepPredictor
from stepscope.trace import Trace
from stepscope.whatif.experiment import Experiment


def predict_step(recorded: Experiment | Trace, target: DevicePeaks, **options: Any) -> StepPrediction:
    """The prediction; options as of `StepPredictor`."""
    experiment = recorded if isinstance(recorded, Experiment) else Experiment(recorded)
    return StepPredictor(experiment, **options).on(target)
