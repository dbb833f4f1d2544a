"""Keep batches of rows until the whole file was read: in memory at first, on disk above MEMORY_BYTES."""

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
    """Rows of several tables in the order they were added; `take` returns a table and forgets it."""

    def __init__(self, directory: Path, memory_bytes: int | None = None) -> None:
        self._directory = directory
        self._limit = MEMORY_BYTES if memory_bytes is None else memory_bytes
        self._held: defaultdict[str, list[pl.DataFrame]] = defaultdict(list)
        self._files: defaultdict[str, list[Path]] = defaultdict(list)
        self._size = 0

    def add(self, batch: dict[str, pl.DataFrame]) -> None:
        """Append a batch, by table."""
        budget = current()
        for table, frame in batch.items():
            budget.spend("rows", frame.height)
            self._held[table].append(frame)
            self._size += int(frame.estimated_size())
        budget.tick()
        if self._size > self._limit:
            self._write()

    def flush(self) -> None:
        """Write all rows to disk if some already are, since tables are taken one at a time from here on."""
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
        """Return and forget all rows of a table; None if there were none."""
        frames = [pl.scan_ipc(path).collect() for path in self._files.pop(table, [])]
        frames += self._held.pop(table, [])
        return _together(frames) if frames else None

    def clean(self) -> None:
        """Remove all spilled files."""
        for path in self._directory.glob("spill-*.arrow"):
            path.unlink()


def _together(frames: list[pl.DataFrame]) -> pl.DataFrame:
    """Concatenate the frames; a column that a frame lacks is null there."""
    return pl.concat(frames, how="diagonal")


_NOT_JSON: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)


class Codes(dict[Any, int]):
    """Assigns numbers to keys in order of first use."""

    def __missing__(self, key: Any) -> int:
        code = self[key] = len(self)
        return code


class _RawCodes(dict[bytes, "int | None"]):
    def __init__(self, codes: Codes) -> None:
        super().__init__({b"null": None})
        self._codes = codes

    def __missing__(self, raw: bytes) -> int:
        code = self[raw] = self._codes[one_spacing(raw).decode("utf-8", "replace")]
        return code


def one_spacing(raw: bytes) -> bytes:
    """Normalise JSON text to one space after each comma and colon, since profilers format shapes differently."""
    try:
        return msgspec.json.format(raw, indent=0)
    except _NOT_JSON:
        return raw


class StringPool:
    """A pool of distinct strings, referred to by index."""

    def __init__(self) -> None:
        self._codes = Codes()
        self._raw_codes = _RawCodes(self._codes)

    def codes(self, strings: Sequence[str]) -> pl.Series:
        """Return the index of each string (UInt32)."""
        known = self._codes
        current().require("strings", len(known))
        return pl.Series([known[string] for string in strings], dtype=pl.UInt32)

    def optional_codes(self, strings: Sequence[Any]) -> pl.Series:
        """Return the index of each string or integer, null for None (UInt32)."""
        known = self._codes
        current().require("strings", len(known))
        return pl.Series([None if s is None else known[str(s)] for s in strings], dtype=pl.UInt32)

    def raw_codes(self, raws: Sequence[Any]) -> pl.Series:
        """Return the index of each JSON text, null for JSON's null (UInt32)."""
        known = self._raw_codes
        return pl.Series([known[raw] for raw in map(bytes, raws)], dtype=pl.UInt32)

    def strings(self) -> pl.Series:
        """Return all strings in order of their index."""
        current().require("strings", len(self._codes))
        return pl.Series([str(key) for key in self._codes], dtype=pl.String)
