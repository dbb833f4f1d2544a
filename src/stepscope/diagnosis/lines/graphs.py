"""Forward against backward: graphs that are run backward several times, and graphs that never are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.loops import PARAMETRISED
from stepscope.analysis.module_paths import BACKWARD_NAME
from stepscope.analysis.rows import at
from stepscope.analysis.work import base_name
from stepscope.diagnosis.view import View, rows_of
from stepscope.trace.nesting import Rows

_MOST: Final = 0.5


@dataclass(frozen=True, slots=True)
class Repeats:
    """Backward work of nodes that ran before in the same step.

    Attributes:
        nodes: rows of `operators` of all outermost nodes that know their forward operator.
        again: rows of `operators`, outermost, of repeated nodes and of the gradients accumulated after them.
        times: how often the most repeated node of a step ran.
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
    """Operators of the autograd engine in the span that are not inside another: row, lane, start_ns, name, source."""
    is_node = view.operators["name"].str.contains(BACKWARD_NAME)
    nodes = view.operators.filter(is_node & view.operators["parent"].is_null())
    source = view.backward_source[rows_of(nodes)]
    return nodes.select("row", "lane", "start_ns", "name").with_columns(source=pl.Series(source, dtype=pl.Int64))


def _is_differentiated(view: View, nodes: Rows) -> bool:
    """Whether the operators inside these nodes make nodes themselves: the backward pass is part of a graph."""
    inner = view.trace.operators.filter(pl.Series(view.inside(nodes)) & pl.col("name").str.starts_with("aten::"))
    numbers = inner["sequence_number"]
    return numbers.len() > 0 and int((numbers >= 0).sum()) > _MOST * numbers.len()


@dataclass(frozen=True, slots=True)
class NeedlessBackward:
    """Backward work whose gradients no optimizer uses, and that leads to nothing that one does.

    Attributes:
        modules: paths of the modules whose parameters get these gradients.
        forward: rows of `operators` that these nodes differentiate.
        nodes: rows of `operators`, outermost, with the gradients accumulated after them.
    """

    modules: tuple[str, ...]
    forward: Rows
    nodes: Rows


def needless_backward(view: View) -> NeedlessBackward | None:
    """Find nodes of what ran, in each step, from the first untrained module to the first operator of a trained one."""
    attribution = view.attribution
    untrained = np.flatnonzero([path in set(view.program.untrained) for path in attribution.modules])
    nodes = _outermost_nodes(view).sort("lane", "start_ns")
    source = nodes["source"].to_numpy()
    rows = np.unique(source[source >= 0])
    if not len(untrained) or not len(rows):
        return None
    names = view.trace.operators["name"].gather(rows)
    has_parameters = np.array([base_name(name) in PARAMETRISED for name in names], np.bool_)
    module = at(attribution.module, view.slices_of_operators(rows))
    frozen = np.isin(module, untrained)
    start = view.trace.operators["start_ns"].to_numpy()[rows]
    step = np.searchsorted(view.steps["start_ns"].to_numpy(), start, side="right")
    needless = np.zeros(len(rows), np.bool_)
    for number in np.unique(step).tolist():
        mine = step == number
        begin = start[mine & frozen].min(initial=np.iinfo(np.int64).max)
        trained = start[mine & has_parameters & ~frozen].min(initial=np.iinfo(np.int64).max)
        needless |= mine & (start >= begin) & (start < trained)
    if not needless.any():
        return None
    known = pl.Series(source >= 0)
    mark = pl.when(known).then(pl.Series(np.isin(source, rows[needless])))
    gone = nodes.with_columns(mark=mark).with_columns(pl.col("mark").forward_fill().over("lane")).filter("mark")
    modules = tuple(attribution.modules[number] for number in np.unique(module[needless & frozen]).tolist())
    return NeedlessBackward(modules, rows[needless], rows_of(gone))


@dataclass(frozen=True, slots=True)
class UnusedGraph:
    """Calls of one module that made a graph which nothing ran backward.

    Attributes:
        module: path of the outermost module.
        calls: columns lane, start_ns, duration_ns, made (nodes made).
    """

    module: str
    calls: pl.DataFrame


def unused_graphs(view: View) -> Iterator[UnusedGraph]:
    """Find outermost module calls that recorded a graph which was never run backward.

    Nothing is found where no graph is run backward at all, or where the recording has no complete step.
    """
    calls = outermost_calls(view)
    if calls.is_empty() or view.lane is None or not view.complete_steps.height:
        return
    sources = np.unique(_outermost_nodes(view)["source"].to_numpy())
    used = view.trace.operators["start_ns"].to_numpy()[sources[sources >= 0]]
    if not len(used):
        return
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
    """Calls of modules on the main thread inside no other call, in the span; columns as in `modules`."""
    calls = view.begin_in_span(view.trace.modules.filter(pl.col("lane") == pl.lit(view.lane, pl.Int32))).sort(
        "start_ns"
    )
    end = pl.col("start_ns") + pl.col("duration_ns")
    return calls.filter((pl.col("start_ns") >= end.cum_max().shift(1)).fill_null(True))


def _nodes_made(view: View, calls: pl.DataFrame) -> Rows:
    """Number of autograd nodes that each call made: by how far the thread's sequence number moved."""
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

    From the first call in that mode to the last one before a call in training mode or a step's end.

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
