"""loader-contention: workers that compete for processors, or run too little ahead."""

from __future__ import annotations

from stepscope.diagnosis.rules.loader_contention import RULE as rule
from stepscope.trace import Trace
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.diagnosis.rules.loaders import MS, facts, loading


def crowd(*, processors: int = 2, waiting_ms: int = 20, processor_ms: int = 40) -> Trace:
    """Eight workers take 800 ms for a batch of 40 ms of work; the main thread waits 20 of its 60 ms for a processor."""
    program = facts(
        workers=8, processors=processors, item_ms=800, item_processor_ms=processor_ms, waiting_ms=waiting_ms, busy_ms=40
    )
    return loading(40, program, workers=True).trace()


def bursts(waits: list[int] | None = None) -> Trace:
    """Two workers make a batch in 80 ms for every 60 ms of computation, but one batch of four was late."""
    program = facts(workers=2, processors=4, item_ms=80, busy_ms=60, prefetch_factor=2)
    return loading(waits or [50, 1, 1, 1] * 2, program, workers=True).trace()


FIRES: Cases = {"too many workers": crowd, "too little ahead": bursts}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "no facts": lambda: loading([50, 1, 1, 1] * 2, workers=True).trace(),
    "as many processors as workers": lambda: crowd(processors=8),
    "the main thread has its processor": lambda: crowd(waiting_ms=0),
    "batches are all work": lambda: crowd(processor_ms=700),
    "every batch is late": lambda: bursts([12, 13, 14, 14] * 2),
    "no wait to speak of": lambda: bursts([5, 1, 1, 1] * 2),
    "too few batches to tell": lambda: bursts([50, 1, 1, 1]),
}


def test_workers_that_share_processors() -> None:
    finding = the_finding(rule, crowd())

    # A step of 100 ms; left alone it is the computation's 40 ms, as is the processors' time: (40 + 40) / 2.
    assert finding.saving_ns_per_step == 60 * MS
    assert finding.title == (
        "8 worker processes share 2 processors: a batch takes 20.0 times its processor time, and the step waits"
    )
    assert figures_of(finding) == [
        ("share of the step lost to workers that compete or run too little ahead", 0.6, "share", 0.05),
        ("time of a batch over its processor time", 20.0, "count", 1.5),
        ("time per step in which the main thread waited for a processor", 20 * MS, "ns", None),
        ("worker processes", 8, "count", None),
        ("processors the program may use", 2, "count", None),
        ("time to make a batch", 800 * MS, "ns", None),
    ]
    assert "num_workers=1, worker_init_fn=one_thread" in finding.remedy.code


def test_batches_that_come_in_bursts() -> None:
    finding = the_finding(rule, bursts())

    assert finding.saving_ns_per_step == 50 * MS // 4
    assert finding.title == (
        "2 workers make batches fast enough, but not far enough ahead: 2 of 8 batches carry 94% of the waits"
    )
    assert figures_of(finding)[1] == ("share of the waits in a quarter of the batches", 50 / 53, "share", 0.75)
    assert figures_of(finding)[3] == ("batches prefetched by each worker", 2, "count", None)
    assert places_of(finding) == [("train.py", 7, "main")]
    assert "prefetch_factor=4" in finding.remedy.code


def test_the_thresholds_decide() -> None:
    assert asked(rule, crowd(), stretched=20).findings
    assert asked(rule, crowd(), stretched=20.1).findings == ()
    assert asked(rule, bursts(), share=0.17).findings
    assert asked(rule, bursts(), share=0.18).findings == ()
