"""host-synchronisation: the host waits for the device and falls behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stepscope.diagnosis import diagnose
from stepscope.diagnosis.rules.host_synchronisation import RULE as rule
from stepscope.diagnosis.view import View
from stepscope.trace import Trace
from tests.simulator import Machine
from tests.simulator.device import Queue
from tests.simulator.host import Host
from tests.simulator.programs import (
    PROGRAMS,
    graph_decode,
    input_bound_training,
    item_every_step,
    launch_bound_training,
)
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
from tests.unit.recording import Recording

HOSTS_CAUSES = {"synchronisation", "python", "dispatch", "untraced"}


def item(host: Host, queue: Queue) -> None:
    host.item(queue)


def nonzero(host: Host, queue: Queue) -> None:
    with host.operator("aten::index"), host.operator("aten::nonzero", before_ns=2 * US):
        host.synchronize_queue(queue)


def to_host(host: Host, queue: Queue) -> None:
    host.copy_to_host(4096, queue)


def to_device(host: Host, queue: Queue) -> None:
    host.copy_to_device(4096, queue)


def true_busy_ns(machine: Machine) -> int:
    """How long the device works; its one queue does one thing at a time."""
    return sum(work.duration_ns for work in machine.works)


def lost_per_step(machine: Machine) -> float:
    """How much longer a step takes than its work."""
    return View(recorded(machine)).step_ns - true_busy_ns(machine) / len(machine.truth().steps)


def explicit(host: Host, _: Queue) -> None:
    host.synchronize_device()


def waiting(wait: Callable[[Host, Queue], None]) -> Machine:
    """Each step launches its kernels, waits, and then works on the host for a while."""

    def step(host: Host, queue: Queue) -> None:
        layers(host, queue)
        wait(host, queue)
        host.work(30 * US)

    return training(step, wait=False)


def short_wait() -> Trace:
    """A wait of 10 us, after which the host is late by 100 us, in a step of 1000 us."""
    recording = Recording()
    recording.step(0, 1000 * US, 1)
    recording.frame(0, 1000 * US, "train.py(12): step")
    recording.launched(5 * US, 10 * US, 190 * US, "before", 101)
    recording.launch(190 * US, 10 * US, 102, name="cudaDeviceSynchronize", kind="synchronise")
    recording.launched(300 * US, 305 * US, 695 * US, "after", 103)
    return recording.trace()


def without_a_device(*names: str, steps: int = 2) -> Trace:
    """A CPU's steps of 1000 ns with these calls by the user, an item() by the optimizer and one by the loader."""
    recording = Recording()
    for step in range(steps):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.frame(begin, 1000, "train.py(12): step")
        for number, name in enumerate(names):
            recording.operator(begin + 50 * number + 10, 20, name)
            if name == "aten::is_nonzero":
                recording.operator(begin + 50 * number + 12, 16, "aten::item")
            recording.operator(begin + 50 * number + 14, 4, "aten::_local_scalar_dense")
        recording.annotation(begin + 800, 100, "Optimizer.step#AdamW.step")
        recording.operator(begin + 810, 5, "aten::item")
        recording.annotation(begin + 900, 50, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
        recording.operator(begin + 910, 5, "aten::item")
    return recording.trace()


def closure(*, lines: bool) -> Trace:
    """An optimizer's step that runs the training step, which reads a value, and then updates, reading one itself."""

    def at(line: int) -> dict[str, object]:
        return {"source_file": "train.py", "source_line": line, "source_function": "f"} if lines else {}

    recording = Recording()
    for step in range(2):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        if not lines:
            recording.frame(begin, 1000, "train.py(50): main")
            recording.frame(begin + 110, 300, "model.py(12): training_step")
        recording.annotation(begin + 100, 800, "Optimizer.step#Adam.step")
        recording.operator(begin + 120, 20, "aten::mm", **at(13))
        recording.operator(begin + 200, 20, "aten::item", **at(14))
        recording.operator(begin + 600, 20, "aten::item", **at(51))
        recording.operator(begin + 700, 20, "aten::addcdiv_", **at(51))
    return recording.trace()


def copy_that_waits(*, launched_ns: int = 20 * US, frame: str = "train.py(12): step") -> Trace:
    """A step of 10 ms in which a copy call takes 7.9 ms, while nothing runs: what was launched before it is late."""
    recording = Recording()
    recording.step(0, 10_000 * US, 1)
    recording.frame(0, 10_000 * US, frame)
    recording.launched(5 * US, 10 * US, 90 * US, "before", 101)
    recording.launch(launched_ns, 2, 103)
    recording.launch(50 * US, 7_900 * US, 102, name="hipMemcpyWithStream", kind="copy")
    recording.work(8_000 * US, 1_900 * US, "after", 103)
    return recording.trace()


FIRES: Cases = {
    "item": lambda: recorded(item_every_step()),
    "item between graphs": lambda: recorded(graph_decode()),
    "nonzero": lambda: recorded(waiting(nonzero)),
    "copy to the host": lambda: recorded(waiting(to_host)),
    "copy to the device": lambda: recorded(waiting(to_device)),
    "explicit": lambda: recorded(waiting(explicit)),
    "item without a device": lambda: without_a_device("aten::item"),
    "item in an optimizer's closure, by lines": lambda: closure(lines=True),
    "item in an optimizer's closure, by frames": lambda: closure(lines=False),
    "a copy that waits for what was not recorded": copy_that_waits,
}
SILENT: Cases = {
    "a copy after which the next work is launched": lambda: copy_that_waits(launched_ns=7_990 * US),
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "no wait": lambda: recorded(launch_bound_training()),
    "waits that cost little": lambda: recorded(input_bound_training()),
    "a short wait": short_wait,
    "a CPU whose optimizer and loader read values": without_a_device,
}


@pytest.mark.parametrize(
    ("frame", "place"),
    [
        ("train.py(12): step", ("train.py", 12, "step")),
        ("vllm/worker/model_runner.py(30): prepare", ("vllm/worker/model_runner.py", 30, "prepare")),
    ],
)
def test_a_wait_for_what_was_not_recorded_is_named_with_its_place(frame: str, place: tuple[str, int, str]) -> None:
    finding = the_finding(rule, copy_that_waits(frame=frame))

    # The device is idle from 100 to 8,000 us; the call lasts from 50 to 7,950.
    assert (finding.severity, finding.saving_ns_per_step, finding.confidence) == ("note", 0, "low")
    assert figures_of(finding) == [
        (
            "share of the step in which the device is idle without a visible reason during such a call",
            0.785,
            "share",
            0.05,
        ),
        ("such calls per step", 1.0, "count", None),
        ("the longest of them", 7_900 * US, "ns", None),
    ]
    assert "hipMemcpyWithStream" in finding.title
    assert places_of(finding) == [place]


@pytest.mark.parametrize(
    ("wait", "what", "remedy"),
    [
        (item, ".item()", "running_loss += loss.detach()"),
        (nonzero, "indexing with a mask", "torch.where(mask"),
        (to_host, "a copy to the host", 'tensor.to("cpu", non_blocking=True)'),
        (to_device, "a copy to the device from pageable memory", "batch.to(device, non_blocking=True)"),
        (explicit, "torch.cuda.synchronize()", "# torch.cuda.synchronize()"),
    ],
)
def test_each_kind_of_wait_with_its_remedy(wait: Callable[[Host, Queue], None], what: str, remedy: str) -> None:
    machine = waiting(wait)
    charged = true_idle_ns(machine, HOSTS_CAUSES, triggered=True)
    steps = machine.truth().steps

    finding = the_finding(rule, recorded(machine))

    # Nothing else holds the device up: what remains of a step is its kernels and copies.
    assert finding.saving_ns_per_step == steps[0].duration_ns - true_busy_ns(machine) // len(steps) > 0
    assert finding.saving_from == "replayed"
    assert finding.title == f"{what} makes the host wait, and the device is idle afterwards"
    assert remedy in finding.remedy.code
    assert places_of(finding) == [("train.py", 12, "step")]
    # The last step's wait is followed by nothing, so three waits in four steps are charged.
    name, share, _, limit = figures_of(finding)[0]
    assert (name, limit) == ("share of the step lost after these waits", 0.02)
    assert share == charged / (steps[-1].start_ns + steps[-1].duration_ns)
    assert figures_of(finding)[1] == ("waits per step", 0.75, "count", None)
    assert {interval.what for interval in finding.evidence.intervals} == {f"idle after {what}"}


def test_a_wait_is_charged_no_more_than_it_lasted() -> None:
    finding = the_finding(rule, short_wait(), share=0.01)

    assert (finding.saving_ns_per_step, finding.saving_share, finding.severity) == (10 * US, 0.01, "low")
    assert (
        finding.title == "torch.cuda.synchronize() makes the host wait once a step, and the device is idle afterwards"
    )
    assert figures_of(finding) == [
        ("share of the step lost after these waits", 0.01, "share", 0.01),
        ("waits per step", 1.0, "count", None),
        ("time the host waited per step", 10 * US, "ns", None),
        ("idle time after one wait", 10 * US, "ns", None),
        ("steps between two waits at which they cost too little to matter", 2, "count", None),
    ]
    assert [(interval.start_ns, interval.duration_ns) for interval in finding.evidence.intervals] == [
        (200 * US, 105 * US)
    ]


def test_the_threshold_decides() -> None:
    trace = recorded(item_every_step())

    assert len(asked(rule, trace, share=0.03).findings) == 1
    assert asked(rule, trace, share=0.05).findings == ()
    assert asked(rule, short_wait(), share=0.011).findings == ()


def test_what_would_wait_for_a_gpu_is_a_note_without_a_saving() -> None:
    finding = the_finding(rule, without_a_device("aten::item"))

    assert (finding.severity, finding.saving_ns_per_step, finding.saving_share) == ("note", 0, 0.0)
    assert finding.title == (
        ".item() is called once a step: it waits for nothing on a CPU, but would drain the queues on a GPU"
    )
    assert figures_of(finding) == [
        ("calls per step", 1.0, "count", 0.5),
        ("time inside the calls per step", 20, "ns", None),
    ]
    assert places_of(finding) == [("train.py", 12, "step")]
    assert "running_loss += loss.detach()" in finding.remedy.code


def test_each_kind_is_noted_once_and_calls_inside_others_are_not_counted_again() -> None:
    trace = without_a_device("aten::item", "aten::is_nonzero", "aten::nonzero", "aten::mm")
    item, shape = asked(rule, trace).findings

    assert (figures_of(item)[0][:2], figures_of(shape)[0][:2]) == (("calls per step", 2.0), ("calls per step", 1.0))
    assert item.title.startswith(".item() is called 2 times a step")
    assert shape.title.startswith("an operator whose output size depends on values is called once a step")


def test_what_looking_for_unused_parameters_reads_is_not_noted() -> None:
    recording = Recording()
    recording.step(0, 1000, 0)
    backward = {"source_file": "train.py", "source_line": 14, "source_function": "step"}
    for begin in (100, 200):
        recording.operator(begin, 5, "aten::select", **backward)
        recording.operator(begin + 10, 5, "aten::item", **backward)
        recording.operator(begin + 20, 5, "torch.distributed.ddp.reducer::copy_bucket_to_grad", **backward)
    assert asked(rule, recording.trace()).findings == ()
    recording.operator(800, 5, "aten::item", **backward | {"source_line": 15})
    assert figures_of(the_finding(rule, recording.trace()))[0][1] == 1.0


def test_what_anomaly_detection_reads_in_the_backward_pass_is_not_noted() -> None:
    recording = Recording()
    recording.step(0, 1000, 0)
    recording.operator(10, 100, "autograd::engine::evaluate_function: MulBackward0")
    recording.operator(20, 20, "aten::is_nonzero")
    recording.operator(25, 10, "aten::item")

    assert asked(rule, recording.trace()).findings == ()


def test_rare_reading_is_not_noted() -> None:
    recording = Recording()
    for step in range(4):
        recording.step(1000 * step, 1000, step)
    recording.operator(10, 20, "aten::item")

    assert asked(rule, recording.trace()).findings == ()
    assert len(asked(rule, recording.trace(), calls=0.25).findings) == 1


@pytest.mark.parametrize(
    ("lines", "place"), [(True, ("train.py", 14, "f")), (False, ("model.py", 12, "training_step"))]
)
def test_a_closure_is_the_users_and_the_update_is_not(lines: bool, place: tuple[str, int, str]) -> None:
    finding = the_finding(rule, closure(lines=lines))

    assert figures_of(finding)[0] == ("calls per step", 1.0, "count", 0.5)
    assert places_of(finding) == [place]


@pytest.mark.parametrize(
    ("program", "what", "code"),
    [
        ("item_fault", ".item()", "running_loss += loss.detach()"),
        ("print_tensor_fault", "printing or logging a tensor", "if step % 5 == 0:"),
        ("boolean_indexing_fault", "indexing with a mask", "torch.where(mask"),
        ("nonzero_fault", "an operator whose output size depends on values", "torch.nonzero_static("),
        ("device_synchronize_fault", "torch.cuda.synchronize()", "# torch.cuda.synchronize()"),
        ("queue_synchronize_fault", "waiting for a queue or an event", "wait_event(event)"),
        ("copy_to_host_fault", "a copy to the host", "non_blocking=True"),
        ("pageable_copy_fault", "a copy to the device from pageable memory", "pin_memory=True"),
        (
            "item_before_optimizer_fault",
            "a value read between the backward pass and the optimizer's step",
            "clip_grad_norm_(",
        ),
    ],
)
def test_each_simulated_fault_is_of_one_kind(program: str, what: str, code: str) -> None:
    machine = PROGRAMS[program]()
    healthy = PROGRAMS["host_ahead_clean"]()

    finding = the_finding(rule, recorded(machine))

    assert finding.title == f"{what} makes the host wait once a step, and the device is idle afterwards" or (
        finding.title == f"{what} makes the host wait, and the device is idle afterwards"
    )
    assert code in finding.remedy.code
    assert finding.saving_ns_per_step == pytest.approx(lost_per_step(machine) - lost_per_step(healthy), rel=0.06)


@pytest.mark.parametrize("program", ["host_ahead_clean", "copy_to_host_clean", "pageable_copy_clean"])
def test_without_the_fault_nothing_is_said(program: str) -> None:
    assert asked(rule, recorded(PROGRAMS[program]())).findings == ()


def test_what_is_read_on_a_line_that_logs_is_read_for_logging() -> None:
    line = {"source_file": "train.py", "source_line": 14, "source_function": "step"}
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.launched(5, 10, 190, "before", 101)
    recording.operator(150, 60, "aten::item", **line)
    recording.launch(190, 10, 102, name="cudaStreamSynchronize", kind="synchronise")
    recording.operator(215, 40, "stepscope.logging#print", **line)
    recording.launched(300, 305, 695, "after", 103)

    finding = the_finding(rule, recording.trace(), share=0.001)

    assert (
        finding.title
        == "printing or logging a tensor makes the host wait once a step, and the device is idle afterwards"
    )
    assert places_of(finding) == [("train.py", 14, "step")]


def test_what_the_host_does_after_the_wait_is_charged_once() -> None:
    """After a wait of 100 us the host loads data for 60 of the 100 us in which the device is idle."""
    recording = Recording()
    recording.step(0, 1000 * US, 1)
    recording.launched(5 * US, 10 * US, 190 * US, "before", 101)
    recording.launch(100 * US, 100 * US, 102, name="cudaDeviceSynchronize", kind="synchronise")
    recording.annotation(210 * US, 60 * US, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    recording.launched(300 * US, 305 * US, 695 * US, "after", 103)
    trace = recording.trace()

    finding = the_finding(rule, trace)

    assert ("idle time after one wait", (100 - 60) * US, "ns", None) in figures_of(finding)
    # Without the wait the device works while data is loaded; without loading, the host would still launch late.
    assert finding.saving_ns_per_step == 100 * US
    assert {one.rule: one.saving_ns_per_step for one in diagnose(trace).findings}["input-bound"] == 60 * US


def test_single_numbers_need_no_pinned_memory() -> None:
    def copied(byte_count: int) -> Callable[[Host, Queue], None]:
        def copy(host: Host, queue: Queue) -> None:
            host.copy_to_device(byte_count, queue)

        return copy

    of_numbers, of_a_batch = (the_finding(rule, recorded(waiting(copied(count)))) for count in (8, 4096))
    assert of_numbers.title.startswith("a copy of single numbers to the device makes the host wait")
    assert "torch.full((), value, device=device)" in of_numbers.remedy.code
    assert of_a_batch.title.startswith("a copy to the device from pageable memory")
