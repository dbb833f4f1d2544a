"""recompilation: code is compiled during the steps."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from stepscope.diagnosis.rules.recompilation import RULE as rule
from stepscope.trace import Trace
from stepscope.trace.program_facts import CompilationFacts, ProgramFacts
from tests.simulator.programs import item_every_step, recompilation
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


def with_facts(
    *reasons: str | None, compiling_ns: int = 300, file: str = "model.py", torch: dict[str, int] | None = None
) -> Trace:
    """The same, of a program in which torch compiled model.py's forward for these reasons."""
    facts = tuple(CompilationFacts(function="forward", file=file, line=7, reason=reason) for reason in reasons)
    trace = on_the_host(compiling_ns=compiling_ns)
    program = ProgramFacts(compilations=facts, torch=torch or {})
    return dataclasses.replace(trace, metadata=dataclasses.replace(trace.metadata, program=program))


def regions(*sizes: int) -> Trace:
    """Compiled code that begins with a matrix product of so many rows, after a compilation."""
    recording = Recording()
    recording.step(0, 1000, 0)
    recording.frame(0, 300, COMPILES)
    for number, size in enumerate(sizes):
        recording.operator(300 + 100 * number, 90, f"Torch-Compiled Region: 0/{number}")
        recording.operator(310 + 100 * number, 40, "aten::mm", input_shapes=f"[[{size}, 8], [8, 8]]")
        recording.operator(360 + 100 * number, 20, "aten::relu", input_shapes=f"[[{size + 1}, 8]]")
    return recording.trace()


SIZES = [None] + [f"0/{n}: tensor 'x' size mismatch at index 1. expected {8 + n}, actual {9 + n}" for n in range(3)]
COUNTER = [None] + [f"0/{n}: self.step == {n}        # self.step += 1" for n in range(7)]

FIRES: Cases = {
    "every step": lambda: recorded(recompilation()),
    "without a device": on_the_host,
    "a dimension that varies": lambda: with_facts(*SIZES),
    "a function that is not compiled any more": lambda: with_facts(*COUNTER, compiling_ns=0),
    "Habana's graph compiler": lambda: on_the_host("compileGraph"),
    "XLA's compiler": lambda: on_the_host("PyLoadedExecutable::PjRtClient::Compile"),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "nothing compiled": lambda: recorded(item_every_step()),
    "compiled code that runs": lambda: on_the_host(RUNS),
    "a few compilations before": lambda: with_facts(*SIZES, compiling_ns=0),
    "a higher limit": lambda: with_facts(*COUNTER, compiling_ns=0, torch={"recompile_limit": 1000}),
    "a limit that was passed": lambda: with_facts(*COUNTER, COUNTER[-1], compiling_ns=0),
    "a little": lambda: on_the_host(compiling_ns=15),
}


def test_the_saving_is_the_idle_time_while_code_was_compiled() -> None:
    machine = recompilation()
    lost = true_idle_ns(machine, {"compilation"})
    end = machine.truth().steps[-1].start_ns + machine.truth().steps[-1].duration_ns

    finding = the_finding(rule, recorded(machine))

    # With nothing to compile the device decides: six kernels of 100 us in a step.
    assert finding.saving_ns_per_step == end // 4 - 6 * 100 * US
    assert finding.saving_from == "replayed"
    lost += 20_000 * US  # the whole first compilation: the device has worked on nothing before
    assert finding.title == "98% of the time goes to compiling code: 4 compilations in 4 of 4 steps"
    assert finding.confidence == "high"
    assert figures_of(finding) == [
        ("share of the time lost to compiling", pytest.approx(lost / end), "share", 0.01),
        ("compilations", 4, "count", None),
        ("steps that compiled", 4, "count", None),
    ]
    assert places_of(finding) == [("train.py", 12, "step")]


def test_one_step_that_compiles_may_be_the_first() -> None:
    finding = the_finding(rule, on_the_host())

    assert (finding.saving_ns_per_step, finding.confidence) == (150, "medium")
    assert finding.title == "15% of the time goes to compiling code: 1 compilation in 1 of 2 steps"


