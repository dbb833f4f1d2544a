"""Write a trace as a directory of Parquet files.

    store.json                      version, metadata, warnings, number of parts of each table
    operators-00000.parquet, ...    the tables, in parts, in row order
    contents.json                   checksums of these files, and the key of the store

A store is written to a temporary directory beside its place, flushed to disk, and renamed when complete. Files that
changed since are rejected.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import polars as pl
import xxhash

from stepscope.errors import CacheError
from stepscope.files import make_private, private_file
from stepscope.trace.metadata import Metadata, TraceWarning
from stepscope.trace.tables import SCHEMAS, empty

if TYPE_CHECKING:
    from stepscope.trace.model import Trace

VERSION: Final = 2
PART_ROWS: Final = 500_000
MANIFEST: Final = "store.json"
CONTENTS: Final = "contents.json"
_CHUNK_BYTES: Final = 1 << 20


class Manifest(msgspec.Struct, kw_only=True):
    """The content of store.json; fields added later have defaults, so that older stores can be read."""

    version: int
    metadata: Metadata
    warnings: tuple[TraceWarning, ...] = ()
    parts: dict[str, int] = {}


class Contents(msgspec.Struct, kw_only=True):
    """The content of contents.json: the key of the store, and the 128-bit XXH3 checksum of each other file."""

    kept_as: str
    checksums: dict[str, str]


class StoreWriter:
    """Writes tables part by part into `directory`, which must exist; the store is complete after `finish`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._parts: dict[str, int] = {}

    def write_part(self, table: str, frame: pl.DataFrame) -> None:
        """Append rows to a table; they must follow those already written. Columns with only nulls are not written."""
        number = self._parts.get(table, 0)
        _write(frame, self.directory / f"{table}-{number:05}.parquet")
        self._parts[table] = number + 1

    def scan(self, table: str) -> pl.LazyFrame:
        """Return the rows written so far."""
        paths = self._paths(table)
        return scan(table, paths)

    def change(self, table: str, change: Callable[[pl.DataFrame, int], pl.DataFrame]) -> None:
        """Rewrite every part with the result of `change`, which gets the part and the number of its first row."""
        first = 0
        for path in self._paths(table):
            part = scan(table, [path]).collect()
            changed = path.with_suffix(".changed")
            _write(change(part, first), changed)
            os.replace(changed, path)
            first += part.height

    def _paths(self, table: str) -> list[Path]:
        return [self.directory / f"{table}-{number:05}.parquet" for number in range(self._parts.get(table, 0))]

    def finish(self, metadata: Metadata, warnings: tuple[TraceWarning, ...]) -> None:
        """Write the manifest, which makes the store valid; invalid UTF-8 in its text is escaped."""
        manifest = Manifest(version=VERSION, metadata=metadata, warnings=warnings, parts=self._parts)
        manifest = msgspec.convert(_encodable(msgspec.to_builtins(manifest)), Manifest)
        (self.directory / MANIFEST).write_bytes(msgspec.json.encode(manifest))


def _encodable(value: Any) -> Any:
    """Plain values with lone surrogates escaped, which paths and headers may contain."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    return [_encodable(each) for each in value] if isinstance(value, (list, tuple)) else value


def _write(frame: pl.DataFrame, path: Path) -> None:
    """Write a part without its all-null columns, which saves a third of the time."""
    told = [name for name in frame.columns if frame[name].null_count() < frame.height]
    (frame.select(told) if told else frame).write_parquet(path, compression="lz4", row_group_size=PART_ROWS)


def scan(table: str, paths: list[Path]) -> pl.LazyFrame:
    """Return the rows of a table's parts; columns that a part lacks are null."""
    if not paths:
        return empty(table).lazy()
    parts = [pl.scan_parquet(path, glob=False) for path in paths]
    rows = pl.concat(parts, how="diagonal") if len(parts) > 1 else parts[0]
    there = set(rows.collect_schema().names())
    return rows.select(
        pl.col(name) if name in there else pl.lit(None, dtype).alias(name) for name, dtype in SCHEMAS[table].items()
    )


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Convert Polars errors for a full disk and the like to the original `OSError`."""
    try:
        yield
    except pl.exceptions.PolarsError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def seal(directory: Path, kept_as: str = "") -> None:
    """Flush a complete store to disk, with its files' checksums and the key that `open_kept` requires."""
    checksums = {}
    for name in names_in(directory):
        make_private(directory / name)
        checksums[name] = checksum(directory / name)
        to_disk(directory / name)
    contents = directory / CONTENTS
    private_file(contents).write_bytes(msgspec.json.encode(Contents(kept_as=kept_as, checksums=checksums)))
    to_disk(contents)
    to_disk(directory)


def names_in(directory: Path) -> set[str]:
    with os.scandir(directory) as found:
        return {entry.name for entry in found} - {CONTENTS}


def checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def to_disk(path: Path) -> None:
    """Flush a file's content or a directory's entries to disk; Windows cannot flush directories."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save(trace: Trace, directory: str | Path) -> None:
    """Write a trace into a new directory, complete or not at all.

    Raises:
        CacheError: the directory exists already or cannot be written.
    """
    target = Path(directory)
    if target.exists():
        raise CacheError(f"{target} exists already; a trace is saved into a new directory")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise CacheError(f"cannot write {target}: {error.strerror}") from error
    try:
        writer = StoreWriter(temporary)
        with disk_errors():
            for table in SCHEMAS:
                for part in _parts(trace.table(table)):
                    writer.write_part(table, part)
        writer.finish(trace.metadata, trace.warnings)
        seal(temporary)
        os.replace(temporary, target)
        to_disk(target.parent)
    except OSError as error:
        raise CacheError(f"cannot write {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _parts(frame: pl.DataFrame) -> Iterator[pl.DataFrame]:
    for first in range(0, frame.height, PART_ROWS):
        yield frame.slice(first, PART_ROWS)
