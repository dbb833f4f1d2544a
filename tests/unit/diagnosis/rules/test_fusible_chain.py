"""fusible-chain: element-wise operators run one by one where one fused function would do."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.fusible_chain import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import OperationFacts, ProgramFacts
from tests.unit.diagnosis.rules.cases import (
    US,
    Cases,
    asked,
    busy_device,
    empty_trace,
    figures_of,
    places_of,
    the_finding,
)
from tests.unit.recording import Recording

FULL, ROW = "[100]", "[1]"


def chained(
    names: tuple[str, ...],
    repetitions: int = 1,
    *,
    between: str = "aten::linear",
    step_ns: int = 2000,
    unit_ns: int = 1,
) -> Trace:
    """Chains over 100 numbers; operators take 1 ns for each number they read or write, and 3 ns of Python follow."""
    recording = Recording(unit_ns=unit_ns)
    recording.step(0, step_ns, 1)
    recording.frame(0, step_ns, "model.py(7): activation")
    now = 0
    for _ in range(repetitions):
        for name in names:
            two = name.startswith("2")
            shapes = f"[{FULL}, {FULL}]" if two else f"[{FULL}, []]"
            recording.operator(now, 300 if two else 200, f"aten::{name.lstrip('2')}", input_shapes=shapes)
            now += 303 if two else 203
        recording.operator(now, 50, between, input_shapes="[[1, 100], [100, 100], [100]]")
        now += 53
    return recording.trace()


def written(operations: str) -> Trace:
    """Three operators on line 9, whose statement makes such operations itself."""
    recording = Recording(
        Metadata(program=ProgramFacts(operations=(OperationFacts(file="model.py", names=(*[""] * 8, operations)),)))
    )
    recording.step(0, 1000, 1)
    recording.line(0, 1000, "model.py(9): sample")
    for number, name in enumerate(("logsumexp", "sub", "exp")):
        recording.operator(200 * number, 190, f"aten::{name}", input_shapes=f"[{FULL}, {FULL}]")
    return recording.trace()


def normalised(average: str) -> Trace:
    """Images less an average of this shape, divided by a deviation of it."""
    recording, whole = Recording(unit_ns=US), "[4, 3, 64, 64]"
    recording.step(0, 2000, 1)
    for number, name in enumerate(("mean", "std", "sub", "div")):
        shapes = f"[{whole}, {average}]" if number > 1 else f"[{whole}]"
        recording.operator(200 * number, 190, f"aten::{name}", input_shapes=shapes)
    return recording.trace()


def with_backward() -> Trace:
    """A sigmoid and a product of 200 and 300 ns, and their backward pass of 900 ns."""
    recording = Recording()
    recording.step(0, 4000, 1)
    recording.operator(0, 200, "aten::sigmoid", input_shapes=f"[{FULL}]", sequence_number=1, forward_thread=0)
    recording.operator(200, 300, "aten::mul", input_shapes=f"[{FULL}, {FULL}]", sequence_number=2, forward_thread=0)
    recording.operator(600, 100, "aten::mean")
    for number, length in ((2, 600), (1, 300)):
        begin = 2800 - 900 * number
        recording.operator(
            begin, length, f"autograd::engine::evaluate_function: N{number}Backward0",
            sequence_number=number, forward_thread=1,
        )  # fmt: skip
    return recording.trace()


def on_a_device() -> Trace:
    """Five chains of three kernels of 20 us, with 10 us of idling before each but the very first."""
    recording = Recording(unit_ns=US)
    recording.step(0, 600, 1)
    correlation = 100
    for chain in range(5):
        for place, name in enumerate(("mul", "add", "clamp")):
            begin = 10 + 90 * chain + 30 * place
            recording.operator(begin - 8, 6, f"aten::{name}", input_shapes="[[5], []]")
            recording.launched(begin - 6, begin, 20, name, correlation)
            correlation += 1
        recording.operator(90 * chain + 79, 2, "aten::linear")
    return recording.trace()


FIRES: Cases = {
    "a known function, once": lambda: chained(("sigmoid", "2mul")),
    "an unknown one, five times": lambda: chained(("mul", "add", "clamp"), 5, step_ns=10_000, unit_ns=US),
    "with its backward pass": with_backward,
    "three operators of a statement that makes three": lambda: written("sub exp"),
    "on a device": on_a_device,
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "an unknown one, four times": lambda: chained(("mul", "add", "clamp"), 4, step_ns=10_000, unit_ns=US),
    "one that takes no longer than a compiled function": lambda: chained(("mul", "add", "clamp"), 5, step_ns=10_000),
    "a library's": lambda: written("sum squeeze sub"),
    "two operators": lambda: chained(("add", "relu"), 8, step_ns=10_000, unit_ns=US),
    "the same operator again and again": lambda: chained(("add",) * 9, 6, step_ns=20_000),
    "a little": lambda: chained(("sigmoid", "2mul"), step_ns=100_000),
    "a loop": lambda: chained(("mul", "add", "clamp"), 40, between="aten::exp", step_ns=60_000),
}


def test_what_a_fused_function_moves_and_calculates_remains() -> None:
    finding = the_finding(rule, chained(("sigmoid", "2mul")))

    # 500 ns of operators and 3 ns between them. To read and write 100 numbers takes 200 ns at 1 ns each, and of the
    # pause, half a chain's.
    assert finding.saving_ns_per_step == 503 - 201
    assert finding.saving_basis.startswith("the operators' time")
    assert "without the 40%" in finding.saving_basis
    assert finding.title == "2 operators one after the other (sigmoid, mul), once a step: F.silu() does it at once"
    assert figures_of(finding) == [
        ("share of the step that fusing would save", 0.151, "share", 0.02),
        ("chains per step", 1.0, "count", None),
        ("operators in a chain", 2, "count", None),
        ("forward operators per step", 500, "ns", None),
        ("backward operators per step", 0, "ns", None),
        ("numbers read and written by a chain", 500, "count", None),
        ("share of the time that a fused function would still take", pytest.approx(0.3996, rel=1e-3), "share", None),
        ("by a fused function", 200, "count", None),
    ]
    assert places_of(finding) == [("model.py", 7, "activation")]
    assert "torch.nn.functional.silu(x)" in finding.remedy.code


def test_the_backward_pass_counts() -> None:
    finding = the_finding(rule, with_backward())

    # 500 ns forward and 900 backward; 200 ns forward and, with the gradient, 300 ns backward remain.
    assert finding.saving_ns_per_step == 1400 - 500
    assert finding.saving_basis == "forward and backward, without the 36% that a fused function would still take"


def test_on_a_device_the_idle_time_of_one_launch_remains() -> None:
    finding = the_finding(rule, on_a_device())

    # 15 kernels of 20 us; all wait 10 us. Two numbers of three are moved no more, two launches of three
    # are gone: 5 * 20 us of work, a third of 150 us of idling.
    assert figures_of(finding)[0][1] == pytest.approx((300 + 150 - 100 - 150 / 3) / 600, abs=1e-5)
    # The host runs a third of its operators of 6 us and of the 24 us between two of them; then the device waits for it.
    assert finding.saving_ns_per_step == (15 * 6 + 10 * 24) * US * 2 // 3
    assert "@torch.compile" in finding.remedy.code


@pytest.mark.parametrize(
    ("average", "code"),
    [
        ("[4, 3, 64, 1]", "layer_norm(x, x.shape[-1:],"),
        ("[4, 3, 1, 1]", "layer_norm(x, x.shape[-2:],"),
        ("[]", "layer_norm(x, x.shape,"),
        ("[1, 3, 1, 1]", "BatchNorm"),
        ("[64]", "BatchNorm"),
    ],
)
def test_a_normalisation_is_over_the_dimensions_that_were_averaged(average: str, code: str) -> None:
    assert code in the_finding(rule, normalised(average)).remedy.code


@pytest.mark.parametrize(
    ("names", "function"),
    [
        (("mul", "pow", "mul", "2add", "mul", "tanh", "add", "2mul"), "F.gelu"),
        (("div", "erf", "add", "2mul", "mul"), "F.gelu"),
        (("sigmoid", "2mul"), "F.silu"),
        (("mean", "var", "sub", "add", "sqrt", "div", "mul", "add"), "F.layer_norm"),
        (("pow", "mean", "add", "rsqrt", "2mul", "mul"), "one compiled function"),
        (("amax", "sub", "exp", "sum", "div"), "torch.softmax"),
        (("softmax", "log"), "F.log_softmax"),
        (("rand_like", "gt", "2mul", "div"), "F.dropout"),
        (("mul_", "2add_", "mul_", "2addcmul_", "sqrt", "add_", "2addcdiv_"), "an optimizer with fused=True"),
    ],
)
def test_functions_that_are_known(names: tuple[str, ...], function: str) -> None:
    assert function in the_finding(rule, chained(names, step_ns=10_000, unit_ns=US)).title


@pytest.mark.parametrize(
    ("settings", "count"), [({"share": 0.151}, 1), ({"share": 0.152}, 0), ({"repetitions": 9, "operators": 9}, 1)]
)
def test_the_thresholds_decide(settings: dict[str, float], count: int) -> None:
    assert len(asked(rule, chained(("sigmoid", "2mul")), **settings).findings) == count


def test_an_unknown_chain_must_come_often_and_be_long() -> None:
    trace = chained(("mul", "add", "clamp"), 5, step_ns=10_000, unit_ns=US)

    assert asked(rule, trace, repetitions=6).findings == ()
    assert asked(rule, trace, operators=4).findings == ()
