"""checkpoint-in-step: steps wait for checkpoints."""

from __future__ import annotations

from stepscope.diagnosis.rules.checkpoint_in_step import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import ProgramFacts
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


def saving(*, steps: int = 4, holding: int = 2, duration: int = 300) -> Trace:
    """Steps of 1000 ns, the first of which save a checkpoint."""
    program = ProgramFacts(process={"checkpoint_bytes": 8000})
    recording = Recording(Metadata(program=program))
    for step in range(steps):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.frame(begin, 1000, "train.py(20): step")
        recording.operator(begin, 100, "aten::mm")
        if step < holding:
            recording.annotation(begin + 400, duration, "stepscope.checkpoint#torch.save")
            recording.operator(begin + 500, 50, "aten::copy_")
    return recording.trace()


def in_a_stack() -> Trace:
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "train.py(20): step")
    recording.frame(300, 500, "torch/serialization.py(900): save")
    recording.operator(400, 50, "aten::copy_")
    return recording.trace()


def with_copies() -> Trace:
    """A step of 1000 us that saves a checkpoint for 300: for 100 the device copies it to the host, which waits."""
    recording = Recording(unit_ns=US)
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "train.py(20): step")
    recording.launched(10, 20, 80, "gemm", 101)
    recording.annotation(200, 300, "stepscope.checkpoint#torch.save")
    recording.operator(210, 150, "aten::copy_")
    recording.launch(220, 130, 102, name="cudaMemcpyAsync", kind="copy")
    recording.work(230, 100, "Memcpy DtoH (Device -> Pageable)", 102, kind="copy_out", bytes=4096)
    recording.launched(510, 520, 80, "gemm", 103)
    return recording.trace()


FIRES: Cases = {"named by the recorder": saving, "in a stack": in_a_stack, "with copies": with_copies}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "too short to matter": lambda: saving(holding=1, duration=79),
}


def test_its_time_and_how_often() -> None:
    finding = the_finding(rule, saving())

    assert finding.title == "15% of the step goes to checkpoints, in 2 of 4 recorded steps"
    assert finding.saving_ns_per_step == 2 * 300 // 4
    assert finding.confidence == "medium"
    assert figures_of(finding) == [
        ("share of the step lost to checkpoints", 0.15, "share", 0.02),
        ("time lost per step", 150, "ns", None),
        ("recorded steps that hold one", 2, "count", None),
        ("recorded steps", 4, "count", None),
        ("bytes written per step", 2000, "bytes", None),
    ]
    assert places_of(finding) == [("train.py", 20, "step")]
    assert "torch.distributed.checkpoint.async_save" in finding.remedy.code


def test_the_copies_of_a_checkpoint_are_gone_with_it() -> None:
    finding = the_finding(rule, with_copies())

    assert (finding.saving_from, finding.saving_ns_per_step) == ("replayed", 300 * US)


def test_one_alone_may_be_an_accident() -> None:
    assert the_finding(rule, saving(holding=1)).confidence == "low"


def test_the_threshold_decides() -> None:
    assert len(asked(rule, saving(holding=1, duration=80)).findings) == 1
    assert asked(rule, saving(), share=0.16).findings == ()
