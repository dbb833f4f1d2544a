"""decode-graphs: decoding iterations are launched kernel by kernel."""

from __future__ import annotations

import pytest

from stepscope.diagnosis import diagnose
from stepscope.diagnosis.rules.decode_graphs import RULE as rule
from stepscope.trace import Trace
from tests.simulator.programs import launch_bound_training
from tests.simulator.serving_faults import KERNELS, SERVING_FAULTS, decode_graphs, padded_graphs
from tests.unit.diagnosis.rules.cases import US, Cases, busy_device, empty_trace, figures_of, recorded, the_finding
from tests.unit.recording import Recording


def replayed(*batches: tuple[int, int], with_grids: bool = True) -> Trace:
    """Iterations of (requests, size of the graph), 10 us and 1 us for each row long, with one row's block in a grid."""
    recording, now = Recording(), 0
    for number, (requests, size) in enumerate(batches):
        length = (10 + size) * US
        recording.annotation(now, length, f"step[DECODE bs={requests}]")
        recording.launch(now + 1, 2, number, name="cudaGraphLaunch", kind="graph_launch")
        recording.work(now + 3, length - 10, "rms_norm", number, grid=f"{size},1,1" if with_grids else None)
        recording.launch(now + 5, length - 10, 1000 + number, name="cudaStreamSynchronize", kind="synchronise")
        now += length
    return recording.trace()


FIRES: Cases = {
    "no graphs": lambda: recorded(decode_graphs(lambda _: False)),
    "no graphs for large batches": lambda: recorded(decode_graphs(lambda requests: requests <= 4)),
    "padding to captured sizes": lambda: recorded(padded_graphs(fault=True)),
    "padding by the graphs' grids": lambda: replayed((3, 8), (5, 8), (8, 8), (9, 32), (32, 32), (10, 32), (11, 32)),
    "in a loop of one's own": lambda: recorded(SERVING_FAULTS["one_request_clean"]()),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "graphs for every batch": lambda: recorded(decode_graphs(lambda _: True)),
    "batches of captured sizes": lambda: recorded(padded_graphs(fault=False)),
    "graphs of one kind": lambda: replayed((3, 8), (5, 8), (8, 8)),
    "graphs without grids": lambda: replayed((3, 8), (8, 8), (9, 32), (32, 32), with_grids=False),
    "each batch has its graph": lambda: replayed(*((size, size) for size in range(1, 12))),
    "a training is launch-bound otherwise": lambda: recorded(launch_bound_training()),
}


def test_without_graphs_the_engines_option_is_named() -> None:
    finding = the_finding(rule, recorded(decode_graphs(lambda _: False)))

    figures = {name: value for name, value, *_ in figures_of(finding)}
    assert figures["decoding iterations without a graph"] == figures["decoding iterations"] == 10
    assert figures["launches in such an iteration"] == KERNELS
    assert "--enforce-eager" in finding.remedy.code
    assert not finding.remedy.apply


def test_batches_without_a_graph_are_told_from_those_with_one() -> None:
    finding = the_finding(rule, recorded(decode_graphs(lambda requests: requests <= 4)))

    figures = {name: value for name, value, *_ in figures_of(finding)}
    assert figures["decoding iterations without a graph"] == 6
    assert (figures["fewest requests in one without a graph"], figures["most requests in one with a graph"]) == (5, 4)
    assert "capture-sizes" in finding.remedy.code


def test_the_saving_is_what_graphs_gain() -> None:
    eager = diagnose(recorded(decode_graphs(lambda _: False)))
    graphed = diagnose(recorded(decode_graphs(lambda _: True)))
    first = eager.findings[0]
    assert first.rule == "decode-graphs"
    assert first.saving_ns_per_step == pytest.approx(eager.step_ns - graphed.step_ns, rel=0.15)


def test_padding_costs_what_a_smaller_graph_would_save() -> None:
    padded, near = diagnose(recorded(padded_graphs(fault=True))), diagnose(recorded(padded_graphs(fault=False)))
    first = padded.findings[0]
    assert (first.rule, first.confidence) == ("decode-graphs", "low")
    figures = {name: value for name, value, *_ in figures_of(first)}
    assert figures["share of the rows in graphs of decoding that are padding"] == 63 * 10 / (128 * 10 + 2 * 8)
    assert (figures["rows of the batch with most padding"], figures["rows of its graph"]) == (65, 128)
    assert first.saving_ns_per_step == pytest.approx(padded.step_ns - near.step_ns, rel=0.1)
    assert "capture-sizes" in first.remedy.code


def test_without_captures_the_largest_batch_of_equal_graphs_tells_their_size() -> None:
    finding = the_finding(rule, FIRES["padding by the graphs' grids"]())

    figures = {name: value for name, value, *_ in figures_of(finding)}
    assert figures["rows of its graph, at least"] == 32
    assert figures["time that a graph's further row takes"] == pytest.approx(US, rel=0.01)


def test_padding_in_graphs_of_one_size_is_a_note() -> None:
    recording = Recording()
    recording.annotation(0, 50, "capture_32_DECODE")
    for number in range(1, 5):
        recording.annotation(100 * number, 90, "step[DECODE bs=9]")
        recording.launch(100 * number + 1, 2, number, name="cudaGraphLaunch", kind="graph_launch")
        recording.work(100 * number + 3, 80, "gemm", number)
    finding = the_finding(rule, recording.trace())
    assert (finding.severity, finding.saving_ns_per_step) == ("note", 0)
    assert {name: value for name, value, *_ in figures_of(finding)}["rows of its graph"] == 32
