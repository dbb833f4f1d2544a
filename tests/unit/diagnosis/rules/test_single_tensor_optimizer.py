"""single-tensor-optimizer: the optimizer updates parameters one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepscope.diagnosis.rules.single_tensor_optimizer import RULE as rule
from stepscope.trace import Trace
from stepscope.trace.program_facts import FunctionFacts, OperationFacts, ProgramFacts
from tests.simulator import Machine
from tests.simulator.device import Queue
from tests.simulator.host import Host
from tests.simulator.programs import launch_bound_training, single_tensor_optimizer
from tests.unit.diagnosis.rules.cases import (
    US,
    Cases,
    asked,
    busy_device,
    empty_trace,
    figures_of,
    layers,
    places_of,
    recorded,
    the_finding,
    training,
)
from tests.unit.recording import Recording


def stepping(operator: str = "aten::add_", kernel: str = "elementwise", parameters: int = 120, us: int = 2) -> Machine:
    def step(host: Host, queue: Queue) -> None:
        layers(host, queue, kernel_us=40)
        with host.optimizer_step():
            for _ in range(parameters):
                with host.operator(operator, before_ns=8 * US):
                    host.launch(kernel, queue, us * US)

    return training(step)


def by_hand(name: str = "AdamW") -> Trace:
    """100 launches in the optimizer, each 3 us late, 2 us on the way, for 5 us of work, in a step of 1000 us."""
    recording = Recording()
    recording.step(0, 1000 * US, 1)
    recording.frame(0, 1000 * US, "train.py(12): step")
    recording.annotation(0, 1000 * US, f"Optimizer.step#{name}.step")
    for number in range(100):
        recording.operator((10 * number + 2) * US, 6 * US, "aten::add_")
        recording.launch((10 * number + 3) * US, 1 * US, 101 + number)
        recording.work((10 * number + 5) * US, 5 * US, "elementwise", 101 + number)
    return recording.trace()


def on_the_host(*names: str, optimizer: str = "AdamW", tensors: int = 10) -> Trace:
    """In 1000 ns an update of tensors of 5 numbers, by operators of 4 ns with 1 ns of Python after each."""
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "train.py(12): step")
    recording.annotation(0, 900, f"Optimizer.step#{optimizer}.step")
    now = 0
    for _ in range(tensors):
        for name in names or ("mul_", "lerp_", "mul_", "addcmul_", "sqrt", "div", "add_", "addcdiv_"):
            recording.operator(now, 4, f"aten::{name}", input_shapes="[[5], []]")
            now += 5
    return recording.trace()


FIRES: Cases = {
    "on the host": on_the_host,
    "many parameters": lambda: recorded(single_tensor_optimizer(parameters=200)),
    "by hand": by_hand,
    "an unknown optimizer": lambda: by_hand("Shampoo"),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "few parameters": lambda: recorded(single_tensor_optimizer()),
    "no optimizer": lambda: recorded(launch_bound_training()),
    "foreach": lambda: recorded(stepping("aten::_foreach_add_")),
    "fused": lambda: recorded(stepping("aten::_fused_adamw_")),
    "multi tensor kernels": lambda: recorded(stepping(kernel="void at::native::multi_tensor_apply_kernel<...>")),
    "fused on the host": lambda: on_the_host("_fused_adamw_"),
    "foreach on the host": lambda: on_the_host("_foreach_add_"),
    "an unknown optimizer on the host": lambda: on_the_host(optimizer="Shampoo"),
    "a small part of the step on the host": lambda: on_the_host(tensors=1),
    "large parameters": lambda: recorded(stepping(us=400)),
}


def busy(optimizer: str, names: tuple[str, ...], *, shapes: bool = True) -> Trace:
    """104 kernels of the optimizer without idle time: 8 of 1 us and 96 of 51 us, which work for 50 us.

    The host launches them in a hundredth of the time and waits.
    """
    recording = Recording()
    recording.step(0, 5_500 * US, 1)
    recording.annotation(0, 5_500 * US, f"Optimizer.step#{optimizer}.step")
    now = 5 * US
    for number in range(104):
        tensors = "[8], [8], [8]" if names[number % len(names)].startswith("addc") else "[8], [8]"
        name = f"aten::{names[number % len(names)]}"
        recording.operator(500 * number, 400, name, input_shapes=f"[{tensors}, []]" if shapes else None)
        recording.launch(500 * number, 100, 101 + number)
        duration = (1 if number < 8 else 51) * US
        recording.work(now, duration, "elementwise", 101 + number)
        now += duration
    recording.launch(60 * US, now - 60 * US, 100, name="cudaDeviceSynchronize", kind="synchronise")
    return recording.trace()


def test_the_saving_is_idle_time_and_what_each_kernel_takes_at_least() -> None:
    finding = the_finding(rule, by_hand())

    # The host decides: 100 operators of 6 us and the pauses of 4 us between them become what collecting 100 tensors
    # takes, one and a half overheads of 1.9 us each.
    assert (finding.saving_ns_per_step, finding.saving_from) == ((100 * 6 + 99 * 4 - 285) * US, "replayed")
    assert finding.title == "the optimizer launches 100 kernels a step, one parameter at a time"
    assert figures_of(finding) == [
        ("launches in the optimizer per step", 100.0, "count", 100),
        # Of a kernel 3 us are there whatever it does; three are left of them.
        ("share of the step lost in the optimizer", (100 * 5 + 97 * 3) / 1000, "share", 0.01),
        ("time of its kernels per step", 500 * US, "ns", None),
        ("median length of its kernels", 5.0 * US, "ns", None),
    ]
    assert places_of(finding) == [("train.py", 12, "step")]


def test_a_simulated_machine() -> None:
    finding = the_finding(rule, recorded(single_tensor_optimizer(parameters=200)))

    # The host decides: 200 operators of 16 us become what collecting 200 tensors takes, 1.5 overheads of 1.9 us each.
    assert finding.saving_ns_per_step == 200 * (16_000 - 2_850)


@pytest.mark.parametrize(
    ("trace", "saving"),
    [
        # 104 tensors need three kernels; SGD's add_ makes three passes, as a fused one does.
        (busy("SGD", ("add_",)), 101),
        (busy("SGD", ("add_",), shapes=False), 101),
        # 26 tensors need one; four operators of 3, 3, 4 and 4 passes do what a fused update does in 7.
        (busy("AdamW", ("lerp_", "mul_", "addcmul_", "addcdiv_")), 103 + 96 * 50 // 2),
        (busy("AdamW", ("lerp_", "mul_", "addcmul_", "addcdiv_"), shapes=False), 103),
    ],
)
def test_what_the_kernels_do_remains(trace: Trace, saving: int) -> None:
    # Each of the 104 kernels is scaled, and rounded to a nanosecond.
    assert the_finding(rule, trace).saving_ns_per_step == pytest.approx(saving * US, abs=104)


def test_on_the_host_a_fused_update_remains() -> None:
    finding = the_finding(rule, on_the_host())

    # 80 operators of 4 ns and 1 ns after all but the last; 1.5 overheads of 4 ns for each of 10 tensors remain, and
    # nothing but overhead was measured.
    assert (finding.saving_ns_per_step, finding.saving_from) == (80 * 4 + 79 - 60, "replayed")
    assert finding.title == "AdamW runs 80 operators a step, 40% of it; a fused update would be one"
    assert figures_of(finding) == [
        ("share of the step that a fused update would save, without a device", 0.339, "share", 0.05),
        ("share of the step in the optimizer", 0.399, "share", None),
        ("share of it that a fused update would still take", pytest.approx(0.15, rel=0.01), "share", None),
        ("operators in the optimizer per step", 80.0, "count", None),
        ("tensors updated per step", 10.0, "count", None),
    ]
    assert places_of(finding) == [("train.py", 12, "step")]
    assert "fused=True" in finding.remedy.code
    assert asked(rule, on_the_host(), share_on_cpu=0.34).findings == ()


def test_on_the_host_what_is_moved_remains() -> None:
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.annotation(0, 900, "Optimizer.step#SGD.step")
    for number in range(40):
        # A parameter without numbers to speak of shows the overhead of 2 ns.
        size, length = ("[1]", 2) if number < 20 else ("[100]", 12)
        recording.operator(20 * number, length, "aten::mul_", input_shapes=f"[{size}, []]")
        recording.operator(20 * number + length, 20 - length, "aten::add_", input_shapes=f"[{size}, {size}, []]")

    finding = the_finding(rule, recording.trace())

    # 40 updates of 20 ns. Half an overhead for each, and with momentum 5 of the 5 passes that mul_ and add_ make.
    assert finding.saving_basis == "the optimizer's time without the 85% that a fused update would still take"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("AdamW", "torch.optim.AdamW(model.parameters(), ..., fused=True)"),
        ("SGD", "torch.optim.SGD(model.parameters(), ..., fused=True)"),
        ("Shampoo", "torch.compile(optimizer.step)"),
    ],
)
def test_the_remedy_names_the_optimizer_in_use(name: str, remedy: str) -> None:
    assert remedy in the_finding(rule, by_hand(name)).remedy.code


def test_the_thresholds_decide() -> None:
    assert asked(rule, by_hand(), launches=101).findings == ()
    assert asked(rule, by_hand(), share=0.99).findings == ()
    assert len(asked(rule, recorded(single_tensor_optimizer()), launches=50).findings) == 1


def test_the_line_that_makes_the_optimizer_comes_first() -> None:
    made = ("AdamW fused=True", "AdamW", "AdamW", "zip")  # the second over two lines
    program = ProgramFacts(
        operations=(OperationFacts(file="train.py", names=made),),
        functions=(FunctionFacts(file="train.py", name="configure", line=1, last=9),),
    )
    trace = on_the_host()

    finding = the_finding(rule, replace(trace, metadata=replace(trace.metadata, program=program)))

    first = finding.where[0]
    assert (first.file, first.line, first.function, first.exact_line) == ("train.py", 2, "configure", True)
