"""An untrusted SQLite file, opened read-only, as columns in batches.

Only real tables are queried, never views, virtual tables or generated columns, which could run queries of the file's
author. The size of the file bounds the steps a query may take, since pages can point at each other.

Rows of tables of the ordinary shape come straight from the file's pages, by the compiled scanner: several times as
fast. Its checks are stricter than SQLite's own, so that what it reads is what SQLite returns; anything else, such as
damage, is left to SQLite.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.errors import NotATraceError, UnreadableTraceError
from stepscope.readers.gathering import StringPool
from stepscope.readers.kineto import scanned

MAGIC: Final = b"SQLite format 3\0"
ERRORS: Final = (sqlite3.Error, UnicodeDecodeError)
"""Errors from reading a database; Python cannot decode every message about a damaged one."""
LONGEST_TEXT: Final = 4000
"""Characters kept of a name."""
BATCH_ROWS: Final = 50_000
_LARGEST: Final = 2**62
_LARGEST_CELL_BYTES: Final = 64 * 2**20
_LIMIT_LENGTH: Final = 0
"""SQLITE_LIMIT_LENGTH, which Python's module exports from 3.11 on."""
_BYTES_PER_ROW: Final = 100
_STEPS_BETWEEN: Final = 1_000_000
_STEPS_PER_BYTE: Final = 100
_LEAST_STEPS: Final = 10**8
_PLAIN_NAME: Final = re.compile(r"\w+")
_LOOKED_UP: Final = 500
_LEAST_ROW_BYTES: Final = 6
"""Minimum bytes of a row: its offset in the page, length, number, one byte for each column and their count."""
NEVER_READ: Final = frozenset({"META_DATA_CAPTURE", "TARGET_INFO_SYSTEM_ENV", "ProcessStreams", "ANALYSIS_FILE"})
"""Tables with the recorded process's environment and output."""
_ACTIONS: Final = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_PRAGMA}
)
_FLOATING: Final = re.compile("REAL|FLOA|DOUB", re.IGNORECASE)
"""Declared types whose whole numbers SQLite may return as floats."""
_Values = Sequence[Any]
_PYTHON_TYPES: Final[Mapping[type[pl.DataType], tuple[type, ...]]] = {
    pl.Int64: (int,),
    pl.Float64: (int, float),
    pl.String: (str,),
}


