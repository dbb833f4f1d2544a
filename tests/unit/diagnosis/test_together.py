"""What several findings save at once, by one replay."""

from __future__ import annotations

from stepscope.diagnosis import diagnose
from stepscope.diagnosis.finding import Afterwards, Together
from stepscope.report.words import afterwards_sentence
from stepscope.trace import Trace
from tests.unit.waiting_twice import waiting_twice


def test_savings_that_overlap_are_replayed_together() -> None:
    diagnosis = diagnose(waiting_twice(), rules=["input-bound", "host-synchronisation"])

    assert [(finding.rule, finding.saving_ns_per_step, finding.saving_from) for finding in diagnosis.findings] == [
        ("host-synchronisation", 385_000, "replayed"),
        ("input-bound", 300_000, "replayed"),
    ]
    # Without either the device alone limits: 4 kernels of 400 us, and 1 us between them, in 4 steps.
    assert diagnosis.together == Together(2, 599_250, 0.59925, 0.685)


def test_one_finding_has_nothing_to_be_together_with() -> None:
    assert diagnose(waiting_twice(), rules=["input-bound"]).together is None
    assert diagnose(Trace.from_tables({})).together is None


def test_findings_that_are_not_shown_do_not_count() -> None:
    shown = diagnose(waiting_twice(), rules=["input-bound", "host-synchronisation"], minimum_share=0.35)

    assert ([finding.rule for finding in shown.findings], shown.hidden) == (["host-synchronisation"], 1)
    assert shown.together is None


def test_what_saves_something_only_afterwards_is_named() -> None:
    trace = waiting_twice()

    shown = diagnose(trace, rules=["input-bound", "host-synchronisation"], minimum_share=0.35)

    # 385 us go with the first; without the second as well 599.25 us do.
    assert shown.afterwards == (Afterwards("input-bound", shown.afterwards[0].title, 214_250, 0.21425),)
    assert afterwards_sentence(shown) == (
        "Once these are gone, input-bound would save another 21.4 % of the step; --all shows it."
    )
    assert diagnose(trace, rules=["input-bound", "host-synchronisation"]).afterwards == ()
