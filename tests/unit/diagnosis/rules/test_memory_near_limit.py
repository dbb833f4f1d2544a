"""memory-near-limit: the device's memory is almost full, or was too small."""

from __future__ import annotations

import polars as pl
import pytest

from stepscope.diagnosis.rules.memory_near_limit import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
from stepscope.trace.tables import SCHEMAS
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.recording import Recording

MIB = 2**20


def filling(
    allocated: int = 80, reserved: int | None = 95, capacity: int | None = 100, *, kind: str = "aten::mm"
) -> Trace:
    """A step that holds so many MiB of device 0, 20 of them from before the recording."""
    device = Device("0", memory_bytes=None if capacity is None else capacity * MIB)
    recording = Recording(Metadata(devices=(device,)))
    recording.step(0, 1000, 1)
    recording.operator(
        10, 100, kind, source_file="model.py", source_line=31, source_function="forward", sequence_number=1
    )  # fmt: skip
    more = {"total_reserved": 0 if reserved is None else reserved * MIB}
    size = (allocated - 20) * MIB
    recording.operator(600, 100, "autograd::engine::evaluate_function: MmBackward0")
    recording.allocation(20, size, address=1, total_allocated=allocated * MIB, **more)
    recording.allocation(500, -size, address=1, total_allocated=20 * MIB, **more)
    return recording.trace()


def failing(free: int | None = 5) -> Trace:
    """Memory that could not be had: 30 MiB asked for while 80 were held."""
    recording = Recording()
    lane = recording.allocator()
    more = {"total_allocated": 80 * MIB, "total_reserved": 95 * MIB, "call_stack": "model.py(31): forward"}
    recording.allocation(20, 80 * MIB, lane, address=1, **more)
    recording.out_of_memory(
        30, 30 * MIB, None if free is None else free * MIB, lane, "model.py(40): forward;train.py(9): main"
    )
    return recording.trace()


FIRES: Cases = {
    "almost full": filling,
    "reserve unknown": lambda: filling(95, None),
    "full of parameters": lambda: filling(21, 95),
    "too full": failing,
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "room": lambda: filling(80, 89),
    "size unknown": lambda: filling(capacity=None),
}


def test_what_is_reserved_counts() -> None:
    finding = the_finding(rule, filling())

    assert finding.title == "device 0 uses 95.0 MiB of its 100.0 MiB: 5.0 MiB are left"
    assert (finding.severity, finding.saving_ns_per_step, finding.ends_run_in_ns) == ("note", 0, None)
    assert figures_of(finding) == [
        ("share of the device's memory in use at most", 0.95, "share", 0.9),
        ("memory in use at most", 95 * MIB, "bytes", None),
        ("memory there is", 100 * MIB, "bytes", None),
        ("memory that is left", 5 * MIB, "bytes", None),
        ("of it activation, at the peak", 60 * MIB, "bytes", None),
        ("of it allocated before the recording, at the peak", 20 * MIB, "bytes", None),
    ]
    assert [(interval.start_ns, interval.what) for interval in finding.evidence.intervals] == [(20, "the peak")]
    assert places_of(finding) == [("model.py", 31, "forward")]
    assert "checkpoint(block, x" in finding.remedy.code


def test_what_is_allocated_counts_where_the_reserve_is_unknown() -> None:
    assert figures_of(the_finding(rule, filling(95, None)))[0][1] == 0.95


def test_parameters_ask_for_another_remedy() -> None:
    assert "fully_shard" in the_finding(rule, filling(21, 95)).remedy.code


def test_of_what_a_server_holds_nothing_is_said() -> None:
    trace = filling(21, 95)
    operators = trace.operators.filter(~pl.col("name").str.starts_with("autograd::"))
    tables = {**{name: trace.table(name) for name in SCHEMAS}, "operators": operators}

    remedy = the_finding(rule, Trace.from_tables(tables, trace.metadata)).remedy

    assert "optimizer" not in remedy.text + remedy.code
    assert "_record_memory_history" in remedy.code


@pytest.mark.parametrize("free", [5, None])
def test_memory_that_could_not_be_had_ended_the_run(free: int | None) -> None:
    finding = the_finding(rule, failing(free))

    assert finding.title == "device 0 ran out of memory: 30.0 MiB were asked for while 80.0 MiB were held"
    assert (finding.severity, finding.saving_ns_per_step, finding.ends_run_in_ns) == ("high", 0, 0)
    assert figures_of(finding)[:3] == [
        ("memory asked for", 30 * MIB, "bytes", None),
        ("memory held then", 80 * MIB, "bytes", None),
        ("memory held by the allocator then", 95 * MIB, "bytes", None),
    ]
    left = ("memory the device had left", 5 * MIB, "bytes", 30 * MIB)
    assert (left in figures_of(finding)) == (free is not None)
    assert places_of(finding) == [("model.py", 40, "forward"), ("model.py", 31, "forward")]


def test_the_threshold_decides() -> None:
    assert asked(rule, filling(), share=0.96).findings == ()
    assert len(asked(rule, filling(80, 89), share=0.89).findings) == 1
