"""# What it finds
Gradient clipping that computes norms and scales gradients one parameter at a time.

# Why it costs time
A model has hundreds of parameters. A loop over them runs several short operators for each, and `.item()` on each norm
makes the host wait for the device each time. `clip_grad_norm_` needs only a few calls over lists of tensors.

# How it is measured
Runs of norms (or of `pow` and `sum`) outside the optimizer, one for each of many gradients, and the run of in-place
multiplications that follows. With a device, the cost is its time for them and its idle time before them, minus the time
of the same work at the best rate in the trace. Without a device, it is the thread's time in them and between them,
minus one norm and one multiplication for each gradient, which remain when the calls around them are gone.

# Known false positives
Norms that are deliberately logged for every layer: compute them with `torch._foreach_norm` as well, and not in every
step.

# What to do
Use `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`, which uses lists of tensors by default, or
`stepscope.remedies.clip_grad_norm`, which on a CPU does not write gradients that need no clipping.

# Reference
PyTorch documentation of `torch.nn.utils.clip_grad_norm_`, "foreach".
"""

from __future__ import annotations

from typing import Final

import numpy as np

from stepscope.analysis.loops import Loop, loops
from stepscope.analysis.work import base_name
from stepscope.diagnosis.rule import Answers, Change, Figure, Found, Limits, Remedy, Rows, Rule, Threshold, View
from stepscope.diagnosis.rules._operators import (
    SHORT_KERNEL_NS,
    is_clipping,
    is_scaling,
    length_ns,
    pauses,
    scaled_with_pauses,
    work_left,
    working_ns,
)
from stepscope.whatif.changes import scaled_host_time, scaled_slices, scaled_work_of, together, without_waits_in

_KEPT: Final = ("linalg_vector_norm", "norm", "sum", "mul")
"""Operators that a single call for all gradients still runs for each of them on a CPU."""


def check(view: View, limits: Limits) -> Answers:
    minimum = int(limits["gradients"])
    norms, scalings = _runs(view, max(minimum, 2))
    if not norms:
        return
    rows = np.concatenate([loop.operators for loop in norms + scalings])
    between = pauses(view, *(loop.operators for loop in norms + scalings))
    cost = view.cost_ns(rows) + length_ns(view, between)
    saved = max(cost - _left_ns(view, rows), 0)
    if not limits.reached(saved):
        return
    count = sum(loop.repetitions for loop in norms) / view.step_count
    waits = int(view.trace.operators["name"].gather(rows).is_in(["aten::item"]).sum()) / view.step_count
    yield Found(
        f"the norms of {count:,.0f} gradients are computed one by one {view.each_step}"
        + (f", and {waits:,.0f} of them are read with .item()" if waits >= 1 else ""),
        saved,
        basis="the loops over gradients, without what one call for all of them would still take",
        confidence="medium",
        figures=[
            Figure("norms in a row", max(loop.repetitions for loop in norms), "count", minimum),
            Figure(f"norms {view.per}", count, "count"),
            view.count_per_step("gradients scaled", sum(loop.repetitions for loop in scalings)),
            Figure(f"norms read by the host {view.per}", waits, "count"),
            view.share_figure("that the loops cost", cost),
        ],
        remedy=Remedy(
            "Clip all gradients with one call over lists of tensors, and leave the norm on the device.",
            "from stepscope.remedies import clip_grad_norm\n"
            "norm = clip_grad_norm(model.parameters(), max_norm)   # no .item(); or torch's, with foreach by default:\n"
            "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
        ),
        where=view.at_operators(rows),
        change=_at_once(view, norms + scalings, rows, 1 - saved / cost),
    )


def _runs(view: View, minimum: int) -> tuple[list[Loop], list[Loop]]:
    """The runs of norms, and the runs of in-place multiplications that come next in the same step."""
    norms: list[Loop] = []
    scalings: list[Loop] = []
    found = loops(view.trace, view.activity, view.span, minimum, view.steps["start_ns"].to_numpy())
    pending = False
    for loop in sorted(found, key=lambda loop: int(loop.operators[0])):
        if is_clipping(loop) and not len(view.backward_of(loop.operators)):  # a gradient penalty
            norms.append(loop)
            pending = True
        elif is_scaling(loop) and pending and loop.repetitions * 2 >= norms[-1].repetitions:
            scalings.append(loop)
            pending = False
    return norms, scalings


def _at_once(view: View, found: list[Loop], rows: Rows, left: float) -> Change:
    """Replace the loops by one call whose norms nobody reads.

    The host then runs the operators of one repetition of each loop.

    Args:
        left: share of the loops' time that remains on a CPU, where the single call still spends time on each
            gradient.
    """
    between = pauses(view, *(loop.operators for loop in found))
    if view.device is None:
        return scaled_with_pauses(rows, [between], left)
    working = int(working_ns(view)[view.outermost(rows)].sum())
    operators = view.trace.operators[rows]
    starts = operators["start_ns"].to_numpy()
    calls = sum(len(loop.body) for loop in found)
    once = calls / len(rows)
    kernels = int(_left_ns(view, rows)) + SHORT_KERNEL_NS * calls
    return together(
        scaled_work_of(rows, min(kernels / max(working, 1), 1.0)),
        scaled_slices(view.slices_of_operators(rows), once),
        scaled_host_time(*between, once),
        without_waits_in(operators["lane"].to_numpy(), starts, starts + operators["duration_ns"].to_numpy()),
    )


def _left_ns(view: View, rows: Rows) -> int:
    if view.device is not None:
        return int(work_left(view).ns(rows))
    operators = view.trace.operators
    kept = [base_name(name) in _KEPT for name in operators["name"].gather(rows)]
    return int(operators["duration_ns"].to_numpy()[rows][np.array(kept, np.bool_)].sum())


RULE: Final = Rule(
    id="gradient-clipping",
    title="Gradients are clipped one by one",
    thresholds={
        "gradients": Threshold(10, "count", "norms in a row that are those of gradients"),
        "share": Threshold(0.02, "share", "share of the {period} that clipping at once would save"),
    },
    check=check,
    needs=("operators",),
    replaces=("launch-bound",),
    remedies={
        "hpu": Remedy(
            "Clip all gradients with one operator.",
            "from habana_frameworks.torch.hpex.normalization import FusedClipNorm\n"
            "clipping = FusedClipNorm(model.parameters(), 1.0)               # once, before the loop\n"
            "clipping.clip_norm(model.parameters())",
        ),
    },
)
