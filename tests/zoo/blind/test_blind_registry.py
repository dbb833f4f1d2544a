"""The blind programs' truth is complete and fits their files."""

from __future__ import annotations

import ast

import pytest

from benchmarks.blind_accuracy import Score
from stepscope.diagnosis.rules import RULES
from tests.zoo.blind.registry import FOLDER, NAMES, TRUTHS, Alarm, Gain, Kind, Truth, alarms, gains

MACHINERY = {"__init__", "advice", "gains", "registry", "stopwatch", "test_blind_programs", "test_blind_registry"}
LEAST_GAIN = 0.1


def test_every_program_is_listed_once() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")} - MACHINERY
    folders = {path.parent.name for path in FOLDER.glob("*/*.py")}

    assert scripts | folders == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_programs_truth_is_complete(name: str) -> None:
    one = TRUTHS[name]

    assert one.path.is_file()
    assert one.lines()
    assert all(one.is_at(*place) for place in one.lines())
    assert one.cause.endswith(".")
    assert one.change.endswith(".")
    assert one.half in range(1, 7)


@pytest.mark.parametrize("name", NAMES)
def test_a_program_has_a_twin_and_the_function_whose_calls_are_its_steps(name: str) -> None:
    text = TRUTHS[name].path.read_text()
    functions = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}

    assert '"--mended"' in text
    assert {"main", TRUTHS[name].step_function or "main"} <= functions


@pytest.mark.parametrize("name", NAMES)
def test_a_step_gains_enough_without_the_fault(name: str) -> None:
    assert gains()[name].share >= LEAST_GAIN


@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name, of_rules in alarms().items() for rule in of_rules])
def test_a_measured_promise_is_of_a_known_program_and_rule(name: str, rule: str) -> None:
    one = alarms()[name][rule]

    assert name in NAMES
    assert rule in {each.id for each in RULES}
    assert one.verdict == one.verdict_of(one.promised)
    assert one.change.endswith(".")
    assert one.pairs
    assert one.measured in ("processor", "clock")


def test_a_promise_is_confirmed_by_half_of_it_and_kept_in_part_by_a_quarter() -> None:
    one = Alarm(0.1, 0.05, 0.04, 0.06, "clock", 6, "confirmed", "")

    assert [one.verdict_of(promised) for promised in (0.1, 0.2, 0.25)] == ["confirmed", "partly", "refuted"]


@pytest.mark.parametrize(
    ("alarms_above", "is_right"),
    [
        ([], True),
        ([("padding-waste", 0.2)], True),
        ([("padding-waste", 0.9)], False),  # far more than was gained
        ([("padding-waste", 0.2), ("fusible-chain", 0.1)], False),  # which nobody measured
    ],
)
def test_a_twin_is_silent_or_all_that_is_said_of_it_was_confirmed(
    alarms_above: list[tuple[str, float]], is_right: bool
) -> None:
    said = tuple((rule, share, "") for rule, share in alarms_above)
    one = Score("tagger", None, None, False, None, None, 0.0, said)

    assert one.is_silent_or_confirmed is is_right


def test_about_half_of_the_faults_are_data_operations() -> None:
    data = sum(one.kind.value.startswith("data operations") for one in TRUTHS.values())

    assert 0.4 <= data / len(TRUTHS) <= 0.6


def test_a_place_is_right_on_a_planted_line_or_in_its_function() -> None:
    one = Truth("sensors.py", Kind.STATISTIC_AGAIN, "", "")
    (_, first), *_ = sorted(one.lines())

    assert one.is_at("/home/user/sensors.py", first)
    assert one.is_at("sensors.py", first - 1)
    assert not one.is_at("sensors.py", 1)
    assert not one.is_at("elsewhere.py", first)


def test_a_gain_is_a_share_of_the_faulty_step() -> None:
    gain = Gain(fault_ms=10.0, mended_ms=9.0, fault_cpu_ms=8.0, mended_cpu_ms=6.0, runs=3, load=1.0)

    assert (gain.share, gain.clock_share) == (0.25, pytest.approx(0.1))
