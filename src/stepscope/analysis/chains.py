"""Chains of element-wise operators, each of which takes what the one before made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

import polars as pl

from stepscope.analysis.traffic import ARITHMETIC, PLAIN, REDUCTIONS, VIEWS, Shape, Traffic, base_name, traffic
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows

LONGEST_CHAIN: Final = 24
"""Operators; a longer stretch is cut, since no single function would hold it."""
FUSIBLE: Final = PLAIN | ARITHMETIC | REDUCTIONS | {"rand_like", "bernoulli", "softmax", "log_softmax"}


@dataclass(frozen=True, slots=True)
class Chain:
    """Operators that one fused kernel could replace.

    Attributes:
        names: of the operators, as `base_name` gives them; views on the way are left out.
        in_place: whether each of them overwrites its first input.
        operators: rows of `operators`, in order.
        traffic: what each moves.
        place: file and function of the user's line, or Nones.
    """

    names: tuple[str, ...]
    in_place: tuple[bool, ...]
    operators: tuple[int, ...]
    traffic: tuple[Traffic, ...]
    place: tuple[str | None, str | None]

    @property
    def elements(self) -> int:
        """Numbers in the largest tensor of the chain."""
        return max(prod(each.output) for each in self.traffic)

    @property
    def elements_moved(self) -> int:
        """Numbers that the operators read and write one by one."""
        return sum(each.elements for each in self.traffic)

    @property
    def elements_moved_fused(self) -> int:
        """Numbers that remain to be read and written: the first input, further inputs of its size, one result.

        Which tensors are the chain's own is told by shapes: of each operator's inputs at most one, of the largest
        size, comes from outside unless it is the first.
        """
        full = self.elements
        result = prod(self.traffic[-1].output)
        first = sum(map(prod, self.traffic[0].inputs))
        extra = sum(
            prod(shape)
            for each in self.traffic[1:]
            for shape in each.inputs
            if len(each.inputs) > 1 and prod(shape) < full
        )
        return min(first + result + min(extra, full), self.elements_moved)


def chains(trace: Trace, rows: Rows, shortest: int = 2) -> Iterator[Chain]:
    """The chains among these operators.

    Args:
        rows: rows of `operators`: the candidates, outermost ones, in order of time. What lies between two of one
            thread breaks a chain.
        shortest: operators that make a chain.
    """
    columns = ["lane", "name", "input_shapes", "source_file", "source_function"]
    table = trace.operators.select(columns)[rows].with_columns(row=pl.Series(rows, dtype=pl.Int64))
    for _, mine in table.group_by("lane", maintain_order=True):
        yield from _of_thread(mine, shortest)


def _of_thread(table: pl.DataFrame, shortest: int) -> Iterator[Chain]:
    current = _Growing((None, None))
    for _, name, shapes, file, function, row in table.iter_rows():
        base = base_name(name)
        if base in VIEWS:
            current.see(traffic(shapes))
            continue
        moved = traffic(shapes, reduces=base in REDUCTIONS) if base in FUSIBLE else None
        place = (file, function)
        if not current.takes(moved, place):
            yield from current.chain(shortest)
            current = _Growing(place)
        if moved is not None:
            current.add(base, name.endswith("_"), row, moved)
    yield from current.chain(shortest)


class _Growing:
    """A chain while its operators come in."""

    def __init__(self, place: tuple[str | None, str | None]) -> None:
        self.place = place
        self._rows: list[tuple[str, bool, int, Traffic]] = []
        self._shapes: set[Shape] = set()

    def takes(self, moved: Traffic | None, place: tuple[str | None, str | None]) -> bool:
        """Whether an operator goes on with what the chain made, in the same function."""
        if moved is None or place != self.place or len(self._rows) >= LONGEST_CHAIN:
            return False
        return not self._rows or not self._shapes.isdisjoint(moved.inputs)

    def add(self, name: str, in_place: bool, row: int, moved: Traffic) -> None:
        self._rows.append((name, in_place, row, moved))
        self._shapes.update(moved.inputs)
        self._shapes.add(moved.output)
        if name in REDUCTIONS:
            self._shapes.add((*moved.output[:-1], 1))
            self._shapes.add(moved.output[:-1])

    def see(self, moved: Traffic | None) -> None:
        """A view of something: the shapes it may have next are unknown, those it had are the chain's."""
        if moved is not None and self._rows:
            self._shapes.update(moved.inputs)

    def chain(self, shortest: int) -> Iterator[Chain]:
        if len(self._rows) >= shortest:
            names, in_place, rows, moved = zip(*self._rows, strict=True)
            yield Chain(names, in_place, rows, moved, self.place)
