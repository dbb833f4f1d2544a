"""# What it finds
The thread that runs the steps is ready to run but gets no processor, because of other programs or a container's quota.

# Why it costs time
A thread that launches work late leaves the device without work; on a CPU nothing is computed meanwhile. Each time the
thread is preempted it also loses its caches, and often its core.

# How it is measured
The operating system counts, for each recorded step, how long the thread was ready but waited for a processor
(`/proc/thread-self/schedstat`). With a device, the cost is that share of the device's idle time during the host's own
work. Loading data and waiting for the device do not count, because a sleeping thread is not ready.

Unless the program contends with itself, replays for other findings leave that time out: their savings and this one
do not overlap. If the program has more threads, loader workers or ranks than processors, or other programs used less
than what the thread did not get, the time counts for other findings as well.

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
    is_left_out = view.contention is not None
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
        remedy=_quota(view) if by_quota else _others(view),
        change=None if is_left_out else scaled_host_work(max(1 - cost / max(host_work_ns(view), 1), 0.0)),
        is_contention=is_left_out,
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


def _others(view: View) -> Remedy:
    usable = view.program.process_figure("usable_processors")
    those = "LIST" if usable is None else f"0-{usable - 1}" if usable > 1 else "0"
    return Remedy(
        "Find what else runs on these processors, and keep it away: stop it, lower its priority, or give this job "
        "processors of its own.",
        "top -H                                   # who runs\n"
        "renice +19 PROCESS                       # or let the others give way\n"
        f"{f'taskset -c {those} python train.py':<40} # or keep to those that are free",
    )


def _quota(view: View) -> Remedy:
    granted = view.program.process.get("processor_quota")
    quota = float(granted) if isinstance(granted, (int, float)) else None
    more, threads = (8, 4) if quota is None else (max(round(2 * quota), 2), max(int(quota), 1))
    return Remedy(
        "The container's quota is used up before its period ends: raise it, or run fewer threads and loader workers.",
        f"{f'docker run --cpus {more} ...':<40} # Kubernetes: resources.limits.cpu\n"
        f"{f'torch.set_num_threads({threads})':<40} # no more threads than the quota's processors",
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
