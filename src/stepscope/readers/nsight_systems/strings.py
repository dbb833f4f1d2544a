"""The texts of the database, which its tables refer to by number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import polars as pl

from stepscope.readers.nsight_systems.database import Database
from stepscope.readers.pool import StringPool

TABLE: Final = "StringIds"
UNNAMED: Final = "(no name in the file)"


class Strings:
    """Texts by number, looked up when first wanted: the table also holds what the program printed."""

    def __init__(self, database: Database, pool: StringPool) -> None:
        self._database = database
        self._pool = pool
        self._known: dict[int, str | None] = {}

    def texts(self, numbers: Sequence[int]) -> list[str | None]:
        """The text of each number, None where there is none."""
        missing = sorted(number for number in set(numbers) if number not in self._known)
        if missing:
            found = self._database.texts(TABLE, "id", "value", missing)
            self._known.update((number, found.get(number)) for number in missing)
        return [self._known[number] for number in numbers]

    def codes(self, numbers: pl.Series, change: Callable[[str], str] = str) -> pl.Series:
        """The pool's number of each text after `change`; of UNNAMED where there is no text; UInt32."""
        different = numbers.unique().drop_nulls()
        texts = [UNNAMED if text is None else change(text) for text in self.texts(different.to_list())]
        coded: pl.Series = numbers.replace_strict(
            different, self._pool.codes(texts), default=self._pool.codes([UNNAMED])[0], return_dtype=pl.UInt32
        )
        return coded

    def words(self, numbers: pl.Series, describe: Callable[[str], str]) -> pl.Series:
        """What `describe` says of each text; of UNNAMED where there is none; String."""
        different = numbers.unique().drop_nulls()
        words = [describe(text or UNNAMED) for text in self.texts(different.to_list())]
        return _spelt(numbers, different, words).fill_null(describe(UNNAMED))

    def series(self, numbers: pl.Series) -> pl.Series:
        """The text of each number, null where there is none; String."""
        different = numbers.unique().drop_nulls()
        return _spelt(numbers, different, self.texts(different.to_list()))


def _spelt(numbers: pl.Series, different: pl.Series, texts: Sequence[str | None]) -> pl.Series:
    spelt: pl.Series = numbers.replace_strict(
        different, pl.Series(texts, dtype=pl.String), default=None, return_dtype=pl.String
    )
    return spelt
