"""# What it finds
Matrix products, convolutions, attention, normalisation and element-wise work that run far below the device's limits.

# Why it costs time
Every operator has to do a number of arithmetic operations and move its tensors through memory. The device has a peak
rate for both. A kernel that reaches only a small part of the peak that limits it is slowed by something else: sizes
that do not fill its tiles, a memory layout with strided reads, a slow variant of the algorithm.

# How it is measured
Operations and bytes follow from the recorded shapes and types, peaks from the vendors' figures (`stepscope roofline`
shows both). The saving is the kernels' time beyond what they would take at the share of the peak that good kernels
reach: for arithmetic a part of the best rate measured on such a device, for memory bandwidth a fixed share. Work counts
only where the device determines the step's length, and not where the host was late anyway. The rule ignores very short
kernels, kernels with too few thread blocks (low-occupancy reports them) and attention that is written out
(unfused-attention reports it).

# Known false positives
Shapes do not show strides: expanded tensors are smaller in memory than their shape. Caching makes tensors faster or
slower to read than memory bandwidth suggests. Sparse or masked attention does less work than its shapes suggest.

# What to do
It depends on the kind of work: sizes that are multiples of 64 for matrix products, channels-last and cuDNN's benchmark
for convolutions, PyTorch's fused attention with heads of 64 or 128, contiguous tensors and `torch.compile` for the
rest. Softmax and normalisation read 16-bit rows in pieces of 16 bytes if their length is a multiple of 8, else one
number at a time.

# Reference
TraceLens compares efficiency with a roofline; Williams, Waterman and Patterson, Roofline (2009).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import polars as pl

from stepscope.analysis.patterns import written_out_attention
from stepscope.analysis.roofline import (
    CALL_SCHEMA,
    MEASURED_WRONG,
    WORK_KINDS,
    device_peaks,
    is_eligible,
    roofline_calls,
)
from stepscope.analysis.work import shapes_of
from stepscope.diagnosis.finding import NotAnswered
from stepscope.diagnosis.parts import PARTS
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View, rows_of
from stepscope.diagnosis.rules._device import alone_share, blocks, decides, multiprocessors
from stepscope.machine.devices import USUAL_BEST_SHARE
from stepscope.trace.window import Window
from stepscope.whatif.changes import scaled_work_of

_ALIGNED: Final = 8
"""16-bit numbers in 16 bytes, which kernels read at once."""
_MOST: Final = 5
"""Maximum number of findings for one trace."""
_NAMES: Final = {"matrix": "matrix product", "elementwise": "element-wise work"}
"""Words for kinds of work that differ from the kind's name."""
_REMEDIES: Final = {
    "matrix": Remedy(
        "Make the sizes multiples of 64, join small products of the same input into one, or let the compiler choose "
        "among more kernels.",
        'model = torch.compile(model, mode="max-autotune")\n'
        "qkv = self.qkv(x)  # nn.Linear(size, 3 * size) instead of three layers of the same input",
    ),
    "convolution": Remedy(
        "Keep images and weights in the channels-last layout and let cuDNN try its algorithms.",
        "torch.backends.cudnn.benchmark = True\nmodel = model.to(memory_format=torch.channels_last)\n"
        "images = images.to(memory_format=torch.channels_last)",
    ),
    "attention": Remedy(
        "Use PyTorch's fused attention in 16 bits, with head sizes of 64 or 128; where it is used already, try "
        "another of its kernels.",
        "from torch.nn.attention import SDPBackend, sdpa_kernel\n\n"
        "kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]   # the first that can\n"
        "with sdpa_kernel(kernels, set_priority=True):                        # set_priority: PyTorch 2.6 or newer\n"
        "    out = F.scaled_dot_product_attention(q, k, v)",
    ),
}
_REMEDY: Final = Remedy(
    "Make the inputs contiguous once instead of reading them across their layout, and let the compiler fuse the work "
    "with its neighbours.",
    "model = torch.compile(model)\nx = x.contiguous()  # after the transpose or permute, if x is used several times",
)


def check(view: View, limits: Limits) -> Answers:
    if view.device is None or view.work.is_empty():
        return
    calls = roofline_calls(view.trace, window=_calling(view)).filter(pl.col("device") == view.device)
    calls = calls.filter(~pl.col("row").is_in(_written_out_attention(view)))
    yield from _question(view, limits, calls)
    if calls["limit"].null_count() == calls.height:
        return
    groups = _groups(view, limits, calls)
    least_ns = limits["share"] * view.length_ns
    wrong = groups.filter((pl.col("share") > MEASURED_WRONG) & (pl.col("device_ns") >= least_ns))
    for row in wrong.head(1).iter_rows(named=True):
        yield NotAnswered(
            f"How close does {row['operator']} come to what the device allows?",
            f"it ran at {row['share']:.0%} of the peak: the peak in the table, the recorded shapes or the times are "
            "wrong",
            "compare `stepscope roofline` with the device's data sheet",
        )
    slow = groups.filter(pl.col("device_ns") >= limits["slower"] * pl.col("wanted_ns")).head(_MOST)
    for row in slow.iter_rows(named=True):
        yield _found(view, limits, row)


