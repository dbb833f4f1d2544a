"""Steps on several devices: buckets, links, and messages in the dependency graph of traces written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from stepscope.errors import UsageError
from stepscope.machine.devices import named_device
from stepscope.predict.buckets import buckets_of, gradients_of, with_borders
from stepscope.predict.exchanges import slowdown_beside_messages
from stepscope.predict.limits import Link, Protocol, fitted_link, link_table, named_link
from stepscope.predict.prediction import StepPredictor
from stepscope.predict.scaling import data_parallel, exchange_of, expected_longest, over_link
from stepscope.readers import open_trace
from stepscope.report.document import Document, json_bytes
from stepscope.report.predict import scaling_json, scaling_section, step_text
from stepscope.report.text import text_of
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
from stepscope.trace.program_facts import ModelFacts, ProgramFacts
from stepscope.trace.tables import SCHEMAS
from stepscope.whatif import Experiment, replay
from tests.unit.predicting import predict_step
from tests.unit.whatif.test_graph import US, Machine

MIB = 1 << 20
ACCUMULATE = "torch::autograd::AccumulateGrad"
LINK = named_link("10GB/s")
"""1 MiB among two devices takes 104.8576 us."""


def scaling_text(*arguments: Any, width: int) -> str:
    return text_of(Document("", (scaling_section(*arguments),)), width=width)


def gradient(machine: Machine, end: int, elements: int = MIB // 4, kind: str = "float") -> None:
    machine.operator(
        (end - 2) * US, 2 * US, ACCUMULATE, input_shapes=f"[[{elements}]]" if elements else None,
        input_types=f'["{kind}"]' if elements else None,
    )  # fmt: skip


def device_steps(lengths: tuple[int, ...] = (1000, 1000), elements: int = MIB // 4) -> Trace:
    """A forward and three backward kernels of 100 us, a gradient of 1 MiB from each, an optimizer of 50 us."""
    machine = Machine()
    base = 0
    for step, length in enumerate(lengths):
        machine.step(base * US, length * US, step)
        for number in range(4):
            machine.kernel(base + 10 + 10 * number, base + 16 + 101 * number, 100, 10 * step + number)
            if number:
                gradient(machine, base + 18 + 10 * number, elements)
        machine.kernel(base + 60, base + 420, 50, 10 * step + 4)
        machine.call(base + 100, 374, 10 * step + 5, "cudaDeviceSynchronize", "synchronise")
        machine.operator((base + 480) * US, (length - 490) * US, "aten::host_only")
        base += length
    return machine.trace()


def tables_of(trace: Trace) -> dict[str, pl.DataFrame]:
    return {name: trace.table(name) for name in SCHEMAS}


def host_steps() -> Trace:
    """Operators on the main thread alone: gradients of 1 MiB at 200, 300 and 400 us."""
    machine = Machine()
    for step in range(2):
        base = 1000 * step
        machine.step(base * US, 1000 * US, step)
        machine.operator(base * US, 100 * US, "aten::forward")
        for number in (1, 2, 3):
            machine.operator((base + 100 * number) * US, 98 * US, "MmBackward0")
            gradient(machine, base + 100 * number + 100)
        machine.operator((base + 400) * US, 600 * US, "aten::optimizer")
    return machine.trace()


def two_ranks(*, transfer: int = 100, waits: tuple[int, ...] = (0, 40, 40)) -> Trace:
    """In each step an all-reduce of 1 MB after the backward kernel: its transfer, and waiting for the other rank."""
    machine = Machine(Metadata(world_size=2, rank=0))
    for step, wait in enumerate(waits):
        base = 1000 * step
        machine.step(base * US, 1000 * US, step)
        machine.kernel(base + 10, base + 16, 100, 10 * step + 1)
        machine.launch((base + 20) * US, 2 * US, 10 * step + 2)
        machine.work(
            (base + 117) * US, (transfer + wait) * US, "ncclDevKernel_AllReduce_Sum_f32", 10 * step + 2,
            kind="communication", message_elements=250_000, message_type="float",
        )  # fmt: skip
        machine.kernel(base + 30, base + 118 + transfer + wait, 50, 10 * step + 3)
        machine.call(base + 100, 22 + 50 + transfer + wait, 10 * step + 4, "cudaDeviceSynchronize", "synchronise")
        machine.operator((base + 500) * US, 490 * US, "aten::host_only")
    return machine.trace()


def test_a_recording_of_nothing_has_no_gradients() -> None:
    with pytest.raises(UsageError, match="has no gradients"):
        data_parallel(Experiment(Trace.from_tables({})), [2], LINK)


def test_gradients_without_shapes_are_refused() -> None:
    with pytest.raises(UsageError, match="the size of its gradients: record shapes"):
        data_parallel(Experiment(device_steps(elements=0)), [2], LINK)


def test_buckets_are_full_at_1_mib_and_then_at_their_limit() -> None:
    gradients = gradients_of(Experiment(device_steps()))

    assert gradients.bytes.tolist() == [MIB] * 6
    assert gradients.step.tolist() == [0, 0, 0, 1, 1, 1]
    buckets = buckets_of(gradients)
    assert buckets.bytes.tolist() == [MIB, 2 * MIB, MIB, 2 * MIB]
    assert (buckets.ready // US).tolist() == [28, 48, 1028, 1048]
    assert buckets_of(gradients, bucket_bytes=MIB).bytes.tolist() == [MIB] * 6
    assert buckets_of(gradients, first_bytes=2 * MIB).bytes.tolist() == [2 * MIB, MIB] * 2


def test_a_fused_optimizer_tells_the_sum_of_gradients() -> None:
    machine = Machine()
    for step in range(2):
        machine.step(1000 * step * US, 1000 * US, step)
        machine.operator(1000 * step * US, 400 * US, "CompiledFunctionBackward")
        machine.operator(
            (1000 * step + 400) * US, 600 * US, "aten::_fused_adamw_",
            input_shapes=f"[[[{MIB // 4}], [{MIB // 2}]], [[{MIB // 4}], [{MIB // 2}]]]", input_types='["TensorList"]',
        )  # fmt: skip
    experiment = Experiment(machine.trace())

    gradients = gradients_of(experiment)

    assert gradients.at_once
    assert gradients.bytes.tolist() == [3 * MIB] * 2
    assert (gradients.time // US).tolist() == [400, 1400]
    [two] = data_parallel(experiment, [2], LINK)
    assert two.exposed_ns == pytest.approx(314_573, abs=1)
    assert two.low_ns == 1000 * US
    assert any("only the sum of a step's gradients is known" in note for note in two.notes)


def test_the_program_tells_the_sum_of_gradients_where_shapes_do_not() -> None:
    program = ProgramFacts(model=ModelFacts(gradient_bytes=60_000_000))
    trace = Trace.from_tables(tables_of(device_steps(elements=0)), Metadata(program=program))

    gradients = gradients_of(Experiment(trace))

    assert gradients.bytes.tolist() == [26_214_400, 26_214_400, 7_571_200] * 2
    assert (gradients.time // US).tolist() == [48] * 3 + [1048] * 3


def test_nonsense_sizes_are_none() -> None:
    machine = Machine()
    machine.step(0, 1000 * US, 0)
    gradient(machine, 100, 1 << 60)
    gradient(machine, 110, 1000)
    gradient(machine, 120, 1000, "quaternion")

    assert gradients_of(Experiment(machine.trace())).bytes.tolist() == [4000]


def test_a_link_too_slow_to_count_is_refused() -> None:
    with pytest.raises(UsageError, match="longer than 70 years"):
        data_parallel(Experiment(device_steps(elements=1 << 37)), [2], "1b/s")


def test_each_number_type_has_its_own_buckets() -> None:
    machine = Machine()
    machine.step(0, 1000 * US, 0)
    for number, kind in enumerate(("float", "c10::BFloat16", "float", "c10::BFloat16")):
        gradient(machine, 100 + 10 * number, 1000 + number, kind)

    buckets = buckets_of(gradients_of(Experiment(machine.trace())))

    assert buckets.bytes.tolist() == [4 * 2002, 2 * 2004]
    assert buckets.gradients.tolist() == [2, 2]


def test_only_the_last_backward_pass_of_a_step_is_sent() -> None:
    machine = Machine()
    machine.step(0, 1000 * US, 0)
    for number, elements in enumerate((10, 20, 30) * 2):
        gradient(machine, 100 + 10 * number, elements)

    gradients = gradients_of(Experiment(machine.trace()))

    assert gradients.accumulated == 2
    assert (gradients.time // US).tolist() == [130, 140, 150]


def test_messages_go_beside_the_backward_pass_and_the_optimizer_waits() -> None:
    [alone, two] = data_parallel(Experiment(device_steps()), [1, 2], LINK)

    assert (alone.step_ns, alone.communication_ns, alone.efficiency) == (1000 * US, 0, 1)
    # The first bucket goes from 217 to 322 us, the second from 419 us for 209.715 us; the optimizer began at 420 us.
    assert two.communication_ns == pytest.approx(314_572.8)
    assert two.exposed_ns == pytest.approx(208_715, abs=1)
    assert two.step_ns == pytest.approx(1_208_715, abs=1)
    assert two.efficiency == pytest.approx(1000 / 1208.715, rel=1e-5)
    assert two.samples_per_s is None
    assert two.low_ns < two.step_ns < two.high_ns


def test_a_slow_link_queues_messages() -> None:
    [two] = data_parallel(Experiment(device_steps()), [2], named_link("1GB/s"))

    # The first takes 1048.576 us from 217 us on, the second 2097.152 us from there: the optimizer waits until 3362.728.
    assert two.exposed_ns == pytest.approx(2_942_728, abs=2)


def test_without_a_device_the_host_itself_waits() -> None:
    experiment = Experiment(host_steps())

    [alone, two] = data_parallel(experiment, [1, 2], LINK)

    assert alone.step_ns == 1000 * US
    assert two.exposed_ns == pytest.approx(209_715, abs=1)
    assert any("processors that compute" in note for note in two.notes)


def test_the_main_thread_waits_for_messages_of_another_threads_gradients() -> None:
    machine = Machine()
    other = machine.thread("2")
    machine.step(0, 1000 * US, 0)
    machine.operator(0, 200 * US, "aten::forward")
    machine.operator(210 * US, 188 * US, "autograd::engine::evaluate_function: MmBackward0", lane=other)
    machine.operator(398 * US, 2 * US, ACCUMULATE, lane=other, input_shapes=f"[[{MIB // 4}]]", input_types='["float"]')
    machine.operator(410 * US, 590 * US, "aten::optimizer")

    [two] = data_parallel(Experiment(machine.trace()), [2], LINK)

    assert two.exposed_ns == pytest.approx(104_858 - 10_000, abs=1)  # the thread went on 10 us after the gradient


def test_borders_change_nothing_by_themselves() -> None:
    graph = Experiment(host_steps()).graph

    cut = with_borders(graph, np.zeros(2, np.int32), np.array([400 * US, 1400 * US]))

    assert len(cut.stretches.start) == len(graph.stretches.start) + 2
    done = replay(cut)
    assert (done.stretch_start == cut.stretches.start).all()
    assert (done.stretch_end == cut.stretches.end).all()
    assert (cut.stretches.previous[1:] == np.arange(len(cut.stretches.start) - 1)).all()


def test_the_recorded_link_is_what_transfers_took_without_waiting() -> None:
    exchange = exchange_of(Experiment(two_ranks()))

    assert exchange.ranks == 2
    assert exchange.link is not None
    assert exchange.link.bandwidth_bytes_s == pytest.approx(10e9)  # 1 MB in 100 us


def test_a_recording_of_two_ranks_tells_one_and_four() -> None:
    experiment = Experiment(two_ranks())

    one, two, four = data_parallel(experiment, [1, 2, 4])

    assert two.step_ns == experiment.recorded_ns / 3
    # Alone neither transfer nor waiting is there: 100, 140 and 140 us less, but for the queue's gap that goes as well.
    assert two.step_ns - one.step_ns == pytest.approx(126_667, abs=1_001)
    # Four ranks carry 2 * 3 / 4 of the message instead of 2 * 1 / 2.
    assert four.communication_ns == pytest.approx(150_000)
    assert four.step_ns - two.step_ns == pytest.approx(50_000, abs=1)


def test_another_link_takes_the_place_of_the_recorded_one() -> None:
    [two] = data_parallel(Experiment(two_ranks()), [2], named_link("20GB/s"))

    assert two.communication_ns == pytest.approx(50_000)
    assert two.exposed_ns == pytest.approx(76_667, abs=1_001)  # the waiting stays


def test_an_all_gather_is_of_all_parts() -> None:
    machine = Machine(Metadata(world_size=4, rank=0))
    machine.step(0, 1000 * US, 0)
    for number, kind in enumerate(("AllGather", "ReduceScatter")):
        machine.launch((10 + number) * US, 1 * US, number)
        machine.work(
            (20 + 200 * number) * US, 75 * US, f"ncclDevKernel_{kind}_RING", number, kind="communication",
            message_elements=(62_500, 250_000)[number], message_type="float",
        )  # fmt: skip
    exchange = exchange_of(Experiment(machine.trace()))

    # Each of 4 ranks sends 250 kB of 1 MB that all have in the end: 3 / 4 of it goes over each link in 75 us.
    assert exchange.link is not None
    assert exchange.link.bandwidth_bytes_s == pytest.approx(10e9)
    assert exchange.transfers_ns(None, 2).tolist() == pytest.approx([50_000, 50_000])


def test_computation_beside_messages_is_compared_with_the_same_alone() -> None:
    machine = Machine(Metadata(world_size=2, rank=0))
    machine.step(0, 100_000 * US, 0)
    machine.launch(1 * US, US, 9_999)
    machine.work(
        10_000 * US, 10_000 * US, "ncclDevKernel_AllReduce_Sum_f32", 9_999, kind="communication", queue="20",
        message_elements=1_000_000, message_type="float",
    )  # fmt: skip
    for number in range(40):
        beside = number % 4 >= 2  # two calls of each kernel alone for 100 us, and two beside the message for 150 us
        start = (10_000 if beside else 0) + 200 * number
        machine.launch((2 + number) * US, US, number)
        machine.work(start * US, (150 if beside else 100) * US, f"kernel {number // 4}", number, grid="1,1,1")
    trace = machine.trace()

    assert slowdown_beside_messages(Experiment(trace)) == pytest.approx(1.5)
    [one, two] = data_parallel(Experiment(trace), [1, 2])
    assert one.step_ns <= two.step_ns
    assert any("took 1.50 times as long as alone" in note for note in two.notes)
    assert slowdown_beside_messages(Experiment(device_steps())) is None


def test_the_longest_of_several_steps_is_expected() -> None:
    assert expected_longest([1, 2, 3], 1) == pytest.approx(2)
    assert expected_longest([3, 1], 2) == pytest.approx(2.5)
    assert expected_longest([1, 2, 3], 1000) == pytest.approx(3)


def test_devices_wait_for_the_slowest() -> None:
    experiment = Experiment(device_steps((1500, 1000, 1000, 1100, 1900)))

    [two] = data_parallel(experiment, [2], LINK)

    # Of 1000, 1000 and 1100 us: the longest of two is expected at 1055.6 us, and the mean is 1033.3 us.
    assert two.straggler_ns == pytest.approx(22_222, abs=1)


@pytest.mark.parametrize("devices", [0, -1, 10**6])
def test_impossible_numbers_of_devices_are_refused(devices: int) -> None:
    with pytest.raises(UsageError, match="devices are not possible"):
        data_parallel(Experiment(device_steps()), [devices], LINK)


def test_a_single_device_needs_a_link() -> None:
    with pytest.raises(UsageError, match="name the link"):
        data_parallel(Experiment(device_steps()), [2])


def test_links_are_named_as_people_type_them() -> None:
    assert named_link("NVLink 4").name == "nvlink4"
    assert named_link("12GB/s").bandwidth_bytes_s == 12e9
    assert named_link("100 Gb/s+20us") == Link("100 Gb/s+20us", 12.5e9, (Protocol(0, 20_000),), source="as given")


@pytest.mark.parametrize(
    "text", ["", "nvlink", "12", "0GB/s", "GB/s", "-1GB/s", "1e9GB/s", "12GB/s+5", "9" * 400 + "GB/s"]
)
def test_other_links_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="neither a link in the table nor a bandwidth"):
        named_link(text)


def test_every_link_has_a_source_and_no_more_than_its_peak() -> None:
    for link in link_table():
        assert "http" in link.source or "line rate" in link.source
        assert link.peak_bytes_s is not None
        assert 0.5 * link.peak_bytes_s <= link.bandwidth_bytes_s <= link.peak_bytes_s


def test_a_ring_sends_each_byte_almost_twice() -> None:
    link = Link("ring", 1e9, (Protocol(1_000, 10),))

    assert link.transfer_ns("all_reduce", 1000, 1) == 0
    assert link.transfer_ns("all_reduce", 1000, 4) == pytest.approx(1_000 + 6 * 10 + 1_500)
    assert link.transfer_ns("all_gather", 1000, 4) == pytest.approx(1_000 + 3 * 10 + 750)


def test_with_a_link_to_each_peer_fewer_devices_use_fewer_links() -> None:
    fabric = named_link("infinity-fabric-mi300")
    large = 4 << 30

    # Measured on MI300X with 4 GiB: 47.7 GB/s between two devices, 312.9 GB/s among eight.
    assert large / fabric.transfer_ns("all_reduce", large, 2) == pytest.approx(47.7, rel=0.1)
    assert large * 1.75 / fabric.transfer_ns("all_reduce", large, 8) == pytest.approx(312.9, rel=0.01)


@pytest.mark.parametrize(
    ("mib", "microseconds"), [(1, 45.9), (4, 68.5), (16, 133.5), (32, 212.9), (64, 338.9), (128, 584.4)]
)
def test_nvlink_is_as_fast_as_measured_on_eight_h200(mib: int, microseconds: float) -> None:
    link = named_link("nvlink4")

    assert link.transfer_ns("all_reduce", mib * MIB, 8) == pytest.approx(microseconds * US, rel=link.error)


def test_a_link_is_fitted_to_collectives() -> None:
    true = Link("true", 2e9, (Protocol(0, 5_000),))
    sizes = [1e5, 1e6, 1e7]
    times = [true.transfer_ns("all_reduce", size, 4) for size in sizes]

    found = fitted_link("found", ["all_reduce"] * 3, sizes, times, 4)

    assert found.bandwidth_bytes_s == pytest.approx(2e9)
    assert found.protocols[0].hop_ns == pytest.approx(5_000)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_a_link_is_fitted_to_nothing_else() -> None:
    with pytest.raises(UsageError, match="only be fitted to collectives of known size"):
        fitted_link("none", ["all_reduce"], [0.0], [5.0], 2)
    assert fitted_link("one", ["all_reduce"], [1e6], [1e6], 2).bandwidth_bytes_s == pytest.approx(1e9)


def test_the_table_tells_devices_step_band_and_what_is_not_counted() -> None:
    link = named_link("10GB/s")
    text = scaling_text("H100-SXM", link, data_parallel(Experiment(device_steps()), [1, 2], link), width=120)

    lines = text.splitlines()
    assert lines[0].startswith("What a step would take on several H100-SXM over 10GB/s (10 GB/s)")
    cells = [" ".join(line.split()) for line in lines]
    assert cells[2] == "1 1.0 ms 1.00 x 100.0 % 0 ns 0 ns"
    assert cells[3] == "2 1.2 ms (1.2 to 1.3 ms) 1.65 x 82.7 % 314.6 us 208.7 us"
    notes = " ".join(line.strip() for line in lines if "Note" in line or line.startswith("  "))
    assert "fewer than 3 steps were recorded" in notes
    assert "the link's latency is unknown and not counted" in notes


def test_programs_get_the_same() -> None:
    link = named_link("10GB/s")

    value = json.loads(json_bytes(scaling_json("", link, data_parallel(Experiment(device_steps()), [2], link))))

    assert value["device"] is None
    assert value["link"]["bandwidth_bytes_s"] == 10e9
    assert value["steps"][0]["devices"] == 2
    assert value["steps"][0]["exposed_ns"] == pytest.approx(208_715, abs=1)


def ranks_with_all_to_all() -> Trace:
    """On a 40 GB A100 in each step an all-to-all of 200 us, after which an all-reduce of 1 MB takes 100 us."""
    machine = Machine(Metadata(world_size=2, rank=0, devices=(Device("gpu 0", "NVIDIA A100-SXM4-40GB"),)))
    for step in range(3):
        base = 1000 * step
        machine.step(base * US, 1000 * US, step)
        for number, (start, length, name) in enumerate(
            ((16, 200, "ncclKernel_SendRecv"), (217, 100, "ncclDevKernel_AllReduce_Sum_f32"))
        ):
            machine.launch((base + 10 + 3 * number) * US, 2 * US, 10 * step + number)
            machine.work(
                (base + start) * US, length * US, name, 10 * step + number, kind="communication",
                message_elements=250_000, message_type="float",
            )  # fmt: skip
        machine.call(base + 100, 220, 10 * step + 4, "cudaDeviceSynchronize", "synchronise")
        machine.operator((base + 500) * US, 490 * US, "aten::host_only")
    return machine.trace()


def test_other_exchanges_go_over_the_named_link_and_one_device_has_none() -> None:
    experiment = Experiment(ranks_with_all_to_all())

    one, two = data_parallel(experiment, [1, 2], named_link("100GB/s"))  # a third of the A100's 300 GB/s

    assert two.communication_ns == pytest.approx(600_000 + 10_000)
    assert two.step_ns - one.step_ns == pytest.approx(610_000 + 80_545 - 85_000, abs=1_000)
    # Of the all-reduce's 100 us 19.455 are NVLink's, the others waiting; the host waits 85 us after the first begins.
    assert two.low_ns == pytest.approx(two.step_ns - 400_000 - 2_500, abs=2_000)  # as far as no change at all
    assert any("all-to-all" in note for note in two.notes)
    assert any("a single device exchanges nothing" in note for note in one.notes)


def test_of_a_target_the_link_to_others_counts_once() -> None:
    experiment, link = Experiment(ranks_with_all_to_all()), named_link("100GB/s")
    l40s = named_device("L40S")

    steps = [
        data_parallel(experiment, [1, 2], link, target=predict_step(experiment, device))
        for device in (l40s, over_link(l40s, link))
    ]

    # Of the all-reduce's 100 us 19.455 are NVLink's, so that 38.9 of the all-to-all's 200 change with the link: three
    # times as long over 100 GB/s, and over the card's own PCIe as many times as the all-reduce. Alone nothing changes.
    assert [one.step_ns for one, _ in steps] == pytest.approx([steps[0][0].step_ns] * 2)
    assert [one.high_ns for one, _ in steps] == pytest.approx([steps[0][0].high_ns] * 2, rel=0.005)  # the host's part
    assert steps[1][1].communication_ns == pytest.approx(200_000 + 2 * 38_910 + 10_000, rel=0.001)
    assert steps[0][1].communication_ns == pytest.approx(200_000 + 84_022 + 10_000, rel=0.001)


def test_the_recorded_device_over_another_link_exchanges_at_another_rate() -> None:
    experiment = Experiment(ranks_with_all_to_all())
    a100 = named_device("A100-SXM4-40GB")

    same, slower = (predict_step(experiment, device) for device in (a100, over_link(a100, named_link("100GB/s"))))

    assert same.step_ns == pytest.approx(1_000_000)
    assert slower.step_ns == pytest.approx(1_000_000 + 2 * 1.5 * 38_910, rel=0.001)
    assert slower.low_ns is not None
    assert slower.low_ns < 1_000_000


def test_waiting_does_not_grow_with_the_link() -> None:
    """1 MB between two needs 19.455 us over NVLink 3 (LL) and 61.467 over PCIe 4; all else of the 100 us is waiting."""
    experiment = Experiment(ranks_with_all_to_all())
    predictor = StepPredictor(experiment)
    times, _ = predictor.times_on(named_device("L40S"))
    reduced = np.flatnonzero((experiment.trace.device_work["duration_ns"] == 100_000).to_numpy())

    assert times.basis[reduced].tolist() == ["link"] * 3
    assert times.ns[reduced] == pytest.approx(100_000 - 19_455 + 61_467, abs=1)
    assert times.low_ns[reduced] == pytest.approx(0.75 * 61_467, abs=1)
    assert times.high_ns[reduced] == pytest.approx(100_000 - 19_455 + 1.25 * 61_467, abs=1)


def test_several_devices_compute_in_the_number_type_that_is_asked_for() -> None:
    """Large products after which the ranks meet: in fp32 they take many times as long, alone and together."""
    machine = Machine(Metadata(world_size=2, rank=0, devices=(Device("gpu 0", "NVIDIA A100-SXM4-40GB"),)))
    for step in range(3):
        base, number = 20_000 * step, 10 * step
        machine.step(base * US, 20_000 * US, step)
        machine.operator(
            base * US, 20 * US, "aten::mm", input_shapes="[[8192, 8192], [8192, 8192]]",
            input_types='["c10::BFloat16", "c10::BFloat16"]',
        )  # fmt: skip
        machine.kernel(base + 10, base + 16, 5_000, number + 1)
        machine.launch((base + 30) * US, 2 * US, number + 2)
        machine.work(
            (base + 5_017) * US, 100 * US, "ncclDevKernel_AllReduce_Sum_f32", number + 2, kind="communication",
            message_elements=250_000, message_type="float",
        )  # fmt: skip
        machine.call(base + 100, 5_030, number + 4, "cudaDeviceSynchronize", "synchronise")
    experiment = Experiment(machine.trace())
    a100 = named_device("A100-SXM4-40GB")
    target = predict_step(experiment, a100, precision="fp32")
    one, two = data_parallel(experiment, [1, 2], target=target)

    assert target.step_ns is not None
    assert two.step_ns == pytest.approx(target.step_ns, rel=1e-3)
    assert target.step_ns - one.step_ns == pytest.approx(100_000, rel=0.02)
    assert one.efficiency == 1.0
    assert one.step_ns > 40_000_000


@pytest.mark.parametrize(("trace", "said"), [(two_ranks, True), (device_steps, False)])
def test_the_legend_says_what_exposed_has_of_other_ranks(trace: Callable[[], Trace], said: bool) -> None:
    text = scaling_text("", None, data_parallel(Experiment(trace()), [2], named_link("1GB/s")), width=200)

    legend = "with waiting for late ranks and slower computation beside them: it can exceed communication"
    assert (legend in " ".join(text.split())) == said


@pytest.mark.traces
def test_a_slow_link_does_not_multiply_what_ranks_waited(traces_folder: Path) -> None:
    """23.4 MB a step need little of the 16 ms that all-reduces took: over PCIe they add some milliseconds, not 300."""
    name = "kineto/mi300x_resnet_checkpoint_rank0of8.json.gz"
    experiment = Experiment(open_trace(traces_folder / name))
    alone = predict_step(experiment, named_device("L40S"))
    (together,) = data_parallel(experiment, [8], named_link("pcie4"), target=alone)

    assert alone.step_ns == pytest.approx(31.1e6, rel=0.02)
    assert together.step_ns == pytest.approx(alone.step_ns, rel=0.01)


def test_the_title_names_a_link_that_was_fitted() -> None:
    link = fitted_link("as recorded", ["all_reduce"], [1e6], [1e6], 2)

    text = scaling_text("", link, data_parallel(Experiment(two_ranks()), [2]), width=120)

    assert text.startswith("What a step would take on several devices over the recorded link (1 GB/s), ")


def test_a_range_whose_ends_read_like_the_step_is_not_shown() -> None:
    found = replace(predict_step(Experiment(ranks_with_all_to_all()), named_device("L40S")), step_ns=9_310_000.0)

    assert step_text(replace(found, low_ns=9_300_000.0, high_ns=9_320_000.0)) == "9.3 ms"
    assert step_text(replace(found, low_ns=9_200_000.0, high_ns=9_320_000.0)) == "9.3 ms (9.2 to 9.3 ms)"
