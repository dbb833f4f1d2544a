"""memory-fragmentation: reserved memory cannot be used."""

from __future__ import annotations

from stepscope.diagnosis.rules.memory_fragmentation import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
from stepscope.trace.program_facts import ProgramFacts
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.recording import Recording

MIB = 2**20


def holding(
    allocated: int = 60,
    reserved: int | None = 90,
    capacity: int | None = 100,
    *,
    asked_for: int | None = None,
    setting: str = "",
) -> Trace:
    """A device whose allocator holds so many MiB; `asked_for` could not be had."""
    device = Device("0", memory_bytes=None if capacity is None else capacity * MIB)
    program = ProgramFacts(environment={"PYTORCH_CUDA_ALLOC_CONF": setting})
    recording = Recording(Metadata(devices=(device,), program=program))
    lane = recording.allocator()
    more = {"total_reserved": 0 if reserved is None else reserved * MIB, "call_stack": "model.py(31): forward"}
    recording.allocation(20, allocated * MIB, lane, address=1, total_allocated=allocated * MIB, **more)
    if asked_for is not None:
        recording.out_of_memory(30, asked_for * MIB, 0, lane, "model.py(40): forward")
    return recording.trace()


FIRES: Cases = {
    "little is left": holding,
    "a request failed": lambda: holding(capacity=None, asked_for=20),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "nearly all is used": lambda: holding(80),
    "much is left": lambda: holding(capacity=200),
    "size unknown": lambda: holding(capacity=None),
    "reserve unknown": lambda: holding(reserved=None),
    "too little in any case": lambda: holding(capacity=None, asked_for=40),
}


def test_what_nobody_uses_at_the_peak() -> None:
    finding = the_finding(rule, holding())

    assert finding.title == (
        "30.0 MiB of the 90.0 MiB that the allocator holds of device 0 are in pieces that nobody uses"
    )
    assert (finding.severity, finding.saving_ns_per_step) == ("note", 0)
    assert figures_of(finding) == [
        ("share of the reserved memory that was unused", 30 / 90, "share", 0.2),
        ("memory held by the allocator", 90 * MIB, "bytes", None),
        ("memory in use", 60 * MIB, "bytes", None),
        ("memory in pieces that nobody uses", 30 * MIB, "bytes", None),
        ("share of the device's memory that the allocator held", 0.9, "share", 0.7),
    ]
    assert places_of(finding) == [("model.py", 31, "forward")]
    assert finding.remedy.code == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py"


def test_a_request_that_would_have_fit() -> None:
    finding = the_finding(rule, holding(capacity=None, asked_for=20))

    assert finding.title.endswith("that nobody uses, and a request for 20.0 MiB failed")
    assert figures_of(finding)[4:] == [("memory asked for in one piece", 20 * MIB, "bytes", None)]


def test_segments_that_grow_already_need_another_remedy() -> None:
    finding = the_finding(rule, holding(setting="expandable_segments:True"))

    assert finding.remedy.code.startswith("batch = pad_to(")


def test_the_thresholds_decide() -> None:
    assert asked(rule, holding(), share=0.34).findings == ()
    assert asked(rule, holding(), reserved=0.91).findings == ()
    assert len(asked(rule, holding(capacity=200), reserved=0.4).findings) == 1
