"""A trace as a directory of Parquet files.

    store.json                      version, metadata, warnings, rows of each table
    operators-00000.parquet, ...    the tables, in parts, in row order
    contents.json                   the checksum of each of these files, and what the store was kept as

A store is written into a temporary directory beside its place, brought to the disk, and renamed when complete. What
has changed since is refused, never read.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import polars as pl
import xxhash

from stepscope.errors import CacheError, UnreadableTraceError
from stepscope.files import make_private, private_file
from stepscope.trace.model import Metadata, Trace, TraceWarning
from stepscope.trace.tables import SCHEMAS, empty

VERSION: Final = 2
PART_ROWS: Final = 500_000
_MANIFEST: Final = "store.json"
_CONTENTS: Final = "contents.json"
_FIRST_WITH_CONTENTS: Final = 2
_CHUNK_BYTES: Final = 1 << 20
_opened: Final[set[Path]] = set()
"""The stores that this process has opened: where a table of one cannot be read later, its files are looked at again."""


class Manifest(msgspec.Struct, kw_only=True):
    """The content of store.json; fields added later have defaults, so that older stores can be read."""

    version: int
    metadata: Metadata
    warnings: tuple[TraceWarning, ...] = ()
    parts: dict[str, int] = {}


class Contents(msgspec.Struct, kw_only=True):
    """The content of contents.json: what the store was kept as, and the XXH3 checksum of each other file, 128 bits."""

    kept_as: str
    checksums: dict[str, str]


class StoreWriter:
    """Writes tables part by part into `directory`, which must exist; complete once `finish` was called."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._parts: dict[str, int] = {}

    def write_part(self, table: str, frame: pl.DataFrame) -> None:
        """Append rows to a table; they must follow those already written. Columns of nulls alone are left out."""
        number = self._parts.get(table, 0)
        _write(frame, self.directory / f"{table}-{number:05}.parquet")
        self._parts[table] = number + 1

    def scan(self, table: str) -> pl.LazyFrame:
        """The rows written so far."""
        paths = self._paths(table)
        return _scan(table, paths)

    def change(self, table: str, change: Callable[[pl.DataFrame, int], pl.DataFrame]) -> None:
        """Write every part anew, as `change` returns it for the part and the number of its first row."""
        first = 0
        for path in self._paths(table):
            part = _scan(table, [path]).collect()
            changed = path.with_suffix(".changed")
            _write(change(part, first), changed)
            os.replace(changed, path)
            first += part.height

    def _paths(self, table: str) -> list[Path]:
        return [self.directory / f"{table}-{number:05}.parquet" for number in range(self._parts.get(table, 0))]

    def finish(self, metadata: Metadata, warnings: tuple[TraceWarning, ...]) -> None:
        """Write the manifest, which makes the store valid; text that is no UTF-8 is kept with its bytes spelt out."""
        manifest = Manifest(version=VERSION, metadata=metadata, warnings=warnings, parts=self._parts)
        manifest = msgspec.convert(_encodable(msgspec.to_builtins(manifest)), Manifest)
        (self.directory / _MANIFEST).write_bytes(msgspec.json.encode(manifest))


