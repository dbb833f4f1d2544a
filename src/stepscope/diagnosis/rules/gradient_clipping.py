"""# What it finds
Gradients whose norm is computed, and which are scaled, parameter by parameter.

# Why it costs time
A model has hundreds of parameters. A loop over them runs several short operators for each, and `.item()` on each norm
makes the host wait for the device as often. `clip_grad_norm_` does it with a few calls over lists of tensors.

# How it is measured
Runs of norms (or of `pow` and `sum`) outside the optimizer, one for each of many gradients, and the run of
multiplications in place that follows. With a device, its time for them and its idle time before them, without what the
same work takes at the best rate that the trace shows. Without one, the thread's time in them and between them,
without one norm and one multiplication for each gradient: these remain, the calls around them do not.

# Known false positives
Norms that are logged for every layer on purpose: compute them with `torch._foreach_norm` too, and not in every step.

# What to do
`torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`, which uses lists of tensors by default, or
`stepscope.remedies.clip_grad_norm`, which does not write gradients on a CPU that need no clipping.

# Reference
PyTorch documentation of `torch.nn.utils.clip_grad_norm_`, "foreach".
"""

from __future__ import annotations

from typing import Final

import numpy as np

from stepscope.analysis.loops import Loop, loops
from stepscope.analysis.work import base_name
from stepscope.diagnosis.finding import Evidence, Figure, Remedy, RuleResult, Threshold
from stepscope.diagnosis.rules._called import (
    is_clipping,
    is_scaling,
    pauses_ns,
    pauses_of_all,
    scaled_with_pauses,
    work_left,
    working_ns,
)
from stepscope.diagnosis.rules._copies import SHORT_KERNEL_NS
from stepscope.diagnosis.view import View
from stepscope.trace.nesting import Rows
from stepscope.whatif import Change
from stepscope.whatif.changes import scaled_host_time, scaled_slices, scaled_work_of, together, without_waits_in

ID: Final = "gradient-clipping"
TITLE: Final = "Gradients are clipped one by one"
NEEDS: Final = ("operators",)
THRESHOLDS: Final = {
    "gradients": Threshold(10, "count", "norms in a row that are those of gradients"),
    "share": Threshold(0.02, "share", "share of the step that clipping at once would save"),
}
REPLACES: Final = ("launch-bound",)

_KEPT: Final = ("linalg_vector_norm", "norm", "sum", "mul")
"""What one call for all gradients still does for each of them on a CPU."""


def check(view: View) -> RuleResult:
    """Find the runs, and weigh them together."""
    minimum = int(view.threshold(ID, THRESHOLDS, "gradients"))
    norms, scalings = _runs(view, max(minimum, 2))
    if not norms:
        return RuleResult()
    rows = np.concatenate([loop.operators for loop in norms + scalings])
    cost = view.cost_ns(rows) + sum(pauses_ns(view, loop.operators) for loop in norms + scalings)
    saved = max(cost - _left_ns(view, rows), 0)
    limit = view.threshold(ID, THRESHOLDS, "share")
    if saved == 0 or view.share(saved) < limit:
        return RuleResult()
    count = sum(loop.repetitions for loop in norms) / view.step_count
    waits = int(view.trace.operators["name"].gather(rows).is_in(["aten::item"]).sum()) / view.step_count
    finding = view.finding(
        ID,
        f"the norms of {count:,.0f} gradients are computed one by one in each step"
        + (f", and {waits:,.0f} of them are read with .item()" if waits >= 1 else ""),
        saved,
        basis="the loops over gradients, without what one call for all of them would still take",
        confidence="medium",
        evidence=Evidence(
            (
                Figure("share of the step that clipping at once would save", view.share(saved), "share", limit),
                Figure("norms in a row", max(loop.repetitions for loop in norms), "count", minimum),
                Figure("norms per step", count, "count"),
                Figure(
                    "gradients scaled per step", sum(loop.repetitions for loop in scalings) / view.step_count, "count"
                ),
                Figure("norms read by the host per step", waits, "count"),
                Figure("share of the step that the loops cost", view.share(cost), "share"),
            )
        ),
        remedy=Remedy(
            "Clip all gradients with one call over lists of tensors, and leave the norm on the device.",
            "from stepscope.remedies import clip_grad_norm\n"
            "norm = clip_grad_norm(model.parameters(), max_norm)   # no .item(); or torch's, with foreach by default:\n"
            "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
        ),
        where=view.locations_of(
            view.slices_of_operators(rows), np.maximum(view.trace.operators["duration_ns"].to_numpy()[rows], 1)
        ),
        change=_at_once(view, norms + scalings, rows, 1 - saved / cost),
    )
    return RuleResult((finding,))


def _runs(view: View, minimum: int) -> tuple[list[Loop], list[Loop]]:
    """The runs of norms, and those of multiplications in place that come next in the same step."""
    norms: list[Loop] = []
    scalings: list[Loop] = []
    found = loops(view.trace, view.activity, view.span, minimum, view.steps["start_ns"].to_numpy())
    pending = False
    for loop in sorted(found, key=lambda loop: int(loop.operators[0])):
        if is_clipping(loop):
            norms.append(loop)
            pending = True
        elif is_scaling(loop) and pending and loop.repetitions * 2 >= norms[-1].repetitions:
            scalings.append(loop)
            pending = False
    return norms, scalings


def _at_once(view: View, found: list[Loop], rows: Rows, left: float) -> Change:
    """One call for all gradients, whose norms nobody reads: of each loop the host runs the operators of one repetition.

    Args:
        left: share of the loops' time that stays on a CPU, where each gradient still takes its time in the one call.
    """
    between = pauses_of_all(view, [loop.operators for loop in found])
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
