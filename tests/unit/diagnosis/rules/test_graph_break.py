"""graph-break: compiled code that each step leaves and enters again, by torch.compile's log and the trace."""

from __future__ import annotations

import dataclasses

import pytest

from stepscope.diagnosis.rules.graph_break import RULE as rule
from stepscope.diagnosis.rules.graph_break import compile_use
from stepscope.diagnosis.rules.recompilation import RULE as recompilation
from stepscope.diagnosis.view import View
from stepscope.trace import Trace
from stepscope.trace.metadata import CodePlace, Compilation, CompiledGraph, GraphBreak, RunCounts
from stepscope.trace.tables import SCHEMAS
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, places_of, the_finding
from tests.unit.recording import Recording

REASON = "Unsupported Tensor.item() call"
AT = GraphBreak(
    "model.py", 13, REASON, "It is not supported.", "Set the option.", (CodePlace("forward", "model.py", 13),)
)
CALLED = (CodePlace("main", "train.py", 21),)
WHOLE = Compilation(
    "1", "0/0", "forward", "model.py", 9, CALLED, compile_ns=700, backward_ns=200, cached=False, breaks=(AT,),
    graphs=(CompiledGraph("fkey", ("cpp_fused_relu_0",)),),
)  # fmt: skip
REST = Compilation("1", "1/0", "torch_dynamo_resume_in_forward_at_13", "model.py", 13, compile_ns=100, cached=True)
AGAIN = dataclasses.replace(
    REST, number="1/1", reason="1/0: tensor 'x' size mismatch at index 0. expected 32, actual 33  # a comment"
)


def given(trace: Trace, *compiled: Compilation) -> Trace:
    return dataclasses.replace(
        trace, metadata=dataclasses.replace(trace.metadata, evidence=RunCounts(sources=("log",), compiled=compiled))
    )


def steps(gap_ns: int = 200, *compiled: Compilation, nested: bool = True, step_ns: int = 1000) -> Trace:
    """Two steps: a graph's call until 300 ns, a read of 20 ns, and the rest's graph after `gap_ns`.

    The region of the rest begins 30 ns before its graph's call, its guards' check 50 ns before that.
    """
    recording = Recording()
    for number in (0, 1):
        begin = step_ns * number
        rest = begin + 320 + gap_ns
        recording.step(begin, step_ns, number)
        recording.frame(begin, step_ns, "train.py(12): step")
        recording.operator(begin + 90, 10, "TorchDynamo Cache Lookup")
        end = rest + 110 if nested else begin + 300
        recording.operator(begin + 100, end - begin - 100, "Torch-Compiled Region: 0/0")
        recording.annotation(begin + 110, 190, "## Call CompiledFxGraph fkey ##")
        recording.operator(begin + 310, 20, "aten::item")
        recording.operator(rest - 80, 50, "TorchDynamo Cache Lookup")
        recording.operator(rest - 30, 130, "Torch-Compiled Region: 1/0")
        recording.annotation(rest, 90, "## Call CompiledFxGraph fother ##")
    return given(recording.trace(), *compiled) if compiled else recording.trace()


FIRES: Cases = {
    "a break between two graphs": lambda: steps(200, WHOLE, REST),
    "regions that are not nested": lambda: steps(200, WHOLE, REST, nested=False),
    "a process with another number": lambda: steps(
        200, *(dataclasses.replace(each, process="77") for each in (WHOLE, REST))
    ),
}
SILENT: Cases = {
    "an empty trace": empty_trace,
    "a busy device": busy_device,
    "no log": steps,
    "no break": lambda: steps(200, WHOLE),
    "a break that costs next to nothing": lambda: steps(81, WHOLE, REST, step_ns=2000),
    "logs of two other processes": lambda: steps(
        200, dataclasses.replace(WHOLE, process="77"), dataclasses.replace(REST, process="78")
    ),
}


def test_the_time_around_the_break_is_charged_to_its_line() -> None:
    """Of the 220 ns from graph to graph, the read of 20 ns stays."""
    finding = the_finding(rule, steps(200, WHOLE, REST))

    assert places_of(finding) == [("model.py", 13, "forward")]
    figures = {figure.name: figure.value for figure in finding.evidence.figures}
    assert figures["host time between the compiled code per step"] == 200
    assert figures["times behind the break per step"] == 1
    assert REASON in finding.title
    assert "Set the option." in finding.remedy.code
    assert finding.saving_ns_per_step >= 200


