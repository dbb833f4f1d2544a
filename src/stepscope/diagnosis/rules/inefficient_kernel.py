"""# What it finds
Matrix products, convolutions, attention, mixtures of experts, normalisation and element-wise work that run far below
the device's limits, with the reason that their shapes, their kernel's name or its launch show.

# Why it costs time
Every operator has to do a number of arithmetic operations and move its tensors through memory. The device has a peak
rate for both. A kernel that reaches only a small part of the peak that limits it is slowed by something else: sizes
that do not fill its tiles, too few of them for the multiprocessors, a memory layout with strided reads, a slow variant
of the algorithm.

# How it is measured
Operations and bytes follow from the recorded shapes and types, peaks from the vendors' figures (`stepscope roofline`
shows both, for all operators). The saving is the kernels' time beyond what they would take at the share of the peak
that good kernels reach: for arithmetic a part of the best rate measured on such a device, for memory bandwidth a fixed
share; where only few blocks are to blame, at most what spreading them over all multiprocessors saves. Work counts only
where the device determines the step's length, and not where the host was late anyway. The rule ignores very short
kernels, kernels that reach 80 % of what the device can do, and attention that is written out (unfused-attention
reports it).

Where the trace names no device, `--device NAME` does. Without it, the kernels' names show the maker and sometimes the
architecture, and no device exceeds its peaks: the least peaks of those that are left make every share an upper bound.

The reasons, where the recording shows them: few tiles or blocks for the multiprocessors; a last wave that few of them
work in; sizes off the tile; tall and skinny, few-row or small products; rows that begin off 16 bytes; depthwise,
grouped, pointwise (1x1), asymmetric, dilated or transposed convolutions, and large images with few channels; short or
long sequences, few queries, heads outside of 64 to 128; experts with less than a tile of 128 tokens each; short rows;
reads across the layout; atomics; few resident threads because of registers or shared memory; FP32.

# Known false positives
Shapes do not show strides: expanded tensors are smaller in memory than their shape. Caching makes tensors faster or
slower to read than memory bandwidth suggests. Sparse or masked attention does less work than its shapes suggest.
Experts are counted as if all tokens chose the same ones, the least that can be read.

# What to do
It depends on the reason, and the finding says it: split sums or larger batches for few tiles, sizes that are multiples
of the tile, channels-last for convolutions, another kernel or packed sequences for attention, more tokens at once for
experts, contiguous tensors and `torch.compile` for the rest. Softmax and normalisation read 16-bit rows in pieces of
16 bytes if their length is a multiple of 8, else one number at a time.

# Reference
TraceLens compares efficiency with a roofline; Williams, Waterman and Patterson, Roofline (2009); NVIDIA, "Matrix
Multiplication Background User's Guide" (tiles and waves).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

import numpy as np
import polars as pl

from stepscope.analysis.operators import is_eligible
from stepscope.analysis.roofline import (
    CALL_SCHEMA,
    MEASURED_WRONG,
    OF_LAUNCH,
    WORK_KINDS,
    device_peaks,
    is_near,
    peaks_or_bounds,
)
from stepscope.analysis.slow_kernels import Reason, reasons
from stepscope.analysis.work import shapes_of
from stepscope.diagnosis.finding import NotAnswered
from stepscope.diagnosis.parts import PARTS
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.diagnosis.rules._device import alone_share, decides, limited_calls
from stepscope.diagnosis.rules._operators import attention_by_hand
from stepscope.machine.devices import DevicePeaks
from stepscope.whatif.changes import scaled_work_of

_ALIGNED: Final = 8
"""16-bit numbers in 16 bytes, which kernels read at once."""
_MOST: Final = 5
"""Maximum number of findings for one trace."""
_NAMES: Final = {"matrix": "matrix product", "elementwise": "element-wise work", "experts": "mixture of experts"}
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
_CODE: Final = {
    "few_tiles": "# NVIDIA: the compiler tries kernels that split their sums\n"
    'model = torch.compile(model, mode="max-autotune")\n'
    "# AMD: try hipBLASLt's and rocBLAS's kernels for each size, and keep the best\n"
    "torch.cuda.tunable.enable()",
    "pointwise": "model = model.to(memory_format=torch.channels_last)\n"
    "out = F.linear(x.movedim(1, -1), conv.weight.flatten(1), conv.bias).movedim(-1, 1)   # the same, as a product",
    "large_image": "x = F.pixel_unshuffle(images, 2)      # a quarter of the positions, four times the channels\n"
    "stem = torch.nn.Conv2d(4 * channels, width, kernel_size=3, padding=1)",
    "transposed": "up = torch.nn.Conv2d(channels, 4 * width, 3, padding=1)\n"
    "out = F.pixel_shuffle(up(x), 2)\n"
    'out = conv(F.interpolate(x, scale_factor=2, mode="nearest"))   # or so',
    "depthwise": "model = model.to(memory_format=torch.channels_last)\ntorch.backends.cudnn.benchmark = True",
    "short_sequences": "from torch.nn.attention.varlen import varlen_attn   # PyTorch 2.10: sequences in one row\n"
    "model = torch.compile(model)",
    "long_sequences": "torch.backends.cuda.preferred_rocm_fa_library('ck')   # AMD, PyTorch 2.7\n"
    "with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):   # NVIDIA\n"
    "    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)   # or flex_attention with a window",
    "few_tokens": "# serve more requests at once, or spread experts over devices, such as with vLLM:\n"
    "llm = LLM(model, enable_expert_parallel=True, max_num_batched_tokens=8192)",
}
"""Code for reasons that need other code than their kind of work."""
_REMEDY: Final = Remedy(
    "Make the inputs contiguous once instead of reading them across their layout, and let the compiler fuse the work "
    "with its neighbours.",
    "model = torch.compile(model)\nx = x.contiguous()  # after the transpose or permute, if x is used several times",
)


def check(view: View, limits: Limits) -> Answers:
    if view.device is None or view.work.is_empty():
        return
    calls = limited_calls(view).filter(pl.col("device") == view.device)
    calls = calls.filter(~pl.col("row").is_in(_written_out_attention(view)))
    yield from _question(view, limits, calls)
    if calls["limit"].null_count() == calls.height:
        return
    peaks = peaks_or_bounds(view.trace, view.device)
    assert peaks is not None  # else no call would have a limit
    groups = _groups(view, limits, calls, peaks)
    least_ns = limits["share"] * view.length_ns
    wrong = groups.filter((pl.col("share") > MEASURED_WRONG) & (pl.col("device_ns") >= least_ns))
    for row in wrong.head(1).iter_rows(named=True):
        yield NotAnswered(
            f"How close does {row['operator']} come to what the device allows?",
            f"it ran at {row['share']:.0%} of the peak: the peak in the table, the recorded shapes or the times are "
            "wrong",
            "compare `stepscope roofline` with the device's data sheet",
        )
    slow = groups.filter(
        (pl.col("device_ns") >= limits["slower"] * pl.col("wanted_ns")) & (pl.col("lost_ns") >= least_ns)
    )
    explained = [_explained(view, row, peaks) for row in slow.iter_rows(named=True)]
    explained.sort(key=lambda each: -each[0]["lost_ns"])
    named = device_peaks(view.trace, view.device) is not None
    for row, why in explained[:_MOST]:
        if not is_near(row["share"], row["limit"], peaks):
            yield _found(view, limits, row, why, named=named)
    if explained and not named:
        yield _which_device(peaks)


def _explained(view: View, row: dict[str, Any], peaks: DevicePeaks) -> tuple[dict[str, Any], tuple[Reason, ...]]:
    """A group with why it is slow; where only few blocks are, they can at best be spread over all multiprocessors."""
    first = {"row": row["row"][0], "flops": row["flops_each"][0], "bytes": row["bytes_each"][0]}
    found = reasons(view.trace, row | first, peaks)
    spread = 0.0
    if [each.code for each in found] == ["few_tiles"]:
        spread = found[0].numbers["thread blocks"] / found[0].numbers["multiprocessors"]
    wanted = [max(each, spread * ns) for each, ns in zip(row["each_wanted_ns"], row["each_ns"], strict=True)]
    lost = sum(
        max(ns - least, 0.0) * part
        for ns, least, part in zip(row["each_ns"], wanted, row["each_deciding"], strict=True)
    )
    changed = {"each_wanted_ns": wanted, "wanted_ns": sum(wanted), "lost_ns": lost * alone_share(view)}
    return row | changed, found


def _which_device(peaks: DevicePeaks) -> NotAnswered:
    return NotAnswered(
        "Which device is this?",
        f"the trace names none; by the kernels' names and rates it can be {peaks.name}. Shares are those of the "
        "least peaks among them, which the true ones do not exceed",
        "--device NAME (stepscope devices lists the names)",
    )


def _groups(view: View, limits: Limits, calls: pl.DataFrame, peaks: DevicePeaks) -> pl.DataFrame:
    """Operators grouped by shape, with their time and loss, the largest loss first."""
    judged = calls.filter(pl.col("limit").is_not_null()).join(_judged(view, limits), on=["row", "works"], how="inner")
    best = peaks.best_share
    shares = {name: limits[name] for name in ("arithmetic", "attention", "bandwidth")}
    compute = pl.when(pl.col("work_kind") == "attention").then(shares["attention"]).otherwise(shares["arithmetic"])
    target = pl.when(pl.col("limit") == "compute").then(compute * best).otherwise(shares["bandwidth"])
    wanted = pl.col("attainable_ns") / target.clip(lower_bound=0.01)
    wanted = pl.max_horizontal(wanted, pl.col("compute_ns") / (compute * best).clip(lower_bound=0.01))
    lost = (pl.col("device_ns") - wanted).clip(lower_bound=0) * pl.col("deciding") * alone_share(view)
    keys = ["operator", "input_shapes", "work_kind", "number_type", "limit"]
    return (
        judged.with_columns(lost_ns=lost, target=target, wanted_ns=wanted)
        .group_by(keys)
        .agg(
            pl.col("row"),
            pl.col("device_ns").alias("each_ns"),
            pl.col("wanted_ns").alias("each_wanted_ns"),
            pl.col("deciding").alias("each_deciding"),
            pl.col("flops").alias("flops_each"),
            pl.col("bytes").alias("bytes_each"),
            calls=pl.len(),
            device_ns=pl.col("device_ns").sum(),
            lost_ns=pl.col("lost_ns").sum(),
            wanted_ns=pl.col("wanted_ns").sum(),
            share=pl.col("attainable_ns").sum() / pl.col("device_ns").sum().clip(lower_bound=1),
            target=pl.col("target").first(),
            flops=pl.col("flops").sum(),
            bytes=pl.col("bytes").sum(),
            compute_ns=pl.col("compute_ns").sum(),
            memory_ns=pl.col("memory_ns").sum(),
            **{name: pl.col(name).first() for name in ("kernel", *OF_LAUNCH)},
        )
        .sort(["lost_ns", *keys], descending=[True, *[False] * len(keys)])
    )


def _written_out_attention(view: View) -> list[int]:
    """Rows of operators that a fused attention would replace, which unfused-attention reports."""
    found = attention_by_hand(view)
    if not found:
        return []
    forward = np.unique(np.concatenate([each.operators for each in found]))
    rows: list[int] = np.flatnonzero(view.inside(np.concatenate([forward, view.backward_of(forward)]))).tolist()
    return rows


def _judged(view: View, limits: Limits) -> pl.DataFrame:
    """Operators with long enough kernels, and the share of their time that determines the step."""
    long_enough = view.work["duration_ns"].to_numpy() >= limits["shortest_ns"]
    launching = view.trace.launches.select(row="operator").with_row_index("launch")
    return (
        view.work.with_columns(judged=pl.Series(long_enough), decides=pl.Series(decides(view)))
        .filter(pl.col("kind").is_in(WORK_KINDS))
        .drop("row")
        .join(launching, on="launch", how="inner")
        .filter(pl.col("row").is_not_null())
        .with_columns(pl.col("row").cast(CALL_SCHEMA["row"]))
        .group_by("row")
        .agg(
            works=pl.len().cast(CALL_SCHEMA["works"]),  # all of a call's work must lie in the steps
            judged=pl.col("duration_ns").filter("judged").sum() / pl.col("duration_ns").sum().clip(lower_bound=1),
            deciding=pl.col("duration_ns").filter("decides").sum() / pl.col("duration_ns").sum().clip(lower_bound=1),
        )
        .filter(pl.col("judged") > 0.5)
        .select("row", "works", "deciding")
    )


def _found(view: View, limits: Limits, row: dict[str, Any], why: tuple[Reason, ...], *, named: bool) -> Found:
    kind, share = _NAMES.get(row["work_kind"], row["work_kind"]), row["share"]
    name = row["operator"].removeprefix("aten::")
    peak, other = ("arithmetic peak", "memory bandwidth")[:: 1 if row["limit"] == "compute" else -1]
    other_ns = row["memory_ns" if row["limit"] == "compute" else "compute_ns"]
    reached = Figure("GB/s reached", row["bytes"] / row["device_ns"])
    if row["limit"] == "compute":
        reached = Figure("TFLOP/s reached", row["flops"] / row["device_ns"] / 1e3)
    rows, weights = np.array(row["row"], np.int64), np.array(row["each_ns"], np.int64)
    left = np.array(row["each_wanted_ns"], np.float64) / np.maximum(weights, 1)
    slower = row["device_ns"] / max(row["wanted_ns"], 1)
    first, reached_part = why[0], f"{share:.0%}" if share >= 0.01 else f"{100 * share:.2g}%"
    return Found(
        f"the {kind} {name} of {_shapes(row['input_shapes'])} reaches {'' if named else 'at most '}{reached_part} of "
        f"the device's {peak} and takes {view.percent(row['device_ns'])} of the {view.period}; {first.why}",
        row["lost_ns"],
        basis=f"time above what good kernels take ({row['target']:.0%} of the {peak}), where the device determines "
        f"the {view.period}'s length",
        confidence="medium" if slower >= 2 else "low",
        figures=[
            Figure("time over the attainable time", slower, "count", limits["slower"]),
            Figure(f"share of the {peak}", share, "share"),
            Figure(f"share of the {peak} that good kernels reach", row["target"], "share"),
            *([Figure(f"share of the {other}", other_ns / row["device_ns"], "share")] if other_ns else []),
            reached,
            Figure(f"time on the device {view.per}", row["device_ns"] // view.step_count, "ns"),
            view.count_per_step("calls", row["calls"]),
            *_numbers(why),
        ],
        share_at=2,
        remedy=_remedy(row, why),
        where=view.at_operators(rows, weights),
        change=scaled_work_of(rows, np.minimum(left, 1.0)),
    )


def _numbers(why: tuple[Reason, ...]) -> list[Figure]:
    """The numbers in the reasons, each name once."""
    numbers = {name: value for each in why for name, value in each.numbers.items()}
    return [Figure(name, value, _unit(name)) for name, value in numbers.items()]


def _unit(name: str) -> Literal["share", "bytes", "count"]:
    return "share" if name.startswith("share of") else "bytes" if name.startswith("shared memory") else "count"


def _remedy(row: dict[str, Any], why: tuple[Reason, ...]) -> Remedy:
    usual = _REMEDIES.get(row["work_kind"], _REMEDY)
    if why[0].code == "unaligned" and row["work_kind"] in ("softmax", "normalisation"):
        return _padded_rows(row["work_kind"], shapes_of(row["input_shapes"])[0][-1])
    more = "".join(f" Besides, {each.why}: {each.better}." for each in why[1:])
    text = f" {usual.text}" if why[0].code == "kernel" else more
    return Remedy(f"Better: {why[0].better}.{text}", _CODE.get(why[0].code, usual.code))


def _padded_rows(kind: str, length: int) -> Remedy:
    padded = -(-length // _ALIGNED) * _ALIGNED
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
    elif view.device is not None and peaks_or_bounds(view.trace, view.device) is None:
        name = next((one.name for one in view.trace.metadata.devices if one.device == view.device and one.name), None)
        why = f"{name} is not in the table of peaks" if name else "the trace names no device, so no peak is known"
        how = "--device NAME gives its peaks" if name is None else "`stepscope devices --add` adds a device"
        yield NotAnswered(question, why, f"{how}; `stepscope roofline` shows what the kernels reached, without a peak")


RULE: Final = Rule(
    id="inefficient-kernel",
    title="Kernels run far below what the device allows",
    thresholds={
        "share": Threshold(0.03, "share", "share of the {period} that an operator of one shape loses"),
        "slower": Threshold(1.5, "count", "multiple of the attainable time at which an operator is inefficient"),
        "arithmetic": Threshold(
            0.8, "share", "attainable share of the best arithmetic that was measured on the device"
        ),
        "attention": Threshold(0.65, "share", "the same for fused attention, which computes exponentials in between"),
        "bandwidth": Threshold(0.7, "share", "attainable share of the memory's bandwidth"),
        "shortest_ns": Threshold(10_000, "ns", "kernels shorter than this are not judged"),
        "unknown": Threshold(
            0.3, "share", "share of the {period} in matrix work from which missing shapes or peaks are reported"
        ),
    },
    check=check,
    needs=("operators", "shapes", "types"),
)
