"""What lines and modules cost, as tables, as text and for programs."""

from __future__ import annotations

import polars as pl
import pytest

from stepscope.analysis.places import LINE_SCHEMA, MODULE_SCHEMA, line_table, module_table, place_costs
from stepscope.report.places import places_document, places_json, source_view
from stepscope.report.text import text_of
from stepscope.trace import Metadata, Trace, Window
from tests.unit.analysis.test_attribution import training
from tests.unit.recording import Recording
from tests.unit.rendered import written

SHORT = [
    "file",
    "line",
    "forward_ns",
    "backward_ns",
    "optimizer_ns",
    "input_ns",
    "other_ns",
    "total_ns",
    "idle_ns",
    "calls",
]


def on_host() -> Recording:
    """Two complete steps of 100 ns, each with a line of 30 ns and its backward of 40 ns, and before an operator."""
    recording = Recording()
    line = {"source_file": "/srv/ada/model.py", "source_line": 3, "source_function": "forward"}
    recording.operator(0, 10, "aten::rand", source_file="/srv/ada/train.py", source_line=9, source_function="main")
    for number, start in enumerate((100, 200)):
        recording.step(start, 100, number)
        recording.module(start + 5, 50, "Net")
        recording.module(start + 8, 40, "Net.body.0")
        recording.operator(start + 10, 30, "aten::linear", sequence_number=number, **line)
        recording.operator(start + 12, 20, "aten::addmm", sequence_number=number, **line)
        recording.allocation(start + 15, 4096)
        node = "autograd::engine::evaluate_function: AddmmBackward0"
        recording.operator(start + 60, 40, node, sequence_number=number, forward_thread=1, **line)
    return recording


def test_nothing() -> None:
    trace = Trace.from_tables({})

    assert line_table(trace).is_empty()
    assert dict(line_table(trace).schema) == {name: dtype() for name, dtype in LINE_SCHEMA.items()}
    assert module_table(trace).is_empty()
    assert dict(module_table(trace).schema) == {name: dtype() for name, dtype in MODULE_SCHEMA.items()}
    assert text_of(places_document(place_costs(trace), line_table(trace), "lines", top=0), width=200) == (
        "This trace shows none of your lines: it has no Python stacks either. stepscope run records lines; "
        "torch.profiler needs with_stack=True.\n"
    )


@pytest.mark.parametrize("things", ["lines", "modules"])
def test_who_has_no_torch_is_not_told_to_record_with_it(things: str) -> None:
    trace = Trace.from_tables({}, Metadata(format="xplane"))

    table = line_table(trace) if things == "lines" else module_table(trace)
    text = text_of(places_document(place_costs(trace), table, things, top=0), width=100)

    assert "XLA_IR_DEBUG=1" in text
    assert "torch.profiler" not in text


def test_without_a_device_lines_cost_the_operators_own_time_in_the_complete_steps() -> None:
    trace = on_host().trace()
    costs = place_costs(trace)

    assert (costs.basis, costs.steps, costs.total_ns, costs.attributed_ns, costs.idle_ns) == ("host", 2, 140, 140, None)
    assert line_table(trace).rows(named=True) == [
        {
            "file": "/srv/ada/model.py", "line": 3, "function": "forward", "exact_line": True,
            "forward_ns": 60, "backward_ns": 80, "optimizer_ns": 0, "input_ns": 0, "other_ns": 0, "total_ns": 140,
            "host_ns": 140, "idle_ns": None, "calls": 2, "bytes_allocated": 8192, "share": 1.0,
        }
    ]  # fmt: skip


def test_a_window_chooses_other_operators() -> None:
    trace = on_host().trace()
    table = line_table(trace, costs=place_costs(trace, window=Window(0, 150)))

    assert table.select("file", "total_ns").rows() == [("/srv/ada/model.py", 30), ("/srv/ada/train.py", 10)]


def test_modules_are_a_tree_without_those_that_hold_but_one() -> None:
    table = module_table(on_host().trace())

    assert table.select("module", "name", "depth", "calls", "self_ns", "total_ns", "backward_ns").rows() == [
        ("Net.body.0", "Net.body.0", 0, 2, 140, 140, 80)
    ]


