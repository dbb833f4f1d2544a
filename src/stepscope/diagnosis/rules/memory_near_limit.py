"""# What it finds
A device whose memory is almost full, or was too small for a request.

# Why it costs time
Near the limit the next larger batch ends the run, and before that the allocator begins to return its cached memory and
request it again, which stops the device each time.

# How it is measured
The peak of reserved memory (of allocated memory where the reserved memory was not recorded) as a share of the device's
memory; and, in memory snapshots, the times at which a request failed.

# Known false positives
Programs that deliberately reserve nearly all memory and manage it themselves. Inference servers do for their caches;
of those that are recognised, full memory is not reported.

# What to do
Make the activations smaller (activation checkpointing, bf16 autocast, a smaller batch with gradient accumulation), and
hold nothing longer than needed (`zero_grad(set_to_none=True)`, no second copy of outputs).

# Reference
PyTorch's profiler plugin warned at 90 % of the device's memory; TraceML warns at 92 % and calls 97 % critical.
"""

from __future__ import annotations

from typing import Any, Final

from stepscope.analysis.blocks import out_of_memory
from stepscope.analysis.memory import DeviceMemory, alive_at, alive_table
from stepscope.diagnosis.finding import Interval, Location
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.diagnosis.rules._device import memory_locations, size_in_words

_HELD: Final = {"before": "allocated before the recording", "optimizer_state": "optimizer state"}
"""Categories of memory in words, where they differ."""


def check(view: View, limits: Limits) -> Answers:
    limit = limits["share"]
    failed = {row["device"]: row for row in out_of_memory(view.trace).iter_rows(named=True)}
    for memory in view.memories:
        if memory.device in failed:
            yield _failed(view, memory, failed[memory.device], limit)
        elif memory.device != "cpu" and memory.capacity_bytes:
            used = memory.reserved_bytes or memory.peak_bytes
            if used / memory.capacity_bytes >= limit and not view.engine.reserves:
                yield _near(view, memory, used, memory.capacity_bytes, limit)


def _near(view: View, memory: DeviceMemory, used: int, capacity: int, limit: float) -> Found:
    share = min(used / capacity, 1.0)
    return Found(
        f"device {memory.device} uses {size_in_words(used)} of its {size_in_words(capacity)}: "
        f"{size_in_words(max(capacity - used, 0))} are left",
        0,
        basis="costs no time as long as everything fits",
        confidence="high",
        severity="note",
        figures=[
            Figure("share of the device's memory in use at most", share, "share", limit),
            Figure("memory in use at most", used, "bytes"),
            Figure("memory there is", capacity, "bytes"),
            Figure("memory that is left", max(capacity - used, 0), "bytes"),
            *(
                Figure(f"of it {_HELD.get(name, name)}, at the peak", size, "bytes")
                for name, size in alive_table(memory, "category").head(3).select("category", "bytes").iter_rows()
            ),
        ],
        intervals=[Interval(memory.peak_ns, 0, "the peak")],
        remedy=_remedy(memory, trains=view.trains),
        where=memory_locations(alive_at(memory, memory.peak_row)),
    )


def _failed(view: View, memory: DeviceMemory, failure: dict[str, Any], limit: float) -> Found:
    at = max(int(memory.levels["start_ns"].search_sorted(failure["start_ns"], side="right")) - 1, 0)
    held, reserved = memory.levels.select("allocated_bytes", "reserved_bytes").row(at)
    sizes = {"asked for": failure["asked_bytes"], "held then": held, "held by the allocator then": reserved}
    figures = [Figure(f"memory {name}", size, "bytes") for name, size in sizes.items() if size is not None]
    if failure["free_bytes"] is not None:
        figures.append(Figure("memory the device had left", failure["free_bytes"], "bytes", failure["asked_bytes"]))
    in_use = Figure("times that memory could not be had", 1, "count", 1)
    if memory.capacity_bytes:
        share = min((reserved or held) / memory.capacity_bytes, 1.0)
        in_use = Figure("share of the device's memory in use then", share, "share", limit)
    figures.append(in_use)
    asking: tuple[Location, ...] = ()
    if failure["file"] is not None:
        asking = (Location(failure["file"], failure["line"], failure["function"] or "", 1.0, exact_line=True),)
    return Found(
        f"device {memory.device} ran out of memory: {size_in_words(failure['asked_bytes'])} were asked for while "
        f"{size_in_words(held)} were held",
        0,
        basis="ended the run, unless the program caught the error",
        confidence="high",
        severity="high",
        figures=figures,
        intervals=[Interval(failure["start_ns"], 0, "out of memory")],
        remedy=_remedy(memory, trains=view.trains),
        where=(*asking, *memory_locations(alive_at(memory, at), 2)),
        ends_run_in_ns=0,
    )


def _remedy(memory: DeviceMemory, *, trains: bool) -> Remedy:
    held = dict(alive_table(memory, "category").select("category", "bytes").iter_rows())
    largest = max(held, key=lambda name: held[name], default="")
    if largest in ("activation", "temporary", "input"):
        return Remedy(
            "Most of it holds results of the forward pass: compute some of them again in the backward pass, or halve "
            "them with 16-bit arithmetic.",
            "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)   # instead of x = block(x)",
        )
    if largest not in ("parameter", "gradient", "optimizer_state") and not (trains and largest == "before"):
        return Remedy(
            "Most of it was allocated before the recording, or for something that it does not show: record from the "
            "program's start, or take a snapshot, which knows each block's line.",
            "torch.cuda.memory._record_memory_history()           # before anything else\n"
            'torch.cuda.memory._dump_snapshot("memory.pickle")    # then: stepscope memory memory.pickle',
        )
    return Remedy(
        "Most of it is there in every step, as parameters and the optimizer's state are: shard them over devices, keep "
        "the state in 16 bits, or use an optimizer with less state.",
        "model = torch.distributed.fsdp.fully_shard(model)   # each rank keeps a part of it all",
    )


RULE: Final = Rule(
    id="memory-near-limit",
    title="The device's memory is almost full",
    thresholds={
        "share": Threshold(0.9, "share", "share of the device's memory that is in use at most"),
    },
    check=check,
    needs=("memory",),
)
