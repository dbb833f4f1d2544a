"""What a device's memory was used for: how much was held when, what was alive at the peak, who allocates how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.host import HostActivity
from stepscope.analysis.memory_blocks import (
    CATEGORIES,
    PLACE_SCHEMA,
    allocating_operators,
    block_categories,
    block_places,
    blocks,
    gathered,
    memory_devices,
    memory_levels,
)
from stepscope.analysis.steps import step_table
from stepscope.errors import UsageError
from stepscope.trace import Trace
from stepscope.trace.program_facts import ProgramFacts
from stepscope.trace.window import Times

_MOST_BYTES: Final = 1 << 62
GROUPINGS: Final[dict[str, tuple[str, ...]]] = {
    "category": ("category",),
    "line": ("file", "line", "function"),
    "module": ("module",),
    "operator": ("operator_name",),
}
"""What blocks can be grouped by, and the columns that takes."""


@dataclass(frozen=True)
class DeviceMemory:
    """One device's memory during a recording.

    Attributes:
        device: "cpu", or the device's number.
        capacity_bytes: how much the device, or the machine, has; None where that is not known.
        levels: as `stepscope.analysis.memory_blocks.memory_levels`, of this device.
        blocks: as `stepscope.analysis.memory_blocks.blocks`, of this device, with category, operator_name, operator_row
            (the operator that asked for the block; -1 for none), file, line, function and module; null where unknown.
        steps: the complete steps, as `step_table` gives them.
        program: what the recording knows of the model.
        is_total: whether levels are all of the memory in use; otherwise what was there before the recording is missing.
    """

    device: str
    capacity_bytes: int | None
    levels: pl.DataFrame
    blocks: pl.DataFrame
    steps: pl.DataFrame
    program: ProgramFacts
    is_total: bool

    @cached_property
    def peak_row(self) -> int:
        """The row of `levels` with the highest level, the first of several."""
        return int(self.levels["allocated_bytes"].arg_max() or 0)

    @property
    def peak_ns(self) -> int:
        """When most was allocated."""
        return int(self.levels["start_ns"][self.peak_row])

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated at once."""
        return int(self.levels["allocated_bytes"][self.peak_row])

    @property
    def reserved_at_peak_bytes(self) -> int | None:
        """What the allocator held of the device at the peak of what was allocated."""
        value = self.levels["reserved_bytes"][self.peak_row]
        return None if value is None else int(value)

    @property
    def reserved_bytes(self) -> int | None:
        """The most that the allocator held of the device; None where that was not recorded."""
        value = self.levels["reserved_bytes"].max()
        return None if value is None else int(value)  # type: ignore[arg-type]

    @property
    def fragmentation_bytes(self) -> int | None:
        """What the allocator held at the peak and nobody used."""
        reserved = self.reserved_at_peak_bytes
        return None if reserved is None else max(reserved - self.peak_bytes, 0)

    @property
    def fragmentation_share(self) -> float | None:
        """The same as a share of what was reserved, 0 to 1."""
        unused, reserved = self.fragmentation_bytes, self.reserved_at_peak_bytes
        return None if unused is None or not reserved else unused / reserved

    @property
    def step_count(self) -> int:
        """Number of complete steps; 1 where there are none."""
        return max(self.steps.height, 1)

    def in_steps(self, times: pl.Expr) -> pl.Expr:
        """Expression for which times lie in complete steps; all where there are none."""
        if self.steps.is_empty():
            return times.is_not_null()
        first = int(self.steps["start_ns"].to_numpy().min())
        last = int((self.steps["start_ns"] + self.steps["duration_ns"]).to_numpy().max())
        return times.is_between(first, last, closed="left")


