"""Records of arrays of equal length, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

Record = TypeVar("Record")


def concatenated(first: Record, *others: Record) -> Record:
    """Records of a class whose slots are all arrays of shape (n,), such as `Edges`, as one."""
    parts: Sequence[Record] = (first, *others)
    names: tuple[str, ...] = type(first).__slots__  # type: ignore[attr-defined]
    return type(first)(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
