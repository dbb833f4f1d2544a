"""# What it finds
An optimizer that updates parameters one by one, with several small operators for each.

# Why it costs time
A model has hundreds of parameters. Updating each with its own few kernels means thousands of launches in a step, each
kernel too short to hide the next launch. On a CPU each operator also reads and writes all of a parameter's state again;
a fused update passes over it once.

# How it is measured
Launches inside `Optimizer.step` per step, without `_foreach_` or `_fused_` operators among them; the device's idle time
while the launching thread was in the optimizer, and before late launches there. The saving also includes part of the
kernels' own time: the fixed time of each kernel (the length of the shortest ones, 3 us at most) except for one kernel
per 36 tensors, and the time for reading and writing tensors more often than a fused update does.

Without a device: the thread's time in the optimizer's operators and between them. What a fused update still needs is
subtracted: some overhead for each parameter, and the time to read parameter, gradient and state and to write parameter
and state, at the rate of the optimizer's own operators. With torch 2.13 on one core, fused AdamW takes a seventh of the
default's time for 400 tensors of 64 numbers, and a third for tensors of 262,144; fused SGD takes half for small ones.
`foreach=True` is slower than the default on a CPU where tensors are large.

# Known false positives
None known. A few large parameters on a device need few launches, and nothing is reported.

# What to do
Set `fused=True` where the optimizer has it, else `foreach=True`. `stepscope.remedies.fuse_optimizer` changes an
existing optimizer, after it has tried the kernel: in bf16 and fp16 on a CPU, torch 2.13's fused SGD leaves most values
unchanged (pytorch issue 191763).

# Reference
PyTorch's OptimizerSingleTensorPattern (removed in 2026); torch.optim documentation, "foreach and fused
implementations".
"""

from __future__ import annotations

from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.device_time import busy_intervals
from stepscope.analysis.host import CAUSE_CODES
from stepscope.analysis.work import traffic
from stepscope.diagnosis.lines.costs import settings_at
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rows, Rule, Threshold, View, rows_of
from stepscope.diagnosis.rules._operators import (
    engine_pauses,
    length_ns,
    outermost_in_order,
    outermost_of,
    scaled_with_pauses,
)
from stepscope.whatif import Change
from stepscope.whatif.changes import fewer_works, scaled_host_time, scaled_slices, together

_FUSED: Final = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
"""Optimizers of torch.optim that have a fused implementation."""
_PASSES: Final = {"Adam": 7, "AdamW": 7, "Adagrad": 5, "SGD": 3}
"""Tensors that a fused update reads or writes for each parameter: itself twice, its gradient, its state twice."""
_PASSES_WITH_MOMENTUM: Final = 5
_UPDATING: Final = r"^aten::(?:_fused_\w+|_foreach_\w+|(?:add|mul|lerp|addcmul|addcdiv|sub|div|sqrt|neg|maximum)_?)$"
_ONCE: Final = ("aten::addcdiv_", "aten::add_")
_ONCE_FOR_EACH: Final = ("aten::addcdiv_", "aten::add_", "aten::lerp_", "aten::mul_")
_SHORTEST_KERNEL_NS: Final = 3_000.0
"""Kernels that take longer need the time for their work."""
_TENSORS_FOR_A_KERNEL: Final = 36
"""Tensors that one kernel of a fused update handles, with four for each parameter (torch's depth_to_max_tensors)."""
_CALLS_FOR_EACH: Final = {"SGD": 0.5, "Adam": 1.5, "AdamW": 1.5, "Adagrad": 1.5}
"""Cost of a fused update for each parameter, in operator overheads, mostly for collecting it in Python.

Measured with torch 2.13: 0.7 to 1.2 us a tensor for SGD, 3.3 to 3.6 us for the others, where an operator takes 1.9."""
_OVERHEAD_NS: Final = 1_900.0
"""Upper limit for an operator's overhead; a longer one includes launching its work, or the recording slows it."""
_CALLS_OF_OTHERS: Final = 1.5
"""The same for optimizers without a fused implementation, with operators over lists of tensors."""


