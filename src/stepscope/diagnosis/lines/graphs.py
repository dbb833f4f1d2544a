"""Forward against backward: graphs that are run backward several times, graphs that never are, and recomputation.

Recomputation: forward operators that run again inside the backward pass, as activation checkpointing has them do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.loops import PARAMETRISED
from stepscope.analysis.module_paths import BACKWARD_NAME
from stepscope.analysis.work import base_name
from stepscope.diagnosis.view import View, once, rows_of
from stepscope.trace.nesting import Rows
from stepscope.trace.program_facts import BackwardFacts

_MOST: Final = 0.5
_ACCUMULATING: Final = "AccumulateGrad"


@dataclass(frozen=True, slots=True)
class Repeats:
    """Backward work of nodes that already ran in the same step.

    Attributes:
        nodes: rows of `operators`: all outermost nodes with a known forward operator.
        again: rows of `operators`, outermost: repeated nodes, and the gradients accumulated after them.
        times: how often a step's most repeated node ran.
    """

    nodes: Rows
    again: Rows
    times: int


def repeated_backward(view: View) -> Repeats | None:
    """Find nodes that ran several times in the span; None if no node did.

    Nodes whose own operators are differentiated again, as for a gradient penalty, are left out.
    """
    nodes = _outermost_nodes(view)
    known = nodes.filter(pl.col("source") >= 0)
    if known.is_empty():
        return None
    run = pl.int_range(pl.len()).over("source")
    runs = known.sort("start_ns").with_columns(run=run)
    most = int(runs["run"].to_numpy().max()) + 1
    if most < 2 or _is_differentiated(view, rows_of(known)):
        return None
    ordered = nodes.join(runs.select("row", "run"), on="row", how="left").sort("lane", "start_ns")
    again = ordered.with_columns(pl.col("run").forward_fill().over("lane")).filter(pl.col("run") > 0)
    return Repeats(rows_of(known), rows_of(again), most)


def _outermost_nodes(view: View) -> pl.DataFrame:
    """The autograd engine's outermost operators in the span: row, lane, start_ns, name, source."""
    is_node = view.operators["name"].str.contains(BACKWARD_NAME)
    nodes = view.operators.filter(is_node & view.operators["parent"].is_null())
    source = view.backward_source[rows_of(nodes)]
    return nodes.select("row", "lane", "start_ns", "name").with_columns(source=pl.Series(source, dtype=pl.Int64))


def _is_differentiated(view: View, nodes: Rows) -> bool:
    """Whether operators inside these nodes make nodes: the backward pass is itself differentiated."""
    inner = view.trace.operators.filter(pl.Series(view.inside(nodes)) & pl.col("name").str.starts_with("aten::"))
    numbers = inner["sequence_number"]
    return numbers.len() > 0 and int((numbers >= 0).sum()) > _MOST * numbers.len()


@dataclass(frozen=True, slots=True)
class NeedlessBackward:
    """The part of one backward pass of each step that computes gradients that nothing uses.

    Attributes:
        facts: what the recorder saw of it.
        nodes: rows of `operators`, outermost: nodes that lead only to unused gradients, and their accumulation.
        halves: rows of products' nodes with one unused gradient out of two.
        forward: rows of `operators` that the nodes, or else the halves, differentiate.
        calls: outermost of the calls that only these nodes differentiate, as in `modules`.
    """

    facts: BackwardFacts
    nodes: Rows
    halves: Rows
    forward: Rows
    calls: pl.DataFrame


def needless_backward(view: View) -> Iterator[NeedlessBackward]:
    """Find nodes whose gradients nothing used in an earlier step that the recorder examined.

    Passes are matched by their number of nodes, and nodes by the order in which they were made.
    """
    if not view.program.backward:
        return
    passes = list(_passes(view))
    for facts in view.program.backward:
        found = [nodes for number, order, nodes in passes if (number, order) == (facts.nodes, facts.order)]
        if not found:
            continue
        gone = np.concatenate([_chosen(nodes, facts.needless, accumulating=True) for nodes in found])
        halves = np.concatenate([_chosen(nodes, facts.halves, accumulating=False) for nodes in found])
        source = view.backward_source[gone if len(gone) else halves]
        if len(gone) or len(halves):
            forward = np.unique(source[source >= 0])
            yield NeedlessBackward(facts, gone, halves, forward, _calls_without_use(view, gone))


