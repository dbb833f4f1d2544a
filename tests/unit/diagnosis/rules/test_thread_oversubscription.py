"""thread-oversubscription: more computing threads than processors."""

from __future__ import annotations

from typing import Any

from stepscope.diagnosis.rules.thread_oversubscription import RULE as rule
from stepscope.trace import Trace
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, the_finding
from tests.unit.diagnosis.rules.host_steps import counted


def threads(number: int = 16, *, usable: int = 2, ranks: int | None = None, ran: int = 400, **more: Any) -> Trace:
    """Steps of 1000 ns in which the main thread ran and waited as given, and slept the rest."""
    process = {"usable_processors": usable, "local_world_size": ranks}
    more = {"thread_waiting_ns": 200, **more}
    return counted(torch={"threads": number}, process=process, thread_processor_ns=ran, **more)


FIRES: Cases = {"many threads": threads, "many ranks": lambda: threads(2, ranks=4)}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "a thread for each processor": lambda: threads(2),
    "nothing lost": lambda: threads(ran=770),
    "nothing counted": lambda: threads(thread_waiting_ns=None),
    "a device computes": lambda: threads(device=True),
}


def test_the_time_that_the_thread_slept() -> None:
    finding = the_finding(rule, threads(context_switches=90))

    assert finding.title == "16 computing threads share 2 processors, and the main thread sleeps 40% of the step"
    assert finding.saving_ns_per_step == 1000 - 400 - 200
    assert figures_of(finding) == [
        ("computing threads", 16, "count", None),
        ("processors for each rank", 2, "count", None),
        ("computing threads for each usable processor", 8.0, "count", 1.0),
        ("share of the step that the thread slept", 0.4, "share", 0.05),
        ("torch's threads in each rank", 16, "count", None),
        ("ranks on the machine", 1, "count", None),
        ("usable processors", 2, "count", None),
        ("changes of thread per step", 90.0, "count", None),
        ("time waited for a processor per step", 200.0, "ns", None),
    ]
    assert finding.remedy.code.startswith("torch.set_num_threads(2)\n")


def test_ranks_share_the_processors() -> None:
    finding = the_finding(rule, threads(2, ranks=4))

    assert finding.title.startswith("8 computing threads share 2 processors")
    assert finding.remedy.code.startswith("torch.set_num_threads(1)\n")


def test_the_thresholds_decide() -> None:
    assert len(asked(rule, threads(ran=750)).findings) == 1
    assert asked(rule, threads(), share=0.41).findings == ()
    assert asked(rule, threads(), excess=8.0).findings == ()
