"""Use of a device's memory: the level over time, the blocks alive at the peak, and allocations by place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.attribution import Attribution
from stepscope.analysis.blocks import (
    CATEGORIES,
    PLACE_SCHEMA,
    allocating_operators,
    allocator_table,
    block_categories,
    block_places,
    block_regions,
    blocks,
    contradictory_totals,
    memory_devices,
    memory_levels,
    out_of_memory,
)
from stepscope.analysis.steps import span_of, step_table
from stepscope.errors import UsageError
from stepscope.trace import Trace
from stepscope.trace.model import Displayed
from stepscope.trace.nesting import conformed, gathered
from stepscope.trace.program_facts import ProgramFacts
from stepscope.trace.window import Times

_MOST_BYTES: Final = 1 << 62
GROUPINGS: Final[dict[str, tuple[str, ...]]] = {
    "category": ("category",),
    "line": ("file", "line", "function"),
    "module": ("module",),
    "operator": ("operator_name",),
    "region": ("region",),
}
"""Groupings of blocks, and the columns that each takes."""


@dataclass(frozen=True)
class DeviceMemory:
    """One device's memory during a recording."""

    device: str  # "cpu", or the device's index
    capacity_bytes: int | None  # total memory of the device or machine; None where unknown
    levels: pl.DataFrame  # as `stepscope.analysis.blocks.memory_levels`, of this device
    # as `stepscope.analysis.blocks.blocks`, of this device, with category, operator_name, operator_row (the
    # allocating operator; -1 for none), file, line, function, module and region (the innermost annotation
    # around the allocation); null where unknown
    blocks: pl.DataFrame
    steps: pl.DataFrame  # the complete steps, as from `step_table`
    program: ProgramFacts  # recorded facts about the model
    # whether levels include all memory in use, also that from before the recording
    is_total: bool
    # recorded as allocated and as reserved, in bytes, where the first is more: neither is used
    contradiction: tuple[int, int] | None = None

    @cached_property
    def peak_row(self) -> int:
        """Row of `levels` with the highest level, the first of several."""
        return int(self.levels["allocated_bytes"].arg_max() or 0)

    @property
    def peak_ns(self) -> int:
        """Time of the highest level."""
        return int(self.levels["start_ns"][self.peak_row])

    @property
    def peak_bytes(self) -> int:
        """Highest level of allocated memory."""
        return int(self.levels["allocated_bytes"][self.peak_row])

    @property
    def reserved_at_peak_bytes(self) -> int | None:
        """Memory held by the allocator at the peak of allocated memory."""
        value = self.levels["reserved_bytes"][self.peak_row]
        return None if value is None else int(value)

    @property
    def reserved_bytes(self) -> int | None:
        """Most memory held by the allocator; None where not recorded."""
        value = self.levels["reserved_bytes"].max()
        return None if value is None else int(value)  # type: ignore[arg-type]

    @property
    def fragmentation_bytes(self) -> int | None:
        """Memory held by the allocator at the peak, but not in use."""
        reserved = self.reserved_at_peak_bytes
        return None if reserved is None else max(reserved - self.peak_bytes, 0)

    @property
    def fragmentation_share(self) -> float | None:
        """Fragmentation as a share of the reserved memory, 0 to 1."""
        unused, reserved = self.fragmentation_bytes, self.reserved_at_peak_bytes
        return None if unused is None or not reserved else unused / reserved

    @property
    def step_count(self) -> int:
        """Number of complete steps; 1 where there are none."""
        return max(self.steps.height, 1)

    def in_steps(self, times: pl.Expr) -> pl.Expr:
        """Expression for times inside complete steps; always true without steps."""
        span = span_of(self.steps)
        return times.is_not_null() if span is None else times.is_between(span.start_ns, span.end_ns, closed="left")


