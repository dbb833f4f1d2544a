"""loop-in-step: a Python loop runs small operators many times."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.diagnosis.rules import loop_in_step as rule
from stepscope.readers import open_trace
from stepscope.trace import Trace
from tests.simulator.programs import launch_bound_training, two_devices
from tests.unit.recording import Recording
from tests.unit.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, recorded, the_finding

REPOSITORY = Path(__file__).resolve().parents[3]


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


def on_a_device() -> Trace:
    """40 repetitions that each cost the device 5 ns of work and 15 ns of idle time before it."""
    recording = Recording()
    recording.step(0, 1000, 1)
    for number in range(40):
        recording.operator(20 * number + 5, 10, "aten::add")
        recording.launched(20 * number + 10, 20 * number + 15, 5, "add", 101 + number)
    return recording.trace()


FIRES: Cases = {
    "on the host": looping,
    "on a device": on_a_device,
    "forty equal layers": lambda: recorded(launch_bound_training()),
    "a loss per token": lambda: open_trace(REPOSITORY / "src/stepscope/data/gpt2_per_token_loss_cpu.json.gz"),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "too few repetitions": lambda: looping(31),
    "too few in each step": lambda: recorded(two_devices()),
    "too few in each of many steps": lambda: looping(20, steps=4),
    "a loss at once": lambda: open_trace(REPOSITORY / "tests/fixtures/gpt2_batched_loss_cpu.json.gz"),
}


def test_all_repetitions_but_one_are_saved() -> None:
    finding = the_finding(rule, looping())

    assert finding.saving_ns_per_step == 40 * 10 * 39 // 40
    assert finding.saving_basis == "all repetitions but one"
    assert finding.title == (
        "aten::select, aten::add run 40 times in a row in each step: a loop that one batched call replaces"
    )
    assert figures_of(finding) == [
        ("repetitions in a row", 40, "count", 32),
        ("repetitions per step", 40.0, "count", None),
        ("share of the step that the loop costs", 0.4, "share", 0.02),
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

    assert finding.saving_ns_per_step == 39 * 10
    assert figures_of(finding)[1] == ("repetitions per step", 40.0, "count", None)


def test_with_a_device_its_work_and_the_idle_time_before_it_count() -> None:
    # The first piece of work has no idle time before it.
    assert the_finding(rule, on_a_device()).saving_ns_per_step == (40 * 5 + 39 * 15) * 39 // 40


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

    assert finding.saving_ns_per_step == 40 * (5 + 8) * 39 // 40
    assert finding.saving_basis == "all repetitions but one, forward and backward"
    assert figures_of(finding)[3] == ("backward calls per step", 40.0, "count", None)


@pytest.mark.parametrize(
    ("body", "remedy"),
    [
        (("aten::select", "aten::cross_entropy_loss"), "logits.flatten(0, 1)"),
        (("aten::select", "aten::add"), "torch.vmap(function)(tensor)"),
        (("aten::mm",), "torch.stack(pieces)"),
    ],
)
def test_the_remedy_follows_from_the_body(body: tuple[str, ...], remedy: str) -> None:
    assert remedy in the_finding(rule, looping(40, *body)).remedy.code


def test_the_thresholds_decide() -> None:
    assert asked(rule, looping(), repetitions=41).findings == ()
    assert len(asked(rule, looping(31), repetitions=31).findings) == 1
    assert len(asked(rule, recorded(two_devices()), repetitions=12).findings) == 1
    assert asked(rule, looping(), share=0.4).findings[0].evidence.figures[2].threshold == 0.4
    assert asked(rule, looping(), share=0.41).findings == ()
