"""The critical path, slack and speed-up curves of traces written by hand. Times are microseconds."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from stepscope.analysis.step_view import StepView
from stepscope.trace import Trace
from stepscope.whatif import Experiment
from stepscope.whatif.answer import loader_workers, speed_up_curve
from stepscope.whatif.changes import scaled_operators, without_cause
from stepscope.whatif.critical_path import critical_path, resources, slack_by_name, slack_of_operators
from tests.unit.recording import Recording
from tests.unit.whatif.test_graph import US, Machine, backward_thread, two_queues, waiting_step
from tests.unit.whatif.test_scenarios import gradients, loading, many_launches

TRACES = {
    "wait": waiting_step,
    "two queues": lambda: two_queues(recorded=True),
    "two threads": backward_thread,
    "short kernels": many_launches,
    "collectives": gradients,
    "no device": lambda: loading(5),
}


def path_of(trace: Trace) -> list[tuple[str, str | None, int, int]]:
    rows = critical_path(Experiment(trace)).select("kind", "cause", "start_ns", "duration_ns").iter_rows()
    return [(kind, cause, start // US, duration // US) for kind, cause, start, duration in rows]


@pytest.mark.parametrize("name", TRACES)
def test_the_path_covers_the_steps_without_holes(name: str) -> None:
    experiment = Experiment(TRACES[name]())

    path = critical_path(experiment)

    ends = path["start_ns"] + path["duration_ns"]
    assert path["start_ns"][1:].to_list() == ends[:-1].to_list()
    assert path["duration_ns"].sum() == experiment.measured_ns
    assert resources(path)["ns"].sum() == experiment.measured_ns


def test_the_path_goes_from_the_host_to_the_device_and_back() -> None:
    assert path_of(waiting_step()) == [
        ("host", "untraced", 0, 10),
        ("launch_latency", None, 10, 6),
        ("compute", None, 16, 400),
        ("host", "synchronisation", 416, 4),  # back from the call
        ("host", "untraced", 420, 80),
        ("host", "dispatch", 500, 4),  # the second launch; its kernel is done before the step is
        ("host", "untraced", 504, 496),
    ]


def test_the_path_of_a_changed_step() -> None:
    experiment = Experiment(waiting_step())
    outcome = experiment.run(without_cause("synchronisation")(experiment, experiment.graph))

    path = critical_path(experiment, outcome.replay)

    assert path["duration_ns"].sum() == 680 * US == outcome.step_ns
    assert path["kind"].unique().to_list() == ["host"]


def test_batches_that_workers_load_are_on_the_path_when_they_are_late() -> None:
    experiment = Experiment(loading(40, steps=40))
    outcome = experiment.run(loader_workers(1)(experiment, experiment.graph))

    table = resources(critical_path(experiment, outcome.replay))

    assert table.row(0)[:2] == ("host", "input")
    assert table["ns"].sum() == round(outcome.step_ns * outcome.step_count)


def test_an_empty_trace_has_no_path() -> None:
    assert critical_path(Experiment(Recording().trace())).is_empty()


def test_what_the_first_work_waited_for_may_be_unknown() -> None:
    recording = Recording(unit_ns=US)
    recording.step(0, 1000, 0)
    recording.work(300, 600, "kernel")  # its launch was not recorded
    recording.launch(100, 850, 1, name="cudaDeviceSynchronize", kind="synchronise")
    path = critical_path(Experiment(recording.trace()))

    assert path.select("start_ns", "duration_ns", "kind").rows()[:2] == [
        (0, 300 * US, "wait"),
        (300 * US, 600 * US, "compute"),
    ]
    assert path["duration_ns"].sum() == 1000 * US


def test_a_device_whose_host_was_not_recorded_has_a_path_and_promises_nothing() -> None:
    recording = Recording(unit_ns=US)
    recording.work(0, 950, "kernel")
    view = StepView(recording.trace())
    view.steps = pl.DataFrame(
        {"index": [0], "start_ns": [0], "duration_ns": [1000 * US], "complete": [True], "source": ["inferred"]}
    )
    experiment = Experiment(view)

    assert resources(critical_path(experiment)).rows() == [("compute", None, 950 * US, 1.0)]
    assert "no host thread" in (experiment.why_not or "")


def test_slack_where_nothing_is_waited_for() -> None:
    recording = Recording(unit_ns=US)
    recording.operator(0, 100, "aten::mm")

    assert slack_of_operators(Experiment(recording.trace()))["slack_ns"].to_list() == [0]


def test_operators_on_the_path_have_no_slack() -> None:
    machine = Machine()
    machine.step(0, 1000 * US, 0)
    machine.operator(0, 20 * US, "aten::first")
    machine.kernel(10, 16, 100, 101)
    machine.operator(20 * US, 30 * US, "aten::second")
    machine.kernel(30, 200, 800, 102, queue="20")
    machine.work(1000 * US, 10 * US, "last", 101, queue="20")
    slack = slack_of_operators(Experiment(machine.trace()))

    assert slack["name"].to_list() == ["aten::first", "aten::second"]
    assert slack["device_ns"].to_list() == [110 * US, 800 * US]
    assert slack["slack_ns"].to_list() == [0, 0]


def test_what_nothing_waits_for_could_end_as_late_as_the_step() -> None:
    trace = waiting_step()
    experiment = Experiment(trace)
    assert slack_of_operators(experiment).is_empty()

    machine = Machine()
    other = machine.thread("2")
    machine.step(0, 1000 * US, 0)
    machine.operator(0, 1000 * US, "aten::main")
    machine.operator(100 * US, 200 * US, "aten::aside", lane=other)
    slack = slack_of_operators(Experiment(machine.trace()))

    assert dict(slack.select("name", "slack_ns").iter_rows()) == {"aten::main": 0, "aten::aside": 700 * US}
    assert slack_by_name(slack)["name"].to_list() == ["aten::main", "aten::aside"]


def test_an_operator_may_be_later_by_its_slack_and_no_more() -> None:
    experiment = Experiment(backward_thread())
    slack = slack_of_operators(experiment)

    for row, name, start, duration, _, ns in slack.iter_rows():
        lane = experiment.trace.operators["lane"].to_numpy()[[row]]
        end = np.array([start + duration])
        for more, longer in ((ns, False), (ns + 10 * US, True)):
            delayed = experiment.graph.with_host_time(lane, end - 1, end, np.array([1.0 + more]))
            assert (experiment.run(delayed).saving_ns < 0) == longer, (name, more)


def test_a_curve_tells_what_a_faster_operator_would_save() -> None:
    experiment = Experiment(backward_thread())

    curve = speed_up_curve(experiment, "operators", top=2, factors=(0.5, 0.0))

    half = curve.filter((pl.col("name") == "aten::forward") & (pl.col("factor") == 0.5))
    rows = experiment.trace.operators.with_row_index("row").filter(pl.col("name") == "aten::forward")["row"].to_numpy()
    same = experiment.run(scaled_operators(rows.astype(np.int64), 0.5)(experiment, experiment.graph))
    assert half["saving_share"].to_list() == [pytest.approx(0.1)] == [pytest.approx(same.saving_share)]


def test_a_curve_of_what_is_not_there_is_empty() -> None:
    assert speed_up_curve(Experiment(waiting_step()), "modules").is_empty()
    assert speed_up_curve(Experiment(Recording().trace()), "operators").is_empty()
