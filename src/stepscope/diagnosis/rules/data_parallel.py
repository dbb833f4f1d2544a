"""# What it finds
A model in `nn.DataParallel`: one process drives several devices.

# Why it costs time
In every step the model is copied to all devices, the batch is split, and results and gradients are gathered on the
first device. One Python process launches the work of all devices, and the interpreter lets only one thread run at a
time.

# How it is measured
The device's time for the operators that copy the model (Broadcast), split the batch (Scatter) and gather results
(Gather, ReduceAddCoalesced), and for their backward counterparts, plus its idle time before them.

# Known false positives
None known. With one device there is nothing to copy, and nothing is reported.

# What to do
Use `DistributedDataParallel` with one process per device.

# Reference
PyTorch's documentation of nn.DataParallel, which recommends DistributedDataParallel even on one machine.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View, rows_of
from stepscope.whatif.changes import scaled_operators

_NAMES: Final = (
    r"^(?:autograd::engine::evaluate_function: )?(?:Broadcast|Scatter|Gather|ReduceAddCoalesced)(?:Backward)?$"
)
_MODEL: Final = "Broadcast"


def check(view: View, limits: Limits) -> Answers:
    found = view.operators.filter(pl.col("name").str.contains(_NAMES))
    if view.device is None or not found["name"].str.contains(_MODEL).any():
        return
    rows = view.outermost(rows_of(found))
    calls = pl.col("launch").is_in(view.launched_in(rows).astype(np.uint32).tolist())
    # Time of the busiest device for the work of these operators, and its idle time before that.
    cost = sum(int(table.filter(calls)["duration_ns"].sum()) for table in (view.work, view.pieces))
    devices = view.trace.device_work["device"].n_unique()
    yield Found(
        f"DataParallel copies the model to {devices} devices and collects from them {view.each_step}: "
        f"{view.percent(cost)} of it",
        cost,
        basis="the busiest device's time for copying the model, splitting the batch and collecting, and idle time "
        "before that",
        confidence="medium",
        figures=[Figure("devices", devices, "count"), view.count_per_step("copies and collections", len(rows))],
        remedy=Remedy(
            "Run one process a device: the model stays where it is, and gradients travel during the backward pass.",
            "# torchrun --nproc-per-node=" + str(max(devices, 2)) + " train.py\n"
            'torch.distributed.init_process_group("nccl")\n'
            'device = int(os.environ["LOCAL_RANK"])\n'
            "model = torch.nn.parallel.DistributedDataParallel(model.to(device), device_ids=[device])",
        ),
        where=view.at_operators(rows),
        change=scaled_operators(rows, 0.0),
    )


RULE: Final = Rule(
    id="data-parallel",
    title="One process drives several devices with DataParallel",
    thresholds={"share": Threshold(0.02, "share", "share of the {period} that copying and collecting costs")},
    check=check,
    replaces=("exposed-communication",),
)
