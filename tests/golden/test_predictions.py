"""Real traces on other devices: what must hold whatever the models of operators say."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from benchmarks.unmeasured_makers import PAIRS, ends_of, left_out
from stepscope.machine.devices import named_device
from stepscope.predict.operations import UNMEASURED
from stepscope.predict.prediction import StepPredictor
from stepscope.whatif.experiment import Experiment
from tests.golden.opened import opened

pytestmark = pytest.mark.traces

OWN = {
    "a100_cudagraph_rank0of16.json.gz": "A100-SXM4-80GB",
    "h100_qwen_chat.json.gz": "H100-SXM",
    "mi300x_sglang_prefilldecode.json.gz": "MI300X",
    "v100_resnet50_workers4.json.gz": "V100-SXM2-32GB",
}


@lru_cache
def experiment(path: Path) -> Experiment:
    return Experiment(opened(path))


def predictor(folder: Path, name: str, **more: int) -> StepPredictor:
    return StepPredictor(experiment(folder / "kineto" / name), **more)


@pytest.mark.parametrize(("name", "device"), OWN.items())
def test_its_own_device_takes_what_was_measured(traces_folder: Path, name: str, device: str) -> None:
    """To the nanosecond, also where replays promise nothing."""
    recorded = predictor(traces_folder, name)

    found = recorded.on(named_device(device))

    measured = recorded.experiment.recorded_ns / recorded.experiment.step_count
    assert (found.low_ns, found.step_ns, found.high_ns) == (measured,) * 3
    assert found.bases == (("same device", 1.0),)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("v100_resnet50_workers0.json.gz", "input"),
        ("v100_resnet50_workers4.json.gz", "host"),
        ("h100_owlv2.json.gz", "input"),
    ],
)
def test_a_step_that_the_host_limits_is_no_faster_on_a_faster_device(
    traces_folder: Path, name: str, limit: str
) -> None:
    recorded = predictor(traces_folder, name)

    found = recorded.on(named_device("H200-SXM"))

    assert found.limit == limit
    assert found.step_ns is not None
    assert found.host_ns is not None
    assert found.host_ns <= found.step_ns <= recorded.measured_ns
    assert found.busy_share is not None
    assert found.busy_share < 0.5


def test_half_the_batch_halves_what_the_device_does(traces_folder: Path) -> None:
    """102 ms of a V100 for 32 images; the optimizer and 10 ms of the rest stay."""
    found = predictor(traces_folder, "v100_resnet50_workers4.json.gz", batch=16).on(named_device("V100-SXM2-32GB"))

    assert found.device_ns is not None
    assert 45e6 < found.device_ns < 65e6
    assert found.batch_factor == 0.5
    assert found.samples_per_s == pytest.approx(16e9 / (found.step_ns or 0))


def test_a_processors_recording_from_shapes_alone(traces_folder: Path) -> None:
    """A small model of 106 ms a step, 42 of them in operators that compute: the host still needs the rest."""
    found = predictor(traces_folder, "cpu_gpt2_batched_loss.json.gz").on(named_device("H100-SXM"))

    assert found.step_ns is not None
    assert 60e6 < found.step_ns < 75e6
    assert found.limit == "input"
    assert found.device_ns is not None
    assert found.device_ns < 5e6


def test_the_range_of_guesses_is_that_of_other_makers_traces(traces_folder: Path) -> None:
    """Leaving out all of a maker's devices, as the models do, gives the factors in use; the others hold each trace."""
    traces = left_out(traces_folder)

    assert tuple(round(end, 2) for end in ends_of(traces)) == UNMEASURED["AMD"]
    held = [
        low <= each.together <= high
        for each in traces
        for low, high in (ends_of([o for o in traces if o is not each]),)
    ]
    assert sum(held) >= 0.8 * len(held)


@pytest.mark.parametrize("pair", PAIRS, ids=("qwen", "timesformer"))
@pytest.mark.parametrize("forwards", [True, False])
def test_recordings_on_two_makers_devices_predict_each_other(
    traces_folder: Path, pair: tuple[str, str], forwards: bool
) -> None:
    source, target = (Experiment(opened(traces_folder / name)) for name in (pair if forwards else pair[::-1]))
    there = StepPredictor(target)
    assert there.recorded_device is not None

    found = StepPredictor(source).on(there.recorded_device)

    measured = there.replays.measured_device_ns
    assert found.device_ns == pytest.approx(measured, rel=0.2)
    assert found.knowledge["transferred"] > 0.95
    assert not any("nobody has measured" in note for note in found.notes)


def test_a_guess_says_that_nobody_measured(traces_folder: Path) -> None:
    found = predictor(traces_folder, "h100_qwen_chat.json.gz").on(named_device("Gaudi3"))

    assert found.knowledge["datasheet times a constant"] > 0.95
    assert (
        sum(note.startswith("nobody has measured this kind of work on that device for us") for note in found.notes) == 1
    )
    assert found.step_ns is not None
    assert found.high_ns is not None
    assert found.high_ns > 3 * found.step_ns
