"""Memory blocks: lifetime, category and allocating line, and the allocator's calls to the driver."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.attribution import Attribution, attribute, parse, user_entries
from stepscope.analysis.module_paths import BACKWARD_NAME, backward_source
from stepscope.analysis.operators import innermost_operators
from stepscope.trace import Trace, Window
from stepscope.trace.model import XLA_FORMATS
from stepscope.trace.naming import name_patterns
from stepscope.trace.nesting import (
    Rows,
    at,
    beginning_in,
    conformed,
    gathered,
    inherit,
    innermost_at,
    parents,
    row_numbers,
)

BLOCK_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "device": pl.String,
    "start_ns": pl.Int64,  # null: before the recording
    "end_ns": pl.Int64,  # null: not freed while recording
    "bytes": pl.Int64,
    "lane": pl.Int32,
    "row": pl.UInt32,  # row of the allocation in `memory`; null: before the recording
    "freed_row": pl.UInt32,  # row of the event that ended it; null: not freed while recording
    "operator": pl.Int64,  # row in operators of the innermost one around the allocation, -1 for none
}


def memory_devices(trace: Trace) -> list[str]:
    """Devices with memory events: accelerators before the CPU, those with the highest level first."""
    peaks = memory_levels(trace).group_by("device").agg(pl.col("allocated_bytes").max())
    order = [pl.col("device") == "cpu", pl.col("allocated_bytes"), pl.col("device")]
    return peaks.sort(order, descending=[False, True, False])["device"].to_list()


def memory_levels(trace: Trace) -> pl.DataFrame:
    """Memory level of each device after every event, in order of time.

    Without recorded totals that agree, events are summed from the least start value that keeps every level
    non-negative.

    Returns:
        Columns device, start_ns, allocated_bytes (from then on), reserved_bytes (held by the allocator; null where not
            recorded).
    """
    memory = trace.memory.filter((pl.col("bytes") != 0) & pl.col("device").is_not_null())
    added = pl.col("bytes").cum_sum().over("device")
    counted = (added - pl.min_horizontal(added.min().over("device"), 0)).cast(pl.Int64)
    agree = ~pl.col("device").is_in(list(contradictory_totals(trace)))
    known = pl.col("total_allocated").is_not_null().all().over("device") & agree
    holds_all = ~pl.col("device").is_in(list(_beyond_reserve(trace)))
    reserved = pl.when((pl.col("total_reserved").max().over("device") > 0) & holds_all).then(pl.col("total_reserved"))
    return memory.select(
        "device",
        "start_ns",
        allocated_bytes=pl.when(known).then(pl.col("total_allocated")).otherwise(counted),
        reserved_bytes=reserved,
    )


def contradictory_totals(trace: Trace) -> dict[str, tuple[int, int]]:
    """Devices of which more is recorded as allocated than as reserved, with these two at the worst moment, in bytes.

    An accelerator's allocator hands out only what it has reserved, so one of the totals is wrong. The host is none of
    these: several allocators share it, and PyTorch's own reserves nothing.
    """
    return {device: totals for device, totals in _beyond_reserve(trace).items() if device != "cpu"}


def _beyond_reserve(trace: Trace) -> dict[str, tuple[int, int]]:
    more = pl.col("total_allocated") - pl.col("total_reserved")
    has_reserve = pl.col("total_reserved").max().over("device") > 0
    wrong = trace.memory.filter(has_reserve & (more > 0)).sort(more, descending=True).unique("device", keep="first")
    rows = wrong.select("device", "total_allocated", "total_reserved").drop_nulls().iter_rows()
    return {device: (allocated, reserved) for device, allocated, reserved in rows}


def blocks(trace: Trace) -> pl.DataFrame:
    """List every block in the memory events, in order of allocation; columns as in BLOCK_SCHEMA.

    Events are paired by address. A block whose end was not recorded ends when its address is reused. Events without
    addresses are left out: they do not show how long a block lived.
    """
    memory = trace.memory.with_row_index("row").filter(
        (pl.col("bytes") != 0) & pl.col("address").is_not_null() & pl.col("device").is_not_null()
    )
    if memory.is_empty():
        return pl.DataFrame(schema=dict(BLOCK_SCHEMA))
    device = memory["device"].rank("dense").to_numpy()
    address, size = memory["address"].to_numpy(), memory["bytes"].to_numpy()
    order = np.lexsort((np.arange(len(size)), address, device))
    same = (device[order][1:] == device[order][:-1]) & (address[order][1:] == address[order][:-1])
    following = np.full(len(order), -1, np.int64)
    following[order[:-1]] = np.where(same, order[1:], -1)
    previous = np.full(len(order), -1, np.int64)
    previous[order[1:]] = np.where(same, order[:-1], -1)
    begins = size > 0
    # A freed block without an allocation existed before the recording.
    earlier = ~begins & ((previous < 0) | ~begins[np.maximum(previous, 0)])
    start = memory["start_ns"].to_numpy()
    ended = pl.Series(np.where(following >= 0, start[np.maximum(following, 0)], -1))
    freed = pl.Series(np.where(following >= 0, memory["row"].cast(pl.Int64).to_numpy()[following], -1))
    table = memory.select("device", "start_ns", pl.col("bytes").abs(), "lane", "row").with_columns(
        end_ns=pl.when(ended >= 0).then(ended),
        freed_row=pl.when(freed >= 0).then(freed),
        operator=pl.Series(innermost_operators(trace, memory)),
    )
    before = table.filter(pl.Series(earlier)).with_columns(
        start_ns=pl.lit(None, pl.Int64),
        end_ns=pl.col("start_ns"),
        row=pl.lit(None, pl.UInt32),
        freed_row=pl.col("row"),
        operator=pl.lit(-1),
    )
    found = pl.concat([before, table.filter(pl.Series(begins))], how="diagonal_relaxed")
    return conformed(found, BLOCK_SCHEMA)


def outermost_operators(trace: Trace) -> Rows:
    """For each operator the row of its outermost ancestor, or its own; shape (operators,)."""
    parent = row_numbers(trace.operators["parent"])
    return inherit(np.where(parent < 0, np.arange(len(parent)), -1), parent)


CATEGORIES: Final[dict[str, str]] = {
    "parameter": "parameters and buffers of the model",
    "optimizer_state": "what the optimizer keeps from step to step",
    "gradient": "gradients of parameters, from the backward pass until they are cleared",
    "activation": "results of the forward pass that are kept, most of them for the backward pass",
    "input": "batches, and tensors made without others",
    "temporary": "freed by the operator, backward pass or optimizer step that made it",
    "before": "allocated before the recording began: parameters, optimizer state and anything else",
    "unknown": "of unknown purpose",
}
"""Category -> its meaning, in the order of reports, from the bottom of a picture to its top."""
FIXED: Final = ("parameter", "gradient", "optimizer_state", "before")
"""Categories that do not grow with the batch."""

_FACTORIES: Final = re.compile(
    r"^aten::(?:rand\w*|normal|zeros|ones|empty|full|arange|linspace|eye|tensor|from_numpy|lift_fresh|to|_to_copy)$"
)
_FOREVER: Final = np.iinfo(np.int64).max


def block_categories(trace: Trace, blocks: pl.DataFrame, first_step_ns: int | None = None) -> pl.Series:
    """Category of each block, one of CATEGORIES.

    Args:
        blocks: as from `stepscope.analysis.blocks.blocks`.
        first_step_ns: start of the first step, where steps are known.
    """
    if blocks.is_empty():
        return pl.Series("category", [], pl.String)
    start = blocks["start_ns"].fill_null(-1).to_numpy()
    end = blocks["end_ns"].fill_null(_FOREVER).to_numpy()
    lane = blocks["lane"].to_numpy()
    stacks = _of_stacks(trace, blocks)
    phase = _Phases(trace, blocks["operator"].to_numpy(), stacks)
    passes = phase.backward_pass_end(start)
    optimizer_end = _inside(trace, r"^Optimizer\.step#", lane, start)
    in_loader = _inside(trace, r"^enumerate\(DataLoader\)|DataLoader\.__next__", lane, start) >= 0
    first = _first_ns(trace, first_step_ns)
    in_optimizer = (optimizer_end >= 0) | (stacks == "optimizer_state")
    lasts = end == _FOREVER
    in_passes = trace.metadata.format not in XLA_FORMATS  # XLA's own events do not distinguish forward and backward
    choices: list[tuple[npt.NDArray[np.bool_], str]] = [
        ((start < 0) | (phase.by_stacks & (start == 0) & (stacks == "")), "before"),
        (phase.in_backward & (end <= passes), "temporary"),
        (in_optimizer & (end <= np.where(optimizer_end >= 0, optimizer_end, -1)), "temporary"),
        (in_optimizer, "optimizer_state"),
        (phase.in_backward, "gradient"),
        (end <= phase.operator_end, "temporary"),
        ((lasts & (start < first)) | (stacks == "parameter"), "parameter"),
        (in_loader | (stacks == "input") | phase.in_copy | phase.in_factory, "input"),
        ((phase.in_operator & in_passes) | (stacks == "activation"), "activation"),
    ]
    found = np.select([each for each, _ in choices], [name for _, name in choices], "unknown")
    return pl.Series("category", found, pl.String)


class _Phases:
    """Allocating operator of each block, and whether it is part of the backward pass."""

    def __init__(self, trace: Trace, operator: Rows, stacks: npt.NDArray[np.str_]) -> None:
        operators = trace.operators
        self._trace = trace
        self.in_operator = operator >= 0
        outermost = outermost_operators(trace)
        top = at(outermost, operator)
        finish = (operators["start_ns"] + operators["duration_ns"]).to_numpy()
        self.operator_end = at(finish, top)
        is_node = operators["name"].str.contains(BACKWARD_NAME).fill_null(False).to_numpy()
        parent = row_numbers(operators["parent"])
        backward = inherit(np.where(is_node, 1, -1), parent) > 0
        self._outer = np.unique(outermost)
        self._outer_backward = backward[self._outer] if len(self._outer) else np.zeros(0, np.bool_)
        self._finish = finish
        self.in_backward = self._any_of(operator, backward) | (stacks == "gradient")
        self.in_copy = self._any_of(top, self._copying(outermost))
        names = operators["name"].str.contains(_FACTORIES.pattern).fill_null(False).to_numpy()
        self.in_factory = self._any_of(top, names)
        self.by_stacks = not operators.height
        self._stacks = stacks

    @staticmethod
    def _any_of(rows: Rows, flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        return (rows >= 0) & flags[np.maximum(rows, 0)] if len(flags) else np.zeros(len(rows), np.bool_)

    def _copying(self, outermost: Rows) -> npt.NDArray[np.bool_]:
        """Whether each operator copies from the host to a device, itself or in nested operators."""
        trace = self._trace
        copies = trace.device_work.filter((pl.col("kind") == "copy_in") & pl.col("launch").is_not_null())["launch"]
        launching = trace.launches["operator"].gather(copies).drop_nulls().cast(pl.Int64).to_numpy()
        flags = np.zeros(len(outermost), np.bool_)
        flags[outermost[launching]] = True
        return flags

    def backward_pass_end(self, start: Rows) -> Rows:
        """End of the backward pass in which each block was allocated; shape (n,), meaningless for other blocks.

        A pass lasts until an operator outside it begins on the training thread, or an allocation if only stacks are
        known.
        """
        if self.by_stacks:
            others = np.sort(start[(self._stacks != "gradient") & (start >= 0)])
            following = np.searchsorted(others, start, side="right")
            return np.append(others, _FOREVER - 1)[following]
        if not len(self._outer):
            return np.full(len(start), -1, np.int64)
        operators = self._trace.operators
        begin = operators["start_ns"].to_numpy()[self._outer]
        lane = operators["lane"].to_numpy()[self._outer]
        forward = ~self._outer_backward
        # The training thread has the most operators outside the backward pass.
        main = np.bincount(lane[forward]).argmax() if forward.any() else -1
        bounds = np.sort(begin[forward & (lane == main)])
        ends = np.full(len(bounds) + 1, -1, np.int64)
        mine = self._outer[self._outer_backward]
        np.maximum.at(ends, np.searchsorted(bounds, begin[self._outer_backward], side="right"), self._finish[mine])
        result: Rows = ends[np.searchsorted(bounds, start, side="right")]
        return result


def _first_ns(trace: Trace, first_step_ns: int | None) -> int:
    """Time before which only the model and its state were allocated."""
    source = backward_source(trace)
    forward = trace.operators["start_ns"].to_numpy()[source[source >= 0]]
    return min([*forward.tolist(), *([] if first_step_ns is None else [first_step_ns])], default=0)


def _inside(trace: Trace, pattern: str, lane: npt.NDArray[np.int32], times: Rows) -> Rows:
    """End of the annotation with that name open at each time on its lane, -1 for none; shape (n,)."""
    marks = trace.annotations.filter((pl.col("kind") == "host") & pl.col("name").str.contains(pattern))
    result = np.full(len(times), -1, np.int64)
    for number in marks["lane"].unique().to_list():
        mine = marks.filter(pl.col("lane") == number).sort("start_ns")
        begin = mine["start_ns"].to_numpy()
        end = np.maximum.accumulate((mine["start_ns"] + mine["duration_ns"]).to_numpy())
        asked = lane == number
        at = np.searchsorted(begin, times[asked], side="right") - 1
        closes = end[np.maximum(at, 0)]
        result[asked] = np.where((at >= 0) & (closes > times[asked]), closes, -1)
    return result


def _of_stacks(trace: Trace, blocks: pl.DataFrame) -> npt.NDArray[np.str_]:
    """Category implied by each block's allocation stack, "" for none."""
    stacks = trace.memory["call_stack"]
    if stacks.null_count() == len(stacks):
        return np.full(blocks.height, "", np.str_)
    own = stacks.gather(blocks["row"])
    known = {stack: category_of_stack(stack) for stack in own.unique().drop_nulls()}
    return np.array([known.get(stack, "") if stack is not None else "" for stack in own], np.str_)


