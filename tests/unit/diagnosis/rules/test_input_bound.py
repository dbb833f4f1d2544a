"""input-bound: the device waits for data."""

from __future__ import annotations

import msgspec
import pytest

from stepscope.diagnosis.finding import Evidence, Figure, Finding, Interval, Location
from stepscope.diagnosis.rules.input_bound import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import UnrecordedSteps
from stepscope.trace.program_facts import FunctionFacts, InputStageFacts, OperationFacts, ProgramFacts, StepFacts
from tests.simulator import Machine
from tests.simulator.device import Queue
from tests.simulator.host import Host
from tests.simulator.programs import input_bound_training, item_every_step
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
    true_idle_ns,
)
from tests.unit.diagnosis.rules.loaders import MS, by_lines, facts, loading
from tests.unit.recording import Recording

RECEIVED = 1_400_000
"""Nanoseconds to receive a batch from a worker."""
LOADING = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def with_workers() -> Machine:
    def step(host: Host, queue: Queue) -> None:
        host.data_loader(400 * US, workers=True)
        layers(host, queue, kernel_us=50)

    return training(step)


def quick_loader() -> Machine:
    def step(host: Host, queue: Queue) -> None:
        host.data_loader(30 * US)
        layers(host, queue)

    return training(step)


def on_the_host(loading_ms: int = 30) -> Trace:
    """Two steps of 100 ms without a device."""
    recording = Recording()
    for number in (0, 1):
        begin = 100 * MS * number
        recording.step(begin, 100 * MS, number)
        recording.frame(begin, 100 * MS, "train.py(12): step")
        recording.annotation(begin + 10 * MS, loading_ms * MS, LOADING)
        recording.operator(begin + 50 * MS, 40 * MS, "aten::mm")
    return recording.trace()


