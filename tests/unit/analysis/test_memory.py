"""Memory over time: levels, blocks, categories, what was alive at the peak, growth."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from stepscope.analysis.blocks import blocks, category_of_stack, contradictory_totals, memory_devices, memory_levels
from stepscope.analysis.memory import (
    DeviceMemory,
    alive_at,
    alive_table,
    allocation_table,
    category_levels,
    device_memories,
    memory_growth,
)
from stepscope.errors import UsageError
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import ModelFacts, ProgramFacts
from stepscope.trace.tables import SCHEMAS
from tests.unit.recording import Recording

LINE = {"source_file": "train.py", "source_function": "step"}


def training(program: ProgramFacts | None = None) -> Trace:
    """One step of 1000 ns on device 0, with 1000 bytes there from before it."""
    recording = Recording(Metadata(program=program))
    recording.operator(5, 10, "aten::empty")
    recording.step(100, 1000, 1)
    recording.annotation(110, 50, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    recording.operator(120, 20, "aten::stack", **LINE, source_line=3)
    recording.operator(200, 100, "aten::linear", sequence_number=7, forward_thread=0, **LINE, source_line=4)
    recording.operator(210, 80, "aten::addmm", sequence_number=7, forward_thread=0)
    recording.operator(
        400, 200, "autograd::engine::evaluate_function: AddmmBackward0", sequence_number=7, forward_thread=1
    )  # fmt: skip
    recording.operator(410, 50, "aten::mm")
    recording.annotation(700, 200, "Optimizer.step#AdamW.step")
    recording.operator(710, 50, "aten::zeros_like", **LINE, source_line=5)
    recording.operator(770, 50, "aten::sqrt", **LINE, source_line=5)
    recording.operator(950, 10, "aten::mul", **LINE, source_line=6)
    for start, end, size in BLOCKS.values():
        recording.block(start, end, size)
    recording.allocation(890, -300, address=7)
    trace = recording.trace()
    tables = {name: trace.table(name) for name in SCHEMAS}
    tables["memory"] = trace.memory.with_columns(total_allocated=300 + pl.col("bytes").cum_sum())
    return Trace.from_tables(tables, trace.metadata)


BLOCKS = {
    "parameter": (6, None, 10),
    "input": (125, 650, 20),
    "temporary of the forward pass": (220, 250, 30),
    "activation": (230, 500, 40),
    "temporary of the backward pass": (415, 580, 50),
    "gradient": (420, 940, 60),
    "optimizer_state": (720, None, 70),
    "temporary of the optimizer": (780, 880, 80),
    "activation that is kept": (955, None, 90),
    "unknown": (970, 980, 100),
}


def memory_of(trace: Trace) -> DeviceMemory:
    [memory] = device_memories(trace)
    return memory


def test_a_trace_without_memory_events() -> None:
    trace = Trace.from_tables({})

    assert device_memories(trace) == ()
    assert memory_devices(trace) == []
    assert memory_levels(trace).is_empty()
    assert blocks(trace).is_empty()


def test_accelerators_come_before_the_cpu_and_larger_levels_before_smaller() -> None:
    recording = Recording()
    for device, size in (("cpu", 900), ("0", 10), ("1", 30)):
        recording.block(10, 20, size, device=device)

    assert memory_devices(recording.trace()) == ["1", "0", "cpu"]


def test_levels_are_those_recorded() -> None:
    recording = Recording()
    recording.allocation(10, 50, total_allocated=1050, total_reserved=2000)
    recording.allocation(20, -50, total_allocated=1000, total_reserved=2000)

    assert memory_levels(recording.trace()).rows() == [("0", 10, 1050, 2000), ("0", 20, 1000, 2000)]


def test_the_host_shares_no_reserve_that_its_totals_could_contradict() -> None:
    recording = Recording()
    for device in ("cpu", "0"):
        recording.allocation(10, 50, device=device, total_allocated=1050, total_reserved=2000)
        recording.allocation(20, 50, device=device, total_allocated=1100, total_reserved=0)
    trace = recording.trace()

    assert contradictory_totals(trace) == {"0": (1100, 0)}
    assert memory_levels(trace).filter(device="cpu").rows() == [("cpu", 10, 1050, None), ("cpu", 20, 1100, None)]


def test_levels_without_totals_are_the_least_that_are_possible() -> None:
    recording = Recording()
    for time, size in ((10, 50), (20, -80), (30, 10)):
        recording.allocation(time, size)

    assert memory_levels(recording.trace())["allocated_bytes"].to_list() == [80, 0, 10]


def test_sizes_that_add_up_to_more_than_64_bits() -> None:
    recording = Recording()
    for time in (10, 20, 30):
        recording.block(time, None, 2**62, total_allocated=2**63 - 100 + time)

    (memory,) = device_memories(recording.trace())
    assert alive_table(memory)["blocks"].to_list() == [3]


def test_blocks_are_paired_by_device_and_address() -> None:
    recording = Recording()
    recording.allocation(10, 5, address=1)
    recording.allocation(11, 6, address=1, device="1")
    recording.allocation(20, -5, address=1)
    recording.allocation(30, 7, address=1)
    recording.allocation(40, 8, address=1)  # the end of the one before was not recorded
    recording.allocation(50, -9, address=2)  # was there before
    recording.allocation(60, 4)  # without an address

    found = blocks(recording.trace()).sort("bytes").select("device", "start_ns", "end_ns", "bytes").rows()

    assert found == [("0", 10, 20, 5), ("1", 11, None, 6), ("0", 30, 40, 7), ("0", 40, None, 8), ("0", None, 50, 9)]


def test_categories_follow_from_when_blocks_lived() -> None:
    found = dict(memory_of(training()).blocks.select("bytes", "category").iter_rows())

    assert found == {
        300: "before",
        **{size: name.split(" of ")[0].split(" that ")[0] for name, (_, _, size) in BLOCKS.items()},
    }


def test_xlas_events_do_not_tell_what_is_an_activation() -> None:
    trace = training()
    of_xla = Trace.from_tables({name: trace.table(name) for name in SCHEMAS}, replace(trace.metadata, format="xplane"))

    found = dict(memory_of(of_xla).blocks.select("bytes", "category").iter_rows())

    assert found[BLOCKS["activation"][2]] == "unknown"


@pytest.mark.parametrize(
    ("stack", "category"),
    [
        ("", ""),
        ("train.py(3): main", ""),
        ("torch/optim/adam.py(40): _init_group;torch/optim/optimizer.py(9): step;train.py(3): main", "optimizer_state"),
        ("torch/autograd/graph.py(824): _engine_run_backward;train.py(3): main", "gradient"),
        ("torch/nn/modules/linear.py(100): __init__;model.py(3): __init__", "parameter"),
        ("torch/nn/modules/module.py(1340): convert;torch/nn/modules/module.py(9): _apply;a.py(3): main", "parameter"),
        ("torch/utils/data/_utils/pin_memory.py(50): pin_memory", "input"),
        ("torch/nn/modules/linear.py(125): forward;torch/nn/modules/module.py(1775): _call_impl", "activation"),
    ],
)  # fmt: skip
def test_categories_of_snapshots_follow_from_stacks(stack: str, category: str) -> None:
    assert category_of_stack(stack) == category


def test_the_peak_and_what_was_alive_then() -> None:
    memory = memory_of(training())

    assert (memory.peak_ns, memory.peak_bytes) == (780, 300 + 10 + 60 + 70 + 80)
    assert memory.reserved_bytes is None
    assert memory.fragmentation_share is None
    table = alive_table(memory)
    assert table.select("category", "bytes", "blocks").rows() == [
        ("before", 300, 1),
        ("temporary", 80, 1),
        ("optimizer_state", 70, 1),
        ("gradient", 60, 1),
        ("parameter", 10, 1),
    ]
    assert table["share"].to_list() == pytest.approx([300 / 520, 80 / 520, 70 / 520, 60 / 520, 10 / 520])
    assert alive_table(memory, "line").select("file", "line", "bytes").rows() == [
        (None, None, 310),
        ("train.py", 5, 150),
        ("train.py", 4, 60),
    ]
    assert alive_table(memory, "operator").select("operator_name", "bytes").rows()[:3] == [
        (None, 300),
        ("aten::sqrt", 80),
        ("aten::zeros_like", 70),
    ]


def test_a_level_above_what_events_tell_was_there_before() -> None:
    recording = Recording()
    recording.allocation(10, 50, address=1, total_allocated=1050, total_reserved=2100)
    memory = memory_of(recording.trace())

    assert alive_at(memory, 0).select("bytes", "category").rows() == [(1000, "before"), (50, "unknown")]
    assert (memory.fragmentation_bytes, memory.fragmentation_share) == (1050, 0.5)


def test_the_models_sizes_tell_apart_what_was_there_before() -> None:
    model = ModelFacts(parameter_bytes=300, buffer_bytes=10, optimizer_state_bytes=600)
    recording = Recording(Metadata(program=ProgramFacts(model=model)))
    recording.allocation(10, 50, address=1, total_allocated=1050)
    memory = memory_of(recording.trace())

    assert alive_table(memory).select("category", "bytes").rows() == [
        ("optimizer_state", 600),
        ("parameter", 310),
        ("before", 90),
        ("unknown", 50),
    ]


def test_what_operators_allocate_per_call_and_step() -> None:
    recording = Recording()
    for step in range(2):
        recording.step(1000 * step, 1000, step)
        for call in range(3):
            begin = 1000 * step + 100 * call
            recording.operator(begin + 10, 50, "aten::zeros")
            recording.operator(begin + 15, 30, "aten::empty")
            recording.block(begin + 20, begin + 90, 400)
            recording.block(begin + 30, begin + 90, 24)

    table = allocation_table(memory_of(recording.trace()))

    assert table.rows(named=True) == [
        {
            "operator_name": "aten::zeros",
            "calls": 6,
            "calls_per_step": 3.0,
            "per_call_bytes": 424,
            "per_step_bytes": 3 * 424,
            "allocated_bytes": 6 * 424,
            "largest_bytes": 400,
            "peak_bytes": 424,
        }
    ]


def test_an_unknown_grouping() -> None:
    with pytest.raises(
        UsageError, match="memory can be grouped by category, line, module, operator, region, not by 'size'"
    ):
        alive_table(memory_of(training()), "size")


def test_categories_over_time_add_up_to_the_level() -> None:
    memory = memory_of(training())
    times = memory.levels["start_ns"].to_list()

    held = category_levels(memory, times).group_by("start_ns").agg(pl.col("bytes").sum()).sort("start_ns")

    levels = memory.levels.unique("start_ns", keep="last", maintain_order=True)
    assert held["bytes"].to_list() == levels["allocated_bytes"].to_list()


def test_growth_needs_two_steps() -> None:
    assert memory_growth(memory_of(training())) is None


def test_growth_of_a_steady_program() -> None:
    recording = Recording()
    for step in range(4):
        recording.step(1000 * step, 1000, step)
        recording.block(1000 * step + 10, 1000 * step + 1500, 64)  # lives into the next step
    growth = memory_growth(memory_of(recording.trace()))

    assert growth is not None
    assert growth.level_bytes.tolist() == [64, 64, 64, 64]
    assert (growth.slope_bytes, growth.kept_bytes.tolist(), growth.leak_bytes) == (0.0, [0, 0], 0)
    assert growth.accumulated.is_empty()
