"""What stands in the integer tensors of the program's batches: padding, ignored positions, prompts that begin alike.

Batches come from the loaders, while the program is recorded, or are the arguments of the outermost module's calls.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from types import FrameType
from typing import Any, Final

import msgspec

from stepscope import guard
from stepscope.record.program_objects import attributes, numbers_of, unseen
from stepscope.trace.program_facts import ModelCallFacts, PaddingFacts, PromptFacts

IGNORED: Final = -100
"""The default `ignore_index` of torch's losses."""

_MOST_BATCHES: Final = 64
_MOST_POSITIONS: Final = 1 << 22
_SHORTEST: Final = 8
"""Tensors with fewer columns are not treated as sequences."""
_FEWEST_POSITIONS: Final = 64
_DEEPEST: Final = 4
_MOST_CALLS: Final = 4096
_MOST_KEPT: Final = 512
_MOST_FILES: Final = 64
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
        numbers = numbers_of(tensor)
        if not ({int(numbers.min()), int(numbers.max())} <= {0, 1}):  # a mask, or token types: no sequence of its own
            self._tensors.setdefault(name, _Sequences()).add(numbers)

    def _look_around(self) -> None:
        """Measure live integer tensors that did not come from a loader, such as labels made in the step."""
        import torch

        found = []
        for each in gc.get_objects():
            with guard.attempt():
                if type(each) is torch.Tensor and _is_sequences(each) and each.numel() <= _MOST_POSITIONS:
                    found.append((each, bool((numbers_of(each) == IGNORED).any())))
        found.sort(key=lambda each: -each[0].numel())
        ignoring = [tensor for tensor, ignores in found if ignores]
        batches = [tensor for tensor, _ in found if tensor.dim() == 2]
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
        self._latest: deque[tuple[int, int, int, int]] = deque(maxlen=_MOST_KEPT)
        self._files: dict[str, None] = {}
        self._left = _MOST_CALLS

    def called(self, around: Sequence[FrameType], positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Look at one call; what cannot be inspected is skipped, such as tensors on a device.

        Args:
            around: frames around the call.
        """
        if self._left <= 0 or "torch" not in sys.modules:
            return
        self._left -= 1
        with guard.attempt(), unseen:
            if len(self._files) < _MOST_FILES:
                self._files.update(dict.fromkeys(frame.f_code.co_filename for frame in around))
            call = _call_of(positional, named)
            if call is not None:
                self._add(call)

    def _add(self, call: _Call) -> None:
        pieces = list(call.pieces())
        begun = sum(len(piece) > 1 and begin == 0 for piece, begin in pieces)
        tokens = sum(len(piece) for piece, _ in pieces)
        self._latest.append((time.time_ns(), len(pieces), begun, tokens))
        if not call.is_packed and call.tokens.shape[0] > 1 and call.tokens.shape[1] >= _SHORTEST:
            self.sequences.add(call.tokens)
        self._prompts.add(pieces)

    def later(self) -> dict[str, Any]:
        """What was seen until now, for the file of the recording, without names of files."""
        calls = self.calls()
        if calls is None:
            return {}
        kept = msgspec.structs.replace(calls, files=())
        return {"calls": msgspec.to_builtins(kept), "prompts": msgspec.to_builtins(self.prompts())}

    def prompts(self) -> PromptFacts | None:
        """What was seen of prompts; None without any."""
        return self._prompts.facts()

    def calls(self) -> ModelCallFacts | None:
        """The latest calls; None if nothing could be inspected."""
        if not self._latest:
            return None
        return ModelCallFacts(files=tuple(self._files), calls=tuple(self._latest))


@dataclass(frozen=True)
class _Call:
    """The tokens of one call of the model, as NumPy arrays.

    Attributes:
        tokens: (rows, positions); of a packed call one row that holds several requests.
        mask: of the same shape; None if nothing is padding.
        positions: of the same shape; None if unknown.
        bounds: where requests begin and end in a packed row; None if only the positions tell.
    """

    tokens: Any
    mask: Any
    positions: Any
    bounds: Any
    is_packed: bool

    def pieces(self) -> Iterator[tuple[Any, int]]:
        """The tokens of each request, and the position of the first, 0 where a prompt begins."""
        import numpy as np

        if self.is_packed:
            positions = self.positions[0]
            cuts = self.bounds if self.bounds is not None else np.flatnonzero(np.diff(positions) != 1) + 1
            cuts = sorted({0, *cuts.tolist(), len(positions)})
            for begin, end in pairwise(cuts):
                yield self.tokens[0, begin:end], int(positions[begin])
            return
        for number, row in enumerate(self.tokens):
            real = self.mask[number] != 0 if self.mask is not None else slice(None)
            known = [] if self.positions is None else self.positions[number][real].tolist()
            yield row[real], known[0] if known else 0


def _call_of(positional: tuple[Any, ...], named: dict[str, Any]) -> _Call | None:
    """The call with these arguments; None if its tokens are unknown."""
    given = {**{str(number): value for number, value in enumerate(positional)}, **named}
    arrays = {name: numbers_of(value) for name, value in given.items() if _is_of_tokens(value)}
    positions = next((each for name, each in arrays.items() if "position" in name), None)
    others = [each for name, each in arrays.items() if "position" not in name]
    tokens = next(
        (each for each in others if not _is_mask(each) and (positions is None or each.shape == positions.shape)), None
    )
    if tokens is None or (tokens.ndim == 1 and positions is None):
        return None
    masks = [each for each in others if _is_mask(each) and each.ndim == tokens.ndim == 2 and len(each) == len(tokens)]
    mask = next((each[:, -tokens.shape[1] :] for each in masks if each.shape[1] >= tokens.shape[1]), None)
    length = tokens.shape[-1]
    bounds = next((each for each in others if _are_bounds(each, length)), None)
    is_packed = positions is not None and (tokens.ndim == 1 or (len(tokens) == 1 and bounds is not None))
    if tokens.ndim == 1 and positions is not None:
        tokens, positions = tokens[None], positions[None]
    return _Call(tokens, mask, positions, bounds, is_packed)


class _Prompts:
    """Counts tokens of prompts, and those of beginnings that a row of an earlier call had, too."""

    def __init__(self) -> None:
        self._calls = self._tokens = self._repeated = 0
        self._known: set[int] = set()
        self._last: set[bytes] = set()
        self._unfinished: dict[int, _Row] = {}  # rows of the last calls, by their length

    def add(self, pieces: list[tuple[Any, int]]) -> None:
        """Add the requests of one call: their tokens, and the position of the first of them.

        Left out are those that are longer by one token than in the call before: an answer that is computed without a
        cache, not a prompt.
        """
        several = [(piece, begin) for piece, begin in pieces if len(piece) > 1]
        last, self._last = self._last, {piece.tobytes() for piece, _ in several}
        several = [(piece, begin) for piece, begin in several if piece[:-1].tobytes() not in last]
        self._calls += bool(several)
        fresh: set[int] = set()
        for piece, begin in several:
            self._tokens += len(piece)
            row = self._unfinished.pop(begin, None) if begin else _Row()
            if row is not None:
                self._repeated += row.extend(piece, self._known, fresh)
                self._unfinished[begin + len(piece)] = row
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
        return repeated


def _is_of_tokens(value: Any) -> bool:
    import torch

    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided:
        return False
    kinds = (torch.int64, torch.int32, torch.bool)
    return value.dim() in (1, 2) and value.dtype in kinds and 0 < value.numel() <= _MOST_POSITIONS


def _is_mask(numbers: Any) -> bool:
    return numbers.dtype == bool or (numbers.ndim == 2 and {int(numbers.min()), int(numbers.max())} <= {0, 1})


def _are_bounds(numbers: Any, length: int) -> bool:
    """Whether numbers begin at 0, never fall and end with the length, as the limits of sequences in one row do."""
    if numbers.ndim != 1 or numbers.dtype == bool or len(numbers) < 2:
        return False
    return int(numbers[0]) == 0 and int(numbers[-1]) == length and bool((numbers[1:] >= numbers[:-1]).all())


_calls: ModelCalls | None = None


def model_calls() -> ModelCalls:
    """This process's look at its model's calls."""
    global _calls
    if _calls is None:
        _calls = ModelCalls()
    return _calls