def check(view: View, limits: Limits) -> Answers:
    if view.device is None:
        yield from _on_cpu(view, limits)
        return
    launched = view.work.filter(pl.col("launch").is_not_null())
    slices = view.slices_of_launches(launched["launch"])
    in_optimizer = (view.activity.cause_of(slices) == CAUSE_CODES["optimizer"]) & ~_is_zeroing(view, launched)
    mine = launched.filter(pl.Series(in_optimizer, dtype=pl.Boolean))
    count = mine["launch"].n_unique() / view.step_count
    minimum = limits["launches"]
    if mine.is_empty() or count < minimum or _is_batched(view, mine):
        return
    late = view.pieces.filter((pl.col("cause") == "optimizer") & pl.col("gap").is_not_null())
    late = late.join(mine, on="launch", how="semi")
    latency = view.pieces_of("launch_latency").join(mine, on="launch", how="semi")
    kernels_ns = busy_intervals(mine, view.window).total_ns
    kernels_left_ns = min(_kernels_left_ns(view, mine), kernels_ns)
    saved_ns = kernels_ns - kernels_left_ns
    cost = int(late["duration_ns"].sum()) + int(latency["duration_ns"].sum()) + saved_ns
    if not limits.reached(cost):
        return
    yield Found(
        f"the optimizer launches {count:,.0f} kernels {view.a_step}, one parameter at a time",
        cost,
        basis="idle time while the optimizer was preparing and launching its work, and its kernels' time without what "
        "a fused update would still take",
        confidence="medium",
        share_at=1,
        figures=[
            Figure(f"launches in the optimizer {view.per}", count, "count", minimum),
            view.ns_per_step("time of its kernels", kernels_ns),
            Figure("median length of its kernels", float(np.median(mine["duration_ns"].to_numpy())), "ns"),
        ],
        intervals=view.longest(late, "optimizer"),
        remedy=_remedy(view),
        where=(*settings_at(view, _name(view), without="fused=True"), *view.locations(late)),
        change=_fused(view, mine, kernels_left_ns / max(kernels_ns, 1)),
    )


def _fused(view: View, work: pl.DataFrame, kernels_left: float) -> Change:
    """Scale the kernels' time by `kernels_left`, and replace the host's launches by the time to collect the tensors."""
    launching = view.trace.launches["operator"].gather(work["launch"]).drop_nulls().unique()
    direct = launching.cast(pl.Int64).sort().to_numpy()
    outermost = np.unique(outermost_of(view)[direct])
    ordered, position = outermost_in_order(view)
    following = np.append(ordered, -1)[position[outermost] + 1]
    pauses = engine_pauses(view, outermost[np.isin(following, outermost)])
    operators = view.trace.operators
    duration = operators["duration_ns"].to_numpy()
    overhead = min(float(np.quantile(duration[direct], 0.05)), _OVERHEAD_NS) if len(direct) else 0.0
    tensors = _tensors(operators["name"].gather(direct))
    now = int(duration[outermost].sum()) + int((pauses[2] - pauses[1]).sum())
    left = min(_CALLS_FOR_EACH.get(_name(view), _CALLS_OF_OTHERS) * overhead * tensors / max(now, 1), 1.0)
    return together(
        fewer_works(rows_of(work), kernels_left),
        scaled_slices(view.slices_of_operators(outermost), left),
        scaled_host_time(*pauses, left),
    )


def _on_cpu(view: View, limits: Limits) -> Answers:
    name = _name(view)
    rows = _operators_of_optimizer(view)
    names = view.trace.operators["name"].gather(rows)
    if name not in _FUSED or not len(rows) or names.str.contains("_fused_|_foreach_").any():
        return
    duration = view.trace.operators["duration_ns"].to_numpy()
    between = engine_pauses(view, rows)
    cost = int(duration[rows].sum()) + length_ns(view, between)
    tensors = _tensors(names)
    left = _fused_ns(view, name, rows, tensors)
    saved = max(cost - left, 0)
    if not limits.reached(saved, "share_on_cpu"):
        return
    count = len(rows) / view.step_count
    yield Found(
        f"{name} runs {count:,.0f} operators {view.a_step}, {view.percent(cost)} of it; a fused update would be one",
        saved,
        basis=f"the optimizer's time without the {left / cost:.0%} that a fused update would still take",
        confidence="medium",
        limit="share_on_cpu",
        figures=[
            view.share_figure("in the optimizer", cost),
            Figure("share of it that a fused update would still take", left / cost, "share"),
            Figure(f"operators in the optimizer {view.per}", count, "count"),
            view.count_per_step("tensors updated", tensors),
        ],
        remedy=Remedy(
            f"Let {name} update all parameters in one fused call.",
            "from stepscope.remedies import fuse_optimizer\n"
            "optimizer = fuse_optimizer(optimizer)   # or where it is made:\n"
            f"optimizer = torch.optim.{name}(model.parameters(), ..., fused=True)",
            apply=("fuse-optimizer",),
        ),
        where=(*settings_at(view, name, without="fused=True"), *view.at_operators(rows)),
        change=scaled_with_pauses(rows, [between], left / cost),
    )


def _operators_of_optimizer(view: View) -> Rows:
    """Outermost operators of the optimizer's update; operators of a closure, which need gradients, are left out."""
    operators = view.operators.filter(
        pl.col("parent").is_null() & pl.col("name").str.contains(_UPDATING) & ~pl.col("name").str.contains("zero_$")
    )
    rows = rows_of(operators)
    causes = view.activity.cause_of(view.slices_of_operators(rows))
    updating: Rows = rows[causes == CAUSE_CODES["optimizer"]]
    return updating


def _tensors(names: pl.Series) -> int:
    """Number of tensors updated: each operator of the update runs once for each tensor, some twice."""
    counts = names.filter(names.is_in(list(_ONCE_FOR_EACH))).value_counts()["count"]
    return min(counts.to_list(), default=0)


