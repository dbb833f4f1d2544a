"""What a block of memory was for, from when it was allocated and how long it lived.

    parameter        held before the first step and never freed
    input            made while data was loaded, by a copy to the device, or by an operator that needs no other tensor
    activation       made by the forward pass, outlives the operator that made it
    gradient         made by the backward pass, outlives that pass
    optimizer_state  made in an optimizer's step, outlives it
    temporary        freed before the operator, backward pass or optimizer step that made it was over
    before           allocated before the recording
    unknown          nothing tells

Recordings with operators decide by their times, memory snapshots by call stacks.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.backward import BACKWARD_NAME, backward_source
from stepscope.analysis.formats import XLA_FORMATS
from stepscope.analysis.memory_events import outermost_operators
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows, inherit

CATEGORIES: Final[dict[str, str]] = {
    "parameter": "parameters and buffers of the model",
    "optimizer_state": "what the optimizer keeps from step to step",
    "gradient": "gradients of parameters, from the backward pass until they are cleared",
    "activation": "results of the forward pass that are kept, most of them for the backward pass",
    "input": "batches, and tensors made without others",
    "temporary": "freed by the operator, backward pass or optimizer step that made it",
    "before": "allocated before the recording began: parameters, optimizer state and whatever else there was",
    "unknown": "nothing tells what for",
}
"""Category -> what it means, in the order reports list them from the bottom of a picture to its top."""

_FACTORIES: Final = re.compile(
    r"^aten::(?:rand\w*|normal|zeros|ones|empty|full|arange|linspace|eye|tensor|from_numpy|lift_fresh|to|_to_copy)$"
)
_FOREVER: Final = np.iinfo(np.int64).max

_BY_FRAME: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("optimizer_state", re.compile(r"torch/optim/\w+\.py\(\d+\): |torch/optim/.*\): _?init_group$")),
    ("gradient", re.compile(r"torch/autograd/.*: _engine_run_backward$|autograd::Engine|_tensor\.py\(\d+\): backward")),
    ("input", re.compile(r"torch/utils/data/")),
    ("parameter", re.compile(r"torch/nn/[\w/]+\.py\(\d+\): (?:__init__|_apply|reset_parameters|to|cuda)$")),
    ("activation", re.compile(r"torch/nn/modules/module\.py\(\d+\): (?:_call_impl|__call__|_wrapped_call_impl)$")),
)  # fmt: skip


def block_categories(trace: Trace, blocks: pl.DataFrame, first_step_ns: int | None = None) -> pl.Series:
    """The category of each of `blocks`, one of CATEGORIES.

    Args:
        blocks: as `stepscope.analysis.memory_events.blocks` gives them.
        first_step_ns: when the first step began, where steps are known.
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
    first = _first_ns(trace, first_step_ns, phase)
    in_optimizer = (optimizer_end >= 0) | (stacks == "optimizer_state")
    lasts = end == _FOREVER
    in_passes = (
        trace.metadata.format not in XLA_FORMATS
    )  # the runtime's own events tell nothing of forward and backward
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
    """Of each block: which operator made it, and whether that belongs to the backward pass."""

    def __init__(self, trace: Trace, operator: Rows, stacks: npt.NDArray[np.str_]) -> None:
        operators = trace.operators
        self._trace = trace
        self.in_operator = operator >= 0
        outermost = outermost_operators(trace)
        top = np.where(self.in_operator, outermost[np.maximum(operator, 0)], -1) if len(outermost) else operator
        finish = (operators["start_ns"] + operators["duration_ns"]).to_numpy()
        self.operator_end = np.where(top >= 0, finish[np.maximum(top, 0)], -1) if len(finish) else top
        is_node = operators["name"].str.contains(BACKWARD_NAME).fill_null(False).to_numpy()
        parent = operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
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
        """Which operators copy from the host to a device, themselves or by operators inside."""
        trace = self._trace
        copies = trace.device_work.filter((pl.col("kind") == "copy_in") & pl.col("launch").is_not_null())["launch"]
        launching = trace.launches["operator"].gather(copies).drop_nulls().cast(pl.Int64).to_numpy()
        flags = np.zeros(len(outermost), np.bool_)
        flags[outermost[launching]] = True
        return flags

    def backward_pass_end(self, start: Rows) -> Rows:
        """When the backward pass that each block was allocated in ended; shape (n,), of no meaning for other blocks.

        A pass goes on until an operator, or where only stacks are known an allocation, that is not of the backward pass
        begins on the thread that trains.
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
        # The thread that trains has the most operators outside the backward pass.
        main = np.bincount(lane[forward]).argmax() if forward.any() else -1
        bounds = np.sort(begin[forward & (lane == main)])
        ends = np.full(len(bounds) + 1, -1, np.int64)
        mine = self._outer[self._outer_backward]
        np.maximum.at(ends, np.searchsorted(bounds, begin[self._outer_backward], side="right"), self._finish[mine])
        result: Rows = ends[np.searchsorted(bounds, start, side="right")]
        return result


def _first_ns(trace: Trace, first_step_ns: int | None, phase: _Phases) -> int:
    """Before this moment nothing but the model, and what belongs to it, was made."""
    source = backward_source(trace)
    forward = source[source >= 0]
    first = [int(trace.operators["start_ns"].to_numpy()[forward].min())] if forward.size else []
    return min([*first, *([first_step_ns] if first_step_ns is not None else [])], default=0)


def _inside(trace: Trace, pattern: str, lane: npt.NDArray[np.int32], times: Rows) -> Rows:
    """The end of the annotation of such a name around each time on its lane, -1 for none; shape (n,)."""
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
    """The category that the call stack of each block's allocation gives away, "" for none."""
    stacks = trace.memory["call_stack"]
    if stacks.null_count() == len(stacks):
        return np.full(blocks.height, "", np.str_)
    own = stacks.gather(blocks["row"])
    known = {stack: category_of_stack(stack) for stack in own.unique().drop_nulls()}
    return np.array([known.get(stack, "") if stack is not None else "" for stack in own], np.str_)


@lru_cache(maxsize=65536)
def category_of_stack(call_stack: str) -> str:
    """What the frames of an allocation say, "" where they say nothing."""
    frames = call_stack.split(";")
    return next((name for name, pattern in _BY_FRAME if any(pattern.search(frame) for frame in frames)), "")
