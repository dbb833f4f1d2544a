"""Metrics and alerts of watched jobs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from stepscope.compare.watching import METRICS, cost_share, failures, growth_per_hour, parsed_alert
from stepscope.errors import UsageError
from stepscope.record.watch_log import Watched
from stepscope.report.watch import alert_sentence


def recording(number: int = 0, **values: object) -> Watched:
    return Watched(job="a", unix_s=600.0 * number, **{"first_step": 1000 + number, **values})  # type: ignore[arg-type]


def turns(alert: str, values: Sequence[float | None]) -> list[tuple[int, str]]:
    """When an alert about step_ms fires and recovers, by the number of the recording; None is a failed one."""
    judge, history, found = parsed_alert(alert), [], []
    for number, value in enumerate(values):
        known = {"problem": "no answer"} if value is None else {"step_ns": value * 1e6}
        history.append(recording(number, **known))
        event = judge.seen(history)
        if event is not None:
            found.append((number, event.state))
    return found


@pytest.mark.parametrize(
    ("alert", "values", "expected"),
    [
        ("step_ms > 300", [], []),
        ("step_ms > 300", [301, 299, 301, 299], []),
        ("step_ms > 300", [299, 301, 302, 303, 304], [(2, "firing")]),
        ("step_ms > 300", [301, 301, 299, 299, 299], [(1, "firing")]),  # within a twentieth of the threshold
        ("step_ms > 300", [301, 301, 280, 301, 280, 280, 301], [(1, "firing"), (5, "recovered")]),
        ("step_ms>=300 for 1", [300, 284, 300], [(0, "firing"), (1, "recovered"), (2, "firing")]),
        ("step_ms < 10 for 3", [9, 9, 9, 10.4, 10.4, 10.4, 10.6, 10.6, 10.6], [(2, "firing"), (8, "recovered")]),
        ("step_ms > 300", [301, None, 301], [(2, "firing")]),
        ("failures >= 2 for 1", [1, None, None, None, 1], [(2, "firing"), (4, "recovered")]),
        ("memory_gib > 0", [1, 1, 1], []),  # unknown
    ],
)
def test_an_alert_fires_once_for_each_crossing(
    alert: str, values: list[float | None], expected: list[tuple[int, str]]
) -> None:
    assert turns(alert, values) == expected


def around(level: float, count: int, seed: int) -> list[float]:
    chance = random.Random(seed)
    return [level * (1 + chance.gauss(0, 0.005)) for _ in range(count)]


def test_a_change_fires_and_recovers_with_a_change_back() -> None:
    values = [*around(300, 20, 1), *around(350, 20, 2), *around(301, 20, 3)]
    (first, firing), (second, recovered) = turns("step_ms changes", values)
    assert (firing, recovered) == ("firing", "recovered")
    assert 20 < first < 30
    assert 40 < second < 50


def test_a_change_further_up_is_told_anew() -> None:
    found = turns("step_ms changes 10%", [*around(300, 15, 1), *around(350, 15, 2), *around(400, 15, 3)])
    assert [state for _, state in found] == ["firing", "firing"]


@pytest.mark.parametrize("values", [around(300, 150, 4), [300.0] * 40, [*around(300, 20, 5), *around(309, 20, 6)]])
def test_what_is_steady_or_changes_little_is_no_change(values: list[float]) -> None:
    assert turns("step_ms changes", values) == []


def test_a_process_that_warms_up_has_not_changed() -> None:
    judge, history = parsed_alert("step_ms changes"), []
    for number, value in enumerate([*around(900, 9, 1), *around(300, 20, 2)]):
        history.append(recording(number, first_step=11 * number, step_ns=value * 1e6))
        assert judge.seen(history) is None


def test_a_change_tells_both_levels_and_what_grew() -> None:
    judge, history = parsed_alert("step_ms changes"), []
    for number, value in enumerate([*around(40, 10, 1), *around(50, 10, 2)]):
        times = {"step_ns": value * 1e6, "recorded_step_ns": value * 1e6}
        history.append(recording(number, **times, causes={"input": (value - 35) * 1e6, "compute": 35e6}))
        event = judge.seen(history)
        if event is not None:
            break
    assert event is not None
    assert (event.before, event.value) == (pytest.approx(40, rel=0.01), pytest.approx(50, rel=0.01))
    assert (event.limit, event.growth) == (None, "input")
    words = alert_sentence(judge, event, history)
    assert words.startswith("a: a step takes ")
    assert "most of the growth is input" in words


def test_a_threshold_is_told_with_unit_and_cause() -> None:
    judge = parsed_alert("step_ms > 40")
    history = [
        recording(number, step_ns=step * 1e6, recorded_step_ns=step * 1e6, causes={"input": (step - 30) * 1e6})
        for number, step in enumerate([35, 133.7, 133.7])
    ]
    events = [judge.seen(history[: count + 1]) for count in range(3)]
    assert events[:2] == [None, None]
    assert events[2] is not None
    assert alert_sentence(judge, events[2], history) == (
        "a: a step takes 133.7 ms, above 40.0 ms, in 2 recordings in a row; most of the growth is input"
    )


def test_an_event_has_the_value_and_the_limit() -> None:
    event = parsed_alert("idle_percent.input > 20 for 1").seen(
        [recording(recorded_step_ns=100.0, causes={"input": 30})]
    )
    assert event is not None
    assert (event.state, event.value, event.limit) == ("firing", 30.0, 20.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not an alert"),
        ("step_ms", "is not an alert"),
        ("step_ms > 3 ms", "is not an alert"),
        ("step_ms > 3 for 0", "for 1 recording or more"),
        ("steps > 3", "there is no metric 'steps'; the metrics are step_ms"),
        ("idle_percent.moon > 3", "there is no cause 'moon'; the causes are input"),
        ("__import__('os') > 3", "is not an alert"),
    ],
)
def test_what_is_no_alert_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parsed_alert(text)


def test_every_metric_of_a_full_recording_and_none_of_an_empty_one() -> None:
    full = {"step_ns": 2e6, "recorded_step_ns": 4e6, "causes": {"input": 1e6}, "communication_ns": 2e6, "wait_ns": 1e6}
    more = {"memory_bytes": 2**30, "device_bytes": 2**31, "cost_s": 3.0, "interval_s": 600.0}
    history = [recording(number, **full, **more) for number in range(4)]
    assert {name: value(history) for name, value in METRICS.items()} == {
        "step_ms": 2.0,
        "recorded_step_ms": 4.0,
        "idle_percent": 25.0,
        "communication_percent": 50.0,
        "wait_ms": 1.0,
        "memory_gib": 1.0,
        "device_memory_gib": 2.0,
        "memory_gib_per_hour": 0.0,
        "device_memory_gib_per_hour": 0.0,
        "cost_percent": 0.5,
        "failures": 0.0,
    }
    assert {name for name, value in METRICS.items() if value([recording()]) is not None} == {"failures"}


def test_the_trend_of_memory_holds_against_one_outlier() -> None:
    sizes = [100, 110, 999, 130, 140, 150]
    history = [recording(number, memory_bytes=size) for number, size in enumerate(sizes)]
    assert growth_per_hour(history, lambda each: each.memory_bytes) == pytest.approx(60)
    assert growth_per_hour(history[:3], lambda each: each.memory_bytes) is None


def test_the_trend_of_memory_begins_anew_with_the_job() -> None:
    sizes = [9000, 9000, 9000, 9000, None, 100, 110, 120, 130]
    steps = [100, 200, 300, 400, None, 50, 150, 250, 350]
    history = [recording(n, memory_bytes=size, first_step=steps[n]) for n, size in enumerate(sizes)]
    assert growth_per_hour(history, lambda each: each.memory_bytes) == pytest.approx(60)


def test_the_cost_is_a_share_of_the_job_and_at_least_nothing() -> None:
    assert cost_share([recording()]) is None
    assert cost_share([recording(cost_s=-0.1, interval_s=100.0)]) == 0
    assert cost_share([recording(cost_s=-1.0, interval_s=100.0), recording(cost_s=2.0, interval_s=100.0)]) == 0.005


def test_failures_in_a_row() -> None:
    failed, whole = recording(problem="no answer"), recording()
    assert [failures(each) for each in ([whole], [failed, whole, failed, failed], [failed])] == [0, 2, 1]
