"""# What it finds
Losses over very many classes that copy the scores (logits) several times, scores of all positions of which only the
last ones are used, and embedding tables whose gradients are as large as the tables.

# Why it costs time
A language model's scores hold one number for every position and every word of the vocabulary, often the largest tensor
of the step. Converting it, normalising it, and clearing and filling its gradient each write another tensor of that
size. Embedding tables have the same problem in the backward pass: a batch reads a few thousand rows, but a dense
gradient has every row, and the optimizer reads and writes them all.

# How it is measured
Scores: the operators between the product that makes the scores (positions, classes) and the loss, the loss itself, and
their backward operators. On a device, their time beyond one normalisation is counted as saved, because a loss in blocks
keeps nothing. On a CPU, the conversions are counted as saved, and for each other tensor of that size that takes new
memory the time to clear one, because that memory must be mapped first. As many tensors count as the pages hold that a
step maps while it is not recorded, where that is known: smaller tensors find the memory of earlier steps, and recording
takes it from them. If the recording shows that the loss ignores positions, their share of
all this, including the product, is counted. Scores that nothing trains: the product and conversions of all positions,
by the share that the next operators leave out. Tables: operators on tensors of the table's shape and the lookups'
backward operators, less twice the share of rows that the batch really reads, because a sparse row takes more work.

# Known false positives
Few optimizers accept sparse gradients (SGD, SparseAdam, Adagrad), and they update rows only when they are read: with
momentum or weight decay this changes the training.

# What to do
Compute scores only for positions that count; compute the loss in blocks of positions, with
`stepscope.remedies.linear_cross_entropy` or `chunked_cross_entropy`, or your own code; do not convert the scores. Use
`sparse=True` for tables if a batch reads few of their rows.

# Reference
Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2024); PyTorch's documentation of nn.Embedding.
Blocks of 128 positions took 37 % off a step of 512 positions and 30,000 classes, measured with PyTorch 2.13 on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from stepscope.analysis.conversions import casts
from stepscope.analysis.patterns import (
    DenseTable,
    LogitsLoss,
    dense_tables,
    logits_losses,
    unread_scores,
)
from stepscope.analysis.work import elements, shapes_of
from stepscope.diagnosis.lines.costs import settings_at
from stepscope.diagnosis.recording_costs import PAGE_BYTES, faults_before
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rows, Rule, Threshold, View, rows_of
from stepscope.whatif.changes import scaled_work_of

_COPIES: Final = ("aten::contiguous", "aten::clone")
_SHIFTED: Final = 0.1
"""Allowed relative difference between numbers of targets and scores: targets are the next positions' tokens."""
_SPARSE_WORK: Final = 2
"""Factor by which a row takes longer in a sparse gradient."""


def check(view: View, limits: Limits) -> Answers:
    if view.trains:
        yield from _scores(view, limits)
    else:
        yield from _unread(view, limits)
    yield from _tables(view, limits)


def _scores(view: View, limits: Limits) -> Answers:
    fewest = int(limits["classes"])
    losses = logits_losses(view.trace, rows_of(view.operators), max(fewest, 2))
    if not losses:
        return
    forward = np.unique(np.concatenate([loss.operators for loss in losses]))
    projections = np.unique([loss.projection for loss in losses])
    handling = np.concatenate([forward, view.backward_of(forward)])
    making = np.concatenate([projections, view.backward_of(projections)])
    everything = np.concatenate([handling, making])
    cost = view.cost_ns(everything)
    ignored = _ignored_share(view, losses)
    in_blocks = _saved_in_blocks_ns(view, losses, handling)
    saved = ignored * cost + (1 - ignored) * in_blocks
    handling_ns = max(view.cost_ns(handling), 1)
    if not limits.reached(saved):
        return
    largest = max(losses, key=lambda loss: loss.positions * loss.classes)
    places = np.concatenate([view.outermost(forward), projections])
    yield Found(
        f"the loss handles {largest.positions:,} by {largest.classes:,} scores at once"
        + (f", {ignored:.0%} of which do not count" if ignored else "")
        + f": {view.percent(cost)} of the {view.period}",
        saved,
        basis="tensors as large as the scores that a loss in blocks does without"
        + (", and the part of positions that the loss ignores" if ignored else ""),
        confidence="medium",
        figures=[
            Figure("classes", largest.classes, "count", fewest),
            Figure("positions", largest.positions, "count"),
            Figure("bytes of the scores", largest.score_bytes, "bytes"),
            view.share_figure("in making the scores and the loss", cost),
            Figure("share of it in the loss and conversions", handling_ns / max(cost, 1), "share"),
            *([Figure("share of positions that the loss ignores", ignored, "share")] if ignored else []),
        ],
        remedy=_remedy(bool(ignored)),
        where=view.at_operators(places),
        change=scaled_work_of(
            np.concatenate([making, handling]),
            (1 - ignored) * np.repeat([1.0, 1 - in_blocks / handling_ns], [len(making), len(handling)]),
        ),
    )


