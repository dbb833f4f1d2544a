"""# What it finds
The thread that runs the steps is ready to run but gets no processor, because of other programs or a container's quota.

# Why it costs time
A thread that launches work late leaves the device without work; on a CPU nothing is computed meanwhile. Each time the
thread is preempted it also loses its caches, and often its core.

# How it is measured
The operating system counts, for each recorded step, how long the thread was ready but waited for a processor
(`/proc/thread-self/schedstat`). With a device, the cost is that share of the device's idle time during the host's own
work. Loading data and waiting for the device do not count, because a sleeping thread is not ready.

# Known false positives
Other load during the recording comes from the machine, not from the program: record again on a quiet machine before
you change the program. If the program itself runs more threads than there are processors, thread-oversubscription
reports that instead.

# What to do
Stop the other programs, reserve processors for the job, or raise the container's quota.

# Reference
Linux documentation: sched-stats, "time spent waiting on a runqueue"; pressure stall information.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.diagnosis.rules._waits import HostCounts, host_counts, host_work_ns, scaled_host_work


def check(view: View, limits: Limits) -> Answers:
    counts = host_counts(view)
    if counts is None or len(counts.steps) < limits["steps"]:
        return
    waited = counts.total(lambda step: step.thread_waiting_ns)
    threads, usable = view.program.torch.get("threads"), view.program.process_figure("usable_processors")
    own_doing = isinstance(threads, int) and usable is not None and threads > usable
    if not waited or own_doing:
        return
    share = counts.share(waited)
    cost = int(share * (view.length_ns if view.device is None else host_work_ns(view)))
    throttled = counts.total(lambda step: step.throttled_ns) or 0
    by_quota = throttled > waited / 2
    yield Found(
        f"{view.percent(cost)} of the {view.period} is lost because "
        + ("the container's quota stops the program" if by_quota else "the launching thread waits for a processor"),
        cost,
        basis="time the thread was ready and not running, by the operating system's count"
        if view.device is None
        else "of the device's idle time for the host's work, the share in which the thread was ready and not running",
        confidence="medium",
        share_at=None,
        figures=[
            limits.figure("share", share),
            view.ns_per_step("time lost", cost),
            *_figures(view, counts),
            Figure(f"throttled {view.per}", throttled // len(counts.steps), "ns"),
        ],
        remedy=_QUOTA if by_quota else _OTHERS,
        change=scaled_host_work(max(1 - cost / max(host_work_ns(view), 1), 0.0)),
    )


def _figures(view: View, counts: HostCounts) -> Iterator[Figure]:
    switches = counts.per_step(lambda step: step.involuntary_switches)
    pressure = counts.per_step(lambda step: step.pressure_ns)
    if switches is not None:
        yield Figure(f"times {view.a_step} it was preempted", switches, "count")
    if pressure is not None:
        yield Figure(f"tasks of the machine or container waited, {view.per}", pressure, "ns")
    cores = [step.core for step in counts.steps if step.core is not None]
    if len(cores) > 1:
        moves = sum(first != second for first, second in pairwise(cores))
        yield Figure("steps that ended on another core than the one before", moves, "count")
    clocks = [step.clock_mhz for step in counts.steps if step.clock_mhz]
    highest = view.program.process.get("processor_max_mhz")
    if clocks and isinstance(highest, (int, float)) and highest:
        yield Figure("clock as a share of the processor's highest", sum(clocks) / len(clocks) / highest, "share")


_OTHERS: Final = Remedy(
    "Find what else runs on these processors, and keep it away: stop it, lower its priority, or give this job "
    "processors of its own.",
    "top -H                                   # who runs\n"
    "renice +19 PROCESS                       # or let the others give way\n"
    "taskset -c 0-7 python train.py           # or keep to processors that are free",
)
_QUOTA: Final = Remedy(
    "The container's quota is used up before its period ends: raise it, or run fewer threads and loader workers.",
    "docker run --cpus 8 ...                  # Kubernetes: resources.limits.cpu\n"
    "torch.set_num_threads(4)                 # no more threads than the quota's processors",
)


RULE: Final = Rule(
    id="host-contention",
    title="The launching thread waits for a processor",
    thresholds={
        "share": Threshold(0.1, "share", "share of the {period} in which the thread was ready and did not run"),
        "steps": Threshold(3, "count", "counted steps needed for a judgement"),
    },
    check=check,
)
