"""Reduce padding: batches of similar length, few distinct lengths, and dimensions rounded up to whole matrix tiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import Sampler, default_collate

from stepscope.remedies.settings import check_whole

_FEWEST_POOLS: Final = 4


class LengthBucketSampler(Sampler[list[int]]):
    """Batches of indices with similar lengths, in another random order each epoch.

    All samples are shuffled and cut into pools, four at least, of `pool_batches` batches of every rank; each pool is
    sorted by length and cut into batches, which are shuffled. So a batch holds neighbours in length, others in each
    epoch, and so do the batches that several ranks use in one step: no rank waits for a longer one.

    Every index comes once an epoch, over all ranks, with two exceptions: `drop_last` leaves out the samples that do not
    fill a batch on every rank; and if fewer samples than ranks are left for the last batches, some come twice, so that
    every rank makes the same number of steps. Batches of a step differ by one sample at most.

    Args:
        lengths: of each sample, in any unit, in the data set's order.
        batch_size: samples per batch, on each rank.
        shuffle: False takes all samples as one pool, and gives batches from short to long.
        drop_last: only full batches.
        pool_batches: larger pools make batches more uniform, smaller ones more random; 1 is plain shuffling.
        seed: the same on every rank.
        rank, world_size: by default those of torch.distributed if it is initialised, else 0 and 1.

    Raises:
        ValueError, TypeError: an argument cannot be used; there are fewer samples than ranks.
    """

    def __init__(
        self,
        lengths: Sequence[int] | torch.Tensor,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        pool_batches: int = 50,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._lengths = _numbers(lengths)
        check_whole("batch_size", batch_size)
        check_whole("pool_batches", pool_batches)
        self.batch_size, self.drop_last, self.seed = batch_size, drop_last, seed
        self.rank, self.world_size = _place(rank, world_size)
        if 0 < len(self._lengths) < self.world_size:
            raise ValueError(f"{len(self._lengths)} samples cannot be divided among {self.world_size} ranks")
        self._shuffle, self._pool_batches = shuffle, pool_batches
        self._epoch = 0

    def __len__(self) -> int:
        """Batches of this rank in an epoch."""
        full, rest = divmod(len(self._lengths), self.batch_size * self.world_size)
        return full + (1 if rest and not self.drop_last else 0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; without it each iteration is the next epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self._epoch)
        self._epoch += 1
        groups = self._groups(generator)
        order = torch.randperm(len(groups), generator=generator).tolist() if self._shuffle else range(len(groups))
        for number in order:
            yield self._own_part(groups[number])

    def _groups(self, generator: torch.Generator) -> list[list[int]]:
        """The samples of each step, of all ranks, neighbours in length."""
        count, together = len(self._lengths), self.batch_size * self.world_size
        indices = torch.randperm(count, generator=generator) if self._shuffle else torch.arange(count)
        if self.drop_last:
            indices = indices[: count - count % together]
        pool = min(together * self._pool_batches, together * max(-(-len(indices) // (together * _FEWEST_POOLS)), 1))
        if not self._shuffle:
            pool = max(count, 1)
        groups: list[list[int]] = []
        for part in torch.split(indices, pool) if len(indices) else ():
            # Stable, so that chance still decides among samples of the same length.
            sorted_part = part[torch.sort(self._lengths[part], stable=True).indices]
            groups += [group.tolist() for group in torch.split(sorted_part, together)]
        return groups

    def _own_part(self, group: list[int]) -> list[int]:
        """This rank's batch of a step's samples; the ranks' batches differ by one sample at most."""
        if len(group) < self.world_size:
            group = (group * self.world_size)[: self.world_size]
        size, larger = divmod(len(group), self.world_size)
        begin = self.rank * size + min(self.rank, larger)
        return group[begin : begin + size + (self.rank < larger)]


def _numbers(lengths: Any) -> torch.Tensor:
    try:
        numbers = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"lengths takes one number for each sample, not {type(lengths).__name__} of other things"
        ) from error
    if numbers.dim() != 1 or numbers.is_complex():
        raise ValueError(f"lengths takes one number for each sample; it has the shape {tuple(numbers.shape)}")
    return numbers.cpu()


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    distributed = torch.distributed
    if (rank is None) != (world_size is None):
        raise ValueError("rank and world_size go together: give both or neither")
    if rank is None or world_size is None:
        if not (distributed.is_available() and distributed.is_initialized()):
            return 0, 1
        return distributed.get_rank(), distributed.get_world_size()
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; with world_size={world_size} it takes 0 to {world_size - 1}")
    return rank, world_size


