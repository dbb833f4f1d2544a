"""frequent-evaluation: the model is evaluated too often."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.frequent_evaluation import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import EvaluationFacts, ProgramFacts
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, places_of, the_finding
from tests.unit.recording import Recording


def training(
    *evaluated: int, steps: int = 5, name: str = "Net", facts: EvaluationFacts | None = None, as_long_as: int = 600
) -> Trace:
    """Steps of 300 ns with a model in training mode; after those in `evaluated` line 12 evaluates it: 50 ns for loading
    and 2 calls of a batch each on line 20.
    """
    recording, now = Recording(Metadata(program=ProgramFacts(evaluations=facts))), 0
    for step in range(steps):
        length = 300 + (as_long_as if step in evaluated else 0)
        recording.step(now, length, step)
        if step in evaluated:
            recording.line(now, 5, "train.py(12): train")
            recording.line(now + 5, 50, "train.py(19): evaluate")
            recording.line(now + 55, as_long_as - 60, "train.py(20): evaluate")
            for call in range(2):
                begin = now + 60 + call * (as_long_as // 2 - 40)
                recording.module(begin, as_long_as // 2 - 50, name, evaluates=True)
                recording.operator(begin + 5, 100, "aten::mm")
            recording.line(now + as_long_as - 5, 5, "train.py(12): train")
            now, length = now + as_long_as, 300
        recording.line(now, 250, "train.py(8): train")
        recording.module(now + 10, 200, "Net", evaluates=False)
        recording.operator(now + 20, 100, "aten::mm")
        recording.line(now + 250, 50, "train.py(11): train")
        now += 300
    return recording.trace()


EVERY_FIVE = EvaluationFacts(seen=15, steps=3, every=5.0, step_ns=300, evaluating_ns=900, file="train.py", line=19,
                             function="evaluate")  # fmt: skip

FIRES: Cases = {
    "in each step": lambda: training(0, 1, 2, 3, 4),
    "in one of five steps, as before": lambda: training(2, facts=EVERY_FIVE),
    "in no recorded step": lambda: training(facts=EVERY_FIVE),
}
SILENT: Cases = {
    "nothing": empty_trace,
    "a busy device": busy_device,
    "no evaluation": training,
    "an evaluation whose period is unknown": lambda: training(2),
    "a short evaluation": lambda: training(2, facts=EVERY_FIVE, as_long_as=100),
    "a teacher, which is never trained": lambda: training(0, 1, 2, 3, 4, name="Teacher"),
    "one evaluation before the recording": lambda: training(facts=EvaluationFacts(seen=15, steps=1, every=15.0)),
}


def test_an_evaluation_is_the_whole_line_that_runs_it() -> None:
    finding = the_finding(rule, training(2, facts=EVERY_FIVE))

    figures = {each.name: each.value for each in finding.evidence.figures}
    assert places_of(finding)[0] == ("train.py", 12, "train")
    assert figures["time of one evaluation"] == 600
    assert figures["share of the time in evaluation"] == pytest.approx(600 / (600 + 5 * 300))
    assert figures["steps between two evaluations that take 2 % of the time"] == 100
    assert finding.saving_ns_per_step == pytest.approx((600 / 5) * (1 - 5 / 100), rel=0.02)
    assert finding.saving_from == "replayed"


def test_a_trainers_evaluation_lasts_from_the_end_of_the_training_before_to_its_last_call() -> None:
    """Steps of 1000 ns inside one line of the program, with an evaluation in each, 100 ns after the training."""
    recording = Recording()
    recording.line(0, 4000, "train.py(15): main")
    for step in range(4):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.module(begin + 100, 400, "Net", evaluates=False)
        recording.operator(begin + 110, 100, "aten::mm")
        for call in (0, 200):
            recording.module(begin + 600 + call, 100, "Net", evaluates=True)
            recording.operator(begin + 610 + call, 50, "aten::mm")
    finding = the_finding(rule, recording.trace())

    figures = {each.name: each.value for each in finding.evidence.figures}
    assert (figures["time of one evaluation"], figures["time of a step without one"]) == (400, 600)
    assert places_of(finding) == [("train.py", 15, "main")]


def test_without_a_recorded_evaluation_the_steps_before_the_recording_tell_its_share() -> None:
    finding = the_finding(rule, training(facts=EVERY_FIVE))

    assert finding.saving_share == pytest.approx(120 / 420 * (1 - 5 / 100), rel=0.01)
    assert finding.saving_from == "attributed"
    assert places_of(finding) == [("train.py", 19, "evaluate")]


def test_more_recorded_evaluations_than_usual_promise_no_more() -> None:
    rare = EvaluationFacts(seen=15, steps=2, every=10.0)
    finding = the_finding(rule, training(2, facts=rare))

    assert finding.saving_share == pytest.approx(60 / 360 * (1 - 10 / 100), rel=0.02)


def test_an_evaluation_in_each_step_is_to_run_more_seldom() -> None:
    finding = the_finding(rule, training(0, 1, 2, 3, 4))

    assert finding.saving_share == pytest.approx(2 / 3 * 0.99, rel=0.02)
    assert not asked(rule, training(0, 1, 2, 3, 4), share=0.9).findings
