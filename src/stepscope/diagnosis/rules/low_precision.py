"""# What it finds
Computation in wider number types than needed: large FP32 matrix products on a device with tensor cores, tensors that
became float64 by accident, and, as a note, weights of 16 bits where tokens are decoded on a device with FP8.

# Why it costs time
Tensor cores (matrix cores on AMD) multiply 16-bit and TF32 matrices several times as fast as FP32 units multiply FP32
matrices. A model trained in plain FP32 leaves them unused. A float64 number takes twice the memory and halves the
throughput of vector units: NumPy creates float64 by default, and everything computed with such a tensor becomes float64
too.

# How it is measured
FP32: time of matrix kernels whose names say FP32 (not TF32), on a device of compute capability 7.0 or later. Half of
that time is counted as saved, which is less than the hardware's ratio. float64: time of operators with float64 inputs.
Half of it and all of the conversions to float64 and back are counted as saved. TF32: time of matrix kernels that
already multiply in TF32. A 16-bit format saves 1 - TF32 rate / 16-bit rate of that time, by the device's peaks, or half
where no peaks are known: tensor cores since Ampere multiply 16-bit numbers twice as fast. Not considered are the
halved bytes of element-wise kernels, and what keeps kernels below their peak.

# Known false positives
Numerically delicate parts that must stay in a wider type, and programs that compute in float64 on purpose. Some
vendors' kernel names do not show the number type.

# What to do
Use `torch.autocast` with bf16 (or fp16 with a gradient scaler on Volta and Turing); on Ampere and later, one line
enables TF32. `stepscope.remedies.mixed_precision` compares the first losses with full precision. Convert what comes
from NumPy with `.float()` as soon as it is a tensor.

# Reference
PyTorch's FP32MatMulPattern and TensorBoard plugin (tensor cores unused on compute capability 7.0 or later); DLProf's
table of operators that were eligible for tensor cores and used them. In float32, a network of linear layers with Adam
took 41 % of its float64 time, measured with PyTorch 2.13 on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.conversions import Cast, casts, eligible_calls, wide_operators
from stepscope.analysis.operators import arithmetic, has_four_bits, is_eligible, kernel_class
from stepscope.analysis.patterns import logits_losses
from stepscope.analysis.roofline import device_peaks, peaks_or_bounds
from stepscope.analysis.work import elements, listed_shapes
from stepscope.diagnosis.finding import NotAnswered
from stepscope.diagnosis.rule import (
    Answers,
    Figure,
    Found,
    InServing,
    Limits,
    Remedy,
    Rows,
    Rule,
    Threshold,
    View,
    rows_of,
)
from stepscope.trace import Trace
from stepscope.whatif.changes import scaled_operators, scaled_work, scaled_work_of, together

_TENSOR_CORES_SINCE: Final = (7, 0)
_TF32_SINCE: Final = (8, 0)
_USUAL_RATIO: Final = 2.0
"""How many times as fast as TF32 tensor cores since Ampere multiply 16-bit numbers."""
_MANY_CLASSES: Final = 2000
_BF16: Final = (
    'with torch.autocast("cuda", dtype=torch.bfloat16):   # bf16\n    loss = model(batch)\n'
    "from stepscope.remedies import mixed_precision       # bf16, compared with FP32 in its first steps\n"
    'precision = mixed_precision("bf16")\n'
    "loss = precision.loss(lambda: model(batch))"
)


_MUCH: Final = 0.3
"""Share of decoding from which products with wide weights are worth a note."""
_NARROW_WEIGHTS: Final = InServing(
    "To decode is to read weights: try them in FP8, and compare the answers.",
    "quantise",
    "from torchao.quantization import Float8WeightOnlyConfig, quantize_\nquantize_(model, Float8WeightOnlyConfig())",
)


def check(view: View, limits: Limits) -> Answers:
    yield from _double(view, limits)
    yield from _single(view, limits)
    yield from _tf32(view, limits)
    if view.serves and view.device is not None:
        yield from _weights(view, view.device)


def _double(view: View, limits: Limits) -> Answers:
    rows = rows_of(view.operators)
    conversions = casts(view.trace, rows)
    wide = wide_operators(view.trace, rows, conversions)
    wide, conversions = _without_scores(view, wide, conversions)
    everything = _is_double_model(view, wide)
    if everything:
        wide = np.concatenate([wide, _lists(view)])
    cost = view.cost_ns(wide)
    if not limits.reached(cost, "double_share"):
        return
    to_and_fro = np.array([cast.row for cast in conversions if "float64" in (cast.source, cast.target)], np.int64)
    converting = view.cost_ns(to_and_fro)
    saved = limits["double_saved"]
    yield Found(
        f"{view.percent(cost)} of the {view.period} computes in float64, in numbers twice as wide as float32",
        cost * saved + converting,
        basis=f"{saved:.0%} of the time of operators on float64 tensors, and the conversions to float64 and back",
        confidence="low" if view.program.torch.get("default_dtype") == "torch.float64" else "medium",
        limit="double_share",
        weighed_ns=cost,
        figures=[
            view.count_per_step("such operators", len(view.outermost(wide))),
            view.share_figure("in conversions to float64 and back", converting),
        ],
        remedy=_double_remedy(everything),
        where=view.at_operators(wide),
        change=together(scaled_work_of(wide, 1 - saved), scaled_operators(to_and_fro, 0.0)),
    )


def _without_scores(view: View, wide: Rows, conversions: list[Cast]) -> tuple[Rows, list[Cast]]:
    """Leave out operators on the scores of a float64 loss with many classes, which large-logits reports."""
    losses = logits_losses(view.trace, rows_of(view.operators), _MANY_CLASSES)
    if not losses:
        return wide, conversions
    forward = np.unique(np.concatenate([loss.operators for loss in losses]))
    of_loss = view.inside(np.concatenate([forward, view.backward_of(forward)]))
    return wide[~of_loss[wide]], [cast for cast in conversions if not of_loss[cast.row]]


def _is_double_model(view: View, wide: Rows) -> bool:
    """Whether nearly all matrix products and convolutions are on float64 tensors."""
    names = view.trace.operators["name"]
    eligible = [name for name in names.unique() if is_eligible(name)]
    products = view.operators.filter(pl.col("name").is_in(eligible))
    double = products.filter(pl.col("row").is_in(wide))
    return double.height > 0.9 * products.height > 0


def _lists(view: View) -> Rows:
    """The optimizer's operators on lists of tensors, whose number types the profiler does not record."""
    lists = view.operators.filter(pl.col("name").str.contains("^aten::_(?:foreach|fused)_"))
    large = [sum(map(elements, listed_shapes(text))) > 0 for text in lists["input_shapes"]]
    return rows_of(lists.filter(pl.Series(large, dtype=pl.Boolean)))