_MULTIPLE: Final = 64
_IGNORED: Final = {"labels": -100}
"""The label that torch's cross_entropy ignores by default, and that Transformers' models expect."""


def pad_to_lengths(
    sequences: Sequence[torch.Tensor | Sequence[float]],
    lengths: Sequence[int] | None = None,
    multiple: int | None = None,
    padding_value: float = 0,
) -> torch.Tensor:
    """Stack sequences [length, ...] into one tensor [batch, padded length, ...], with the padding at the end.

    The padded length is the smallest of `lengths` that holds the longest sequence, or the next multiple above it.

    Args:
        sequences: tensors that differ in the first dimension only, or lists of numbers.
        lengths: the allowed lengths. Give these or `multiple`; the default is a multiple of 64.
        multiple: every padded length is a multiple of this.

    Raises:
        ValueError: there is no sequence; one is longer than all of `lengths`, or of another shape.
    """
    tensors = [sequence if isinstance(sequence, torch.Tensor) else torch.as_tensor(sequence) for sequence in sequences]
    if not tensors:
        raise ValueError("there is no sequence to pad")
    first = tensors[0]
    for tensor in tensors:
        if tensor.dim() == 0 or tensor.shape[1:] != first.shape[1:]:
            raise ValueError(
                "sequences are padded in their first dimension and must agree in the others: "
                f"{list(first.shape)} and {list(tensor.shape)}"
            )
    length = _padded_length(max(map(len, tensors)), *_checked(lengths, multiple))
    padded = first.new_full((len(tensors), length, *first.shape[1:]), padding_value)
    for row, tensor in zip(padded, tensors, strict=True):
        row[: len(tensor)] = tensor
    return padded


