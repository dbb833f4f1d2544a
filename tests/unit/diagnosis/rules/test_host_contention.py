"""host-contention: the launching thread waits for a processor."""

from __future__ import annotations

from stepscope.diagnosis.rules.host_contention import RULE as rule
from tests.unit.diagnosis.rules.cases import US, Cases, asked, busy_device, empty_trace, figures_of, the_finding
from tests.unit.diagnosis.rules.host_steps import counted

FIRES: Cases = {
    "on the host": lambda: counted(thread_waiting_ns=300),
    "with a device": lambda: counted(thread_waiting_ns=300, device=True),
    "a container's quota": lambda: counted(thread_waiting_ns=300, throttled_ns=200),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "nothing counted": lambda: counted(),
    "too little": lambda: counted(thread_waiting_ns=99),
    "too few steps": lambda: counted(steps=2, thread_waiting_ns=300),
    "its own threads": lambda: counted(thread_waiting_ns=300, torch={"threads": 16}, process={"usable_processors": 2}),
}


def test_the_time_that_the_thread_waited() -> None:
    trace = counted(
        thread_waiting_ns=300, involuntary_switches=7, pressure_ns=400, core=1, clock_mhz=2000.0,
        process={"processor_max_mhz": 4000.0},
    )  # fmt: skip

    finding = the_finding(rule, trace)

    assert finding.title == "30% of the step is lost because the launching thread waits for a processor"
    assert finding.saving_ns_per_step == 300
    assert figures_of(finding) == [
        ("share of the step in which the thread was ready and did not run", 0.3, "share", 0.1),
        ("time lost per step", 300, "ns", None),
        ("times a step it was preempted", 7.0, "count", None),
        ("tasks of the machine or container waited, per step", 400.0, "ns", None),
        ("steps that ended on another core than the one before", 0, "count", None),
        ("clock as a share of the processor's highest", 0.5, "share", None),
        ("throttled per step", 0, "ns", None),
    ]


def test_with_a_device_its_idle_time_for_the_host_counts() -> None:
    finding = the_finding(rule, counted(thread_waiting_ns=300 * US, device=True, unit_ns=US))

    # Four times until the next launch, three of them from the end of the work before.
    assert finding.title.startswith("27% of the step is lost")
    assert finding.saving_ns_per_step == 267 * US  # what the title says


def test_steps_that_the_program_itself_holds_up_are_replayed() -> None:
    crowded = counted(thread_waiting_ns=300 * US, device=True, unit_ns=US, process={"local_world_size": 2})

    assert the_finding(rule, crowded).saving_ns_per_step == 300 * US  # the device waits for the whole step


def test_numbers_of_the_machine_stand_in_the_commands() -> None:
    two = counted(thread_waiting_ns=300, process={"usable_processors": 2})
    quota = counted(thread_waiting_ns=300, throttled_ns=200, process={"processor_quota": 1.5})

    assert "taskset -c 0-1 " in the_finding(rule, two).remedy.code
    assert "docker run --cpus 3 " in the_finding(rule, quota).remedy.code


def test_a_quota_is_raised() -> None:
    finding = the_finding(rule, counted(thread_waiting_ns=300, throttled_ns=200))

    assert finding.title == "30% of the step is lost because the container's quota stops the program"
    assert finding.remedy.code.startswith("docker run --cpus")


def test_the_thresholds_decide() -> None:
    assert len(asked(rule, counted(thread_waiting_ns=100)).findings) == 1
    assert asked(rule, counted(thread_waiting_ns=300), share=0.31).findings == ()
    assert asked(rule, counted(thread_waiting_ns=300), steps=5).findings == ()
