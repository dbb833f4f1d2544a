"""The same operations on other numbers: what "bf16" instead of "fp32" would make of a step.

The rules are those of `torch.autocast` on CUDA (https://docs.pytorch.org/docs/stable/amp.html, "CUDA Op-Specific
Behavior"): matrix products, convolutions and attention run in the lower type; softmax, normalisation, losses and the
functions in `_IN_FP32` run in 32 bits; everything else runs in the type of its inputs, which the shapes do not tell.
The optimizer and the weights stay in 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stepscope.errors import UsageError
from stepscope.machine.devices import DevicePeaks
from stepscope.predict.operation_times import is_nvidia
from stepscope.predict.operations import Names, Numbers, Operations
from stepscope.trace import Trace

Mask: TypeAlias = npt.NDArray[np.bool_]

PRECISIONS: Final = ("fp32", "tf32", "fp16", "bf16", "fp8")
BYTES: Final = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}

_PRODUCTS: Final = ("matrix", "convolution", "attention")
_IN_FP32: Final = (
    "pow", "exp", "expm1", "log", "log2", "log10", "log1p", "reciprocal", "rsqrt", "softplus", "acos", "asin", "cosh",
    "sinh", "tan", "erfinv", "sum", "prod", "norm", "cumsum", "cumprod", "dist", "renorm", "mse_loss",
    "mse_loss_backward", "nll_loss_forward", "nll_loss_backward", "binary_cross_entropy_with_logits", "layer_norm",
    "native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward", "softmax",
    "_softmax", "_softmax_backward_data", "log_softmax", "_log_softmax", "_log_softmax_backward_data",
)  # fmt: skip
"""Operators that autocast gives 32-bit numbers, by the names that profilers record of them."""
_WITHOUT_TYPE: Final = ("optimizer", "embedding", "copy")
"""Kinds whose numbers are those of the weights, or of the program."""
_LOW: Final = ("fp16", "bf16", "fp8", "int8")
_BATCHED: Final = ("bmm", "baddbmm")
"""Products of two activations, which recipes for 8-bit numbers leave in 16 bits."""


@dataclass(frozen=True, slots=True)
class Cast:
    """Operations on other numbers.

    Attributes:
        operations: as expected.
        least, most: the same with the least and the most traffic that the rules allow.
        changed: of which operations type or traffic differs; shape (n,).
    """

    operations: Operations
    least: Operations
    most: Operations
    changed: Mask


def in_precision(operations: Operations, precision: str | None, *, stays: Mask | None = None) -> Cast:
    """The operations as they would run in another number type.

    A recording that computes in 16 bits already has in 32 bits what its program wants so; asked for 16 bits, or for
    TF32, only its products may change.

    Args:
        precision: one of PRECISIONS; None changes nothing.
        stays: operations that keep their numbers whatever they are, such as the optimizer's; shape (n,).

    Raises:
        UsageError: an unknown number type.
    """
    if precision is None:
        return Cast(operations, operations, operations, np.zeros(len(operations), np.bool_))
    check_precision(precision)
    kept = np.isin(operations.kind, _WITHOUT_TYPE) | (operations.kind == "")
    if not changes_traffic(precision, is_low=is_low(operations) is True):
        kept = kept | ~np.isin(operations.kind, _PRODUCTS)
    if stays is not None:
        kept = kept | stays
    types = _types(operations, precision, kept)
    # What 8-bit products write has 16 bits: on average between the two.
    width = np.where(types == "fp8", 1.5, _widths(types))
    share = width / _widths(operations.number_type)
    expected = operations.bytes * np.where(np.isfinite(share), share, 1.0)
    changed = (types != operations.number_type) & np.isfinite(share)
    # Of what runs in its inputs' type nobody knows that they are of the other type, so it may stay as it is.
    certain = ~changed | np.isin(operations.kind, _PRODUCTS)
    as_before = np.where(certain, expected, operations.bytes)
    types = np.where(changed, types, operations.number_type)
    return Cast(
        replace(operations, number_type=types, bytes=expected),
        replace(operations, number_type=types, bytes=np.minimum(expected, as_before)),
        replace(operations, number_type=types, bytes=np.maximum(expected, as_before)),
        changed,
    )


def is_low(operations: Operations) -> bool | None:
    """Whether most of the products' arithmetic is in 16 bits or less; None where there is none of known work."""
    flops = np.where(np.isin(operations.kind, _PRODUCTS) & np.isfinite(operations.flops), operations.flops, 0.0)
    total = flops.sum()
    if total <= 0:
        return None
    return bool(flops[np.isin(operations.number_type, _LOW)].sum() > total / 2)