@lru_cache(maxsize=65536)
def category_of_stack(call_stack: str) -> str:
    """Category implied by the frames of an allocation, "" for none."""
    frames = call_stack.split(";")
    by_frame = name_patterns("host_names.tsv")["memory"]
    return next((name for name, pattern in by_frame if any(pattern.search(frame) for frame in frames)), "")


PLACE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "file": pl.String,
    "line": pl.Int32,  # line of the statement, or of the function's definition if that is all the trace has
    "function": pl.String,
    "module": pl.String,
    "exact_line": pl.Boolean,
}

_PRIMITIVES: Final = tuple(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")
)
"""Operators that only allocate memory for the operator around them."""


def allocating_operators(trace: Trace, operator: Rows) -> Rows:
    """For each of these rows of `operators`, the nearest one around it, or itself, that does more than allocate.

    -1 stays -1.
    """
    parent = row_numbers(trace.operators["parent"])
    primitive = trace.operators["name"].is_in(_PRIMITIVES).fill_null(False).to_numpy()
    own = np.where(primitive & (parent >= 0), -1, np.arange(len(parent)))
    return at(inherit(own, parent), operator)


def block_places(trace: Trace, blocks: pl.DataFrame, operator: Rows, attribution: Attribution | None) -> pl.DataFrame:
    """Place in the user's code that asked for each block; columns as in PLACE_SCHEMA, null where unknown.

    Args:
        blocks: as from `stepscope.analysis.blocks.blocks`.
        operator: row in `operators` of each block, -1 for none.
    """
    places = (attribute(trace) if attribution is None else attribution).operators()
    found = gathered(places.select(list(PLACE_SCHEMA)), operator)
    stacks = trace.memory["call_stack"]
    if stacks.null_count() == len(stacks) or blocks.is_empty():
        return found
    own = stacks.gather(blocks["row"])
    known = own.unique().drop_nulls().to_list()
    rows = [(stack, *user_place(stack), None, True) for stack in known]
    table = pl.DataFrame(rows, schema={"stack": pl.String, **PLACE_SCHEMA}, orient="row")
    by_stack = pl.DataFrame({"stack": own}).join(table, on="stack", how="left", maintain_order="left")
    return pl.DataFrame([by_stack[name].fill_null(found[name]) for name in PLACE_SCHEMA])


