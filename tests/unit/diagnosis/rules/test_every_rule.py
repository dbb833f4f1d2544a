"""What holds for every rule."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import pytest

from stepscope.diagnosis import diagnose
from stepscope.diagnosis.finding import RuleResult
from stepscope.diagnosis.rule import SECTIONS, Rule, Threshold
from stepscope.diagnosis.rules import RULES
from stepscope.diagnosis.view import View
from stepscope.errors import UsageError
from stepscope.trace import Trace
from tests.simulator.programs import PROGRAMS
from tests.unit.diagnosis.rules.cases import Cases, empty_trace, recorded
from tests.unit.recording import Recording

MODULES = tuple(import_module(f"tests.unit.diagnosis.rules.test_{rule.id.replace('-', '_')}") for rule in RULES)
FIRES: dict[str, Cases] = {module.rule.id: module.FIRES for module in MODULES}
SILENT: dict[str, Cases] = {module.rule.id: module.SILENT for module in MODULES}
PAGES = Path(__file__).resolve().parents[4] / "docs" / "rules"
UNITS = {"share", "ns", "bytes", "count"}


@lru_cache(maxsize=100)
def view_of(make: Callable[[], Trace]) -> View:
    """One for all rules that have this case."""
    return View(make())


def cases_of(cases: dict[str, Cases]) -> list[object]:
    return [
        pytest.param(rule, cases[rule.id][name], id=f"{rule.id}: {name}")
        for rule in RULES
        for name in cases.get(rule.id, {})
    ]


def device_without_launches() -> Trace:
    recording = Recording()
    recording.work(10, 20, "gemm")
    recording.work(50, 0, "nothing")
    recording.work(60, 20, "ncclAllReduce", kind="communication")
    recording.work(90, 5, "Memcpy HtoD", kind="copy_in")
    return recording.trace()


def launches_without_operators() -> Trace:
    recording = Recording()
    recording.launched(0, 10, 20, "gemm", 101)
    recording.launch(15, 20, 102, name="cudaDeviceSynchronize", kind="synchronise")
    recording.launched(60, 70, 20, "gemm", 103)
    return recording.trace()


def one_moment() -> Trace:
    recording = Recording()
    recording.step(5, 0, 1)
    recording.operator(5, 0, "aten::mm")
    recording.launch(5, 0, 101)
    recording.work(5, 0, "gemm", 101)
    return recording.trace()


def host_only() -> Trace:
    recording = Recording()
    recording.operator(0, 10, "aten::mm")
    return recording.trace()


def work_on_a_lane_of_another_device() -> Trace:
    recording = Recording()
    recording.step(1000, 100, 1)
    recording.launched(0, 10, 20, "gemm", 101, device="0")
    recording.launched(1050, 5000, 20, "gemm", 102, device="1")
    return recording.trace()


def frames_only() -> Trace:
    recording = Recording()
    recording.frame(0, 10, "train.py(1): <module>")
    return recording.trace()


def launch_before_everything() -> Trace:
    recording = Recording()
    recording.launch(50, 5, 101)
    recording.work(10, 20, "early", 101)
    recording.work(100, 20, "late", 101)
    return recording.trace()


AWKWARD: Cases = {
    "empty": empty_trace,
    "device without launches": device_without_launches,
    "launches without operators": launches_without_operators,
    "one moment": one_moment,
    "host only": host_only,
    "steps apart from the device": work_on_a_lane_of_another_device,
    "frames only": frames_only,
    "work before its launch": launch_before_everything,
}


def test_every_rule_is_tested() -> None:
    assert list(FIRES) == [rule.id for rule in RULES]
    assert all(FIRES[rule.id] and SILENT[rule.id] for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_says_who_it_is(rule: Rule) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", rule.id)
    assert rule.check.__module__.rpartition(".")[2] == rule.id.replace("-", "_")
    assert rule.title
    assert not rule.title.endswith(".")
    assert rule.thresholds
    for name, threshold in rule.thresholds.items():
        assert re.fullmatch("[a-z_]+", name)
        assert isinstance(threshold, Threshold)
        assert threshold.unit in UNITS
        assert threshold.meaning
    assert re.findall(r"^# (.+)$", rule.page, re.MULTILINE) == list(SECTIONS)
    assert (PAGES / f"{rule.id}.md").is_file()


def test_names_of_rules_are_unique() -> None:
    assert len({rule.id for rule in RULES}) == len({rule.title for rule in RULES}) == len(RULES)


def check_result(rule: Rule, view: View, result: RuleResult) -> None:
    for finding in result.findings:
        assert finding.rule == rule.id
        assert 0 <= finding.saving_ns_per_step <= view.step_ns
        assert finding.saving_share == finding.saving_ns_per_step / view.step_ns
        assert finding.severity in ("high", "medium", "low", "note")
        assert finding.title
        assert finding.saving_basis
        assert finding.remedy.text
        assert finding.remedy.code
        assert any(figure.threshold is not None for figure in finding.evidence.figures)
        assert all(0 < place.share <= 1 for place in finding.where)
    for question in result.not_answered:
        assert question.rule == rule.id
        assert question.question.endswith("?")
        assert question.why
        assert question.how


@pytest.mark.parametrize(("rule", "make"), cases_of(FIRES))
def test_it_fires(rule: Rule, make: Callable[[], Trace]) -> None:
    view = view_of(make)

    result = rule.ask(view)

    assert len(result.findings) >= 1
    for finding in result.findings:
        matters = finding.saving_ns_per_step > 0 or finding.ends_run_in_ns is not None
        assert matters != (finding.severity == "note")
    check_result(rule, view, result)


@pytest.mark.parametrize(("rule", "make"), cases_of(SILENT))
def test_it_stays_silent(rule: Rule, make: Callable[[], Trace]) -> None:
    view = view_of(make)

    result = rule.ask(view)

    assert result.findings == ()
    check_result(rule, view, result)


@pytest.mark.parametrize("make", AWKWARD.values(), ids=AWKWARD)
def test_no_rule_fails_on_an_awkward_trace(make: object) -> None:
    assert callable(make)
    trace = make()
    eager = {f"{rule.id}.{name}": 0.0 for rule in RULES for name in rule.thresholds}
    for settings in ({}, eager):
        view = View(trace, settings)
        for rule in RULES:
            check_result(rule, view, rule.ask(view))
        diagnosis = diagnose(trace, settings=settings, minimum_share=0.0)
        assert all(finding.saving_ns_per_step <= diagnosis.step_ns for finding in diagnosis.findings)


def test_findings_are_ranked_and_small_ones_counted() -> None:
    trace = recorded(PROGRAMS["pageable_copy_fault"]())

    diagnosis = diagnose(trace, rules=["host-synchronisation", "exposed-copy"])

    assert [finding.rule for finding in diagnosis.findings] == ["exposed-copy", "host-synchronisation"]
    assert (diagnosis.hidden, diagnosis.step_count) == (0, 6)
    small = diagnose(trace, rules=["host-synchronisation", "exposed-copy"], minimum_share=0.05)
    assert [finding.rule for finding in small.findings] == ["exposed-copy"]
    assert small.hidden == 1


@pytest.mark.parametrize(
    ("rules", "settings", "message"),
    [
        (["input-bund"], {}, "there is no rule 'input-bund'; did you mean input-bound?"),
        (["xyz"], {}, "there is no rule 'xyz'; the rules are input-bound, "),
        (None, {"input-bound": 1.0}, "there is no threshold 'input-bound'; this rule has input-bound.share"),
        (
            None,
            {"input-bound.length": 1.0},
            "there is no threshold 'input-bound.length'; this rule has input-bound.share",
        ),
        (None, {"nothing.share": 1.0}, "there is no rule 'nothing'"),
    ],
)
def test_unknown_rules_and_thresholds(rules: list[str] | None, settings: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        diagnose(empty_trace(), rules=rules, settings=settings)

    assert str(raised.value).startswith(message)
