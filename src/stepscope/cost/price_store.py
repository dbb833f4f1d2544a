"""The prices that the user imported, in one file of the user's data folder, and all that are known."""

from __future__ import annotations

import csv
import io
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from stepscope.cost.prices import COLUMNS, Price, newest, price_of, row_of, shipped_prices
from stepscope.errors import UsageError
from stepscope.kept_json import say_changed
from stepscope.whole_files import whole_file

_FILE: Final = "prices.csv"
_CHECKSUM: Final = "# checksum "
"""Begins the last line; a file of an older stepscope has none."""


class PriceStore:
    """Imported prices; an import takes the place of what was imported of the same providers before.

    Args:
        folder: where stepscope keeps its data.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / _FILE

    def imported(self) -> list[Price]:
        """What was imported; nothing where nothing was.

        Raises:
            UsageError: the file cannot be read.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise self._unreadable() from error
        rows, _, checksum = text.rpartition(_CHECKSUM)
        is_whole = not rows or checksum.strip() == _checksum(rows)
        try:
            reader = csv.DictReader(io.StringIO(rows or text, newline=""))
            if not set(COLUMNS) <= set(reader.fieldnames or ()):
                raise self._unreadable()
            prices = [price_of(row) for row in reader]
        except (ValueError, KeyError, TypeError, csv.Error) as error:
            raise self._unreadable() from error
        if not is_whole:
            say_changed(self.path)
        return prices

    def known(self) -> list[Price]:
        """The shipped prices and the imported ones: of each machine in each region the one seen last."""
        return newest([*shipped_prices(), *self.imported()])

    def add(self, prices: Collection[Price]) -> None:
        """Keep these instead of what was imported of their providers.

        Raises:
            UsageError: what was imported before cannot be read, or the file not be written.
        """
        providers = {price.provider for price in prices}
        self._write([*(price for price in self.imported() if price.provider not in providers), *prices])

    def remove(self, providers: Collection[str]) -> int:
        """Forget what was imported of these providers; returns how many prices that were.

        Raises:
            UsageError: as `add`.
        """
        before = self.imported()
        kept = [price for price in before if price.provider not in providers]
        if len(kept) < len(before):
            self._write(kept)
        return len(before) - len(kept)

    def reset(self) -> bool:
        """Forget everything that was imported, readable or not; returns whether there was something.

        Raises:
            UsageError: the file cannot be removed.
        """
        try:
            self.path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UsageError(f"{self.path} cannot be removed: {error.strerror}") from error
        return True

    def _write(self, prices: Iterable[Price]) -> None:
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(map(row_of, prices))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self.path) as file:
                file.write(f"{text.getvalue()}{_CHECKSUM}{_checksum(text.getvalue())}\n".encode())
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written: {error.strerror}") from error

    def _unreadable(self) -> UsageError:
        return UsageError(
            f"the imported prices in {self.path} cannot be read; stepscope prices reset removes them, to import anew"
        )


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
