"""Whose doing operators and device work are: place, module and phase."""

from __future__ import annotations

import polars as pl

from stepscope.analysis.attribution import ATTRIBUTION_SCHEMA, attribute, operator_places, work_places
from stepscope.analysis.places import module_table
from stepscope.trace import Trace
from stepscope.trace.naming import UserCode
from tests.unit.recording import Recording

NODE = "autograd::engine::evaluate_function: MmBackward0"
LINE = {"source_file": "/srv/ada/model.py", "source_line": 33, "source_function": "forward"}


def training(*, engine_thread: bool = False) -> Recording:
    """A step with stacks: input, one module called from train(), its backward, an accumulation and the optimizer."""
    recording = Recording()
    lane = recording.thread("2") if engine_thread else 0
    recording.frame(0, 1000, "train.py(20): train")
    recording.annotation(10, 50, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    recording.operator(20, 10, "aten::stack")
    recording.frame(100, 100, "nn.Module: Net_0", module="Net_0")
    recording.frame(105, 90, "model.py(30): forward")
    recording.frame(110, 70, "nn.Module: Linear_0", module="Linear_0")
    recording.operator(120, 50, "aten::linear", sequence_number=7)
    recording.operator(130, 30, "aten::mm", sequence_number=7)
    recording.launched(140, 150, 25, "gemm", 1)
    recording.frame(300, 200, "<built-in method run_backward of torch._C._EngineBase object at 0x1>")
    recording.operator(310, 60, NODE, lane, sequence_number=7, forward_thread=1)
    recording.operator(320, 40, "aten::mm", lane)
    recording.launch(330, 2, 2, lane)
    recording.work(340, 35, "gemm_backward", 2)
    recording.operator(400, 40, "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", lane)
    recording.operator(410, 10, "aten::add_", lane)
    recording.annotation(600, 100, "Optimizer.step#AdamW.step")
    recording.operator(610, 50, "aten::_foreach_add_")
    recording.operator(800, 10, "aten::item", sequence_number=9)
    return recording


def rows(frame: pl.DataFrame, names: pl.Series) -> list[tuple[object, ...]]:
    return [(name, *row) for name, row in zip(names, frame.drop("exact_line").iter_rows(), strict=True)]


def test_nothing_has_no_place() -> None:
    trace = Trace.from_tables({})

    for found in (operator_places(trace), work_places(trace)):
        assert found.is_empty()
        assert dict(found.schema) == {name: dtype() for name, dtype in ATTRIBUTION_SCHEMA.items()}


def test_every_operator_of_a_step_recorded_with_stacks() -> None:
    trace = training().trace()

    assert rows(operator_places(trace), trace.operators["name"]) == [
        ("aten::stack", "train.py", 20, "train", None, "input"),
        ("aten::linear", "model.py", 30, "forward", "Net_0.Linear_0", "forward"),
        ("aten::mm", "model.py", 30, "forward", "Net_0.Linear_0", "forward"),
        (NODE, "model.py", 30, "forward", "Net_0.Linear_0", "backward"),
        ("aten::mm", "model.py", 30, "forward", "Net_0.Linear_0", "backward"),
        (
            "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
            *("train.py", 20, "train", None, "backward"),
        ),
        ("aten::add_", "train.py", 20, "train", None, "backward"),
        ("aten::_foreach_add_", "train.py", 20, "train", None, "optimizer"),
        ("aten::item", "train.py", 20, "train", None, "other"),
    ]
    assert rows(work_places(trace), trace.device_work["name"]) == [
        ("gemm", "model.py", 30, "forward", "Net_0.Linear_0", "forward"),
        ("gemm_backward", "model.py", 30, "forward", "Net_0.Linear_0", "backward"),
    ]


def test_a_thread_of_the_engine_belongs_to_the_same_lines() -> None:
    same, other = training().trace(), training(engine_thread=True).trace()

    assert operator_places(same).rows() == operator_places(other).rows()
    assert work_places(same).rows() == work_places(other).rows()


def test_code_of_the_users_inside_a_node_keeps_its_own_place() -> None:
    recording = training()
    recording.frame(318, 45, "model.py(90): backward")

    places = operator_places(recording.trace())

    assert places["line"].to_list()[3:5] == [30, 90]
    assert places["phase"].to_list()[3:5] == ["backward", "backward"]


def test_what_is_computed_again_inside_a_node_is_backward_and_its_backward_finds_it() -> None:
    recording = training()
    recording.frame(311, 8, "model.py(70): block")
    recording.operator(312, 5, "aten::relu", sequence_number=20)
    recording.operator(
        362, 6, "autograd::engine::evaluate_function: ReluBackward0", sequence_number=20, forward_thread=1
    )

    trace = recording.trace()
    found = dict(zip(trace.operators["name"], operator_places(trace).select("line", "phase").iter_rows(), strict=True))

    assert found["aten::relu"] == (70, "backward")
    assert found["autograd::engine::evaluate_function: ReluBackward0"] == (70, "backward")


def test_recorded_lines_come_before_frames() -> None:
    recording = training()
    recording.operator(112, 5, "aten::view", **LINE)

    found = operator_places(recording.trace())

    assert found.row(1) == ("/srv/ada/model.py", 33, "forward", True, "Net_0.Linear_0", "forward")


def test_a_launch_outside_of_operators_has_the_line_that_its_thread_was_at() -> None:
    recording = Recording()
    recording.line(0, 100, "/srv/ada/kernels.py(5): launch")
    recording.launched(10, 20, 30, "triton_kernel", 1)

    found = work_places(recording.trace())

    assert found.row(0) == ("/srv/ada/kernels.py", 5, "launch", True, None, "forward")


def test_recorded_modules_have_their_qualified_names() -> None:
    recording = training()
    recording.module(100, 100, "GPT2")
    recording.module(110, 70, "GPT2.blocks.0")

    attribution = attribute(recording.trace())

    assert attribution.modules == ("GPT2", "GPT2.blocks", "GPT2.blocks.0")
    assert attribution.module_parents.tolist() == [-1, 0, 1]
    assert attribution.operators()["module"].to_list()[1:5] == ["GPT2.blocks.0"] * 4


def test_copies_to_the_device_outside_of_modules_are_input_and_inside_are_forward() -> None:
    recording = training()
    for start, correlation in ((80, 11), (125, 12)):
        recording.operator(start, 5, "aten::copy_")
        recording.launched(start + 1, start + 2, 3, "Memcpy HtoD", correlation, kind="copy_in")

    trace = recording.trace()
    copies = work_places(trace).filter(trace.device_work["kind"] == "copy_in")

    assert copies["phase"].to_list() == ["input", "forward"]


def test_work_without_a_launch_belongs_to_the_operator_of_its_number() -> None:
    recording = Recording()
    recording.operator(0, 20, "aten::mm", external_id=5, **LINE)
    recording.work(10, 20, "gemm", external_id=5)
    recording.work(40, 20, "lost", external_id=6)

    assert work_places(recording.trace())["line"].to_list() == [33, None]


def test_a_trace_without_a_backward_pass_is_all_forward_but_for_input() -> None:
    recording = Recording()
    recording.operator(0, 20, "aten::mm")
    recording.frame(100, 50, "torch/utils/data/_utils/collate.py(10): collate")
    recording.operator(110, 20, "aten::stack")

    assert operator_places(recording.trace())["phase"].to_list() == ["forward", "input"]


def test_of_threads_that_count_alike_the_link_tells_the_forward() -> None:
    recording = Recording()
    recording.thread("2")
    recording.operator(0, 10, "aten::mm", 0, sequence_number=7, **{**LINE, "source_line": 1})
    recording.operator(20, 10, "aten::mm", 1, sequence_number=7, **{**LINE, "source_line": 2})
    recording.operator(50, 10, NODE, 0, sequence_number=7, forward_thread=1)
    recording.link(0, 2)

    assert operator_places(recording.trace())["line"].to_list() == [1, 2, 1]


def test_a_damaged_trace_in_which_two_operators_begin_at_once_leads_in_no_circle() -> None:
    recording = Recording()
    recording.operator(5, 10, NODE, sequence_number=7)
    recording.operator(5, 10, "aten::mm", sequence_number=7)

    assert operator_places(recording.trace())["file"].to_list() == [None, None]


def test_the_user_says_which_code_is_his() -> None:
    trace = training().trace()

    also = attribute(trace, user_code=UserCode(not_those=("model.py",)))
    none = attribute(trace, user_code=UserCode(also=("torch",), not_those=("*.py",)))

    assert set(also.operators()["file"]) == {"train.py"}
    assert set(none.operators()["file"]) == {None}


def test_work_alone_has_no_place() -> None:
    recording = Recording()
    recording.work(10, 20, "gemm")

    assert work_places(recording.trace())["phase"].to_list() == ["other"]


def test_modules_in_each_other_without_end_belong_to_the_deepest_that_a_network_has() -> None:
    recording = Recording()
    for depth in range(2_000):
        recording.frame(depth, 10_000 - 2 * depth, f"nn.Module: M_{depth % 10}", module=f"M_{depth % 10}")
    recording.operator(5_000, 10, "aten::mm")
    recording.frame(20_000, 100, "nn.Module: " + "long" * 300, module="long" * 300)
    recording.operator(20_010, 10, "aten::add")

    trace = recording.trace()
    modules = operator_places(trace)["module"].to_list()

    assert modules == [".".join(f"M_{depth % 10}" for depth in range(101)), None]
    assert module_table(trace)["depth"].max() == 0  # one path in which nothing else costs anything
