"""Device work described independently of any device: kind, arithmetic, traffic, loop dimensions; also in other number
types.

The rules for another number type are those of `torch.autocast` on CUDA (https://docs.pytorch.org/docs/stable/amp.html,
"CUDA Op-Specific Behavior"): matrix products, convolutions and attention run in the lower type; softmax, normalisation,
losses and the functions in `_IN_FP32` run in 32 bits; everything else runs in the type of its inputs, which shapes do
not show. The optimizer and the weights stay in 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stepscope.errors import UsageError
from stepscope.machine.devices import DevicePeaks, is_nvidia
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
    """Operator calls described independently of any device; arrays of shape (n,), not-a-number where unknown.

    Attributes:
        batch, rows, columns, inner: dimensions of a matrix product batch x (rows x inner) x (inner x columns); a
            convolution has those of the equivalent product (output points x weight); softmax and normalisation have
            rows of `columns` numbers; for others `rows` is 1 and `columns` the numbers written.
    """

    name: Names  # operator without namespace and in-place mark, such as "gelu"
    kind: Names  # one of KINDS
    number_type: Names  # number type of the arithmetic, one of `stepscope.machine.devices.NUMBER_TYPES`, or ""
    flops: Numbers  # floating-point operations of matrix products, convolutions and attention; 0 for other kinds
    bytes: Numbers  # least possible memory traffic
    batch: Numbers
    rows: Numbers
    columns: Numbers
    inner: Numbers
    is_backward: npt.NDArray[np.bool_]  # whether it computes gradients

    def __len__(self) -> int:
        return len(self.kind)

    def select(self, which: npt.NDArray[Any]) -> Operations:
        """Select operations by a mask or indices."""
        return Operations(*(getattr(self, name)[which] for name in self.__dataclass_fields__))

    @classmethod
    def joined(cls, parts: Sequence[Operations]) -> Operations:
        """Concatenate one or more parts."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))


BYTES: Final = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}


def by_type(types: Names, values: Mapping[str, float], otherwise: float = np.nan) -> Numbers:
    """Look up the value of each number type, shape (n,)."""
    return np.array([values.get(kind, otherwise) for kind in types.tolist()], np.float64)


USUAL_SHARE: Final = 0.7  # share of the roofline that an operation reaches where nothing better is known
WORTH_SAYING: Final = 0.01
"""Least share of the time that deserves a note."""
WIDEST: Final = 3.0  # factor of the band either way where no model was learned
UNMEASURED: Final[Mapping[str, tuple[float, float]]] = {"AMD": (0.65, 2.76), "": (0.65, 9.28)}
"""Factors on a roofline's time that hold nine of ten kinds of work on devices of makers of whom none was measured for
the models: `benchmarks/unmeasured_makers.py` derives AMD's from public traces. Of other makers there are none: theirs
reach to what AMD's took before anything was known of it.
"""
LAUNCH_NS: Final = 2_000.0  # least time of any kernel


@dataclass(frozen=True, slots=True)
class OperationTimes:
    """Nanoseconds of each operation; arrays of shape (n,), not-a-number where unknown."""

    ns: Numbers
    low_ns: Numbers
    high_ns: Numbers  # low_ns, high_ns: band that holds nine of ten operations on held-out devices
    basis: Names  # "learned", "roofline" (no model for such operations; wide band) or "unknown"

    def replaced(self, which: npt.NDArray[np.bool_], others: OperationTimes) -> OperationTimes:
        """Replace the times where the mask is true by `others`, one per true element."""
        new = {}
        for name in self.__dataclass_fields__:
            ours, theirs = getattr(self, name), getattr(others, name)
            new[name] = ours.astype(np.promote_types(ours.dtype, theirs.dtype))
            new[name][which] = theirs
        return OperationTimes(**new)

    def select(self, which: npt.NDArray[Any]) -> OperationTimes:
        """Select operations by a mask or indices, which may repeat."""
        return OperationTimes(*(getattr(self, name)[which] for name in self.__dataclass_fields__))


