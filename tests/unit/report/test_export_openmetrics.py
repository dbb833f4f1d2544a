"""`export --format openmetrics`: the text, and that the parser of Prometheus's own client takes it."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.finding import Together
from stepscope.report.tables import openmetrics
from stepscope.trace import Metadata
from tests.unit.hand_built import empty, full

EMPTY = """\
# TYPE stepscope_trace info
# HELP stepscope_trace The trace that the figures describe.
stepscope_trace_info{path="",format="",stepscope="0.1.0"} 1
# TYPE stepscope_questions_not_answered gauge
# HELP stepscope_questions_not_answered Questions that the trace leaves open.
stepscope_questions_not_answered 0
# EOF
"""


def parsed(text: bytes) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Name of a sample -> labels -> value, by the client of Prometheus."""
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in parser.text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_a_diagnosis_of_nothing() -> None:
    assert openmetrics(empty()).decode() == EMPTY
    assert list(parsed(openmetrics(empty()))) == ["stepscope_trace_info", "stepscope_questions_not_answered"]


def test_the_figures() -> None:
    both = Together(2, 30_000_000, 0.25, 0.33)

    found = parsed(openmetrics(full(together=both)))

    rank = ("rank", "3")
    assert found["stepscope_step_duration_seconds"] == {(rank, ("source", "annotation")): 0.1203}
    assert found["stepscope_steps"] == {(rank, ("source", "annotation")): 10}
    assert found["stepscope_trace_warnings"] == {(("kind", "truncated"), rank): 1}
    assert found["stepscope_device_busy_ratio"] == {(("device", "0"), rank): 635 / 1203}
    assert found["stepscope_device_activity_seconds"][("activity", "exposed_copy"), ("device", "0"), rank] == 0.006
    # Two triggers of one cause are one sample.
    assert found["stepscope_idle_seconds"][("cause", "python"), ("device", "0"), rank] == 0.166
    assert sum(found["stepscope_idle_seconds"].values()) == pytest.approx(0.568, abs=1e-12)
    assert found["stepscope_host_seconds"] == {(("cause", "compute"), rank): 0.6, (("cause", "input"), rank): 0.4}
    assert found["stepscope_finding_saving_seconds"] == {
        (("nth", "1"), rank, ("rule", "input-bound")): 0.04,
        (("nth", "1"), rank, ("rule", "profiler-overhead")): 0.0,
    }
    assert found["stepscope_findings_together_saving_seconds"] == {(rank,): 0.03}


def test_hostile_text_stays_in_its_label() -> None:
    hostile = 'a"} 1\n# EOF\\n{\x1b[31m\u202e'

    found = parsed(openmetrics(empty(metadata=Metadata(path=hostile))))

    ((labels, value),) = found["stepscope_trace_info"].items()
    assert value == 1
    assert dict(labels)["path"].startswith('a"} 1')
    assert not {"\x1b", "\u202e"} & set(dict(labels)["path"])
    assert found.keys() == {"stepscope_trace_info", "stepscope_questions_not_answered"}


def test_several_findings_of_a_rule_are_told_apart() -> None:
    finding = full().findings[0]

    found = parsed(openmetrics(empty(findings=(finding, finding))))

    assert [dict(labels)["nth"] for labels in found["stepscope_finding_saving_seconds"]] == ["1", "2"]
