"""exposed-communication: communication between ranks is not overlapped."""

from __future__ import annotations

import dataclasses

import polars as pl
import pytest

from stepscope.diagnosis.rules.exposed_communication import RULE as rule
from stepscope.trace import Trace
from stepscope.trace.tables import SCHEMAS
from tests.simulator import Machine
from tests.simulator.device import Queue
from tests.simulator.host import Host
from tests.simulator.programs import item_every_step
from tests.simulator.serving_faults import tensor_parallel
from tests.unit.diagnosis.rules.cases import (
    US,
    Cases,
    asked,
    busy_device,
    empty_trace,
    figures_of,
    layers,
    places_of,
    recorded,
    the_finding,
    training,
)
from tests.unit.recording import Recording

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def reducing(reduce_us: int = 500) -> Machine:
    """A collective in one queue, of which 200 us of computation cover a part."""

    def step(host: Host, queue: Queue) -> None:
        layers(host, queue)
        channel = host.ledger.queues.setdefault((0, 24), Queue(0, 24, 0))
        host.wait_event(channel, host.record_event(queue))
        backward = host.operator("autograd::engine::evaluate_function: AccumulateGrad")
        with backward, host.operator("c10d::allreduce_", before_ns=8 * US):
            host.launch(ALL_REDUCE, channel, reduce_us * US)
        host.launch("overlapped", queue, 200 * US)

    return training(step)


def on_two_ranks(trace: Trace) -> Trace:
    return dataclasses.replace(trace, metadata=dataclasses.replace(trace.metadata, rank=0, world_size=2))


def on_the_host(waiting_ns: int = 200) -> Trace:
    """A step of 1000 ns without a device, in which gloo holds the main thread."""
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "train.py(12): step")
    recording.operator(100, 400, "aten::mm")
    recording.operator(600, waiting_ns, "gloo:all_reduce")
    return recording.trace()


FIRES: Cases = {
    "gradients at the end": lambda: recorded(reducing()),
    "on two ranks": lambda: on_two_ranks(recorded(reducing())),
    "without a device": on_the_host,
    "decoding on several ranks": lambda: recorded(tensor_parallel(fault=True)),
}
SILENT: Cases = {
    "decoding on one rank": lambda: recorded(tensor_parallel(fault=False)),
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "one rank": lambda: recorded(item_every_step()),
    "covered by computation": lambda: recorded(reducing(190)),
    "little without a device": lambda: on_the_host(40),
}


def test_the_saving_is_what_no_computation_covers() -> None:
    machine = reducing()
    exposed = machine.truth().devices[0].exposed_communication_ns
    end = machine.truth().steps[-1].start_ns + machine.truth().steps[-1].duration_ns

    finding = the_finding(rule, recorded(machine))

    assert finding.saving_ns_per_step == exposed // 4 > 250 * US
    assert figures_of(finding) == [
        ("share of the step lost to communication", exposed / end, "share", 0.05),
        ("communication in all per step", 500 * US, "ns", None),
        ("share of it that is exposed", exposed / (4 * 500 * US), "share", None),
        ("collectives per step", 1.0, "count", None),
        ("share of the communication in all-reduce", 1.0, "share", None),
    ]
    assert places_of(finding) == [("train.py", 12, "step")]
    assert {interval.duration_ns for interval in finding.evidence.intervals} == {500 * US}
    assert "DistributedDataParallel" in finding.remedy.code


