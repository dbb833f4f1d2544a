"""What the scopes and call stacks of compiled code tell of it."""

from __future__ import annotations

import pytest

from stepscope.analysis.attribution import work_places
from stepscope.analysis.flame import user_stacks
from stepscope.analysis.module_paths import parsed_scope
from stepscope.analysis.places import line_table, module_table
from tests.unit.recording import Recording

STACK = (
    "/srv/ada/model.py(9): loss;/opt/env/lib/python3.11/site-packages/jax/_src/api.py(3): f;/srv/ada/train.py(4): step"
)


@pytest.mark.parametrize(
    ("scope", "modules", "direction"),
    [
        ("", (), None),
        ("add", (), None),
        ("jit(step)/jit(main)/add", (), None),
        ("jit(step)/jvp(Model)/dense/dot_general", ("Model", "dense"), "forward"),
        ("jit(step)/transpose(jvp(Model))/dense/transpose", ("Model", "dense"), "backward"),
        ("jit(step)/jit(main)/jvp()/while/body/closed_call/layer/add", ("layer",), "forward"),
        ("jit(f)/vmap(jvp(Net))/cond/branch_0_fun/mul", ("Net",), "forward"),
        ("jit(f)/checkpoint/rematted_computation/Block/mul", ("Block",), None),
        ("train_step.1/forward.2/aten__mm.3/aten__mm", ("train_step", "forward"), None),
        ("jit(f)/name (a/b) of mine/mul", ("name (a/b) of mine",), None),
        ("((((", (), None),
        ("))))/x/y", ("))))", "x"), None),
    ],
)
def test_a_scope_is_taken_apart(scope: str, modules: tuple[str, ...], direction: str | None) -> None:
    assert parsed_scope(scope) == (modules, direction)


def test_a_scope_without_end_is_cut() -> None:
    assert len(parsed_scope("a/" * 10_000).modules) == 100


def compiled() -> Recording:
    recording = Recording()
    recording.operator(0, 50, "PjitFunction(step)")
    recording.launch(5, 2, 1)
    recording.work(10, 30, "fusion.1", 1, call_stack=STACK, scope="jit(step)/jvp(Net)/dense/dot")
    recording.work(40, 20, "fusion.2", 1, call_stack=STACK, scope="jit(step)/transpose(jvp(Net))/dense/dot")
    recording.work(60, 10, "fusion.3", 1, scope="jit(step)/add")
    return recording


def test_compiled_work_belongs_to_the_line_it_was_written_at() -> None:
    places = work_places(compiled().trace())

    assert places.rows() == [
        ("/srv/ada/model.py", 9, "loss", True, "Net.dense", "forward"),
        ("/srv/ada/model.py", 9, "loss", True, "Net.dense", "backward"),
        (None, None, None, None, None, "forward"),
    ]


def test_lines_and_modules_add_up_the_compiled_work() -> None:
    trace = compiled().trace()

    lines = line_table(trace).select("file", "line", "forward_ns", "backward_ns", "total_ns")
    assert lines.rows() == [("/srv/ada/model.py", 9, 30, 20, 50), (None, None, 10, 0, 10)]
    modules = module_table(trace).select("module", "forward_ns", "backward_ns")
    assert modules.rows() == [("Net.dense", 30, 20), (None, 10, 0)]


def test_the_flame_graph_leads_through_the_lines_that_compiled_work_was_written_at() -> None:
    stacks = {stack.frames: stack.ns for stack in user_stacks(compiled().trace())}

    above = ("/srv/ada/train.py:4 step", "/srv/ada/model.py:9 loss")
    assert stacks[(*above, "fusion.1")] == 30
    assert stacks[(*above, "backward", "fusion.2")] == 20
