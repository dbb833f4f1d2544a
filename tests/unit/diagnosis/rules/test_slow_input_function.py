"""slow-input-function: one function makes batches slow, and workers would not hide it."""

from __future__ import annotations

from stepscope.diagnosis import diagnose
from stepscope.diagnosis.rules.slow_input_function import RULE as rule
from stepscope.trace import Trace
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.diagnosis.rules.loaders import ALONE, MS, facts, loading


def slow_collate(processors: int = 2) -> Trace:
    """A batch takes 180 ms, of which the collate function takes 150, before a computation of 60 ms."""
    return loading(180, facts(processors=processors, item_ms=30, collate_ms=150, busy_ms=240)).trace()


def with_workers() -> Trace:
    """Two workers on two processors make a batch in 200 ms, 160 of them in the transform."""
    program = facts(workers=2, processors=2, item_ms=200, transform_ms=160, busy_ms=60)
    return loading(70, program, workers=True).trace()


def by_frames() -> Trace:
    """Two steps of 100 ns, of which a loader without workers takes 80, and 60 of those one of its functions."""
    recording = loading([0, 0], compute_ms=0)
    for begin in (0, 100):
        recording.step(begin, 100, begin)
        recording.annotation(begin, 80, ALONE)
        recording.frame(begin + 1, 78, "torch/utils/data/_utils/fetch.py(25): fetch")
        recording.frame(begin + 2, 60, "data.py(30): join")
        recording.operator(begin + 85, 15, "aten::mm")
    return recording.trace()


FIRES: Cases = {
    "collate, and no processors for workers": slow_collate,
    "a transform in workers": with_workers,
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "workers would hide it": lambda: slow_collate(8),
    "without knowing the processors workers are the remedy": by_frames,
    "no function is known": lambda: loading(180).trace(),
    "the workers that are there make batches fast enough": lambda: loading(
        [200, 1, 1, 1], facts(workers=2, processors=4, item_ms=80, busy_ms=60), workers=True
    ).trace(),
    "loading is quick": lambda: loading(2, facts(processors=2, item_ms=2)).trace(),
}


def test_the_collate_function_and_what_the_step_loses_to_it() -> None:
    finding = the_finding(rule, slow_collate())

    assert finding.title == (
        "the collate function join takes 83% of the time to make a batch, for which the step waits 75% of its time"
    )
    assert finding.saving_ns_per_step == 150 * MS  # of 240 ms
    assert figures_of(finding) == [
        ("share of the step lost to waiting for this function", 0.625, "share", 0.05),
        ("share of the time to make a batch", 150 / 180, "share", 0.5),
        ("time of one call", 150 * MS, "ns", None),
        ("calls per batch", 1.0, "count", None),
        ("worker processes", 0, "count", None),
        ("processors the program may use", 2, "count", None),
        ("time to make a batch", 180 * MS, "ns", None),
    ]
    assert places_of(finding) == [("train.py", 7, "main")]  # the line at which the process was
    assert "torch.stack(inputs)" in finding.remedy.code


def test_in_workers_the_waits_that_remain_are_not_saved() -> None:
    finding = the_finding(rule, with_workers())

    # A step of 130 ms; without the transform a batch takes 40 ms, or 20 with two workers, and the computation 60.
    assert finding.saving_ns_per_step == 70 * MS
    assert finding.title.startswith("the transform Blur.__call__ takes 80% of the time to make a batch")
    assert places_of(finding) == [("data.py", 20, "__call__")]
    assert "self.cache[index] = self.__call__(index)" in finding.remedy.code


def test_it_takes_the_place_of_the_general_finding() -> None:
    rules = [finding.rule for finding in diagnose(slow_collate()).findings]

    assert "slow-input-function" in rules
    assert "input-bound" not in rules


def test_the_threshold_decides() -> None:
    assert asked(rule, slow_collate(), share=0.62).findings
    assert asked(rule, slow_collate(), share=0.63).findings == ()