def device_memories(
    trace: Trace, *, steps: pl.DataFrame | None = None, activity: HostActivity | None = None
) -> tuple[DeviceMemory, ...]:
    """The memory of each device that has memory events: accelerators before the CPU, those that held more first.

    Args:
        steps: as `step_table` gives them, if they were computed already.
        activity: as `host_activity` gives it, likewise.
    """
    devices = memory_devices(trace)
    if not devices:
        return ()
    steps = step_table(trace) if steps is None else steps
    first = int(steps["start_ns"].to_numpy().min()) if steps.height else None
    found = blocks(trace)
    rows = allocating_operators(trace, found["operator"].to_numpy())
    names = gathered(trace.operators.select(operator_name="name"), rows)
    found = found.with_columns(block_categories(trace, found, first), operator_row=pl.Series(rows, dtype=pl.Int64))
    found = pl.concat([found, names, block_places(trace, found, rows, activity)], how="horizontal")
    program = trace.metadata.program or ProgramFacts()
    levels, capacities = memory_levels(trace), {each.device: each.memory_bytes for each in trace.metadata.devices}
    unknown = dict(trace.memory.group_by("device").agg(pl.col("total_allocated").null_count()).iter_rows())
    host = program.process.get("memory_bytes")
    capacities["cpu"] = host if isinstance(host, int) else None
    return tuple(
        DeviceMemory(
            device=device,
            capacity_bytes=capacities.get(device),
            levels=levels.filter(pl.col("device") == device),
            blocks=found.filter(pl.col("device") == device),
            steps=steps.filter(pl.col("complete")),
            program=program,
            is_total=device != "cpu" and not unknown.get(device, 0),
        )
        for device in devices
    )


def alive_at(memory: DeviceMemory, row: int) -> pl.DataFrame:
    """The blocks that were alive after an event, the largest first; what no event tells of is one row more.

    Args:
        row: of `memory.levels`.

    Returns:
        Columns bytes, category, file, line, function, module, exact_line, operator_name; they add up to the level, or
        to more where the level is only a lower bound.
    """
    time = int(memory.levels["start_ns"][row])
    begun = pl.col("start_ns").is_null() | (pl.col("start_ns") <= time)
    columns = ["bytes", "category", *PLACE_SCHEMA, "operator_name"]
    rows = memory.blocks.filter(begun & (pl.col("end_ns").is_null() | (pl.col("end_ns") > time))).select(columns)
    known = int(rows["bytes"].cast(pl.Int128).sum())  # damaged sizes can add up to more than 64 bits
    missing = min(int(memory.levels["allocated_bytes"][row]) - known, _MOST_BYTES)
    if missing > 0 and memory.blocks.height:
        rows = pl.concat([rows, _before(memory, missing, rows)], how="diagonal_relaxed").select(columns)
    return rows.sort("bytes", descending=True, maintain_order=True)


def _before(memory: DeviceMemory, bytes: int, rows: pl.DataFrame) -> pl.DataFrame:
    """What was there before the recording, told apart by the model's sizes where the recording has them."""
    model = memory.program.model
    parts: dict[str, int] = {}
    if model is not None and memory.device != "cpu":
        seen = dict(rows.group_by("category").agg(pl.col("bytes").sum()).iter_rows())
        wanted = {
            "parameter": (model.parameter_bytes or 0) + (model.buffer_bytes or 0),
            "optimizer_state": model.optimizer_state_bytes or 0,
        }
        for category, size in wanted.items():
            parts[category] = max(min(size - seen.get(category, 0), bytes - sum(parts.values())), 0)
    parts["before"] = bytes - sum(parts.values())
    found = [{"bytes": size, "category": category} for category, size in parts.items() if size > 0]
    return pl.DataFrame(found, schema={"bytes": pl.Int64, "category": pl.String})


def alive_table(memory: DeviceMemory, by: str = "category") -> pl.DataFrame:
    """What was alive at the peak: the grouping's columns, bytes, share (of the level, 0 to 1), blocks; largest first.

    Raises:
        UsageError: an unknown grouping.
    """
    columns = _columns(by)
    rows = alive_at(memory, memory.peak_row)
    table = rows.group_by(columns, maintain_order=True).agg(bytes=pl.col("bytes").sum(), blocks=pl.len())
    share = (pl.col("bytes") / max(memory.peak_bytes, 1)).clip(0, 1)
    return table.with_columns(share=share).select(*columns, "bytes", "share", "blocks").sort(
        ["bytes", *columns], descending=[True, *[False] * len(columns)]
    )  # fmt: skip


