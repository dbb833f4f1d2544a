"""The judge of answers about recordings: each verdict, and each way to be wrong."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.labelled.judging import Answer, Finding, Said, Truth, Verdict, judge, truths

LAUNCHES = Finding("launch-bound", "the host is too slow", ["train.py:3 step"], 0.4)
INPUT = Finding("input-bound", "the loader is slow", ["data.py:9 __getitem__"], 0.3)


def judged(said: Said, **of_truth: Any) -> Verdict:
    return judge("trace.json", Truth(["trace.json"], "", "", **of_truth), said)


def test_the_first_finding_decides() -> None:
    right = [Answer(rules=["launch-bound"])]

    assert judged(Said([LAUNCHES, INPUT]), right=right).first == "right"
    assert judged(Said([INPUT, LAUNCHES]), right=right).first == "wrong"
    assert judged(Said(), right=right).first == "missed"


def test_a_defensible_answer_gives_its_reason() -> None:
    verdict = judged(Said([INPUT]), defensible=[Answer(rules=["input-bound"], why="as large as the rest")])

    assert (verdict.first, verdict.why) == ("defensible", "as large as the rest")
    assert verdict.holds


@pytest.mark.parametrize(
    ("answer", "fits"),
    [
        (Answer(rules=["input-bound"], place="data"), True),
        (Answer(rules=["input-bound"], place="model"), False),
        (Answer(says="loader"), True),
        (Answer(says="__getitem__"), True),
        (Answer(says="sampler"), False),
        (Answer(quiet=True), False),
    ],
)
def test_all_that_an_answer_names_must_match(answer: Answer, fits: bool) -> None:
    assert answer.fits(INPUT) is fits


def test_where_nothing_can_be_promised_silence_is_right() -> None:
    small = Finding("launch-bound", "the host is too slow", saving=0.04)

    assert judged(Said(), quiet=True).first == "right"
    assert judged(Said([small]), quiet=True).first == "right"
    assert judged(Said([LAUNCHES]), quiet=True).first == "wrong"
    assert judged(Said(), right=[Answer(rules=["input-bound"])]).first == "missed"


def test_silence_is_defensible_only_with_its_reason() -> None:
    silence = [Answer(quiet=True, says="device is unknown", why="no rate can be called low")]

    assert judged(Said(notes=["The device is unknown."]), defensible=silence).first == "defensible"
    assert judged(Said(), defensible=silence).first == "missed"


def test_what_must_not_be_said_is_a_false_alarm_once_for_each_reason() -> None:
    ban = [Answer(rules=["launch-bound"], over=0.1, why="one launch of many")]

    assert len(judged(Said([LAUNCHES, LAUNCHES]), must_not=ban).alarms) == 1
    assert not judged(Said([Finding("launch-bound", saving=0.05)]), must_not=ban).alarms
    assert judged(Said([INPUT]), must_not=[Answer(says="loader", why="no loader")]).faults == ("first", "alarms")


def test_advice_for_training_is_false_where_nothing_is_trained() -> None:
    finding = Finding("launch-bound", "the host is too slow", saving=0.4, advice="call zero_grad(set_to_none=True)")

    assert judged(Said([finding]), kind="inference").alarms
    assert not judged(Said([finding]), kind="training").alarms


def test_an_empty_claim_is_false_everywhere() -> None:
    assert judged(Said([Finding("numa-misplacement", "it runs on None processors")])).alarms


def test_what_should_be_said_besides_is_missed() -> None:
    expected = {"names": ["once"], "also": [Answer(rules=["input-bound"])]}

    assert len(judged(Said([LAUNCHES]), **expected).missed) == 2
    assert not judged(Said([LAUNCHES, INPUT], notes=["The first launch comes once."]), **expected).missed


@pytest.mark.parametrize(
    ("said", "off"),
    [
        (Said([LAUNCHES], step_ms=10, busy=[0.5]), 0),
        (Said([LAUNCHES], step_ms=13, busy=[0.5]), 1),
        (Said([LAUNCHES], busy=[0.5]), 1),
        (Said([LAUNCHES], step_ms=10, busy=[0.5, 0.9]), 1),
        (Said([LAUNCHES], step_ms=10), 1),
        (Said([Finding("launch-bound", saving=0.9)], step_ms=10, busy=[0.5]), 1),
    ],
)
def test_figures_outside_their_bounds_are_off(said: Said, off: int) -> None:
    right = [Answer(rules=["launch-bound"])]

    verdict = judged(said, right=right, step_ms=(9, 11), busy=(0.4, 0.6), saving=(0.3, 0.5))

    assert len(verdict.figures) == off


def test_a_refusal_is_right_in_one_sentence_and_where_it_is_due() -> None:
    assert judged(Said(refused="this is a table\n"), refused=True).first == "right"
    assert judged(Said(refused="Traceback (most recent call last):\nboom"), refused=True).first == "wrong"
    assert judged(Said([LAUNCHES]), refused=True).first == "wrong"
    assert judged(Said(refused="this is a table")).first == "wrong"


def test_the_truths_are_complete() -> None:
    known = truths()

    assert all(truth.found_by and truth.truth for truth in known.traces)
    assert {truth.source for truth in known.traces} <= set(known.sources)
    assert all(truth.refused or truth.quiet or truth.right for truth in known.traces)
