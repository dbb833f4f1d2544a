"""What limits the steps on another device: the largest part of their replay's critical path.

    host               host work, and launches on their way to the device
    input              waits for batches, and copies of them to the device
    communication      waits for other ranks, and data on the way between them
    compute            device work whose arithmetic takes longer than its traffic, at the target's peaks
    memory bandwidth   other device work

Arithmetic and traffic of an operator decide which of the last two limits its work (Williams, Waterman and Patterson,
2009).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import polars as pl

from stepscope.analysis.blocks import memory_levels
from stepscope.analysis.idle import idle_time
from stepscope.analysis.memory import DeviceMemory, alive_table, device_memories
from stepscope.machine.devices import DevicePeaks
from stepscope.predict.step_replay import ReplayedStep
from stepscope.predict.trace_operations import Labels
from stepscope.trace import Trace
from stepscope.trace.program_facts import ProgramFacts
from stepscope.trace.telemetry import Telemetry
from stepscope.whatif.critical_path import critical_path
from stepscope.whatif.experiment import Experiment

LIMITS: Final = ("compute", "memory bandwidth", "host", "input", "communication")
Parts: TypeAlias = dict[tuple[str, str], float]  # nanoseconds by limit and cause

_GROUP: Final = {
    "compute": "device", "memory bandwidth": "device", "host": "host", "input": "host",
    "communication": "communication", "unknown": "unknown",
}  # fmt: skip
ON_HOST: Final = {"input": "input", "host_to_device_copy": "input", "communication": "communication"}
"""Host causes that are limits of their own."""
_OPEN: Final = ("unknown", "dependency", "untraced", "synchronisation")
"""Causes of idle time that do not say what was waited for."""
_HIDDEN: Final = ("copy_in", "copy_out", "copy_on_device", "communication")
_OF_WORK: Final = {"communication": "communication", "copy_in": "input", "copy_out": "host"}


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of a step."""

    name: str  # one of LIMITS
    share: float  # of the critical path, 0 to 1
    cause: str | None = None  # for the host limit, the cause with most of its time; None for others


def limit_of(experiment: Experiment, step: ReplayedStep, sides: Labels) -> Limit | None:
    """Find what limits a step; None where the trace does not show it.

    First the host, the device and communication are compared; then, on the host, input against every other cause, and
    on the device, compute against memory bandwidth.

    Args:
        step: the step as replayed, or with only its length and the device's busy time.
        sides: "compute" or "memory bandwidth" for each row of `device_work`.
    """
    if step.replay is None:
        return _without_replay(experiment, step, sides)
    path = critical_path(experiment, step.replay)
    return _largest(_parts(experiment, path, sides), max(int(path["duration_ns"].sum()), 1))


def _largest(parts: Parts, total_ns: float) -> Limit | None:
    groups: dict[str, float] = {}
    for (name, _), ns in parts.items():
        groups[_GROUP[name]] = groups.get(_GROUP[name], 0.0) + ns
    if not groups:
        return None
    group = max(sorted(groups), key=lambda name: groups[name])
    inside = {key: ns for key, ns in parts.items() if _GROUP[key[0]] == group}
    if group == "host":
        name, cause = max(sorted(inside), key=lambda key: inside[key])
        share = sum(ns for key, ns in inside.items() if key[0] == name) / total_ns
        return Limit(name, share, cause if name == "host" else None)
    if group == "unknown":
        return None
    sums = {name: sum(ns for key, ns in inside.items() if key[0] == name) for name, _ in inside}
    name = max(sorted(sums), key=lambda name: sums[name])
    return Limit(name, sums[name] / total_ns)


def _parts(experiment: Experiment, path: pl.DataFrame, sides: Labels) -> Parts:
    kinds = experiment.trace.device_work["kind"].to_list()
    parts: Parts = {}
    for ns, kind, cause, table, row in path.select("duration_ns", "kind", "cause", "table", "row").iter_rows():
        if kind == "host":
            key = ON_HOST.get(cause, "host"), str(cause or "untraced")
        elif kind == "launch_latency":
            key = "host", "launch_latency"
        elif kind == "wait":
            key = "unknown", ""
        elif table == "device_work":
            key = _OF_WORK.get(kinds[row], str(sides[row])), ""
        else:
            key = "communication", ""
        parts[key] = parts.get(key, 0.0) + ns
    return parts


