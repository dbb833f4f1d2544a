"""# What it finds
Memory that grows with every step because something allocated in each step is never freed.

# Why it costs time
It costs no time until the memory is full; then the run ends with an out-of-memory error, often hours after it began.
The most common cause is a list, a running sum or a logger that keeps tensors with their graphs: as long as the result
of a forward pass is held, so is everything its backward pass would need.

# How it is measured
Blocks that were allocated in a step and were still held at the end of the recording, at least two steps later. It is a
leak if every such step left something behind and memory at the end of the steps rises too. The device's remaining
memory (the machine's for the CPU), divided by the growth, gives how long the run can continue. Results of the forward
pass in blocks of more than 512 bytes are always reported, since they hold graphs; other growth only if 100,000 steps
would fill a tenth of the memory. Before it records, `stepscope run` also follows the autograd graphs of the variables
of running functions: a graph that grows by a step's nodes and reaches back into the step before is kept. Programs that
generate are not judged by the tokens of one answer, whose cache grows until it ends. Programs that
make modules in each step are not judged: to name their calls, `stepscope run` keeps them until the recording ends.

# Known false positives
Results that are collected on purpose, such as predictions over a whole data set, or a buffer that is still being
filled. Blocks in reference cycles are held until Python collects garbage; if no recorded step did so, they look like a
leak. A loss that is kept after its backward pass holds one number and no activations, which is too little to
report.

# What to do
Keep numbers, not tensors: `loss.item()` or `loss.detach()`; compute what needs no gradient under `torch.no_grad()`.

# Reference
PyTorch's FAQ, "My model reports out of memory": do not accumulate history across your training loop.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.analysis.memory import DeviceMemory, MemoryGrowth, memory_growth
from stepscope.analysis.serving import is_within_an_answer
from stepscope.diagnosis.finding import Location, Severity
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.diagnosis.rules._device import memory_locations, size_in_words, time_in_words
from stepscope.trace.program_facts import KeptGraphFacts

_HOUR_NS: Final = 3_600 * 10**9
_SEVERITIES: Final[tuple[tuple[int, Severity], ...]] = (
    (_HOUR_NS, "high"),
    (24 * _HOUR_NS, "medium"),
    (7 * 24 * _HOUR_NS, "low"),
)
"""Time until memory is full -> severity of the leak; a slower leak is a note."""
_HORIZON: Final = 100_000
"""Steps of a long run."""
_NOTICED: Final = 0.1
"""Share of the memory that a long run must lose, unless graphs are kept."""
_OF_A_NUMBER: Final = 512
"""Largest block of a single number: devices give no smaller ones."""


_KEEP_NUMBERS: Final = Remedy(
    "Results of the forward pass made on this line are still held steps later. Look for what keeps the tensor "
    "that comes of it, such as a list, a running sum or a logger, and keep its number instead.",
    "history.append(loss.item())      # or loss.detach(); not loss, which holds its whole graph\n"
    "with torch.no_grad():            # around what needs no gradient, such as an evaluation\n"
    "    loss = criterion(model(inputs), targets)",
)


def check(view: View, limits: Limits) -> Answers:
    if any(made.kind == "module" for made in view.program.made):
        return
    if not view.trains and is_within_an_answer(view.begin_in_span(view.trace.operators)):
        return
    found = []
    for memory in view.memories:
        growth = memory_growth(memory)
        if growth is not None:
            found += list(_weighed(view, limits, memory, growth))
    yield from found
    if not found:
        yield from (_kept_graph(view, kept) for kept in view.program.kept_graphs)


def _weighed(view: View, limits: Limits, memory: DeviceMemory, growth: MemoryGrowth) -> Answers:
    least, share, steps = (limits[name] for name in ("bytes", "share", "steps"))
    leak = growth.leak_bytes
    part = leak / max(memory.peak_bytes, 1)
    if len(growth.kept_bytes) < max(steps, 1) or leak < max(least, 1) or part < share:
        return
    if not _keeps_graphs(growth.accumulated, least) and leak * _HORIZON < _NOTICED * (memory.capacity_bytes or 0):
        return
    ends_ns = None
    if memory.capacity_bytes is not None:
        used = max(int(memory.levels["allocated_bytes"][-1]), memory.reserved_bytes or 0)
        ends_ns = max(memory.capacity_bytes - used, 0) // leak * view.step_ns
    figures = [
        Figure("memory that each step leaves behind", leak, "bytes", least),
        Figure("the same as a share of the peak", part, "share", share),
        Figure("steps that left something behind", len(growth.kept_bytes), "count", steps),
        Figure("blocks left behind per step", float(growth.accumulated["blocks_per_step"].sum()), "count"),
        Figure("memory at the end of the first step", int(growth.level_bytes[0]), "bytes"),
        Figure("memory at the end of the last step", int(growth.level_bytes[-1]), "bytes"),
    ]
    if memory.capacity_bytes is not None and ends_ns is not None:
        figures.append(Figure("memory there is", memory.capacity_bytes, "bytes"))
        figures.append(Figure("time until it is full", ends_ns, "ns"))
    found = (name for limit, name in _SEVERITIES if ends_ns is not None and ends_ns <= limit)
    severity: Severity = next(found, "note")
    whose = "the host's" if memory.device == "cpu" else f"device {memory.device}'s"
    full = "" if ends_ns is None else f", which is full after {time_in_words(ends_ns)} more"
    yield Found(
        f"{whose} memory grows by {size_in_words(leak)} every step{full}",
        0,
        basis="costs no time until the memory is full, and then ends the run",
        confidence="high" if len(growth.kept_bytes) >= 2 * steps else "medium",
        severity=severity,
        figures=figures,
        remedy=_remedy(growth.accumulated),
        where=memory_locations(growth.accumulated.with_columns(bytes=pl.col("bytes_per_step"))),
        ends_run_in_ns=None if severity == "note" else ends_ns,
    )


def _kept_graph(view: View, kept: KeptGraphFacts) -> Found:
    """A kept graph that the memory does not show: after its backward pass it holds nodes but no activations."""
    return Found(
        f"the variable {kept.name} keeps the autograd graph of every step: {kept.nodes:,} nodes more each time",
        0,
        basis="costs no time until the memory is full, and then ends the run",
        confidence="high",
        severity="note",
        figures=[Figure("autograd nodes that each step adds", kept.nodes, "count", 1)],
        remedy=_KEEP_NUMBERS,
        where=_changed_at(view, kept),
    )


def _changed_at(view: View, kept: KeptGraphFacts) -> tuple[Location, ...]:
    """The lines that ran and bind or change a variable."""
    mine = [each for each in view.program.bindings
            if (each.file, each.function, each.name) == (kept.file, kept.line, kept.name)]  # fmt: skip
    places = [
        place
        for place in view.attribution.places
        if place.file == kept.file and any(each.first <= place.line <= each.last for each in mine)
    ]
    return tuple(Location(each.file, each.line, each.function, 1.0, exact_line=True) for each in places[:1])


def _keeps_graphs(accumulated: pl.DataFrame, least: float) -> bool:
    """Whether results of the forward pass are kept in blocks larger than those of single numbers."""
    size = pl.col("bytes_per_step") / pl.col("blocks_per_step")
    kept = accumulated.filter((pl.col("category") == "activation") & (size > _OF_A_NUMBER))
    return int(kept["bytes_per_step"].sum()) >= max(least, 1)


def _remedy(accumulated: pl.DataFrame) -> Remedy:
    kept = accumulated["category"][0] if accumulated.height else ""
    if kept == "activation":
        return _KEEP_NUMBERS
    if kept == "input":
        return Remedy(
            "Batches made on this line are still held steps later. Look for a list or cache that keeps them.",
            "seen.append(batch_index)         # not the batch; or collections.deque(maxlen=...)",
        )
    return Remedy(
        "Tensors made on this line are still held steps later. Look for a list, cache or attribute that keeps them.",
        "cache = collections.deque(maxlen=100)   # what is older is given back",
    )


RULE: Final = Rule(
    id="memory-growth",
    title="Memory grows with every step",
    thresholds={
        "bytes": Threshold(4096, "bytes", "growth per step that is worth reporting"),
        "share": Threshold(0.001, "share", "growth per step as a share of the memory at the peak"),
        "steps": Threshold(3, "count", "steps that must have left something behind"),
    },
    check=check,
    needs=("memory",),
)