def device_memories(
    trace: Trace, *, steps: pl.DataFrame | None = None, attribution: Attribution | None = None
) -> tuple[DeviceMemory, ...]:
    """Memory of each device with memory events: accelerators before the CPU, higher peaks first."""
    devices = memory_devices(trace)
    if not devices:
        return ()
    steps = step_table(trace) if steps is None else steps
    first = int(steps["start_ns"].to_numpy().min()) if steps.height else None
    found = blocks(trace)
    rows = allocating_operators(trace, found["operator"].to_numpy())
    names = gathered(trace.operators.select(operator_name="name"), rows)
    found = found.with_columns(block_categories(trace, found, first), operator_row=pl.Series(rows, dtype=pl.Int64))
    places = block_places(trace, found, rows, attribution)
    found = pl.concat([found, names, places, block_regions(trace, found)], how="horizontal")
    program = trace.metadata.program or ProgramFacts()
    levels, capacities = memory_levels(trace), {each.device: each.memory_bytes for each in trace.metadata.devices}
    unknown = dict(trace.memory.group_by("device").agg(pl.col("total_allocated").null_count()).iter_rows())
    host = program.process.get("memory_bytes")
    capacities["cpu"] = host if isinstance(host, int) else None
    contradictory = contradictory_totals(trace)
    return tuple(
        DeviceMemory(
            device=device,
            capacity_bytes=capacities.get(device),
            levels=levels.filter(pl.col("device") == device),
            blocks=found.filter(pl.col("device") == device),
            steps=steps.filter(pl.col("complete")),
            program=program,
            is_total=device != "cpu" and not unknown.get(device, 0) and device not in contradictory,
            contradiction=contradictory.get(device),
        )
        for device in devices
    )


def alive_at(memory: DeviceMemory, row: int) -> pl.DataFrame:
    """Blocks alive after an event, largest first; memory from before the recording is one more row.

    Args:
        row: of `memory.levels`.

    Returns:
        Columns bytes, category, file, line, function, module, exact_line, operator_name, region, start_ns (null: from
        before the recording) and end_ns (null: not freed while recording); they add up to the level, or to more where
        the level is only a lower bound.
    """
    time = int(memory.levels["start_ns"][row])
    begun = pl.col("start_ns").is_null() | (pl.col("start_ns") <= time)
    columns = ["bytes", "category", *PLACE_SCHEMA, "operator_name", "region", "start_ns", "end_ns"]
    rows = memory.blocks.filter(begun & (pl.col("end_ns").is_null() | (pl.col("end_ns") > time))).select(columns)
    known = int(rows["bytes"].cast(pl.Int128).sum())  # damaged sizes can add up to more than 64 bits
    missing = min(int(memory.levels["allocated_bytes"][row]) - known, _MOST_BYTES)
    if missing > 0 and memory.blocks.height:
        rows = pl.concat([rows, _before(memory, missing, rows)], how="diagonal_relaxed").select(columns)
    return rows.sort("bytes", descending=True, maintain_order=True)


def _before(memory: DeviceMemory, bytes: int, rows: pl.DataFrame) -> pl.DataFrame:
    """Memory from before the recording, divided by the model's sizes where known."""
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
    """Memory alive at the peak: the grouping's columns, bytes, share (of the level, 0 to 1), blocks; largest first.

    Raises:
        UsageError: the grouping is unknown.
    """
    columns = _columns(by)
    rows = alive_at(memory, memory.peak_row)
    table = rows.group_by(columns, maintain_order=True).agg(bytes=pl.col("bytes").sum(), blocks=pl.len())
    share = (pl.col("bytes") / max(memory.peak_bytes, 1)).clip(0, 1)
    return table.with_columns(share=share).select(*columns, "bytes", "share", "blocks").sort(
        ["bytes", *columns], descending=[True, *[False] * len(columns)]
    )  # fmt: skip