def _calls_without_use(view: View, gone: Rows) -> pl.DataFrame:
    """Outermost of the module calls with operators that these nodes differentiate and no other nodes do."""
    nodes = _outermost_nodes(view).filter(pl.col("source") >= 0)
    start = view.trace.operators["start_ns"].to_numpy()[nodes["source"].to_numpy()]
    is_gone = np.isin(nodes["row"].to_numpy(), gone)
    calls = _calls(view)
    begin = calls["start_ns"].to_numpy()
    end = begin + calls["duration_ns"].to_numpy()
    needless, used = (np.sort(each) for each in (start[is_gone], start[~is_gone]))
    has_needless = np.searchsorted(needless, end) > np.searchsorted(needless, begin)
    has_used = np.searchsorted(used, end) > np.searchsorted(used, begin)
    return _outermost(calls.filter(pl.Series(has_needless & ~has_used)))


def _passes(view: View) -> Iterator[tuple[int, int, pl.DataFrame]]:
    """Backward passes in the span: number of nodes, index among the step's passes of that size, and the nodes.

    Nodes have columns row and sequence_number (-1 where gradients are accumulated), in the order in which they ran. A
    pass ends where the step ends or the main thread runs an operator that is not a node.
    """
    is_node = pl.col("name").str.contains(BACKWARD_NAME)
    top = view.operators.filter(pl.col("parent").is_null()).sort("start_ns")
    step = np.searchsorted(view.steps["start_ns"].to_numpy(), top["start_ns"].to_numpy(), side="right")
    other = ~is_node & (pl.col("lane") == pl.lit(view.lane, pl.Int32))
    number = pl.when(pl.col("name").str.contains(_ACCUMULATING)).then(-1).otherwise(pl.col("sequence_number"))
    nodes = top.with_columns(step=pl.Series(step, dtype=pl.Int64), part=other.cum_sum()).filter(is_node)
    nodes = nodes.select("row", "step", "part", number.fill_null(-1).clip(-1).alias("sequence_number"))
    alike: Counter[tuple[int, int]] = Counter()
    for (step_number, _), mine in nodes.group_by("step", "part", maintain_order=True):
        count = mine.filter(pl.col("sequence_number") >= 0)["sequence_number"].n_unique()
        yield count, alike[int(str(step_number)), count], mine
        alike[int(str(step_number)), count] += 1


def _chosen(nodes: pl.DataFrame, ranges: tuple[tuple[int, int], ...], *, accumulating: bool) -> Rows:
    """Rows of the nodes in these ranges of sequence order, followed by their accumulation if asked."""
    number = nodes["sequence_number"]
    is_node = number >= 0
    place = number.rank("dense").cast(pl.Int64) - (1 if is_node.all() else 2)
    chosen = pl.Series(np.zeros(nodes.height, np.bool_))
    for first, last in ranges:
        chosen |= place.is_between(first, last)
    if not accumulating:
        return rows_of(nodes.filter(chosen & is_node))
    marks = pl.select(mark=pl.when(is_node).then(chosen))["mark"]
    return rows_of(nodes.filter(marks.forward_fill().fill_null(value=False)))


@dataclass(frozen=True, slots=True)
class UnusedGraph:
    """Calls of one module that made a graph that nothing ran backward.

    Attributes:
        module: path of the outermost module.
        calls: columns lane, start_ns, duration_ns, made (nodes made).
    """

    module: str
    calls: pl.DataFrame


def unused_graphs(view: View) -> Iterator[UnusedGraph]:
    """Find outermost module calls that recorded a graph that was never run backward.

    Finds nothing if the recording has no complete step.
    """
    calls = outermost_calls(view)
    if calls.is_empty() or view.lane is None or not view.complete_steps.height:
        return
    sources = np.unique(_outermost_nodes(view)["source"].to_numpy())
    used = view.trace.operators["start_ns"].to_numpy()[sources[sources >= 0]]
    made = _nodes_made(view, calls)
    begin = calls["start_ns"].to_numpy()
    end = begin + calls["duration_ns"].to_numpy()
    used.sort()
    is_used = np.searchsorted(used, end) > np.searchsorted(used, begin)
    loose = calls.with_columns(made=pl.Series(made)).filter(pl.Series(~is_used) & (pl.col("made") > 0))
    for (name,), mine in loose.group_by("name", maintain_order=True):
        if view.steps_with(mine["start_ns"].to_numpy()) == view.step_count:
            yield UnusedGraph(str(name), mine)


