"""What device work does, free of any device: kind, arithmetic, traffic and the dimensions of the loops in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stepscope.machine.devices import DevicePeaks

Numbers = npt.NDArray[np.float64]
Names = npt.NDArray[np.str_]

KINDS: Final = (
    "matrix", "convolution", "attention", "normalisation", "softmax", "elementwise", "reduction", "embedding",
    "optimizer", "copy",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Operations:
    """Calls of operators on a device; arrays of shape (n,), not-a-number where something is unknown.

    Attributes:
        name: the operator, without namespace and in-place mark, such as "gelu".
        kind: one of KINDS.
        number_type: of the arithmetic, one of `stepscope.machine.devices.NUMBER_TYPES`, or "".
        flops: floating-point operations of matrix products, convolutions and attention; 0 for the other kinds.
        bytes: the least memory traffic.
        batch, rows, columns, inner: of a matrix product batch x (rows x inner) x (inner x columns); a convolution's are
            those of the product that it is alike (output points x weight); of softmax and normalisation, rows of
            `columns` numbers; of others `rows` is 1 and `columns` the numbers written.
        is_backward: whether it computes gradients.
    """

    name: Names
    kind: Names
    number_type: Names
    flops: Numbers
    bytes: Numbers
    batch: Numbers
    rows: Numbers
    columns: Numbers
    inner: Numbers
    is_backward: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.kind)

    def select(self, which: npt.NDArray[Any]) -> Operations:
        """Those of this mask or these indices."""
        return Operations(*(getattr(self, name)[which] for name in self.__dataclass_fields__))

    @classmethod
    def joined(cls, parts: Sequence[Operations]) -> Operations:
        """Several one after another; at least one."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))


USUAL_SHARE: Final = 0.7
"""Of the roofline, reached by an operation of which nothing more is known."""
WIDEST: Final = 3.0
"""Factor of the band either way where nothing was learned of such operations."""
LAUNCH_NS: Final = 2_000.0
"""The least that any kernel takes."""


@dataclass(frozen=True, slots=True)
class OperationTimes:
    """Nanoseconds of each operation; arrays of shape (n,), not-a-number where nothing can be said.

    Attributes:
        ns: what is expected.
        low_ns, high_ns: the band that holds nine of ten operations on devices that were not learned from.
        basis: "learned", "roofline" (nothing was learned of such operations; the band is wide) or "unknown".
    """

    ns: Numbers
    low_ns: Numbers
    high_ns: Numbers
    basis: Names

    def replaced(self, which: npt.NDArray[np.bool_], others: OperationTimes) -> OperationTimes:
        """With those of this mask from others, which has as many as the mask is true."""
        new = {}
        for name in self.__dataclass_fields__:
            mine, theirs = getattr(self, name), getattr(others, name)
            new[name] = mine.astype(np.promote_types(mine.dtype, theirs.dtype))
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

    Not-a-number where traffic or arithmetic is unknown, or the device has no peak for the arithmetic's number type.
    """
    rates = {kind: device.flops_s.get(kind, np.nan) for kind in set(operations.number_type.tolist())}
    rate = np.array([rates[kind] for kind in operations.number_type.tolist()], np.float64)
    compute = np.where(operations.flops == 0, 0.0, operations.flops / rate)
    return np.maximum(compute, operations.bytes / device.bandwidth_bytes_s) * 1e9
