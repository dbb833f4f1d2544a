"""# What it finds
The same few operators, run very many times in a row within a step.

# Why it costs time
A Python loop over tokens, samples or list items calls operators one small piece at a time. Each call pays for
Python, dispatch and launch, and its backward pass often allocates and fills a tensor of the full size for one
piece's gradient. One call over the whole tensor does the same work once.

# How it is measured
Runs of a short body of outermost operators that repeats without interruption on one thread within a step, outside the
optimizer and the data loader; with the backward calls that carry their sequence numbers. Their cost is the thread's
time in them; with a device, the device's time for what they launched plus its idle time before it. All repetitions but
one are counted as saved.

# Known false positives
Loops that are sequential by nature: a recurrent network's time steps, tokens of a generation. A deep stack of
identical tiny layers can look like a loop.

# What to do
Batch the loop: reshape so that the repeated dimension becomes part of one operator's input.

# Reference
PyTorch's ForLoopIndexingPattern (removed in 2026) looked for ten repeated aten::select.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.loops import Loop, loops
from stepscope.diagnosis.finding import Evidence, Figure, Finding, Interval, Remedy, RuleResult
from stepscope.diagnosis.threshold import Threshold
from stepscope.diagnosis.view import View
from stepscope.trace.nesting import Rows

ID: Final = "loop-in-step"
TITLE: Final = "A Python loop runs small operators many times"
THRESHOLDS: Final = {
    "repetitions": Threshold(32, "count", "repetitions in a row that make a loop"),
    "share": Threshold(0.02, "share", "share of the step that the loop costs"),
}


def check(view: View) -> RuleResult:
    """Find loops and sum each kind's cost over the span."""
    minimum = int(view.threshold(ID, THRESHOLDS, "repetitions"))
    limit = view.threshold(ID, THRESHOLDS, "share")
    kinds: defaultdict[tuple[str, ...], list[Loop]] = defaultdict(list)
    step_starts = view.steps["start_ns"].to_numpy()
    for loop in loops(view.trace, view.activity, view.span, max(minimum, 2), step_starts):
        kinds[_kind(loop)].append(loop)
    findings = []
    for same in kinds.values():
        finding = _finding(view, same, minimum, limit)
        if finding is not None:
            findings.append(finding)
    return RuleResult(tuple(findings))


def _kind(loop: Loop) -> tuple[str, ...]:
    """The body, whichever of its operators the run happened to begin with."""
    turns = [loop.body[turn:] + loop.body[:turn] for turn in range(len(loop.body))]
    return min(turns)


def _finding(view: View, same: list[Loop], minimum: int, limit: float) -> Finding | None:
    forward = np.concatenate([loop.operators for loop in same])
    backward = np.unique(np.concatenate([loop.backward for loop in same]))
    rows = np.concatenate([forward, backward])
    repetitions = sum(loop.repetitions for loop in same)
    longest = max(loop.repetitions for loop in same)
    cost = _cost_ns(view, rows)
    saved = cost * (repetitions - len(same)) // repetitions
    if saved <= 0 or view.share(cost) < limit:
        return None
    allocated = int(_inside(view, rows, view.operator_costs["bytes_allocated"]))
    per_step = repetitions / view.step_count
    body = ", ".join(dict.fromkeys(same[0].body))
    durations = view.trace.operators["duration_ns"].to_numpy()[forward]
    largest = max(same, key=lambda loop: loop.repetitions)
    return view.finding(
        ID,
        f"{body} {'run' if len(same[0].body) > 1 else 'runs'} {_how_often(longest, per_step)}: "
        "a loop that one batched call replaces",
        saved,
        basis="all repetitions but one, forward and backward" if len(backward) else "all repetitions but one",
        confidence="medium",
        evidence=Evidence(
            (
                Figure("repetitions in a row", longest, "count", minimum),
                Figure("repetitions per step", per_step, "count"),
                Figure("share of the step that the loop costs", view.share(cost), "share", limit),
                Figure("backward calls per step", len(backward) / view.step_count, "count"),
                Figure("bytes allocated per repetition", allocated // repetitions, "bytes"),
                Figure("bytes allocated per step", allocated // view.step_count, "bytes"),
            ),
            (_interval(view, largest),),
        ),
        remedy=_remedy(same[0].body),
        where=view.locations_of(view.slices_of_operators(forward), np.maximum(durations, 1)),
    )


def _how_often(longest: int, per_step: float) -> str:
    if longest == per_step:
        return f"{longest:,} times in a row in each step"
    return f"up to {longest:,} times in a row, {per_step:,.0f} times a step"


def _cost_ns(view: View, rows: Rows) -> int:
    """The threads' time in these outermost operators; with a device, its time for their work and idle before it."""
    operators = view.trace.operators
    if view.device is None:
        return int(operators["duration_ns"].to_numpy()[rows].sum())
    device = int(view.operator_costs["device_total_ns"].to_numpy()[rows].sum())
    outermost = _outermost(view)
    launches = view.trace.launches["operator"].cast(pl.Int64).fill_null(-1).to_numpy()
    of_loop = np.isin(np.where(launches >= 0, outermost[np.maximum(launches, 0)], -1), rows)
    launch = view.pieces["launch"].cast(pl.Int64).fill_null(-1).to_numpy()
    blamed = (launch >= 0) & of_loop[np.maximum(launch, 0)] if len(of_loop) else np.zeros(len(launch), np.bool_)
    return device + int(view.pieces["duration_ns"].to_numpy()[blamed].sum())


def _outermost(view: View) -> Rows:
    """For each operator, the outermost operator around it or itself."""
    parent = view.trace.operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    top = np.arange(len(parent))
    while (active := np.flatnonzero(parent[top] >= 0)).size:
        top[active] = parent[top[active]]
    return top


def _inside(view: View, rows: Rows, values: pl.Series) -> int:
    """The sum of values over these outermost operators and everything inside them."""
    return int(values.to_numpy()[np.isin(_outermost(view), rows)].sum())


def _interval(view: View, loop: Loop) -> Interval:
    operators = view.trace.operators
    begin = operators["start_ns"][int(loop.operators[0])]
    last = int(loop.operators[-1])
    end = operators["start_ns"][last] + operators["duration_ns"][last]
    return Interval(begin, end - begin, f"{loop.repetitions} repetitions")


def _remedy(body: tuple[str, ...]) -> Remedy:
    if any("cross_entropy" in name or "nll_loss" in name for name in body):
        return Remedy(
            "Compute the loss over all positions at once instead of one by one.",
            "# instead of: sum(cross_entropy(logits[:, i], targets[:, i]) for i in range(length)) / length\n"
            "loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())",
        )
    if any(name.startswith(("aten::select", "aten::slice", "aten::narrow", "aten::index")) for name in body):
        return Remedy(
            "The loop takes one slice of a tensor at a time: apply the operators to the whole tensor, with the loop's "
            "dimension as a batch dimension.",
            "result = function(tensor)            # or torch.vmap(function)(tensor), instead of a loop over tensor[i]",
        )
    return Remedy(
        "Collect the loop's inputs in one tensor and call the operators once, or use their torch._foreach_ forms.",
        "result = function(torch.stack(pieces))   # instead of [function(piece) for piece in pieces]",
    )
