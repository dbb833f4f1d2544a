"""between-iterations: the device waits for the host between iterations of an engine."""

from __future__ import annotations

from stepscope.diagnosis import diagnose
from stepscope.diagnosis.rules.between_iterations import RULE as rule
from stepscope.trace import Trace
from tests.simulator.programs import item_every_step
from tests.simulator.serving_faults import between_iterations
from tests.unit.diagnosis.rules.cases import (
    US,
    Cases,
    asked,
    busy_device,
    empty_trace,
    figures_of,
    places_of,
    recorded,
    the_finding,
)
from tests.unit.recording import Recording


def on_the_host(phase: str = "DECODE") -> Trace:
    """Iterations of 100 us on a processor alone, with 60 us of Python after each."""
    recording = Recording()
    for start in range(0, 800, 160):
        recording.annotation(start * US, 100 * US, f"step[{phase} bs=4]")
        recording.operator(start * US, 100 * US, "aten::mm")
        recording.frame((start + 100) * US, 60 * US, "serve.py(30): handle_tokens")
    return recording.trace()


FIRES: Cases = {
    "the host handles tokens": lambda: recorded(between_iterations(fault=True)),
    "without a device": on_the_host,
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "while the device works": lambda: recorded(between_iterations(fault=False)),
    "before prompts it may wait for requests": lambda: on_the_host("EXTEND"),
    "steps of a training": lambda: recorded(item_every_step()),
}


def test_the_gaps_are_counted_with_their_place() -> None:
    finding = the_finding(rule, recorded(between_iterations(fault=True)))

    figures = {name: value for name, value, *_ in figures_of(finding)}
    assert figures["iterations that follow another and decode"] == 9
    assert 200 * US <= figures["time lost before each of them"] < 240 * US
    assert places_of(finding)[0][:2] == ("serve.py", 30)
    assert "--async-scheduling" in finding.remedy.code
    assert finding.title.endswith("most of it in handle_tokens()")


def test_it_takes_the_place_of_the_wait_for_tokens() -> None:
    findings = diagnose(recorded(between_iterations(fault=True))).findings
    assert [finding.rule for finding in findings] == ["between-iterations"]


def test_without_a_device_the_time_is_the_hosts() -> None:
    finding = the_finding(rule, on_the_host())
    figures = {name: value for name, value, *_ in figures_of(finding)}
    assert figures["time lost before each of them"] == 60 * US
    assert not asked(rule, on_the_host(), share=0.5).findings
