"""repeated-casts: tensors are converted to another number type and back."""

from __future__ import annotations

from stepscope.diagnosis.rules.repeated_casts import RULE as rule
from stepscope.trace import Trace
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.recording import Recording
from tests.unit.shaped import Shaped

SHAPE = (64, 64)


def cast(step: Shaped, source: str, target: str, number: int, shape: tuple[int, ...] = SHAPE) -> None:
    """A conversion of 1,000 ns."""
    with step.inside("aten::to", 1_000, shape, types=source), \
            step.inside("aten::_to_copy", 900, shape, types=source, number=number):  # fmt: skip
        step.call("aten::copy_", 800, shape, shape, types=[target, source])


def casting(
    there: tuple[str, str] = ("float", "c10::BFloat16"),
    back: tuple[str, str] | None = ("c10::BFloat16", "float"),
    *,
    layers: int = 2,
    wide: int = 0,
    shape: tuple[int, ...] = SHAPE,
) -> Trace:
    """In each layer a conversion and one back, whose gradients are converted in 1,500 ns; a step of 100,000 ns."""
    step = Shaped()
    for layer in range(layers):
        cast(step, *there, number=10 * layer, shape=shape)
        if wide:
            step.call("aten::mul", wide, shape, types="double")
        if back:
            cast(step, *back, number=10 * layer + 1, shape=shape)
    for layer in reversed(range(layers)):
        step.gradient("ToCopyBackward0", 1_500, 10 * layer + 1)
        step.gradient("ToCopyBackward0", 1_500, 10 * layer)
    return step.trace()


def serving(shape: str = "[4096, 1024]", *, iterations: int = 3, converted: int = 3) -> Trace:
    """Decoding iterations of 100 ns, some of which dequantise two weights in 20 ns each."""
    recording = Recording()
    for number in range(iterations):
        begin = 200 * number
        recording.annotation(begin, 100, "step[DECODE bs=4]")
        for start in (0, 30) if number < converted else ():
            recording.operator(begin + start, 20, "torchao::dequantize_affine", input_shapes=f"[{shape}, [4096, 8]]")
            recording.operator(begin + start + 2, 15, "aten::_to_copy", input_shapes=f"[{shape}]")
        recording.operator(begin + 60, 40, "aten::mm")
    return recording.trace()


FIRES: Cases = {
    "weights of each token": serving,
    "bf16": casting,
    "double, with little computed in it": lambda: casting(("float", "double"), ("double", "float"), wide=100),
}
SILENT: Cases = {
    "weights of one iteration": lambda: serving(converted=1),
    "the batch's own values": lambda: serving("[4, 152000]"),
    "small weights": lambda: serving("[64, 64]"),
    "one iteration": lambda: serving(iterations=1, converted=1),
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "only there": lambda: casting(back=None),
    "further": lambda: casting(("c10::Half", "float"), ("float", "double")),
    "once": lambda: casting(layers=1),
    "small tensors": lambda: casting(shape=(3, 5)),
    "computed in double, of which low-precision tells": lambda: casting(
        ("float", "double"), ("double", "float"), wide=9_000
    ),
}


def test_conversions_there_and_back_and_their_gradients_are_saved() -> None:
    finding = the_finding(rule, casting())

    assert finding.saving_ns_per_step == 4 * (1_000 + 1_500)
    assert finding.title == "tensors are converted from float32 to bfloat16 and back 2 times a step: 10% of its time"
    assert figures_of(finding) == [
        ("share of the step in conversions to and fro", 0.1, "share", 0.02),
        ("conversions to and fro per step", 2.0, "count", 2),
        ("conversions of all kinds per step", 4.0, "count", None),
    ]
    assert places_of(finding) == [("train.py", 20, "step")]
    assert "batch.to(torch.bfloat16)" in finding.remedy.code


def test_the_thresholds_decide() -> None:
    assert len(asked(rule, casting(), share=0.1).findings) == 1
    assert asked(rule, casting(), share=0.11).findings == ()
    assert len(asked(rule, casting(layers=1), pairs=1).findings) == 1
    assert asked(rule, casting(), pairs=3).findings == ()


def test_the_narrower_type_is_kept() -> None:
    finding = the_finding(rule, casting(("c10::BFloat16", "float"), ("float", "c10::BFloat16")))

    assert finding.title.startswith("tensors are converted from bfloat16 to float32 and back")
    assert "model.to(torch.bfloat16)" in finding.remedy.code


def test_a_normalisation_in_a_wider_type_belongs_to_fusible_chain() -> None:
    step, row = Shaped(), (64, 1)
    for layer in range(2):
        cast(step, "c10::BFloat16", "float", 10 * layer)
        step.call("aten::pow", 100, SHAPE)
        step.call("aten::mean", 100, SHAPE)
        step.call("aten::add", 100, row)
        step.call("aten::rsqrt", 100, row)
        step.call("aten::mul", 100, SHAPE, row)
        cast(step, "float", "c10::BFloat16", 10 * layer + 1)
        step.call("aten::linear", 500, SHAPE)

    assert asked(rule, step.trace()).findings == ()


def test_weights_that_are_converted_for_each_token_cost_their_conversion() -> None:
    finding = the_finding(rule, serving())

    assert ("conversions in a decoding iteration", 2.0, "count", None) in figures_of(finding)
    assert ("elements converted in each", 2 * 4096 * 1024, "count", None) in figures_of(finding)
    assert finding.saving_ns_per_step == 40
