"""# What it finds
DistributedDataParallel copies gradients out of its buckets after reducing them.

# Why it costs time
By default each gradient is stored twice: in the parameter and in the bucket that is sent. After the reduction every
bucket is copied back to the gradients.

# How it is measured
The time of the reducer's operators that copy buckets into gradients.

# Known false positives
Code that detaches gradients in place (`gradient.detach_()`) does not work with views; `zero_grad(set_to_none=True)`
does.

# What to do
`gradient_as_bucket_view=True`.

# Reference
PyTorch's documentation of DistributedDataParallel, gradient_as_bucket_view.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View, rows_of
from stepscope.whatif.changes import scaled_operators

_COPY: Final = "torch.distributed.ddp.reducer::copy_bucket_to_grad"


def check(view: View, limits: Limits) -> Answers:
    copies = view.operators.filter(pl.col("name") == _COPY)
    rows = rows_of(copies)
    cost = view.cost_ns(rows)
    held = max((facts.gradient_bytes or 0 for facts in view.program.data_parallel), default=0)
    yield Found(
        f"{len(rows) / view.step_count:,.0f} gradients {view.a_step} are copied out of the buckets they travelled in: "
        f"{view.share(cost):.1%} of the {view.period}",
        cost,
        basis="the copies from buckets to gradients",
        confidence="medium",
        figures=[
            view.count_per_step("copies", len(rows)),
            *([Figure("bytes of gradients that are held twice", held, "bytes")] if held else []),
        ],
        intervals=view.longest(copies, "copy"),
        remedy=Remedy(
            "Let gradients be views of the buckets.",
            "model = DistributedDataParallel(model, gradient_as_bucket_view=True)\n"
            "from stepscope.remedies import DataParallelSettings      # also as a Lightning strategy\n"
            "model = DataParallelSettings(gradient_as_bucket_view=True).ddp(model)",
            apply=("gradient-view",),
        ),
        change=scaled_operators(rows, 0.0),
    )


RULE: Final = Rule(
    id="gradient-copies",
    title="Reduced gradients are copied out of their buckets",
    thresholds={"share": Threshold(0.01, "share", "share of the {period} that the copies cost")},
    check=check,
    needs=("operators",),
)
