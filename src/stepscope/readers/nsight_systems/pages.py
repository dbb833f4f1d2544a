"""Rows of an SQLite file straight from its pages, by the compiled scanner; several times as fast as SQLite's own.

Only files and tables of the ordinary shape are read so. The checks are stricter than SQLite's own, so that what is read
here is what SQLite returns, and anything else, such as damage, is left to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.readers.kineto import scanned

LEAST_BYTES: Final = 2**20
"""Smaller files are left to SQLite: looking at how their tables are kept takes longer than it saves."""
_HEADER_BYTES: Final = 100
_UTF8: Final = b"\0\0\0\1"
_LEAST_USABLE: Final = 480
_READ_BYTES: Final = 2**20
_LEAF, _INTERIOR = 0x0D, 0x05
_DEEPEST: Final = 18
_INTERIOR_HEADER: Final = 12
_LONGEST_KEY: Final = 9
_BIG_ENDIAN: Final = np.array([1 << 24, 1 << 16, 1 << 8, 1])

_Page = npt.NDArray[np.uint8]


class NeedsSQLiteError(Exception):
    """The rows must be read by SQLite."""


class Pages:
    """The pages of a file; numbered from 1."""

    def __init__(self, file: BinaryIO, size: int, usable: int, count: int) -> None:
        self._file = file
        self._size = size
        self._usable = usable
        self._count = count

    @classmethod
    def of(cls, path: Path) -> Pages | None:
        """Open a file; None if it is small or not an ordinary one, or there is no scanner. Raises OSError."""
        total = path.stat().st_size
        if total < LEAST_BYTES or not scanned.is_built():
            return None
        file = path.open("rb", buffering=0)
        header = file.read(_HEADER_BYTES)
        size = int.from_bytes(header[16:18], "big")
        size = 65536 if size == 1 else size
        usable = size - int.from_bytes(header[20:21], "big")
        count = int.from_bytes(header[28:32], "big")
        if header[56:60] == _UTF8 and usable >= _LEAST_USABLE and count * size == total:
            return cls(file, size, usable, count)
        file.close()
        return None

    def close(self) -> None:
        self._file.close()

    def rows(
        self, root: int, wanted: tuple[tuple[int, bool], ...], together: int
    ) -> Iterator[tuple[int, list[pl.Series]]]:
        """Yield the rows of a table, `together` at a time: their number and the wanted columns.

        Raises NeedsSQLiteError.

        Args:
            root: the table's first page.
            wanted: place in the record, in this order, and whether it is text, else an integer.
        """
        held, skip, rows = b"", 0, 0
        for pages, more in self._leaves([root], np.zeros(self._count + 1, np.bool_)):
            held, rows = held + pages, rows + more
            while rows >= together:
                count, columns, page, skip = self._decoded(held, wanted, skip, together)
                held, rows = held[page:], rows - count
                yield count, columns
        if rows:
            count, columns, _, _ = self._decoded(held, wanted, skip, together)
            yield count, columns

    def _decoded(
        self, pages: bytes, wanted: tuple[tuple[int, bool], ...], skip: int, most: int
    ) -> tuple[int, list[pl.Series], int, int]:
        found = scanned.sqlite_rows(pages, self._size, self._usable, wanted, skip, most)
        if found is None:
            raise NeedsSQLiteError
        count, columns, page, cell = found
        return count, [_series(column) for column in columns], page, cell

    def _leaves(
        self, numbers: Sequence[int], seen: npt.NDArray[np.bool_], depth: int = 0
    ) -> Iterator[tuple[bytes, int]]:
        """Yield the leaf pages below some pages of one level, several at a time, and how many rows they have."""
        together = max(1, _READ_BYTES // self._size)
        for first in range(0, len(numbers), together):
            some = numbers[first : first + together]
            pages = self._read(some, seen)
            data = np.frombuffer(pages, np.uint8).reshape(len(some), self._size)
            cells = data[:, 3].astype(np.int64) << 8 | data[:, 4]
            if not cells.all():
                raise NeedsSQLiteError
            if (data[:, 0] == _LEAF).all():
                yield pages, int(cells.sum())
                continue
            if (data[:, 0] != _INTERIOR).any() or depth > _DEEPEST:
                raise NeedsSQLiteError
            for page, count in zip(data, cells.tolist(), strict=True):
                yield from self._leaves(self._children(page, count), seen, depth + 1)

    def _read(self, numbers: Sequence[int], seen: npt.NDArray[np.bool_]) -> bytes:
        wanted = np.array(numbers)
        if wanted.min() < 2 or wanted.max() > self._count or seen[wanted].any() or len(set(numbers)) < len(numbers):
            raise NeedsSQLiteError
        seen[wanted] = True
        parts = []
        for run in np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1):
            self._file.seek((int(run[0]) - 1) * self._size)
            parts.append(self._file.read(len(run) * self._size))
        pages = b"".join(parts)
        if len(pages) < len(numbers) * self._size:
            raise NeedsSQLiteError
        return pages

    def _children(self, page: _Page, cells: int) -> list[int]:
        first = _INTERIOR_HEADER + 2 * cells
        if first > self._usable:
            raise NeedsSQLiteError
        places = page[_INTERIOR_HEADER:first].reshape(cells, 2) @ np.array([256, 1])
        if (places < first).any() or (places > self._usable - 5).any():
            raise NeedsSQLiteError
        keys = page[np.minimum(places[:, None] + 4 + np.arange(_LONGEST_KEY), self._usable - 1)] < 0x80
        lengths = np.where(keys.any(axis=1), keys.argmax(axis=1) + 1, _LONGEST_KEY)
        if (places + 4 + lengths > self._usable).any():
            raise NeedsSQLiteError
        children = page[places[:, None] + np.arange(4)] @ _BIG_ENDIAN
        return [*children.tolist(), int(page[8:12] @ _BIG_ENDIAN)]


def _series(column: bytes | list[str | None]) -> pl.Series:
    if isinstance(column, list):
        return pl.Series(column, dtype=pl.String)
    return scanned.with_nulls({"": np.frombuffer(column, np.int64)}).to_series()