def outermost_calls(view: View) -> pl.DataFrame:
    """Outermost module calls on the main thread in the span; columns as in `modules`."""
    return _outermost(_calls(view))


def _calls(view: View) -> pl.DataFrame:
    return view.begin_in_span(view.trace.modules.filter(pl.col("lane") == pl.lit(view.lane, pl.Int32))).sort("start_ns")


def _outermost(calls: pl.DataFrame) -> pl.DataFrame:
    end = pl.col("start_ns") + pl.col("duration_ns")
    return calls.filter((pl.col("start_ns") >= end.cum_max().shift(1)).fill_null(True))


def _nodes_made(view: View, calls: pl.DataFrame) -> Rows:
    """Number of autograd nodes that each call made: how far the thread's sequence number moved."""
    numbered = view.trace.operators.filter(
        (pl.col("lane") == view.lane)
        & (pl.col("sequence_number") >= 0)
        & (pl.col("forward_thread").fill_null(0) == 0)
        & ~pl.col("name").str.contains(BACKWARD_NAME)
    ).sort("start_ns")
    times, numbers = numbered["start_ns"].to_numpy(), numbered["sequence_number"].to_numpy()
    begin = calls["start_ns"].to_numpy()
    first, last = np.searchsorted(times, begin), np.searchsorted(times, begin + calls["duration_ns"].to_numpy())
    known = last > first
    if not len(numbers):
        return np.zeros(len(begin), np.int64)
    after = numbers[np.minimum(last, len(numbers) - 1)]
    made = np.where(last < len(numbers), after - numbers[np.minimum(first, len(numbers) - 1)], 0)
    result: Rows = np.where(known, np.maximum(made, 0), 0)
    return result


def evaluations(view: View) -> pl.DataFrame:
    """Stretches of the main thread in which models that are also trained run in evaluation mode.

    Each runs from the first call in that mode to the last one before a training call or the step's end.

    Returns:
        Columns module, lane, start_ns, duration_ns, calls; by time.
    """
    calls = outermost_calls(view)
    trained = calls.filter(~pl.col("evaluates").fill_null(True))["name"].unique()
    bounds = view.steps["start_ns"].to_numpy()
    step = np.searchsorted(bounds, calls["start_ns"].to_numpy(), side="right")
    mine = pl.col("evaluates") & pl.col("name").is_in(trained.implode())
    calls = calls.with_columns(step=pl.Series(step, dtype=pl.Int64), mine=mine.fill_null(False))
    runs = calls.with_columns(run=pl.struct("step", "mine").rle_id()).filter("mine")
    end = (pl.col("start_ns") + pl.col("duration_ns")).max()
    return (
        runs.group_by("run", maintain_order=True)
        .agg(pl.col("name").first().alias("module"), pl.col("lane").first(), pl.col("start_ns").min(),
             (end - pl.col("start_ns").min()).alias("duration_ns"), pl.len().alias("calls"))
        .drop("run")
    )  # fmt: skip


def inside_calls(view: View, calls: pl.DataFrame) -> Rows:
    """Rows of the main thread's operators that begin during these calls, which do not overlap."""
    operators = view.operators.filter(pl.col("lane") == view.lane)
    begin = calls["start_ns"].to_numpy()
    end = begin + calls["duration_ns"].to_numpy()
    starts = operators["start_ns"].to_numpy()
    call = np.searchsorted(begin, starts, side="right") - 1
    rows: Rows = rows_of(operators)[(call >= 0) & (starts < end[np.maximum(call, 0)])]
    return rows


