"""What lines and modules cost adds up, to the nanosecond, whatever a machine did."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings

from stepscope.analysis.attribution import attribute
from stepscope.analysis.idle import idle_time
from stepscope.analysis.operators import operator_costs
from stepscope.analysis.places import PHASE_COLUMNS, line_table, module_table, place_costs
from stepscope.readers import open_trace
from stepscope.trace import Trace, Window
from tests.simulator import KinetoOptions, Machine, write_kineto
from tests.simulator.strategies import programs
from tests.tries import tries

PROPERTY = settings(deadline=None, max_examples=tries(15), suppress_health_check=[HealthCheck.too_slow])
EVER = Window(-(2**60), 2**60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machines")


def read(machine: Machine, folder: Path) -> Trace:
    path = folder / "trace.json.gz"
    write_kineto(machine, path, KinetoOptions())
    return open_trace(path)


@PROPERTY
@given(machine=programs())
def test_the_times_of_all_lines_add_up_to_all_device_time_or_all_operators_own(machine: Machine, folder: Path) -> None:
    trace = read(machine, folder)
    costs = place_costs(trace, window=EVER)
    lines, modules = line_table(trace, costs=costs), module_table(trace, costs=costs)
    own = int(operator_costs(trace)["host_self_ns"].sum())
    whole = int(trace.device_work["duration_ns"].sum()) if trace.device_work.height else own

    assert costs.total_ns == whole
    assert lines["total_ns"].sum() == whole
    assert sum(int(lines[name].sum()) for name in PHASE_COLUMNS) == whole
    assert lines["host_ns"].sum() == own
    if trace.device_work.height:
        assert lines["idle_ns"].sum() == idle_time(trace)["duration_ns"].sum()
    if modules.height:
        assert modules["self_ns"].sum() == whole
        top = modules.filter(pl.col("depth") == 0)
        assert sum(int(top[name].sum()) for name in PHASE_COLUMNS) == whole


@PROPERTY
@given(machine=programs())
def test_steps_add_up_to_what_was_launched_in_them(machine: Machine, folder: Path) -> None:
    trace = read(machine, folder)
    costs = place_costs(trace)
    start = trace.launches["start_ns"].gather(trace.device_work["launch"])
    begun = pl.select(pl.coalesce(start, trace.device_work["start_ns"])).to_series()
    inside = begun.is_between(costs.window.start_ns, costs.window.end_ns, closed="left")

    if trace.device_work.height:
        assert line_table(trace, costs=costs)["total_ns"].sum() == trace.device_work.filter(inside)["duration_ns"].sum()


@PROPERTY
@given(machine=programs())
def test_every_operator_under_a_frame_of_the_users_has_a_place(machine: Machine, folder: Path) -> None:
    trace = read(machine, folder)
    attribution = attribute(trace)
    slices = attribution.operator_slices
    under = attribution.activity.user_frame[slices] >= 0 if len(slices) else slices > 0

    assert attribution.operators().filter(pl.Series(under, dtype=pl.Boolean))["file"].null_count() == 0
