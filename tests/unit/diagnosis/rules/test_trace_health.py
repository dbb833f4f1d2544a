"""trace-health: what the recording cannot tell."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from stepscope.diagnosis.diagnosis import diagnose
from stepscope.diagnosis.parts import PARTS
from stepscope.diagnosis.rules import RULES
from stepscope.diagnosis.rules.trace_health import RULE as rule
from stepscope.diagnosis.view import View
from stepscope.trace import Metadata, Trace
from stepscope.trace.tables import SCHEMAS
from tests.simulator import Machine
from tests.simulator.device import Queue
from tests.simulator.host import Host
from tests.unit.diagnosis.rules import test_loop_in_step
from tests.unit.diagnosis.rules.cases import (
    US,
    Cases,
    asked,
    busy_device,
    empty_trace,
    figures_of,
    layers,
    recorded,
    the_finding,
    training,
    true_idle_ns,
)
from tests.unit.recording import Recording

STEPS = "How long is a step, and what varies between steps?"
LINES = "Which lines of the code are to blame?"
OPERATORS = "Which of the program's operators could be replaced by faster ones?"
SIZES = "Which sizes of tensors are slow?"
MEMORY = "What is memory used for, and does it grow?"
GRIDS = "Do the kernels have enough thread blocks to fill the device?"
LAUNCHES = "Which code launched all of the device's work?"


def flushing() -> Machine:
    def step(host: Host, queue: Queue) -> None:
        layers(host, queue, kernel_us=50)
        host.synchronize_device()
        host.profiler_flush(200 * US)

    return training(step)


def profiled_on_the_host(profiler_ns: int = 100) -> Trace:
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "train.py(12): step")
    recording.frame(800, profiler_ns, "torch/profiler/profiler.py(1150): step")
    return recording.trace()


def unlaunched(lost: int, found: int) -> Trace:
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "train.py(12): step")
    recording.operator(1, 2, "aten::mm", input_shapes="[]", input_types="[]")
    for number in range(lost + found):
        recording.launch(number + 1, 0, 101 + number if number < found else 9_000 + number)
        recording.work(20 * number + 30, 20, "gemm", 101 + number)
    return recording.trace()


def silent_host(silent_ns: int) -> Trace:
    """A thread that records nothing between two operators while the device has nothing to do."""
    recording = Recording()
    recording.step(0, 100, 1)
    recording.step(100, 900, 2)
    recording.operator(0, 10, "aten::mm", input_shapes="[]", input_types="[]", call_stack="train.py(3): step")
    recording.launched(2, 5, 95, "gemm", 101)
    recording.operator(100 + silent_ns, 10, "aten::mm", input_shapes="[]", input_types="[]")
    recording.launched(100 + silent_ns, 100 + silent_ns, 900 - silent_ns, "gemm", 102)
    tables = {name: recording.trace().table(name) for name in ("lanes", "operators", "launches", "device_work")}
    return Trace.from_tables(tables)


FIRES: Cases = {
    "buffers flushed": lambda: recorded(flushing()),
    "the profiler's own frames": profiled_on_the_host,
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "a little of the profiler": lambda: profiled_on_the_host(40),
}


def questions_of(trace: Trace, **settings: float) -> list[str]:
    return [question.question for question in asked(rule, trace, **settings).not_answered]


def test_the_saving_is_the_profilers_own_time() -> None:
    machine = flushing()

    finding = the_finding(rule, recorded(machine))

    # The machine flushes 200 us in each step; a second wait then comes back 1 us later than it would have to.
    assert (finding.saving_ns_per_step, finding.saving_from) == ((200 - 1) * US, "replayed")
    share = pytest.approx(true_idle_ns(machine, {"profiler_overhead"}) / 3 * 4 / View(recorded(machine)).length_ns)
    assert figures_of(finding) == [("share of the step lost to the profiler", share, "share", 0.05)]


def test_the_profilers_frames_without_a_device() -> None:
    finding = the_finding(rule, profiled_on_the_host())

    assert (finding.saving_ns_per_step, finding.saving_share) == (100, 0.1)
    assert finding.title == "10% of the step goes to the profiler itself, and vanishes without it"


def test_a_complete_recording_leaves_no_question() -> None:
    assert questions_of(busy_device()) == [MEMORY, GRIDS]


def test_an_empty_recording_leaves_those_that_any_recording_answers() -> None:
    assert questions_of(empty_trace()) == [STEPS, LINES, OPERATORS, MEMORY]


def test_a_machine_without_frames_and_shapes() -> None:
    machine = training(lambda host, queue: layers(host, queue), with_frames=False)

    assert questions_of(recorded(machine)) == [LINES, SIZES, MEMORY]


def test_recorded_lines_answer_which_lines_are_to_blame() -> None:
    recording = Recording()
    recording.step(0, 100, 1)
    recording.operator(0, 90, "aten::mm", source_file="train.py", source_line=3, source_function="step")

    assert questions_of(recording.trace()) == [SIZES, MEMORY]


def test_every_question_says_how_to_answer_it() -> None:
    for question in asked(rule, empty_trace()).not_answered:
        assert question.rule == "trace-health"
        assert question.why
        assert "profiler.step()" in question.how or "torch.profiler" in question.how


@pytest.mark.parametrize(("lost", "asks"), [(0, False), (1, False), (2, True), (20, True)])
def test_work_without_a_launch(lost: int, asks: bool) -> None:
    assert (LAUNCHES in questions_of(unlaunched(lost, 20 - lost))) == asks


def test_idle_time_without_a_visible_reason() -> None:
    assert questions_of(silent_host(400)) == [
        STEPS, MEMORY, GRIDS, "Why is the device idle for 40% of the recording without a visible reason?"
    ]  # fmt: skip
    assert questions_of(silent_host(20)) == [STEPS, MEMORY, GRIDS]


def test_the_thresholds_decide() -> None:
    assert asked(rule, profiled_on_the_host(), overhead=0.11).findings == ()
    assert len(asked(rule, profiled_on_the_host(40), overhead=0.04).findings) == 1
    assert LAUNCHES not in questions_of(unlaunched(20, 0), unlaunched=1.0)
    assert LAUNCHES in questions_of(unlaunched(1, 19), unlaunched=0.04)
    assert len(questions_of(silent_host(20), unknown=0.01)) == 4


@pytest.mark.parametrize(
    ("trace_format", "question", "words"),
    [
        ("kineto", SIZES, "record_shapes=True"),
        ("nsight_systems", SIZES, "nsys profile --pytorch=autograd-shapes-nvtx"),
        ("nsight_systems", STEPS, "torch.cuda.nvtx.range_push"),
        ("rocprof", STEPS, "--marker-trace"),
        ("xplane", STEPS, "jax.profiler.StepTraceAnnotation"),
        ("xplane", LINES, "python_tracer_level"),
    ],
)
def test_the_advice_is_for_the_profiler_that_wrote_the_file(trace_format: str, question: str, words: str) -> None:
    recording = Recording()
    recording.operator(0, 90, "aten::mm")
    trace = replace(recording.trace(), metadata=Metadata(format=trace_format))

    how = {each.question: each.how for each in asked(rule, trace).not_answered}
    assert words in how[question]


def test_questions_name_the_rules_that_could_not_look() -> None:
    recording = Recording()
    recording.operator(0, 90, "aten::mm")

    rules = {each.question: each.rules for each in diagnose(recording.trace()).not_answered}
    assert rules[MEMORY] == ("memory-near-limit", "memory-growth", "memory-fragmentation", "memory-headroom")
    assert "unfused-attention" in rules[SIZES]
    assert rules[LINES] == ("slow-input-function",)


def test_what_rules_need_is_a_part_of_a_recording() -> None:
    for each in RULES:
        assert set(getattr(each, "NEEDS", ())) <= set(PARTS), each.ID


def test_rules_that_know_pytorchs_operators_are_not_asked_of_others() -> None:
    ours = next(iter(test_loop_in_step.FIRES.values()))()
    renamed = ours.operators.with_columns(pl.col("name").str.replace("^aten::", "tpu::"))
    theirs = Trace.from_tables({**{name: ours.table(name) for name in SCHEMAS}, "operators": renamed})

    assert "loop-in-step" in [each.rule for each in diagnose(ours).findings]
    assert "loop-in-step" not in [each.rule for each in diagnose(theirs).findings]


def test_a_main_thread_that_recorded_little_without_a_device() -> None:
    def silent(between_ns: int) -> Trace:
        recording = Recording()
        for step in range(4):
            recording.step(1_000 * step, 1_000, step)
            told = {"input_shapes": "[]", "input_types": "[]", "call_stack": "a.py(3): f"}
            recording.operator(1_000 * step, 1_000 - between_ns, "aten::mm", **told)
        return recording.trace()

    assert questions_of(silent(400)) == [MEMORY, "What did the main thread do for 40% of the time?"]
    assert questions_of(silent(150)) == [MEMORY]
