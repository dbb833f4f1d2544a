"""The dependency graph and its replay: exact where nothing changes, never later where something goes, and right where a
simulated machine can be run again with the change.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.analysis.host import CAUSES
from stepscope.diagnosis.view import View
from stepscope.readers import open_trace
from stepscope.trace import Trace
from stepscope.whatif import Experiment, Graph, Replay, replay
from stepscope.whatif.changes import scaled_work, without_cause
from tests.simulator import KinetoOptions, Machine, write_kineto
from tests.simulator.programs import PROGRAMS
from tests.simulator.strategies import programs
from tests.tries import tries

PROPERTY = settings(deadline=None, max_examples=tries(12), suppress_health_check=[HealthCheck.too_slow])
US = 1_000
STEPS, LAYERS = 4, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machines")


def written_and_read(machine: Machine, folder: Path) -> Trace:
    return open_trace(write_kineto(machine, folder / "trace.json.gz", KinetoOptions()))


def assert_as_measured(graph: Graph, done: Replay) -> None:
    assert np.array_equal(done.stretch_start, graph.stretches.start)
    assert np.array_equal(done.stretch_end, graph.stretches.end)
    assert np.array_equal(done.work_start, graph.works.start)
    assert np.array_equal(done.work_end, graph.works.start + graph.works.duration)


def assert_nothing_later(graph: Graph, done: Replay) -> None:
    assert (done.stretch_start <= graph.stretches.start).all()
    assert (done.stretch_end <= graph.stretches.end).all()
    assert (done.work_start <= graph.works.start).all()
    assert (done.work_end <= graph.works.start + graph.works.duration).all()


@PROPERTY
@given(machine=programs())
def test_an_unchanged_replay_gives_every_measured_start_and_end(machine: Machine, folder: Path) -> None:
    experiment = Experiment(written_and_read(machine, folder))

    assert_as_measured(experiment.graph, experiment.measured)


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_of_realistic_programs_too(name: str, tmp_path: Path) -> None:
    experiment = Experiment(written_and_read(PROGRAMS[name](), tmp_path))

    assert_as_measured(experiment.graph, experiment.measured)


@PROPERTY
@given(machine=programs(), data=st.data())
def test_less_host_time_makes_nothing_later(machine: Machine, data: st.DataObject, folder: Path) -> None:
    experiment = Experiment(written_and_read(machine, folder))
    graph, ends = experiment.graph, experiment.graph.stretches.end
    if not len(ends):
        return
    last = max(int(ends.max()), 1)
    starts = np.array(data.draw(st.lists(st.integers(0, last), min_size=1, max_size=5)))
    lengths = np.array(data.draw(st.lists(st.integers(1, last), min_size=len(starts), max_size=len(starts))))
    lanes = np.array([data.draw(st.sampled_from(np.unique(graph.stretches.lane).tolist())) for _ in starts], np.int32)
    factors = np.array([data.draw(st.sampled_from([0.0, 0.3, 0.9])) for _ in starts])
    changed = graph.with_host_time(lanes, starts, starts + lengths, factors)

    assert_nothing_later(graph, replay(changed))
    assert experiment.run(changed).saving_ns >= 0


@PROPERTY
@given(machine=programs(), cause=st.sampled_from((*CAUSES, "compute")))
def test_no_cause_less_makes_anything_later(machine: Machine, cause: str, folder: Path) -> None:
    experiment = Experiment(written_and_read(machine, folder))
    changed = without_cause(cause)(experiment, experiment.graph)

    assert_nothing_later(experiment.graph, replay(changed))
    assert experiment.run(changed).saving_ns >= 0


@PROPERTY
@given(machine=programs(), part=st.floats(0, 1))
def test_fewer_waits_make_nothing_later(machine: Machine, part: float, folder: Path) -> None:
    experiment = Experiment(written_and_read(machine, folder))
    launches = experiment.graph.stretches.launch[experiment.graph.host_waits.target]
    changed = experiment.graph.without_waits(launches[: round(part * len(launches))])

    assert_nothing_later(experiment.graph, replay(changed))


def training(kernel_us: tuple[int, ...], kind: str, factor: float) -> Machine:
    """Four steps of layers whose kernels take these times, and `factor` times as long on this machine.

    Args:
        kind: "plain"; "reads", where the host reads a value after every step; "exchange", where another queue exchanges
            what the backward pass gives; "thread", where another thread launches the backward pass.
    """
    machine = Machine(tick_ns=US)
    main, queue, other = machine.host("main"), machine.queue(), machine.queue(number=24)
    backward = machine.host("backward") if kind == "thread" else main
    for index in range(STEPS):
        with main.step(index), main.frame("train.py(12): step", before_ns=3 * US):
            for us in kernel_us:
                with main.operator("aten::addmm", before_ns=9 * US):
                    main.launch("gemm", queue, round(factor * us * US))
            with main.frame("torch/_tensor.py(570): backward", before_ns=5 * US):
                main.hand_over(backward)
                for us in kernel_us:
                    with backward.operator("aten::mm", before_ns=12 * US):
                        backward.launch("gemm_backward", queue, round(factor * 2 * us * US))
                    if kind == "exchange":
                        backward.wait_event(other, backward.record_event(queue))
                        backward.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", other, 30 * US)
                main.wait_for(backward)
            if kind == "exchange":
                main.wait_event(queue, main.record_event(other))
            with main.optimizer_step(), main.operator("aten::_fused_adamw_", before_ns=10 * US):
                main.launch("adamw", queue, 20 * US)
            if kind == "reads":
                main.item(queue)
    return machine


@PROPERTY
@given(
    kernel_us=st.lists(st.sampled_from([2, 8, 16, 40, 200]), min_size=LAYERS, max_size=LAYERS).map(tuple),
    kind=st.sampled_from(["plain", "reads", "exchange", "thread"]),
    factor=st.sampled_from([0.125, 0.5, 2.0, 4.0]),
)
def test_a_replay_with_other_kernels_is_the_machine_run_with_them(
    kernel_us: tuple[int, ...], kind: str, factor: float, folder: Path
) -> None:
    experiment = Experiment(written_and_read(training(kernel_us, kind, 1.0), folder))
    names = experiment.trace.device_work["name"]
    rows = names.is_in(["gemm", "gemm_backward"]).arg_true().to_numpy().astype(np.int64)
    promised = experiment.run(scaled_work(rows, factor)(experiment, experiment.graph))
    again = Experiment(written_and_read(training(kernel_us, kind, factor), folder))

    assert promised.step_ns == again.measured_ns / STEPS


@pytest.mark.traces
def test_an_unchanged_replay_of_every_real_trace_with_a_device_is_exact(traces_folder: Path) -> None:
    facts = [json.loads(line) for line in (traces_folder / "facts.json").read_text().splitlines()]
    seen = 0
    for name in (fact["file"] for fact in facts):
        experiment = Experiment(open_trace(traces_folder / name))
        if experiment.device is not None:
            seen += 1
            assert_as_measured(experiment.graph, experiment.measured)
            assert experiment.measured_ns == View(experiment.trace).window.duration_ns, name
    assert seen >= 15