def allocation_table(memory: DeviceMemory, by: str = "operator") -> pl.DataFrame:
    """What was allocated in the complete steps, or in the whole recording where there are none; the most first.

    Returns:
        The grouping's columns, then calls (of operators that allocated; blocks where no operators were recorded),
        calls_per_step, per_call_bytes, per_step_bytes, allocated_bytes, largest_bytes (of one block), peak_bytes (alive
        at the peak).

    Raises:
        UsageError: an unknown grouping.
    """
    columns = _columns(by)
    rows = memory.blocks.filter(pl.col("row").is_not_null() & memory.in_steps(pl.col("start_ns")))
    caller = (
        pl.when(pl.col("operator_row") >= 0).then(pl.col("operator_row")).otherwise(-1 - pl.col("row").cast(pl.Int64))
    )
    table = rows.group_by(columns).agg(
        calls=caller.n_unique(), allocated_bytes=pl.col("bytes").sum(), largest_bytes=pl.col("bytes").max()
    )
    peak = alive_table(memory, by).select(*columns, peak_bytes="bytes")
    table = table.join(peak, on=columns, how="full", coalesce=True, nulls_equal=True)
    table = table.with_columns(pl.col("calls", "allocated_bytes", "largest_bytes", "peak_bytes").fill_null(0))
    count = memory.step_count
    return table.select(
        *columns,
        "calls",
        calls_per_step=pl.col("calls") / count,
        per_call_bytes=pl.col("allocated_bytes") // pl.max_horizontal(pl.col("calls"), 1),
        per_step_bytes=pl.col("allocated_bytes") // count,
        allocated_bytes="allocated_bytes",
        largest_bytes="largest_bytes",
        peak_bytes="peak_bytes",
    ).sort(["allocated_bytes", "peak_bytes", *columns], descending=[True, True, *[False] * len(columns)])


def _columns(by: str) -> Sequence[str]:
    if by not in GROUPINGS:
        raise UsageError(f"memory can be grouped by {', '.join(GROUPINGS)}, not by {by!r}")
    return GROUPINGS[by]


def category_levels(memory: DeviceMemory, times: Sequence[int]) -> pl.DataFrame:
    """What each category held at these moments: columns start_ns, category, bytes; what is unknown counts as before."""
    asked = np.asarray(times, np.int64)
    levels = memory.levels
    at = np.searchsorted(levels["start_ns"].to_numpy(), asked, side="right") - 1
    total = np.where(at >= 0, levels["allocated_bytes"].to_numpy()[np.maximum(at, 0)], 0)
    held = {name: _held(memory.blocks.filter(pl.col("category") == name), asked) for name in CATEGORIES}
    held["before"] = held["before"] + np.maximum(total - np.sum(list(held.values()), axis=0), 0)
    return pl.concat(
        pl.DataFrame({"start_ns": asked, "category": [name] * len(asked), "bytes": bytes})
        for name, bytes in held.items()
    )


def _held(blocks: pl.DataFrame, times: Times) -> Times:
    """Bytes of blocks alive at each of these moments; shape (n,)."""
    begin = blocks["start_ns"].fill_null(np.iinfo(np.int64).min).to_numpy()
    size = blocks["bytes"].to_numpy()
    order = np.argsort(begin, kind="stable")
    begun: Times = np.concatenate([[0], np.cumsum(size[order])])[np.searchsorted(begin[order], times, side="right")]
    ending = blocks.filter(pl.col("end_ns").is_not_null()).sort("end_ns")
    ended: Times = np.concatenate([[0], np.cumsum(ending["bytes"].to_numpy())])
    return begun - ended[np.searchsorted(ending["end_ns"].to_numpy(), times, side="right")]