def _without_replay(experiment: Experiment, step: ReplayedStep, sides: Labels) -> Limit | None:
    """Use the device's busy time, by side, and its measured idle time, by cause."""
    parts: Parts = {}
    works = experiment.works
    durations = experiment.graph.works.duration[works] * step.factors[works]
    kinds = experiment.trace.device_work["kind"].to_numpy()[works]
    names = np.array([_OF_WORK.get(kind, str(side)) for kind, side in zip(kinds, sides[works], strict=True)], np.str_)
    # Work that usually overlaps computation counts where computation is not most of it.
    own = np.isin(kinds, _HIDDEN, invert=True)
    own = own | (durations[own].sum() <= 0.5 * durations.sum())
    for name in np.unique(names[own]).tolist():
        share = durations[own & (names == name)].sum() / max(float(durations[own].sum()), 1.0)
        parts[name, ""] = step.device_ns * share
    idle_ns = max(step.step_ns - step.device_ns, 0.0)
    for cause, share in _idle_causes(experiment).items():
        unknown = cause in _OPEN
        parts["unknown" if unknown else ON_HOST.get(cause, "host"), cause] = idle_ns * share
    return _largest(parts, step.step_ns)


def _idle_causes(experiment: Experiment) -> dict[str, float]:
    idle = idle_time(experiment.trace, window=experiment.span, activity=experiment.activity)
    idle = idle.filter(pl.col("device") == experiment.device)
    sums = idle.group_by("cause").agg(pl.col("duration_ns").sum())
    total = max(int(sums["duration_ns"].sum()), 1)
    return {cause: ns / total for cause, ns in sums.iter_rows()}


KEPT_FREE: Final = 0.1  # share of a device's memory kept free, as in `stepscope batch-size`
_STAY: Final = ("parameter", "gradient", "optimizer_state", "before")
"""Memory categories that do not grow with the batch."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Device memory that a step needs."""

    bytes: int | None  # peak allocated bytes; None where unknown
    at_least: bool  # whether the need is larger, since allocations before the recording are unknown
    note: str  # source of the figure, or why it is missing, in a sentence

    def fits(self, device: DevicePeaks) -> bool | None:
        """Whether a device has enough memory, KEPT_FREE aside; None where unknown."""
        if self.bytes is None or device.memory_bytes is None:
            return None
        has_room = self.bytes <= device.memory_bytes * (1 - KEPT_FREE)
        return None if has_room and self.at_least else has_room


def memory_need(
    trace: Trace, device: str | None, *, batch_factor: float = 1.0, sampled_bytes: int | None = None
) -> MemoryNeed:
    """Memory that a step of the trace needs on another device.

    Args:
        device: the trace's device whose memory counts; None for a CPU trace.
        batch_factor: new batch size over the recorded one.
        sampled_bytes: from `sampled_memory`, for a trace without allocations.
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
        peak, constant = int(levels["allocated_bytes"].to_numpy().max()), 0
    else:
        memory = next(each for each in device_memories(trace) if each.device == wanted)
        peak, constant = memory.peak_bytes, _constant_bytes(memory)
    program = trace.metadata.program or ProgramFacts()
    before = 0
    is_total = wanted != "cpu" and trace.memory.filter(device=wanted)["total_allocated"].null_count() == 0
    if not is_total and program.model is not None:
        model = program.model
        parts = (model.parameter_bytes, model.buffer_bytes, model.optimizer_state_bytes)
        before = sum(part for part in parts if part is not None)
    needed = round((peak - constant) * batch_factor) + constant + before
    at_least = not is_total and not before
    return MemoryNeed(needed, at_least, _note(is_total, bool(before), batch_factor))


def sampled_memory(telemetry: Telemetry, device: str | None) -> int | None:
    """Peak memory in use on a device by a run's telemetry; None without samples of that device alone.

    Args:
        device: the device's name in the trace.
    """
    used = telemetry.samples.filter((pl.col("source") == "device") & (pl.col("name") == "memory_used_bytes"))
    used = used.filter(pl.col("value").is_finite() & pl.col("value").is_between(0, 2**62))
    chosen = used.filter(pl.col("device") == device) if used["device"].n_unique() > 1 else used
    if device is None or chosen.is_empty():
        return None
    return int(chosen["value"].to_numpy().max())


def _constant_bytes(memory: DeviceMemory) -> int:
    """Bytes alive at the peak that do not grow with the batch; 0 where blocks have no categories."""
    if not memory.blocks.height:
        return 0
    stays = alive_table(memory, "category").filter(pl.col("category").is_in(_STAY))["bytes"]
    return min(int(stays.sum()), memory.peak_bytes)


def _note(is_total: bool, with_model: bool, batch_factor: float) -> str:
    text = "the most that was allocated at once"
    if not is_total and with_model:
        text += " while recording, with what the model and its optimizer hold"
    elif not is_total:
        text += " while recording; what was held before is not known and comes on top"
    if batch_factor != 1.0:
        text += "; with the batch everything grows but parameters, gradients and the optimizer's state"
    return text