def block_regions(trace: Trace, blocks: pl.DataFrame) -> pl.DataFrame:
    """Column region: the name of the innermost annotation of the host around each allocation, null for none."""
    marks = trace.annotations.filter(pl.col("kind") == "host")
    if marks.is_empty() or blocks.is_empty():
        return pl.DataFrame({"region": pl.Series([None] * blocks.height, dtype=pl.String)})
    lanes, starts, durations = (marks[name].to_numpy() for name in ("lane", "start_ns", "duration_ns"))
    asked = blocks["lane"].to_numpy(), blocks["start_ns"].fill_null(-1).to_numpy()
    found = innermost_at(*asked, lanes, starts, durations, parents(lanes, starts, durations))
    return gathered(marks.select(region="name"), found)


def user_place(call_stack: str) -> tuple[str | None, int | None, str | None]:
    """File, line and function of the user's innermost entry of a call stack; None if there is no such entry."""
    entries = user_entries(call_stack)
    place = parse(entries[0]) if entries else None
    return place if place is not None else (None, None, None)


OUT_OF_MEMORY: Final = "out of memory"
"""Name of launches and annotations that record a failed allocation."""
DEVICE_FREE: Final = "device free"
"""Name of the counter of bytes that the driver then had left."""

OUT_OF_MEMORY_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "device": pl.String,
    "start_ns": pl.Int64,
    "asked_bytes": pl.Int64,
    "free_bytes": pl.Int64,  # bytes that the driver had left; null where not recorded
    "file": pl.String,
    "line": pl.Int32,
    "function": pl.String,
}


