"""Predictions in words: what limits, what does not fit, what is refused, and what they rest on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stepscope.machine.devices import named_device
from stepscope.predict.batch import MemoryNeed
from stepscope.predict.prediction import PredictedSteps, StepPrediction
from stepscope.report.predict import predict_document, step_text
from stepscope.report.text import text_of
from stepscope.trace import TraceWarning
from tests.unit.rendered import golden

MS = 1_000_000
HIDDEN = "\x1b[31m"


def predicted(device: str, **more: Any) -> StepPrediction:
    """A step of 40 ms, 50 before, in which the device works for 10."""
    given: dict[str, Any] = {
        "step_ns": 40 * MS,
        "low_ns": 36 * MS,
        "high_ns": 47.5 * MS,
        "device_ns": 10 * MS,
        "host_ns": 38 * MS,
        "limit": "host",
        "limit_cause": "dispatch",
        "limit_share": 0.8,
        "memory_bytes": 4 * 2**30,
        "fits": True,
        "samples_per_s": 1600.0,
        "measured_ns": 50 * MS,
        "bases": (("learned ratio", 0.9), ("bandwidth", 0.1)),
    }
    return StepPrediction(named_device(device), **{**given, **more})


def answer(*predictions: StepPrediction, **more: Any) -> PredictedSteps:
    given: dict[str, Any] = {
        "path": "/data/trace.json",
        "format": "kineto",
        "stepped": True,
        "step_count": 3,
        "measured_ns": 50 * MS,
        "device": "V100-SXM2-32GB",
        "devices": 1,
        "busy_share": 0.6,
        "from_shapes": False,
        "why_not": None,
        "precision": None,
        "batch": 64,
        "recorded_batch": 64,
        "memory": MemoryNeed(4 * 2**30, False, "the peak of allocated memory"),
        "predictions": predictions,
    }
    return PredictedSteps(**{**given, **more})


REFUSED = "for 60% of the device's time there is no model for the T4: no step time is given"


def test_steps_that_recording_lengthened_are_said_to_be() -> None:
    slowed = " ".join(
        text_of(predict_document(answer(predicted("H100-SXM"), unrecorded_ns=20 * MS)), width=100).split()
    )
    assert "others of the same run take 20.0 ms" in slowed
    for same in (49 * MS, None):
        assert "lengthened" not in text_of(
            predict_document(answer(predicted("H100-SXM"), unrecorded_ns=same)), width=100
        )


def test_the_whole_answer() -> None:
    text = text_of(
        predict_document(
            answer(
                predicted("H100-SXM"),
                predicted("H200-SXM", device_ns=20 * MS, notes=("the H200-SXM is new",)),
                predicted("L4", limit="memory bandwidth", notes=("the L4 is new",)),
                predicted("A100-SXM4-40GB", fits=False, memory_bytes=60 * 2**30),
                predicted(
                    "T4",
                    step_ns=None,
                    low_ns=None,
                    high_ns=None,
                    device_ns=None,
                    samples_per_s=None,
                    limit=None,
                    notes=(REFUSED,),
                ),
                precision="bf16",
                batch=128,
            ),
            top=0,
        ),
        width=120,
    )

    assert text == golden("prediction.txt", text)


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("host", "the host limits it, most of it dispatch; a faster device does not help"),
        ("input", "loading batches limits it"),
        ("communication", "communication limits it"),
        ("compute", "arithmetic limits it. --precision"),
        ("memory bandwidth", "memory bandwidth limits it"),
        (None, "what limits it is not in the trace"),
    ],
)
def test_what_limits_in_words(limit: str | None, words: str) -> None:
    text = text_of(predict_document(answer(predicted("L4", limit=limit)), top=0), width=400)

    assert f"L4: idle for 75.0 % of the step: {words}" in text


def test_the_range_has_one_unit_where_it_can() -> None:
    assert step_text(predicted("L4")) == "40.0 ms (36.0 to 47.5 ms)"
    assert step_text(predicted("L4", high_ns=2e9)) == "40.0 ms (36.0 ms to 2.00 s)"
    assert step_text(predicted("L4", low_ns=40 * MS, high_ns=40 * MS)) == "40.0 ms"
    assert step_text(predicted("L4", step_ns=None)) == ""


def test_where_nothing_is_replayed_bounds_are_given() -> None:
    text = text_of(predict_document(answer(predicted("L4"), why_not="the device waited"), top=0), width=120)

    assert "Not certain: the device waited. So the steps are not replayed" in text
    assert "and between which bounds" in text


def test_without_any_time_there_is_no_table() -> None:
    refused = predicted("T4", step_ns=None, notes=(REFUSED,), fits=None)
    other = replace(refused, device=named_device("L4"), notes=(REFUSED.replace("T4", "L4"),))

    text = text_of(
        predict_document(answer(refused, other, stepped=False, busy_share=None, device=None), top=0), width=120
    )

    assert "What the recording would take" not in text
    assert "T4, L4: for 60% of the device's time there is no model for the device: no step time is given." in text
    assert text.startswith("trace.json: 50.0 ms recorded, without steps; no device's work was recorded.")


def test_without_any_time_nothing_is_said_of_how_it_was_found() -> None:
    refused = predicted("T4", step_ns=None, notes=(REFUSED,), fits=None)
    text = text_of(predict_document(answer(refused, why_not="the device waited"), top=0), width=120)

    assert "Not certain: the device waited.\n" in text
    assert "replayed" not in text


def test_what_comes_from_a_trace_cannot_write_to_the_terminal() -> None:
    warnings = tuple(TraceWarning(HIDDEN, 1, HIDDEN) for _ in range(7))
    memory = MemoryNeed(None, False, HIDDEN)
    hostile = answer(
        predicted("L4", limit_cause=HIDDEN, notes=(HIDDEN,)),
        path=HIDDEN,
        device=HIDDEN,
        why_not=HIDDEN,
        warnings=warnings,
        memory=memory,
    )

    text = text_of(predict_document(hostile, top=0), width=120)

    assert "\x1b" not in text
    assert "While reading: 2 more; stepscope diagnose names them." in text
