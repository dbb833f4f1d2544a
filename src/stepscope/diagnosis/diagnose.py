"""Asking every rule about a trace, and ranking what they say."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType

from stepscope.analysis.engines import engine_uses
from stepscope.analysis.host_time import host_summary, host_time
from stepscope.analysis.idle import device_window, idle_summary
from stepscope.analysis.kernels import kernel_table
from stepscope.analysis.naming import DEFAULT_USER_CODE, UserCode
from stepscope.analysis.operators import operator_table
from stepscope.analysis.summary import device_uses, host_use
from stepscope.diagnosis.diagnosis import Afterwards, DeviceSummary, Diagnosis, Together
from stepscope.diagnosis.finding import Finding, NotAnswered
from stepscope.diagnosis.parts import PARTS, needs_of
from stepscope.diagnosis.rules import RULES
from stepscope.diagnosis.view import View
from stepscope.errors import UsageError
from stepscope.trace import Trace
from stepscope.whatif.changes import together

MINIMUM_SHARE = 0.01
AFTERWARDS_SHARE = 0.05
"""Findings that save so much once others are gone are named, though they save next to nothing now."""
MOST_AFTERWARDS = 10
"""Of the findings that are not shown, those with the largest savings are tried: each takes a replay."""
EXPLAINED = 0.5
"""Share of a general finding's saving that more precise findings must explain to take its place."""


def diagnose(
    trace: Trace,
    *,
    rules: Sequence[str] | None = None,
    settings: Mapping[str, float] | None = None,
    top: int = 20,
    minimum_share: float = MINIMUM_SHARE,
    user_code: UserCode = DEFAULT_USER_CODE,
) -> Diagnosis:
    """Why the step of this trace is slow.

    Args:
        rules: identifiers of the rules to ask; all by default.
        settings: thresholds to use instead of the defaults, by "rule.threshold".
        top: rows of the operator and kernel tables to keep; 0 for all.
        minimum_share: findings that save less than this share of the step are counted and not kept.
        user_code: which files are the user's, beside those that are no library's.

    Raises:
        UsageError: an unknown rule or threshold.
    """
    _check_settings(settings or {})
    return diagnose_view(View(trace, settings, user_code), rules=rules, top=top, minimum_share=minimum_share)


def diagnose_view(
    view: View, *, rules: Sequence[str] | None = None, top: int = 20, minimum_share: float = MINIMUM_SHARE
) -> Diagnosis:
    """As `diagnose`, of a trace of which more is asked: what was computed for the diagnosis stays with the view.

    Raises:
        UsageError: an unknown rule.
    """
    findings, questions = asked(view, _chosen(rules))
    findings = without_replaced(findings)
    findings.sort(key=lambda finding: finding.rank)
    shown: list[Finding] = []
    hidden: list[Finding] = []
    for finding in findings:
        is_worth_it = finding.saving_share >= minimum_share or finding.ends_run_in_ns is not None
        (shown if is_worth_it or finding.severity == "note" else hidden).append(finding)
    diagnosis = _diagnosis(view, tuple(shown), len(hidden), questions, top)
    first = [finding for finding in _replayed(shown) if finding.saving_ns_per_step > 0]
    both = _together(view, first)
    before = both.saving_ns_per_step if both is not None else sum(each.saving_ns_per_step for each in first)
    return replace(diagnosis, together=both, afterwards=_afterwards(view, first, before, _replayed(hidden)))


def asked(view: View, rules: Sequence[ModuleType]) -> tuple[list[Finding], list[NotAnswered]]:
    """Everything that these rules find, and what they cannot answer, in the rules' order."""
    findings: list[Finding] = []
    questions: list[NotAnswered] = []
    without_operators = PARTS["operators"].is_missing(view.trace)
    for rule in rules:
        if without_operators and "operators" in needs_of(rule):
            continue  # other frameworks' operators are not what it knows; the report says that it could not look
        result = rule.check(view)
        findings.extend(result.findings)
        questions.extend(_with_those_concerned(question) for question in result.not_answered)
    return findings, questions


def _with_those_concerned(question: NotAnswered) -> NotAnswered:
    """The question with the rules that need the part of the recording that is missing."""
    part = next((name for name, part in PARTS.items() if part.question == question.question), None)
    concerned = tuple(rule.ID for rule in RULES if part in needs_of(rule))
    return replace(question, rules=concerned) if concerned else question


