"""Kernels of graphs, tied to the calls that captured them: simulated captures and replays whose truth is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from stepscope.analysis.attribution import attribute
from stepscope.analysis.captured import graph_calls, graph_operators, graph_use, tied_kernels, why_not_tied
from stepscope.analysis.idle import idle_time
from stepscope.analysis.operators import operator_table
from stepscope.analysis.roofline import roofline_table, with_graphs
from stepscope.commands import main
from stepscope.diagnosis.view import View
from stepscope.readers import open_trace
from stepscope.trace import Trace
from tests.simulator.device import Queue
from tests.simulator.host import Host
from tests.simulator.kineto import write_kineto
from tests.simulator.machine import Machine
from tests.unit.recording import Recording

US = 1_000
KERNELS = ("norm", "gemm", "gelu", "gemm", "add")
OPERATORS = {"norm": "aten::layer_norm", "gemm": "aten::mm", "gelu": "aten::gelu", "add": "aten::add_"}
LAYERS = 3


@dataclass(frozen=True)
class Truth:
    """What the model computes, in order: the kernel, its operator, its module and the line of its function."""

    kernel: str
    module: str
    line: int

    @property
    def operator(self) -> str:
        return OPERATORS[self.kernel]


MODEL = [
    Truth(
        kernel, f"Model_0.Block_{layer}.{'Norm' if kernel == 'norm' else 'MLP'}_{layer}", 30 if kernel == "norm" else 40
    )
    for layer in range(LAYERS)
    for kernel in KERNELS
]


def machine() -> tuple[Machine, Host, Queue]:
    made = Machine(with_frames=True)
    return made, made.host("main"), made.queue()


def model(main: Host, run: Callable[[str], object]) -> None:
    """Run the model: `run(kernel)` inside the frames, modules and operators of each kernel."""
    with main.frame("nn.Module: Model_0"):
        for each in MODEL:
            _, block, part = each.module.split(".")
            with (
                main.frame(f"nn.Module: {block}"),
                main.frame(f"nn.Module: {part}"),
                main.frame(f"model.py({each.line}): forward"),
                main.operator(each.operator, before_ns=2 * US),
            ):
                run(each.kernel)


def captured(main: Host, *, is_named: bool) -> None:
    with main.frame("serve.py(10): capture"), main.capture():
        model(main, lambda kernel: main.captured_launch(kernel, is_named=is_named))


def eager(main: Host, queue: Queue) -> None:
    with main.frame("serve.py(5): warm_up"):
        model(main, lambda kernel: main.launch(kernel, queue, 5 * US))


def replayed(main: Host, queue: Queue, tokens: int = 3, kernels: list[str] | None = None) -> None:
    names = [each.kernel for each in MODEL] if kernels is None else kernels
    for step in range(tokens):
        with main.step(step), main.frame("serve.py(20): decode", before_ns=3 * US):
            main.graph_launch([(name, queue, (7 + place) * US) for place, name in enumerate(names)])
            main.item(queue)


def opened(made: Machine, path: Path) -> Trace:
    trace = open_trace(write_kineto(made, path))
    trace.check()
    return trace


def in_graphs(trace: Trace) -> pl.DataFrame:
    graph = trace.launches["kind"].gather(trace.device_work["launch"]) == "graph_launch"
    operators = graph_operators(trace)
    assert operators is not None
    return pl.concat([attribute(trace).device_work(), operators], how="horizontal").filter(graph)


def assert_is_the_truth(trace: Trace, tokens: int = 3) -> None:
    found = in_graphs(trace)
    assert found["graph_operator"].to_list() == [each.operator for each in MODEL] * tokens
    assert found["module"].to_list() == [each.module for each in MODEL] * tokens
    assert found["line"].to_list() == [each.line for each in MODEL] * tokens
    assert set(found["file"]) == {"model.py"}
    assert not found["exact_line"].any()


def test_nothing_is_known_without_graphs() -> None:
    trace = Recording().trace()

    assert tied_kernels(trace) == ()
    assert graph_use(trace) is None
    assert graph_operators(trace) is None


@pytest.mark.parametrize(("is_named", "basis", "confidence"), [(True, "capture", "high"), (False, "count", "low")])
def test_kernels_belong_to_the_capture_in_the_same_trace(
    is_named: bool, basis: str, confidence: str, tmp_path: Path
) -> None:
    made, main, queue = machine()
    captured(main, is_named=is_named)
    replayed(main, queue)
    trace = opened(made, tmp_path / "both.json")

    assert_is_the_truth(trace)
    use = graph_use(trace)
    assert use is not None
    assert [(each.basis, each.kernels, each.confidence) for each in use.by] == [(basis, 3 * len(MODEL), confidence)]
    assert (use.launches, use.kernels, use.tied, use.tied_ns) == (3, 45, 45, use.kernel_ns)


def test_kernels_belong_to_the_same_kernels_launched_one_by_one(tmp_path: Path) -> None:
    made, main, queue = machine()
    eager(main, queue)
    replayed(main, queue)
    trace = opened(made, tmp_path / "eager.json")

    assert_is_the_truth(trace)
    use = graph_use(trace)
    assert use is not None
    assert [each.basis for each in use.by] == ["sequence"]


def test_kernels_belong_to_a_capture_in_another_recording(tmp_path: Path) -> None:
    made, main, queue = machine()
    captured(main, is_named=True)
    capture = opened(made, tmp_path / "capture.json")
    made, main, queue = machine()
    replayed(main, queue)
    trace = opened(made, tmp_path / "decode.json")
    assert graph_operators(trace) is None

    both = trace.with_capture(capture)

    assert_is_the_truth(both)
    assert why_not_tied(both) is None
    table = operator_table(both).select("name", "calls", "device_self_ns")
    product = table.row(by_predicate=pl.col("name") == "aten::mm", named=True)
    gemms = [7 + place for place, each in enumerate(MODEL) if each.kernel == "gemm"]
    assert product == {"name": "aten::mm", "calls": 0, "device_self_ns": 3 * US * sum(gemms)}
    view = View(both)
    where = view.at_launches(view.work.filter(pl.col("name") == "norm"))
    assert [(place.file, place.line, place.exact_line) for place in where] == [("model.py", 30, False)]


def test_operators_in_graphs_reach_what_their_work_shows(tmp_path: Path) -> None:
    """Each of three launches is a call of the product that was captured with its shapes."""
    made, main, queue = machine()
    with main.capture():
        for place in range(8):
            with main.operator("aten::mm", (512, 1024), (1024, 2048), before_ns=US):
                main.captured_launch(f"gemm_{place}")
    replayed(main, queue, kernels=[f"gemm_{place}" for place in range(8)])
    trace = opened(made, tmp_path / "both.json")

    table = with_graphs(roofline_table(trace), trace)

    (row,) = table.filter(pl.col("operator") == "aten::mm").rows(named=True)
    assert (row["calls"], row["flops"]) == (24, 2 * 512 * 1024 * 2048)
    assert row["device_ns"] == 3 * US * sum(7 + place for place in range(8))
    calls = graph_calls(trace, np.arange(trace.device_work.height))
    assert calls is not None
    calls.check()
    assert roofline_table(Recording().trace()).is_empty()


def test_a_graph_on_several_queues_may_run_its_kernels_in_another_order(tmp_path: Path) -> None:
    made, main, queue = machine()
    captured(main, is_named=True)
    names = [each.kernel for each in MODEL]
    replayed(main, queue, kernels=[*names[:2], names[3], names[2], *names[4:]])
    trace = opened(made, tmp_path / "both.json")

    found = in_graphs(trace).head(len(MODEL))
    assert found["graph_operator"][2:4].to_list() == ["aten::mm", "aten::gelu"]
    assert found["module"][2:4].to_list() == [MODEL[3].module, MODEL[2].module]


def test_another_graphs_capture_is_refused(tmp_path: Path) -> None:
    made, main, queue = machine()
    captured(main, is_named=True)
    capture = opened(made, tmp_path / "capture.json")
    made, main, queue = machine()
    replayed(main, queue, kernels=[f"other_{place}" for place in range(12)])
    trace = opened(made, tmp_path / "decode.json").with_capture(capture)

    assert tied_kernels(trace) == ()
    assert why_not_tied(trace) == "the graphs have 12 kernels, and the file captures other ones: 15 calls"
    assert set(attribute(trace).device_work()["file"].drop_nulls()) <= {"serve.py"}


def test_the_commands_take_a_capture_and_refuse_another_graphs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, main_thread, queue = machine()
    captured(main_thread, is_named=True)
    capture = write_kineto(made, tmp_path / "capture.json")
    made, main_thread, queue = machine()
    replayed(main_thread, queue)
    decode = write_kineto(made, tmp_path / "decode.json")
    words = ("--capture-trace", str(capture), "--no-cache")

    assert main(["diagnose", str(decode), *words, "--json", "-"]) == 0
    graphs = json.loads(capsys.readouterr().out)["graphs"]
    assert (graphs["tied"], graphs["by"]) == (45, [{"basis": "capture", "kernels": 45, "confidence": "high"}])
    assert main(["modules", str(decode), *words, "--csv", "-"]) == 0
    assert "Model_0.Block_2.MLP_2" in capsys.readouterr().out
    assert main(["diagnose", str(capture), *words]) == 2
    assert "does not fit" in capsys.readouterr().err


def test_a_short_graph_is_not_tied_to_what_looks_alike(tmp_path: Path) -> None:
    made, main, queue = machine()
    eager(main, queue)
    replayed(main, queue, kernels=["norm", "gemm", "gelu"])

    assert tied_kernels(opened(made, tmp_path / "short.json")) == ()


def test_an_annotation_of_the_graphs_node_names_the_module(tmp_path: Path) -> None:
    made, main, queue = machine()
    replayed(main, queue, tokens=1)
    path = write_kineto(made, tmp_path / "annotated.json")
    content = json.loads(path.read_text())
    kernels = [event for event in content["traceEvents"] if event.get("cat") == "kernel"]
    for number, (event, each) in enumerate(zip(kernels, MODEL, strict=True)):
        event["args"] |= {"graph node id": (9 << 32) + number, "str": each.module}
    kernels[1]["args"] |= {"str": {"not": "text"}}
    kernels[2]["args"] |= {"graph node id": 0}
    path.write_text(json.dumps(content))
    trace = open_trace(path)

    expected = [each.module if number not in (1, 2) else None for number, each in enumerate(MODEL)]
    assert trace.device_work.filter(pl.col("kind") == "compute")["module"].to_list() == expected
    modules = attribute(trace).device_work()["module"].to_list()
    assert modules[: len(MODEL)] == expected
    use = graph_use(trace)
    assert use is not None
    assert [(each.basis, each.kernels) for each in use.by] == [("annotation", len(MODEL) - 2)]


def test_time_after_a_graph_without_recorded_kernels_has_no_cause(tmp_path: Path) -> None:
    """The host launches a graph at 100 us and waits for it until 200 us; its kernels are missing."""
    recording = Recording(unit_ns=US)
    recording.launch(0, 5, correlation=1)
    recording.work(10, 20, "gemm", correlation=1)
    recording.launch(100, 5, name="cudaGraphLaunch", kind="graph_launch", correlation=2)
    recording.launch(106, 94, name="cudaStreamSynchronize", kind="synchronise", correlation=3)
    recording.launch(300, 5, correlation=4)
    recording.work(310, 10, "gemm", correlation=4)
    trace = recording.trace()

    idle = idle_time(trace)

    unknown = idle.filter(pl.col("cause") == "unknown")
    assert (unknown["start_ns"].min(), int(unknown["duration_ns"].sum())) == (100 * US, 100 * US)
    assert int(idle["duration_ns"].sum()) == 280 * US
    use = graph_use(trace)
    assert use is not None
    assert (use.unrecorded, use.unrecorded_ns) == (1, 100 * US)
