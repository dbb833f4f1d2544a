"""# What it finds
More compute threads than available processors.

# Why it costs time
An operator on the CPU is split into one piece per thread, and ends when the last piece does. With more threads than
processors some pieces wait for others to finish; each operator then costs several context switches, and the thread that
runs the steps sleeps most of the time.

# How it is measured
torch's threads times the ranks on the machine, compared with the processors that the process may use (affinity and the
container's quota). The cost is the time that the thread slept inside its operators, as counted by the operating system:
with one thread per processor it works on its own piece and hardly sleeps.

# Known false positives
Operators that wait for something else, such as collectives over the network, also make the thread sleep.

# What to do
Set the number of threads to the processors that the process may use, divided by the ranks on the machine.

# Reference
PyTorch, "Performance tuning guide" and "CPU threading"; OMP_NUM_THREADS.
"""

from __future__ import annotations

from typing import Final

from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.diagnosis.rules._waits import HOST_WORK, host_counts, host_work_ns, scaled_host_work


def check(view: View, limits: Limits) -> Answers:
    threads, usable = view.program.torch.get("threads"), view.program.process_figure("usable_processors")
    counts = host_counts(view)
    if type(threads) is not int or not usable or counts is None:
        return
    ranks = view.program.process_figure("local_world_size") or 1
    excess = limits["excess"]
    if threads < 2 or threads * ranks / usable <= excess or view.device is not None:
        return
    ran = counts.total(lambda step: step.thread_processor_ns)
    waited = counts.total(lambda step: step.thread_waiting_ns)
    if ran is None or waited is None:
        return
    # The thread may also sleep while it waits for data or synchronisation.
    work_ns = host_work_ns(view)
    elsewhere = max(view.length_ns - work_ns, 0)
    slept = max(counts.share(max(counts.length_ns - ran - waited, 0)) * view.length_ns - elsewhere, 0)
    if not limits.reached(slept):
        return
    wanted = max(usable // ranks, 1)
    yield Found(
        f"{threads * ranks} computing threads share {usable} processors, and the main thread sleeps "
        f"{view.percent(slept)} of the {view.period}",
        slept,
        basis="time the main thread slept within operators, by the operating system's count",
        confidence="low",
        share_at=3,
        figures=[
            Figure("computing threads", threads * ranks, "count"),
            Figure("processors for each rank", wanted, "count"),
            Figure("computing threads for each usable processor", threads * ranks / usable, "count", excess),
            Figure("torch's threads in each rank", threads, "count"),
            Figure("ranks on the machine", ranks, "count"),
            Figure("usable processors", usable, "count"),
            Figure(f"changes of thread {view.per}", counts.per_step(lambda step: step.context_switches) or 0, "count"),
            Figure(f"time waited for a processor {view.per}", waited / len(counts.steps), "ns"),
        ],
        remedy=Remedy(
            f"Use {wanted} {'thread' if wanted == 1 else 'threads'} in each rank, as many as it has processors; "
            "set it before the first operator.",
            f"torch.set_num_threads({wanted})\n# or, for every library: OMP_NUM_THREADS={wanted} python train.py\n"
            "# or, counted from the processors, ranks and workers that there are:\n"
            "from stepscope.remedies import set_thread_counts\nset_thread_counts(workers=...)",
            apply=(f"threads={wanted}",),
        ),
        where=view.locations(view.pieces_of(*HOST_WORK)),
        change=scaled_host_work(1 - min(slept / work_ns, 1.0)),
    )


RULE: Final = Rule(
    id="thread-oversubscription",
    title="More computing threads than processors",
    thresholds={
        "share": Threshold(0.05, "share", "share of the {period} that the thread slept"),
        "excess": Threshold(
            1.0, "count", "computing threads for each usable processor, above which there are too many"
        ),
    },
    check=check,
)
