"""How much of the batches is padding: integer tensors on the CPU, sampled as loaders give them.

Only rows that end in a run of one number are counted, and only the first batches of a recording. A program that makes
its batches without a loader is looked at once, when the recording ends: its last batch is still there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

from stepscope import guard
from stepscope.trace.program_facts import PaddingFacts

IGNORED: Final = -100
"""What losses of torch ignore by default."""

_MOST_BATCHES: Final = 64
_MOST_POSITIONS: Final = 1 << 22
_SHORTEST: Final = 8
"""Tensors of fewer columns are no sequences."""
_FEWEST_POSITIONS: Final = 64
_DEEPEST: Final = 4
_TIMES: Final = 16
"""How many times the rows that are looked at a data set is taken to have."""


class PaddingSamples:
    """What was seen between `start` and `stop`."""

    def __init__(self) -> None:
        self._tensors: dict[str, _Sequences] = {}
        self._batches = 0
        self._restore: list[Callable[[], None]] = []

    def start(self) -> None:
        """Look at the batches that loaders give from now on."""
        from torch.utils.data import dataloader

        kinds = (dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter)
        self._restore = [_watched(kind, self) for kind in kinds if "_next_data" in vars(kind)]

    def stop(self) -> tuple[PaddingFacts, ...]:
        """Look no more; the loaders are as they were. Returns what was seen, the most padded first."""
        self.give_back()
        self._look_around()
        found = [sequences.facts(name) for name, sequences in self._tensors.items()]
        found = [facts for facts in found if facts.padding_share or facts.ignored_share]
        return tuple(sorted(found, key=lambda facts: -(facts.padding_share or 0.0)))

    def give_back(self) -> None:
        """Leave the loaders as they were."""
        while self._restore:
            self._restore.pop()()

    @guard.entry
    def seen(self, _: None, batch: Any, iterator: Any) -> None:
        """Look at what a loader's iterator gave; a batch that cannot be looked at is left out."""
        with guard.attempt():
            self.add(batch)

    def add(self, batch: Any) -> None:
        """Look at one batch: a tensor, or lists, tuples and dictionaries of them."""
        if self._batches >= _MOST_BATCHES:
            return
        self._batches += 1
        for name, tensor in _tensors(batch, ""):
            self._add(name or "batch", tensor)

    def _add(self, name: str, tensor: Any) -> None:
        if not 0 < tensor.numel() <= _MOST_POSITIONS:
            return
        self._tensors.setdefault(name, _Sequences()).add(tensor.numpy())  # whose operators no profiler records

    def _look_around(self) -> None:
        """Integer tensors that are alive now, for what no loader gave: labels made in the step, own batches."""
        import torch

        found = []
        for each in gc.get_objects():
            with guard.attempt():
                if type(each) is torch.Tensor and _is_sequences(each) and each.numel() <= _MOST_POSITIONS:
                    found.append(each)
        found.sort(key=lambda tensor: -tensor.numel())
        ignoring = [each for each in found if (each.numpy() == IGNORED).any()]
        batches = [each for each in found if each.dim() == 2]
        if ignoring and not any(sequences.ignored for sequences in self._tensors.values()):
            self._add("a tensor of targets", ignoring[0])
        if batches and not self._batches:
            self._add("a tensor of the batch", batches[0])


class _Sequences:
    """The rows of one tensor of the batches."""

    def __init__(self) -> None:
        self.batches = 0
        self.positions = 0
        self.ignored = 0
        self._padding = 0
        self._rows: list[int] = []
        self._sizes: list[int] = []
        self.longest = 0

    def add(self, numbers: Any) -> None:
        self.batches += 1
        self.positions += numbers.size
        self.ignored += int((numbers == IGNORED).sum())
        if numbers.ndim != 2 or numbers.shape[1] < _SHORTEST:
            return
        lengths = _lengths(numbers)
        self._rows += lengths
        self._sizes.append(len(lengths))
        self._padding += numbers.size - sum(lengths)
        self.longest = max(self.longest, numbers.shape[1])

    def facts(self, name: str) -> PaddingFacts:
        padded = sum(self._rows) + self._padding
        left = sum(size * max(rows) - sum(rows) for size, rows in self._sorted())
        real = sum(self._rows) * _TIMES
        return PaddingFacts(
            name=name,
            batches=self.batches,
            positions=self.positions,
            padding_share=self._padding / padded if padded else None,
            sorted_padding_share=left / (real + left) if real else None,
            longest=self.longest or None,
            ignored_share=self.ignored / self.positions if self.positions else None,
        )

    def _sorted(self) -> Iterator[tuple[int, list[int]]]:
        """The same rows in batches of the same sizes, by length; the whole data set has such rows many times over."""
        rows = iter(length for length in sorted(self._rows) for _ in range(_TIMES))
        for size in self._sizes * _TIMES:
            batch = list(islice(rows, size))
            if batch:
                yield len(batch), batch


def _lengths(rows: Any) -> list[int]:
    """For each row, how long it is without the run of the padding number at its end.

    The padding is the number that most rows end in a run of.
    """
    import numpy as np

    last = rows[:, -1]
    repeats = last[rows[:, -2] == last]
    if not len(repeats):
        return [int(rows.shape[1])] * int(rows.shape[0])
    numbers, counts = np.unique(repeats, return_counts=True)
    real = rows != numbers[np.argmax(counts)]
    lengths: list[int] = np.where(real.any(1), rows.shape[1] - np.argmax(real[:, ::-1], axis=1), 0).tolist()
    return lengths


def _is_sequences(tensor: Any) -> bool:
    import torch

    kinds = (torch.int64, torch.int32)
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.dtype in kinds
    return is_plain and tensor.dim() in (1, 2) and tensor.numel() >= _FEWEST_POSITIONS


def _tensors(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(value, torch.Tensor):
        if _is_sequences(value):
            yield name, value
    elif depth < _DEEPEST and hasattr(value, "items"):
        for key, inner in list(value.items())[:32]:
            yield from _tensors(inner, f"{name}.{key}".strip("."), depth + 1)
    elif depth < _DEEPEST and isinstance(value, (list, tuple)):
        for place, inner in enumerate(value[:32]):
            yield from _tensors(inner, f"{name}[{place}]", depth + 1)


def _watched(kind: Any, samples: PaddingSamples) -> Callable[[], None]:
    """Have an iterator's class show its batches; returns what takes that back."""
    original = vars(kind)["_next_data"]
    next_data = guard.around(original, after=samples.seen)
    kind._next_data = next_data

    def give_back() -> None:
        if vars(kind).get("_next_data") is next_data:
            kind._next_data = original

    return give_back