def _calling(view: View) -> Window:
    """The time in which the host called the steps' operators; a device's steps come later than their calls."""
    if not view.is_on_device:
        return view.span
    rows = view.launching[view.work["launch"].drop_nulls().to_numpy()]
    starts = view.trace.operators["start_ns"].to_numpy()[rows[rows >= 0]]
    return Window(int(starts.min()), int(starts.max()) + 1) if len(starts) else view.span


def _groups(view: View, limits: Limits, calls: pl.DataFrame) -> pl.DataFrame:
    """Operators grouped by shape, with their time and loss, the largest loss first."""
    judged = calls.filter(pl.col("limit").is_not_null()).join(_judged(view, limits), on="row", how="inner")
    peaks = None if view.device is None else device_peaks(view.trace, view.device)
    best = USUAL_BEST_SHARE if peaks is None else peaks.best_share
    shares = {name: limits[name] for name in ("arithmetic", "attention", "bandwidth")}
    compute = pl.when(pl.col("work_kind") == "attention").then(shares["attention"]).otherwise(shares["arithmetic"])
    target = pl.when(pl.col("limit") == "compute").then(compute * best).otherwise(shares["bandwidth"])
    wanted = pl.col("attainable_ns") / target.clip(lower_bound=0.01)
    if peaks is not None:
        peak_ns = pl.col("flops") / pl.col("number_type").replace_strict(peaks.flops_s, default=None) * 1e9
        wanted = pl.max_horizontal(wanted, peak_ns / (compute * best).clip(lower_bound=0.01))
    lost = (pl.col("device_ns") - wanted).clip(lower_bound=0) * pl.col("deciding") * alone_share(view)
    keys = ["operator", "input_shapes", "work_kind", "number_type", "limit"]
    return (
        judged.with_columns(lost_ns=lost, target=target, wanted_ns=wanted)
        .group_by(keys)
        .agg(
            pl.col("row"),
            pl.col("device_ns").alias("each_ns"),
            pl.col("wanted_ns").alias("each_wanted_ns"),
            calls=pl.len(),
            device_ns=pl.col("device_ns").sum(),
            lost_ns=pl.col("lost_ns").sum(),
            wanted_ns=pl.col("wanted_ns").sum(),
            share=pl.col("attainable_ns").sum() / pl.col("device_ns").sum().clip(lower_bound=1),
            target=pl.col("target").first(),
            flops=pl.col("flops").sum(),
            bytes=pl.col("bytes").sum(),
            kernel=pl.col("kernel").first(),
        )
        .sort(["lost_ns", *keys], descending=[True, *[False] * len(keys)])
    )


def _written_out_attention(view: View) -> list[int]:
    """Rows of operators that a fused attention would replace, which unfused-attention reports."""
    found = written_out_attention(view.trace, rows_of(view.operators))
    if not found:
        return []
    forward = np.unique(np.concatenate([each.operators for each in found]))
    rows: list[int] = np.flatnonzero(view.inside(np.concatenate([forward, view.backward_of(forward)]))).tolist()
    return rows


def _judged(view: View, limits: Limits) -> pl.DataFrame:
    """Operators with long enough kernels and enough blocks, and the share of their time that determines the step."""
    count = multiprocessors(view)
    grids = blocks(view.work["grid"])
    few = (grids >= 0) & (grids < count) if count else np.zeros(len(grids), np.bool_)
    long_enough = view.work["duration_ns"].to_numpy() >= limits["shortest_ns"]
    launching = view.trace.launches.select(row="operator").with_row_index("launch")
    return (
        view.work.with_columns(judged=pl.Series(long_enough & ~few), decides=pl.Series(decides(view)))
        .filter(pl.col("kind").is_in(WORK_KINDS))
        .drop("row")
        .join(launching, on="launch", how="inner")
        .filter(pl.col("row").is_not_null())
        .with_columns(pl.col("row").cast(CALL_SCHEMA["row"]))
        .group_by("row")
        .agg(
            judged=pl.col("duration_ns").filter("judged").sum() / pl.col("duration_ns").sum().clip(lower_bound=1),
            deciding=pl.col("duration_ns").filter("decides").sum() / pl.col("duration_ns").sum().clip(lower_bound=1),
        )
        .filter(pl.col("judged") > 0.5)
        .select("row", "deciding")
    )