def _diagnosis(
    view: View, shown: tuple[Finding, ...], hidden: int, questions: Sequence[NotAnswered], top: int
) -> Diagnosis:
    trace = view.trace
    operators = operator_table(trace, costs=view.operator_costs, steps=view.steps)
    kernels = kernel_table(trace, steps=view.steps)
    windows = {name: device_window(trace, name) for name in trace.working_devices}
    main_thread = host_time(trace, activity=view.activity)
    return Diagnosis(
        metadata=trace.metadata,
        warnings=trace.warnings,
        step_source=view.summary.source if view.complete_steps.height else "none",
        steps=view.steps.select("index", "start_ns", "duration_ns", "complete"),
        step_ns=view.step_ns,
        step_count=view.step_count,
        devices=_devices(view),
        idle=idle_summary(view.idle, windows),
        host=host_summary(main_thread),
        operators=operators.head(top) if top else operators,
        operator_count=operators.height,
        kernels=kernels.head(top) if top else kernels,
        kernel_count=kernels.height,
        findings=shown,
        hidden=hidden,
        not_answered=tuple(dict.fromkeys(questions)),
        device_uses=device_uses(trace, activity=view.activity),
        host_use=host_use(main_thread),
        engine_uses=engine_uses(trace),
    )


def _replayed(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.change is not None]


def _saved_ns(view: View, findings: Sequence[Finding]) -> int:
    """What a step would lose if the causes of these findings were gone, by one replay; never more than the step."""
    return view.saved_ns(together(*(finding.change for finding in findings if finding.change is not None)))


def _together(view: View, several: Sequence[Finding]) -> Together | None:
    """One replay without the causes of all of these findings, whose own savings were replayed."""
    if len(several) < 2:
        return None
    saving = _saved_ns(view, several)
    return Together(
        count=len(several),
        saving_ns_per_step=saving,
        share=saving / view.step_ns,
        sum_share=sum(finding.saving_share for finding in several),
    )


def _afterwards(view: View, first: Sequence[Finding], before: int, small: Sequence[Finding]) -> tuple[Afterwards, ...]:
    """What each finding that is too small to be shown saves once the causes of those shown are gone.

    Args:
        before: what the findings shown first save together, nanoseconds per step.
    """
    if not first:
        return ()
    later = []
    for finding in small[:MOST_AFTERWARDS]:
        saving = max(_saved_ns(view, [*first, finding]) - before, 0)
        if saving >= AFTERWARDS_SHARE * view.step_ns:
            later.append(Afterwards(finding.rule, finding.title, saving, saving / view.step_ns))
    return tuple(sorted(later, key=lambda each: (-each.saving_ns_per_step, each.rule)))


def without_replaced(findings: Sequence[Finding]) -> list[Finding]:
    """The findings without those that others tell more precisely.

    A rule may name in REPLACES the rules whose cause it tells more precisely. Their finding goes where the precise ones
    explain at least EXPLAINED of its saving; notes stay.
    """
    precise: dict[str, int] = {}
    replaces = {rule.ID: getattr(rule, "REPLACES", ()) for rule in RULES}
    for finding in findings:
        for general in replaces.get(finding.rule, ()):
            precise[general] = precise.get(general, 0) + finding.saving_ns_per_step
    return [
        finding
        for finding in findings
        if finding.severity == "note" or precise.get(finding.rule, 0) < max(EXPLAINED * finding.saving_ns_per_step, 1)
    ]


def rule_by_id(identifier: str) -> ModuleType:
    """The rule of that name.

    Raises:
        UsageError: there is none; the message suggests the nearest.
    """
    known = {rule.ID: rule for rule in RULES}
    if identifier not in known:
        near = difflib.get_close_matches(identifier, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; the rules are {', '.join(known)}"
        raise UsageError(f"there is no rule {identifier!r}{hint}")
    return known[identifier]


def _chosen(rules: Sequence[str] | None) -> tuple[ModuleType, ...]:
    return RULES if rules is None else tuple(rule_by_id(identifier) for identifier in rules)


def _check_settings(settings: Mapping[str, float]) -> None:
    for key in settings:
        identifier, dot, name = key.partition(".")
        rule = rule_by_id(identifier)
        if not dot or name not in rule.THRESHOLDS:
            known = ", ".join(f"{identifier}.{threshold}" for threshold in rule.THRESHOLDS)
            raise UsageError(f"there is no threshold {key!r}; this rule has {known}")


def _devices(view: View) -> tuple[DeviceSummary, ...]:
    names = {device.device: device.name for device in view.trace.metadata.devices}
    rows = view.device_time.sort("device")
    return tuple(DeviceSummary(name=names.get(row["device"]), **row) for row in rows.iter_rows(named=True))
