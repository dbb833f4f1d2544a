"""The simulated machine itself: the other property tests believe what it says."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from tests.simulator import CAUSES, IdlePiece, KinetoOptions, Machine, StepTruth, kineto_bytes, write_kineto
from tests.simulator.brute_force import brute_force_pieces
from tests.simulator.device import Queue, Work
from tests.simulator.host import Host
from tests.simulator.kineto import Clock, microseconds
from tests.simulator.programs import PROGRAMS, exposed_all_reduce, graph_decode, input_bound_training
from tests.simulator.strategies import programs

SYNCHRONISE = "cudaStreamSynchronize"

Said = tuple[int, int, str, str | None]


def busy_until_ten() -> tuple[Machine, Host, Queue]:
    """A machine whose device 0 is busy in [0, 10), and idle from then on."""
    machine = Machine()
    machine.work_without_launch("before", machine.queue(), 0, 10)
    return machine, machine.host("main"), machine.queue()


def said(machine: Machine) -> list[Said]:
    """The truth about device 0 as (start, duration, cause, trigger)."""
    pieces = machine.truth().pieces_of(0)
    return [(piece.start_ns, piece.duration_ns, piece.cause, piece.trigger) for piece in pieces]


def launch(host: Host, queue: Queue) -> Work:
    return host.launch("kernel", queue, 5, call_ns=2, latency_ns=4)


# Laws


def test_a_machine_without_work_has_no_truth_to_tell() -> None:
    truth = Machine().truth()
    assert (truth.pieces, truth.devices, truth.steps) == ([], {}, [])


@given(programs())
def test_busy_and_idle_fill_the_window(machine: Machine) -> None:
    truth = machine.truth()
    for device, figures in truth.devices.items():
        idle_ns = sum(piece.duration_ns for piece in truth.pieces_of(device))
        assert figures.busy_ns + idle_ns == figures.window_ns


@given(programs())
def test_pieces_are_sorted_apart_and_not_empty(machine: Machine) -> None:
    pieces = machine.truth().pieces
    assert pieces == sorted(pieces, key=lambda piece: (piece.device, piece.start_ns))
    assert all(piece.duration_ns > 0 and piece.cause in CAUSES for piece in pieces)
    for before, after in pairwise(pieces):
        assert before.device < after.device or before.end_ns <= after.start_ns


@settings(deadline=None)
@given(programs())
def test_busy_time_equals_counting_every_nanosecond(machine: Machine) -> None:
    for device, figures in machine.truth().devices.items():
        instants: dict[str, set[int]] = {"compute": set(), "communication": set(), "copy": set(), "set": set()}
        for work in machine.works:
            if work.device == device:
                instants[work.kind] |= set(range(work.start_ns, work.end_ns))
        assert figures.busy_ns == len(set().union(*instants.values()))
        assert figures.compute_ns == len(instants["compute"])
        assert figures.exposed_communication_ns == len(instants["communication"] - instants["compute"])
        assert figures.exposed_copy_ns == len(instants["copy"] - instants["compute"])


@settings(deadline=None, max_examples=300)
@given(programs())
def test_the_log_says_what_the_slices_say(machine: Machine) -> None:
    assert machine.truth().merged() == brute_force_pieces(machine)


@given(programs())
def test_slices_of_a_thread_nest_and_start_apart(machine: Machine) -> None:
    for host in machine.hosts:
        starts = [slice_.start_ns for slice_ in host.slices]
        assert len(set(starts)) == len(starts)
        for slice_ in host.slices:
            parent = slice_.parent
            if parent is not None:
                assert parent.start_ns < slice_.start_ns <= slice_.closed_ns <= parent.closed_ns


@given(programs())
def test_work_of_a_queue_does_not_overlap_and_follows_its_launch(machine: Machine) -> None:
    ends: dict[tuple[int, int], int] = {}
    for work in machine.works:
        assert work.start_ns >= ends.get((work.device, work.queue), 0)
        assert work.launch is None or work.start_ns >= work.launch.start_ns
        ends[work.device, work.queue] = work.end_ns


# One small case a cause, computed by hand


def test_no_slice_is_untraced() -> None:
    machine, main, queue = busy_until_ten()
    main.work(30)
    launch(main, queue)
    assert said(machine) == [(10, 20, "untraced", None), (30, 4, "launch_latency", None)]


def test_only_a_step_is_untraced() -> None:
    machine, main, queue = busy_until_ten()
    with main.step(3):
        main.work(30)
        launch(main, queue)
    assert said(machine) == [(10, 20, "untraced", None), (30, 4, "launch_latency", None)]
    assert machine.truth().steps == [StepTruth(index=3, start_ns=0, duration_ns=32)]


def test_frame_is_python() -> None:
    machine, main, queue = busy_until_ten()
    with main.frame("train.py(12): step"):
        main.work(20)
        main.garbage_collection(10)
        launch(main, queue)
    assert said(machine) == [(10, 20, "python", None), (30, 4, "launch_latency", None)]


def test_operator_is_dispatch_even_with_a_frame_inside() -> None:
    machine, main, queue = busy_until_ten()
    with main.operator("aten::mm", before_ns=20), main.frame("hook.py(1): hook", before_ns=10):
        launch(main, queue)
    expected = [(10, 10, "dispatch", None), (20, 10, "dispatch", None), (30, 4, "launch_latency", None)]
    assert said(machine) == expected


def test_data_loader_is_input() -> None:
    machine, main, queue = busy_until_ten()
    main.data_loader(28)
    main.work(2)
    launch(main, queue)
    expected = [(10, 18, "input", None), (28, 2, "untraced", None), (30, 4, "launch_latency", None)]
    assert said(machine) == expected


def test_item_is_synchronisation_and_triggers_the_refill() -> None:
    machine, main, queue = busy_until_ten()
    main.item(queue, duration_ns=3, operator_ns=2, call_ns=1, latency_ns=2)
    main.work(3)
    launch(main, queue)
    assert said(machine) == [
        (13, 2, "synchronisation", SYNCHRONISE),
        (15, 2, "synchronisation", SYNCHRONISE),
        (17, 3, "untraced", SYNCHRONISE),
        (20, 4, "launch_latency", SYNCHRONISE),
    ]


def test_synchronise_call_that_returns_late() -> None:
    machine, main, queue = busy_until_ten()
    main.synchronize_device(call_ns=1, return_ns=5)
    launch(main, queue)
    expected = [(10, 5, "synchronisation", "cudaDeviceSynchronize"), (15, 4, "launch_latency", "cudaDeviceSynchronize")]
    assert said(machine) == expected


def test_copy_to_host_call_is_synchronisation() -> None:
    machine, main, queue = busy_until_ten()
    main.copy_to_host(8, queue, duration_ns=6, pageable=False, operator_ns=2, call_ns=14, latency_ns=4)
    launch(main, queue)
    call = "cudaMemcpyAsync"
    expected = [(16, 4, "synchronisation", call), (20, 2, "dispatch", call), (22, 4, "launch_latency", call)]
    assert said(machine) == expected


def test_copy_to_device_covers_its_call_and_its_wait() -> None:
    machine, main, queue = busy_until_ten()
    main.copy_to_device(8, queue, duration_ns=6, operator_ns=2, call_ns=12, latency_ns=2)
    launch(main, queue)
    assert said(machine) == [
        (16, 2, "host_to_device_copy", None),
        (18, 12, "host_to_device_copy", None),
        (30, 2, "dispatch", None),
        (32, 4, "launch_latency", None),
    ]


def test_allocation() -> None:
    machine, main, queue = busy_until_ten()
    with main.operator("aten::empty", before_ns=5):
        main.allocate(25)
    launch(main, queue)
    assert said(machine) == [(10, 20, "allocation", None), (30, 4, "launch_latency", None)]


def test_compilation() -> None:
    machine, main, queue = busy_until_ten()
    main.compile(30)
    launch(main, queue)
    assert said(machine) == [(10, 20, "compilation", None), (30, 4, "launch_latency", None)]


def test_optimizer_holds_its_operators_but_not_its_synchronisation() -> None:
    machine, main, queue = busy_until_ten()
    with main.optimizer_step():
        main.work(5)
        with main.operator("aten::add_", before_ns=10):
            main.synchronize_queue(queue, call_ns=5)
        main.work(10)
        launch(main, queue)
    assert said(machine) == [
        (10, 5, "optimizer", None),
        (15, 5, "synchronisation", None),
        (20, 10, "optimizer", None),
        (30, 4, "launch_latency", None),
    ]


def test_profiler_overhead_replaces_what_it_covers() -> None:
    machine, main, queue = busy_until_ten()
    with main.frame("train.py(12): step"):
        main.work(15)
        main.profiler_flush(5)
        main.work(10)
        launch(main, queue)
    assert said(machine) == [
        (10, 5, "python", None),
        (15, 5, "profiler_overhead", None),
        (20, 10, "python", None),
        (30, 4, "launch_latency", None),
    ]


def test_front_end_gap_is_launch_latency() -> None:
    machine = Machine(front_end_gap_ns=3)
    main, queue = machine.host("main"), machine.queue()
    main.launch("first", queue, 9, call_ns=1, latency_ns=1)
    main.launch("second", queue, 5, call_ns=1, latency_ns=1)
    assert said(machine) == [(10, 3, "launch_latency", None)]


def test_wait_for_another_queue_is_dependency() -> None:
    machine, main, queue = busy_until_ten()
    second = machine.queue(number=20)
    main.wait_event(second, main.record_event(queue, call_ns=1), call_ns=1, latency_ns=3)
    launch(main, second)
    assert said(machine) == [(10, 3, "dependency", None)]


def test_dependency_needs_that_no_work_of_the_same_queue_ended_last() -> None:
    machine, main, queue = busy_until_ten()
    second = machine.queue(number=20)
    machine.work_without_launch("also before", second, 4, 6)
    main.wait_event(second, main.record_event(queue, call_ns=1), call_ns=1, latency_ns=3)
    launch(main, second)
    assert said(machine) == [(10, 3, "launch_latency", None)]


def test_lost_launch_is_unknown() -> None:
    machine, main, queue = busy_until_ten()
    main.data_loader(30)
    machine.work_without_launch("after", queue, 25, 5)
    assert said(machine) == [(10, 15, "unknown", None)]


def test_thread_without_slices_is_explained_by_the_main_thread() -> None:
    machine, main, queue = busy_until_ten()
    backward = machine.host("backward")
    with main.frame("train.py(12): step"):
        main.work(12)
        main.hand_over(backward)
        backward.work(8)
        with backward.operator("MmBackward0", before_ns=5):
            pass
        backward.work(5)
        launch(backward, queue)
        main.wait_for(backward)
    assert said(machine) == [
        (10, 10, "python", None),
        (20, 5, "dispatch", None),
        (25, 5, "python", None),
        (30, 4, "launch_latency", None),
    ]


def test_latest_launch_decides_when_two_works_start_together() -> None:
    machine, main, queue = busy_until_ten()
    main.work(15)
    main.launch("early", queue, 5, call_ns=2, latency_ns=15)
    main.work(3)
    main.launch("late", machine.queue(number=20), 5, call_ns=2, latency_ns=10)
    assert said(machine) == [
        (10, 5, "untraced", None),
        (15, 2, "dispatch", None),
        (17, 3, "untraced", None),
        (20, 10, "launch_latency", None),
    ]


def test_devices_are_explained_each_for_itself() -> None:
    machine, main, queue = busy_until_ten()
    machine.work_without_launch("elsewhere", machine.queue(device=1), 0, 50)
    main.work(30)
    launch(main, machine.queue(device=1))
    main.work(8)
    launch(main, queue)
    assert said(machine) == [
        (10, 20, "untraced", None),
        (30, 2, "dispatch", None),
        (32, 8, "untraced", None),
        (40, 4, "launch_latency", None),
    ]
    assert machine.truth().pieces_of(1) == []


# Ready-made programs


LARGEST_CAUSE = {
    "input_bound_training": "input",
    "launch_bound_training": "dispatch",
    "item_every_step": "python",
    "two_queue_dependency": "dependency",
    "graph_decode": "python",
    "two_devices": "synchronisation",
    "backward_thread": "dispatch",
    "exposed_all_reduce": None,
    "recompilation": "compilation",
    "single_tensor_optimizer": "optimizer",
    "host_ahead_clean": None,
    "item_fault": "python",
    "print_tensor_fault": "logging",
    "print_fault": "logging",
    "progress_bar_fault": "logging",
    "boolean_indexing_fault": "dispatch",
    "nonzero_fault": "dispatch",
    "device_synchronize_fault": "python",
    "queue_synchronize_fault": "python",
    "copy_to_host_fault": "dispatch",
    "copy_to_host_clean": None,
    "pageable_copy_fault": "dispatch",
    "pageable_copy_clean": "dispatch",
    "item_before_optimizer_fault": "optimizer",
    "starved_loader_fault": "input",
    "starved_loader_clean": None,
    "placement_clean": None,
    "host_created_tensor_fault": "launch_latency",
    "host_created_tensor_clean": None,
    "device_ping_pong_fault": "launch_latency",
    "device_ping_pong_clean": None,
    "cpu_fallback_fault": "dispatch",
    "cpu_fallback_clean": None,
    "late_first_launch_fault": "python",
    "late_first_launch_clean": None,
    "device_tail_fault": "launch_latency",
    "device_tail_clean": None,
    "gradient_clipping_fault": "launch_latency",
    "gradient_clipping_clean": None,
    "layout_conversion_fault": "dispatch",
    "layout_conversion_clean": "dispatch",
    "unaligned_vocabulary_fault": "launch_latency",
    "unaligned_vocabulary_clean": "launch_latency",
    "written_out_attention_fault": "dispatch",
    "written_out_attention_clean": "dispatch",
    "small_reductions_fault": "dispatch",
    "small_reductions_clean": "dispatch",
    "late_rank_fault": "dispatch",
    "late_rank_clean": "dispatch",
    "replicated_model_fault": "dispatch",
    "replicated_model_clean": "dispatch",
    "exchange_through_host_fault": "communication",
    "exchange_through_host_clean": "dispatch",
    "gradient_copies_fault": "dispatch",
    "gradient_copies_clean": "dispatch",
    "decode_graphs_fault": "launch_latency",
    "decode_graphs_clean": None,
    "missed_graphs_fault": "launch_latency",
    "missed_graphs_clean": None,
    "between_iterations_fault": "python",
    "between_iterations_clean": None,
    "rejected_drafts_fault": "launch_latency",
    "rejected_drafts_clean": "launch_latency",
    "padded_graphs_fault": None,
    "padded_graphs_clean": None,
    "tensor_parallel_fault": "dispatch",
    "tensor_parallel_clean": "dispatch",
    "one_request_fault": "launch_latency",
    "one_request_clean": "launch_latency",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_slow_for_their_reason(name: str) -> None:
    machine = PROGRAMS[name]()
    causes = machine.truth().cause_ns(0)
    assert max(causes, key=lambda cause: causes[cause], default=None) == LARGEST_CAUSE[name]
    assert machine.truth().merged() == brute_force_pieces(machine)


def test_refill_after_item_is_triggered_by_it() -> None:
    assert {piece.trigger for piece in graph_decode().truth().pieces} == {SYNCHRONISE}


def test_all_reduce_is_exposed_where_nothing_covers_it() -> None:
    figures = exposed_all_reduce(steps=1).truth().devices[0]
    assert (figures.communication_ns, figures.exposed_communication_ns) == (500_000, 300_000)


# The written trace


def parse(data: bytes) -> dict[str, Any]:
    trace = json.loads(data, parse_float=Decimal)
    assert isinstance(trace, dict)
    return trace


def device_work(trace: dict[str, Any], origin_ns: int) -> list[tuple[int, int, int, str, int]]:
    """(device, start, duration, name, correlation) of the device's events, in ns of machine time."""
    categories = {"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"}
    events = [event for event in trace["traceEvents"] if event.get("cat") in categories]
    return sorted(
        (
            event["args"]["device"],
            int(event["ts"] * 1000) - origin_ns,
            int(event["dur"] * 1000),
            event["name"],
            event["args"]["correlation"],
        )
        for event in events
    )


