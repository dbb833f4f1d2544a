"""debug-mode: a debugging aid is on."""

from __future__ import annotations

from stepscope.diagnosis.rules.debug_mode import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import ProgramFacts
from stepscope.whatif.build import USUAL_GAP_NS
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.recording import Recording

NODE = "autograd::engine::evaluate_function: TBackward0"


def searching(*, checks: int = 4, slow: int = 50, check: int = 10) -> Trace:
    """One step of 1000 ns: four forward operators of `slow` ns, their backward nodes, and in these a transposition of
    10 ns; the first nodes are searched for NaN."""
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "train.py(20): step")
    for number in range(4):
        recording.operator(60 * number, slow, "aten::t", sequence_number=number, forward_thread=0)
        begin = 900 - 100 * number
        recording.operator(begin, 80, NODE, sequence_number=number, forward_thread=1)
        recording.operator(begin + 5, 10, "aten::t")
        if number < checks:
            recording.operator(begin + 30, check, "aten::isnan")
            recording.operator(begin + 50, 2, "aten::any")
    return recording.trace()


def blocking(*, call: int = 60_000, named: bool = True, name: str = "cudaLaunchKernel") -> Trace:
    """One step of ten kernels of 50 us, each launched by a call that waits for it, and 20 us of Python between."""
    environment = {"CUDA_LAUNCH_BLOCKING": "1"} if named else {}
    recording = Recording(Metadata(program=ProgramFacts(environment=environment)))
    recording.step(0, 800_000, 1)
    recording.frame(0, 800_000, "train.py(20): step")
    for number in range(10):
        begin = 80_000 * number
        recording.launch(begin, call, number + 1, name=name)
        recording.work(begin + 8_000, 50_000, "gemm", number + 1)
    return recording.trace()


def filling(duration: int = 100) -> Trace:
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "train.py(20): step")
    recording.operator(100, duration + 50, "aten::empty")
    recording.operator(120, duration, "aten::fill_")
    recording.operator(500, 300, "aten::zero_")
    recording.operator(510, 280, "aten::fill_")
    return recording.trace()


FIRES: Cases = {"anomaly detection": searching, "blocking launches": blocking, "deterministic filling": filling}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "one node searched by the program itself": lambda: searching(checks=1),
    "launches that do not wait": lambda: blocking(call=5_000),
    "another runtime's calls": lambda: blocking(name="runFunction"),
    "little filling": lambda: filling(19),
}


def test_tracebacks_and_searching_count() -> None:
    finding = the_finding(rule, searching())

    # The same operator takes 10 ns in the backward pass.
    assert finding.saving_ns_per_step == 4 * (50 - 10) + 4 * (10 + 2)
    assert finding.title == "autograd's anomaly detection is on and takes 21% of the step"
    assert figures_of(finding) == [
        ("share of the step that the aid costs", 0.208, "share", 0.02),
        ("autograd nodes searched for NaN", 1.0, "share", 0.5),
        ("searching for NaN, per step", 48, "ns", None),
        ("tracebacks of the forward pass, per step", 160, "ns", None),
    ]
    assert places_of(finding) == [("train.py", 20, "step")]
    assert finding.remedy.code.startswith("torch.autograd.set_detect_anomaly(False)")


def test_without_blocking_the_longer_of_host_and_device_remains() -> None:
    finding = the_finding(rule, blocking())

    # Of 800 us the host needs 300 us outside the waits (10 us for each launch), and the device works 500 us, with the
    # pause that a queue usually makes between two kernels.
    assert finding.saving_ns_per_step == 300_000 - 9 * USUAL_GAP_NS
    assert (
        finding.title
        == "the host waits for each kernel it launches (CUDA_LAUNCH_BLOCKING), which costs 38% of the step"
    )
    assert finding.confidence == "medium"
    assert finding.remedy.code == "unset CUDA_LAUNCH_BLOCKING"


def test_blocking_is_seen_without_the_environment() -> None:
    assert the_finding(rule, blocking(named=False)).confidence == "low"


def test_only_what_fills_new_tensors_counts() -> None:
    finding = the_finding(rule, filling())

    assert finding.saving_ns_per_step == 100
    assert figures_of(finding)[1] == ("tensors filled per step", 1.0, "count", None)


def test_the_thresholds_decide() -> None:
    assert asked(rule, searching(), share=0.21).findings == ()
    assert len(asked(rule, searching(checks=2)).findings) == 1
    assert asked(rule, searching(checks=2), checked=0.51).findings == ()
