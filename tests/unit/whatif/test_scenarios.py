"""Graphs, overlapped communication, buckets and worker processes on traces written by hand. Times are microseconds."""

from __future__ import annotations

import pytest

from stepscope.errors import UsageError
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import InputStageFacts, LoaderFacts, ProgramFacts
from stepscope.whatif import Change, Experiment, Outcome
from stepscope.whatif.answer import bucket_size, graphs, loader_workers, overlap_communication
from stepscope.whatif.critical_path import critical_path
from tests.unit.recording import Recording
from tests.unit.whatif.test_graph import US, Machine, waiting_step

MS = 1_000 * US
SINGLE = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
SEVERAL = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def replayed(trace: Trace, change: Change) -> Outcome:
    experiment = Experiment(trace)
    return experiment.run(change(experiment, experiment.graph))


def many_launches() -> Trace:
    """Ten kernels of 5 us, launched 50 us apart."""
    machine = Machine()
    machine.step(0, 600 * US, 0)
    for number in range(10):
        begin = 20 + 50 * number
        machine.operator(begin * US, 40 * US, "aten::mul")
        machine.kernel(begin + 10, begin + 16, 5, 100 + number)
    return machine.trace()


def loading(call_ms: int, *, steps: int = 10, name: str = SINGLE, program: ProgramFacts | None = None) -> Trace:
    """Steps of 10 ms of computation on the host, and a call for a batch before it."""
    machine = Machine(Metadata(program=program))
    length = 10 + call_ms
    for number in range(steps):
        begin = number * length * MS
        machine.step(begin, length * MS, number)
        machine.annotation(begin, call_ms * MS, name)
        machine.operator(begin + call_ms * MS, 10 * MS, "aten::mm")
    return machine.trace()


def gradients(*, sizes: tuple[int, ...] = (1_000_000, 1_000_000)) -> Trace:
    """In each of two steps kernels of 100 us, each followed by an all-reduce of 100 us in the same queue."""
    machine = Machine()
    for step in range(2):
        base = 1000 * step
        machine.step(base * US, 1000 * US, step)
        time = base + 16
        for number, size in enumerate(sizes):
            correlation = 100 * step + 10 * number
            machine.kernel(base + 10 + 10 * number, time, 100, correlation + 1)
            machine.launch((base + 15 + 10 * number) * US, 2 * US, correlation + 2)
            machine.work(
                (time + 101) * US, 100 * US, "ncclDevKernel_AllReduce_Sum_f32", correlation + 2, kind="communication",
                message_elements=size // 4, message_type="float",
            )  # fmt: skip
            time += 202
        machine.annotation((base + 60) * US, 20 * US, "Optimizer.step#SGD.step")
        machine.kernel(base + 65, time, 50, 100 * step + 99)
        machine.call(base + 100, time + 50 + 4 - base - 100, 100 * step + 98, "cudaDeviceSynchronize", "synchronise")
    return machine.trace()


def test_a_graph_is_launched_at_once() -> None:
    outcome = replayed(many_launches(), graphs())

    # From the return of the first launch call, at 34 us, the host is done with the last one's: 450 us are gone.
    assert outcome.saving_ns == 450 * US
    # Each kernel follows the one before after a gap of 1 us.
    assert outcome.replay.work_start.tolist() == [(36 + 6 * number) * US for number in range(10)]


def test_a_graph_keeps_waits() -> None:
    outcome = replayed(waiting_step(), graphs())

    assert outcome.saving_ns == 0


def test_a_machine_without_a_device_has_no_graphs() -> None:
    with pytest.raises(UsageError, match="nothing in the trace was launched on a device"):
        replayed(loading(5), graphs())


def test_workers_load_beside_the_computation() -> None:
    outcome = replayed(loading(5), loader_workers(1))

    # A worker makes a batch in 5 ms while the host computes for 10 ms; to receive it takes 1 ms.
    assert outcome.step_ns == pytest.approx(11 * MS, abs=MS)


