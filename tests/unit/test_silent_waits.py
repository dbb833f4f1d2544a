"""Waits that do not say so, in XLA's profiles."""

from __future__ import annotations

from stepscope.analysis.host import host_activity
from stepscope.trace import Metadata, Window
from stepscope.whatif.silent_waits import silent_wait_ns
from tests.unit.recording import Recording


def test_a_profile_of_devices_alone_has_none() -> None:
    recording = Recording(metadata=Metadata(format="xplane"))
    recording.work(0, 50, "fusion.1")
    trace = recording.trace()

    assert silent_wait_ns(trace, host_activity(trace), 0, "0", Window(0, 100)) == 0


def test_a_long_operator_during_which_the_device_works_throughout_is_a_wait() -> None:
    recording = Recording(metadata=Metadata(format="xplane"), unit_ns=1_000_000)
    recording.operator(10, 30, "PjitFunction(f)")
    recording.operator(50, 30, "PjitFunction(f)")
    recording.work(0, 60, "fusion.1")
    trace = recording.trace()

    assert silent_wait_ns(trace, host_activity(trace), 0, "0", Window(0, 100_000_000)) == 30_000_000
