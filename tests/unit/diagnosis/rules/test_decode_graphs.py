"""decode-graphs: decoding iterations are launched kernel by kernel."""

from __future__ import annotations

import pytest

from stepscope.diagnosis import diagnose
from stepscope.diagnosis.rules.decode_graphs import RULE as rule
from tests.simulator.programs import launch_bound_training
from tests.simulator.serving_faults import KERNELS, SERVING_FAULTS, decode_graphs
from tests.unit.diagnosis.rules.cases import Cases, busy_device, empty_trace, figures_of, recorded, the_finding

FIRES: Cases = {
    "no graphs": lambda: recorded(decode_graphs(lambda _: False)),
    "no graphs for large batches": lambda: recorded(decode_graphs(lambda requests: requests <= 4)),
    "in a loop of one's own": lambda: recorded(SERVING_FAULTS["one_request_clean"]()),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "graphs for every batch": lambda: recorded(decode_graphs(lambda _: True)),
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