def _found(view: View, limits: Limits, row: dict[str, Any]) -> Found:
    kind, share = _NAMES.get(row["work_kind"], row["work_kind"]), row["share"]
    name = row["operator"].removeprefix("aten::")
    peak = "arithmetic peak" if row["limit"] == "compute" else "memory bandwidth"
    reached = Figure("GB/s reached", row["bytes"] / row["device_ns"])
    if row["limit"] == "compute":
        reached = Figure("TFLOP/s reached", row["flops"] / row["device_ns"] / 1e3)
    rows, weights = np.array(row["row"], np.int64), np.array(row["each_ns"], np.int64)
    left = np.array(row["each_wanted_ns"], np.float64) / np.maximum(weights, 1)
    slower = row["device_ns"] / max(row["wanted_ns"], 1)
    odd = _odd_row(row)
    return Found(
        f"the {kind} {name} of {_shapes(row['input_shapes'])} reaches {share:.0%} of the device's {peak} "
        f"and takes {view.percent(row['device_ns'])} of the {view.period}",
        row["lost_ns"],
        basis=f"time above what good kernels take ({row['target']:.0%} of the {peak}), where the device determines "
        f"the {view.period}'s length",
        confidence="medium" if slower >= 2 else "low",
        figures=[
            Figure("time over the attainable time", slower, "count", limits["slower"]),
            Figure(f"share of the {peak}", share, "share"),
            Figure(f"share of the {peak} that good kernels reach", row["target"], "share"),
            reached,
            Figure(f"time on the device {view.per}", row["device_ns"] // view.step_count, "ns"),
            view.count_per_step("calls", row["calls"]),
            *([Figure("length of a row", odd, "count"), Figure("padded length", _padded(odd), "count")] if odd else []),
        ],
        share_at=2,
        remedy=_padded_rows(row["work_kind"], odd) if odd else _REMEDIES.get(row["work_kind"], _REMEDY),
        where=view.at_operators(rows, weights),
        change=scaled_work_of(rows, np.minimum(left, 1.0)),
    )


def _odd_row(row: dict[str, Any]) -> int:
    """Row length of a 16-bit softmax or normalisation if it is not a multiple of 8, else 0."""
    shapes = shapes_of(row["input_shapes"])
    if row["work_kind"] not in ("softmax", "normalisation") or row["number_type"] not in ("fp16", "bf16"):
        return 0
    length = shapes[0][-1] if shapes and shapes[0] else 0
    return length if length % _ALIGNED else 0


def _padded(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED


def _padded_rows(kind: str, length: int) -> Remedy:
    padded = _padded(length)
    text = f"Rows of {length:,} 16-bit numbers do not begin at multiples of 16 bytes: make them {padded:,} long."
    if kind == "softmax":
        code = f'scores = F.pad(scores, (0, {padded - length}), value=float("-inf"))   # adds nothing to the sum'
    else:
        code = f"norm = torch.nn.LayerNorm({padded})    # a width of the model that is a multiple of {_ALIGNED}"
    return Remedy(text, code)


def _shapes(text: str) -> str:
    """The tensors' shapes in words, such as "32x3x224x224 and 64x3x7x7"."""
    inner = [part for part in text.strip("[] ").replace("],", ";").replace("[", "").split(";") if part.strip()]
    shapes = ["x".join(size.strip() for size in part.strip(" ]").split(",")) for part in inner]
    shown = [shape for shape in shapes if shape and "x" in shape][:2] or shapes[:1]
    return " and ".join(shown)[:80]


def _question(view: View, limits: Limits, calls: pl.DataFrame) -> Iterator[NotAnswered]:
    """The question that remains if matrix work dominates the step but the device or the shapes are unknown."""
    names = [name for name in calls["operator"].unique().to_list() if is_eligible(name)]
    eligible = calls.filter(pl.col("operator").is_in(names))
    if view.share(int(eligible["device_ns"].sum())) < limits["unknown"]:
        return
    question = "How close do the kernels come to what the device allows?"
    if eligible["input_shapes"].null_count() == eligible.height:
        how = PARTS["shapes"].how_for(view.trace.metadata.format)
        yield NotAnswered(question, "the trace holds no shapes", how)
    elif view.device is not None and device_peaks(view.trace, view.device) is None:
        name = next((one.name for one in view.trace.metadata.devices if one.device == view.device and one.name), None)
        why = f"{name} is not in the table of peaks" if name else "the trace names no device, so no peak is known"
        yield NotAnswered(question, why, "`stepscope roofline` shows what the kernels reached, without a peak")


RULE: Final = Rule(
    id="inefficient-kernel",
    title="Kernels run far below what the device allows",
    thresholds={
        "share": Threshold(0.03, "share", "share of the {period} that an operator of one shape loses"),
        "slower": Threshold(1.5, "count", "multiple of the attainable time at which an operator is inefficient"),
        "arithmetic": Threshold(
            0.8, "share", "attainable share of the best arithmetic that was measured on the device"
        ),
        "attention": Threshold(0.4, "share", "the same for fused attention, which computes exponentials in between"),
        "bandwidth": Threshold(0.7, "share", "attainable share of the memory's bandwidth"),
        "shortest_ns": Threshold(10_000, "ns", "kernels shorter than this are not judged"),
        "unknown": Threshold(
            0.3, "share", "share of the {period} in matrix work from which missing shapes or peaks are reported"
        ),
    },
    check=check,
    needs=("operators", "shapes", "types"),
)