def _double_remedy(everything: bool) -> Remedy:
    if everything:
        return Remedy(
            "Make model and batches float32: NumPy's float64 need not decide what the model computes in.",
            "model = model.float()\nbatch = torch.from_numpy(array).float()   # or array.astype(numpy.float32)",
        )
    return Remedy(
        "Find the float64 tensor that this line computes with, and make it float32 where it is made.",
        "constant = torch.from_numpy(array).float()        # NumPy's numbers are float64 unless told otherwise\n"
        "values = torch.tensor(numbers, dtype=torch.float32)",
    )


def _matrix_kernels(view: View, precision: str) -> pl.DataFrame:
    """The device's matrix kernels whose names say that they compute in this format."""
    names = view.work["name"].unique()
    mine = [name for name in names if arithmetic(name).is_matrix and arithmetic(name).precision == precision]
    return view.work.filter(pl.col("name").is_in(mine) & (pl.col("kind") == "compute"))


def _tf32(view: View, limits: Limits) -> Answers:
    if view.device is None:
        return
    kernels = _matrix_kernels(view, "tf32")
    total = int(kernels["duration_ns"].sum())
    if not limits.reached(total, "tensor_float_share"):
        return
    faster = _times_faster(view.trace, view.device)
    yield Found(
        f"{view.percent(total)} of the {view.period} is TF32 matrix products, which 16-bit numbers make up to "
        f"{faster:.3g} times as fast",
        total * (1 - 1 / faster),
        basis=f"the time of TF32 matrix kernels less that at {faster:.3g} times the rate, the ratio of the peaks",
        confidence="low",
        limit="tensor_float_share",
        weighed_ns=total,
        figures=[
            view.count_per_step("such kernels", kernels.height),
            Figure("16-bit rate of the tensor cores over their TF32 rate", faster, "count"),
        ],
        intervals=view.longest(kernels, "TF32 matrix product"),
        remedy=Remedy("Run matrix products in bf16.", _BF16, apply=("bf16",)),
        where=view.at_launches(kernels),
        change=scaled_work(rows_of(kernels), 1 / faster),
    )


def _weights(view: View, device: str) -> Iterator[Found]:
    """A note that tokens are decoded with weights of 16 bits on a device that multiplies FP8."""
    peaks = device_peaks(view.trace, device)
    if peaks is None or not peaks.flops_s.get("fp8"):
        return
    spans = view.iterations.filter(pl.col("phase") == "decode")
    spans = spans.select(begin="start_ns", until=pl.col("start_ns") + pl.col("duration_ns")).sort("begin")
    work = view.work.filter(pl.col("launch_start_ns").is_not_null()).sort("launch_start_ns")
    work = work.join_asof(spans, left_on="launch_start_ns", right_on="begin", strategy="backward")
    work = work.filter(pl.col("launch_start_ns") < pl.col("until"), pl.col("kind") == "compute")
    names = work["name"].unique()
    wide = [name for name in names if arithmetic(name).precision in ("bf16", "fp16") and _has_weights(name)]
    kernels = work.filter(pl.col("name").is_in(wide))
    share = int(kernels["duration_ns"].sum()) / max(int(work["duration_ns"].sum()), 1)
    if share < _MUCH:
        return
    yield Found(
        f"{share:.0%} of the device's time to decode tokens goes to products with weights of 16 bits, and "
        f"{peaks.name} multiplies numbers of 8 bits as well",
        0,
        basis="no saving: what narrower weights gain, and what they change in the answers, only a trial shows",
        confidence="medium",
        severity="note",
        figures=[
            Figure("share of the device's time to decode tokens", share, "share", _MUCH),
            view.count_per_step("such kernels", kernels.height),
        ],
        intervals=view.longest(kernels, "product with weights of 16 bits"),
        remedy=_NARROW_WEIGHTS.remedy(view),
        where=view.at_launches(kernels),
        for_every_framework=True,
    )