def changes_traffic(precision: str, *, is_low: bool) -> bool:
    """Whether tensors beside those of products get another length."""
    return is_low if precision == "fp32" else precision != "tf32" and not is_low


@dataclass(frozen=True, slots=True)
class Tf32:
    """Whether PyTorch multiplies 32-bit numbers as TF32 on NVIDIA devices that can."""

    products: bool = False
    convolutions: bool = True


NO_TF32: Final = Tf32(products=False, convolutions=False)


def tf32_of(trace: Trace) -> Tf32:
    """What the recorded program allows; PyTorch's defaults where that is not known.

    These are `torch.backends.cudnn.allow_tf32 = True` and `torch.get_float32_matmul_precision() = "highest"`.
    """
    settings = {} if trace.metadata.program is None else trace.metadata.program.torch
    matmul = settings.get("float32_matmul_precision", "highest")
    return Tf32(products=matmul in ("high", "medium"), convolutions=settings.get("cudnn_allow_tf32", True) is not False)


def types_on(operations: Operations, device: DevicePeaks, added: Tf32 = NO_TF32) -> Operations:
    """The operations as a device runs them.

    TF32 is a way to multiply 32-bit numbers: a device without it multiplies them as they are.

    Args:
        added: what comes to run in TF32 that did not where it was recorded, for want of it.
    """
    types = operations.number_type
    if "tf32" not in device.flops_s:
        types = np.where(types == "tf32", "fp32", types)
    elif is_nvidia(device):
        wide = types == "fp32"
        types = np.where(wide & added.convolutions & (operations.kind == "convolution"), "tf32", types)
        types = np.where(wide & added.products & (operations.kind == "matrix"), "tf32", types)
    return replace(operations, number_type=types)


def check_precision(precision: str) -> None:
    """Raise UsageError unless this is one of PRECISIONS."""
    if precision not in PRECISIONS:
        raise UsageError(f"{precision!r} is no number type to predict: {', '.join(PRECISIONS)}")


def _types(operations: Operations, precision: str, kept: Mask) -> Names:
    """The type that each operation would run in."""
    before = operations.number_type
    product = np.isin(operations.kind, _PRODUCTS)
    wide, half = np.isin(before, ("fp32", "tf32")), np.isin(before, ("fp16", "bf16"))
    if precision == "tf32":
        return np.where(product & (before == "fp32") & ~kept, "tf32", before)
    if precision == "fp32":
        return np.where((wide | half) & ~kept, "fp32", before)
    in_half = "bf16" if precision == "fp8" else precision
    by_rule = product | (~np.isin(operations.name, _IN_FP32) & ~np.isin(operations.kind, ("softmax",)))
    types = np.where(wide & by_rule & ~kept, in_half, before)
    if precision == "fp8":
        weights = (operations.kind == "matrix") & ~np.isin(operations.name, _BATCHED)
        return np.where(weights & (wide | half) & ~kept, "fp8", types)
    return np.where(half & product & ~kept, in_half, types)


def _widths(types: Names) -> Numbers:
    """Bytes of a number, not-a-number for a type that is none of BYTES."""
    return np.array([BYTES.get(one, np.nan) for one in types.tolist()], np.float64)
