"""Read a trace from a store written by `stepscope.trace.store_writing`; changed files are rejected."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
import polars as pl

from stepscope.errors import UnreadableTraceError
from stepscope.trace.metadata import Metadata
from stepscope.trace.model import Trace
from stepscope.trace.store_writing import CONTENTS, MANIFEST, VERSION, Contents, Manifest, checksum, names_in, scan

_FIRST_WITH_CONTENTS: Final = 2
_opened: Final[set[Path]] = set()
"""Stores opened by this process, whose files are checked again if a table cannot be read later."""


def is_store(directory: Path) -> bool:
    """Whether the directory holds a complete store."""
    return (directory / MANIFEST).is_file()


def open_store(directory: Path, owner: object = None) -> Trace:
    """Open the trace in a directory written by `Trace.save`; each table's checksum is verified on first access.

    Raises:
        UnreadableTraceError: there is no store, its manifest is damaged, or its version is newer.
    """
    manifest = _manifest(directory)
    if manifest.version < _FIRST_WITH_CONTENTS and not (directory / CONTENTS).exists():
        return _trace(directory, manifest, owner, None)
    contents = _contents(directory)
    _compare(directory, contents, [MANIFEST])
    _opened.add(directory)
    return _trace(directory, manifest, owner, contents)


def open_kept(directory: Path, owner: object, kept_as: str) -> Trace:
    """Open the trace in a directory sealed under that name, after verifying every file's checksum.

    Raises:
        UnreadableTraceError: a file was changed, added or removed.
    """
    contents = _contents(directory)
    if contents.kept_as != kept_as:
        raise UnreadableTraceError(f"the stored trace {directory} is damaged: it is that of another file")
    _compare(directory, contents, names_in(directory) | contents.checksums.keys())
    _opened.add(directory)
    return _trace(directory, _manifest(directory), owner, None)


def open_unsealed(directory: Path, owner: object = None) -> Trace:
    """Open the trace in a directory that this process has just filled with a `StoreWriter`."""
    return _trace(directory, _manifest(directory), owner, None)


def metadata_of(directory: Path) -> Metadata:
    """Return the metadata of a stored trace without reading its tables; raises UnreadableTraceError."""
    return _manifest(directory).metadata


def damage_behind(error: BaseException) -> UnreadableTraceError | None:
    """Return the damage to an open store that caused an error of Polars or the system, or None."""
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
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnreadableTraceError(f"{directory} holds no stored trace that can be read: {error}") from error
    if manifest.version > VERSION:
        raise UnreadableTraceError(
            f"{directory} was written by a newer stepscope (store version {manifest.version}, this one reads {VERSION})"
        )
    return manifest


def _contents(directory: Path) -> Contents:
    try:
        return msgspec.json.decode((directory / CONTENTS).read_bytes(), type=Contents)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnreadableTraceError(
            f"the stored trace {directory} is damaged: {CONTENTS} holds no checksums of its files"
        ) from error


def _compare(directory: Path, contents: Contents, names: Iterable[str]) -> None:
    for name in sorted(names):
        place = directory / name
        try:
            same = place.is_file() and contents.checksums.get(name) == checksum(place)
        except OSError:
            same = False
        if not same:
            what = "is not as it was written" if place.exists() else "is missing"
            raise UnreadableTraceError(f"the stored trace {directory} is damaged: its file {name} {what}")


def _trace(directory: Path, manifest: Manifest, owner: object, unchecked: Contents | None) -> Trace:
    """With `unchecked`, a table's checksums are verified when it is first loaded."""
    checked: set[str] = set()

    def load(table: str) -> pl.LazyFrame:
        paths = [directory / f"{table}-{number:05}.parquet" for number in range(manifest.parts.get(table, 0))]
        if unchecked is not None and table not in checked:
            _compare(directory, unchecked, [path.name for path in paths])
            checked.add(table)
        missing = next((path for path in paths if not path.is_file()), None)
        if missing is not None:
            raise UnreadableTraceError(f"the stored trace {directory} lacks its file {missing.name}")
        return scan(table, paths)

    return Trace(manifest.metadata, manifest.warnings, load, {}, owner)
