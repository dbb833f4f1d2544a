"""# What it finds
Tensors that each step creates on the host and copies to the device.

# Why it costs time
`torch.zeros(...).to(device)` fills memory on the host and copies it. The host waits for a copy from pageable memory,
and therefore for all earlier work. The device could create the tensor itself with one short kernel and no wait.

# How it is measured
Copies to the device, outside the data loader, whose operator comes right after one on the same thread that created a
tensor (zeros, ones, full, arange, rand, tensor and similar) and launched nothing. Their cost is the device's time for
the copies and its idle time in the two operators and after the wait. One short kernel for each tensor remains.

# Known false positives
Values that only the host knows must be copied: collect them in one pinned tensor and copy it asynchronously.

# What to do
Pass `device=` to the function that creates the tensor, or create it once outside the loop.

# Reference
PyTorch performance tuning guide, "Create tensors directly on the target device"; PyTorch's ExtraCUDACopyPattern
(removed in 2026).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.host import CAUSE_CODES
from stepscope.analysis.work import base_name
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rows, Rule, Threshold, View, rows_of
from stepscope.diagnosis.rules._operators import SHORT_KERNEL_NS, copies, lost_ns, outermost_in_order, work_of
from stepscope.whatif import Change
from stepscope.whatif.changes import Lanes, scaled_operators, scaled_work, together, without_waits_in

# fmt: off
_MAKING: Final = frozenset({
    "zeros", "ones", "full", "arange", "rand", "randn", "randint", "randperm", "eye", "linspace", "tensor",
    "scalar_tensor", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "tril", "triu", "fill", "zero",
    "normal", "uniform", "lift_fresh", "detach", "bernoulli", "new_zeros", "new_ones", "new_full", "new_tensor",
})
# fmt: on
_PASSING: Final = frozenset({"detach", "lift_fresh", "to"})
_NEAR: Final = 4
"""Number of operators before a copy among which its tensor must have been created."""


def check(view: View, limits: Limits) -> Answers:
    found = _made_and_copied(view) if view.device is not None else pl.DataFrame()
    if found.is_empty():
        return
    idle = lost_ns(view, found["made_ns"].to_list(), found["end_ns"].to_list(), found["launch"].to_list())
    cost = max(idle + int(found["copy_ns"].sum()) - SHORT_KERNEL_NS * found.height, 0)
    count = found.height / view.step_count
    makers = view.trace.operators["name"].gather(found["maker"]).value_counts(sort=True)["name"].to_list()
    rows = rows_of(found)
    yield Found(
        f"{count:,.3g} tensors {view.a_step} are made on the host ({', '.join(makers[:3])}) and copied to the device",
        cost,
        basis="the copies and the device's idle time around them, without a short kernel for each",
        confidence="medium",
        figures=[
            Figure(f"such tensors {view.per}", count, "count"),
            *view.bytes_of("bytes copied", found["bytes"]),
        ],
        remedy=Remedy(
            "Make the tensor where it is used, or once before the loop if it does not change.",
            f"mask = torch.{_function(makers[0])}(..., device=batch.device)   # instead of making it and .to(device)",
        ),
        where=view.locations_of(view.slices_of_operators(rows), np.maximum(found["copy_ns"].to_numpy(), 1)),
        change=_made_on_the_device(view, found),
    )


def _made_on_the_device(view: View, found: pl.DataFrame) -> Change:
    """Remove the operators that created the tensors; each copy becomes a short kernel that nobody waits for."""
    operators = view.trace.operators[found["row"]]
    starts = operators["start_ns"].to_numpy()
    work = work_of(view, found["launch"].to_list())
    durations = view.trace.device_work["duration_ns"].to_numpy()[work]
    return together(
        scaled_operators(found["maker"].to_numpy().astype(np.int64), 0.0),
        without_waits_in(operators["lane"].to_numpy(), starts, starts + operators["duration_ns"].to_numpy()),
        scaled_work(work, np.minimum(SHORT_KERNEL_NS / np.maximum(durations, 1), 1.0)),
    )


def _function(maker: str) -> str:
    name = base_name(maker)
    return "tensor" if name in ("lift_fresh", "detach") else name


def _made_and_copied(view: View) -> pl.DataFrame:
    """Copies as in `copies`, with the row and start of the operator that created the tensor."""
    found = copies(view).filter(pl.col("direction") == "copy_in").unique("row", keep="first", maintain_order=True)
    ordered, position = outermost_in_order(view)
    maker = _makers(view, ordered, position[found["row"].to_numpy()], found["lane"].to_numpy())
    is_made = maker >= 0
    starts = view.trace.operators["start_ns"].to_numpy()[maker[is_made]]
    return found.filter(pl.Series(is_made)).with_columns(
        maker=pl.Series(maker[is_made], dtype=pl.UInt32), made_ns=pl.Series(starts, dtype=pl.Int64)
    )


def _makers(view: View, ordered: Rows, copied: Rows, lanes: Lanes) -> Rows:
    """For each copying operator the one that created what it copies; -1 if the data came from elsewhere.

    Args:
        ordered: as from `outermost_in_order`.
        copied, lanes: positions in it and lanes of the copying operators.
    """
    operators = view.trace.operators
    base = {name: base_name(name) for name in operators["name"].unique()}
    names, own_lane = operators["name"].gather(ordered), operators["lane"].to_numpy()[ordered]
    is_input = view.activity.cause_of(view.slices_of_operators(ordered)) == CAUSE_CODES["input"]
    launching = np.zeros(operators.height, np.bool_)
    launching[view.trace.launches["operator"].drop_nulls().to_numpy()] = True
    known = names.is_in([name for name in base if base[name] in _MAKING | _PASSING]).to_numpy()
    known &= ~launching[ordered] & ~is_input
    passes = names.is_in([name for name in base if base[name] in _PASSING - {"lift_fresh"}]).to_numpy()
    maker = np.full(len(copied), -1, np.int64)
    open_ = np.arange(len(copied))
    for back in range(1, _NEAR + 1):
        open_ = open_[copied[open_] >= back]
        before = copied[open_] - back
        open_, before = (each[known[before] & (own_lane[before] == lanes[open_])] for each in (open_, before))
        maker[open_[~passes[before]]] = ordered[before[~passes[before]]]
        open_ = open_[passes[before]]
    return maker


RULE: Final = Rule(
    id="host-created-tensor",
    title="Tensors are made on the host and copied to the device",
    thresholds={"share": Threshold(0.02, "share", "share of the {period} lost to making tensors on the host")},
    check=check,
    needs=("operators",),
    replaces=("exposed-copy", "host-synchronisation"),
)
