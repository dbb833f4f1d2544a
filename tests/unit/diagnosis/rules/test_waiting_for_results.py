"""waiting-for-results: the host of a JAX or PyTorch/XLA program waits instead of sending work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepscope.diagnosis.rules.waiting_for_results import RULE as rule
from stepscope.trace import Metadata, Trace
from tests.unit.diagnosis.rules.cases import Cases, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.recording import Recording

STEPS = 4
BLOCKING = "jax/_src/api.py(3165): try_to_block"


def reading(wait_ns: int = 400, name: str = BLOCKING, trace_format: str = "xplane") -> Trace:
    """Steps of 1000 ns: a program that the device runs for 500, then a wait until shortly before the next."""
    recording = Recording()
    for step in range(STEPS):
        start = 1_000 * step
        recording.step(start, 1_000, step)
        recording.frame(start, 1_000, "/home/user/train.py(7): train")
        recording.operator(start + 1, 90, "PjitFunction(step)")
        recording.launched(start + 10, start + 50, 500, "fusion", 100 + step)
        recording.frame(start + 550, wait_ns, name)
    return replace(recording.trace(), metadata=Metadata(format=trace_format))


FIRES: Cases = {"values are read in each step": reading}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "hardly a wait": lambda: reading(10),
    "the host does something else": lambda: reading(name="train.py(9): prepare"),
    "a program of PyTorch": lambda: reading(trace_format="kineto"),
}


def test_the_saving_is_the_idle_time_while_the_host_waits() -> None:
    finding = the_finding(rule, reading())

    assert finding.saving_ns_per_step == pytest.approx(400)
    share = 400 / 1_000
    assert figures_of(finding) == [
        ("share of the step in which the device is idle while the host waits", share, "share", 0.02)
    ]
    assert finding.saving_from == "attributed"
    assert places_of(finding)[0][:2] == ("/home/user/train.py", 7)


def test_what_helps_in_jax_is_prescribed() -> None:
    assert "float(running_loss)" in the_finding(rule, reading()).remedy.code
