"""What the recorded steps would take on other devices, for programs: schema 1, to which keys may be added."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from stepscope import __version__
from stepscope.predict.answer import PredictedSteps
from stepscope.predict.prediction import StepPrediction

SCHEMA: Final = 1


def predict_json(answer: PredictedSteps) -> dict[str, Any]:
    """Everything in an answer as plain values: times in nanoseconds, shares from 0 to 1, null for what is not known."""
    return {
        "schema": SCHEMA,
        "stepscope": __version__,
        "trace": {
            "path": answer.path,
            "format": answer.format,
            "warnings": [dataclasses.asdict(each) for each in answer.warnings],
        },
        "steps": {"source": "recorded" if answer.stepped else "none", "count": answer.step_count},
        "step_ns": answer.measured_ns,
        "device": answer.device,
        "devices": answer.devices,
        "busy_share": answer.busy_share,
        "from_shapes": answer.from_shapes,
        "why_not": answer.why_not,
        "precision": answer.precision,
        "batch": answer.batch,
        "recorded_batch": answer.recorded_batch,
        "memory": dataclasses.asdict(answer.memory),
        "predictions": [_prediction(each) for each in answer.predictions],
    }


def _prediction(prediction: StepPrediction) -> dict[str, Any]:
    return {
        "device": prediction.device.name,
        "step_ns": prediction.step_ns,
        "low_ns": prediction.low_ns,
        "high_ns": prediction.high_ns,
        "speed_up": prediction.speed_up,
        "samples_per_s": prediction.samples_per_s,
        "device_ns": prediction.device_ns,
        "busy_share": prediction.busy_share,
        "host_ns": prediction.host_ns,
        "limit": prediction.limit,
        "limit_share": prediction.limit_share,
        "limit_cause": prediction.limit_cause,
        "memory_bytes": prediction.memory_bytes,
        "device_memory_bytes": prediction.device.memory_bytes,
        "fits": prediction.fits,
        "bases": dict(prediction.bases),
        "notes": list(prediction.notes),
    }
