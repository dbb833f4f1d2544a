"""Predictions of any program: its own device takes what was measured, and on others the range holds the step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stepscope.machine.devices import named_device
from stepscope.predict.prediction import StepPredictor, predicted_steps
from stepscope.predict.ranges import joint_band
from stepscope.readers import open_trace
from stepscope.report.predict import predict_document, predict_json
from stepscope.report.text import text_of
from stepscope.whatif.experiment import Experiment
from tests.simulator import KinetoOptions, Machine, write_kineto
from tests.simulator.strategies import programs
from tests.unit.rendered import written

PROPERTY = settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow])
T4, L4, H100 = (named_device(name) for name in ("T4", "L4", "H100-SXM"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machines")


@PROPERTY
@given(machine=programs())
def test_any_program_takes_as_long_on_its_own_device_and_lies_in_its_range_on_others(
    machine: Machine, folder: Path
) -> None:
    experiment = Experiment(open_trace(write_kineto(machine, folder / "trace.json.gz", KinetoOptions())))
    assume(len(experiment.works))
    answer = predicted_steps(StepPredictor(experiment, source=T4), [T4, L4, H100])

    for each in answer.predictions:
        assert each.step_ns is not None
        assert each.low_ns is not None
        assert each.high_ns is not None
        assert 0 < each.low_ns <= each.step_ns <= each.high_ns
        if each.device is T4:
            assert each.low_ns == each.high_ns == experiment.recorded_ns / experiment.step_count
    assert written(predict_json(answer))["schema"] == 1
    assert text_of(predict_document(answer, top=0), width=80).endswith("\n")


@PROPERTY
@given(
    st.lists(
        st.tuples(st.floats(1, 1e6), st.floats(0, 1), st.floats(0, 9), st.sampled_from("abc"), st.integers(0, 2)),
        min_size=1,
        max_size=20,
    )
)
def test_the_joint_band_lies_between_no_common_error_and_the_same_for_all(
    works: list[tuple[float, float, float, str, int]],
) -> None:
    expected, below, above = (np.array([work[place] for work in works]) for place in range(3))
    kinds, calls = np.array([work[3] for work in works]), np.array([work[4] for work in works])
    low, high = expected * (1 - below), expected * (1 + above)

    narrow_low, narrow_high = joint_band(expected, low, high, kinds, calls, np.arange(len(works)))

    slack = 1e-9 * expected
    assert (low - slack <= narrow_low).all()
    assert (narrow_low <= expected + slack).all()
    assert (expected - slack <= narrow_high).all()
    assert (narrow_high <= high + slack).all()
    alone = float(np.sqrt(((high - expected) ** 2).sum()))
    assert float((narrow_high - expected).sum()) >= alone * (1 - 1e-6) - 1e-6
