"""What a step that ran on a processor would give a device to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.machine.devices import named_device
from stepscope.predict.cpu_operations import CPU_SCHEMA, UNCOVERED_SCHEMA, CpuCalls, cpu_operation_times
from stepscope.predict.operation_times import operation_times
from stepscope.predict.trace_operations import described
from stepscope.readers import open_trace
from stepscope.trace import Trace, Window
from tests.unit.recording import Recording

L4 = named_device("L4")
FLOATS = '["float", "float", "float"]'
SMALL = {"input_shapes": "[[4], [4]]", "input_types": FLOATS}


def product(recording: Recording, start: int, duration: int, name: str = "aten::addmm", **more: Any) -> None:
    shapes = {"input_shapes": "[[256], [512, 128], [128, 256]]", "input_types": FLOATS}
    recording.operator(start, duration, name, **{**shapes, **more})


def step() -> Trace:
    """A linear layer, two small additions, a view, and an operator of unknown work."""
    recording = Recording(unit_ns=1000)
    recording.operator(0, 500, "aten::linear", input_shapes="[[512, 128], [256, 128], [256]]", input_types=FLOATS)
    product(recording, 10, 480)
    recording.operator(20, 10, "aten::copy_", **SMALL)
    recording.operator(600, 2, "aten::add", **SMALL)
    recording.operator(610, 2, "aten::add", **SMALL)
    recording.operator(620, 5, "aten::view", **SMALL)
    recording.operator(630, 96, "aten::my_own", **SMALL)
    return recording.trace()


def test_empty() -> None:
    found = cpu_operation_times(CpuCalls.of(Trace.from_tables({})), L4)

    assert (found.table.schema, found.table.height) == (CPU_SCHEMA, 0)
    assert (found.uncovered.schema, found.uncovered.height) == (UNCOVERED_SCHEMA, 0)
    assert found.covered_share == 0
    assert found.notes == ("no operator of the trace shows what it computes: record shapes to predict them",)


def test_each_piece_of_work_counts_once() -> None:
    """Neither the operator around the product nor the one inside it."""
    found = cpu_operation_times(CpuCalls.of(step()), L4)

    assert found.table["operator"].to_list() == ["aten::addmm", "aten::add", "aten::add"]
    assert found.table["row"].to_list() == [1, 3, 4]
    assert found.table["host_ns"].to_list() == [480_000, 2_000, 2_000]


def test_a_call_costs_the_host_what_the_least_ones_cost() -> None:
    """2 us; the product consists of two operators."""
    found = cpu_operation_times(CpuCalls.of(step()), L4)

    assert found.overhead_ns == 2_000
    assert found.table["dispatch_ns"].to_list() == [4_000, 2_000, 2_000]
    assert found.table["arithmetic_ns"].to_list() == [476_000, 0, 0]


def test_a_device_needs_what_is_predicted_from_the_shapes() -> None:
    trace = step()
    found = cpu_operation_times(CpuCalls.of(trace), L4)

    expected = operation_times(described(trace, np.array([1, 3, 4])), L4)
    assert found.table["device_ns"].to_list() == pytest.approx(expected.ns.tolist())
    assert found.table["low_ns"].to_list() == pytest.approx(expected.low_ns.tolist())
    assert found.table["high_ns"].to_list() == pytest.approx(expected.high_ns.tolist())


def test_what_is_not_known_is_counted() -> None:
    found = cpu_operation_times(CpuCalls.of(step()), L4)

    assert found.uncovered.rows() == [("aten::my_own", 1, 96_000)]
    assert found.covered_share == pytest.approx(484 / 580)
    assert found.notes == ("operators of unknown work have no prediction: 1 call, 17% of the operators' time",)


def test_what_an_operator_does_itself_counts_beside_those_inside() -> None:
    recording = Recording(unit_ns=1000)
    recording.operator(0, 900, "aten::mkldnn_rnn_layer", **SMALL)
    recording.operator(100, 5, "aten::empty")
    recording.operator(200, 100, "aten::add", **SMALL)
    recording.operator(1000, 12, "aten::handing_on", **SMALL)
    recording.operator(1002, 2, "aten::add", **SMALL)

    found = cpu_operation_times(CpuCalls.of(recording.trace()), L4)

    assert found.table["operator"].to_list() == ["aten::add", "aten::add"]
    assert found.uncovered.rows() == [("aten::mkldnn_rnn_layer", 1, 795_000)]


def test_only_operators_in_the_window() -> None:
    found = cpu_operation_times(CpuCalls.of(step(), Window(600_000, 611_000)), L4)

    assert found.table["row"].to_list() == [3, 4]
    assert found.uncovered.is_empty()


def test_a_device_without_the_number_type() -> None:
    recording = Recording()
    product(recording, 0, 100, input_types='["c10::BFloat16", "c10::BFloat16", "c10::BFloat16"]')

    found = cpu_operation_times(CpuCalls.of(recording.trace()), named_device("T4"))

    assert found.table["device_ns"].to_list() == [None]
    assert found.covered_share == 0
    assert found.notes == ("T4 has no units for the number type of 1 call",)


def test_another_number_type() -> None:
    wide, half = (
        cpu_operation_times(CpuCalls.of(step()), L4, precision=one).table["device_ns"][0] for one in ("fp32", "bf16")
    )

    assert half < wide


def test_what_loads_data_stays_on_the_host() -> None:
    recording = Recording()
    recording.annotation(0, 200, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    product(recording, 10, 100)
    product(recording, 300, 100)

    assert cpu_operation_times(CpuCalls.of(recording.trace()), L4).table["row"].to_list() == [1]


def test_a_host_that_launched_work_only_dispatched() -> None:
    recording = Recording()
    product(recording, 0, 100)
    recording.launch(10, 5, 1)

    assert cpu_operation_times(CpuCalls.of(recording.trace()), L4).table["dispatch_ns"].to_list() == [100]


def test_the_sample_that_comes_with_the_package() -> None:
    trace = open_trace(Path(__file__).parents[3] / "examples/gpt2_per_token_loss_cpu.json.gz")

    found = cpu_operation_times(CpuCalls.of(trace), named_device("H100-SXM"))

    assert found.covered_share > 0.99
    assert set(found.table["phase"].to_list()) == {"forward", "backward", "optimizer"}
    assert found.table["device_ns"].null_count() == 0
    assert 0 < found.table["device_ns"].sum() < 0.1 * found.table["host_ns"].sum()
    assert (found.table["dispatch_ns"] + found.table["arithmetic_ns"]).to_list() == pytest.approx(
        found.table["host_ns"].to_list()
    )
