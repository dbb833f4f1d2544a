"""Work of operators whose inputs are lists of tensors, or that only predictions ask for.

As `stepscope.analysis.work_formulas`: every input read once, every output written once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Final, TypeAlias

from stepscope.analysis.traffic import base_name
from stepscope.analysis.work_inputs import ELEMENT_BYTES, LARGEST, NUMBER_TYPES, Call, Work

Lists: TypeAlias = list[int]
"""Numbers in each list of tensors among the inputs."""

_TENSOR_LIST_BYTES: Final = 4
"""Profilers do not record the types of tensors in lists; what optimizers keep has 32 bits."""
_OPTIMIZER: Final = re.compile(r"^_(?:foreach|fused_(?:adam|adamw|sgd|adagrad))_?")
_COMPILED: Final = re.compile(r"^triton_(poi|red|per)_")
_MOST_DIMENSIONS: Final = 64
"""As many as a tensor of PyTorch can have."""
_LONGEST: Final = 4_000_000
"""Characters of the shapes of one call; a list of a thousand parameters has some ten thousand."""


def further_work(name: str, shapes: str | None, call: Call) -> Work | None:
    """What a call of such an operator needs; None where it is none of these or the shapes do not tell.

    Args:
        name: such as "aten::_foreach_add_".
        shapes: JSON, as in the table `operators`.
    """
    short = base_name(name)
    if _OPTIMIZER.match(short):
        found = _optimizer(short, _lists(shapes), in_place=name.endswith("_"))
    elif short == "cat":
        found = _joined(_lists(shapes))
    elif _COMPILED.match(short):
        found = _compiled(short, call)
    else:
        formula = _FORMULAS.get(short)
        found = formula(call) if formula is not None else None
    if found is None or any(number is not None and number >= LARGEST for number in (found.flops, found.bytes)):
        return None
    return found


def _lists(shapes: str | None) -> Lists:
    if not shapes or len(shapes) > _LONGEST:
        return []
    try:
        parsed = json.loads(shapes)
    except (ValueError, RecursionError):
        return []
    return [_numbers(one) for one in parsed if _is_list(one)] if isinstance(parsed, list) else []


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(inner, list) for inner in value)


def _numbers(tensors: list[list[Any]]) -> int:
    total: int = sum(prod(one) for one in tensors if _is_shape(one))
    return min(total, LARGEST)


def _is_shape(value: list[Any]) -> bool:
    return len(value) <= _MOST_DIMENSIONS and all(type(size) is int and 0 <= size < LARGEST for size in value)


def _optimizer(short: str, lists: Lists, *, in_place: bool) -> Work | None:
    """One step of an optimizer over lists of tensors, all read; the gradients, the second list, are not written."""
    if not lists:
        return None
    if short.startswith("_fused"):
        written = sum(lists) - (lists[1] if len(lists) > 1 else 0)
        read = sum(lists)
    elif short == "_foreach_zero":
        written, read = lists[0], 0
    elif short == "_foreach_norm":
        written, read = 0, lists[0]
    else:
        copies = short == "_foreach_copy" and in_place
        written, read = lists[0], sum(lists) - (lists[0] if copies else 0)
    return Work("optimizer", 0, (read + written) * _TENSOR_LIST_BYTES, "fp32")


def _joined(lists: Lists) -> Work | None:
    return Work("copy", 0, 2 * lists[0] * _TENSOR_LIST_BYTES, None) if lists and lists[0] else None


def _compiled(short: str, call: Call) -> Work | None:
    """A kernel that torch.compile made of several operators: it takes each tensor once."""
    moved = sum(map(call.bytes, range(len(call.shapes))))
    types = [call.type(index) for index in range(len(call.shapes)) if call.shape(index)]
    numbers = [NUMBER_TYPES[one] for one in types if one in NUMBER_TYPES]
    kind = "elementwise" if short.startswith("triton_poi") else "reduction"
    return Work(kind, 0, moved, numbers[0] if numbers else None) if moved else None


def _moving(kind: str, places: tuple[int, ...], *, extra: int = 0) -> Callable[[Call], Work | None]:
    """Formula for what moves as much as these inputs hold, and `extra` bytes for each number of the first."""

    def formula(call: Call) -> Work | None:
        shape = call.shape(0)
        if not shape:
            return None
        moved = sum(map(call.bytes, places)) + extra * prod(shape)
        return Work(kind, 0, moved, NUMBER_TYPES.get(call.type(0)))

    return formula


def _selected(call: Call) -> Work | None:
    """index_select: of the tensor as many slices along a dimension as there are indices."""
    shape, indices = call.shape(0), call.shape(2)
    text = call.values[1] if len(call.values) > 1 else "0"
    place = int(text) if text.isdecimal() and len(text) < 3 else 0
    if not shape or not indices or place >= len(shape) or not shape[place]:
        return None
    element = ELEMENT_BYTES[call.type(0)]
    written = prod(shape) // shape[place] * prod(indices) * element
    moved = written + min(written, call.bytes(0)) + call.bytes(2)
    return Work("embedding", 0, moved, NUMBER_TYPES.get(call.type(0)))


def _embedding_backward(call: Call) -> Work | None:
    """The gradient of the table, of which the third input says the rows: written in whole, once as zeros."""
    gradient = call.shape(0)
    text = call.values[2] if len(call.values) > 2 else ""
    if not gradient or not text.isdecimal() or len(text) > 18:
        return None
    table = int(text) * gradient[-1] * ELEMENT_BYTES[call.type(0)]
    return Work("embedding", 0, call.bytes(0) + call.bytes(1) + table, NUMBER_TYPES.get(call.type(0)))


_FORMULAS: Final[Mapping[str, Callable[[Call], Work | None]]] = {
    "native_dropout": _moving("elementwise", (0, 0), extra=1),
    "native_dropout_backward": _moving("elementwise", (0, 0, 1)),
    "_fused_dropout": _moving("elementwise", (0, 0), extra=1),
    "bernoulli": _moving("elementwise", (0,)),
    "normal": _moving("elementwise", (0,)),
    "uniform": _moving("elementwise", (0,)),
    "random": _moving("elementwise", (0,)),
    "square": _moving("elementwise", (0, 0)),
    "expm1": _moving("elementwise", (0, 0)),
    "tril": _moving("elementwise", (0, 0)),
    "triu": _moving("elementwise", (0, 0)),
    "flip": _moving("copy", (0, 0)),
    "roll": _moving("copy", (0, 0)),
    "mse_loss": _moving("elementwise", (0, 1, 0)),
    "mse_loss_backward": _moving("elementwise", (1, 1, 2)),
    "native_group_norm_backward": _moving("normalisation", (0, 0, 1)),
    "_fused_rms_norm_backward": _moving("normalisation", (0, 0, 1)),
    # The places of the greatest numbers have eight bytes each.
    "max_pool2d_with_indices_backward": _moving("reduction", (0, 1), extra=8),
    "avg_pool2d_backward": _moving("reduction", (0, 1)),
    "_adaptive_avg_pool2d_backward": _moving("reduction", (0, 1)),
    "index_select": _selected,
    "embedding_dense_backward": _embedding_backward,
    "nll_loss_forward": _moving("reduction", (1,)),
    "nll_loss_backward": _moving("elementwise", (1,)),
}
