"""Savings without the pages that only the recording made a program map."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stepscope.diagnosis.recording_costs import faults_before, fresh_bytes, without_recorded_faults
from stepscope.diagnosis.view import View
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import UnrecordedSteps
from stepscope.trace.program_facts import ProgramFacts, StepFacts
from stepscope.whatif import Change
from stepscope.whatif.changes import scaled_operators
from tests.unit.recording import Recording

US = 1_000
PAGE = 4_096
STEPS = 4


def recorded(*, warm_up: tuple[int, int] | None = (600 * US, 0), fresh: bool = True, device: bool = False) -> Trace:
    """Steps of 1000 us: a loop of 600 us that takes 200 pages, and 400 us that take 10 pages, again the same ones.

    210 pages are mapped in a step, in which the operating system takes 1.5 us for each.

    Args:
        warm_up: time and mapped pages before the recording.
        fresh: whether the loop's pages are other ones in every step.
    """
    process = {} if warm_up is None else {"warm_up_ns": warm_up[0], "warm_up_faults": warm_up[1]}
    facts: dict[str, Any] = {"duration_ns": 1000 * US, "minor_faults": 210, "thread_system_ns": 315 * US}
    steps = tuple(StepFacts(index=number, **facts) for number in range(STEPS))
    recording = Recording(Metadata(program=ProgramFacts(steps=steps, process=process)))
    for number in range(STEPS):
        begin = 1000 * US * number
        recording.step(begin, 1000 * US, number)
        recording.operator(begin, 600 * US, "aten::zeros")
        recording.operator(begin + 600 * US, 400 * US, "aten::mm")
        address = PAGE * (100 + (200 * number if fresh else 0))
        recording.allocation(begin + 10 * US, 200 * PAGE, device="cpu", address=address)
        recording.allocation(begin + 610 * US, 10 * PAGE, device="cpu", address=0)
        if device:
            recording.launched(begin + 10 * US, begin + 20 * US, 900 * US, "gemm", number + 1)
    return recording.trace()


def without_loop(view: View) -> Change:
    """No operators of the loop."""
    return scaled_operators(np.flatnonzero((view.trace.operators["name"] == "aten::zeros").to_numpy()), 0.0)


def test_a_saving_is_taken_without_the_pages_that_only_the_recording_mapped() -> None:
    view = View(recorded())

    # 810 of 840 mapped pages are new ones: 800 of the loop's at 1.5 us, 300 us of its 600 us in each step, and in the
    # first step 10 pages of the rest. What remains are 4 * 700 - 15 us, of which the loop is 4 * 300 us.
    left = 1 - 4 * 300 / (4 * 700 - 15)
    assert view.saved_ns(without_loop(view)) == round((1 - left) * 1000 * US)


def test_pages_that_other_steps_map_too_stay() -> None:
    view = View(recorded(warm_up=(1000 * US, 105)))

    # Half of the 840 pages: of 810 new ones 420 / 810 count, so that the loop keeps 600 us - 200 * 420 / 810 * 1.5 us.
    loop = 600 - 200 * (420 / 810) * 1.5
    step = loop + 400 - 10 * (420 / 810) * 1.5 / STEPS
    assert view.saved_ns(without_loop(view)) == pytest.approx(loop / step * 1000 * US, abs=2)


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param(recorded(warm_up=None), id="nothing was counted before"),
        pytest.param(recorded(warm_up=(1000 * US, 210)), id="other steps map as many"),
        pytest.param(recorded(warm_up=(50 * US, 0)), id="no step before"),
        pytest.param(recorded(device=True), id="with a device"),
        pytest.param(Trace.from_tables({}), id="empty"),
    ],
)
def test_otherwise_savings_are_replayed_as_recorded(trace: Trace) -> None:
    view = View(trace)

    assert without_recorded_faults(view.experiment) is None


def test_memory_that_is_used_again_maps_no_page() -> None:
    view = View(recorded(fresh=False))

    # Only the first step's 210 pages are new: 300 us of its loop, and 15 us of the rest.
    assert view.saved_ns(without_loop(view)) == round((4 * 600 - 300) / (4000 - 315) * 1000 * US)


def test_faults_before_the_recording_are_those_of_a_step() -> None:
    program = ProgramFacts(process={"warm_up_ns": 2100, "warm_up_faults": 50})

    assert faults_before(Metadata(program=program), 1000) == 25
    assert faults_before(Metadata(program=program), 1e6) is None
    assert faults_before(Metadata(), 1000) is None
    others = UnrecordedSteps(20, 900, 1000, 900, 7)
    assert faults_before(Metadata(program=program, unrecorded=others), 1000) == 7  # counted in many steps


def test_bytes_that_no_block_had_before() -> None:
    addresses, sizes = np.array([0, 50, 0, 300, 0, 500]), np.array([100, 100, 150, 100, 500, 10])

    assert fresh_bytes(addresses, sizes).tolist() == [100, 50, 0, 100, 250, 10]
    assert fresh_bytes(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []
