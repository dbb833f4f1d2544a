"""The idle-time law and its attribution, against machines whose true causes are known."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.analysis.device_time import device_time
from stepscope.analysis.idle import device_window, idle_time
from stepscope.readers import open_trace
from stepscope.trace import Trace, Window
from stepscope.trace.window import union
from tests.simulator import IdlePiece, KinetoOptions, Machine, merge_pieces, write_kineto
from tests.simulator.programs import PROGRAMS
from tests.simulator.strategies import programs
from tests.tries import tries

PROPERTY = settings(deadline=None, max_examples=tries(15), suppress_health_check=[HealthCheck.too_slow])


def written_and_read(machine: Machine, folder: Path, options: KinetoOptions | None = None) -> Trace:
    path = folder / "trace.json.gz"
    write_kineto(machine, path, options or KinetoOptions())
    trace = open_trace(path)
    trace.check()
    return trace


def pieces(idle: pl.DataFrame, *, with_refill: bool = False) -> list[IdlePiece]:
    rows = idle if with_refill else idle.with_columns(trigger=pl.when(~pl.col("refill")).then(pl.col("trigger")))
    return merge_pieces(
        IdlePiece(int(row[0]), *row[1:])
        for row in rows.select("device", "start_ns", "duration_ns", "cause", "trigger").iter_rows()
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machines")


@PROPERTY
@given(machine=programs())
def test_every_piece_has_its_true_cause_and_trigger(machine: Machine, folder: Path) -> None:
    trace = written_and_read(machine, folder)
    truth = machine.truth().shifted(-machine.first_event_ns())
    assert pieces(idle_time(trace)) == truth.merged()


@PROPERTY
@given(machine=programs(), data=st.data())
def test_busy_and_causes_add_up_over_any_window(machine: Machine, data: st.DataObject, folder: Path) -> None:
    trace = written_and_read(machine, folder)
    for device in trace.device_work["device"].unique().sort():
        whole = device_window(trace, device)
        start = data.draw(st.integers(0, whole.end_ns + 100))
        window = Window(start, start + data.draw(st.integers(1, whole.duration_ns + 200)))
        work = trace.device_work.filter(pl.col("device") == device)
        starts = work["start_ns"].to_numpy()
        busy = union(starts, starts + work["duration_ns"].to_numpy()).clip(window.start_ns, window.end_ns).total_ns
        idle = idle_time(trace, window=window).filter(pl.col("device") == device)
        assert busy + idle["duration_ns"].sum() == window.duration_ns


@PROPERTY
@given(machine=programs())
def test_device_time_is_true(machine: Machine, folder: Path) -> None:
    trace = written_and_read(machine, folder)
    truth = machine.truth()
    for row in device_time(trace).iter_rows(named=True):
        true = truth.devices[int(row["device"])]
        for name in ("window_ns", "busy_ns", "idle_ns", "exposed_communication_ns", "exposed_copy_ns"):
            assert row[name] == getattr(true, name), (row["device"], name)


@pytest.mark.parametrize("name", sorted(PROGRAMS))
@pytest.mark.parametrize(
    "options",
    [
        KinetoOptions(clock="base", flows=False, device_annotations=False),
        KinetoOptions(clock="epoch", shuffle_seed=7),
    ],
    ids=["relative, without flows", "epoch with decimals, shuffled"],
)
def test_realistic_programs_have_their_true_causes(name: str, options: KinetoOptions, tmp_path: Path) -> None:
    machine = PROGRAMS[name]()
    trace = written_and_read(machine, tmp_path, options)
    assert pieces(idle_time(trace)) == machine.truth().shifted(-machine.first_event_ns()).merged()


def test_an_empty_trace_has_no_idle_time() -> None:
    assert idle_time(Trace.from_tables({})).is_empty()
    assert device_time(Trace.from_tables({})).is_empty()