def roofline_times(operations: Operations, device: DevicePeaks) -> OperationTimes:
    """Roofline over its usual share, with the widest band: for operations without a learned model.

    Arithmetic is at the rates that the device sustains, where they were measured.
    """
    is_measured = device.best_bf16_flops_s is not None
    rates = {kind: device.sustained(kind) for kind in device.flops_s if is_measured or kind in device.sustained_flops_s}
    roof = roofline_ns(operations, replace(device, flops_s={**device.flops_s, **rates}))
    ns = np.maximum(roof / USUAL_SHARE, LAUNCH_NS)
    ns = np.where(np.isfinite(roof), ns, np.nan)
    basis = np.where(np.isfinite(roof), "roofline", "unknown")
    return OperationTimes(ns, ns / WIDEST, ns * WIDEST, basis)


def roofline_ns(operations: Operations, device: DevicePeaks) -> Numbers:
    """Least time that a device needs: the longer of arithmetic at its peak and traffic at its bandwidth.

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
"""Operators that autocast runs in 32 bits, by the names that profilers record."""
_WITHOUT_TYPE: Final = ("optimizer", "embedding", "copy")
"""Kinds whose number type is that of the weights, or chosen by the program."""
_LOW: Final = ("fp16", "bf16", "fp8", "int8")
_BATCHED: Final = ("bmm", "baddbmm")  # products of two activations, which 8-bit recipes leave in 16 bits


@dataclass(frozen=True, slots=True)
class Cast:
    """Operations in another number type."""

    operations: Operations  # expected operations
    least: Operations
    most: Operations  # least, most: with the least and the most traffic that the rules allow
    changed: Mask  # whether the number type or traffic differs; shape (n,)


def in_precision(operations: Operations, precision: str | None, *, stays: Mask | None = None) -> Cast:
    """Convert operations to another number type.

    A recording in 16 bits already keeps what its program wants in 32 bits, so a request for 16 bits or TF32
    changes only its products.

    Args:
        precision: one of PRECISIONS; None changes nothing.
        stays: operations that keep their numbers, such as the optimizer's; shape (n,).

    Raises:
        UsageError: the number type is unknown.
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
    # Outputs of 8-bit products have 16 bits: on average between the two.
    width = np.where(types == "fp8", 1.5, by_type(types, BYTES))
    share = width / by_type(operations.number_type, BYTES)
    expected = operations.bytes * np.where(np.isfinite(share), share, 1.0)
    changed = (types != operations.number_type) & np.isfinite(share)
    # The inputs that decide the type may already have it, so such operations may stay as they are.
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
    """Whether most of the products' arithmetic is in 16 bits or less; None without products of known work."""
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
    """Where PyTorch multiplies 32-bit numbers as TF32 on NVIDIA devices that support it."""

    products: bool = False
    convolutions: bool = True


NO_TF32: Final = Tf32(products=False, convolutions=False)


def tf32_of(trace: Trace) -> Tf32:
    """TF32 settings of the recorded program, by default PyTorch's own.

    The defaults: `torch.backends.cudnn.allow_tf32 = True`, `torch.get_float32_matmul_precision() = "highest"`.
    """
    settings = {} if trace.metadata.program is None else trace.metadata.program.torch
    matmul = settings.get("float32_matmul_precision", "highest")
    return Tf32(products=matmul in ("high", "medium"), convolutions=settings.get("cudnn_allow_tf32", True) is not False)


def types_on(operations: Operations, device: DevicePeaks, added: Tf32 = NO_TF32) -> Operations:
    """Operations as a device runs them: without TF32 it multiplies 32-bit numbers in full.

    Args:
        added: operations that run in TF32 there, but did not on the recorded device because it has none.
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
        raise UsageError(f"{precision!r} is not a number type to predict: {', '.join(PRECISIONS)}")


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
