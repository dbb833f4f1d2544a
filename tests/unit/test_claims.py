"""The checkers of what findings say find what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepscope.diagnosis.diagnosis import rule_by_id
from stepscope.diagnosis.finding import Evidence, Figure, Finding, Interval, Location, Remedy
from stepscope.diagnosis.view import View
from tests.claims import unsupported
from tests.recount import Recount, differences
from tests.unit.diagnosis.rules.cases import busy_device

RULE = rule_by_id("launch-bound")
FINDING = Finding(
    RULE.id,
    "12% of the step waits for 1,250 launches a step of 3.0 MiB",
    "medium",
    80,
    0.08,
    "time between launches",
    "medium",
    Evidence((Figure("lost", 0.1234, "share"), Figure("launches", 1250.4, "count"), Figure("sent", 3 << 20, "bytes"))),
    Remedy("Launch less."),
)


def test_what_is_shown_may_be_said() -> None:
    assert unsupported(FINDING, RULE) == []


@pytest.mark.parametrize(
    "said",
    [
        "13% of the step is lost",
        "1,251 launches a step are late",
        "3.1 MiB are sent",
        "12.34 ms are lost",
        "the driver is asked for memory 0 times",
        "0% of the step is lost",
        "all but what workers leave on None processors",
        "most of it all-to-all",
        "most of them from or to pageable memory",
    ],
)
def test_what_is_not_shown_may_not(said: str) -> None:
    assert unsupported(replace(FINDING, title=said), RULE) != []
    assert unsupported(replace(FINDING, saving_basis=said), RULE) != []
    assert unsupported(replace(FINDING, remedy=Remedy(said)), RULE) != []


@pytest.mark.parametrize(
    "said", ["in float16 of 16x64x8", "of mm on device 7", "layer2 and conv1d", "in 16-bit numbers"]
)
def test_names_are_no_numbers(said: str) -> None:
    assert unsupported(replace(FINDING, title=said), RULE) == []


def test_the_page_may_state_constants() -> None:
    assert unsupported(replace(FINDING, title="kernels under 10 us"), RULE) == []  # as the rule's page says


@pytest.mark.parametrize(
    "changed",
    [
        {"evidence": Evidence((Figure("launches per step", 6.0, "count"),))},
        {"evidence": Evidence((Figure("median length of the device's work", 199, "ns"),))},
        {"evidence": Evidence((Figure("lost", 1.2, "share"),))},
        {"evidence": Evidence((Figure("lost", float("nan"), "share"),))},
        {"evidence": Evidence((), (Interval(900, 500, "late launch"),))},
        {"where": (Location("train.py", 13, "step"),)},
        {"saving_ns_per_step": 10**9},
    ],
)
def test_what_the_tables_contradict_is_found(changed: dict[str, object]) -> None:
    recount = Recount(View(busy_device()))
    true = Evidence(
        (Figure("launches per step", 5.0, "count"), Figure("median length of the device's work", 200, "ns"))
    )
    finding = replace(FINDING, evidence=true, where=(Location("train.py", 12, "step"),))

    assert differences(finding, recount) == []
    assert differences(replace(finding, **changed), recount) != []  # type: ignore[arg-type]