class PadCollate:
    """A DataLoader's collate_fn that pads samples to few lengths.

    Samples are sequences, or mappings or tuples of fields. It pads the fields whose first dimension is as long as that
    of the first field, or those in `fields`; all to the same length. Other fields are collated as DataLoader does.

    Args:
        lengths, multiple: see `pad_to_lengths`.
        padding_value: one for all fields, or one for each by its name or position; otherwise 0, and -100 for "labels".
        fields: names or positions of the fields to pad.
        mask: adds a tensor [batch, padded length] that is True at real values: for mappings, the name of the field to
            add; True appends it to tuples, and for sequences returns (tensor, mask).

    Raises:
        ValueError, TypeError: an argument cannot be used; when called, see `pad_to_lengths`, or a field is missing.
    """

    def __init__(
        self,
        lengths: Sequence[int] | None = None,
        multiple: int | None = None,
        *,
        padding_value: float | Mapping[Any, float] | None = None,
        fields: Sequence[str | int] | None = None,
        mask: str | bool = False,
    ) -> None:
        self._lengths, self._multiple = _checked(lengths, multiple)
        self._values = {**_IGNORED, **padding_value} if isinstance(padding_value, Mapping) else dict(_IGNORED)
        self._value = padding_value if isinstance(padding_value, (int, float)) else None
        self._fields, self._mask = fields, mask

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the samples as a batch of their kind: a mapping, a tuple, or a tensor."""
        if not samples:
            raise ValueError("there is no sample to pad")
        first = samples[0]
        if isinstance(first, Mapping):
            batch = self._batch({name: [sample[name] for sample in samples] for name in first})
            if self._mask:
                batch["attention_mask" if self._mask is True else self._mask] = batch.pop(_MASK)
            return batch
        if isinstance(first, tuple):
            batch = self._batch({place: [sample[place] for sample in samples] for place in range(len(first))})
            if hasattr(first, "_fields") and not self._mask:
                return type(first)(*batch.values())
            return tuple(batch.values())
        batch = self._batch({0: list(samples)})
        return tuple(batch.values()) if self._mask else batch[0]

    def _batch(self, columns: dict[Any, list[Any]]) -> dict[Any, Any]:
        padded = self._padded_fields(columns)
        longest = max(len(value) for name in padded for value in columns[name])
        length = _padded_length(longest, self._lengths, self._multiple)
        batch = {
            name: pad_to_lengths(values, (length,), padding_value=self._value_of(name))
            if name in padded
            else default_collate(values)
            for name, values in columns.items()
        }
        if self._mask:
            own = torch.tensor([len(value) for value in columns[padded[0]]])
            batch[_MASK] = torch.arange(length) < own[:, None]
        return batch

    def _padded_fields(self, columns: dict[Any, list[Any]]) -> list[Any]:
        if self._fields is not None:
            missing = [name for name in self._fields if name not in columns]
            if missing:
                raise ValueError(f"the samples have no field {missing[0]!r}; they have {', '.join(map(repr, columns))}")
            return list(self._fields)
        sequences = [name for name, values in columns.items() if all(_is_sequence(value) for value in values)]
        if not sequences:
            raise ValueError("no field of the samples is a sequence: a tensor with a dimension, or a list of numbers")
        own = [len(value) for value in columns[sequences[0]]]
        return [name for name in sequences if [len(value) for value in columns[name]] == own]

    def _value_of(self, name: Any) -> float:
        return self._value if self._value is not None else self._values.get(name, 0)


_MASK: Final = object()


def _checked(lengths: Sequence[int] | None, multiple: int | None) -> tuple[tuple[int, ...] | None, int | None]:
    """The allowed lengths, sorted, or the multiple."""
    if lengths is not None and multiple is not None:
        raise ValueError("give lengths or multiple, not both")
    if lengths is None:
        multiple = _MULTIPLE if multiple is None else multiple
        check_whole("multiple", multiple)
        return None, multiple
    if not lengths or not all(isinstance(length, int) and length > 0 for length in lengths):
        raise ValueError(f"lengths is {lengths!r}; it takes whole numbers above 0, such as (64, 128, 256)")
    return tuple(sorted(lengths)), None


def _padded_length(longest: int, lengths: tuple[int, ...] | None, multiple: int | None) -> int:
    if lengths is None:
        return padded_size(max(longest, 1), multiple or 1)
    allowed = next((length for length in lengths if length >= longest), None)
    if allowed is None:
        raise ValueError(
            f"a sequence has {longest} elements, and the longest length to pad to is {lengths[-1]}: truncate it, or "
            "allow a longer one"
        )
    return allowed


def _is_sequence(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    return isinstance(value, list) and all(isinstance(number, (int, float)) for number in value)


def padded_size(size: int, multiple: int = 64) -> int:
    """Round up to the next multiple: 50,304 for a vocabulary of 50,257.

    Args:
        size: 0 or more.
        multiple: 64 fits whole tiles of a matrix product; 8 is what tensor cores need for 16-bit numbers.

    Raises:
        ValueError: for a negative size, or a multiple below 1.
    """
    if size < 0 or multiple < 1:
        raise ValueError(f"a size of 0 or more and a multiple of 1 or more are expected, not {size} and {multiple}")
    return -(-size // multiple) * multiple


def pad_dimension(tensor: Tensor, dim: int, multiple: int = 64, value: float = 0.0) -> Tensor:
    """Pad a dimension at its end, so that its size is a multiple.

    The first part equals the tensor bit for bit, also in the backward pass; a tensor that fits is returned itself.

    Args:
        value: fills the padding.

    Raises:
        IndexError: the tensor has no such dimension.
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
    """A forward hook that cuts the padding off a layer's outputs. A class, so that models can be pickled."""

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def __call__(self, layer: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output[..., : self.classes]


def pad_vocabulary(*layers: torch.nn.Module, multiple: int = 64, keep_padding: bool = False) -> int:
    """Add rows of zeros to embeddings and linear layers over the same words, up to a multiple.

        pad_vocabulary(model.embedding, model.head)

    Outputs stay as they are: added words are never looked up, and a linear layer's output is cut to the original words,
    as a view. Gradients of the added rows are zero, and optimizers leave the rows zero. Layers that share a weight
    share the new one. Parameters are replaced: pad before the optimizer is made and after weights were loaded. A word
    beyond the vocabulary, an error before, gives zeros if it is one of the added rows.

    Args:
        layers: torch.nn.Embedding and torch.nn.Linear, changed in place.
        multiple: 64 fits whole tiles; 8 is what tensor cores need.
        keep_padding: let linear layers return the padding's scores as well, for losses that take `classes`.

    Returns:
        The new number of rows.

    Raises:
        TypeError: for other layers.
        ValueError: without layers, for layers with different numbers of words, or for a multiple below 1.
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
