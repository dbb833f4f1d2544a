"""What stands in the integer tensors of the program's batches: padding, ignored positions, prompts that begin alike.

Batches come from the loaders, while the program is recorded, or are the arguments of the outermost module's calls.
"""

from __future__ import annotations

import gc
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

from stepscope import guard
from stepscope.record.program_objects import attributes, unseen
from stepscope.trace.program_facts import PaddingFacts, PromptFacts

IGNORED: Final = -100
"""The default `ignore_index` of torch's losses."""

_MOST_BATCHES: Final = 64
_MOST_POSITIONS: Final = 1 << 22
_SHORTEST: Final = 8
"""Tensors with fewer columns are not treated as sequences."""
_FEWEST_POSITIONS: Final = 64
_DEEPEST: Final = 4
_COUNTED: Final = 0.4
"""Share of numbers that follow the one before, above which they are positions: rows may be padded."""
_MOST_CALLS: Final = 4096
_BLOCK: Final = 16
"""Tokens in a block of a prompt; prompts begin alike in whole blocks."""
_TIMES: Final = 16
"""Assumed size of the data set, as a multiple of the inspected rows."""


class PaddingSamples:
    """Measures the padding of batches from the loaders, from `start` to `stop`."""

    def __init__(self) -> None:
        self._tensors: dict[str, _Sequences] = {}
        self._batches = 0
        self._restore: list[Callable[[], None]] = []

    def start(self) -> None:
        from torch.utils.data import dataloader

        kinds = (dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter)
        self._restore = [
            guard.put(kind, "_next_data", guard.around(vars(kind)["_next_data"], after=self.seen))
            for kind in kinds
            if "_next_data" in vars(kind)
        ]

    def stop(self) -> tuple[PaddingFacts, ...]:
        """Restore the loaders; return the findings, the most padded first."""
        self.give_back()
        called = model_calls().sequences
        if called.batches and not self._batches:
            self._batches = called.batches
            self._tensors["a tensor of the model's input"] = called
        self._look_around()
        found = [sequences.facts(name) for name, sequences in self._tensors.items()]
        found = [facts for facts in found if facts.padding_share or facts.ignored_share]
        return tuple(sorted(found, key=lambda facts: -(facts.padding_share or 0.0)))

    def give_back(self) -> None:
        while self._restore:
            self._restore.pop()()

    @guard.entry
    def seen(self, _: None, batch: Any, iterator: Any) -> None:
        """Measure a batch; one that cannot be inspected is skipped."""
        with guard.attempt(), unseen:
            self.add(batch)

    def add(self, batch: Any) -> None:
        """Measure one batch: a tensor, or nested lists, tuples and dictionaries of tensors."""
        if self._batches >= _MOST_BATCHES:
            return
        self._batches += 1
        for name, tensor in _tensors(batch, ""):
            self._add(name or "batch", tensor)

    def _add(self, name: str, tensor: Any) -> None:
        if not 0 < tensor.numel() <= _MOST_POSITIONS:
            return
        # these operators are not recorded by any profiler
        numbers = tensor.numpy()
        if not ({int(numbers.min()), int(numbers.max())} <= {0, 1}):  # a mask, or token types: no sequence of its own
            self._tensors.setdefault(name, _Sequences()).add(numbers)

    def _look_around(self) -> None:
        """Measure live integer tensors that did not come from a loader, such as labels made in the step."""
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
        """Yield the rows sorted into batches of the same sizes, an estimate for sorting the whole data set."""
        rows = iter(length for length in sorted(self._rows) for _ in range(_TIMES))
        for size in self._sizes * _TIMES:
            batch = list(islice(rows, size))
            if batch:
                yield len(batch), batch


def _lengths(rows: Any) -> list[int]:
    """Return each row's length without the padding number at its end, or its beginning if more rows are filled there.

    The padding number is the one that most rows repeat there.
    """
    import numpy as np

    repeats = rows[:, -1][rows[:, -2] == rows[:, -1]]
    at_beginning = rows[:, 0][(rows[:, 1] == rows[:, 0]) & (rows[:, 0] != IGNORED)]
    if len(at_beginning) > len(repeats):
        rows, repeats = rows[:, ::-1], at_beginning
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

    kind = type(value)
    if kind is torch.Tensor:
        if _is_sequences(value):
            yield name, value
    elif depth < _DEEPEST and issubclass(kind, (dict, UserDict)):
        named = value if issubclass(kind, dict) else attributes(value).get("data", {})
        for key, inner in list(dict.items(named))[:32]:
            yield from _tensors(inner, f"{name}.{key}".strip("."), depth + 1)
    elif depth < _DEEPEST and issubclass(kind, (list, tuple)):
        parts = list.__iter__(value) if issubclass(kind, list) else tuple.__iter__(value)
        for place, inner in enumerate(islice(parts, 32)):
            yield from _tensors(inner, f"{name}[{place}]", depth + 1)


