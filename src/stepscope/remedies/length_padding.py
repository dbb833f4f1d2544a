"""Padding to few lengths: what is compiled for a shape is compiled for few of them.

loader = DataLoader(dataset, batch_size=32, collate_fn=PadCollate(multiple=64, padding_value={"labels": -100}))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils.data import default_collate

_MULTIPLE: Final = 64
_IGNORED: Final = {"labels": -100}
"""What torch's cross_entropy leaves out by default, and what Transformers' models expect in their labels."""


def pad_to_lengths(
    sequences: Sequence[torch.Tensor | Sequence[float]],
    lengths: Sequence[int] | None = None,
    multiple: int | None = None,
    padding_value: float = 0,
) -> torch.Tensor:
    """Sequences [length, ...] as one tensor [batch, padded length, ...], the padding at the end.

    The padded length is the smallest of `lengths` that holds the longest sequence, or that one's next multiple.

    Args:
        sequences: tensors that differ in the first dimension only, or lists of numbers.
        lengths: the allowed lengths. Give these or `multiple`; by default it is a multiple of 64.
        multiple: of which every padded length is one.
        padding_value: what the padding is filled with.

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
                f"{_shape(first)} and {_shape(tensor)}"
            )
    length = _padded_length(max(len(tensor) for tensor in tensors), *_checked(lengths, multiple))
    padded = first.new_full((len(tensors), length, *first.shape[1:]), padding_value)
    for row, tensor in zip(padded, tensors, strict=True):
        row[: len(tensor)] = tensor
    return padded


class PadCollate:
    """A DataLoader's collate_fn that pads samples to few lengths.

    Samples are sequences, or mappings or tuples of fields. Padded are the fields that are as long as the first one, in
    their first dimension, or those in `fields`; all to the same length. Other fields are put together as DataLoader
    does.

    Args:
        lengths, multiple: as of `pad_to_lengths`.
        padding_value: one for all fields, or one for each by its name or position; otherwise 0, and -100 for "labels".
        fields: names or positions of the fields to pad.
        mask: adds a tensor [batch, padded length] that is True where values are real: the name of the field in samples
            that are mappings; True puts it last in tuples, and beside the tensor where samples are sequences.

    Raises:
        ValueError, TypeError: an argument cannot be used; when called, as `pad_to_lengths`, or a field is missing.
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
        """The batch of these samples, of their kind: a mapping, a tuple, or a tensor."""
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
        if not isinstance(multiple, int) or multiple < 1:
            raise ValueError(f"multiple is {multiple!r}; it takes a whole number from 1 on")
        return None, multiple
    if not lengths or not all(isinstance(length, int) and length > 0 for length in lengths):
        raise ValueError(f"lengths is {lengths!r}; it takes whole numbers above 0, such as (64, 128, 256)")
    return tuple(sorted(lengths)), None


def _padded_length(longest: int, lengths: tuple[int, ...] | None, multiple: int | None) -> int:
    if lengths is None:
        return max(-(-longest // (multiple or 1)), 1) * (multiple or 1)
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


def _shape(tensor: torch.Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"
