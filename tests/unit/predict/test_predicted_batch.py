"""Another batch size: how it is told, what grows with it, and what is refused."""

from __future__ import annotations

import json

import pytest

from stepscope.errors import UsageError
from stepscope.machine.devices import named_device
from stepscope.predict.batch import BatchChange, batch_change, recorded_batch, with_batch
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
from stepscope.trace.program_facts import LoaderFacts, ProgramFacts
from tests.unit.predict.test_prediction import US, copying
from tests.unit.predicting import predict_step
from tests.unit.recording import Recording
from tests.unit.shaped import Shaped


def transformer() -> Trace:
    """A layer of 48 features on 8 samples of 16 tokens, forward and backward, and its optimizer's step."""
    shaped = Shaped()
    shaped.call("aten::embedding", 5, [1000, 48], [8, 16], types=["float", "long int"])
    shaped.call("aten::embedding", 5, [16, 48], [16], types=["float", "long int"])
    shaped.call("aten::linear", 5, [8, 16, 48], [96, 48], [96])
    shaped.call("aten::addmm", 5, [96], [128, 48], [48, 96])
    shaped.call("aten::bmm", 5, [32, 16, 24], [32, 24, 16])
    shaped.call("aten::_softmax", 5, [8, 4, 16, 16])
    shaped.call("aten::mm", 5, [128, 96], [96, 48])
    shaped.call("aten::mm", 5, [96, 128], [128, 48])
    shaped.call("aten::add_", 5, [96, 48], [96, 48])
    shaped.call("aten::cat", 5)
    return shaped.trace()


def shapes(trace: Trace) -> list[list[list[int]]]:
    return [json.loads(text) for text in trace.operators["input_shapes"].to_list()]


def test_the_batch_is_what_layers_inputs_begin_with() -> None:
    assert recorded_batch(transformer()) == 8


def test_the_batch_of_the_loader_counts_first() -> None:
    facts = ProgramFacts(loaders=(LoaderFacts(batch_size=4),))

    assert recorded_batch(Shaped(facts=facts).trace()) == 4
    assert recorded_batch(Shaped().trace()) is None
    assert recorded_batch(Trace.from_tables({})) is None


def test_activations_grow_and_weights_stay() -> None:
    grown = with_batch(transformer(), BatchChange(8, 24))

    assert shapes(grown) == [
        [[1000, 48], [24, 16]],
        [[16, 48], [16]],
        [[24, 16, 48], [96, 48], [96]],
        [[96], [384, 48], [48, 96]],
        [[96, 16, 24], [96, 24, 16]],
        [[24, 4, 16, 16]],
        [[384, 96], [96, 48]],
        [[96, 384], [384, 48]],
        [[96, 48], [96, 48]],
        [],
    ]


def test_a_convolutions_weight_of_as_many_channels_as_samples_stays() -> None:
    shaped = Shaped()
    shaped.call("aten::conv2d", 5, [64, 3, 32, 32], [64, 3, 7, 7], [])
    shaped.call("aten::linear", 5, [64, 64], [64, 64], [64])
    shaped.call("aten::mul_", 5, [64, 3, 7, 7], [])
    shaped.call("aten::relu", 5, [64, 64, 32, 32])
    shaped.call("aten::stack", 5, [[64, 1], [64, 2]], types=["TensorList"])  # type: ignore[list-item]

    assert shapes(with_batch(shaped.trace(), BatchChange(64, 32))) == [
        [[32, 3, 32, 32], [64, 3, 7, 7], []],
        [[32, 64], [64, 64], [64]],
        [[64, 3, 7, 7], []],
        [[32, 64, 32, 32]],
        [[[32, 1], [32, 2]]],
    ]


def test_a_batch_that_nothing_tells() -> None:
    with pytest.raises(UsageError, match="--recorded-batch M"):
        batch_change(copying(), 64)
    with pytest.raises(UsageError, match="begins with the batch size 7"):
        batch_change(transformer(), 64, recorded=7)
    assert batch_change(transformer(), 64, recorded=4) == BatchChange(4, 64)


def multiplying(facts: ProgramFacts | None = None) -> Trace:
    """A step of 1000 us on an A100: a matrix product of 602 us, memory that is copied there and on the device."""
    recording = Recording(Metadata(devices=(Device("0", "NVIDIA A100-SXM4-80GB"),), program=facts))
    recording.step(0, 1000 * US, 1)
    recording.annotation(0, 50 * US, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    types = '["c10::BFloat16", "c10::BFloat16"]'
    recording.operator(60 * US, 20 * US, "aten::linear", input_shapes="[[8192, 8192], [8192, 8192]]", input_types=types)
    recording.launch(55 * US, 2 * US, 1, name="cudaMemcpyAsync", kind="copy")
    recording.work(58 * US, 102 * US, "Memcpy HtoD", 1, kind="copy_in")
    recording.launched(65 * US, 160 * US, 602 * US, "gemm", 2)
    recording.launch(90 * US, 700 * US, 3, name="cudaDeviceSynchronize", kind="synchronise")
    return recording.trace()


def test_twice_the_batch_takes_twice_the_work() -> None:
    """The product and the copy about double, as 50 us of loading do; what the host does beside stays."""
    once = predict_step(multiplying(), named_device("A100-SXM4-80GB"), batch=8192)
    twice = predict_step(multiplying(), named_device("A100-SXM4-80GB"), batch=16384)

    assert (once.step_ns, once.samples_per_s) == (1000 * US, pytest.approx(8192 / 1e-3))
    assert twice.step_ns is not None
    assert twice.high_ns is not None
    assert (1000 + 0.85 * 602 + 102 + 50) * US < twice.step_ns <= (1000 + 602 + 102 + 50) * US
    assert twice.step_ns < twice.high_ns < 2000 * US
    assert twice.speed_up == pytest.approx(2 * 1000 * US / twice.step_ns)
    assert (once.batch_factor, twice.batch_factor) == (1.0, 2.0)


def test_a_batch_far_away_is_said() -> None:
    found = predict_step(multiplying(), named_device("A100-SXM4-80GB"), batch=16 * 8192)

    assert any("far from the recorded one" in note for note in found.notes)


def test_steps_that_go_through_the_model_twice_have_no_throughput() -> None:
    """Unless the user says how many samples a step takes."""
    recording = Recording(Metadata(devices=(Device("0", "NVIDIA A100-SXM4-80GB"),)))
    recording.step(0, 1000 * US, 1)
    types = '["float", "float"]'
    for begin in (0, 400 * US):
        recording.operator(begin, 20 * US, "aten::linear", input_shapes="[[8, 48], [96, 48]]", input_types=types)
        recording.launched(begin + 5 * US, begin + 9 * US, 300 * US, "gemm", begin)
    trace, a100 = recording.trace(), named_device("A100-SXM4-80GB")

    assert predict_step(trace, a100).samples_per_s is None
    assert predict_step(trace, a100, recorded_batch=16).samples_per_s == pytest.approx(16_000)
