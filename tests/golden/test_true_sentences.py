"""Whatever is simulated, each finding says only what its evidence shows, and the tables counted again say the same.

The accounting of the steps adds up, too. test_every_trace holds real traces against the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from stepscope.diagnosis.diagnosis import asked, diagnose_view, rule_by_id
from stepscope.diagnosis.rules import RULES
from stepscope.diagnosis.view import View
from stepscope.readers import open_trace
from stepscope.report.words import headline
from tests.claims import false_headline, unsupported
from tests.recount import Recount, differences
from tests.unit.rendered import json_report
from tests.zoo.simulated import SIMULATED, Simulated

REPOSITORY: Final = Path(__file__).parents[2]
SAMPLES: Final = sorted((REPOSITORY / "examples").glob("*.json.gz"))


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_what_is_said_of_a_sample_is_true(path: Path) -> None:
    _check(path)


@pytest.mark.parametrize("twin", ["fault", "clean"])
@pytest.mark.parametrize("one", SIMULATED, ids=lambda one: one.name)
def test_what_is_said_of_a_simulated_machine_is_true(one: Simulated, twin: str, tmp_path: Path) -> None:
    _check(one.write(twin, tmp_path))


def _check(path: Path) -> None:
    view = View(open_trace(path))
    recount = Recount(view)
    for finding in asked(view, RULES)[0]:
        assert unsupported(finding, rule_by_id(finding.rule), view) == [], finding.title
        assert differences(finding, recount) == [], finding.title
    diagnosis = diagnose_view(view, rules=[])  # the first sentence and the accounting say nothing of findings
    report = json_report(diagnosis)
    assert false_headline(diagnosis, report) == [], headline(diagnosis)
    for device in report["accounting"]:
        assert device["busy_ns"] + sum(cause["ns"] for cause in device["idle"]) == device["window_ns"]
