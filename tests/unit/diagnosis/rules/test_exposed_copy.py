"""exposed-copy: copies between host and device stop the work."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.exposed_copy import RULE as rule
from stepscope.diagnosis.view import View
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import LoaderFacts, ProgramFacts
from stepscope.whatif.host_waits import RETURN_NS
from tests.simulator import Machine
from tests.simulator.device import Queue
from tests.simulator.host import CALL_NS, LATENCY_NS, Host
from tests.simulator.programs import item_every_step
from tests.simulator.serving_faults import offloaded
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


def copying(*, pageable: bool = True) -> Machine:
    def step(host: Host, queue: Queue) -> None:
        host.copy_to_device(1 << 20, queue, duration_ns=200 * US, pageable=pageable)
        layers(host, queue)

    return training(step)


def overlapped() -> Trace:
    """A copy in while a kernel runs, and a copy on the device."""
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.launched(5, 10, 600, "gemm", 101)
    recording.launched(15, 20, 300, "Memcpy HtoD (Pinned -> Device)", 102, queue="8", kind="copy_in", bytes=64)
    recording.launched(25, 610, 390, "Memcpy DtoD (Device -> Device)", 103, kind="copy_on_device", bytes=64)
    return recording.trace()


def by_hand() -> Trace:
    """In 1000 us: a copy of 100 us, half of it behind a kernel, and 30 us idle inside the copying call."""
    recording = Recording(unit_ns=US)
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "train.py(12): step")
    recording.launched(5, 10, 190, "gemm", 101)
    recording.launch(12, 8, 102, name="cudaMemcpyAsync", kind="copy")
    recording.work(150, 100, "Memcpy HtoD (Pageable -> Device)", 102, queue="8", kind="copy_in", bytes=4096)
    recording.launch(240, 40, 103, name="cudaMemcpyAsync", kind="copy")
    recording.work(330, 10, "Memcpy HtoD (Pinned -> Device)", 103, queue="8", kind="copy_in", bytes=1000)
    recording.launched(290, 290, 710, "gemm", 104)
    return recording.trace()


FIRES: Cases = {
    "pageable": lambda: recorded(copying()),
    "pinned, and waited for": lambda: recorded(copying(pageable=False)),
    "by hand": by_hand,
    "a cache on the host": lambda: recorded(offloaded(fault=True)),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "overlapped": overlapped,
    "tokens of each iteration": lambda: recorded(offloaded(fault=False)),
    "one number per step": lambda: recorded(item_every_step()),
}


def test_exposed_copies_and_idle_time_inside_the_calls_add_up() -> None:
    finding = the_finding(rule, by_hand())

    # Of the copy from 150 on, 50 us lie behind the kernel; the second call holds the host while the device is idle from
    # 250 to 280. No computation waits for the copies, so only the host's time in the calls is saved.
    assert finding.saving_ns_per_step == (8 + 40) * US
    assert finding.title == (
        "8% of the step goes to copies between host and device that nothing overlaps, most of them "
        "from or to pageable memory"
    )
    assert figures_of(finding) == [
        ("share of the step lost to copies", 0.08, "share", 0.02),
        ("copies per step", 2.0, "count", None),
        ("share of the copies' time from or to pageable memory", pytest.approx(10 / 11), "share", None),
        ("bytes moved per step", 5096, "bytes", None),
    ]
    assert [(interval.start_ns, interval.duration_ns) for interval in finding.evidence.intervals] == [
        (150 * US, 100 * US),
        (330 * US, 10 * US),
    ]
    assert places_of(finding) == [("train.py", 12, "step")]
    assert "pin_memory=True" in finding.remedy.code


def test_a_simulated_machine() -> None:
    machine = copying()
    truth = machine.truth()
    lost = truth.devices[0].exposed_copy_ns + truth.cause_ns(0).get("host_to_device_copy", 0)

    finding = the_finding(rule, recorded(machine))

    step = View(recorded(machine)).step_ns
    assert figures_of(finding)[0][1] == lost / 4 / step
    # And the time from a copy's launch to its beginning. The first call and its synchronisation stay: the device did
    # nothing before.
    assert finding.saving_ns_per_step == 200 * US + LATENCY_NS - (CALL_NS + RETURN_NS) // 4
    assert figures_of(finding)[3] == ("bytes moved per step", 1 << 20, "bytes", None)


def test_the_first_call_of_all_sets_up_the_device() -> None:
    recording = Recording(unit_ns=US)
    recording.step(0, 10_000, 1)
    recording.launch(10, 490, 101, name="cudaMemcpyAsync", kind="copy")
    recording.work(450, 50, "Memcpy HtoD (Pageable -> Device)", 101, kind="copy_in", bytes=4096)
    recording.launched(520, 530, 9470, "gemm", 102)

    # 440 us pass before the copy, and stay; without its 50 us the kernel is launched that much earlier.
    assert the_finding(rule, recording.trace(), share=0.005).saving_ns_per_step == 50 * US


def test_pinned_memory_is_not_called_pageable() -> None:
    finding = the_finding(rule, recorded(copying(pageable=False)))

    assert finding.title.endswith("that nothing overlaps")
    assert figures_of(finding)[2] == ("share of the copies' time from or to pageable memory", 0.0, "share", None)


def test_the_threshold_decides() -> None:
    assert len(asked(rule, by_hand(), share=0.08).findings) == 1
    assert asked(rule, by_hand(), share=0.081).findings == ()
    assert len(asked(rule, recorded(item_every_step()), share=0.0001).findings) == 1


def copied(memory: str, *, kind: str = "copy_in", pins: bool | None = None) -> Trace:
    """A copy of 100 of 1000 ns that nothing overlaps, in a program whose loader pins its batches or not."""
    loaders = () if pins is None else (LoaderFacts(pin_memory=pins),)
    recording = Recording(metadata=Metadata(program=ProgramFacts(loaders=loaders)))
    recording.step(0, 1000, 1)
    recording.launched(5, 10, 890, "gemm", 101)
    recording.launched(20, 900, 100, f"Memcpy ({memory})", 102, kind=kind, bytes=4096)
    return recording.trace()


def test_the_remedy_fits_devices_that_torch_cuda_does_not_drive() -> None:
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.launch(5, 2, 101, name="runFunction - job_submit")
    recording.work(10, 890, "job", 101)
    recording.launch(20, 2, 102, name="runFunction - job_submit")
    recording.work(900, 100, "dma_in", 102, kind="copy_in", bytes=4096)

    finding = the_finding(rule, recording.trace())

    assert finding.remedy.text == (
        "Copy the next batch while this one computes; from pinned memory, if it is not there yet."
    )
    assert finding.remedy.code == (
        "copying = torch.Stream()\n"
        "with copying:\n"
        "    following = next(batches).to(device, non_blocking=True)\n"
        "train(batch)\n"
        "torch.accelerator.current_stream().wait_stream(copying)\n"
        "batch = following\n"
        "# or, for any loader:\n"
        "from stepscope.remedies import prefetch_to_device\n"
        "for batch in prefetch_to_device(loader):\n    train(batch)"
    )
    assert [name for name, *_ in figures_of(finding)][1:] == ["copies per step", "bytes moved per step"]
    assert "torch.cuda.Stream()" in the_finding(rule, copied("Pinned -> Device")).remedy.code


@pytest.mark.parametrize(
    ("trace", "text", "code"),
    [
        (copied("Pageable -> Device"), "Load batches into pinned memory", "pin_memory=True"),
        (copied("Pageable -> Device", pins=False), "Load batches into pinned memory", "non_blocking=True"),
        (copied("Pageable -> Device", pins=True), "The loaders pin their batches, but", "def pin_memory(self)"),
        (copied("Pinned -> Device", pins=True), "Most of the memory is pinned already", "wait_stream(copying)"),
        (copied("Device -> Pageable", kind="copy_out"), "Most of it is copied to the host", "host.copy_(tensor"),
    ],
)
def test_the_remedy_is_what_is_not_done_yet(trace: Trace, text: str, code: str) -> None:
    remedy = the_finding(rule, trace).remedy

    assert remedy.text.startswith(text)
    assert code in remedy.code


def test_more_copying_than_computing_cannot_be_hidden() -> None:
    recording = Recording()
    recording.step(0, 1_000, 1)
    recording.launch(1, 2, 101, name="cudaMemcpyAsync")
    recording.work(10, 700, "Memcpy HtoD (Pinned -> Device)", 101, kind="copy_in")
    recording.launched(4, 710, 100, "gemm", 102)

    finding = the_finding(rule, recording.trace())
    assert finding.title.endswith("; computing is too short to hide them")
    assert (finding.confidence, finding.remedy.text.split(":")[0]) == (
        "low",
        "More time goes to moving data than to computing with it, so that no overlap can hide the copies",
    )


def test_an_engine_that_moves_more_than_tokens_is_told_to_keep_it_on_the_device() -> None:
    remedy = the_finding(rule, recorded(offloaded(fault=True))).remedy
    assert "--kv-cache-dtype" in remedy.code
    assert not remedy.apply
