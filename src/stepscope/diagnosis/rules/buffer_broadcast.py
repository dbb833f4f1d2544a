"""# What it finds
DistributedDataParallel broadcasts the model's buffers before each forward pass.

# Why it costs time
By default rank 0 sends its buffers, such as the running statistics of batch normalisation, to all ranks in each forward
pass. They are flattened into one tensor, sent, and copied back one by one, before the model's first layer can begin:
two small copies and their launches for each buffer.

# How it is measured
The operators that flatten, unflatten and copy around a broadcast inside DistributedDataParallel's forward pass, with
the time from each to the next. The broadcast itself is left out: much of it may be a wait for another rank. With a
device, the cost is its idle time in these stretches and its time for what was launched there; replaying the steps
without them gives the saving.

# Known false positives
Models whose ranks need equal buffers in each step. Without the broadcast the running statistics of the ranks differ,
and those of the rank that saves or evaluates count.

# What to do
`broadcast_buffers=False`. Where the statistics must be those of all ranks, convert the model with
`torch.nn.SyncBatchNorm.convert_sync_batchnorm`, which exchanges them inside each layer instead.

# Reference
PyTorch's documentation of DistributedDataParallel, broadcast_buffers, and of SyncBatchNorm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.host import covered_by
from stepscope.diagnosis.rule import Answers, Found, Limits, Remedy, Rows, Rule, Threshold, View, rows_of
from stepscope.trace.window import IntervalSet
from stepscope.whatif.changes import scaled_stretches

_FORWARD: Final = "DistributedDataParallel.forward"
_BROADCAST: Final = r"^(?:c10d::(?:_broadcast_coalesced|broadcast_)|\w+:broadcast\w*)$"
_PACKS: Final = r"^aten::(?:un)?flatten_dense_tensors$|^aten::(?:cat|reshape|flatten)$"
_MOVES: Final = r"^aten::(?:copy_|_foreach_copy_|view|narrow|slice|detach|empty\w*)$|^record_param_comms$"
_EMPTY: Final[dict[str, type[pl.DataType]]] = {"row": pl.Int64, "lane": pl.Int32, "start_ns": pl.Int64}


def check(view: View, limits: Limits) -> Answers:
    moving = buffer_broadcasts(view).filter(~pl.col("broadcasts"))
    if moving.is_empty() or not limits.reached(cost := _cost_ns(view, moving)):
        return
    lanes, starts = moving["lane"].to_numpy(), moving["start_ns"].to_numpy()
    ends = starts + moving["duration_ns"].to_numpy()
    on_host = covered_by(moving).total_ns
    yield Found(
        f"for {view.percent(on_host)} of the {view.period} DistributedDataParallel handles buffers that rank 0 "
        "broadcasts before the model's first layer",
        cost,
        basis="idle time while buffers are flattened and copied, and the device's time for that"
        if view.device is not None
        else "time in which buffers are flattened and copied",
        confidence="medium",
        figures=[
            view.share_figure("in which the host flattens and copies buffers", on_host),
            view.ns_per_step("time in which the host flattens and copies buffers", on_host),
            view.count_per_step("such operators", moving.height),
        ],
        intervals=view.longest(moving, "buffers"),
        remedy=Remedy(
            "Do not broadcast buffers. If the running statistics must be those of all ranks, let batch normalisation "
            "exchange them.",
            "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)     # only if ranks must agree\n"
            "model = DistributedDataParallel(model, broadcast_buffers=False)",
        ),
        where=view.at_operators(rows_of(moving), moving["duration_ns"].to_numpy()),
        change=scaled_stretches(lanes, starts, ends, 0.0),
    )


def _cost_ns(view: View, moving: pl.DataFrame) -> int:
    host = covered_by(moving)
    if view.device is None:
        return host.total_ns
    starts = view.pieces["start_ns"].to_numpy()
    idle = host.overlap_of(starts, starts + view.pieces["duration_ns"].to_numpy())
    launched = pl.col("launch").is_in(view.launched_in(rows_of(moving)).astype(np.uint32).tolist())
    return int(idle.sum()) + covered_by(view.work.filter(launched)).total_ns


def buffer_broadcasts(view: View) -> pl.DataFrame:
    """The operators with which DistributedDataParallel broadcasts buffers before the model's first layer.

    Returns:
        Columns row (in `operators`), lane, start_ns, duration_ns (until the next of them begins) and broadcasts.
    """
    forwards = _forwards(view)
    parts = [pl.DataFrame(schema={**_EMPTY, "duration_ns": pl.Int64, "broadcasts": pl.Boolean})]
    for (lane,), mine in _outermost(view).group_by("lane", maintain_order=True):
        inside = forwards.filter(pl.col("lane") == lane)
        parts += [mine[first:last].pipe(_until_next) for first, last in _runs(mine, covered_by(inside))]
    return pl.concat([parts[0], *(part.select(parts[0].columns) for part in parts[1:])])


def _forwards(view: View) -> pl.DataFrame:
    tables = (view.trace.annotations.filter(pl.col("kind") == "host"), view.trace.operators)
    columns = ["lane", "start_ns", "duration_ns"]
    return view.begin_in_span(pl.concat([t.filter(pl.col("name") == _FORWARD).select(columns) for t in tables]))


def _outermost(view: View) -> pl.DataFrame:
    """Outermost operators, apart from the forward pass: row, lane, start_ns, duration_ns, and what they do."""
    name, around = pl.col("name"), view.trace.operators["name"].gather(view.operators["parent"])
    return (
        view.operators.filter((around == _FORWARD).fill_null(True) & (view.operators["name"] != _FORWARD))
        .select(
            *_EMPTY,
            "duration_ns",
            broadcasts=name.str.contains(_BROADCAST),
            packs=name.str.contains(_PACKS),
            moves=name.str.contains(_MOVES),
        )
        .sort("lane", "start_ns", maintain_order=True)
    )


def _runs(operators: pl.DataFrame, forwards: IntervalSet) -> Iterator[tuple[int, int]]:
    """First operator that packs buffers to last that copies them, for each forward pass that broadcasts."""
    starts, sends, packs = (operators[name].to_numpy() for name in ("start_ns", "broadcasts", "packs"))
    others = np.flatnonzero(~(sends | packs | operators["moves"].to_numpy()))
    broadcasts, begins = np.flatnonzero(sends), np.flatnonzero(sends | packs)
    for begin, end in zip(*_positions(starts, forwards), strict=True):
        first = broadcasts[np.searchsorted(broadcasts, begin) :][:1]
        if not len(first) or first[0] >= end:
            continue
        before, after = np.searchsorted(others, first[0]) - 1, np.searchsorted(others, first[0])
        least = max(begin, int(others[before]) + 1 if before >= 0 else 0)
        last = min(end, int(others[after]) if after < len(others) else len(starts))
        yield int(begins[np.searchsorted(begins, least)]), last


def _positions(starts: Rows, forwards: IntervalSet) -> tuple[list[int], list[int]]:
    return (
        np.searchsorted(starts, forwards.starts, side="left").tolist(),
        np.searchsorted(starts, forwards.ends, side="left").tolist(),
    )


def _until_next(run: pl.DataFrame) -> pl.DataFrame:
    following = pl.col("start_ns").shift(-1) - pl.col("start_ns")
    return run.with_columns(duration_ns=following.fill_null(pl.col("duration_ns")))


RULE: Final = Rule(
    id="buffer-broadcast",
    title="Buffers are broadcast before each forward pass",
    thresholds={"share": Threshold(0.02, "share", "share of the {period} that flattening and copying buffers costs")},
    check=check,
    needs=("operators",),
)
