"""Loops over a model's parameters, which have rules of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stepscope.analysis.loops import Loop
from stepscope.analysis.traffic import base_name

NORMS: Final = frozenset({"linalg_vector_norm", "norm", "frobenius_norm"})
_AROUND_NORMS: Final = NORMS | {"detach", "item", "pow", "square", "sum", "add", "to", "mul", "_to_copy"}


def told_elsewhere(found: Sequence[Loop]) -> list[Loop]:
    """Those that other rules tell: setting gradients to zero, clipping them, updating parameters by hand."""
    clips = any(is_clipping(loop) for loop in found)
    return [
        loop
        for loop in found
        if is_zeroing(loop) or is_clipping(loop) or is_update(loop) or (clips and is_scaling(loop))
    ]


def is_zeroing(loop: Loop) -> bool:
    """Gradients set to zero one by one."""
    names = {base_name(name) for name in loop.body}
    return "zero" in names and names <= {"zero", "detach", "requires_grad"}


def is_clipping(loop: Loop) -> bool:
    """Norms one by one."""
    names = {base_name(name) for name in loop.body}
    is_norm = not names.isdisjoint(NORMS) or {"pow", "sum"} <= names or {"square", "sum"} <= names
    return is_norm and names <= _AROUND_NORMS


def is_scaling(loop: Loop) -> bool:
    """Tensors multiplied in place one by one."""
    return set(loop.body) <= {"aten::mul_", "aten::detach", "aten::to"} and "aten::mul_" in loop.body


def is_update(loop: Loop) -> bool:
    """Adam, spelled out."""
    changed = {base_name(name) for name in loop.body if name.endswith("_")}
    return any(base_name(name) == "sqrt" for name in loop.body) and not changed.isdisjoint({"addcdiv", "sub", "add"})
