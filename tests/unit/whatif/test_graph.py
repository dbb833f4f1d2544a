"""Dependency graphs of traces written by hand, and what their replays give. Times are microseconds unless said."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.trace import Trace
from stepscope.whatif import Experiment, build_graph, replay
from stepscope.whatif.changes import scaled_work, without_waits
from tests.unit.recording import Recording

US = 1_000


class Machine(Recording):
    """A recording in microseconds."""

    def call(self, start: int, duration: int, correlation: int, name: str, kind: str, lane: int = 0) -> None:
        self.launch(start * US, duration * US, correlation, lane, name, kind)

    def kernel(self, called: int, start: int, duration: int, correlation: int, **more: object) -> None:
        """A launch call of 4 us, and its kernel."""
        lane = int(more.pop("lane", 0))  # type: ignore[call-overload]
        self.launch(called * US, 4 * US, correlation, lane)
        self.work(start * US, duration * US, f"kernel {correlation}", correlation, **more)  # type: ignore[arg-type]


def waiting_step() -> Trace:
    """The host waits for the first kernel before it launches the second."""
    machine = Machine()
    machine.step(0, 1000 * US, 0)
    machine.kernel(10, 16, 400, 101)
    machine.call(100, 320, 102, "cudaDeviceSynchronize", "synchronise")
    machine.kernel(500, 506, 100, 103)
    return machine.trace()


def two_queues(*, recorded: bool) -> Trace:
    """A kernel of queue 20 waits for one of queue 7, by an event."""
    machine = Machine()
    machine.step(0, 1000 * US, 0)
    machine.kernel(10, 16, 400, 101)
    machine.call(20, 2, 102, "cudaEventRecord", "event")
    machine.call(30, 2, 103, "cudaStreamWaitEvent", "queue_wait")
    machine.kernel(40, 417, 100, 104, queue="20")
    if recorded:
        machine._slice(
            "synchronisations", 30 * US, 2 * US, "Stream Wait Event", machine.queue("20"),
            {"kind": "queue_wait", "correlation": 103, "device": "0", "queue": "20", "waited_queue": "7",
             "waited_correlation": 102},
        )  # fmt: skip
    return machine.trace()


def backward_thread() -> Trace:
    """The main thread waits while another thread runs the backward pass."""
    machine = Machine()
    other = machine.thread("2")
    machine.step(0, 1000 * US, 0)
    machine.operator(0, 200 * US, "aten::forward")
    machine.kernel(10, 16, 50, 101)
    machine.operator(210 * US, 380 * US, "autograd::engine::evaluate_function: MmBackward0", lane=other)
    machine.kernel(300, 306, 50, 102, lane=other)
    machine.operator(600 * US, 100 * US, "aten::optimizer")
    machine.kernel(610, 616, 50, 103)
    return machine.trace()


def is_measured(trace: Trace) -> bool:
    """Whether the replay gives back every measured time."""
    graph = build_graph(trace)
    done = replay(graph)
    return bool(
        (done.work_start == graph.works.start).all()
        and (done.work_end == graph.works.start + graph.works.duration).all()
        and (done.stretch_start == graph.stretches.start).all()
        and (done.stretch_end == graph.stretches.end).all()
    )


@pytest.mark.parametrize(
    "trace",
    [waiting_step(), two_queues(recorded=True), two_queues(recorded=False), backward_thread(), Recording().trace()],
    ids=["wait", "recorded event", "unrecorded event", "two threads", "nothing"],
)
def test_a_replay_without_a_change_gives_the_measured_times(trace: Trace) -> None:
    assert is_measured(trace)


def test_a_thread_is_cut_where_it_waits() -> None:
    graph = build_graph(waiting_step())

    assert graph.stretches.start.tolist() == [0, 420 * US]
    assert graph.stretches.end.tolist() == [100 * US, 1000 * US]
    assert graph.stretches.launch.tolist() == [-1, 1]
    # The call waits for the kernel that ended last, and comes back 4 us later; alone it would take 5 us.
    assert (graph.host_waits.source.tolist(), graph.host_waits.target.tolist()) == ([0], [1])
    assert graph.host_waits.delay_ns.tolist() == [4 * US]
    assert graph.stretches.own_ns.tolist() == [0, 5 * US]


def test_without_the_wait_the_host_runs_ahead() -> None:
    experiment = Experiment(waiting_step())

    outcome = experiment.run(without_waits(np.array([1]))(experiment, experiment.graph))

    # The call and its wait are gone, 320 us. The second kernel is launched at 180 us, and waits for the first one's end
    # at 416 us and a gap of 1 us.
    assert outcome.replay.work_start.tolist() == [16 * US, 417 * US]
    assert (outcome.measured_step_ns, outcome.step_ns) == (1000 * US, 680 * US)
    assert outcome.saving_share == pytest.approx(0.32)


def test_with_the_wait_a_shorter_kernel_shortens_the_step() -> None:
    experiment = Experiment(waiting_step())

    outcome = experiment.run(scaled_work(np.array([0]), 0.5)(experiment, experiment.graph))

    assert outcome.saving_ns == 200 * US
    assert experiment.run(scaled_work(np.array([1]), 0.5)(experiment, experiment.graph)).saving_ns == 0


@pytest.mark.parametrize("recorded", [True, False])
def test_queues_wait_for_one_another(recorded: bool) -> None:
    experiment = Experiment(two_queues(recorded=recorded))
    graph = experiment.graph

    assert (graph.queue_waits.source.tolist(), graph.queue_waits.target.tolist()) == ([0], [1])
    outcome = experiment.run(scaled_work(np.array([0]), 0.5)(experiment, graph))
    assert outcome.replay.work_start.tolist() == [16 * US, 217 * US]


def test_a_thread_that_is_handed_work_moves_with_the_giver() -> None:
    experiment = Experiment(backward_thread())
    graph = experiment.graph

    lane = np.array([0], np.int32)
    outcome = experiment.run(graph.with_host_time(lane, np.array([100 * US]), np.array([200 * US]), np.array([0.0])))

    # 100 us of the forward pass are gone: the backward pass and what comes after it begin 100 us earlier.
    assert outcome.replay.work_start.tolist() == [16 * US, 206 * US, 516 * US]
    assert outcome.saving_ns == 100 * US


def test_the_giver_waits_for_the_thread() -> None:
    experiment = Experiment(backward_thread())
    graph = experiment.graph

    lane = np.array([1], np.int32)
    outcome = experiment.run(graph.with_host_time(lane, np.array([400 * US]), np.array([500 * US]), np.array([0.5])))

    assert outcome.saving_ns == 50 * US


def test_work_without_a_launch_between_launched_work_follows_the_next_launch() -> None:
    machine = Machine()
    machine.step(0, 1000 * US, 0)
    machine.kernel(10, 16, 50, 101)
    machine.work(306 * US, 50 * US, "unknown", None)
    machine.kernel(400, 406, 50, 103)
    graph = build_graph(machine.trace())

    assert graph.works.stretch.tolist() == [0, 0, 0]
    assert graph.works.launched.tolist() == [10 * US, 300 * US, 400 * US]


def test_waiting_for_what_the_trace_does_not_show_stays_and_is_told() -> None:
    machine = Machine()
    machine.step(0, 1000 * US, 0)
    machine.kernel(10, 16, 50, 101)
    machine.kernel(20, 500, 400, 102)
    experiment = Experiment(machine.trace())

    # It was launched early, and its queue was free from 66 us on: but for a gap of 1 us, nothing explains the rest.
    assert experiment.graph.unexplained_ns.tolist() == [0, 433 * US]
    assert experiment.unexplained_share == pytest.approx(0.433)
    assert experiment.why_not == "the device waited 43% of the time for something that the trace does not show"


def gloo_step() -> Trace:
    """A thread of the backend's own exchanges gradients, and the main thread waits for the end."""
    machine = Machine()
    backend = machine.thread("2")
    machine.step(0, 1000 * US, 0)
    machine.operator(0, 300 * US, "aten::backward")
    machine.operator(300 * US, 10 * US, "c10d::allreduce_")
    machine.annotation(305 * US, 400 * US, "gloo:all_reduce", lane=backend)
    machine.operator(710 * US, 100 * US, "aten::optimizer")
    return machine.trace()


def test_collectives_of_the_host_are_work_that_the_main_thread_waits_for() -> None:
    experiment = Experiment(gloo_step())
    graph = experiment.graph

    assert is_measured(gloo_step())
    assert (graph.on_host.tolist(), graph.works.launched.tolist()) == ([1], [300 * US])
    assert (graph.works.start.tolist(), graph.works.duration.tolist()) == ([305 * US], [400 * US])
    assert graph.host_waits.delay_ns.tolist() == [5 * US]
    shorter = experiment.run(graph.with_work(np.array([0]), 0.25))
    assert shorter.saving_ns == 300 * US


def test_a_backward_pass_that_is_shorter_sends_its_gradients_earlier() -> None:
    experiment = Experiment(gloo_step())

    lane = np.array([0], np.int32)
    outcome = experiment.run(
        experiment.graph.with_host_time(lane, np.array([0]), np.array([200 * US]), np.array([0.0]))
    )

    assert outcome.replay.work_start.tolist() == [105 * US]
    assert outcome.saving_ns == 200 * US
