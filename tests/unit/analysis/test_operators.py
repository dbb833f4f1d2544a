"""What operators cost."""

from __future__ import annotations

import pytest

from stepscope.analysis.operators import COST_SCHEMA, operator_costs, operator_table
from stepscope.errors import UsageError
from stepscope.trace import Trace
from tests.unit.recording import Recording

COLUMNS = [
    "calls", "calls_per_step", "host_total_ns", "host_self_ns", "host_self_share", "device_total_ns", "device_self_ns",
    "device_self_share", "bytes_allocated",
]  # fmt: skip
SHAPES = "[[2, 3], [3, 4]]"


def two_steps() -> Recording:
    """In each step a linear with an addmm inside that launches a kernel, then a copy of no device work."""
    recording = Recording()
    for number, kernel_ns in enumerate((30, 50)):
        begin = 1000 * number
        recording.step(begin, 1000, number)
        recording.frame(begin + 5, 300, "train.py(5): step")
        recording.operator(begin + 10, 100, "aten::linear", input_shapes=SHAPES)
        recording.operator(begin + 20, 60, "aten::addmm", input_shapes="[[4], [2, 3], [3, 4]]")
        recording.launched(begin + 50, begin + 200, kernel_ns, "gemm", 100 + number)
        recording.allocation(begin + 30, 400)
        recording.allocation(begin + 15, 8)
        recording.allocation(begin + 90, -400)
        recording.operator(begin + 150, 20, "aten::copy_")
    return recording


def test_no_operators() -> None:
    table = operator_table(Trace.from_tables({}))

    assert table.columns == ["name", *COLUMNS]
    assert table.height == 0
    costs = operator_costs(Trace.from_tables({}))
    assert dict(costs.schema) == {name: dtype() for name, dtype in COST_SCHEMA.items()}
    assert costs.height == 0


def test_costs_of_each_call() -> None:
    assert operator_costs(two_steps().trace()).rows() == [
        (40, 0, 30, 8),
        (60, 30, 30, 400),
        (20, 0, 0, 0),
        (40, 0, 50, 8),
        (60, 50, 50, 400),
        (20, 0, 0, 0),
    ]


def test_operators_by_name_the_costliest_on_the_device_first() -> None:
    assert operator_table(two_steps().trace()).rows() == [
        ("aten::addmm", 2, 1.0, 120, 120, 0.5, 80, 80, 1.0, 800),
        ("aten::linear", 2, 1.0, 200, 80, 80 / 240, 80, 0, 0.0, 16),
        ("aten::copy_", 2, 1.0, 40, 40, 40 / 240, 0, 0, 0.0, 0),
    ]


def test_without_a_device_the_costliest_on_the_host_first() -> None:
    recording = Recording()
    recording.operator(0, 10, "aten::relu")
    recording.operator(20, 30, "aten::mm")

    table = operator_table(recording.trace()).select("name", "calls_per_step", "host_self_ns", "device_self_share")

    assert table.rows() == [("aten::mm", None, 30, 0.0), ("aten::relu", None, 10, 0.0)]


def test_calls_per_step_leave_out_what_lies_outside_the_complete_steps() -> None:
    # given: a call before the first step, and three in two steps
    recording = Recording()
    for start in (0, 110, 120, 250):
        recording.operator(start, 5, "aten::mm")
    recording.step(100, 100, 1)
    recording.step(200, 100, 2)

    assert operator_table(recording.trace()).select("calls", "calls_per_step").rows() == [(4, 1.5)]


def test_grouping_by_shapes() -> None:
    recording = Recording()
    recording.operator(0, 10, "aten::mm", input_shapes="[[1]]")
    recording.operator(20, 20, "aten::mm", input_shapes="[[2]]")
    recording.operator(50, 5, "aten::mm")

    table = operator_table(recording.trace(), group_by=["name", "input_shapes"])

    assert table.select("name", "input_shapes", "host_self_ns").rows() == [
        ("aten::mm", "[[2]]", 20),
        ("aten::mm", "[[1]]", 10),
        ("aten::mm", None, 5),
    ]


def test_grouping_by_the_users_frame() -> None:
    recording = two_steps()
    recording.frame(2000, 100, "model.py(30): forward")
    recording.frame(2005, 90, "torch/nn/modules/linear.py(120): forward")
    recording.operator(2010, 10, "aten::linear")
    recording.operator(3000, 7, "aten::alone")

    table = operator_table(recording.trace(), group_by=["stack"]).select("stack", "calls", "host_self_ns")

    assert table.rows() == [("train.py(5): step", 6, 240), ("model.py(30): forward", 1, 10), (None, 1, 7)]


def test_grouping_by_recorded_lines_before_frames() -> None:
    recording = Recording()
    recording.frame(0, 300, "train.py(5): step")
    recording.operator(10, 20, "aten::mm", source_file="/srv/ada/train.py", source_line=8, source_function="step")
    recording.operator(40, 5, "aten::add")

    table = operator_table(recording.trace(), group_by=["stack"]).select("stack", "calls")

    assert table.rows() == [("/srv/ada/train.py(8): step", 1), ("train.py(5): step", 1)]


def test_grouping_by_the_recorded_call_stack_where_there_are_no_frames() -> None:
    recording = Recording()
    recording.operator(0, 10, "aten::mm", call_stack="train.py(9): step;train.py(20): <module>")

    table = operator_table(recording.trace(), group_by=["stack"]).select("stack", "calls")

    assert table.rows() == [("train.py(9): step;train.py(20): <module>", 1)]


@pytest.mark.parametrize("group_by", [["colour"], []])
def test_unknown_groupings(group_by: list[str]) -> None:
    with pytest.raises(UsageError, match="operators can be grouped by name, input_shapes, stack, not by"):
        operator_table(Trace.from_tables({}), group_by=group_by)


def test_a_child_that_outlives_its_parent_makes_no_negative_time() -> None:
    recording = Recording()
    recording.operator(0, 10, "aten::outer")
    recording.operator(5, 50, "aten::inner")

    assert operator_costs(recording.trace())["host_self_ns"].to_list() == [0, 50]
