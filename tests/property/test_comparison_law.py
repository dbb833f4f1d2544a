"""A comparison's sums, whatever two machines did: nothing is lost, and nothing is counted twice."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import booleans

from stepscope.compare import compare_traces
from stepscope.compare.trace_record import trace_record
from stepscope.diagnosis.view import View
from stepscope.readers import open_trace
from stepscope.trace import Trace
from tests.simulator import KinetoOptions, Machine, write_kineto
from tests.simulator.strategies import programs
from tests.tries import tries

PROPERTY = settings(deadline=None, max_examples=tries(10), suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machines")


def read(machine: Machine, folder: Path) -> Trace:
    path = folder / "trace.json.gz"
    write_kineto(machine, path, KinetoOptions())
    return open_trace(path)


@PROPERTY
@given(before=programs(), after=programs(), all_steps=booleans())
def test_the_causes_add_up_to_the_steps_and_their_differences_to_the_difference(
    before: Machine, after: Machine, all_steps: bool, folder: Path
) -> None:
    found = compare_traces(read(before, folder), read(after, folder), all_steps=all_steps)

    counts = found.before.step_count, found.after.step_count
    assert found.causes["before_total_ns"].sum() == found.before.total_ns
    assert found.causes["after_total_ns"].sum() == found.after.total_ns
    rows = found.causes.select("before_total_ns", "after_total_ns").iter_rows()
    difference = sum(Fraction(new, counts[1]) - Fraction(old, counts[0]) for old, new in rows)
    assert difference == Fraction(found.after.total_ns, counts[1]) - Fraction(found.before.total_ns, counts[0])
    assert found.causes.select("kind", "name").is_unique().all()


@PROPERTY
@given(machine=programs())
def test_a_program_does_not_differ_from_itself(machine: Machine, folder: Path) -> None:
    trace = read(machine, folder)

    found = compare_traces(trace, trace)

    assert found.samples.verdict in ("no difference shown", "too few steps")
    for table in (found.causes, found.operators, found.kernels, found.lines, found.modules, found.communication):
        assert set(table["match"]) <= {"same"}
        assert set(table["difference_ns"]) <= {0.0}


@PROPERTY
@given(machine=programs())
def test_each_table_holds_all_there_is(machine: Machine, folder: Path) -> None:
    trace = read(machine, folder)
    record, view = trace_record(trace, all_steps=True), View(trace)

    assert sum(record.steps.values()) in (0, record.total_ns)
    assert max(record.total_ns, 1) == view.length_ns
    assert record.tables["operators"]["calls"].sum() == view.operators.height
    if view.device is not None:
        work = int(view.work["duration_ns"].sum())
        idle = int(record.tables["causes"].filter(kind="idle")["ns"].sum())
        assert record.tables["kernels"]["ns"].sum() == work
        assert record.tables["lines"]["idle_ns"].sum() == idle
        assert record.tables["modules"]["idle_ns"].sum() == idle