class Database:
    """The tables of an SQLite file, as a context manager.

    Args:
        name: the file's name in messages.
        damage: receives counts of what could not be read, by "kind" or "kind:detail".

    Raises:
        NotATraceError: not an SQLite database, or a damaged one.
        UnreadableTraceError: the file cannot be opened.
    """

    def __init__(self, path: Path, name: str, damage: Counter[str]) -> None:
        self.name = name
        self._damage = damage
        self._rows = 0
        size = path.stat().st_size
        self._most_rows = size // _LEAST_ROW_BYTES
        self._budget = _STEPS_PER_BYTE * size + _LEAST_STEPS
        self._connection = _connected(path, name)
        self._pages: Pages | None = None
        with suppress(OSError):  # SQLite reports what it cannot read
            self._pages = Pages.of(path)
        try:
            self._guard()
            self.tables: Mapping[str, Mapping[str, bool]] = self._tables()
        except ERRORS as error:
            self.close()
            raise NotATraceError(f"{name} begins like an SQLite database, but cannot be read: {error}") from None

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()
        if self._pages is not None:
            self._pages.close()

    def _guard(self) -> None:
        connection = self._connection
        connection.text_factory = _text
        for pragma in ("trusted_schema=OFF", "query_only=ON", "cell_size_check=ON", "mmap_size=0"):
            connection.execute(f"PRAGMA {pragma}")
        if hasattr(connection, "setlimit"):  # from Python 3.11
            connection.setlimit(_LIMIT_LENGTH, _LARGEST_CELL_BYTES)
        connection.set_progress_handler(self._spend, _STEPS_BETWEEN)
        connection.set_authorizer(_may)

    def _spend(self) -> int:
        self._budget -= _STEPS_BETWEEN
        return int(self._budget < 0)

    def _tables(self) -> dict[str, dict[str, bool]]:
        """Map each real table to its plain columns, and each column to whether it is the primary key."""
        names = self._connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0 ORDER BY name LIMIT 10000"
        ).fetchall()
        found = {}
        for (name,) in names:
            if isinstance(name, str) and _PLAIN_NAME.fullmatch(name):
                columns = self._connection.execute(f'PRAGMA table_xinfo("{name}")').fetchall()
                found[name] = {
                    column[1]: column[5] == 1
                    for column in columns
                    if column[6] == 0 and isinstance(column[1], str) and _PLAIN_NAME.fullmatch(column[1])
                }
        return found

    def has(self, table: str, *columns: str) -> bool:
        return table in self.tables and all(column in self.tables[table] for column in columns)

    @property
    def read_bytes(self) -> int:
        """Approximate number of bytes read so far, estimated from the number of rows."""
        return self._rows * _BYTES_PER_ROW

    def is_filled(self, table: str) -> bool:
        """Whether the table exists and has a readable row."""
        try:
            return (
                self.has(table) and self._connection.execute(f'SELECT 1 FROM "{table}" LIMIT 1').fetchone() is not None
            )
        except ERRORS:
            return False

    def batches(
        self, table: str, columns: Mapping[str, type[pl.DataType]], *, where: str = "", parameters: Sequence[int] = ()
    ) -> Iterator[pl.DataFrame]:
        """Yield the table's rows in batches; nothing if the table does not exist.

        A page that cannot be read ends the table early, which is counted.

        Args:
            columns: name -> Int64, Float64 or String; columns that the table lacks are null.
            where: an SQL condition with a question mark for each of `parameters`.
        """
        if table not in self.tables:
            return
        height = 0
        with suppress(NeedsSQLiteError, OSError, *ERRORS):
            for batch in self._from_pages(table, columns, where):
                self._rows += batch.height
                height += batch.height
                yield batch
            return
        selected = ", ".join(_expression(name, dtype, self.tables[table]) for name, dtype in columns.items())
        condition = f" WHERE {where}" if where else ""
        try:
            cursor = self._connection.execute(f'SELECT {selected} FROM "{table}"{condition}', parameters)
            for _ in range(height // BATCH_ROWS):  # those that came from the pages
                cursor.fetchmany(BATCH_ROWS)
            while rows := cursor.fetchmany(BATCH_ROWS):
                self._rows += len(rows)
                height += len(rows)
                if height > self._most_rows:
                    raise self._endless()
                yield pl.DataFrame(
                    [
                        self._column(table, name, dtype, values)
                        for (name, dtype), values in zip(columns.items(), zip(*rows, strict=True), strict=True)
                    ]
                )
        except ERRORS as error:
            self._refuse_endless(error)
            self._damage[f"damaged_table:{table} ({error})"] += 1

    def _from_pages(self, table: str, columns: Mapping[str, type[pl.DataType]], where: str) -> Iterator[pl.DataFrame]:
        """Yield the same batches, decoded from the file's pages; raise an error where SQLite must read the rows."""
        if where or self._pages is None or table in NEVER_READ:
            raise NeedsSQLiteError
        root, places = self._layout(table)
        wanted = sorted((places[name], name, dtype is pl.String) for name, dtype in columns.items() if name in places)
        if len(wanted) < sum(name in self.tables[table] for name in columns) or pl.Float64 in columns.values():
            raise NeedsSQLiteError
        for count, found in self._pages.rows(root, tuple((place, is_text) for place, _, is_text in wanted), BATCH_ROWS):
            read = {name: values for (_, name, _), values in zip(wanted, found, strict=True)}
            yield pl.DataFrame(
                [
                    read[name].alias(name)
                    if name in read
                    else pl.repeat(None, count, dtype=dtype, eager=True).alias(name)
                    for name, dtype in columns.items()
                ]
            )

    def _layout(self, table: str) -> tuple[int, dict[str, int]]:
        """The first page of a table, and the place in its records of each column that is kept there as it is read."""
        (root,) = self._connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)
        ).fetchone()
        indexed = "SELECT 1 FROM sqlite_master WHERE type = 'index' AND lower(tbl_name) = lower(?)"
        described = self._connection.execute(f'PRAGMA table_xinfo("{table}")').fetchall()
        is_indexed = self._connection.execute(indexed, (table,)).fetchone() is not None  # and may be read in its order
        if (
            is_indexed or not isinstance(root, int) or any(column[6] for column in described)
        ):  # or has generated columns
            raise NeedsSQLiteError
        usual = self.tables[table]
        return root, {
            name: place
            for place, name, declared, *_ in described
            if name in usual and not usual[name] and not _FLOATING.search(declared)
        }

    def whole(self, table: str, columns: Mapping[str, type[pl.DataType]], most: int) -> pl.DataFrame:
        """Read a small table as one frame; a table with more than about `most` rows is cut off there."""
        frames, height = [pl.DataFrame(schema=dict(columns))], 0
        for batch in self.batches(table, columns):
            frames.append(batch)
            height += batch.height
            if height > most:
                self._damage[f"long_table:{table}"] += 1
                break
        return pl.concat(frames)

    def extreme(self, function: str, columns: Mapping[str, str]) -> int | None:
        """Return the "min" or "max" of the integers in these columns (table -> column), or None."""
        found = []
        for table, column in columns.items():
            if self.has(table, column):
                sense = f'typeof("{column}") = \'integer\' AND abs("{column}" / 2) < {_LARGEST // 2}'
                query = f'SELECT {function}("{column}") FROM "{table}" WHERE {sense}'
                with suppress(*ERRORS):  # a damaged table is reported when it is read
                    found.append(self._connection.execute(query).fetchone()[0])
        return {"min": min, "max": max}[function]((value for value in found if isinstance(value, int)), default=None)

    def texts(self, table: str, key: str, value: str, keys: Sequence[int]) -> dict[int, str]:
        if not self.has(table, key, value):
            return {}
        select = f'SELECT "{key}", substr("{value}", 1, {LONGEST_TEXT}) FROM "{table}"'
        found: dict[int, str] = {}
        try:
            if not self.tables[table][key]:  # without an index, a single pass is fastest
                wanted = set(keys)
                rows = self._connection.execute(select)
                return {number: text for number, text in rows if number in wanted and isinstance(text, str)}
            for first in range(0, len(keys), _LOOKED_UP):
                part = keys[first : first + _LOOKED_UP]
                marks = ", ".join("?" * len(part))
                rows = self._connection.execute(f'{select} WHERE "{key}" IN ({marks})', part)
                found.update((number, text) for number, text in rows if isinstance(text, str))
        except ERRORS as error:
            self._refuse_endless(error)
            self._damage[f"damaged_table:{table} ({error})"] += 1
        return found

    def _refuse_endless(self, error: Exception) -> None:
        if self._budget < 0:
            raise self._endless() from error

    def _endless(self) -> UnreadableTraceError:
        return UnreadableTraceError(
            f"{self.name} is a damaged database: its tables are longer than a file of its size can hold"
        )

    def _column(self, table: str, name: str, dtype: type[pl.DataType], values: _Values) -> pl.Series:
        """Convert values to the column's type; values of another type are dropped and counted."""
        wanted = _PYTHON_TYPES[dtype]
        try:
            return pl.Series(name, values, dtype=dtype, strict=True)
        except (TypeError, OverflowError, ValueError, pl.exceptions.PolarsError):
            kept = [value if isinstance(value, wanted) and _is_small(value) else None for value in values]
            lost = len(values) - values.count(None) - (len(kept) - kept.count(None))
            self._damage[f"wrong_type:{table}.{name}"] += lost
            return pl.Series(name, kept, dtype=dtype, strict=False)


