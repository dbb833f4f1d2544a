"""step-variance: some steps take much longer than others."""

from __future__ import annotations

from stepscope.diagnosis.finding import Interval
from stepscope.diagnosis.rules.step_variance import RULE as rule
from stepscope.trace import Trace
from tests.simulator.programs import item_every_step, two_queue_dependency
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, recorded, the_finding
from tests.unit.recording import Recording

MILLISECOND = 1_000_000


def steps_of(*durations_ms: int) -> Trace:
    recording, now = Recording(), 0
    for number, duration in enumerate(durations_ms):
        recording.step(now, duration * MILLISECOND, number)
        now += duration * MILLISECOND
    return recording.trace()


UNEVEN = (*[10] * 4, 100, *[10] * 5, 90)
FIRES: Cases = {"one slow step": lambda: steps_of(100, 100, 100, 100, 200), "two of eleven": lambda: steps_of(*UNEVEN)}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "equal steps": lambda: recorded(item_every_step()),
    "no steps": lambda: recorded(two_queue_dependency()),
    "two steps": lambda: steps_of(100, 200),
    "a cut step": lambda: steps_of(100, 100, 100, 100, 10),
    "some quick steps": lambda: steps_of(100, 100, 60, 100, 100),
    "slow by little": lambda: steps_of(100, 100, 100, 100, 110),
}


def test_a_note_says_how_far_the_mean_is_above_the_median() -> None:
    finding = the_finding(rule, steps_of(100, 100, 100, 100, 200))

    assert (finding.saving_ns_per_step, finding.severity) == (0, "note")
    assert finding.confidence == "low"
    assert finding.title == "steps take from 100.0 ms to 200.0 ms; the typical one is 17% shorter than the mean"
    assert figures_of(finding) == [
        ("mean step above the median, as a share of the mean", 20 / 120, "share", 0.05),
        ("mean step", 120.0 * MILLISECOND, "ns", None),
        ("median step", 100 * MILLISECOND, "ns", None),
        ("number of the longest step", 4, "count", None),
        ("shortest step", 100 * MILLISECOND, "ns", None),
        ("longest step", 200 * MILLISECOND, "ns", None),
        ("steps compared", 5, "count", None),
        ("longest step above the typical one, by the cause untraced", 100 * MILLISECOND, "ns", None),
    ]
    assert finding.evidence.intervals == (
        Interval(400 * MILLISECOND, 200 * MILLISECOND, "step 4"),
        Interval(0, 100 * MILLISECOND, "step 0"),
        Interval(100 * MILLISECOND, 100 * MILLISECOND, "step 1"),
    )
    assert finding.remedy.code == "stepscope diagnose TRACE --steps 4"


def test_the_cause_of_the_longest_step_is_named() -> None:
    recording, now = Recording(), 0
    for number, loading in enumerate((10, 10, 10, 90)):
        recording.step(now, (100 + loading) * MILLISECOND, number)
        recording.annotation(now, loading * MILLISECOND, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
        recording.operator(now + loading * MILLISECOND, 100 * MILLISECOND, "aten::mm")
        now += (100 + loading) * MILLISECOND

    figure = figures_of(the_finding(rule, recording.trace()))[-1]

    assert figure == ("longest step above the typical one, by the cause input", 80 * MILLISECOND, "ns", None)


def test_ten_steps_tell_more() -> None:
    assert the_finding(rule, steps_of(*UNEVEN)).confidence == "medium"
    assert asked(rule, steps_of(*[10] * 9, 100)).findings == ()  # a single one is set apart


def test_the_thresholds_decide() -> None:
    slow = steps_of(100, 100, 100, 100, 200)

    assert asked(rule, slow, share=0.17).findings == ()
    assert asked(rule, slow, steps=6).findings == ()
    assert asked(rule, steps_of(100, 100, 100), share=0.0).findings == ()
    assert len(asked(rule, steps_of(100, 100, 100, 100, 110), share=0.01).findings) == 1
