"""The set of labelled slow trainings: its records are complete, its page current, its scorer counts what it says."""

from __future__ import annotations

import sys

import msgspec
import pytest

from benchmarks.diagnosis_peers import Peer
from benchmarks.labelled import describe, programs, score
from benchmarks.labelled.judging import Finding, Said, truths
from benchmarks.labelled.programs import Program
from stepscope.diagnosis.rules import RULES
from tests.zoo.blind.registry import Kind

IDS = frozenset(rule.id for rule in RULES)
SLOW = Program("zoo/slow", "tests/zoo/slow.py", "a slow loader", ("input-bound",), "", 0.4, lambda _, line: line == 7)
BLIND = Program("blind/slow", "tests/zoo/blind/slow.py", "a slow loader", (), "LOOP", None, lambda _, line: line == 7)


def answers(**said: Said) -> score.Answers:
    return score.Answers("tool", {name.replace("__", "/"): each for name, each in said.items()})


def test_every_rule_that_the_labels_name_exists() -> None:
    named = {rule for each in describe.taxonomy() for rule in each.rules}
    for truth in truths().traces:
        for answer in (*truth.right, *truth.defensible, *truth.must_not, *truth.also):
            named |= set(answer.rules)
    named |= set(msgspec.toml.decode(score.CAUSES.read_bytes()))

    assert named <= IDS


def test_the_classes_are_those_of_the_study() -> None:
    classes = describe.taxonomy()

    assert (len(classes), sum(each.issues for each in classes)) == (15, 706)
    assert sum(each.issues for each in classes if each.dimension == "Data") == 325
    assert all(each.rules or each.uncovered for each in classes)
    assert {kind for each in classes for kind in each.kinds} <= {kind.name for kind in Kind}


def test_every_program_has_a_file_and_a_cause() -> None:
    known = programs.programs()

    assert len({one.name for one in known}) == len(known)
    assert all((describe.PAGE.parents[1] / one.file).is_file() and one.cause for one in known)
    assert all(one.rules or one.is_at for one in known)


def test_the_page_is_current() -> None:
    page = describe.PAGE.read_text()

    assert describe.described(page) == page, "run python benchmarks/labelled/describe.py"


def test_a_first_finding_counts_by_its_rule_and_its_place() -> None:
    found = Finding("input-bound", places=["slow.py:7 load"], saving=0.5)

    row = score.of_programs(answers(zoo__slow__fault=Said([found])), "zoo", [SLOW])

    assert (row.answered, row.first, row.placed, row.error) == (1, 1, (1, 1), pytest.approx(0.1))


def test_a_blind_program_counts_by_its_place_alone() -> None:
    here, elsewhere = (Finding("anything", places=[f"slow.py:{line} load"]) for line in (7, 9))

    assert score.of_programs(answers(blind__slow__fault=Said([here])), "blind", [BLIND]).first == 1
    assert score.of_programs(answers(blind__slow__fault=Said([elsewhere, here])), "blind", [BLIND]).first == 0


def test_what_was_not_answered_is_missed_and_a_promise_on_a_clean_twin_an_alarm() -> None:
    row = score.of_programs(answers(zoo__slow__clean=Said([Finding("x", saving=0.06)])), "zoo", [SLOW])

    assert (row.count, row.answered, row.first, row.alarmed) == (1, 0, 0, (1, 1))


def test_words_stand_for_rules_only_where_none_is_named() -> None:
    words, named = Finding(words="time in DataLoader"), Finding("launch-bound", "time in DataLoader")

    understood = score.understood(answers(a=Said([words, named]))).items["a"].findings

    assert "input-bound" in understood[0].means
    assert not understood[1].means


def test_scores_are_a_table_with_every_group() -> None:
    rows = list(score.scores(answers()))

    traces = [score.CAUSES_KNOWN, score.NOTHING_TO_SAVE, score.NO_TRACES]
    assert [row.group for row in rows] == ["zoo", "simulated", "blind", *traces]
    assert score.table(rows).count("\n") == len(rows) + 1


def test_silence_is_right_only_where_nothing_can_be_saved() -> None:
    rows = {row.group: row for row in score.scores(score.silence())}

    assert rows[score.NOTHING_TO_SAVE].first == rows[score.NOTHING_TO_SAVE].count
    assert [row.first for group, row in rows.items() if group != score.NOTHING_TO_SAVE] == [0] * 5


def test_a_peer_says_what_its_script_prints() -> None:
    trace = describe.PAGE
    good = Peer("tool", "json", sys.executable, 'print(\'{"findings": [{"words": "slow"}]}\')')
    bad = Peer("tool", "json", sys.executable, "raise SystemExit('no device')")

    assert good.said(trace).findings[0].words == "slow"
    assert bad.said(trace).refused == "no device"
    assert (good.says(trace), bad.says(trace)) == ("slow", "fails: no device")