def test_without_steps_none_are_counted() -> None:
    recording = Recording()
    recording.frame(0, 1000, "train.py(12): main")
    recording.frame(100, 300, COMPILES)

    assert the_finding(rule, recording.trace()).title == "30% of the time goes to compiling code: 1 compilation"


def test_the_threshold_decides() -> None:
    assert len(asked(rule, on_the_host(), share=0.15).findings) == 1
    assert asked(rule, on_the_host(), share=0.16).findings == ()
    assert len(asked(rule, on_the_host(compiling_ns=15), share=0.005).findings) == 1


@pytest.mark.parametrize(
    ("reasons", "why", "code"),
    [
        (SIZES, "dimension 1 of x varies (8, 9, 10, 11)", "torch._dynamo.mark_dynamic(x, 1)"),
        (COUNTER, "self.step is a constant of the compiled code and changes (0, 1, 2, 3, ...)", "self.step.add_(1)"),
        (["0/0: tensor 'x' dtype mismatch. expected float, actual half"], "the dtype of x changes", "TORCH_LOGS"),
        (["0/0: ___check_type_id(x)"], "a guard failed: 0/0: ___check_type_id(x)", "TORCH_LOGS"),
    ],
)
def test_torch_says_what_varied(reasons: list[str | None], why: str, code: str) -> None:
    finding = asked(rule, with_facts(*reasons)).findings[0]

    assert finding.title == f"15% of the time goes to compiling code: 1 compilation in 1 of 2 steps, because {why}"
    assert figures_of(finding)[3][0] == f"compilations because {why}"
    assert figures_of(finding)[3][1] == sum(reason is not None for reason in reasons)
    assert code in finding.remedy.code
    assert places_of(finding) == [("model.py", 7, "forward")]


def test_the_recorders_own_functions_are_not_the_reason() -> None:
    finding = the_finding(rule, with_facts(*SIZES, file="/home/user/stepscope/capture/lines.py"))

    assert finding.title == "15% of the time goes to compiling code: 1 compilation in 1 of 2 steps"
    assert places_of(finding) == [("train.py", 12, "step")]


def test_a_function_at_torchs_limit_gets_a_note() -> None:
    finding = the_finding(rule, with_facts(*COUNTER, compiling_ns=0))

    assert (finding.severity, finding.saving_ns_per_step) == ("note", 0)
    assert finding.title == (
        "forward() was compiled 8 times, because self.step is a constant of the compiled code and changes "
        "(0, 1, 2, 3, ...); torch has stopped compiling it and runs it operator by operator"
    )
    assert figures_of(finding) == [("compilations of forward()", 8, "count", 8)]
    assert asked(rule, with_facts(*COUNTER, compiling_ns=0), limit=9).findings == ()


def test_a_limit_that_the_program_set_holds() -> None:
    finding = the_finding(rule, with_facts(*SIZES, compiling_ns=0, torch={"recompile_limit": 4}))

    assert figures_of(finding) == [("compilations of forward()", 4, "count", 4)]


def test_what_compiles_is_not_what_has_stopped_compiling() -> None:
    trace = with_facts(*COUNTER)
    program = trace.metadata.program
    assert program is not None
    other = CompilationFacts(function="loss", file="model.py", line=30, reason=SIZES[1])
    program = msgspec.structs.replace(program, compilations=(*program.compilations, other))
    trace = dataclasses.replace(trace, metadata=dataclasses.replace(trace.metadata, program=program))

    finding, note = asked(rule, trace).findings

    assert places_of(finding) == [("model.py", 30, "loss")]
    assert note.title.startswith("forward() was compiled 8 times")
    assert len(asked(rule, with_facts(*COUNTER)).findings) == 1


def test_input_shapes_of_compiled_code_are_counted() -> None:
    assert figures_of(the_finding(rule, regions(4, 5, 5)))[-1] == (
        "different input shapes of compiled code", 2, "count", None,
    )  # fmt: skip
    assert figures_of(the_finding(rule, regions(4, 4)))[-1][0] == "steps that compiled"
