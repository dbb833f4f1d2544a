"""frequent-logging: logging in every step takes a part of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepscope.diagnosis.finding import Finding
from stepscope.diagnosis.rules.frequent_logging import RULE as rule
from stepscope.diagnosis.view import View
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import MetricFacts, OperationFacts, ProgramFacts
from tests.simulator.programs import PROGRAMS
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

PRINT = "stepscope.logging#print"


def steps(name: str = PRINT, *, ns: int = 100, every: int = 1, frames: bool = False, lines: bool = False) -> Trace:
    """Four steps of 1000 ns on a CPU; `every` so many of them logs for `ns` and has prepared the text for 50."""
    recording = Recording()
    for number in range(4):
        begin = 1000 * number
        recording.step(begin, 1000, number)
        recording.frame(begin, 1000, "train.py(12): step")
        recording.operator(begin + 10, 500, "aten::mm")
        if lines:
            recording.line(begin, 550, "train.py(13): step")
            recording.line(begin + 550, 50 + ns, "train.py(14): step")
            recording.line(begin + 600 + ns, 400 - ns, "train.py(15): step")
        if number % every == 0:
            (recording.frame if frames else recording.operator)(begin + 600, ns, name)
    return recording.trace()


def idle_device(unit_ns: int = 1) -> Trace:
    """A device that is idle for the 200 ns in which the host prints, and for 100 ns more before the next kernel."""
    recording = Recording(unit_ns=unit_ns)
    for number in range(2):
        begin = 1000 * number
        recording.step(begin, 1000, number)
        recording.frame(begin, 1000, "train.py(12): step")
        recording.launched(begin + 10, begin + 20, 380, "gemm", 100 + 2 * number)
        recording.operator(begin + 400, 200, PRINT)
        recording.operator(begin + 450, 20, PRINT)  # by the first
        recording.operator(begin + 690, 10, "aten::mm")
        recording.launched(begin + 695, begin + 700, 300, "gemm", 101 + 2 * number)
    return recording.trace()


FIRES: Cases = {
    "a print": steps,
    "a print, seen by its frame": lambda: steps("<built-in function print>", frames=True),
    "an idle device": idle_device,
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "once in a while": lambda: steps(every=4),
    "cheap": lambda: steps(ns=9),
}


def test_the_saving_is_what_goes_at_the_frequency_that_would_do() -> None:
    finding = the_finding(rule, steps())

    # 100 of 1000 ns: every 12 steps it would cost 1 % of the other 900, so every 20 in round numbers.
    assert finding.title == "10% of the step goes to print, called once a step; every 20 steps would do"
    assert finding.saving_ns_per_step == 95
    assert figures_of(finding) == [
        ("share of the step spent on logging", 0.1, "share", 0.01),
        ("calls per step", 1.0, "count", None),
        ("time of one call", 100, "ns", None),
        ("share of the steps that log", 1.0, "share", 0.5),
        ("steps between two logs at which it costs too little to matter", 20, "count", None),
    ]
    assert places_of(finding) == [("train.py", 12, "step")]
    assert finding.remedy.code == (
        "if step % 20 == 0:\n    print(step, loss.item())\n"
        "# or, also for functions and progress bars:\n"
        "from stepscope.remedies import every\n"
        "log_now = every(20)      # once; then: if log_now(step): ..."
    )


def test_python_on_the_calls_line_prepares_it() -> None:
    finding = the_finding(rule, steps(lines=True))

    assert finding.saving_ns_per_step == 150 * 19 // 20
    assert finding.evidence.figures[0].value == 0.15


def test_calls_inside_calls_are_one_and_only_the_devices_idle_time_counts() -> None:
    finding = the_finding(rule, idle_device())

    assert finding.evidence.figures[0].value == pytest.approx(200 / 1000)
    assert finding.evidence.figures[1].value == 1.0


def test_on_a_device_the_hosts_whole_time_counts() -> None:
    # The host prints for 200 of 1000 us in which the device is idle, and launches the next kernel later for it.
    finding = the_finding(rule, idle_device(unit_ns=US))

    assert (finding.saving_from, finding.saving_ns_per_step) == ("replayed", 196 * US)  # every 50 steps it would do


@pytest.mark.parametrize(("program", "what"), [("print_fault", "print"), ("progress_bar_fault", "the progress bar")])
def test_the_promise_is_what_the_twin_without_it_gains(program: str, what: str) -> None:
    faulty, healthy = (recorded(PROGRAMS[name]()) for name in (program, "host_ahead_clean"))

    finding = the_finding(rule, faulty)

    assert what in finding.title
    gain = View(faulty).step_ns - View(healthy).step_ns
    assert finding.saving_ns_per_step == pytest.approx(gain, rel=0.01)


@pytest.mark.parametrize(
    ("name", "kind", "code"),
    [
        ("stepscope.logging#tqdm", "the progress bar", "bar.set_postfix(loss=loss.item())"),
        ("stepscope.logging#logging", "logging", "logger.info("),
        ("tqdm/std.py(1325): refresh", "the progress bar", "bar.set_postfix("),
        ("wandb/sdk/wandb_run.py(1700): log", "Weights & Biases", "run.log("),
        ("torch/utils/tensorboard/writer.py(370): add_scalar", "TensorBoard", "writer.add_scalar("),
        ("sklearn/metrics/_classification.py(150): accuracy_score", "scikit-learn's metrics", "accuracy_score("),
        ("<built-in method writerow of _csv.writer object at 0x7f>", "the CSV writer", "writer.writerow("),
        ("<built-in method flush of _io.TextIOWrapper object at 0x7f>", "writing to a file", "file.write("),
    ],
)
def test_each_kind_has_its_name_and_example(name: str, kind: str, code: str) -> None:
    finding = the_finding(rule, steps(name, frames=not name.startswith("stepscope")))

    assert f"goes to {kind}, called" in finding.title
    assert code in finding.remedy.code


def test_what_recording_its_operators_takes_is_left_out() -> None:
    def printed(warm_up_ns: int | None) -> Finding:
        recording = Recording()
        for number in range(2):
            begin = 1_000_000 * number
            recording.step(begin, 1_000_000, number)
            recording.operator(begin, 400_000, PRINT)
            for index in range(249):
                recording.operator(begin + 1000 + 1500 * index, 1000, "aten::item")
        process = {} if warm_up_ns is None else {"warm_up_ns": warm_up_ns}
        recording.metadata = Metadata(program=ProgramFacts(process=process))
        return the_finding(rule, recording.trace())

    assert printed(None).evidence.figures[0].value == 0.4
    # The step before took 100 us less: 400 ns for each of 250 operators, all of which are inside.
    assert printed(900_000).evidence.figures[0].value == pytest.approx(0.3 / 0.9, abs=1e-6)
    # It took half the time, of which 600 ns for each operator are the profiler's.
    assert printed(500_000).evidence.figures[0].value == pytest.approx(0.25 / 0.85, abs=1e-6)


def test_every_other_step_is_told_as_that() -> None:
    finding = the_finding(rule, steps(every=2))

    assert finding.title.startswith("5% of the step goes to print, called 0.5 times a step")
    assert finding.evidence.figures[3].value == 0.5


def test_the_thresholds_decide() -> None:
    assert asked(rule, steps(), share=0.1).findings
    assert asked(rule, steps(), share=0.11).findings == ()
    assert asked(rule, steps(every=4), steps=0.25).findings


def reading(count: int, *, gradient: bool = False, lines: bool = True, trains: bool = True, model: int = 0) -> Trace:
    """Two steps of 1000 ns: a metric of 300 ns reads `count` values at its second line; it may be trained on.

    Args:
        model: time of a module that the metric's first line calls.
    """
    recording = Recording()
    for number in range(2):
        begin = 1000 * number
        recording.step(begin, 1000, number)
        place = {"source_file": "train.py", "source_function": "score"}
        recording.operator(begin, 500, "aten::mm")
        recording.operator(begin + 620, 5, "aten::mul", source_line=29, sequence_number=number, **place)
        if trains:
            recording.annotation(begin + 960, 1, "Optimizer.step#SGD.step")
        if model:
            recording.module(begin + 605, model, "Net")
        if gradient:
            node = {"sequence_number": number, "forward_thread": 1}
            recording.operator(begin + 950, 20, "autograd::engine::evaluate_function: MulBackward0", **node)
        for index in range(count):
            recording.operator(begin + 700 + 10 * index, 5, "aten::item", source_line=30, **place)
        if lines:
            recording.line(begin, 600, "train.py(12): step")
            recording.line(begin + 600, 100, "train.py(29): score")
            recording.line(begin + 700, 200, "train.py(30): score")
            recording.line(begin + 900, 100, "train.py(12): step")
    return recording.trace()


def checked_for_nan() -> Trace:
    """Two steps whose backward pass reads ten values in one node, as anomaly detection does."""
    recording = Recording()
    for begin in (0, 1000):
        recording.step(begin, 1000, begin)
        recording.operator(begin + 10, 900, "autograd::engine::evaluate_function: MulBackward0")
        for index in range(10):
            place = {"source_file": "train.py", "source_line": 30, "source_function": "main"}
            recording.operator(begin + 20 + 10 * index, 5, "aten::item", **place)
        recording.line(begin, 1000, "train.py(30): main")
    return recording.trace()


def looking_for_unused_parameters() -> Trace:
    """Two steps in whose backward pass DistributedDataParallel asks of ten parameters whether a rank used them."""
    recording = Recording()
    for begin in (0, 1000):
        recording.step(begin, 1000, begin)
        place = {"source_file": "train.py", "source_line": 30, "source_function": "main"}
        for index in range(10):
            at = begin + 20 + 50 * index
            recording.operator(at, 5, "aten::select", **place)
            recording.operator(at + 10, 5, "aten::item", **place)
            recording.operator(at + 20, 5, "torch.distributed.ddp.reducer::copy_bucket_to_grad", **place)
        recording.line(begin, 1000, "train.py(30): main")
    return recording.trace()


SILENT["DistributedDataParallel looks for unused parameters"] = looking_for_unused_parameters
SILENT["what anomaly detection reads in the backward pass"] = checked_for_nan
FIRES["a metric that reads value after value"] = lambda: reading(10)
SILENT["a few values are read"] = lambda: reading(4)


def read_before_the_steps() -> Trace:
    """A value that is read before the first step, and one after the last."""
    recording = Recording()
    recording.operator(0, 10, "aten::item")
    for number in range(2):
        recording.step(1000 * (number + 1), 1000, number)
        recording.operator(1000 * (number + 1), 900, "aten::mm")
    recording.operator(3100, 10, "aten::item")
    return recording.trace()


SILENT["values are read outside of the steps"] = read_before_the_steps


def test_a_metric_that_reads_values_counts_whole() -> None:
    finding = the_finding(rule, reading(10))

    assert finding.evidence.figures[0].value == 0.3
    assert finding.evidence.figures[1].value == 10.0
    assert finding.title.startswith("30% of the step goes to reading values one by one for metrics, called 10 times")
    assert [(place.line, place.function) for place in finding.where] == [(30, "score"), (29, "score")]


def test_of_a_function_that_takes_part_in_the_training_only_the_line_counts() -> None:
    assert the_finding(rule, reading(10, gradient=True)).evidence.figures[0].value == 0.2


@pytest.mark.parametrize("first", [29, 31])
def test_values_of_which_the_program_makes_tensors_are_no_metric(first: int) -> None:
    """Its source is known, and holds one statement that only measures: at the line of the reads, or elsewhere."""
    trace = reading(10)
    measuring = MetricFacts(file="train.py", function="score", first=first, last=first + 1)
    program = ProgramFacts(operations=(OperationFacts(file="train.py"),), metrics=(measuring,))

    found = asked(rule, replace(trace, metadata=Metadata(program=program))).findings

    assert bool(found) is (first <= 30)


def test_what_an_inference_program_reads_is_its_result() -> None:
    assert not asked(rule, reading(10, trains=False)).findings


def test_a_line_that_calls_the_model_is_no_part_of_the_metric() -> None:
    assert the_finding(rule, reading(10, model=50)).evidence.figures[0].value == 0.2


def test_the_number_of_reads_decides() -> None:
    assert asked(rule, reading(4), reads=4).findings
    assert asked(rule, reading(10), reads=11).findings == ()


def test_a_line_that_prints_what_a_trainer_returns_is_charged_for_printing_alone() -> None:
    def printing(*, trains: bool) -> float:
        recording = Recording()
        for step in range(3):
            begin = 1000 * step
            recording.step(begin, 1000, step)
            recording.frame(begin, 1000, "train.py(3): main")
            recording.line(begin, 900, "train.py(10): main")
            recording.operator(begin + 10, 100, "aten::mm")
            if trains:
                recording.operator(begin + 500, 100, "autograd::engine::evaluate_function: MmBackward0")
            recording.annotation(begin + 850, 50, "stepscope.logging#print")
        [found] = asked(rule, recording.trace()).findings
        return next(figure.value for figure in found.evidence.figures if figure.name == "time of one call")

    assert printing(trains=True) == 50
    assert printing(trains=False) > 500
