"""What device work does, free of any device: kind, arithmetic, traffic and the dimensions of the loops in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

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
        number_type: of the arithmetic, one of `stepscope.devices.NUMBER_TYPES`; "" where it is none of them.
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