def true_work(machine: Machine) -> list[tuple[int, int, int, str, int]]:
    works = machine.works
    return sorted((work.device, work.start_ns, work.duration_ns, work.name, work.correlation) for work in works)


@pytest.mark.parametrize("clock", ["base", "epoch"])
@settings(deadline=None)
@given(machine=programs())
def test_written_times_are_exact(clock: Clock, machine: Machine) -> None:
    options = KinetoOptions(clock=clock, shuffle_seed=1, flows=False)
    assert device_work(parse(kineto_bytes(machine, options)), options.origin_ns) == true_work(machine)


@settings(deadline=None)
@given(programs(tick_ns=1000))
def test_first_format_is_whole_microseconds(machine: Machine) -> None:
    options = KinetoOptions(clock="integer_epoch", capitalised=True, events_first=True)
    trace = parse(kineto_bytes(machine, options))
    assert all(isinstance(event["ts"], int) for event in trace["traceEvents"])
    assert device_work(trace, options.origin_ns) == true_work(machine)


def test_every_slice_is_written_once_and_flows_link_launches() -> None:
    machine = input_bound_training()
    events = parse(kineto_bytes(machine))["traceEvents"]
    host_events = [event for event in events if event["ph"] == "X" and event["pid"] == 4242]
    starts = {event["id"] for event in events if event["ph"] == "s"}
    assert len(host_events) == sum(len(host.slices) for host in machine.hosts)
    assert starts == {event["id"] for event in events if event["ph"] == "f"} == {w.correlation for w in machine.works}


def test_time_is_written_as_decimal_text() -> None:
    assert microseconds(1_683_564_901_548_726_003) == "1683564901548726.003"
    assert microseconds(5_000, whole=True) == "5"
    with pytest.raises(ValueError, match="no whole number"):
        microseconds(5_001, whole=True)


def test_compressed_file_holds_the_same(tmp_path: Path) -> None:
    machine = input_bound_training(steps=1)
    plain, compressed = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    write_kineto(machine, plain)
    write_kineto(machine, compressed)
    assert gzip.decompress(compressed.read_bytes()) == plain.read_bytes() == kineto_bytes(machine)


def test_shifted_truth_moves_pieces_devices_and_steps() -> None:
    machine, main, queue = busy_until_ten()
    with main.step(0):
        main.work(30)
        launch(main, queue)
    truth = machine.truth().shifted(100)
    assert truth.pieces[0] == IdlePiece(0, 110, 20, "untraced")
    assert (truth.devices[0].start_ns, truth.steps[0].start_ns) == (100, 100)
