"""allocator-retries: the driver is asked for memory during the steps."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.allocator_retries import RULE as rule
from stepscope.trace import Trace
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


def asking(
    names: tuple[str, ...] = ("cudaFree", "cudaMalloc"),
    *,
    steps: int = 3,
    call_ns: int = 100,
    first_only: bool = False,
    marked: bool = True,
) -> Trace:
    """Steps of 1000 us in which the device waits while the host is in these calls, one after the other."""
    recording = Recording(unit_ns=US)
    number = 0
    for step in range(steps):
        begin = 1000 * step
        if marked:
            recording.step(begin, 1000, step)
        recording.frame(begin, 1000, "train.py(20): step")
        recording.launched(begin + 10, begin + 20, 80, "gemm", 1000 + step)
        recording.operator(begin + 100, 100 + len(names) * call_ns, "aten::empty")
        for place, name in enumerate(names if step == 0 or not first_only else ()):
            number += 1
            recording.launch(begin + 100 + place * call_ns, call_ns, 5000 + number, name=name, kind="allocate")
        end = begin + 100 + len(names) * call_ns
        recording.launched(end, end + 2, begin + 1000 - end - 2, "gemm", 2000 + step)
    return recording.trace()


FIRES: Cases = {
    "given back and asked for again": asking,
    "only asked for": lambda: asking(("cudaMalloc",)),
    "pinned memory": lambda: asking(("cudaHostAlloc",)),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "no such calls": lambda: asking(()),
    "short calls": lambda: asking(call_ns=4),
    "first allocations in a recording without steps": lambda: asking(("cudaMalloc",) * 3, steps=1, marked=False),
}


def test_the_saving_is_the_devices_idle_time() -> None:
    finding = the_finding(rule, asking())

    assert finding.title == "the driver is asked for memory once a step, and gives memory back in between"
    assert finding.saving_ns_per_step == 200 * US
    assert finding.saving_from == "replayed"
    assert figures_of(finding) == [
        ("share of the step that the device waits for the allocator", 0.2, "share", 0.01),
        ("calls that ask for memory, per step", 1.0, "count", None),
        ("calls that give memory back, per step", 1.0, "count", None),
        ("of them before others ask for it again, per step", 1.0, "count", None),
        ("the host's time in them, per step", 200 * US, "ns", None),
        ("steps with such calls", 3, "count", None),
    ]
    assert (finding.severity, finding.confidence) == ("high", "medium")
    assert places_of(finding) == [("train.py", 20, "step")]


def test_calls_in_one_step_may_be_its_first() -> None:
    assert the_finding(rule, asking(first_only=True)).confidence == "low"


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (("cudaFree", "cudaMalloc"), "no empty_cache() in the loop"),
        (("cudaMalloc",), "expandable_segments:True"),
        (("cudaHostAlloc",), "torch.empty(shape, pin_memory=True)"),
    ],
)
def test_the_remedy_follows_from_the_calls(names: tuple[str, ...], code: str) -> None:
    assert code in the_finding(rule, asking(names)).remedy.code


def test_the_threshold_decides() -> None:
    assert asked(rule, asking(), share=0.21).findings == ()
    assert len(asked(rule, asking(call_ns=4), share=0.005).findings) == 1


@pytest.mark.parametrize(
    ("names", "times"), [(("cudaFree", "cudaMalloc"), "once"), (("cudaFree", *["cudaMalloc"] * 2), "2 times")]
)
def test_without_steps_nothing_is_said_of_a_step(names: tuple[str, ...], times: str) -> None:
    finding = the_finding(rule, asking(names, steps=1, marked=False))

    assert finding.title.startswith(f"the driver is asked for memory {times}, ")
