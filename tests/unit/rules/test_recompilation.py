"""recompilation: code is compiled during the steps."""

from __future__ import annotations

from stepscope.diagnosis.rules import recompilation as rule
from stepscope.trace import Trace
from tests.simulator.programs import item_every_step, recompilation
from tests.unit.recording import Recording
from tests.unit.rules.cases import (
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

COMPILES = "torch/_dynamo/convert_frame.py(1300): __call__"
RUNS = "torch/_dynamo/eval_frame.py(465): _fn"


def on_the_host(frame: str = COMPILES, compiling_ns: int = 300) -> Trace:
    """Two steps of 1000 ns without a device; in the first one something is called, and something inside it."""
    recording = Recording()
    for number in (0, 1):
        recording.step(1000 * number, 1000, number)
        recording.frame(1000 * number, 1000, "train.py(12): step")
    recording.frame(100, compiling_ns, frame)
    recording.frame(110, 5, "torch/_inductor/compile_fx.py(560): compile_fx" if frame == COMPILES else RUNS)
    return recording.trace()


FIRES: Cases = {"every step": lambda: recorded(recompilation()), "without a device": on_the_host}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "nothing compiled": lambda: recorded(item_every_step()),
    "compiled code that runs": lambda: on_the_host(RUNS),
    "a little": lambda: on_the_host(compiling_ns=15),
}


def test_the_saving_is_the_idle_time_while_code_was_compiled() -> None:
    machine = recompilation()
    lost = true_idle_ns(machine, {"compilation"})
    end = machine.truth().steps[-1].start_ns + machine.truth().steps[-1].duration_ns

    finding = the_finding(rule, recorded(machine))

    assert finding.saving_ns_per_step == lost // 4 > 0
    assert finding.title == "73% of the time goes to compiling code: 4 compilations in 4 of 4 steps"
    assert finding.confidence == "high"
    assert figures_of(finding) == [
        ("share of the time lost to compiling", lost / end, "share", 0.01),
        ("compilations", 4, "count", None),
        ("steps that compiled", 4, "count", None),
    ]
    assert places_of(finding) == [("train.py", 12, "step")]


def test_one_step_that_compiles_may_be_the_first() -> None:
    finding = the_finding(rule, on_the_host())

    assert (finding.saving_ns_per_step, finding.confidence) == (150, "medium")
    assert finding.title == "15% of the time goes to compiling code: 1 compilations in 1 of 2 steps"


def test_the_threshold_decides() -> None:
    assert len(asked(rule, on_the_host(), share=0.15).findings) == 1
    assert asked(rule, on_the_host(), share=0.16).findings == ()
    assert len(asked(rule, on_the_host(compiling_ns=15), share=0.005).findings) == 1
