"""loop-in-step: a Python loop runs small operators many times."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.diagnosis.rules.loop_in_step import RULE as rule
from stepscope.readers import open_trace
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import ModelFacts, ProgramFacts, WorkFacts
from tests.simulator.programs import launch_bound_training, two_devices
from tests.unit.diagnosis.rules.cases import (
    US,
    Cases,
    asked,
    busy_device,
    empty_trace,
    figures_of,
    places_of,
    recorded,
    the_finding,
)
from tests.unit.recording import Recording

REPOSITORY = Path(__file__).resolve().parents[4]


def looping(repetitions: int = 40, *body: str, steps: int = 1) -> Trace:
    """In each step of 1000 ns a loop of operators of 5 ns that allocate 16 bytes each, on the host alone."""
    recording = Recording()
    for step in range(steps):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.frame(begin, 1000, "train.py(20): losses")
        now = begin + 10
        for _ in range(repetitions):
            for name in body or ("aten::select", "aten::add"):
                recording.operator(now, 5, name, sequence_number=now, forward_thread=0)
                recording.allocation(now + 1, 16)
                now += 6
        recording.operator(begin + 990, 5, "aten::mean")
    return recording.trace()


def called_from(*frames: str, body: str = "aten::add") -> Trace:
    """A step of 1000 ns whose loop of 40 operators runs below these frames, each repetition in the last of them."""
    recording = Recording()
    recording.step(0, 1000, 1)
    for frame in frames[:-1]:
        recording.frame(0, 1000, frame)
    for number in range(40):
        recording.frame(20 * number + 10, 15, frames[-1])
        recording.operator(20 * number + 12, 10, body)
    return recording.trace()


def on_a_device() -> Trace:
    """40 repetitions that each cost the device 5 us of work and 15 us of idle time before it."""
    recording = Recording()
    recording.step(0, 1000 * US, 1)
    for number in range(40):
        recording.operator((20 * number + 5) * US, 10 * US, "aten::add")
        recording.launched((20 * number + 10) * US, (20 * number + 15) * US, 5 * US, "add", 101 + number)
    return recording.trace()


def indexed(repetitions: int, *body: str) -> Trace:
    """In 1000 ns a loop whose select takes one index after the other."""
    recording = Recording()
    recording.step(0, 1000, 1)
    for number in range(repetitions):
        recording.operator(
            40 * number, 10, "aten::select", input_shapes="[[4, 64, 8], [], []]", input_values=f'["", "1", "{number}"]'
        )
        for place, name in enumerate(body or ("aten::layer_norm",)):
            recording.operator(40 * number + 15 + 10 * place, 9, name, input_shapes="[[4, 8]]", input_values='[""]')
    recording.operator(900, 5, "aten::mean")
    return recording.trace()


def heads(count: int) -> Trace:
    """In 1000 ns layers one after the other whose results are put together."""
    recording = Recording()
    recording.step(0, 1000, 1)
    for number in range(count):
        recording.operator(40 * number, 15, "aten::linear")
        recording.operator(40 * number + 20, 15, "aten::scaled_dot_product_attention")
    pieces = ", ".join(["[2, 4]"] * count)
    recording.operator(500, 20, "aten::cat", input_shapes=f"[[{pieces}], []]")
    return recording.trace()


def layered(gradients: int, *, counted: bool = False) -> Trace:
    """In 10,000 ns forty repetitions of a linear layer, and as many gradients as given."""
    recording = Recording()
    recording.step(0, 10_000, 1)
    for number in range(40):
        index = f'["", "0", "{number if counted else 0}"]'
        recording.operator(
            40 * number, 5, "aten::select", input_shapes="[[40, 8], [], []]", input_values=index if counted else None
        )
        recording.operator(40 * number + 10, 20, "aten::linear", sequence_number=number, forward_thread=0)
    for number in range(gradients):
        recording.operator(
            5000 + 20 * number, 10, "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
        )
    return recording.trace()


def whole_models(parameters: int | None) -> Trace:
    """In 10,000 ns forty repetitions of 25 operators with weights of 8 x 8 numbers, the first ones of 8 x 80."""
    program = ProgramFacts(model=ModelFacts(parameters=parameters))
    recording = Recording(Metadata(program=program))
    recording.step(0, 10_000, 1)
    for number in range(40):
        recording.frame(200 * number, 8, "train.py(30): predict")
        recording.operator(200 * number, 5, "aten::unsqueeze")
        recording.frame(200 * number + 10, 190, "model.py(4): forward")
        for layer in range(12):
            weight = "[1, 80], [8, 80]" if number == 0 else "[1, 8], [8, 8]"
            recording.operator(200 * number + 10 + 15 * layer, 7, "aten::linear", input_shapes=f"[{weight}, []]")
            recording.operator(200 * number + 18 + 15 * layer, 5, "aten::relu")
    return recording.trace()


FIRES: Cases = {
    "a small model again and again": lambda: whole_models(49 * 12 * 64 - 1),
    "on the host": looping,
    "on a device": on_a_device,
    "an index that counts up": lambda: indexed(8),
    "heads whose results are collected": lambda: heads(8),
    "layers that share their parameters": lambda: layered(gradients=4),
    "a loss per token": lambda: open_trace(REPOSITORY / "examples/gpt2_per_token_loss_cpu.json.gz"),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "too few repetitions": lambda: looping(31),
    "too few in each step": lambda: recorded(two_devices()),
    "too few in each of many steps": lambda: looping(20, steps=4),
    "forty equal layers": lambda: recorded(launch_bound_training()),
    "layers with parameters of their own": lambda: layered(gradients=80),
    "layers of an unknown kind": lambda: layered(gradients=0),
    "an index that counts up a few times": lambda: indexed(7),
    "a layer's index that counts up": lambda: layered(gradients=80, counted=True),
    "layers of a large model": lambda: whole_models(49 * 12 * 64),
    "long layers of an unknown model": lambda: whole_models(None),
    "too few heads": lambda: heads(7),
    "clipped gradients": lambda: looping(40, "aten::linalg_vector_norm"),
    "gradients set to zero": lambda: looping(40, "aten::zero_"),
    "a loss at once": lambda: open_trace(REPOSITORY / "tests/fixtures/gpt2_batched_loss_cpu.json.gz"),
}


def test_all_repetitions_but_one_are_saved() -> None:
    finding = the_finding(rule, looping())

    # 40 times two operators of 5 ns, and 1 ns of Python after each but the last.
    assert (finding.saving_ns_per_step, finding.saving_from) == ((40 * 10 + 79) * 39 // 40, "replayed")
    assert finding.saving_basis == "all repetitions but one"
    assert finding.title == (
        "aten::select, aten::add run 40 times in a row in each step: a loop that one batched call replaces"
    )
    assert figures_of(finding) == [
        ("repetitions in a row", 40, "count", 32),
        ("repetitions per step", 40.0, "count", None),
        ("share of the step that the loop costs", 0.479, "share", 0.02),
        ("operators in a repetition", 2, "count", None),
        ("share of the time that the same work takes at once", 0.0, "share", None),
        ("backward calls per step", 0.0, "count", None),
        ("bytes allocated per repetition", 32, "bytes", None),
        ("bytes allocated per step", 40 * 32, "bytes", None),
    ]
    assert [(interval.start_ns, interval.duration_ns, interval.what) for interval in finding.evidence.intervals] == [
        (10, 40 * 12 - 1, "40 repetitions")
    ]
    assert places_of(finding) == [("train.py", 20, "losses")]


def test_each_steps_loop_keeps_one_repetition() -> None:
    finding = the_finding(rule, looping(40, steps=3))

    assert finding.saving_ns_per_step == 3 * (40 * 10 + 79) * 39 * 3 // 120 // 3
    assert figures_of(finding)[1] == ("repetitions per step", 40.0, "count", None)


def test_with_a_device_its_work_and_the_idle_time_before_it_count() -> None:
    finding = the_finding(rule, on_a_device())

    assert figures_of(finding)[2] == ("share of the step that the loop costs", 0.8, "share", 0.02)
    # The host decides: a fortieth is left of its time in the operators and between them.
    assert finding.saving_ns_per_step == (40 * 10 + 39 * 10) * US * 39 // 40
    assert finding.saving_from == "replayed"


def test_the_backward_calls_count() -> None:
    recording = Recording()
    recording.step(0, 1000, 1)
    for number in range(40):
        recording.operator(10 * number, 5, "aten::select", sequence_number=number, forward_thread=0)
        recording.operator(
            900 - 10 * number, 8, "autograd::engine::evaluate_function: SelectBackward0",
            sequence_number=number, forward_thread=1,
        )  # fmt: skip

    finding = the_finding(rule, recording.trace())

    # 5 ns of Python after each forward call but the last, 2 ns of the engine after each backward one but the last.
    assert finding.saving_ns_per_step == (40 * (5 + 8) + 39 * 5 + 39 * 2) * 39 // 40
    assert finding.saving_basis == "all repetitions but one, forward and backward"
    assert figures_of(finding)[5] == ("backward calls per step", 40.0, "count", None)


@pytest.mark.parametrize(
    ("body", "remedy"),
    [
        (("aten::select", "aten::cross_entropy_loss"), "logits.flatten(0, 1)"),
        (("aten::select", "aten::add"), "torch.vmap(function)(tensor)"),
        (("aten::exp",), "torch.stack(pieces)"),
        (("aten::index", "aten::mean"), "index_add_(0, group, x[row])"),
        (("aten::eq", "aten::index", "aten::max"), "masked_fill(~same, -torch.inf)"),
    ],
)
def test_the_remedy_follows_from_the_body(body: tuple[str, ...], remedy: str) -> None:
    assert remedy in the_finding(rule, looping(40, *body)).remedy.code


def test_ever_longer_slices_want_a_cumulative_operator() -> None:
    recording = Recording(
        Metadata(
            program=ProgramFacts(
                works=(WorkFacts(file="model.py", function=2, kind="growing", name="score", first=5, last=5),)
            )
        )
    )
    recording.step(0, 1000, 1)
    recording.line(0, 1000, "model.py(5): forward")
    for number in range(40):
        recording.operator(20 * number, 8, "aten::slice")
        recording.operator(20 * number + 10, 8, "aten::sum")

    finding = the_finding(rule, recording.trace())

    assert places_of(finding) == [("model.py", 5, "forward")]
    assert "longer slice of score" in finding.remedy.text
    assert "cumsum" in finding.remedy.code


def test_a_model_that_is_called_again_and_again() -> None:
    finding = the_finding(rule, whole_models(12 * 64))

    assert finding.title == "25 operators run 40 times in a row in each step: a loop that one batched call replaces"
    assert places_of(finding) == [("train.py", 30, "predict")]
    assert finding.remedy.text.startswith("A model is called for one piece after the other")


def test_the_thresholds_decide() -> None:
    assert asked(rule, looping(), repetitions=41).findings == ()
    assert len(asked(rule, looping(31), repetitions=31).findings) == 1
    assert len(asked(rule, heads(7), clear_repetitions=7).findings) == 1
    assert asked(rule, looping(), share=0.467).findings[0].evidence.figures[2].threshold == 0.467
    assert asked(rule, looping(), share=0.468).findings == ()


def test_the_work_itself_remains() -> None:
    recording = Recording()
    recording.step(0, 2000, 1)
    for number in range(40):
        recording.operator(20 * number, 10, "aten::select", input_shapes="[[8, 8], [], []]")
        recording.operator(20 * number + 10, 10, "aten::add", input_shapes="[[50], [50], []]")
    # The rate that the trace shows: 2 numbers in a nanosecond. 40 additions of 100 numbers take 2000 / 1 ns.
    recording.operator(900, 100, "aten::add", input_shapes="[[200], []]")
    recording.operator(1100, 1, "aten::neg", input_shapes="[[1]]")

    finding = the_finding(rule, recording.trace())

    # Each addition cannot take longer at once than it did; the slices are gone.
    assert finding.saving_ns_per_step == (800 - 400) * 39 // 40
    assert finding.saving_basis == "all repetitions but one, without the 50% that the same work takes at once"


@pytest.mark.parametrize(
    ("trace", "code"),
    [
        (heads(8), "torch.nn.Linear(width, 3 * width)"),
        (indexed(8, "aten::linear", "aten::tanh"), "torch.nn.RNN"),
        (looping(40, "aten::mul_", "aten::add_"), "torch._foreach_mul_"),
        (indexed(8, "aten::gru_cell"), "torch.nn.RNN"),
    ],
)
def test_the_remedy_follows_from_what_the_loop_is_over(trace: Trace, code: str) -> None:
    assert code in the_finding(rule, trace).remedy.code


@pytest.mark.parametrize(
    ("frames", "loops"),
    [
        (("train.py(20): losses", "train.py(30): loss"), 1),
        (("train.py(20): losses", "torch/nn/functional.py(30): loss"), 1),
        (("train.py(20): losses", "accelerate/utils/operations.py(9): recursively", "train.py(30): loss"), 0),
        (("train.py(20): losses", "accelerate/utils/operations.py(9): recursively", "torch/functional.py(3): f"), 0),
    ],
)
def test_a_loop_inside_a_library_is_not_the_users(frames: tuple[str, ...], loops: int) -> None:
    assert len(asked(rule, called_from(*frames)).findings) == loops


@pytest.mark.parametrize("name", ["torch.distributed.ddp.reducer::copy_bucket_to_grad", "c10d::allreduce_"])
def test_what_data_parallelism_repeats_is_not_the_users(name: str) -> None:
    assert asked(rule, called_from("train.py(20): losses", "train.py(30): loss", body=name)).findings == ()


def two_loops(*bodies: tuple[str, ...], function: str = "collect") -> Trace:
    """A step of 4000 ns with a loop of 40 repetitions for each body, the first in `collect`."""
    recording = Recording()
    recording.step(0, 4000, 1)
    now = 0
    for number, body in enumerate(bodies):
        recording.frame(now, 40 * 6 * len(body), f"replay.py({9 + number}): {function if number else 'collect'}")
        for _ in range(40):
            for name in body:
                recording.operator(now, 5, name)
                now += 6
        recording.operator(now, 5, "aten::mean")
        now += 100
    return recording.trace()


CONVERTED = ("aten::empty", "aten::to", "aten::detach_")


def test_loops_of_one_function_and_one_remedy_are_one_finding() -> None:
    finding = the_finding(rule, two_loops(CONVERTED, CONVERTED[1:]))

    assert ("repetitions per step", 80.0, "count", None) in figures_of(finding)
    assert {line for _, line, _ in places_of(finding)} == {9, 10}


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param(two_loops(CONVERTED, CONVERTED[1:], function="act"), id="other functions"),
        pytest.param(two_loops(CONVERTED, ("aten::to", "aten::tanh")), id="other operators"),
    ],
)
def test_other_loops_stay_apart(trace: Trace) -> None:
    assert len(asked(rule, trace).findings) == 2