def _connected(path: Path, name: str) -> sqlite3.Connection:
    try:
        return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    except sqlite3.Error as error:
        raise UnreadableTraceError(f"cannot read {name}: {error}") from None


def _may(action: int, table: str | None, column: str | None, database: str | None, view: str | None) -> int:
    """Authorise reads of real tables only, except those with the recorded process's environment."""
    allowed = action in _ACTIONS and view is None and not (action == sqlite3.SQLITE_READ and table in NEVER_READ)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _expression(name: str, dtype: type[pl.DataType], columns: Mapping[str, bool]) -> str:
    if name not in columns:
        return "NULL"
    return f'substr("{name}", 1, {LONGEST_TEXT})' if dtype is pl.String else f'"{name}"'


def _is_small(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, (int, float)) and abs(value) < _LARGEST)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


TABLE: Final = "StringIds"
UNNAMED: Final = "(no name in the file)"


class Strings:
    """Texts by number, looked up on first use, since the table also holds the program's output."""

    def __init__(self, database: Database, pool: StringPool) -> None:
        self._database = database
        self._pool = pool
        self._known: dict[int, str | None] = {}

    def texts(self, numbers: Sequence[int]) -> list[str | None]:
        """Return the text of each number; None if missing."""
        missing = sorted(number for number in set(numbers) if number not in self._known)
        if missing:
            found = self._database.texts(TABLE, "id", "value", missing)
            self._known.update((number, found.get(number)) for number in missing)
        return [self._known[number] for number in numbers]

    def codes(self, numbers: pl.Series, change: Callable[[str], str] = str) -> pl.Series:
        """Return the pool index of each text after `change`, or of UNNAMED if missing (UInt32)."""
        different = numbers.unique().drop_nulls()
        texts = [UNNAMED if text is None else change(text) for text in self.texts(different.to_list())]
        coded: pl.Series = numbers.replace_strict(
            different, self._pool.codes(texts), default=self._pool.codes([UNNAMED])[0], return_dtype=pl.UInt32
        )
        return coded

    def words(self, numbers: pl.Series, describe: Callable[[str], str]) -> pl.Series:
        """Return `describe` of each text, or of UNNAMED if missing (String)."""
        different = numbers.unique().drop_nulls()
        words = [describe(text or UNNAMED) for text in self.texts(different.to_list())]
        return _spelt(numbers, different, words).fill_null(describe(UNNAMED))

    def series(self, numbers: pl.Series) -> pl.Series:
        """Return the text of each number, null if missing (String)."""
        different = numbers.unique().drop_nulls()
        return _spelt(numbers, different, self.texts(different.to_list()))


def _spelt(numbers: pl.Series, different: pl.Series, texts: Sequence[str | None]) -> pl.Series:
    spelt: pl.Series = numbers.replace_strict(
        different, pl.Series(texts, dtype=pl.String), default=None, return_dtype=pl.String
    )
    return spelt


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