def _encodable(value: Any) -> Any:
    """Plain values with the halves of surrogate pairs in their texts spelt out, which paths and headers may hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    return [_encodable(each) for each in value] if isinstance(value, (list, tuple)) else value


def _write(frame: pl.DataFrame, path: Path) -> None:
    """Write a part of a table; columns of nulls alone are left out, which takes a third of the time off."""
    told = [name for name in frame.columns if frame[name].null_count() < frame.height]
    (frame.select(told) if told else frame).write_parquet(path, compression="lz4", row_group_size=PART_ROWS)


def _scan(table: str, paths: list[Path]) -> pl.LazyFrame:
    """The parts of a table; columns that a part lacks are null."""
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
    """Turn what Polars says of a full disk and the like into the `OSError` it was."""
    try:
        yield
    except pl.exceptions.PolarsError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def is_store(directory: Path) -> bool:
    """Whether the directory holds a complete store."""
    return (directory / _MANIFEST).is_file()


def seal(directory: Path, kept_as: str = "") -> None:
    """Bring a complete store to the disk, with the checksums of its files; `open_kept` has to ask for `kept_as`."""
    checksums = {}
    for name in _names(directory):
        make_private(directory / name)
        checksums[name] = _checksum(directory / name)
        to_disk(directory / name)
    contents = directory / _CONTENTS
    private_file(contents).write_bytes(msgspec.json.encode(Contents(kept_as=kept_as, checksums=checksums)))
    to_disk(contents)
    to_disk(directory)


def open_store(directory: Path, owner: object = None) -> Trace:
    """The trace in a directory that `Trace.save` filled; tables are compared with their checksums when asked for.

    Raises:
        UnreadableTraceError: no store, one whose manifest is damaged, or one of a newer version.
    """
    manifest = _manifest(directory)
    if manifest.version < _FIRST_WITH_CONTENTS and not (directory / _CONTENTS).exists():
        return _trace(directory, manifest, owner, None)
    contents = _contents(directory)
    _compare(directory, contents, [_MANIFEST])
    _opened.add(directory)
    return _trace(directory, manifest, owner, contents)


def open_kept(directory: Path, owner: object, kept_as: str) -> Trace:
    """The trace in a directory sealed under that name; every file is compared with its checksum first.

    Raises:
        UnreadableTraceError: anything is not as it was written.
    """
    contents = _contents(directory)
    if contents.kept_as != kept_as:
        raise UnreadableTraceError(f"the stored trace {directory} is damaged: it is that of another file")
    _compare(directory, contents, _names(directory) | contents.checksums.keys())
    _opened.add(directory)
    return _trace(directory, _manifest(directory), owner, None)


def open_unsealed(directory: Path, owner: object = None) -> Trace:
    """The trace in a directory that this process has just filled by a `StoreWriter`."""
    return _trace(directory, _manifest(directory), owner, None)


def metadata_of(directory: Path) -> Metadata:
    """What a store says of its trace, without looking at its tables; raises UnreadableTraceError."""
    return _manifest(directory).metadata


def damage_behind(error: BaseException) -> UnreadableTraceError | None:
    """What an error of Polars or of the system comes from, where a store was damaged after it had been opened."""
    if not isinstance(error, (OSError, pl.exceptions.PolarsError)):
        return None
    for directory in sorted(filter(Path.exists, _opened)):
        try:
            contents = _contents(directory)
            _compare(directory, contents, contents.checksums)
        except UnreadableTraceError as damage:
            return damage
    return None


def _manifest(directory: Path) -> Manifest:
    try:
        manifest = msgspec.json.decode((directory / _MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnreadableTraceError(f"{directory} holds no stored trace that can be read: {error}") from error
    if manifest.version > VERSION:
        raise UnreadableTraceError(
            f"{directory} was written by a newer stepscope (store version {manifest.version}, this one reads {VERSION})"
        )
    return manifest


def _contents(directory: Path) -> Contents:
    try:
        return msgspec.json.decode((directory / _CONTENTS).read_bytes(), type=Contents)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnreadableTraceError(
            f"the stored trace {directory} is damaged: {_CONTENTS} holds no checksums of its files"
        ) from error


def _compare(directory: Path, contents: Contents, names: Iterable[str]) -> None:
    for name in sorted(names):
        place = directory / name
        try:
            same = place.is_file() and contents.checksums.get(name) == _checksum(place)
        except OSError:
            same = False
        if not same:
            what = "is not as it was written" if place.exists() else "is missing"
            raise UnreadableTraceError(f"the stored trace {directory} is damaged: its file {name} {what}")


def _trace(directory: Path, manifest: Manifest, owner: object, unchecked: Contents | None) -> Trace:
    """The trace of a store; tables are compared first where the checksums are given."""
    checked: set[str] = set()

    def load(table: str) -> pl.LazyFrame:
        paths = [directory / f"{table}-{number:05}.parquet" for number in range(manifest.parts.get(table, 0))]
        if unchecked is not None and table not in checked:
            _compare(directory, unchecked, [path.name for path in paths])
            checked.add(table)
        missing = next((path for path in paths if not path.is_file()), None)
        if missing is not None:
            raise UnreadableTraceError(f"the stored trace {directory} lacks its file {missing.name}")
        return _scan(table, paths)

    return Trace(manifest.metadata, manifest.warnings, load, {}, owner)


def _names(directory: Path) -> set[str]:
    with os.scandir(directory) as found:
        return {entry.name for entry in found} - {_CONTENTS}


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def to_disk(path: Path) -> None:
    """Have the system write a file's content, or a directory's names, to the disk; Windows does so for no directory."""
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
