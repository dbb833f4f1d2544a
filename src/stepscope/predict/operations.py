"""What device work does, free of any device: kind, arithmetic, traffic and loop dimensions; also in other number types.

The rules for another number type are those of `torch.autocast` on CUDA (https://docs.pytorch.org/docs/stable/amp.html,
"CUDA Op-Specific Behavior"): matrix products, convolutions and attention run in the lower type; softmax, normalisation,
losses and the functions in `_IN_FP32` run in 32 bits; everything else runs in the type of its inputs, which the shapes
do not tell. The optimizer and the weights stay in 32 bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stepscope.errors import UsageError
from stepscope.machine.devices import DevicePeaks
from stepscope.trace import Trace

Numbers = npt.NDArray[np.float64]
Names = npt.NDArray[np.str_]
Mask: TypeAlias = npt.NDArray[np.bool_]

KINDS: Final = (
    "matrix", "convolution", "attention", "normalisation", "softmax", "elementwise", "reduction", "embedding",
    "optimizer", "copy",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Operations:
    """Calls of operators on a device; arrays of shape (n,), not-a-number where something is unknown.

    Attributes:
        batch, rows, columns, inner: of a matrix product batch x (rows x inner) x (inner x columns); a convolution has
            those of the equivalent product (output points x weight); softmax and normalisation have rows of `columns`
            numbers; for others `rows` is 1 and `columns` the numbers written.
    """

    name: Names  # the operator, without namespace and in-place mark, such as "gelu"
    kind: Names  # one of KINDS
    number_type: Names  # of the arithmetic, one of `stepscope.machine.devices.NUMBER_TYPES`, or ""
    flops: Numbers  # floating-point operations of matrix products, convolutions and attention; 0 for the other kinds
    bytes: Numbers  # the least memory traffic
    batch: Numbers
    rows: Numbers
    columns: Numbers
    inner: Numbers
    is_backward: npt.NDArray[np.bool_]  # whether it computes gradients

    def __len__(self) -> int:
        return len(self.kind)

    def select(self, which: npt.NDArray[Any]) -> Operations:
        """Those of this mask or these indices."""
        return Operations(*(getattr(self, name)[which] for name in self.__dataclass_fields__))

    @classmethod
    def joined(cls, parts: Sequence[Operations]) -> Operations:
        """Several one after another; at least one."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))


BYTES: Final = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}


def by_type(types: Names, values: Mapping[str, float], otherwise: float = np.nan) -> Numbers:
    """The value of each number type, shape (n,)."""
    return np.array([values.get(kind, otherwise) for kind in types.tolist()], np.float64)


USUAL_SHARE: Final = 0.7  # share of the roofline that an operation reaches, where nothing more is known
WIDEST: Final = 3.0  # factor of the band either way where nothing was learned
LAUNCH_NS: Final = 2_000.0  # the least that any kernel takes


@dataclass(frozen=True, slots=True)
class OperationTimes:
    """Nanoseconds of each operation; arrays of shape (n,), not-a-number where unknown."""

    ns: Numbers
    low_ns: Numbers
    high_ns: Numbers  # with low_ns: the band that holds nine of ten operations on devices that were not learned from
    basis: Names  # "learned", "roofline" (nothing was learned of such operations; the band is wide) or "unknown"

    def replaced(self, which: npt.NDArray[np.bool_], others: OperationTimes) -> OperationTimes:
        """With `others` where the mask is true; there are as many."""
        new = {}
        for name in self.__dataclass_fields__:
            ours, theirs = getattr(self, name), getattr(others, name)
            new[name] = ours.astype(np.promote_types(ours.dtype, theirs.dtype))
            new[name][which] = theirs
        return OperationTimes(**new)