_LAYERS: Final = PARAMETRISED - {"addmm", "convolution", "_convolution"}
"""Operators that a program calls, but no backward pass does by itself."""


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What the backward passes of the span compute again.

    Attributes:
        rows: rows of `operators`, outermost ones.
        stretches: first to last of them in each node; columns lane, start_ns, duration_ns.
        calls: forward calls of the modules that are computed again, as in `modules`; may be empty.
        bytes: memory that these operators allocate in a step.
        peak_bytes: memory at the peak, with parameters, gradients and optimizer state where they are known.
        capacity_bytes: available memory.
    """

    rows: Rows
    stretches: pl.DataFrame
    calls: pl.DataFrame
    bytes: int
    peak_bytes: int
    capacity_bytes: int


def recomputation(view: View) -> Recomputation | None:
    """Find operators that make autograd nodes inside autograd nodes; None without them, or if memory is unknown.

    Only nodes that run a layer again count, so a backward pass that is differentiated itself does not.
    """
    operators = view.operators
    nodes = rows_of(operators.filter(pl.col("parent").is_null() & pl.col("name").str.contains(BACKWARD_NAME)))
    is_forward = (pl.col("sequence_number") >= 0) & ~pl.col("name").str.contains(BACKWARD_NAME)
    inner = operators.filter(is_forward & pl.Series(view.inside(nodes)[rows_of(operators)]))
    if inner.is_empty():
        return None
    around = _outermost_of(view)[rows_of(inner)]
    layers = inner["name"].map_elements(base_name, pl.String).is_in(list(_LAYERS)).to_numpy()
    mine = np.isin(around, around[layers])
    memory = _memory(view)
    if not mine.any() or memory is None:
        return None
    table = inner.filter(pl.Series(mine)).with_columns(node=pl.Series(around[mine]))
    end = (pl.col("start_ns") + pl.col("duration_ns")).max()
    stretches = table.group_by("node", maintain_order=True).agg(
        pl.col("lane").first(), pl.col("start_ns").min(), (end - pl.col("start_ns").min()).alias("duration_ns")
    )
    rows = view.outermost(rows_of(table))
    allocated = view.operator_costs["bytes_allocated"].to_numpy()[view.inside(rows)].clip(0)
    calls = _forward_calls(view, np.unique(around[mine]))
    return Recomputation(rows, stretches, calls, int(allocated.sum()) // view.step_count, *memory)


def _outermost_of(view: View) -> Rows:
    """For each operator the outermost one around it, or itself."""
    result = np.arange(len(view.parents), dtype=np.int64)
    for row in np.flatnonzero(view.parents >= 0).tolist():
        result[row] = result[view.parents[row]]
    return result


def _memory(view: View) -> tuple[int, int] | None:
    """Peak and available memory of the computing device; None where either is unknown."""
    device = "cpu" if view.device is None else view.device
    memory = next((each for each in view.memories if each.device == device), None)
    if memory is None or memory.capacity_bytes is None:
        return None
    model, before = view.program.model, 0
    if not memory.is_total and model is not None:  # made before the recording
        sizes = (model.parameter_bytes, model.gradient_bytes, model.optimizer_state_bytes, model.buffer_bytes)
        before = sum(size or 0 for size in sizes)
    return memory.peak_bytes + before, memory.capacity_bytes


def _forward_calls(view: View, nodes: Rows) -> pl.DataFrame:
    """Calls, outside backward passes, of the modules that are called first in these nodes."""
    modules = view.begin_in_span(view.trace.modules).sort("start_ns")
    spans = view.trace.operators.select("start_ns", "duration_ns")[nodes].sort("start_ns")
    begin = spans["start_ns"].to_numpy()
    end = begin + spans["duration_ns"].to_numpy()
    starts = modules["start_ns"].to_numpy()
    node = np.searchsorted(begin, starts, side="right") - 1
    within = (node >= 0) & (starts < end[np.maximum(node, 0)])
    inside = modules.with_columns(node=pl.Series(node, dtype=pl.Int64)).filter(pl.Series(within))
    first = inside.unique("node", keep="first", maintain_order=True)
    return modules.filter(pl.Series(~within) & pl.col("name").is_in(first["name"].implode()))


@once
def lines_that_run_modules(view: View) -> npt.NDArray[np.bool_]:
    """For each row of `lines`, whether modules are called or differentiated there."""
    nodes = view.trace.operators.filter(pl.col("name").str.contains(BACKWARD_NAME)).select("lane", "start_ns")
    starts = pl.concat([view.trace.modules.select("lane", "start_ns"), nodes])
    result = np.zeros(max(view.trace.lines.height, 1), np.bool_)
    for lane, timeline in view.activity.line_timelines.items():
        rows = timeline.at(starts.filter(pl.col("lane") == lane)["start_ns"].to_numpy())
        result[rows[rows >= 0]] = True
    return result
