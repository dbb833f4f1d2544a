"""Which lines of the user's code slices stand under."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from stepscope.analysis.attribution import attribute, parse, user_entries
from stepscope.analysis.host import host_activity
from stepscope.analysis.places import Place, places
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import ProgramFacts
from tests.unit.recording import Recording


def places_of(recording: Recording, ns: list[int] | None = None, top: int = 3) -> list[Place]:
    """Places of all operators, each weighted by its duration or by `ns`."""
    trace = recording.trace()
    attribution = attribute(trace)
    slices = attribution.operator_slices
    weights = np.array(ns, np.int64) if ns is not None else trace.operators["duration_ns"].to_numpy()
    return places(attribution, slices, weights, top)


def test_nothing_stands_nowhere() -> None:
    trace = Trace.from_tables({})
    activity = host_activity(trace)
    none = np.zeros(0, np.int64)

    assert places(attribute(trace), none, none) == []
    assert places(attribute(trace), np.array([-1]), np.array([5])) == []
    assert activity.slice_index(pl.Series([], dtype=pl.String), pl.Series([], dtype=pl.UInt32)).tolist() == []


def test_without_frames_and_stacks_there_is_no_place() -> None:
    recording = Recording()
    recording.operator(0, 10, "aten::mm")

    assert places_of(recording) == []


def test_the_users_innermost_frame_and_the_path_to_it() -> None:
    recording = Recording()
    recording.frame(0, 100, "train.py(1): <module>")
    recording.frame(1, 98, "train.py(20): main")
    recording.frame(2, 90, "torch/nn/modules/module.py(1500): _call_impl")
    recording.frame(3, 80, "model.py(30): forward")
    recording.frame(4, 70, "torch/nn/modules/linear.py(120): forward")
    recording.operator(10, 10, "aten::linear")

    assert places_of(recording) == [
        Place("model.py", 30, "forward", False, 10, ("train.py:1 <module>", "train.py:20 main"))
    ]


@pytest.mark.parametrize(
    ("layers", "module"), [((0, 1), "GPT.h.*.mlp.act"), ((1,), "GPT.h.1.mlp.act")], ids=["several layers", "one layer"]
)
def test_a_librarys_module_is_named_beside_the_users_line(layers: tuple[int, ...], module: str) -> None:
    forward = "/env/site-packages/gpt/layers.py:9 Mlp.forward"
    recording = Recording(Metadata(program=ProgramFacts(module_functions={"GPT.h.*.mlp": forward})))
    recording.frame(0, 100, "train.py(20): main")
    for place, layer in enumerate(layers):
        begin = 50 * place
        for inner in ("GPT", f"GPT.h.{layer}", f"GPT.h.{layer}.mlp", f"GPT.h.{layer}.mlp.act"):
            begin += 1
            recording.module(begin, 40 - begin % 50, inner)
        recording.operator(begin + 1, 20, "aten::gelu")
        recording.operator(begin + 41, 2, "aten::sum")

    [found] = places_of(recording)
    assert (found.file, found.line, found.inside, found.module) == ("train.py", 20, (forward,), module)


def test_modules_of_the_user_and_of_torch_are_not_named() -> None:
    recording = Recording(Metadata(program=ProgramFacts(module_functions={"Other": "/env/other.py:1 Other.forward"})))
    recording.frame(0, 100, "train.py(20): main")
    recording.module(1, 90, "Net")
    recording.operator(2, 20, "aten::gelu")

    [found] = places_of(recording)
    assert (found.inside, found.module) == ((), "")


def test_costs_of_calls_of_one_function_add_up_and_the_costliest_comes_first() -> None:
    recording = Recording()
    for number, function in enumerate(["model.py(30): forward", "data.py(5): load", "model.py(30): forward"]):
        recording.frame(100 * number, 50, function)
        recording.operator(100 * number + 10, 10, "aten::mm")

    found = places_of(recording, ns=[10, 15, 20])

    assert [(place.file, place.line, place.function, place.ns) for place in found] == [
        ("model.py", 30, "forward", 30),
        ("data.py", 5, "load", 15),
    ]
    assert places_of(recording, ns=[10, 15, 20], top=1) == found[:1]


def test_recorded_call_stacks_name_the_statement() -> None:
    recording = Recording()
    stack = "torch/nn/functional.py(10): linear;model.py(33): forward;train.py(21): main;train.py(40): <module>"
    recording.operator(0, 20, "aten::linear", call_stack=stack)
    recording.operator(5, 10, "aten::addmm")

    assert places_of(recording) == [
        Place("model.py", 33, "forward", True, 30, ("train.py:40 <module>", "train.py:21 main"))
    ]


def test_frames_come_before_call_stacks() -> None:
    recording = Recording()
    recording.frame(0, 50, "model.py(30): forward")
    recording.operator(10, 20, "aten::linear", call_stack="model.py(33): forward")

    assert [(place.line, place.exact_line) for place in places_of(recording)] == [(30, False)]


LINE = {"source_file": "/srv/ada/model.py", "source_line": 33, "source_function": "forward"}


def test_recorded_lines_come_before_frames_which_lead_to_them() -> None:
    recording = Recording()
    recording.frame(0, 60, "train.py(20): main")
    recording.frame(1, 50, "model.py(30): forward")
    recording.operator(10, 20, "aten::linear", **LINE)
    recording.operator(12, 10, "aten::addmm")

    assert places_of(recording) == [Place("/srv/ada/model.py", 33, "forward", True, 30, ("train.py:20 main",))]


def test_what_has_no_line_is_placed_by_its_frame() -> None:
    recording = Recording()
    recording.frame(0, 60, "train.py(20): main")
    recording.operator(10, 20, "aten::linear", **LINE)
    recording.operator(40, 5, "aten::add")

    assert places_of(recording) == [
        Place("/srv/ada/model.py", 33, "forward", True, 20, ()),
        Place("train.py", 20, "main", False, 5, ()),
    ]


def test_a_frame_without_a_place_in_a_file_is_passed_over() -> None:
    recording = Recording()
    recording.frame(0, 50, "my_frame")
    recording.operator(10, 20, "aten::linear")

    assert places_of(recording) == []


def test_slices_by_table_and_row() -> None:
    recording = Recording()
    recording.frame(0, 100, "train.py(1): <module>")
    recording.operator(10, 20, "aten::mm")
    recording.operator(40, 20, "aten::mm")
    activity = host_activity(recording.trace())

    index = activity.slice_index(
        pl.Series(["operators", None, "frames", "operators"]), pl.Series([1, None, 0, 0], dtype=pl.UInt32)
    )

    assert [(int(activity.table[row]), int(activity.row[row])) if row >= 0 else None for row in index] == [
        (2, 1),
        None,
        (1, 0),
        (2, 0),
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train.py(5): step", ("train.py", 5, "step")),
        ("dir (old)/train.py(5): <lambda>", ("dir (old)/train.py", 5, "<lambda>")),
        ("a.py(5): f(3): g", ("a.py(5): f", 3, "g")),
        ("", None),
        ("aten::mm", None),
        ("train.py(x): step", None),
        ("train.py(1234567890): step", None),
        ("train.py(5): ", None),
        ("<built-in function print>", None),
    ],
)
def test_parsing_names_of_frames(name: str, expected: tuple[str, int, str] | None) -> None:
    assert parse(name) == expected


def test_the_users_entries_of_a_call_stack() -> None:
    stack = "torch/a.py(1): f;train.py(2): g;nonsense;/usr/lib/python3.11/abc.py(3): h;model.py(4): i"

    assert user_entries(stack) == ("train.py(2): g", "model.py(4): i")
    assert user_entries("") == ()