def roofline_times(operations: Operations, device: DevicePeaks) -> OperationTimes:
    """The roofline over its usual share, with the widest band: for operations of which nothing was learned."""
    roof = roofline_ns(operations, device)
    ns = np.maximum(roof / USUAL_SHARE, LAUNCH_NS)
    ns = np.where(np.isfinite(roof), ns, np.nan)
    basis = np.where(np.isfinite(roof), "roofline", "unknown")
    return OperationTimes(ns, ns / WIDEST, ns * WIDEST, basis)


def roofline_ns(operations: Operations, device: DevicePeaks) -> Numbers:
    """The least time that a device needs: the longer of arithmetic at its peak and traffic at its bandwidth.

    Not-a-number where traffic, arithmetic or the device's peak in the number type is unknown.
    """
    rate = by_type(operations.number_type, device.flops_s)
    compute = np.where(operations.flops == 0, 0.0, operations.flops / rate)
    return np.maximum(compute, operations.bytes / device.bandwidth_bytes_s) * 1e9


PRECISIONS: Final = ("fp32", "tf32", "fp16", "bf16", "fp8")
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
_BATCHED: Final = ("bmm", "baddbmm")  # products of two activations, which recipes for 8-bit numbers leave in 16 bits


@dataclass(frozen=True, slots=True)
class Cast:
    """Operations on other numbers."""

    operations: Operations  # as expected
    least: Operations
    most: Operations  # with least: the same with the least and the most traffic that the rules allow
    changed: Mask  # whose type or traffic differs; shape (n,)


def in_precision(operations: Operations, precision: str | None, *, stays: Mask | None = None) -> Cast:
    """The operations as they would run in another number type.

    A recording that computes in 16 bits already runs in 32 bits what its program wants so; asked for 16 bits, or for
    TF32, only its products may change.

    Args:
        precision: one of PRECISIONS; None changes nothing.
        stays: operations that keep their numbers, such as the optimizer's; shape (n,).

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
    types = _types_in(operations, precision, kept)
    # What 8-bit products write has 16 bits: on average between the two.
    width = np.where(types == "fp8", 1.5, by_type(types, BYTES))
    share = width / by_type(operations.number_type, BYTES)
    expected = operations.bytes * np.where(np.isfinite(share), share, 1.0)
    changed = (types != operations.number_type) & np.isfinite(share)
    # Inputs that decide the type need not be of the other type, so such operations may stay as they are.
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
    """Whether tensors other than those of products change their size."""
    return is_low if precision == "fp32" else precision != "tf32" and not is_low


@dataclass(frozen=True, slots=True)
class Tf32:
    """Whether PyTorch multiplies 32-bit numbers as TF32 on NVIDIA devices that can."""

    products: bool = False
    convolutions: bool = True


NO_TF32: Final = Tf32(products=False, convolutions=False)


def tf32_of(trace: Trace) -> Tf32:
    """What the recorded program allows, by default as PyTorch does.

    The defaults: `torch.backends.cudnn.allow_tf32 = True`, `torch.get_float32_matmul_precision() = "highest"`.
    """
    settings = {} if trace.metadata.program is None else trace.metadata.program.torch
    matmul = settings.get("float32_matmul_precision", "highest")
    return Tf32(products=matmul in ("high", "medium"), convolutions=settings.get("cudnn_allow_tf32", True) is not False)


def types_on(operations: Operations, device: DevicePeaks, added: Tf32 = NO_TF32) -> Operations:
    """The operations as a device runs them: without TF32 it multiplies 32-bit numbers as they are.

    Args:
        added: what runs in TF32 there that did not where it was recorded, for lack of it.
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


def _types_in(operations: Operations, precision: str, kept: Mask) -> Names:
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


def is_nvidia(device: DevicePeaks) -> bool:
    """Whether a device is NVIDIA's: the table tells its maker, older rows only by what they are called."""
    if device.vendor:
        return device.vendor.upper() == "NVIDIA"
    return device.capability is not None and not re.search(r"\bMI\d|Instinct|Gaudi|TPU", device.name)
