"""Each real trace is opened and diagnosed once, and all that holds of every one of them is held against that.

Its times add up to the nanosecond, each finding says only what its evidence shows, the tables counted again say the
same, and the answer is as right as known: what holds goes on holding, what becomes right leaves known_wrong.toml.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import polars as pl
import pytest

from benchmarks.labelled.judging import judge, truths
from benchmarks.real_traces import said_in, said_of
from stepscope.analysis.operators import kernel_class
from stepscope.diagnosis import Diagnosis, Finding, diagnosis
from stepscope.diagnosis.diagnosis import rule_by_id
from stepscope.diagnosis.rules import RULES
from stepscope.diagnosis.view import View
from stepscope.readers import open_trace
from stepscope.report.diagnosis import TraceReport, diagnosis_document, json_reports, trace_report
from stepscope.report.document import json_bytes
from stepscope.report.text import text_of
from stepscope.report.words import headline
from tests import reached
from tests.claims import false_headline, unsupported
from tests.golden.opened import check_findings, check_the_law
from tests.recount import Recount, differences

pytestmark = pytest.mark.traces

FOLDER: Final = Path(os.environ.get("STEPSCOPE_TRACES", "."))
PROFILES: Final = ("kineto", "second", "nsys", "xplane", "kernels")
TRUTHS: Final = truths().by_path()
KNOWN_WRONG: Final = msgspec.toml.decode(
    Path(__file__).with_name("known_wrong.toml").read_bytes(), type=dict[str, tuple[str, ...]]
)
NO_RECORDINGS: Final = ("README.md", "facts.json", "reference_facts.py")


def _traces() -> Iterator[str]:
    """Every file of a profiler, also those of single ranks, that is a trace by its name and not known as refused."""
    for path in (path for folder in PROFILES for path in sorted((FOLDER / folder).rglob("*"))):
        name = str(path.relative_to(FOLDER))
        if name.endswith((".json", ".json.gz", ".sqlite", ".pb")) and not (name in TRUTHS and TRUTHS[name].refused):
            yield name


TRACES: Final = [*_traces()]


@dataclass(frozen=True)
class Told:
    """What is said of a trace, and what every rule found, also where others replace it."""

    name: str
    view: View
    found: list[Finding]
    report: TraceReport

    @property
    def diagnosis(self) -> Diagnosis:
        return self.report.diagnosis

    @property
    def record(self) -> Any:
        return json.loads(json_bytes(json_reports([self.report])))


@pytest.fixture(scope="module", params=TRACES)
def told(request: pytest.FixtureRequest) -> Told:
    view = View(open_trace(FOLDER / request.param))
    asked = diagnosis.asked(view, RULES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnosis, "asked", lambda view, rules, progress=None: asked)
        report = trace_report(view, rules=None, top=20, minimum_share=diagnosis.MINIMUM_SHARE)
    return Told(request.param, view, asked[0], report)


def test_times_add_up(told: Told) -> None:
    check_the_law(told.view.trace, told.diagnosis)
    check_findings(told.diagnosis)
    assert told.diagnosis.host["ns"].sum() >= 0
    for device in told.record["accounting"]:
        assert device["busy_ns"] + sum(cause["ns"] for cause in device["idle"]) == device["window_ns"]


def test_what_is_said_is_true(told: Told) -> None:
    recount = Recount(told.view)
    for finding in told.found:
        assert unsupported(finding, rule_by_id(finding.rule), told.view) == [], finding.title
        assert differences(finding, recount) == [], finding.title
    assert false_headline(told.diagnosis, told.record) == [], headline(told.diagnosis)
    assert text_of(diagnosis_document([told.report]), width=100, colour=False, top=5)


def test_what_kernels_reach_and_save_follows_from_shapes_and_times(told: Told) -> None:
    for finding in told.found:
        assert reached.differences(finding, told.view) == [], finding.title


NAMELESS: Final = frozenset({"Kernel"})
"""Names of costly kernels in real traces that tell nothing."""


def test_costly_kernels_are_known_by_their_names(told: Told) -> None:
    work = told.view.trace.device_work.filter(pl.col("kind") == "compute")
    total = int(work["duration_ns"].sum())
    for name, ns in work.group_by("name").agg(pl.col("duration_ns").sum()).iter_rows():
        assert kernel_class(name).kind or ns < 0.01 * total or name in NAMELESS, name


def test_the_answer_is_as_right_as_known(told: Told) -> None:
    if told.name not in TRUTHS:
        pytest.skip("a rank of a job, which is judged with its folder")
    verdict = judge(told.name, TRUTHS[told.name], said_in(told.record))

    assert verdict.faults == KNOWN_WRONG.get(told.name, ()), f"shrink known_wrong.toml, or mend this: {verdict}"


@pytest.mark.parametrize("path", [path for path in TRUTHS if path not in TRACES])
def test_an_answer_about_ranks_other_files_or_none_is_as_right_as_known(path: str, traces_folder: Path) -> None:
    verdict = judge(path, TRUTHS[path], said_of(traces_folder / path))

    assert verdict.faults == KNOWN_WRONG.get(path, ()), f"shrink known_wrong.toml, or mend this: {verdict}"


def test_the_list_of_wrong_answers_names_known_traces() -> None:
    assert set(KNOWN_WRONG) <= set(TRUTHS)


def test_every_public_file_has_a_truth(traces_folder: Path) -> None:
    files = [path.relative_to(traces_folder) for path in traces_folder.rglob("*") if path.is_file()]

    known = set(map(Path, TRUTHS))
    unknown = [path for path in files if path.name not in NO_RECORDINGS and not known & {path, *path.parents}]
    assert not unknown