def slowed_loading(operators: int) -> Trace:
    """Two steps of 12 ms, 4 of them in the loader, where recording each of so many operators takes 1 us."""
    steps = tuple(StepFacts(index=number, duration_ns=12 * MS, thread_processor_ns=12 * MS) for number in range(2))
    program = msgspec.structs.replace(facts(processors=2), steps=steps)
    shorter = 12 * MS - operators * US
    recording = Recording(Metadata(program=program, unrecorded=UnrecordedSteps(20, shorter, 12 * MS, shorter)))
    for number in range(2):
        begin = 12 * MS * number
        recording.step(begin, 12 * MS, number)
        recording.annotation(begin, 4 * MS, LOADING)
        for each in range(operators):
            recording.operator(begin + 4 * MS * each // operators, US // 2, "aten::select")
        recording.operator(begin + 4 * MS, 8 * MS, "aten::mm")
    return recording.trace()


FIRES: Cases = {
    "loads in the step": lambda: recorded(input_bound_training()),
    "workers too slow": lambda: recorded(with_workers()),
    "without a device": on_the_host,
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "no loader": lambda: recorded(item_every_step()),
    "a quick loader": lambda: recorded(quick_loader()),
    "a quick loader without a device": lambda: on_the_host(4),
    "one that takes no longer than a worker's batch, but for its recording": lambda: slowed_loading(3000),
}


def test_the_finding_without_a_device() -> None:
    remedy = the_finding(rule, on_the_host()).remedy

    assert the_finding(rule, on_the_host()) == Finding(
        rule="input-bound",
        title="for 30% of the step the main thread spends its time on the data loader",
        severity="high",
        saving_ns_per_step=30 * MS - RECEIVED,
        saving_share=0.286,
        saving_basis="time of the main thread inside the data loader, less what one worker would leave of it",
        confidence="medium",
        evidence=Evidence(
            (
                Figure("share of the step lost to loading data", 0.3, "share", 0.05),
                Figure("time lost per step", 30 * MS, "ns"),
                Figure("batches loaded per step", 1.0, "count"),
                Figure("worker processes", 0, "count"),
                Figure("worker processes that make batches fast enough", 1, "count"),
            ),
            (
                Interval(10 * MS, 30 * MS, "waiting for data"),
                Interval(110 * MS, 30 * MS, "waiting for data"),
            ),
        ),
        remedy=remedy,
        where=(Location("train.py", 12, "step"),),
        saving_from="replayed",
    )
    assert "num_workers=1," in remedy.code  # 30 ms to make a batch, 70 to compute with it


def test_receiving_a_batch_is_held_against_loading_without_its_recording() -> None:
    finding = the_finding(rule, slowed_loading(2000))

    # Without recording, 2 ms of 10.
    assert finding.saving_share == pytest.approx(0.2 - RECEIVED / (10 * MS), abs=0.005)


def test_the_saving_is_the_idle_time_while_data_was_loaded() -> None:
    machine = input_bound_training()
    lost = (
        true_idle_ns(machine, {"input"}) + 5_012 * US
    )  # of three steps; the first load and what follows until its copy begins
    step = machine.truth().steps[-1].duration_ns

    finding = the_finding(rule, recorded(machine))

    # Without loading the device decides: from copy to copy 80 us for the copy, 31 until the host, which waited for it,
    # has launched again, six products of 200 and the update of 40.
    assert finding.saving_ns_per_step == step - (80 + 31 + 6 * 200 + 40) * US > 3_000 * US
    assert figures_of(finding) == [
        ("share of the step lost to loading data", pytest.approx(lost / 4 / step), "share", 0.05),
        ("time lost per step", lost // 4, "ns", None),
        ("batches loaded per step", 1.0, "count", None),
        ("worker processes", 0, "count", None),
        ("worker processes that make batches fast enough", 5, "count", None),
    ]
    assert places_of(finding) == [("train.py", 12, "step")]
    assert finding.title == "for 79% of the step the device waits for the data loader"


def test_the_device_waits_for_a_batch_until_it_has_work_again() -> None:
    def step(host: Host, queue: Queue) -> None:
        host.data_loader(2_000 * US)
        host.work(300 * US)
        layers(host, queue, count=4, kernel_us=300)

    machine = training(step, wait=False)
    idle = true_idle_ns(machine, {"input", "python", "dispatch", "launch_latency"})

    finding = the_finding(rule, recorded(machine))

    assert finding.saving_ns_per_step == idle // 3
    assert true_idle_ns(machine, {"input"}) < idle - 3 * 300 * US


def test_workers_that_are_there_already_are_not_suggested_again() -> None:
    remedy = the_finding(rule, recorded(with_workers())).remedy

    assert "Worker processes load already" in remedy.text
    assert "persistent_workers=True" in remedy.code


def test_workers_leave_what_the_processors_have_no_time_for() -> None:
    # 120 ms to make a batch, 60 to compute and 1.4 to receive: on two processors a step takes (120 + 60 + 1.4) / 2.
    finding = the_finding(rule, loading(120, facts(processors=2, item_ms=120, busy_ms=180)).trace())

    assert finding.saving_ns_per_step == pytest.approx(89.3 * MS)
    assert finding.saving_basis == (
        "time of the main thread inside the data loader, less what 2 workers would leave of it on 2 processors"
    )
    assert "num_workers=2," in finding.remedy.code
    assert figures_of(finding)[-2] == ("time to make a batch", 120 * MS, "ns", None)


def test_waiting_for_a_disk_needs_no_processor() -> None:
    finding = the_finding(rule, loading(120, facts(processors=2, item_ms=120, item_processor_ms=1, busy_ms=61)).trace())

    assert finding.saving_ns_per_step == 120 * MS - RECEIVED
    assert "num_workers=2," in finding.remedy.code


@pytest.mark.parametrize(
    ("wait_ms", "computing_ms", "program"),
    [
        (60, 60, facts(processors=2, item_ms=60, busy_ms=180)),  # the computation has both processors
        (60, 60, facts(processors=2, item_ms=60, busy_ms=120, waiting_ms=120)),  # other programs have them
        (60, 60, facts(processors=2, item_ms=60, item_processor_ms=20, busy_ms=50, waiting_ms=70)),  # most of them
        (1, 2, facts(processors=8, item_ms=1, busy_ms=3)),  # receiving a batch takes as long as making it
    ],
)
def test_workers_that_gain_nothing_are_not_promised(wait_ms: int, computing_ms: int, program: ProgramFacts) -> None:
    [item] = program.input_stages
    torchs = msgspec.structs.replace(item, file="/env/torch/utils/data/dataset.py")
    program = msgspec.structs.replace(program, input_stages=(torchs,))

    assert asked(rule, loading(wait_ms, program, compute_ms=computing_ms).trace()).findings == ()


def test_too_few_workers_are_told_how_many_are_needed() -> None:
    program = facts(workers=1, item_ms=150, prefetch_factor=2, busy_ms=60)
    finding = the_finding(rule, loading(90, program, workers=True).trace())

    assert finding.saving_ns_per_step == 90 * MS
    assert finding.remedy.text.startswith("One worker process cannot")
    assert "3 workers can" in finding.remedy.text
    assert "num_workers=3, prefetch_factor=2" in finding.remedy.code
    assert figures_of(finding)[3:5] == [
        ("worker processes", 1, "count", None),
        ("batches prefetched by each worker", 2, "count", None),
    ]


def test_where_the_processors_are_busy_only_cheaper_batches_help() -> None:
    finding = the_finding(rule, loading(60, facts(processors=1, item_ms=60, busy_ms=120)).trace())

    assert finding.saving_ns_per_step == pytest.approx((60 - 8 * 0.05) * MS)  # 50 us for each of 8 samples
    assert "one processor" in finding.remedy.text
    assert "More workers than one processor can run would not" in finding.remedy.text


@pytest.mark.parametrize(("other_cores", "is_full"), [(1.8, True), (0.2, False)])
def test_workers_need_a_core_that_other_programs_leave_free(other_cores: float, is_full: bool) -> None:
    program = facts(processors=2, item_ms=60, busy_ms=120)
    program = msgspec.structs.replace(program, process={**program.process, "other_cores": other_cores})
    finding = the_finding(rule, loading(60, program).trace())

    assert ("No core is free" in finding.remedy.text) is is_full
    assert ("num_workers" not in finding.remedy.code) is is_full
    assert ("processors that other programs kept busy" in [name for name, *_ in figures_of(finding)]) is is_full


def test_memory_is_pinned_where_there_is_a_device() -> None:
    assert "pin_memory" not in the_finding(rule, on_the_host()).remedy.code
    assert "pin_memory=True" in the_finding(rule, recorded(input_bound_training())).remedy.code


def test_workers_that_are_fast_enough_should_run_ahead() -> None:
    program = facts(workers=2, item_ms=80, busy_ms=60)
    finding = the_finding(rule, loading([2, 52, 2, 2], program, workers=True).trace())

    assert finding.saving_ns_per_step == 50 * MS // 4
    assert finding.remedy.text.startswith("2 worker processes make batches as fast as they are used, but not far")
    assert "prefetch_factor=8" in finding.remedy.code


def test_receiving_batches_that_are_ready() -> None:
    program = facts(workers=1, item_ms=50, busy_ms=60)
    finding = the_finding(rule, loading([13, 13, 13, 15], program, workers=True).trace())

    assert finding.saving_ns_per_step == 12 * MS
    assert finding.remedy.text.startswith("One worker process makes batches as fast as they are used, but each takes")
    assert "file_system" in finding.remedy.code
    assert places_of(finding) == [("train.py", 7, "main")]


def test_batches_that_are_quicker_made_than_received() -> None:
    program = facts(workers=1, item_ms=1, busy_ms=60)
    finding = the_finding(rule, loading([8, 8, 8, 8], program, workers=True).trace())

    assert finding.saving_ns_per_step == 7 * MS
    assert "num_workers=0" in finding.remedy.code


def test_receiving_a_batch_in_little_time_is_no_fault() -> None:
    program = facts(workers=1, item_ms=4, busy_ms=60)

    assert asked(rule, loading(4, program, workers=True).trace()).findings == ()  # 3 of 64 ms could be saved


def test_a_librarys_function_that_makes_batches_slow_is_named() -> None:
    recording = Recording()
    for number in (0, 1, 2):
        begin = 1000 * MS * number
        recording.step(begin, 1000 * MS, number)
        recording.frame(begin, 1000 * MS, "train.py(12): step")
        recording.annotation(begin + 10 * MS, 500 * MS, LOADING)
        recording.frame(begin + 10 * MS, 500 * MS, "torch/utils/data/dataloader.py(703): __next__")
        recording.frame(begin + 12 * MS, 490 * MS, "torch/utils/data/_utils/fetch.py(25): fetch")
        recording.frame(begin + 15 * MS, 480 * MS, "<built-in function next>")
        recording.frame(
            begin + 20 * MS, 450 * MS, f"transformers/image_processing.py({30 + number // 2}): resize"
        )  # a generator
        recording.frame(begin + 25 * MS, 400 * MS, "/env/python3.11/site-packages/scipy/ndimage/zoom.py(9): zoom")
        recording.operator(begin + 600 * MS, 390 * MS, "aten::mm")

    finding = the_finding(rule, recording.trace())

    assert figures_of(finding)[-1] == ("share of it in zoom of scipy/ndimage/zoom.py", 0.8, "share", None)
    assert finding.remedy.text.endswith(" 80% of the time to make a batch goes to zoom of scipy/ndimage/zoom.py.")
    assert places_of(finding) == [("train.py", 12, "step")]


def test_the_threshold_decides() -> None:
    assert asked(rule, on_the_host(4), share=0.03).findings[0].saving_ns_per_step == 4 * MS - RECEIVED
    assert asked(rule, on_the_host(4), share=0.04).findings[0].evidence.figures[0].threshold == 0.04
    assert asked(rule, on_the_host(), share=0.31).findings == ()


def test_an_iterator_for_each_batch_is_to_be_kept_and_gets_no_workers() -> None:
    finding = the_finding(rule, loading(120, facts(item_ms=5, batches_of_an_epoch=50, iterators=4, busy_ms=60)).trace())

    assert finding.remedy.apply == ()
    assert "iter(loader)" in finding.remedy.code
    assert finding.saving_ns_per_step < 120 * MS
    kept = the_finding(rule, loading(120, facts(item_ms=5, batches_of_an_epoch=50, iterators=1, busy_ms=60)).trace())
    assert "next(batches)" not in kept.remedy.code


@pytest.mark.parametrize("draws", [False, True])
def test_samples_that_come_out_the_same_can_be_kept(draws: bool) -> None:
    item = FunctionFacts(file="data.py", name="Images.__getitem__", line=10, last=19, changes_by_itself=draws)
    program = msgspec.structs.replace(facts(processors=8, item_ms=80, collate_ms=10), functions=(item,))

    found = the_finding(rule, by_lines(program, ("data.py(12): __getitem__", 90), compute_ms=60).trace())

    assert ("each epoch: keep it" in found.remedy.text) is not draws
    assert ("dataset[index]" in found.remedy.code) is not draws
    assert "num_workers=" in found.remedy.code
    assert places_of(found)[0] == ("data.py", 12, "__getitem__")


@pytest.mark.parametrize(("called", "says"), [("open", True), ("crop", False)])
def test_reading_files_for_each_sample_is_said_before_workers(called: str, says: bool) -> None:
    item = FunctionFacts(file="data.py", name="Images.__getitem__", line=10, last=19, changes_by_itself=True)
    read = OperationFacts(file="data.py", names=("",) * 11 + (called,))
    program = msgspec.structs.replace(facts(processors=8, item_ms=80), functions=(item,), operations=(read,))
    lines = ("data.py(12): __getitem__", 60), ("data.py(13): __getitem__", 20)

    found = the_finding(rule, by_lines(program, *lines, compute_ms=70).trace())

    assert ("reads and decodes files" in found.remedy.text) is says
    shares = [
        each.value for each in found.evidence.figures if each.name == "share of it in lines that read or decode files"
    ]
    assert shares == ([0.75] if says else [])


@pytest.mark.parametrize(("wait", "is_told"), [(60, True), (10, False)])
def test_samples_in_memory_that_are_handed_out_one_by_one(wait: int, is_told: bool) -> None:
    library = "site-packages/torch/utils/data/"
    stages = (
        InputStageFacts(
            stage="item", name="TensorDataset.__getitem__", file=f"{library}dataset.py", line=2, calls=4000
        ),
        InputStageFacts(stage="collate", name="default_collate", file=f"{library}_utils/collate.py", line=3, calls=4),
    )
    program = msgspec.structs.replace(facts(processors=8), input_stages=stages)

    found = asked(rule, loading(wait, program, compute_ms=60).trace()).findings

    told = [each for each in found if "handed out one by one" in each.title]
    assert bool(told) is is_told
    assert all(each.saving_ns_per_step == 54 * MS and "split(batch_size)" in each.remedy.code for each in told)