def test_a_module_that_works_itself_stands_above_those_inside_and_depth_hides_them() -> None:
    recording = on_host()
    recording.operator(150, 3, "aten::relu")
    recording.operator(256, 3, "aten::item")
    trace = recording.trace()

    found = module_table(trace).select("name", "depth", "calls", "self_ns", "total_ns").rows()

    assert found == [("Net", 0, 2, 3, 143), ("body.0", 1, 2, 140, 140), (None, 0, 1, 3, 3)]
    assert module_table(trace, depth=1)["name"].to_list() == ["Net", None]


def test_with_a_device_lines_cost_its_time_and_idle_time() -> None:
    trace = training().trace()

    table = line_table(trace).select(SHORT)

    assert table.rows() == [
        ("model.py", 30, 25, 35, 0, 0, 0, 60, 50, 1),
        ("train.py", 20, 0, 0, 0, 0, 0, 0, 115, 4),
    ]
    assert place_costs(trace).idle_ns == 165


def test_what_no_line_is_known_of_has_a_row_of_its_own() -> None:
    recording = training()
    recording.work(900, 7, "lost")

    table = line_table(recording.trace())

    assert table.filter(pl.col("file").is_null()).select(SHORT[2:8]).rows() == [(0, 0, 0, 0, 7, 7)]


def test_the_text_tells_one_step_and_what_was_cut() -> None:
    trace = on_host().trace()
    costs = place_costs(trace)

    assert text_of(places_document(costs, line_table(trace), "lines", top=20), width=100) == (
        "Operators’ own time per step, mean of 2: 70 ns; 100.0 % of it in lines of yours.\n\n"
        "line                 function  total    share  forward  backward  calls  allocated\n"
        "/srv/ada/model.py:3  forward   70 ns  100.0 %    30 ns     40 ns      1    4.0 KiB\n"
    )
    tree = text_of(places_document(costs, module_table(trace), "modules", top=20), width=100)
    assert tree.splitlines()[-1] == "Net.body.0  70 ns  70 ns  100.0 %    30 ns     40 ns      1    4.0 KiB"
    several = line_table(trace, costs=place_costs(trace, window=Window(0, 400)))
    assert text_of(places_document(costs, several, "lines", top=1), width=100).splitlines()[-1] == (
        "showing 1 of 2 lines, --top 0 for all"
    )


def test_the_report_for_programs_has_sums() -> None:
    trace = on_host().trace()
    costs = place_costs(trace)

    report = written(places_json(costs, module_table(trace), "modules", top=0))

    assert list(report) == [
        "schema", "stepscope", "trace", "basis", "steps", "total_ns", "attributed_ns", "idle_ns", "module_count",
        "modules",
    ]  # fmt: skip
    assert (report["total_ns"], report["steps"], report["modules"][0]["self_ns"]) == (140, 2, 140)


def test_the_source_stands_beside_its_costs() -> None:
    trace = on_host().trace()
    costs = place_costs(trace)
    source = [f"source line {number}" for number in range(1, 12)]

    near = source_view(costs, line_table(trace), source, every=False, width=100)
    whole = source_view(costs, line_table(trace), source, every=True, width=100)
    lost = source_view(costs, line_table(trace), None, every=False, width=100)

    assert near[2:] == [
        "total  forward  backward  calls  allocated",
        "                                            1   source line 1",
        "                                            2   source line 2",
        "70 ns    30 ns     40 ns      1    4.0 KiB  3   source line 3",
        "                                            4   source line 4",
        "                                            5   source line 5",
        "                                            6   source line 6",
    ]
    assert len(whole) == 3 + 11
    assert lost[-1] == "70 ns    30 ns     40 ns      1    4.0 KiB  3   (forward)"


def test_lines_far_apart_are_separated_and_functions_are_marked() -> None:
    trace = training().trace()
    costs = place_costs(trace)
    table = line_table(trace).filter(pl.col("file") == "model.py")
    far = pl.concat([table, table.with_columns(line=pl.lit(3, pl.Int32))])

    view = source_view(costs, far, [f"\x1b[31mline {number}" for number in range(40)], every=False, width=100)

    assert [line.split()[-1] for line in view if line.split()[-1:] == ["…"]] == ["…"]
    assert any("30*" in line and "\\x1b[31mline 29" in line for line in view)
    assert view[-1].startswith("* a whole function")
