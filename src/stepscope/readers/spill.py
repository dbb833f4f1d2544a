"""Batches of rows kept until the whole file was seen: in memory while they are few, on disk beyond that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import polars as pl

from stepscope.readers.budget import current

MEMORY_BYTES: Final = 32 * 2**20


class Spill:
    """Rows of several tables in the order they were added; `take` gives a table back and forgets it."""

    def __init__(self, directory: Path, memory_bytes: int | None = None) -> None:
        self._directory = directory
        self._limit = MEMORY_BYTES if memory_bytes is None else memory_bytes
        self._held: defaultdict[str, list[pl.DataFrame]] = defaultdict(list)
        self._files: defaultdict[str, list[Path]] = defaultdict(list)
        self._size = 0

    def add(self, batch: dict[str, pl.DataFrame]) -> None:
        """Append a batch."""
        budget = current()
        for table, frame in batch.items():
            budget.spend("rows", frame.height)
            self._held[table].append(frame)
            self._size += int(frame.estimated_size())
        budget.tick()
        if self._size > self._limit:
            self._write()

    def flush(self) -> None:
        """Leave nothing in memory, if that has begun: from here on one table is wanted at a time."""
        if self._files:
            self._write()

    def _write(self) -> None:
        for table, frames in self._held.items():
            path = self._directory / f"spill-{table}-{len(self._files[table]):05}.arrow"
            _together(frames).write_ipc(path, compression="uncompressed")
            self._files[table].append(path)
        self._held.clear()
        self._size = 0

    def take(self, table: str) -> pl.DataFrame | None:
        """All rows of a table, None if there were none."""
        frames = [pl.scan_ipc(path).collect() for path in self._files.pop(table, [])]
        frames += self._held.pop(table, [])
        return _together(frames) if frames else None

    def clean(self) -> None:
        """Remove the files."""
        for path in self._directory.glob("spill-*.arrow"):
            path.unlink()


def _together(frames: list[pl.DataFrame]) -> pl.DataFrame:
    """The frames' rows; a column that only some have is null in the others."""
    return pl.concat(frames, how="diagonal")


_NOT_JSON: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)


class Codes(dict[Any, int]):
    """Numbers keys in order of first use."""

    def __missing__(self, key: Any) -> int:
        code = self[key] = len(self)
        return code


class _RawCodes(dict[bytes, "int | None"]):
    """Codes of JSON texts in a pool of strings."""

    def __init__(self, codes: Codes) -> None:
        super().__init__({b"null": None})
        self._codes = codes

    def __missing__(self, raw: bytes) -> int:
        code = self[raw] = self._codes[one_spacing(raw).decode("utf-8", "replace")]
        return code


def one_spacing(raw: bytes) -> bytes:
    """JSON text with a space after each comma and colon: profilers write the same shapes in several ways."""
    try:
        return msgspec.json.format(raw, indent=0)
    except _NOT_JSON:
        return raw


class StringPool:
    """Strings kept once and referred to by number."""

    def __init__(self) -> None:
        self._codes = Codes()
        self._raw_codes = _RawCodes(self._codes)

    def codes(self, strings: Sequence[str]) -> pl.Series:
        """The number of each string; UInt32."""
        known = self._codes
        current().require("strings", len(known))
        return pl.Series([known[string] for string in strings], dtype=pl.UInt32)

    def optional_codes(self, strings: Sequence[Any]) -> pl.Series:
        """The number of each string or integer, null for None; UInt32."""
        known = self._codes
        current().require("strings", len(known))
        return pl.Series([None if s is None else known[str(s)] for s in strings], dtype=pl.UInt32)

    def raw_codes(self, raws: Sequence[Any]) -> pl.Series:
        """The number of each piece of JSON text, null for JSON's null; UInt32."""
        known = self._raw_codes
        return pl.Series([known[raw] for raw in map(bytes, raws)], dtype=pl.UInt32)

    def strings(self) -> pl.Series:
        """Every string, in order of its number."""
        current().require("strings", len(self._codes))
        return pl.Series([str(key) for key in self._codes], dtype=pl.String)