def test_with_a_device_its_idle_time_around_the_break_is_charged() -> None:
    """The device works from 150 to 400 ns and from 530 on: of the stretch until 520 ns it is idle in 120."""
    trace = steps(200, WHOLE, REST)
    recording = Recording()
    for number in (0, 1):
        begin = 1000 * number
        recording.launched(begin + 120, begin + 150, 250, "first", 10 * number + 1)
        recording.launched(begin + 525, begin + 530, 470, "second", 10 * number + 2)
    worked = recording.trace()
    tables = {name: trace.table(name) for name in SCHEMAS} | {
        name: worked.table(name) for name in ("launches", "device_work", "lanes")
    }
    finding = the_finding(rule, Trace.from_tables(tables, trace.metadata))

    assert finding.title.startswith("12% of the step")
    assert finding.evidence.figures[0].value == pytest.approx(0.12)


def test_a_break_in_a_called_function_is_one_finding_at_its_own_line() -> None:
    inner = dataclasses.replace(
        AT, file="layer.py", line=5, frames=(CodePlace("check", "layer.py", 5), CodePlace("forward", "model.py", 13))
    )
    finding = the_finding(rule, steps(200, dataclasses.replace(WHOLE, breaks=(inner,)), REST))

    assert [(place.file, place.line, place.function) for place in finding.where] == [("layer.py", 5, "check")]


def test_without_a_log_the_question_stays_open() -> None:
    (question,) = asked(rule, steps()).not_answered

    assert "2 compiled regions" in question.why
    assert "--compile-log" in question.how


def test_a_function_that_the_compiler_gave_up_is_a_note() -> None:
    failed = dataclasses.replace(WHOLE, failure="a break in a loop")
    (finding,) = asked(rule, steps(81, failed)).findings

    assert (finding.severity, finding.saving_ns_per_step) == ("note", 0)
    assert places_of(finding) == [("model.py", 13, "")]


def test_the_log_names_the_guard_of_a_recompilation() -> None:
    recording = Recording()
    recording.step(0, 1000, 0)
    recording.frame(0, 1000, "train.py(12): step")
    recording.frame(100, 300, "torch/_dynamo/convert_frame.py(1300): __call__")
    finding = the_finding(recompilation, given(recording.trace(), WHOLE, REST, AGAIN))

    assert "dimension 0 of x varies (32, 33)" in finding.title
    assert "mark_dynamic(x, 0)" in finding.remedy.code
    assert "dynamic=True" in finding.remedy.code


def test_what_was_compiled_is_told_by_function() -> None:
    use = compile_use(View(steps(200, WHOLE, REST, AGAIN)))

    assert use is not None
    assert (use.compilations, use.compile_ns, use.cold_ns, use.lost_ns_per_step) == (3, 1100, 900, 200)
    (function,) = use.functions
    assert (function.function, function.line, function.called_from) == ("forward", 9, "train.py:21")
    assert (function.graphs, function.fused_kernels, function.calls_per_step) == (1, 1, 1)
    assert (function.ns_per_step, function.lookup_ns_per_step) == (530, 60)
    assert [(each.name, each.ns_per_step) for each in function.kernels] == [("cpp_fused_relu_0", 190)]
    assert [each.guard for each in function.recompilations] == [
        "tensor 'x' size mismatch at index 0. expected 32, actual 33"
    ]
    (broken,) = use.breaks
    assert (broken.file, broken.line, broken.per_step, broken.lost_ns_per_step) == ("model.py", 13, 1, 200)
    assert broken.behind == ("model.py:13",)


def test_a_call_that_the_compiler_wraps_is_named_by_the_users_line() -> None:
    wrapped = dataclasses.replace(WHOLE, function="inner", file="/lib/torch/_dynamo/external_utils.py", breaks=())
    use = compile_use(View(steps(200, wrapped)))

    assert use is not None
    assert [(each.function, each.file, each.line) for each in use.functions] == [
        ("main's call of a module", "train.py", 21)
    ]


def test_nothing_is_told_without_a_log() -> None:
    assert compile_use(View(steps())) is None
    assert compile_use(View(given(empty_trace(), WHOLE))) is not None