def _unread(view: View, limits: Limits) -> Answers:
    found = list(unread_scores(view.trace, rows_of(view.operators), max(int(limits["classes"]), 2)))
    costs = np.array([view.cost_ns(scores.rows) for scores in found])
    left = np.array([scores.kept / scores.positions for scores in found])
    saved = float((costs * (1 - left)).sum())
    if not found or not limits.reached(saved):
        return
    largest = max(found, key=lambda scores: scores.positions * scores.classes)
    rows = [view.outermost(scores.rows) for scores in found]
    yield Found(
        f"the scores of {largest.positions:,} positions by {largest.classes:,} classes are computed, of which "
        f"{largest.kept:,} are used: {view.percent(saved)} of the {view.period} goes to the others",
        saved,
        basis="the product that makes the scores and their conversions, by the share of positions that is not used",
        confidence="medium",
        figures=[
            Figure("classes", largest.classes, "count", int(limits["classes"])),
            Figure("positions", largest.positions, "count"),
            Figure("positions whose scores are used", largest.kept, "count"),
            view.share_figure("in scores that nothing uses", saved),
            view.count_per_step("times that such scores are made", len(found)),
        ],
        remedy=_REMEDY_OF_INFERENCE,
        where=view.at_operators(np.unique(np.concatenate(rows))),
        change=scaled_work_of(np.concatenate(rows), np.repeat(left, [len(each) for each in rows])),
    )


_REMEDY_OF_INFERENCE: Final = Remedy(
    "Compute the scores of the positions alone that are used: cut the hidden states before the last layer.",
    "logits = model(tokens, logits_to_keep=1).logits[:, -1]     # Transformers; generate() does so by itself\n"
    "# in a model of your own:\n"
    "logits = self.head(hidden[:, -1])                          # instead of self.head(hidden)[:, -1]",
)


def _saved_in_blocks_ns(view: View, losses: list[LogitsLoss], handling: Rows) -> int:
    """Time of the loss and the conversions that computing them in blocks would save."""
    converting = _conversions(view, handling, losses)
    if view.device is not None:
        # One pass over the scores remains.
        kept = view.cost_ns(np.unique([loss.log_softmax for loss in losses]))
        return max(view.cost_ns(handling) - kept, 0)
    # Time to clear a fresh tensor as large as the scores, for all losses; each loss does so for its gradient.
    cleared = _on_scores(view, handling, losses, ("aten::zero_",))
    fresh = int(view.trace.operators["duration_ns"].to_numpy()[cleared].sum())
    backward = view.backward_of(np.unique([loss.projection for loss in losses]))
    tensors = min(4 if len(backward) else 2, _mapped(view, losses))  # scores, their logarithms, the gradients of both
    return min(view.cost_ns(converting) + int(tensors * fresh), view.cost_ns(handling))


def _mapped(view: View, losses: list[LogitsLoss]) -> float:
    """Tensors as large as the scores that a step maps new memory for while it is not recorded; infinite if unknown."""
    faults = faults_before(view.trace.metadata, view.step_ns)
    held = sum(loss.score_bytes for loss in losses)
    return math.inf if faults is None or not held else faults * PAGE_BYTES * view.step_count / held


def _conversions(view: View, handling: Rows, losses: list[LogitsLoss]) -> Rows:
    """Outermost operators that convert or copy the scores or their gradients."""
    sizes = {loss.positions * loss.classes for loss in losses}
    inside = np.flatnonzero(view.inside(handling))
    found = [cast.row for cast in casts(view.trace, inside) if elements(cast.shape) in sizes]
    copies = _on_scores(view, handling, losses, _COPIES)
    return view.outermost(np.unique(np.concatenate([np.array(found, np.int64), copies])))