def allocation_table(memory: DeviceMemory, by: str = "operator") -> pl.DataFrame:
    """Allocations in the complete steps, or in the whole recording without steps; most bytes first.

    Returns:
        The grouping's columns, then calls (of operators that allocated; blocks where no operators were recorded),
        calls_per_step, per_call_bytes, per_step_bytes, allocated_bytes, largest_bytes (of one block), peak_bytes (alive
        at the peak).

    Raises:
        UsageError: the grouping is unknown.
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
    """Bytes of each category at these times: columns start_ns, category, bytes; unknown memory counts as before."""
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


def levels_by(memory: DeviceMemory, times: Sequence[int], by: str, most: int) -> dict[str, Times]:
    """Bytes of each group at these times, shape (n,): those that hold most at the peak, and "" for all others.

    Groups of lines are named FILE:LINE; blocks without a known group, and memory from before, are among the others.

    Raises:
        UsageError: the grouping is unknown.
    """
    if by == "category":
        levels = category_levels(memory, times).partition_by("category", as_dict=True, maintain_order=True)
        return {str(name): rows["bytes"].to_numpy() for (name,), rows in levels.items()}
    columns, asked = _columns(by), np.asarray(times, np.int64)
    name = pl.concat_str([pl.col(each).cast(pl.String) for each in columns[:2]], separator=":")
    blocks = memory.blocks.with_columns(group=name)
    largest = alive_at(memory, memory.peak_row).with_columns(group=name).drop_nulls("group")
    kept = largest.group_by("group").agg(pl.col("bytes").sum()).sort("bytes", "group", descending=[True, False])
    found = {each: _held(blocks.filter(pl.col("group") == each), asked) for each in kept["group"].head(most)}
    at = np.maximum(np.searchsorted(memory.levels["start_ns"].to_numpy(), asked, side="right") - 1, 0)
    total = memory.levels["allocated_bytes"].to_numpy()[at]
    return {"": np.maximum(total - np.sum(list(found.values()), axis=0, dtype=np.int64), 0), **found}


def _held(blocks: pl.DataFrame, times: Times) -> Times:
    """Bytes of blocks alive at each of these times; shape (n,)."""
    begin = blocks["start_ns"].fill_null(np.iinfo(np.int64).min).to_numpy()
    size = blocks["bytes"].to_numpy()
    order = np.argsort(begin, kind="stable")
    begun: Times = np.concatenate([[0], np.cumsum(size[order])])[np.searchsorted(begin[order], times, side="right")]
    ending = blocks.filter(pl.col("end_ns").is_not_null()).sort("end_ns")
    ended: Times = np.concatenate([[0], np.cumsum(ending["bytes"].to_numpy())])
    return begun - ended[np.searchsorted(ending["end_ns"].to_numpy(), times, side="right")]


_UNSETTLED: Final = 2
"""Last steps whose blocks may still be freed: gradients, the loss and the batch live until the next step."""

ACCUMULATED_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    **PLACE_SCHEMA,
    "category": pl.String,
    "bytes_per_step": pl.Int64,
    "blocks_per_step": pl.Float64,
}


@dataclass(frozen=True)
class MemoryGrowth:
    """Development of a device's memory over the steps.

    Attributes:
        level_bytes: level at the end of each complete step; shape (steps,).
        slope_bytes: per step, the median slope between all pairs of steps (Theil and Sen): robust against single steps.
        kept_bytes: for each step but the last two, bytes allocated in it and never freed; shape (steps - 2,).
        accumulated: places that allocated those; columns as in ACCUMULATED_SCHEMA, largest first.
    """

    level_bytes: Times
    slope_bytes: float
    kept_bytes: Times
    accumulated: pl.DataFrame

    @property
    def leak_bytes(self) -> int:
        """Bytes kept per step; 0 unless each step keeps some and the level rises.

        A cache that fills up keeps memory of its first steps only; one of limited size frees as much as it allocates.
        """
        if not len(self.kept_bytes) or self.kept_bytes.min() <= 0 or self.slope_bytes <= 0:
            return 0
        return int(min(float(np.median(self.kept_bytes)), self.slope_bytes))


def memory_growth(memory: DeviceMemory) -> MemoryGrowth | None:
    """Memory growth over the complete steps; None with fewer than two."""
    steps = memory.steps.sort("start_ns")
    if steps.height < 2:
        return None
    start = steps["start_ns"].to_numpy()
    end = start + steps["duration_ns"].to_numpy()
    at = np.searchsorted(memory.levels["start_ns"].to_numpy(), end, side="right") - 1
    level = np.where(at >= 0, memory.levels["allocated_bytes"].to_numpy()[np.maximum(at, 0)], 0)
    settled = max(steps.height - _UNSETTLED, 0)
    left = memory.blocks.filter(
        (pl.col("start_ns") >= int(start[0])) & (pl.col("end_ns").is_null() | (pl.col("end_ns") >= int(end[-1])))
    )
    number = np.searchsorted(start, left["start_ns"].to_numpy(), side="right") - 1
    left = left.with_columns(step=pl.Series(number)).filter(pl.col("step") < settled)
    kept = np.zeros(settled, np.int64)
    np.add.at(kept, left["step"].to_numpy(), left["bytes"].to_numpy())
    return MemoryGrowth(level, _theil_sen(level), kept, _accumulated(left, settled))


def _theil_sen(values: Times) -> float:
    """Median of the slopes between all pairs of values, or of those of up to 500 of them."""
    chosen = np.unique(np.linspace(0, len(values) - 1, min(len(values), 500)).astype(np.int64))
    first, second = np.triu_indices(len(chosen), 1)
    rise = values[chosen[second]] - values[chosen[first]]
    return float(np.median(rise / (chosen[second] - chosen[first])))


def _accumulated(left: pl.DataFrame, steps: int) -> pl.DataFrame:
    """Places that keep memory in every step."""
    columns = [*PLACE_SCHEMA, "category"]
    table = (
        left.group_by(columns)
        .agg(in_steps=pl.col("step").n_unique(), bytes_per_step=pl.col("bytes").sum() // max(steps, 1), blocks=pl.len())
        .filter(pl.col("in_steps") == steps)
        .with_columns(blocks_per_step=pl.col("blocks") / max(steps, 1))
        .sort("bytes_per_step", *columns, descending=[True, *[False] * len(columns)])
    )
    return conformed(table, ACCUMULATED_SCHEMA)


@dataclass(frozen=True, repr=False)
class MemorySummary(Displayed):
    memory: DeviceMemory
    name: str | None  # the device's name, if known
    peak_step: int | None  # number of the step with the peak; None outside of complete steps
    categories: pl.DataFrame  # alive at the peak, as from `alive_table`
    lines: pl.DataFrame  # alive at the peak, as from `alive_table`
    modules: pl.DataFrame  # alive at the peak, as from `alive_table`
    operators: pl.DataFrame  # allocations per call and step by operator, as from `allocation_table`
    growth: MemoryGrowth | None  # over the steps; None with fewer than two
    allocator: pl.DataFrame  # driver calls, as from `allocator_table`
    failures: pl.DataFrame  # failed allocations, as from `out_of_memory`
    addressed: bool  # whether events have addresses; without them lifetimes are unknown


def memory_summary(trace: Trace, memory: DeviceMemory) -> MemorySummary:
    steps = memory.steps
    end = pl.col("start_ns") + pl.col("duration_ns")
    around = steps.filter((pl.col("start_ns") <= memory.peak_ns) & (end > memory.peak_ns))
    calls = allocator_table(trace, span_of(steps), memory.step_count)
    return MemorySummary(
        memory=memory,
        name={each.device: each.name for each in trace.metadata.devices}.get(memory.device),
        peak_step=int(around["index"][0]) if around.height else None,
        categories=alive_table(memory, "category"),
        lines=alive_table(memory, "line"),
        modules=alive_table(memory, "module"),
        operators=allocation_table(memory, "operator"),
        growth=memory_growth(memory),
        allocator=calls if memory.device != "cpu" else calls.clear(),
        failures=out_of_memory(trace).filter(pl.col("device") == memory.device),
        addressed=memory.blocks.height > 0,
    )


MOMENTS: Final = 400
"""Most times in a picture; a longer history keeps the highest and lowest level of each of half as many intervals."""


def moments(times: Times, levels: Times, peak: int) -> Times:
    """Rows to draw: all of a short history, else the highest and lowest level of each interval."""
    if len(times) <= MOMENTS:
        return np.arange(len(times))
    span = max(int(times[-1] - times[0]), 1)
    bucket = (times - times[0]) * (MOMENTS // 2) // (span + 1)
    frame = pl.DataFrame({"row": np.arange(len(times)), "bucket": bucket, "level": levels})
    ends = frame.group_by("bucket").agg(
        highest=pl.col("row").get(pl.col("level").arg_max()), lowest=pl.col("row").get(pl.col("level").arg_min())
    )
    return np.unique(np.concatenate([ends["highest"], ends["lowest"], [0, peak, len(times) - 1]]))