@pytest.mark.parametrize(
    ("called", "words", "code"),
    [
        ("c10d::send", "sends and receives", "batch_isend_irecv"),
        ("c10d::alltoall_base_", "all-to-all", "all_to_all_single"),
        ("c10d::_allgather_base_", "all-gather", "async_op=True"),
        ("a library's own", "sends and receives", "batch_isend_irecv"),
    ],
)
def test_the_remedy_is_for_what_the_program_called(called: str, words: str, code: str) -> None:
    trace = recorded(reducing())
    kernel = pl.col("name").str.replace("^nccl.*", "ncclDevKernel_SendRecv")
    work = trace.device_work.with_columns(kernel, collective=pl.lit(None, pl.String))
    operators = trace.operators.with_columns(pl.col("name").str.replace("^c10d::.*", called))
    tables = {**{name: trace.table(name) for name in SCHEMAS}, "device_work": work, "operators": operators}

    finding = the_finding(rule, Trace.from_tables(tables, trace.metadata))

    assert finding.title.endswith(f"most of it {words}")
    assert code in finding.remedy.code


def test_what_trains_nothing_is_told_nothing_of_gradients() -> None:
    trace = recorded(reducing())
    operators = trace.operators.with_columns(pl.col("name").str.replace("^autograd::.*", "aten::linear"))
    tables = {**{name: trace.table(name) for name in SCHEMAS}, "operators": operators}

    remedy = the_finding(rule, Trace.from_tables(tables, trace.metadata)).remedy

    assert "gradient" not in remedy.text + remedy.code


def test_without_a_device_the_threads_waiting_counts() -> None:
    finding = the_finding(rule, on_the_host())

    assert (finding.saving_ns_per_step, finding.saving_share) == (200, 0.2)
    assert finding.title == "20% of the step goes to communication that no computation overlaps"


def in_the_backward_pass() -> Trace:
    """A step of 1000 ns without a device. The backward thread computes for 300 ns and then waits for gloo for 200,
    while the main thread waits for it."""
    recording = Recording()
    backward = recording.thread("2")
    recording.thread("3")
    recording.step(0, 1000, 1)
    recording.operator(0, 300, "aten::mm")
    recording.operator(310, 510, "autograd::engine::evaluate_function: MmBackward0", backward)
    recording.operator(320, 290, "aten::mm", backward)
    recording.annotation(610, 200, "gloo:all_reduce", 2)
    recording.operator(850, 100, "aten::add_")
    return recording.trace()


def test_without_a_device_the_backward_threads_waiting_counts() -> None:
    finding = the_finding(rule, in_the_backward_pass())

    assert figures_of(finding)[0] == ("share of the step lost to communication", 0.2, "share", 0.05)
    assert (finding.saving_from, finding.saving_ns_per_step) == ("replayed", 200)


def test_one_rank_of_several_cannot_tell_who_was_late() -> None:
    trace = recorded(reducing())

    assert asked(rule, trace).not_answered == ()
    [question] = asked(rule, on_two_ranks(trace)).not_answered
    assert question.question == "Do ranks wait for a slow one inside the collectives, or for the network?"
    assert question.rule == "exposed-communication"


def test_the_threshold_decides() -> None:
    assert len(asked(rule, on_the_host(), share=0.2).findings) == 1
    assert asked(rule, on_the_host(), share=0.21).findings == ()
    assert len(asked(rule, on_the_host(40), share=0.04).findings) == 1


def test_without_a_device_nothing_is_said_of_one() -> None:
    assert "device" not in the_finding(rule, on_the_host()).saving_basis


def test_an_engines_messages_have_a_size() -> None:
    recording = Recording()
    for number in range(1, 4):
        start = 1000 * number
        recording.annotation(start, 900, "execute_context_0(0)_generation_8(8)")
        shapes, types = "[[8, 2880], []]", '["c10::BFloat16", ""]'
        recording.operator(start + 2, 20, "vllm::all_reduce", input_shapes=shapes, input_types=types)
        recording.launched(start + 5, start + 10, 400, "multimem_all_reduce_kernel", number, kind="communication")
        recording.launched(start + 30, start + 410, 400, "gemm", number + 10)
    finding = the_finding(rule, recording.trace())

    figures = {name: value for name, value, *_ in figures_of(finding)}
    assert figures["message of all-reduce, median"] == 8 * 2880 * 2
    assert finding.title.endswith("all-reduce of 45.0 KiB each")
    assert "allreduce" in finding.remedy.code
