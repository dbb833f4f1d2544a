"""loader-restart: worker processes are restarted repeatedly."""

from __future__ import annotations

import msgspec

from stepscope.diagnosis import diagnose
from stepscope.diagnosis.rules.loader_restart import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import ProgramFacts
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.diagnosis.rules.loaders import MS, WORKERS, facts
from tests.unit.recording import Recording

START = "DataLoader.__iter__"


def epochs(program: ProgramFacts | None, *, start: str = START, frames: bool = False, marks: str = WORKERS) -> Trace:
    """Two epochs of two steps of 100 ms. The second begins with ending workers (10 ms) and starting others (40)."""
    recording = Recording(metadata=Metadata(program=program))
    for number in range(4):
        begin = 100 * MS * number
        recording.step(begin, 100 * MS, number)
        recording.line(begin, 100 * MS, "train.py(7): main")
        if number == 2:
            recording.annotation(begin + 1 * MS, 10 * MS, marks)
            make = recording.frame if frames else recording.operator
            make(begin + 12 * MS, 20 * MS, start)
            recording.annotation(begin + 33 * MS, 20 * MS, marks)
        else:
            recording.annotation(begin + 1 * MS, 2 * MS, marks)
        recording.operator(begin + 60 * MS, 40 * MS, "aten::mm")
    return recording.trace()


RESTARTED = facts(workers=2, item_ms=12, persistent_workers=False)

FIRES: Cases = {
    "named by stepscope run": lambda: epochs(RESTARTED),
    "by frames, without facts": lambda: epochs(
        None, start="torch/utils/data/dataloader.py(430): _get_iterator", frames=True
    ),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "workers that stay": lambda: epochs(facts(workers=2, item_ms=12, persistent_workers=True)),
    "no workers": lambda: epochs(facts(workers=0, item_ms=12)),
    "no workers, and no facts": lambda: epochs(None, marks=WORKERS.replace("MultiProcessing", "SingleProcess")),
    "nothing says that they are started": lambda: epochs(RESTARTED, start="aten::randint"),
}


def test_from_the_end_of_the_last_epoch_to_the_first_batch_less_one_batch() -> None:
    finding = the_finding(rule, epochs(RESTARTED))

    assert finding.saving_ns_per_step == (52 - 12) * MS // 4
    assert finding.title == "10% of the step goes to restarting the loader's worker processes, 52 ms each time"
    assert figures_of(finding) == [
        ("share of the step lost to starting workers", 0.1, "share", 0.02),
        ("starts while steps were recorded", 1, "count", None),
        ("time from a start to the first batch", 52 * MS, "ns", None),
        ("worker processes", 2, "count", None),
        ("processors the program may use", 8, "count", None),
        ("time to make a batch", 12 * MS, "ns", None),
    ]
    assert places_of(finding) == [("train.py", 7, "main")]
    assert "num_workers=2, persistent_workers=True" in finding.remedy.code


def test_a_long_epoch_pays_for_its_beginning_once() -> None:
    long = facts(workers=2, item_ms=12, persistent_workers=False, batches_of_an_epoch=10)

    # Five batches were asked for, so half of an epoch's.
    assert the_finding(rule, epochs(long)).saving_ns_per_step == 40 * MS // 2 // 4


def test_workers_that_start_explain_why_the_thread_waits_for_a_processor() -> None:
    contended = msgspec.structs.replace(facts(workers=2, item_ms=12, persistent_workers=False, waiting_ms=15))
    steps = tuple(
        msgspec.structs.replace(step, duration_ns=100 * MS, thread_processor_ns=80 * MS, pressure_ns=15 * MS)
        for step in contended.steps
    )
    trace = epochs(msgspec.structs.replace(contended, steps=steps))

    assert [one.rule for one in diagnose(trace, rules=["host-contention"]).findings] == ["host-contention"]
    assert [one.rule for one in diagnose(trace, rules=["host-contention", rule.id]).findings] == [rule.id]


def test_the_threshold_decides() -> None:
    assert asked(rule, epochs(RESTARTED), share=0.1).findings
    assert asked(rule, epochs(RESTARTED), share=0.11).findings == ()