def _on_scores(view: View, handling: Rows, losses: list[LogitsLoss], names: Sequence[str]) -> Rows:
    """Operators with these names whose first input is as large as the scores."""
    sizes = {loss.positions * loss.classes for loss in losses}
    inside = np.flatnonzero(view.inside(handling))
    columns = view.trace.operators.select("name", "input_shapes")[inside]
    large = [name in names and elements(next(iter(shapes_of(text)), ())) in sizes for name, text in columns.iter_rows()]
    return inside[large]


def _ignored_share(view: View, losses: list[LogitsLoss]) -> float:
    """The share of positions that the loss ignores, from recorded targets of the same size; 0 if unknown."""
    positions = {loss.positions for loss in losses}
    return max(
        (
            sample.ignored_share or 0.0
            for sample in view.program.padding
            if sample.batches
            and any(abs(sample.positions / sample.batches - count) <= _SHIFTED * count for count in positions)
        ),
        default=0.0,
    )


def _remedy(ignored: bool) -> Remedy:
    if ignored:
        return Remedy(
            "Compute scores only where the loss looks at them, and leave them in the type they come in.",
            "counted = targets != -100\n"
            "loss = cross_entropy(model.head(features[counted]), targets[counted])   # instead of all positions",
        )
    return Remedy(
        "Take the loss in blocks of positions, so that no tensor is as large as all scores; leave the scores in the "
        "type they come in, and compute them only for positions that count.",
        "from stepscope.remedies import linear_cross_entropy    # never holds the scores\n"
        "loss = linear_cross_entropy(features, model.head.weight, targets)\n"
        "# or by hand, in blocks of 128 positions:\n"
        "held = features.detach().requires_grad_()            # (positions, width)\n"
        "for block, wanted in zip(held.split(128), targets.split(128)):\n"
        '    (cross_entropy(model.head(block), wanted, reduction="sum") / len(targets)).backward()\n'
        "features.backward(held.grad)",
        apply=("chunked-loss",),
    )


def _tables(view: View, limits: Limits) -> Answers:
    fewest = int(limits["rows"])
    most = limits["read"]
    tables = dense_tables(view.trace, rows_of(view.operators), max(fewest, 2))
    tables = [table for table in tables if _read(table) <= most]
    work = [np.unique(np.concatenate([table.whole, view.backward_of(table.lookups)])) for table in tables]
    costs = [view.cost_ns(rows) for rows in work]
    parts = [max(1 - _SPARSE_WORK * _read(table), 0.0) for table in tables]
    saved = sum(cost * part for cost, part in zip(costs, parts, strict=True))
    if not limits.reached(saved):
        return
    largest, cost = tables[int(np.argmax(costs))], sum(costs)
    rows, width = largest.shape
    yield Found(
        f"a batch reads {_read(largest):.1%} of a table's {rows:,} rows, but its gradient and the optimizer go through "
        f"all: {view.percent(cost)} of the {view.period}",
        saved,
        basis="operators on whole tables and their gradients, less twice the share of rows that the batch reads",
        confidence="medium",
        figures=[
            Figure("rows of the table", rows, "count", fewest),
            Figure("share of its rows that a batch reads at most", _read(largest), "share", most),
            Figure("bytes of its gradient", 4 * rows * width, "bytes"),
            view.share_figure("in work on whole tables", cost),
        ],
        remedy=Remedy(
            "Let the gradient hold only the rows that were read, and an optimizer update only those.",
            "table = torch.nn.Embedding(rows, width, sparse=True)\n"
            "optimizer = torch.optim.SparseAdam(table.parameters())    # or SGD, Adagrad; the rest keeps its own",
        ),
        where=(
            *settings_at(view, "Embedding", without="sparse=True"),
            *view.at_operators(np.concatenate([table.lookups for table in tables])),
        ),
        change=scaled_work_of(np.concatenate(work), 1 - np.repeat(parts, [len(rows) for rows in work])),
    )


def _read(table: DenseTable) -> float:
    """The largest share of a table's rows that one lookup can read."""
    return min(table.indices / table.shape[0], 1.0)


RULE: Final = Rule(
    id="large-logits",
    title="Scores of many classes, or embedding tables, are processed whole",
    thresholds={
        "share": Threshold(0.03, "share", "share of the {period} that processing them in parts would save"),
        "classes": Threshold(2000, "count", "classes above which a loss has many"),
        "rows": Threshold(5000, "count", "rows of a table that are many"),
        "read": Threshold(0.25, "share", "share of a table's rows that a batch reads at most"),
    },
    check=check,
    needs=("operators", "shapes"),
)
