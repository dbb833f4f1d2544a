"""# What it finds
Memory that the allocator holds but cannot use, because its free blocks are too small or scattered, while little memory
is left.

# Why it costs time
It costs nothing as long as memory is left. Near the limit the allocator must return its blocks to the driver, which
stops the device, or the run ends with an out-of-memory error although enough memory is free in total.

# How it is measured
Memory that the allocator had reserved but not allocated at the peak of allocated memory, if it had reserved most of the
device's memory; and, in memory snapshots, requests that failed although that much memory was reserved and unused.

# Known false positives
An earlier step that needed more, such as a first step that searches for fast kernels: its memory is still reserved and
can be used.

# What to do
Let the allocator grow its segments (`expandable_segments`), or make all batches the same size; avoid `empty_cache()` in
a loop.

# Reference
PyTorch, "CUDA semantics", memory management: PYTORCH_CUDA_ALLOC_CONF. TraceML warns when reserved memory is twice the
allocated memory and 30 % of the device.
"""

from __future__ import annotations

from typing import Final

from stepscope.analysis.blocks import out_of_memory
from stepscope.analysis.memory import DeviceMemory, alive_at
from stepscope.diagnosis.finding import Interval
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.diagnosis.rules._device import memory_locations, size_in_words

_SETTING: Final = "PYTORCH_CUDA_ALLOC_CONF"


def check(view: View, limits: Limits) -> Answers:
    failed = {row["device"]: row for row in out_of_memory(view.trace).iter_rows(named=True)}
    for memory in view.memories:
        row, asked = memory.peak_row, None
        if memory.device in failed:
            asked = int(failed[memory.device]["asked_bytes"] or 0)
            begin = failed[memory.device]["start_ns"]
            row = max(int(memory.levels["start_ns"].search_sorted(begin, side="right")) - 1, 0)
        yield from _weighed(view, limits, memory, row, asked)


def _weighed(view: View, limits: Limits, memory: DeviceMemory, row: int, asked: int | None) -> Answers:
    held, reserved = memory.levels.select("allocated_bytes", "reserved_bytes").row(row)
    if not reserved or memory.device == "cpu":
        return
    unused = max(reserved - held, 0)
    part, of_device = unused / reserved, reserved / memory.capacity_bytes if memory.capacity_bytes else None
    limit, full = (limits[name] for name in ("share", "reserved"))
    too_small = asked is not None and 0 < asked <= unused
    short = of_device is not None and of_device >= full
    if part < limit or unused == 0 or not (too_small or short):
        return
    figures = [
        Figure("share of the reserved memory that was unused", part, "share", limit),
        Figure("memory held by the allocator", reserved, "bytes"),
        Figure("memory in use", held, "bytes"),
        Figure("memory in pieces that nobody uses", unused, "bytes"),
    ]
    if of_device is not None:
        figures.append(
            Figure("share of the device's memory that the allocator held", min(of_device, 1.0), "share", full)
        )
    if asked is not None:
        figures.append(Figure("memory asked for in one piece", asked, "bytes"))
    failed = f", and a request for {size_in_words(asked)} failed" if too_small and asked is not None else ""
    yield Found(
        f"{size_in_words(unused)} of the {size_in_words(reserved)} that the allocator holds of device {memory.device} "
        f"are in pieces that nobody uses{failed}",
        0,
        basis="costs no time as long as there is other memory",
        confidence="medium",
        severity="note",
        figures=figures,
        intervals=[Interval(int(memory.levels["start_ns"][row]), 0, "most was in use")],
        remedy=_remedy(view),
        where=memory_locations(alive_at(memory, row)),
    )


def _remedy(view: View) -> Remedy:
    setting = view.program.environment.get(_SETTING) or view.program.environment.get("PYTORCH_ALLOC_CONF") or ""
    if "expandable_segments:True" in setting:
        return Remedy(
            "Segments can grow already: give all batches the same shape, so that the same blocks fit every step.",
            "batch = pad_to(batch, length=512)   # one of few lengths instead of as many as there are batches",
        )
    return Remedy(
        "Let the allocator grow its segments instead of adding others.",
        f"{_SETTING}=expandable_segments:True python train.py",
    )


RULE: Final = Rule(
    id="memory-fragmentation",
    title="Reserved memory cannot be used",
    thresholds={
        "share": Threshold(0.2, "share", "share of the reserved memory that is unused at the peak"),
        "reserved": Threshold(0.7, "share", "share of the device's memory that the allocator holds"),
    },
    check=check,
    needs=("memory",),
)