@pytest.mark.parametrize(("workers", "step_ms"), [(1, 40), (2, 20), (4, 11)])
def test_slow_batches_need_several_workers(workers: int, step_ms: int) -> None:
    outcome = replayed(loading(40, steps=40), loader_workers(workers))

    # One worker gives a batch in 40 ms, two in 20 ms, four keep up with the 10 ms of computation.
    assert outcome.step_ns == pytest.approx(step_ms * MS, rel=0.06)


def test_without_workers_the_program_loads_itself() -> None:
    item = InputStageFacts(stage="collate", name="collate", calls=10, total_ns=10 * 30 * MS, in_workers=True)
    program = ProgramFacts(loaders=(LoaderFacts(workers=2),), input_stages=(item,))

    outcome = replayed(loading(5, name=SEVERAL, program=program), loader_workers(0))

    assert outcome.step_ns == pytest.approx(40 * MS)


def test_workers_that_the_trace_does_not_show_at_work_cannot_be_changed() -> None:
    with pytest.raises(UsageError, match="does not show how long one takes"):
        replayed(loading(5, name=SEVERAL), loader_workers(4))


def test_without_a_loader_there_are_no_workers() -> None:
    with pytest.raises(UsageError, match="no data loader"):
        replayed(waiting_step(), loader_workers(4))


def test_overlapped_gradients_run_beside_the_backward_pass() -> None:
    outcome = replayed(gradients(), overlap_communication())

    # Kernels at 16 and 117 us; all-reduces from 117 and 218 us on. The optimizer waits for the second, until 319 us.
    assert outcome.replay.work_start.tolist()[:5] == [16 * US, 117 * US, 117 * US, 218 * US, 319 * US]


def test_what_is_not_exchanged_cannot_be_overlapped() -> None:
    with pytest.raises(UsageError, match="no all-reduce or reduce-scatter"):
        replayed(waiting_step(), overlap_communication())


def test_one_bucket_instead_of_two_costs_one_start_less() -> None:
    trace = gradients(sizes=(1_000_000, 3_000_000))

    together = replayed(trace, bucket_size(4))
    apart = replayed(trace, bucket_size(1))

    # Both collectives take 100 us whatever their size: a collective's start costs 100 us, a byte nothing.
    assert apart.saving_ns == 0
    assert together.saving_ns == 100 * US


def test_buckets_need_sizes() -> None:
    with pytest.raises(UsageError, match="two all-reduces of known size"):
        replayed(waiting_step(), bucket_size(25))
    with pytest.raises(UsageError, match="holds nothing"):
        bucket_size(0)


def test_collectives_whose_launch_follows_them_are_on_no_path_twice() -> None:
    """Clocks disagree: the collective began before the call that waited for nothing, and other queues overlap."""
    recording = Recording(unit_ns=US)
    recording.step(0, 1000, 0)
    for number in range(12):
        recording.launch(500 + 20 * number, 2, 10 + number)
        recording.launch(505 + 20 * number, 10, 50 + number, name="cudaStreamSynchronize", kind="synchronise")
        start = 300 + 37 * (number * 5 % 12)
        queue = str(7 + number % 2)
        kind = "communication" if number % 3 else "compute"
        recording.work(
            start, 90, "ncclDevKernel_AllReduce" if number % 3 else "mm", 10 + number, queue=queue, kind=kind
        )
    experiment = Experiment(recording.trace())
    graph = overlap_communication()(experiment, experiment.graph)
    place, works = graph.places[1], graph.works
    behind = works.previous >= 0

    assert (place[works.previous[behind]] < place[behind]).all()
    assert (place[graph.queue_waits.source] < place[graph.queue_waits.target]).all()
    assert critical_path(experiment, experiment.run(graph).replay).height > 0


def test_batches_inside_another_wait_are_refused() -> None:
    recording = Recording(unit_ns=US)
    recording.step(0, 1000, 0)
    recording.launched(20, 30, 400, "kernel", 1)
    recording.launch(50, 450, 2, name="cudaDeviceSynchronize", kind="synchronise")
    recording.annotation(100, 100, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")

    with pytest.raises(UsageError, match="workers cannot be tried"):
        replayed(recording.trace(), loader_workers(2))
