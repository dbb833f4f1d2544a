"""How much a piece of code does, counted: the same on every machine, whatever else runs there.

Counted are calls of Python functions and of functions written in C, rows of tables that Polars is asked about, and
elements of arrays that numpy goes through, where these come from a table's column or from other counted arrays. Views
cost nothing, `searchsorted` and `interp` the number of their queries.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl


class Work:
    """What was counted so far."""

    def __init__(self) -> None:
        self.calls = self.rows = self.elements = 0

    @property
    def total(self) -> int:
        return self.calls + self.rows + self.elements


_counting: list[Work] = []


class _Counted(np.ndarray[Any, Any]):
    """An array whose elements are counted when something goes through them; so are those of what is made from it."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
        out = named.get("out")
        if out is not None:
            named["out"] = tuple(_plain(each) for each in out)
        result = getattr(ufunc, method)(*(_plain(each) for each in inputs), **{k: _plain(v) for k, v in named.items()})
        _count(max((each.size for each in inputs if isinstance(each, np.ndarray)), default=1))
        return _counted(result)

    def __array_function__(self, function: Any, types: Any, arguments: Any, named: Any) -> Any:
        plain = [_plain(each) for each in arguments]
        result = function(*plain, **{key: _plain(each) for key, each in named.items()})
        if function is np.searchsorted:
            _count(np.size(plain[1] if len(plain) > 1 else named["v"]))
        elif function is np.interp:
            _count(np.size(plain[0]))
        elif function is not np.shares_memory:
            _count(sum(each.size for each in _arrays(plain)))
        return _counted(result)

    def __getitem__(self, index: Any) -> Any:
        result = super().__getitem__(index)
        if isinstance(index, np.ndarray) or (
            isinstance(index, tuple) and any(isinstance(i, np.ndarray) for i in index)
        ):
            _count(max(np.size(index), np.size(result)))
        return result

    def __setitem__(self, index: Any, value: Any) -> None:
        _count(np.size(index) if isinstance(index, np.ndarray) else 1)
        super().__setitem__(index, value)


def _count(elements: int) -> None:
    for work in _counting:
        work.elements += int(elements)


def _plain(value: Any) -> Any:
    if isinstance(value, _Counted):
        return value.view(np.ndarray)
    if type(value) in (tuple, list) and len(value) < 1_000:
        return type(value)(_plain(each) for each in value)
    return value


def _counted(value: Any) -> Any:
    if type(value) is np.ndarray and value.dtype.names is None:
        return value.view(_Counted)
    if type(value) is tuple:
        return tuple(_counted(each) for each in value)
    return value


def _arrays(values: Any) -> Iterator[np.ndarray[Any, Any]]:
    for value in values:
        if isinstance(value, np.ndarray):
            yield value
        elif isinstance(value, (tuple, list)) and len(value) < 1_000:
            yield from _arrays(value)


@contextlib.contextmanager
def counting() -> Iterator[Work]:
    """Count what is done in the block, in this thread; numpy and Polars in all threads."""
    work = Work()
    lazy, to_numpy = pl.DataFrame.lazy, pl.Series.to_numpy

    def counted_lazy(self: pl.DataFrame) -> pl.LazyFrame:
        work.rows += self.height
        return lazy(self)

    def counted_to_numpy(self: pl.Series, *arguments: Any, **named: Any) -> Any:
        found = to_numpy(self, *arguments, **named)
        return _counted(found)

    def called(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            work.calls += 1

    before = sys.getprofile()
    pl.DataFrame.lazy, pl.Series.to_numpy = counted_lazy, counted_to_numpy  # type: ignore[method-assign]
    _counting.append(work)
    threading.setprofile(called)
    sys.setprofile(called)
    try:
        yield work
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]
        _counting.remove(work)
        pl.DataFrame.lazy, pl.Series.to_numpy = lazy, to_numpy  # type: ignore[method-assign]
