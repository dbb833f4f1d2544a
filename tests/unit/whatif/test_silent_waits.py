"""Where XLA's host waits for the device in calls that do not say so, a replay promises nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepscope.analysis.host import host_activity
from stepscope.trace import Metadata, Trace, Window
from stepscope.whatif import Experiment
from stepscope.whatif.host_waits import operator_waits, silent_wait_ns
from tests.unit.recording import Recording

MS = 1_000_000


def throttled(call_ms: int, trace_format: str = "xplane", busy_ms: int = 100) -> Trace:
    """Steps of 100 ms in which the device works for `busy_ms`, and the host stands in Execute for `call_ms`."""
    recording = Recording()
    for step in range(4):
        start = 100 * MS * step
        recording.step(start, 100 * MS, step)
        recording.operator(start, call_ms * MS, "TfrtTpuLoadedExecutable::Execute")
        recording.launched(start + 1, start + 10, busy_ms * MS - 20, "fusion", 100 + step)
    return replace(recording.trace(), metadata=Metadata(format=trace_format))


def test_a_long_call_beside_a_busy_device_is_a_wait() -> None:
    assert Experiment(throttled(50)).why_not == (
        "the host waited for the device for 50% of the time in calls that do not say so"
    )


@pytest.mark.parametrize(
    "trace",
    [throttled(50, "kineto"), throttled(5), throttled(50, busy_ms=40)],
    ids=["PyTorch's calls say so", "hardly any", "the device was idle meanwhile"],
)
def test_a_replay_promises_where_the_host_did_not_wait_silently(trace: Trace) -> None:
    assert Experiment(trace).why_not is None


def test_a_profile_of_devices_alone_has_none() -> None:
    recording = Recording(metadata=Metadata(format="xplane"))
    recording.work(0, 50, "fusion.1")
    trace = recording.trace()

    assert silent_wait_ns(trace, host_activity(trace), 0, "0", Window(0, 100)) == 0


def waiting_operator(tail_us: int = 900, work_us: int = 800, inner: bool = False) -> Trace:
    recording = Recording(unit_ns=1_000)
    recording.operator(0, tail_us + 20, "aten::convolution")
    if inner:
        recording.operator(500, 10, "aten::empty")
    recording.launched(10, 50, work_us, "conv", 1)
    return recording.trace()


def test_an_operator_that_outlasts_its_only_work_waited_for_it() -> None:
    waits = operator_waits(waiting_operator())

    assert (waits.start.tolist(), waits.end.tolist(), waits.work.tolist()) == ([12_000], [920_000], [0])
    assert waits.own_ns.tolist() == [70_000]


@pytest.mark.parametrize(
    "trace",
    [waiting_operator(90, 60), waiting_operator(900, 200), waiting_operator(700), waiting_operator(inner=True)],
    ids=["short", "mostly its own time", "the work ends later", "it goes on with something else"],
)
def test_other_operators_only_launch(trace: Trace) -> None:
    assert len(operator_waits(trace).start) == 0