def _has_weights(name: str) -> bool:
    return kernel_class(name).kind in ("matrix", "experts") and not has_four_bits(name)


def _times_faster(trace: Trace, device: str) -> float:
    """Peak rate in 16 bits over that in TF32; the usual one where the device's are unknown."""
    peaks = device_peaks(trace, device)
    rates = {} if peaks is None else peaks.flops_s
    half, tf32 = rates.get("bf16") or rates.get("fp16"), rates.get("tf32")
    return max(half / tf32, 1.0) if half and tf32 else _USUAL_RATIO


def _single(view: View, limits: Limits) -> Answers:
    if view.device is None:
        return
    capability = _capability(view)
    kernels = _matrix_kernels(view, "fp32")
    total = int(kernels["duration_ns"].sum())
    if not limits.reached(total):
        return
    if capability is None:
        yield _UNKNOWN_DEVICE
        return
    if capability < _TENSOR_CORES_SINCE:
        return
    saved = limits["saved"]
    yield Found(
        f"{view.percent(total)} of the {view.period} is FP32 matrix products that tensor cores could do",
        total * saved,
        basis=f"{saved:.0%} of the time of FP32 matrix kernels, an assumption below the hardware's ratio",
        confidence="low",
        weighed_ns=total,
        figures=[
            view.count_per_step("such kernels", kernels.height),
            *_tensor_core_figures(view),
        ],
        intervals=view.longest(kernels, "FP32 matrix product"),
        remedy=_remedy(capability),
        where=view.at_launches(kernels),
        change=scaled_work(rows_of(kernels), 1 - saved),
    )


def _tensor_core_figures(view: View) -> tuple[Figure, ...]:
    """How many of the operators that are eligible for tensor cores used them."""
    calls = eligible_calls(view.trace, window=view.window).filter(pl.col("device") == view.device)
    eligible = int(calls["matrix_ns"].sum())
    if not eligible:
        return ()
    used = int(calls["tensor_core_ns"].sum())
    return (
        Figure(f"matrix products, convolutions and attention {view.per}", eligible // view.step_count, "ns"),
        Figure("share of it on tensor cores", used / eligible, "share"),
    )


_UNKNOWN_DEVICE: Final = NotAnswered(
    "Would lower precision speed up the FP32 matrix products?",
    "the trace does not say which device this is (deviceProperties is missing)",
    "--device NAME, or record with a current version of PyTorch, which writes the device's properties",
)


def _capability(view: View) -> tuple[int, ...] | None:
    known = (each.compute_capability for each in view.trace.metadata.devices if each.device == view.device)
    least = None if view.device is None else peaks_or_bounds(view.trace, view.device)
    capability = next((each for each in known if each), None if least is None else least.capability)
    return tuple(map(int, capability.split("."))) if capability else None


def _remedy(capability: tuple[int, ...]) -> Remedy:
    if capability >= _TF32_SINCE:
        return Remedy(
            "Run matrix products in bf16, or at least in TF32, which is off.",
            f'torch.set_float32_matmul_precision("high")          # TF32, one line\n{_BF16}',
            apply=("bf16",),
        )
    return Remedy(
        "Run matrix products in fp16 with a gradient scaler.",
        'scaler = torch.amp.GradScaler()\nwith torch.autocast("cuda", dtype=torch.float16):\n    loss = model(batch)\n'
        "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()\n"
        "# or stepscope.remedies.mixed_precision('fp16'), which also compares the first losses with FP32",
        apply=("fp16",),
    )


RULE: Final = Rule(
    id="low-precision",
    title="Numbers are wider than they need to be",
    thresholds={
        "share": Threshold(0.1, "share", "share of the {period} in FP32 matrix kernels"),
        "saved": Threshold(0.5, "share", "share of those kernels' time that is counted as saved"),
        "tensor_float_share": Threshold(0.1, "share", "share of the {period} in TF32 matrix kernels"),
        "double_share": Threshold(0.04, "share", "share of the {period} in operators on float64 tensors"),
        "double_saved": Threshold(0.5, "share", "share of those operators' time that is counted as saved"),
    },
    check=check,
    needs=("operators",),
    remedies={
        "hpu": Remedy(
            "Let matrix products run in bfloat16.",
            'with torch.autocast(device_type="hpu", dtype=torch.bfloat16):\n    loss = model(batch)',
        ),
    },
    serving=InServing(
        "Run the model in bfloat16, or in narrower numbers where the device has them.",
        "precision",
        "model = model.to(torch.bfloat16)",
    ),
)