def _fused_ns(view: View, name: str, rows: Rows, tensors: int) -> int:
    """Time of a fused update of the same tensors over the span."""
    columns = view.trace.operators.select("name", "input_shapes")[rows]
    duration = view.trace.operators["duration_ns"].to_numpy()[rows]
    overhead = float(np.quantile(duration, 0.05))
    is_known = np.array([traffic(shapes) is not None for shapes in columns["input_shapes"]], np.bool_)
    streaming = float(np.maximum(duration - overhead, 0)[is_known].sum())
    return int(_CALLS_FOR_EACH[name] * overhead * tensors + streaming * _traffic_left(name, columns, tensors))


def _kernels_left_ns(view: View, work: pl.DataFrame) -> int:
    """Time of a fused update's kernels for the same tensors over the span."""
    operators = view.trace.launches["operator"].gather(work["launch"])
    columns = view.trace.operators.select("name", "input_shapes")[operators.drop_nulls().cast(pl.Int64).to_numpy()]
    duration = work["duration_ns"].to_numpy()
    overhead = min(float(np.quantile(duration, 0.05)), _SHORTEST_KERNEL_NS)
    tensors = _tensors(columns["name"])
    launches = max(-(-tensors // _TENSORS_FOR_A_KERNEL), view.step_count)
    share = _traffic_left(_name(view), columns, tensors)
    return int(overhead * launches + float(np.maximum(duration - overhead, 0).sum()) * share)


def _traffic_left(name: str, columns: pl.DataFrame, tensors: int) -> float:
    """The fraction of the update's memory traffic that a fused update has; 1 if shapes are unknown."""
    if name not in _PASSES:
        return 1.0
    moved = [traffic(shapes) for shapes in columns["input_shapes"]]
    elements = sum(each.elements for each in moved if each)
    updated = [each for (called, _), each in zip(columns.iter_rows(), moved, strict=True) if each and called in _ONCE]
    has_momentum = name == "SGD" and bool((columns["name"] == "aten::mul_").any())
    passes = _PASSES_WITH_MOMENTUM if has_momentum else _PASSES[name]
    calls = columns["name"].filter(columns["name"].is_in(list(_ONCE))).value_counts()["count"]
    once = sum(prod(each.output) for each in updated) * tensors / max(int(calls.sum()), 1) if updated else 0.0
    return min(passes * once / elements, 1.0) if elements else 1.0


def _name(view: View) -> str:
    names = view.trace.annotations["name"].str.extract(r"^Optimizer\.step#(\w+)\.step").drop_nulls()
    return names[0] if len(names) else "AdamW"


def _remedy(view: View) -> Remedy:
    name = _name(view)
    if name not in _FUSED:
        return Remedy(
            f"Give {name} an implementation over lists of tensors (torch._foreach_...), or compile its step.",
            "optimizer_step = torch.compile(optimizer.step)   # fuses the loop over parameters into few kernels",
        )
    return Remedy(
        f"Let {name} update all parameters with few kernels.",
        "from stepscope.remedies import fuse_optimizer\n"
        "optimizer = fuse_optimizer(optimizer)   # or where it is made:\n"
        f"optimizer = torch.optim.{name}(model.parameters(), ..., fused=True)   # or foreach=True",
        apply=("fuse-optimizer",),
    )


def _is_zeroing(view: View, launched: pl.DataFrame) -> npt.NDArray[np.bool_]:
    """Which work fills gradients with zeros, which zero-grad reports."""
    operators = view.trace.operators
    around = operators["parent"].gather(view.trace.launches["operator"].gather(launched["launch"]))
    own = operators["name"].gather(view.trace.launches["operator"].gather(launched["launch"]))
    zeroing = (own == "aten::zero_") | (operators["name"].gather(around) == "aten::zero_")
    return zeroing.fill_null(False).to_numpy()


def _is_batched(view: View, work: pl.DataFrame) -> bool:
    """Whether most of the optimizer's kernels come from operators over lists of tensors."""
    operators = view.trace.launches["operator"].gather(work["launch"])
    names = view.trace.operators["name"].gather(operators).drop_nulls()
    over_lists = int(names.str.contains("_foreach_|_fused_").to_numpy().sum())
    over_lists += work.filter(pl.col("name").str.contains("multi_tensor_apply")).height
    return over_lists * 2 > work.height


RULE: Final = Rule(
    id="single-tensor-optimizer",
    title="The optimizer updates parameters one by one",
    thresholds={
        "launches": Threshold(100, "count", "launches above which an optimizer step has many"),
        "share": Threshold(0.01, "share", "share of the {period} lost in the optimizer"),
        "share_on_cpu": Threshold(
            0.05, "share", "share of the {period} that a fused update would save, without a device"
        ),
    },
    check=check,
    needs=("operators",),
    remedies={
        "hpu": Remedy(
            "Use an optimizer that updates all parameters in one operator; its eps is 1e-6 by default.",
            "from habana_frameworks.torch.hpex.optimizers import FusedAdamW\n"
            "optimizer = FusedAdamW(model.parameters(), lr=lr, eps=1e-8)",
        ),
    },
)
