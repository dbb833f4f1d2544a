"""A closure that an optimizer's step calls is forward and backward, not the optimizer's work."""

from __future__ import annotations

import pytest

from stepscope.analysis.attribution import attribute
from stepscope.analysis.host import host_activity, host_summary, host_time
from stepscope.trace import Trace
from tests.unit.recording import Recording

NODE = "autograd::engine::evaluate_function: MulBackward0"


def stepping(*, engine_lane: bool = False, with_closure: bool = True) -> Trace:
    """A step of 1000 ns inside an optimizer's: a forward of 300 ns, a backward of 400, and an update of 200."""
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.annotation(0, 1000, "Optimizer.step#SGD.step")
    if with_closure:
        lane = recording.thread("2") if engine_lane else 0
        recording.operator(0, 300, "aten::mul", sequence_number=1, forward_thread=0)
        recording.operator(350, 400, NODE, lane=lane, sequence_number=1, forward_thread=1)
    recording.operator(800, 200, "aten::_foreach_add_")
    return recording.trace()


@pytest.mark.parametrize("engine_lane", [False, True])
def test_what_the_closure_runs_is_no_optimizer_work(engine_lane: bool) -> None:
    trace = stepping(engine_lane=engine_lane)
    causes = dict(host_summary(host_time(trace)).select("cause", "ns").iter_rows())

    assert causes["optimizer"] == 200
    assert causes["compute"] == 300 + (0 if engine_lane else 400)

    attribution = attribute(trace, host_activity(trace))
    assert attribution.operators()["phase"].to_list() == ["forward", "backward", "optimizer"]


def test_without_a_closure_all_of_it_is_the_optimizers() -> None:
    causes = dict(host_summary(host_time(stepping(with_closure=False))).select("cause", "ns").iter_rows())
    assert causes == {"optimizer": 1000}
