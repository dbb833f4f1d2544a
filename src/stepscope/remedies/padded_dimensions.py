"""Dimensions rounded up to what matrix units take whole, with the same results and no gradient in what is added."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def padded_size(size: int, multiple: int = 64) -> int:
    """The next multiple: 50,304 for a vocabulary of 50,257.

    Args:
        size: 0 or more.
        multiple: 64 fits whole tiles of a matrix product; 8 is what tensor cores need of 16-bit numbers.

    Raises:
        ValueError: for a negative size, or a multiple below 1.
    """
    if size < 0 or multiple < 1:
        raise ValueError(f"a size of 0 or more and a multiple of 1 or more are expected, not {size} and {multiple}")
    return -(-size // multiple) * multiple


def pad_dimension(tensor: Tensor, dim: int, multiple: int = 64, value: float = 0.0) -> Tensor:
    """The tensor with more numbers at the end of a dimension, so that its size is a multiple.

    The first part is the tensor, bit by bit, also in the backward pass; a tensor that fits is returned itself.

    Args:
        value: of the numbers that are added.

    Raises:
        IndexError: where the tensor has no such dimension.
        ValueError: for a multiple below 1.
    """
    if not -tensor.dim() <= dim < tensor.dim():
        raise IndexError(f"a tensor of shape {tuple(tensor.shape)} has no dimension {dim}")
    added = padded_size(tensor.shape[dim], multiple) - tensor.shape[dim]
    if not added:
        return tensor
    following = tensor.dim() - 1 - dim % tensor.dim()
    return torch.nn.functional.pad(tensor, [0, 0] * following + [0, added], value=value)


class _FirstClasses:
    """A forward hook: a layer's outputs without those of the padding. A class, so that models can be pickled."""

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def __call__(self, layer: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output[..., : self.classes]


def pad_vocabulary(*layers: torch.nn.Module, multiple: int = 64, keep_padding: bool = False) -> int:
    """Give embeddings and linear layers over the same words more rows, of zeros, so that their number is a multiple.

        pad_vocabulary(model.embedding, model.head)

    Outputs stay as they are: words that were added are never looked up, and a linear layer's output is cut to the words
    that there were, as a view. Gradients of the added rows are zero, and optimizers leave them zero. Layers that share
    a weight share the new one. Parameters are made anew: pad before the optimizer is made and after weights were
    loaded. A word beyond the vocabulary, an error before, gives zeros if it is one of the added rows.

    Args:
        layers: torch.nn.Embedding and torch.nn.Linear, changed in place.
        multiple: 64 fits whole tiles; 8 is what tensor cores need.
        keep_padding: let linear layers give the padding's scores as well, for losses that take `classes`.

    Returns:
        The number of rows that they have now.

    Raises:
        TypeError: for other layers.
        ValueError: without layers, where they have different numbers of words, or for a multiple below 1.
    """
    for layer in layers:
        if not isinstance(layer, torch.nn.Embedding | torch.nn.Linear):
            raise TypeError(f"torch.nn.Embedding and torch.nn.Linear can be padded, not {type(layer).__name__}")
    sizes = {layer.weight.shape[0] for layer in layers if isinstance(layer.weight, Tensor)}
    if len(sizes) != 1:
        raise ValueError(f"layers over the same words are expected, not over {sorted(sizes) or 'none'}")
    (words,) = sizes
    size = padded_size(words, multiple)
    if size == words:
        return words
    made: dict[int, torch.nn.Parameter] = {}
    for layer in layers:
        for name in ("weight", "bias"):
            parameter = getattr(layer, name, None)
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = _padded(parameter, size)
                setattr(layer, name, made[id(parameter)])
        linear = isinstance(layer, torch.nn.Linear)
        setattr(layer, "out_features" if linear else "num_embeddings", size)
        if linear and not keep_padding:
            layer.register_forward_hook(_FirstClasses(words))
    return size


def _padded(parameter: Tensor, size: int) -> torch.nn.Parameter:
    longer = parameter.new_zeros((size, *parameter.shape[1:]))
    longer[: parameter.shape[0]] = parameter.detach()
    return torch.nn.Parameter(longer, requires_grad=parameter.requires_grad)
