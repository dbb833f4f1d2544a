"""# What it finds
A program that runs on processors far from its device, or that moves between the machine's NUMA nodes.

# Why it costs time
On a machine with several NUMA nodes each device is attached to one of them. Launches, copies and pinned buffers from
another node cross the link between the sockets, with higher latency and less bandwidth.

# How it is measured
The core on which each recorded step ended is compared with the node of the machine's cards; the rule also checks
whether the steps' cores belong to several nodes. The finding is a note, because one recording does not show what the
distance costs. It is reported only if the device is idle because of the host's work, or if copies from the host are
exposed.

# Known false positives
Machines with cards on several nodes: only steps on a node without any card are reported.

# What to do
Pin each rank to the processors of its device's node.

# Reference
NVIDIA Nsight Systems and the ROCm tuning guides recommend binding to the device's node; `nvidia-smi topo -m`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.diagnosis.rules._waits import host_counts, host_work_ns

_LARGEST_LIST: Final = 4096
_LARGEST: Final = 1 << 16
"""Largest processor number accepted; a damaged file may hold any number."""


def check(view: View, limits: Limits) -> Answers:
    counts, nodes = host_counts(view), _nodes(view)
    named = str(view.program.process.get("device_numa_nodes") or "")[:_LARGEST_LIST]
    devices = {int(one) for one in named.split(",") if one.isdecimal()}
    if counts is None or view.device is None or len(nodes) < 2 or not devices:
        return
    cores = [step.core for step in counts.steps if step.core is not None]
    found = (next((node for node, held in enumerate(nodes) if core in held), None) for core in cores)
    known = [node for node in found if node is not None]
    if not known:
        return
    far = sum(node not in devices for node in known) / len(known)
    most, limit = limits["steps"], limits["share"]
    suffers = view.share(host_work_ns(view) + view.exposed_ns(("copy_in",)))
    if not far or far < most or suffers < limit:
        return
    node = min(devices)
    yield Found(
        f"{far:.0%} of the steps ran on a memory node without the device",
        0,
        basis="one recording does not show what the distance costs",
        confidence="medium",
        severity="note",
        figures=[
            limits.figure("steps", far),
            limits.figure("share", suffers),
            Figure("nodes that the steps ran on", len(set(known)), "count"),
        ],
        remedy=Remedy(
            "Keep the process to the processors and the memory of its device's node.",
            f"numactl --cpunodebind={node} --membind={node} python train.py\n"
            "# with several ranks: torchrun --numa-binding=node ... (PyTorch 2.9 and later)",
        ),
    )


def _nodes(view: View) -> list[set[int]]:
    """The processors of each node, from the recorder's text "0-3,8;4-7"."""
    text = str(view.program.process.get("numa_processors") or "")[:_LARGEST_LIST]
    return [set(_processors(part)) for part in text.split(";")] if text else []


def _processors(text: str) -> Iterator[int]:
    for first, _, last in (one.strip().partition("-") for one in text.split(",")):
        last = last or first
        if first.isdecimal() and last.isdecimal():
            yield from range(int(first), min(int(last), _LARGEST) + 1)


RULE: Final = Rule(
    id="numa-misplacement",
    title="The program runs far from its device",
    thresholds={
        "steps": Threshold(0.5, "share", "steps that ended on a node without the device"),
        "share": Threshold(0.05, "share", "share of the {period} that the device waits for the host or its copies"),
    },
    check=check,
)
