"""How a rule is asked: thresholds, notes, remedies of frameworks, and words for recordings without steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import polars as pl
import pytest

from stepscope.diagnosis.finding import Figure, Finding, NotAnswered, Remedy, RuleResult
from stepscope.diagnosis.rule import Answers, Found, Limits, Rule, Threshold
from stepscope.diagnosis.rules import device_tail, exposed_copy, host_synchronisation, launch_bound
from stepscope.diagnosis.view import View
from stepscope.trace import Metadata, Trace
from stepscope.trace.tables import SCHEMAS
from tests.unit.diagnosis.rules.cases import busy_device
from tests.unit.diagnosis.rules.test_launch_bound import late_launches
from tests.unit.recording import Recording

OWN, JAX = Remedy("Do this.", "code"), Remedy("Do that.", "jax")
FOUND = Found("slow", 100, "time", "high", OWN)
"""A tenth of the step of `one_step`."""


def one_step(trace_format: str = "") -> Trace:
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.operator(0, 1000, "PjitFunction(step)")
    return replace(recording.trace(), metadata=Metadata(format=trace_format))


def asked(
    *answers: Found | NotAnswered, settings: Mapping[str, float] | None = None, trace_format: str = ""
) -> RuleResult:
    def check(view: View, limits: Limits) -> Answers:
        yield from answers

    thresholds = {
        "share": Threshold(0.05, "share", "share of the {period} lost"),
        "strict": Threshold(0.5, "share", "share of the {period} wasted"),
    }
    rule = Rule("a-rule", "A rule", thresholds, check, remedies={"jax": JAX})
    return rule.ask(View(one_step(trace_format), settings))


def the_finding(*answers: Found, trace_format: str = "") -> Finding:
    [finding] = asked(*answers, trace_format=trace_format).findings
    return finding


def test_nothing_is_found() -> None:
    assert asked() == RuleResult()


def test_a_finding_saves_its_cost_and_shows_its_share_of_the_step() -> None:
    finding = the_finding(replace(FOUND, figures=[Figure("calls", 3, "count")]))

    assert (finding.rule, finding.saving_ns_per_step, finding.saving_share) == ("a-rule", 100, 0.1)
    assert (finding.severity, finding.saving_from) == ("medium", "attributed")
    assert finding.evidence.figures == (
        Figure("share of the step lost", 0.1, "share", 0.05),
        Figure("calls", 3, "count"),
    )


@pytest.mark.parametrize(
    ("found", "settings", "is_shown"),
    [
        (FOUND, {}, True),
        (FOUND, {"a-rule.share": 0.1}, True),
        (FOUND, {"a-rule.share": 0.11}, False),
        (FOUND, {"another-rule.share": 0.11}, True),
        (replace(FOUND, limit="strict"), {}, False),
        (replace(FOUND, limit="strict", weighed_ns=500), {}, True),
        (replace(FOUND, weighed_ns=49), {}, False),
        (replace(FOUND, cost_ns=0, weighed_ns=500), {}, False),
        (replace(FOUND, cost_ns=0), {"a-rule.share": 0.0}, False),
        (replace(FOUND, cost_ns=0, severity="note"), {}, True),
    ],
)
def test_what_is_below_its_threshold_is_no_finding(found: Found, settings: dict[str, float], is_shown: bool) -> None:
    assert len(asked(found, settings=settings).findings) == is_shown


@pytest.mark.parametrize(("place", "names"), [(1, ["calls", "share of the step lost"]), (None, ["calls"])])
def test_the_share_stands_where_the_rule_wants_it(place: int | None, names: list[str]) -> None:
    finding = the_finding(replace(FOUND, figures=[Figure("calls", 3, "count")], share_at=place))

    assert [figure.name for figure in finding.evidence.figures] == names


def test_a_note_shows_what_the_rule_gives_it_and_saves_nothing() -> None:
    finding = the_finding(replace(FOUND, cost_ns=0, severity="note", figures=[Figure("calls", 3, "count")]))

    assert (finding.severity, finding.saving_ns_per_step) == ("note", 0)
    assert finding.evidence.figures == (Figure("calls", 3, "count"),)


def test_what_ends_the_run_soon_comes_first_and_later_after_large_savings() -> None:
    leak = replace(the_finding(FOUND), saving_ns_per_step=0, ends_run_in_ns=10**12)
    soon, later = replace(leak, severity="high"), replace(leak, severity="medium")
    large, small = (replace(the_finding(FOUND), severity=severity) for severity in ("medium", "low"))

    assert sorted([small, later, large, soon], key=lambda each: each.rank) == [soon, large, later, small]


def test_a_question_is_the_rules() -> None:
    assert asked(NotAnswered("why?", "it lacks", "record")).not_answered == (
        NotAnswered("why?", "it lacks", "record", "a-rule"),
    )


def test_another_framework_has_its_own_remedy() -> None:
    assert the_finding(FOUND).remedy == OWN
    assert the_finding(FOUND, trace_format="xplane").remedy == JAX
    assert the_finding(FOUND, trace_format="gaudi").remedy == OWN
    assert the_finding(replace(FOUND, for_every_framework=True), trace_format="xplane").remedy == OWN


def without_step_annotations(trace: Trace) -> Trace:
    tables = {name: trace.table(name) for name in SCHEMAS}
    tables["annotations"] = tables["annotations"].filter(pl.col("step").is_null())
    return Trace.from_tables(tables, trace.metadata)


def test_without_steps_a_finding_is_about_the_recording() -> None:
    with_steps = launch_bound.RULE.ask(View(late_launches())).findings[0]
    without = launch_bound.RULE.ask(View(without_step_annotations(late_launches()))).findings[0]

    assert "of the step the device waits for launches: 4 launches a step" in with_steps.title
    assert "of the recording the device waits for launches: 4 launches in the recording" in without.title
    assert [figure.name for figure in without.evidence.figures][:2] == [
        "share of the recording lost to late launches",
        "launches in the recording",
    ]


def test_the_names_of_cuda_have_others_for_every_device() -> None:
    cuda, other = View(busy_device()), View(busy_device())
    other.__dict__["torch_device"] = "torch.accelerator"

    assert (cuda.torch_stream, cuda.on_stream("copying")) == ("torch.cuda.Stream", "torch.cuda.stream(copying)")
    assert (other.torch_stream, other.on_stream("copying")) == ("torch.Stream", "copying")
    device = host_synchronisation.KINDS["device"]
    assert device.told_for(cuda).what == "torch.cuda.synchronize()"
    assert "torch.accelerator.synchronize()" in device.told_for(other).remedy.code
    for remedy in (
        device_tail._remedy(other, at_the_end=True),
        exposed_copy._remedy(other, other.work, are_pageable=False),
    ):
        assert "torch.accelerator.current_stream()" in remedy.code
        assert "cuda" not in remedy.code
