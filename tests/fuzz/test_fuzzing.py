"""Kept cases again, and some new ones: the same at every run, whatever the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.fuzz.__main__ import by_signature, counted, replayed, table, told
from tests.fuzz.formats import FORMATS
from tests.fuzz.workers import Team

INPUTS = 250
NAMES = [each.name for each in FORMATS]


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("STEPSCOPE_TRACES", raising=False)  # the same inputs with and without real traces
        with Team(min(2, os.cpu_count() or 1)) as team:
            yield team


def test_no_kept_case_shows_a_fault(team: Team) -> None:
    found = list(told(team.outcomes(replayed(NAMES))))

    assert not {name: each[0].detail for name, each in by_signature([o for o in found if o.kind == "fault"]).items()}


def test_damaged_files_end_in_a_sentence_or_a_result_that_holds(team: Team) -> None:
    found = list(told(team.outcomes(counted(NAMES, seed=0, most=INPUTS))))

    print(table(found))
    assert len(found) == INPUTS
    assert not {name: each[0].detail for name, each in by_signature([o for o in found if o.kind == "fault"]).items()}
    refused = {outcome.job.format for outcome in found if outcome.kind == "refusal"}
    assert len(refused) > len(NAMES) / 2  # damage reaches the readers