class ModelCalls:
    """Looks at the tokens that the outermost module is called with, from the program's first calls on."""

    def __init__(self) -> None:
        self.sequences = _Sequences()
        self._prompts = _Prompts()
        self._left = _MOST_CALLS

    def called(self, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Look at one call; what cannot be inspected is skipped, such as tensors on a device."""
        if self._left <= 0 or "torch" not in sys.modules:
            return
        self._left -= 1
        with guard.attempt(), unseen:
            given = [each.numpy() for each in (*positional, *named.values()) if _is_of_tokens(each)]
            tokens = next((each for each in given if not _is_mask(each) and not _are_positions(each)), None)
            if tokens is None or tokens.shape[1] < _SHORTEST:
                return
            same = [each for each in given if each.shape[0] == tokens.shape[0]]
            mask = next((each[:, -tokens.shape[1] :] for each in same if _is_mask(each)), None)
            positions = next((each for each in same if each.shape == tokens.shape and _are_positions(each)), None)
            if tokens.shape[0] > 1:
                self.sequences.add(tokens)
            self._prompts.add(tokens, mask if mask is not None and mask.shape == tokens.shape else None, positions)

    def prompts(self) -> PromptFacts | None:
        """What was seen of prompts; None without any."""
        return self._prompts.facts()


class _Prompts:
    """Counts tokens of prompts, and those of beginnings that a row of an earlier call had, too."""

    def __init__(self) -> None:
        self._calls = self._tokens = self._repeated = 0
        self._known: set[int] = set()
        self._unfinished: dict[int, _Row] = {}  # rows of the last calls, by their length

    def add(self, tokens: Any, mask: Any, positions: Any) -> None:
        self._calls += 1
        fresh: set[int] = set()
        for number, row in enumerate(tokens):
            here = positions[number] if positions is not None else None
            real = mask[number] != 0 if mask is not None else slice(None)
            for piece, begin in _pieces(row[real], None if here is None else here[real]):
                self._tokens += len(piece)
                known = self._unfinished.pop(begin, None) if begin else _Row()
                if known is not None:
                    self._repeated += known.extend(piece, self._known, fresh)
                    self._unfinished[begin + len(piece)] = known
        self._known |= fresh

    def facts(self) -> PromptFacts | None:
        if not self._calls:
            return None
        return PromptFacts(calls=self._calls, tokens=self._tokens, repeated_tokens=self._repeated)


class _Row:
    """One prompt, of which more comes with each call: a number for all of its whole blocks, and the rest."""

    def __init__(self) -> None:
        self._all = 0
        self._rest: list[int] = []
        self._began_alike = True

    def extend(self, tokens: Any, known: set[int], fresh: set[int]) -> int:
        """Add tokens; return how many of them lie in blocks with which an earlier row began."""
        repeated = 0
        self._rest += tokens.tolist()
        while len(self._rest) >= _BLOCK:
            self._all = hash((self._all, *self._rest[:_BLOCK]))
            del self._rest[:_BLOCK]
            self._began_alike = self._began_alike and self._all in known
            repeated += _BLOCK * self._began_alike
            fresh.add(self._all)
        return min(repeated, len(tokens))


def _pieces(tokens: Any, positions: Any) -> Iterator[tuple[Any, int]]:
    """The prompts in a row of tokens, each with the position of its first token; single tokens are answers' next."""
    import numpy as np

    if positions is None:
        yield tokens, 0
        return
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(tokens)], strict=True):
        if end - begin > 1:
            yield tokens[begin:end], int(positions[begin])


def _is_of_tokens(value: Any) -> bool:
    import torch

    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided:
        return False
    kinds = (torch.int64, torch.int32, torch.bool)
    return value.dim() == 2 and value.dtype in kinds and 0 < value.numel() <= _MOST_POSITIONS


def _is_mask(numbers: Any) -> bool:
    return numbers.dtype == bool or {int(numbers.min()), int(numbers.max())} <= {0, 1}


def _are_positions(numbers: Any) -> bool:
    """Whether nearly all numbers are by one larger than those before them."""
    import numpy as np

    return numbers.shape[1] > 1 and float((np.diff(numbers, axis=1) == 1).mean()) > _COUNTED


_calls: ModelCalls | None = None


def model_calls() -> ModelCalls:
    """This process's look at its model's calls."""
    global _calls
    if _calls is None:
        _calls = ModelCalls()
    return _calls
