"""# What it finds
Large matrix products in FP32 on a device with tensor cores.

# Why it costs time
Tensor cores (matrix cores on AMD) multiply 16-bit and TF32 matrices several times as fast as FP32 units multiply
FP32 ones. A model trained in plain FP32 leaves them unused.

# How it is measured
Time of matrix kernels whose names say FP32 (TF32 is another), on a device of compute capability 7.0 or later. Half
of that time is counted as saved, which is less than the hardware's ratio.

# Known false positives
Numerically delicate parts that must stay in FP32. Kernel names do not tell everything: some vendors' kernels hide their
number type.

# What to do
`torch.autocast` with bf16 (or fp16 with a gradient scaler on Volta and Turing); on Ampere and later, TF32 with one
line.

# Reference
PyTorch's FP32MatMulPattern and TensorBoard plugin (tensor cores unused on compute capability 7.0 or later).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.kernels import arithmetic
from stepscope.diagnosis.finding import Evidence, Figure, NotAnswered, Remedy, RuleResult
from stepscope.diagnosis.threshold import Threshold
from stepscope.diagnosis.view import View

ID: Final = "low-precision"
TITLE: Final = "Matrix products run in FP32"
THRESHOLDS: Final = {
    "share": Threshold(0.1, "share", "share of the step in FP32 matrix kernels"),
    "saved": Threshold(0.5, "share", "share of those kernels' time that is counted as saved"),
}

_TENSOR_CORES_SINCE: Final = (7, 0)
_TF32_SINCE: Final = (8, 0)


def check(view: View) -> RuleResult:
    """Sum the time of FP32 matrix kernels."""
    if view.device is None:
        return RuleResult()
    capability = _capability(view)
    names = view.work["name"].unique()
    slow = [name for name in names if arithmetic(name).is_matrix and arithmetic(name).precision == "fp32"]
    kernels = view.work.filter(pl.col("name").is_in(slow) & (pl.col("kind") == "compute"))
    total = int(kernels["duration_ns"].sum())
    limit = view.threshold(ID, THRESHOLDS, "share")
    if total == 0 or view.share(total) < limit:
        return RuleResult()
    if capability is None:
        return RuleResult((), (_UNKNOWN_DEVICE,))
    if capability < _TENSOR_CORES_SINCE:
        return RuleResult()
    launched = kernels.filter(pl.col("launch").is_not_null())
    slices = view.activity.slices_of("launches")[launched["launch"].to_numpy().astype(np.int64)]
    saved = view.threshold(ID, THRESHOLDS, "saved")
    finding = view.finding(
        ID,
        f"{view.share(total):.0%} of the step is FP32 matrix products that tensor cores could do",
        total * saved,
        basis=f"{saved:.0%} of the time of FP32 matrix kernels, an assumption below the hardware's ratio",
        confidence="low",
        evidence=Evidence(
            (
                Figure("share of the step in FP32 matrix kernels", view.share(total), "share", limit),
                Figure("such kernels per step", kernels.height / view.step_count, "count"),
            ),
            view.longest(kernels, "FP32 matrix product"),
        ),
        remedy=_remedy(capability),
        where=view.locations_of(slices, launched["duration_ns"].to_numpy()),
    )
    return RuleResult((finding,))


_UNKNOWN_DEVICE: Final = NotAnswered(
    "Would lower precision speed up the FP32 matrix products?",
    "the trace does not say which device this is (deviceProperties is missing)",
    "record with a current version of PyTorch, which writes the device's properties",
    ID,
)


def _capability(view: View) -> tuple[int, int] | None:
    for device in view.trace.metadata.devices:
        if device.device == view.device and device.compute_capability:
            major, _, minor = device.compute_capability.partition(".")
            return int(major), int(minor)
    return None


def _remedy(capability: tuple[int, int]) -> Remedy:
    if capability >= _TF32_SINCE:
        return Remedy(
            "Run matrix products in bf16, or at least in TF32.",
            'torch.set_float32_matmul_precision("high")          # TF32, one line\n'
            'with torch.autocast("cuda", dtype=torch.bfloat16):   # bf16\n    loss = model(batch)',
        )
    return Remedy(
        "Run matrix products in fp16 with a gradient scaler.",
        'scaler = torch.amp.GradScaler()\nwith torch.autocast("cuda", dtype=torch.float16):\n    loss = model(batch)\n'
        "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
    )
