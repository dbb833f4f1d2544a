"""How much memory a step needs, from what the trace recorded of it, and whether a device has that much.

What is needed is the most that was allocated at once; without a record of allocations the most that a run's telemetry
saw in use. A tenth of a device stays free: for the runtime's own context
(some hundred MiB), for what the allocator cannot use between blocks, and for work areas that libraries choose by the
device.
With another batch size the parameters, gradients and optimizer's state stay, and everything else grows with the batch,
the formula memory(b) = m * b + k of DeepView's batch size model (Yu et al., "Skyline", UIST 2020) with k told apart by
category.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import polars as pl

from stepscope.analysis.memory import DeviceMemory, alive_table, device_memories
from stepscope.analysis.memory_events import memory_levels
from stepscope.devices import DevicePeaks
from stepscope.program_facts import ModelFacts, ProgramFacts
from stepscope.trace import Trace
from stepscope.trace.telemetry import Telemetry

KEPT_FREE: Final = 0.1
"""Share of a device's memory that a step cannot have; as `stepscope batch-size` keeps free."""
_STAY: Final = ("parameter", "gradient", "optimizer_state", "before")
"""Categories of memory that do not grow with the batch."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a step needs of a device's memory.

    Attributes:
        bytes: the most that it has allocated at once; None where nothing tells.
        at_least: whether it needs more than that, because what was allocated before the recording is not known.
        note: where the figure comes from or why there is none, in a sentence.
    """

    bytes: int | None
    at_least: bool
    note: str

    def fits(self, device: DevicePeaks) -> bool | None:
        """Whether a device has as much, KEPT_FREE aside; None where that cannot be told."""
        if self.bytes is None or device.memory_bytes is None:
            return None
        has_room = self.bytes <= device.memory_bytes * (1 - KEPT_FREE)
        return None if has_room and self.at_least else has_room


def memory_need(
    trace: Trace, device: str | None, *, batch_factor: float = 1.0, sampled_bytes: int | None = None
) -> MemoryNeed:
    """What a step of the trace needs on another device.

    Args:
        device: the trace's, whose memory counts; None for a trace of a CPU.
        batch_factor: how many times as large the batch is.
        sampled_bytes: as `sampled_memory` tells it, for a trace that has no allocations.
    """
    wanted = "cpu" if device is None else device
    levels = memory_levels(trace).filter(pl.col("device") == wanted)
    if levels.is_empty() and sampled_bytes is not None:
        note = "the most of the device's memory that was in use while the program ran, its allocator's reserve included"
        grown = "; with the batch all of it is taken to grow" if batch_factor != 1.0 else ""
        return MemoryNeed(round(sampled_bytes * batch_factor), False, note + grown)
    if levels.is_empty():
        how = ": record with profile_memory=True" if trace.metadata.format == "kineto" else ""
        return MemoryNeed(None, False, f"memory was not recorded{how}")
    if batch_factor == 1.0:
        peak, constant = _most(levels), 0
    else:
        memory = next(each for each in device_memories(trace) if each.device == wanted)
        peak, constant = memory.peak_bytes, _constant_bytes(memory)
    program = trace.metadata.program or ProgramFacts()
    before = 0
    is_total = wanted != "cpu" and trace.memory.filter(device=wanted)["total_allocated"].null_count() == 0
    if not is_total and program.model is not None:
        before = _held_before(program.model)
    needed = round((peak - constant) * batch_factor) + constant + before
    at_least = not is_total and not before
    return MemoryNeed(needed, at_least, _note(is_total, bool(before), batch_factor))


def sampled_memory(telemetry: Telemetry, device: str | None) -> int | None:
    """The most of a device's memory in use by a run's telemetry; None where it has no samples of that device, or many.

    Args:
        device: as the trace calls it.
    """
    used = telemetry.samples.filter((pl.col("source") == "device") & (pl.col("name") == "memory_used_bytes"))
    used = used.filter(pl.col("value").is_finite() & pl.col("value").is_between(0, 2**62))
    mine = used.filter(pl.col("device") == device) if used["device"].n_unique() > 1 else used
    if device is None or mine.is_empty():
        return None
    return int(mine["value"].to_numpy().max())


def _most(levels: pl.DataFrame) -> int:
    return int(levels["allocated_bytes"].to_numpy().max())


def _constant_bytes(memory: DeviceMemory) -> int:
    """What was alive at the peak and does not grow with the batch; 0 where blocks were not told apart."""
    alive = alive_table(memory, "category") if memory.blocks.height else None
    if alive is None:
        return 0
    stays = alive.filter(pl.col("category").is_in(_STAY))["bytes"]
    return min(int(stays.sum()), memory.peak_bytes)


def _held_before(model: ModelFacts) -> int:
    """What the model and its optimizer held before the recording began."""
    parts = (model.parameter_bytes, model.buffer_bytes, model.optimizer_state_bytes)
    return sum(part for part in parts if part is not None)


def _note(is_total: bool, with_model: bool, batch_factor: float) -> str:
    text = "the most that was allocated at once"
    if not is_total:
        text += " while recording"
        text += (
            ", with what the model and its optimizer hold"
            if with_model
            else "; what was held before is not known and comes on top"
        )
    if batch_factor != 1.0:
        text += "; with the batch everything grows but parameters, gradients and the optimizer's state"
    return text
