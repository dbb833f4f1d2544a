"""launch-bound: the host launches work too slowly."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stepscope.diagnosis.rules.launch_bound import RULE as rule
from stepscope.trace import Trace
from stepscope.whatif.build import USUAL_GAP_NS
from tests.simulator.programs import backward_thread, input_bound_training, item_every_step, launch_bound_training
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
    true_idle_ns,
)
from tests.unit.recording import Recording

LAUNCHING = {"dispatch", "python", "launch_latency"}


def late_launches() -> Trace:
    """In 1000 us, gaps of 100 us in an operator, 50 in Python, 40 in the loader, and 10 of latency after each."""
    recording = Recording()
    recording.step(0, 1000 * US, 1)
    recording.frame(0, 1000 * US, "train.py(12): step")
    recording.launched(1 * US, 10 * US, 90 * US, "a", 101)
    recording.operator(90 * US, 120 * US, "aten::mm")
    recording.launched(200 * US, 210 * US, 90 * US, "b", 102)
    recording.launched(350 * US, 360 * US, 140 * US, "c", 103)
    recording.annotation(499 * US, 41 * US, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    recording.launched(540 * US, 550 * US, 450 * US, "d", 104)
    return recording.trace()


FIRES: Cases = {
    "short kernels": lambda: recorded(launch_bound_training()),
    "backward on its own thread": lambda: recorded(backward_thread()),
    "by hand": late_launches,
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "long kernels": lambda: recorded(item_every_step()),
    "loading data is told elsewhere": lambda: recorded(input_bound_training()),
}


def test_the_saving_is_the_late_time_with_its_latency() -> None:
    finding = the_finding(rule, late_launches())

    # The latency behind the loader is left out: the host was not late in launching there.
    assert finding.saving_ns_per_step == ((100 + 10) + (50 + 10)) * US
    assert finding.saving_from == "replayed"
    assert finding.title == (
        "for 17% of the step the device waits for launches: 4 launches a step, and the host is too slow for them"
    )
    assert (finding.severity, finding.confidence) == ("medium", "medium")
    assert figures_of(finding) == [
        ("share of the step lost to late launches", 0.17, "share", 0.05),
        ("launches per step", 4.0, "count", None),
        ("kernels per step", 4.0, "count", None),
        ("median length of the device's work", 115_000.0, "ns", None),
        ("median length of a launch call", 2.0, "ns", None),
        ("lost while dispatching operators", 0.1, "share", None),
        ("lost to Python between operators", 0.05, "share", None),
    ]
    assert [(interval.start_ns, interval.duration_ns) for interval in finding.evidence.intervals] == [
        (100 * US, 110 * US),
        (300 * US, 60 * US),
    ]
    assert places_of(finding) == [("train.py", 12, "step")]
    assert 'mode="reduce-overhead"' in finding.remedy.code


def test_python_that_only_recorded_lines_tell_of_has_its_place() -> None:
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.line(0, 250, "train.py(12): step")
    recording.line(250, 250, "train.py(20): postprocess")
    recording.launched(1, 10, 90, "a", 101)
    recording.launched(500, 510, 490, "b", 102)

    finding = the_finding(rule, recording.trace())

    assert finding.title.startswith("for 41% of the step the device waits for launches")
    assert places_of(finding) == [("train.py", 20, "postprocess"), ("train.py", 12, "step")]
    assert [round(place.share, 3) for place in finding.where] == [0.625, 0.375]


def test_a_simulated_machine() -> None:
    machine = launch_bound_training()

    finding = the_finding(rule, recorded(machine))

    # Then a step is 40 kernels of 2 us, with the pause that a queue usually makes between two.
    step = machine.truth().steps[0].duration_ns
    assert finding.saving_ns_per_step == pytest.approx(step - 40 * (2 * US + USUAL_GAP_NS), rel=0.01)
    lost = true_idle_ns(machine, LAUNCHING) / 4
    assert figures_of(finding)[0] == (
        "share of the step lost to late launches",
        pytest.approx(lost / step, rel=1e-3),  # the end of the last one lies behind the last step
        "share",
        0.05,
    )
    assert figures_of(finding)[1] == ("launches per step", 40.0, "count", None)
    assert places_of(finding) == [("model.py", 30, "forward")]


def stepping(
    kernels: Sequence[str] = "ab",
    later: Sequence[str] = "ab",
    *,
    rows: int = 4,
    wait: bool = False,
    graph: bool = False,
) -> Trace:
    """Two steps of 1000 ns whose kernels of 10 ns each come 90 ns late; the second step's may be others."""
    recording = Recording()
    for step, names in enumerate((kernels, later)):
        recording.step(1000 * step, 1000, step)
        for number, name in enumerate(names):
            begin, correlation = 1000 * step + 100 * number, 10 * step + number
            shapes = f"[[{4 if step == 0 else rows}, 8]]"
            recording.operator(begin + 1, 95, "aten::mm", input_shapes=shapes)
            recording.launch(begin + 90, 2, correlation, kind="graph_launch" if graph else "launch")
            for part in range(4 if graph else 1):
                recording.work(begin + 100 + 2 * part, 2 if graph else 10, name, correlation)
        if wait:
            recording.launch(1000 * step + 98, 2, 500 + step, name="cudaStreamSynchronize", kind="synchronise")
    return recording.trace()


@pytest.mark.parametrize(
    ("trace", "text"),
    [
        (stepping(), "All steps launch the same kernels, and nothing waits inside them"),
        (stepping(later="abc"), "here steps launch different kernels"),
        (stepping(rows=5), "here input shapes differ from step to step"),
        (stepping(wait=True), "here the host waits for the device inside the step"),
        (stepping(graph=True), "Much is launched as graphs already"),
        (stepping(("triton_poi_fused_add_0",) * 2, ("triton_poi_fused_add_0",) * 2), "The code is compiled already"),
        (late_launches(), "compile the model, so that a step is launched as a graph"),
    ],
)
def test_the_remedy_follows_from_what_steps_launch(trace: Trace, text: str) -> None:
    assert text in the_finding(rule, trace).remedy.text


def test_the_threshold_decides() -> None:
    assert len(asked(rule, late_launches(), share=0.17).findings) == 1
    assert asked(rule, late_launches(), share=0.18).findings == ()
    assert len(asked(rule, recorded(item_every_step()), share=0.001).findings) == 1
