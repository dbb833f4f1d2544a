"""small-buckets: gradients are exchanged in very many small messages."""

from __future__ import annotations

from stepscope.diagnosis.rules.small_buckets import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import DataParallelFacts, ProgramFacts
from tests.unit.diagnosis.rules.cases import (
    US,
    Cases,
    asked,
    busy_device,
    empty_trace,
    figures_of,
    places_of,
    the_finding,
)
from tests.unit.recording import Recording
from tests.unit.shaped import LINE

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def reducing(
    count: int = 40, *, elements: int | None = 1024, covered: bool = False, facts: ProgramFacts | None = None
) -> Trace:
    """Reductions of 20 us one after the other in a step of 1,000 us, whose end waits for them."""
    recording = Recording(metadata=Metadata(program=facts))
    recording.step(0, 1000 * US, 1)
    recording.frame(0, 1000 * US, "train.py(12): step")
    recording.launched(1 * US, 2 * US, 98 * US, "gemm", 100)
    for number in range(count):
        recording.launched(
            (20 + number) * US, (100 + 20 * number) * US, 20 * US, ALL_REDUCE, 101 + number, queue="24",
            kind="communication",
            message_elements=elements, message_type="Float", collective="allreduce",
        )  # fmt: skip
    if covered:
        recording.launched(15 * US, 100 * US, (20 * count + 10) * US, "backward", 99)
    recording.launch(90 * US, (20 * count + 12) * US, 98, name="cudaDeviceSynchronize", kind="synchronise")
    return recording.trace()


def on_the_host(count: int = 30) -> Trace:
    """Reductions by gloo that begin in 10 ns each and run while nothing computes."""
    recording = Recording()
    recording.step(0, 1000, 1)
    other = recording.thread("9")
    for number in range(count):
        recording.operator(100 + 12 * number, 10, "c10d::allreduce_", input_shapes="[[[64]]]", **LINE)
        recording.annotation(105 + 12 * number, 10, "gloo:all_reduce", other)
    return recording.trace()


def serving() -> Trace:
    recording = Recording()
    for number in range(40):
        recording.launched(
            (20 + number) * US, (100 + 20 * number) * US, 20 * US, ALL_REDUCE, 101 + number, kind="communication"
        )
    recording.annotation(10 * US, 1000 * US, "step[DECODE bs=8]")
    return recording.trace()


FIRES: Cases = {
    "on a device": reducing,
    "of unknown size": lambda: reducing(elements=None),
    "on the host": on_the_host,
}
SILENT: Cases = {
    "an engine that serves has no gradients": serving,
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "few": lambda: reducing(19),
    "large": lambda: reducing(elements=2**20),
    "covered by computation": lambda: reducing(covered=True),
}


def test_the_time_of_a_short_one_is_saved_for_all_that_a_bucket_holds() -> None:
    finding = the_finding(rule, reducing())

    # A fortieth of the time is left of each.
    assert finding.saving_ns_per_step == 40 * (20 * US - 20 * US // 40)
    assert finding.saving_from == "replayed"
    assert finding.title == "40 reductions a step of 4.0 KiB on average, which 1 would do"
    assert figures_of(finding) == [
        ("reductions per step", 40.0, "count", 20),
        ("reductions of buckets of 25 MB per step", 1, "count", None),
        ("mean message", 4096.0, "bytes", 2**20),
        ("time of a short one", 20.0 * US, "ns", None),
        ("share of the step that fewer messages would save", 780 / 1000, "share", 0.02),
    ]
    assert places_of(finding) == [("train.py", 12, "step")]


def test_small_buckets_are_known_by_their_size() -> None:
    facts = ProgramFacts(data_parallel=(DataParallelFacts(kind="DistributedDataParallel", bucket_bytes=2**20),))

    finding = the_finding(rule, reducing(facts=facts))

    assert finding.remedy.code.splitlines()[0] == "model = DistributedDataParallel(model, bucket_cap_mb=25)"
    assert "than the 1.0 MiB it has" in finding.remedy.text


def test_on_the_host_they_take_as_long_as_lies_between_their_ends() -> None:
    # 29 of 30 reductions, 12 ns after each other; of these nothing covers 30 times 10 ns.
    finding = the_finding(rule, on_the_host())

    assert (finding.saving_ns_per_step, finding.saving_from) == (min(29 * 12, 30 * 10), "replayed")
    assert figures_of(finding)[3] == ("time of a short one", 12.0, "ns", None)
    assert places_of(finding) == [("train.py", 20, "step")]


def test_the_thresholds_decide() -> None:
    assert asked(rule, reducing(), count=41).findings == ()
    assert asked(rule, reducing(), bytes=4095).findings == ()
    assert asked(rule, reducing(), share=0.79).findings == ()
    assert len(asked(rule, reducing(19), count=19).findings) == 1
