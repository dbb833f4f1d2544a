"""The zoo's list is complete, and every program says what is planted where."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.diagnosis.rules import RULES
from tests.zoo import registry, verdict
from tests.zoo.measure import findings
from tests.zoo.registry import Program
from tests.zoo.simulated import SIMULATED
from tests.zoo.verdict import Verdict

RULE_NAMES = {rule.id for rule in RULES}
NOT_PROGRAMS = {"command", "language", "measure", "models", "promise", "registry", "simulated", "timing", "verdict"}


def test_every_file_is_listed() -> None:
    files = {path.stem for path in registry.FOLDER.glob("*.py") if not path.stem.startswith(("_", "test_"))}

    assert files - NOT_PROGRAMS == set(registry.PROGRAMS)
    assert len(registry.PROGRAMS) == len(set(registry.PROGRAMS)) >= 30


@pytest.mark.parametrize("name", registry.PROGRAMS)
def test_a_program_expects_a_rule_that_there_is_and_marks_its_lines(name: str) -> None:
    program = registry.program(name)

    assert program.rule in RULE_NAMES
    assert program.lines
    assert program.planted.endswith(".")
    file, line = min(program.lines)
    assert program.names_the_line(f"/home/user/{file}", line)
    assert not program.names_the_line("elsewhere.py", line)


def test_simulated_programs_expect_rules_that_there_are() -> None:
    assert {one.rule for one in SIMULATED} <= RULE_NAMES
    assert len({one.name for one in SIMULATED}) == len(SIMULATED)


def test_what_is_planted_is_read_from_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FOLDER", tmp_path)
    said = "Something.\n\nPlanted: a loop.\nExpected: loop-in-step\nRanks: 2\nSaves: memory\n"
    text = f'"""{said}"""\nfirst()\nsecond()  # planted\n'
    (tmp_path / "small.py").write_text(text)

    assert registry.program("small") == Program(
        "small", "a loop.", "loop-in-step", frozenset({("small.py", 9)}), 2, True, False
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [('"""Nothing."""\n', "marks no line"), ('"""Planted: it."""\nx = 1  # planted\n', "begins with 'Expected'")],
)
def test_a_program_that_does_not_say_what_is_planted_is_refused(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "FOLDER", tmp_path)
    (tmp_path / "silent.py").write_text(text)

    with pytest.raises(ValueError, match=message):
        registry.program("silent")


def found(rule: str, saving_ns: int, line: int = 1) -> dict[str, object]:
    """A finding of a step of 100 ns, as the JSON report has it."""
    place = {"file": "train.py", "line": line}
    share = saving_ns / 100
    return {"rule": rule, "title": rule, "saving_ns_per_step": saving_ns, "saving_share": share, "where": [place]}


def test_ranks_that_say_the_same_count_once_with_the_larger_saving() -> None:
    first = {"findings": [found("a", 10), found("b", 7)]}
    second = {"findings": [found("a", 20), found("b", 6, line=2)]}

    assert [(one["rule"], one["saving_ns_per_step"]) for one in findings([first, second])] == [
        ("a", 20),
        ("b", 7),
        ("b", 6),
    ]


def test_of_equal_savings_what_is_said_of_all_ranks_comes_first() -> None:
    together, alone = {"findings": [found("late-rank", 20)]}, {"findings": [found("exposed-communication", 20)]}

    assert [one["rule"] for one in findings([together, alone])] == ["late-rank", "exposed-communication"]


def test_one_report_keeps_its_order() -> None:
    note, saving = found("memory-growth", 0), found("b", 7)

    assert findings([{"findings": [note, saving]}]) == [note, saving]


def test_a_promise_is_held_against_the_gain_as_shares_of_the_step() -> None:
    one = Verdict("p", "a", "a", True, 0.3, 30, (), fault_ns=50.0, clean_ns=30.0)

    assert (one.is_first, one.real_ns, one.real_share, one.error) == (True, 20.0, 0.4, pytest.approx(0.25))
    assert verdict.promised([found("a", 10), found("b", 5), found("a", 20)], "a") == (pytest.approx(0.3), 30)
    assert verdict.promised([found("b", 5)], "a") is None
    assert verdict.alarms([found("a", 6), found("b", 5)]) == (("a", 0.06, "a"),)