def allocator_table(trace: Trace, window: Window | None = None, steps: int = 1) -> pl.DataFrame:
    """Driver calls that allocate and free memory, the costliest first.

    Args:
        window: only calls that start in it.
        steps: number of steps in the window.

    Returns:
        Columns name, calls, calls_per_step, total_ns, ns_per_step, bytes (0 where not recorded).
    """
    calls = trace.launches.filter((pl.col("kind") == "allocate") & (pl.col("name") != OUT_OF_MEMORY))
    calls, count = beginning_in(calls, window), max(steps, 1)
    return (
        calls.group_by("name")
        .agg(calls=pl.len(), total_ns=pl.col("duration_ns").sum(), bytes=pl.col("bytes").sum())
        .with_columns(calls_per_step=pl.col("calls") / count, ns_per_step=pl.col("total_ns") // count)
        .select("name", "calls", "calls_per_step", "total_ns", "ns_per_step", "bytes")
        .sort("total_ns", "calls", "name", descending=[True, True, False])
    )


def out_of_memory(trace: Trace) -> pl.DataFrame:
    """Failed allocations, in order of time; columns as in OUT_OF_MEMORY_SCHEMA."""
    calls = trace.launches.filter((pl.col("kind") == "allocate") & (pl.col("name") == OUT_OF_MEMORY))
    if calls.is_empty():
        return pl.DataFrame(schema=dict(OUT_OF_MEMORY_SCHEMA))
    key = ["lane", "start_ns"]
    stacks = trace.annotations.filter(pl.col("name") == OUT_OF_MEMORY).select(*key, "call_stack").unique(key)
    free = trace.counters.filter(pl.col("name") == DEVICE_FREE).select(*key, free_bytes="value").unique(key)
    rows = (
        calls.select(*key, asked_bytes="bytes")
        .join(trace.lanes.select("lane", "device"), on="lane", how="left", maintain_order="left")
        .join(stacks, on=key, how="left", maintain_order="left")
        .join(free, on=key, how="left", maintain_order="left")
    )
    places = [user_place(stack or "") for stack in rows["call_stack"]]
    columns = pl.DataFrame(places, ["file", "line", "function"], orient="row")
    return conformed(pl.concat([rows, columns], how="horizontal"), OUT_OF_MEMORY_SCHEMA)
