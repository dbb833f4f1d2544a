"""The trace: immutable tables with metadata about their origin, saved as a directory of Parquet files.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec
import polars as pl

from stepscope.errors import CacheError, UnreadableTraceError
from stepscope.files import checksum, make_private, private_file, to_disk
from stepscope.trace.metadata import Metadata, TraceWarning
from stepscope.trace.tables import SCHEMAS, check, conform, empty

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.analysis.memory import MemorySummary
    from stepscope.predict.prediction import PredictedSteps
    from stepscope.whatif.answer import Answer

TableLoader = Callable[[str], pl.LazyFrame]
PartsLoader = Callable[[str], "list[Part]"]
_Kept = TypeVar("_Kept")


class Displayed:
    """Is shown in a few lines, and in a notebook by its first screen; dataclasses that inherit it have `repr=False`."""

    __slots__ = ()

    def __repr__(self) -> str:
        import stepscope

        return stepscope.few_lines(self)  # type: ignore[no-any-return]

    def _repr_html_(self) -> str:
        import stepscope

        return stepscope.first_screen(self)  # type: ignore[no-any-return]


class _Table:
    def __set_name__(self, owner: type[Trace], name: str) -> None:
        self._name = name

    def __get__(self, trace: Trace, owner: type[Trace]) -> pl.DataFrame:
        return trace.table(self._name)


@dataclass(frozen=True, repr=False)
class Trace(Displayed):
    """A profile as tables, loaded on first access (see `stepscope.trace.tables` for their columns).

    Attributes:
        warnings: what was skipped or repaired while reading.
        lanes, operators, launches, device_work, frames, lines, modules, annotations, synchronisations, memory,
            counters, links: the tables.
    """

    lanes = _Table()
    operators = _Table()
    launches = _Table()
    device_work = _Table()
    frames = _Table()
    lines = _Table()
    modules = _Table()
    annotations = _Table()
    synchronisations = _Table()
    memory = _Table()
    counters = _Table()
    links = _Table()

    metadata: Metadata
    warnings: tuple[TraceWarning, ...]
    _load: TableLoader = field(repr=False, compare=False)
    _loaded: dict[str, pl.DataFrame] = field(default_factory=dict, repr=False, compare=False)
    _owner: object = field(default=None, repr=False, compare=False)
    """An object that must live as long as the trace: a temporary directory, or a lock on a cache entry."""
    capture: Trace | None = field(default=None, repr=False, compare=False)
    """The recording of the capture of this trace's graphs, if it was given beside."""
    identity: str = field(default="", repr=False, compare=False)
    """What the tables were made from: the key of a cached store, and the window; empty if it is unknown."""
    _kept: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    _parts: PartsLoader | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_tables(
        cls,
        tables: Mapping[str, pl.DataFrame],
        metadata: Metadata | None = None,
        warnings: tuple[TraceWarning, ...] = (),
    ) -> Trace:
        """Create a trace from frames in memory; missing tables are empty, and missing columns null."""
        unknown = sorted(set(tables) - set(SCHEMAS))
        if unknown:
            raise ValueError(f"no such tables: {', '.join(unknown)}")
        frames = {name: conform(name, tables[name]) if name in tables else empty(name) for name in SCHEMAS}
        return cls(metadata or Metadata(), warnings, lambda name: frames[name].lazy(), dict(frames))

    def with_capture(self, capture: Trace) -> Trace:
        """The trace whose graphs' kernels are also looked up in this recording of their capture."""
        return replace(self, capture=capture, _kept={})

    def kept(self, name: str, compute: Callable[[], _Kept]) -> _Kept:
        """Return what `compute` gives, computed once for this trace."""
        if name not in self._kept:
            self._kept[name] = compute()
        return self._kept[name]  # type: ignore[no-any-return]

    def table(self, name: str) -> pl.DataFrame:
        if name not in self._loaded:
            self._loaded[name] = self.scan(name).collect()
        return self._loaded[name]

    def scan(self, name: str) -> pl.LazyFrame:
        """Return the table for a lazy query, which reads only the columns it needs."""
        if name not in SCHEMAS:
            raise KeyError(name)
        return self._loaded[name].lazy() if name in self._loaded else self._load(name)

    def parts(self, name: str) -> list[Part]:
        """Return the parts in which a table is stored, in row order; a table that is not stored is one part."""
        if self._parts is not None:
            return self._parts(name)
        rows = self.table(name)
        return [Part(Span.of(rows), lambda *columns: rows.select(columns) if columns else rows)]

    @property
    def working_devices(self) -> list[str]:
        """The devices with any work, sorted; work without a device, in damaged files, belongs to no device."""
        return sorted(self.device_work["device"].unique().drop_nulls().to_list())

    def check(self) -> None:
        """Raise `InconsistentTraceError` unless every table is valid; see `stepscope.trace.tables.check`."""
        check(self.table)

    def save(self, directory: str | Path) -> None:
        """Write the trace as Parquet files into a new directory, complete or not at all."""
        save(self, directory)

    def what_if(self, **options: Any) -> Answer:
        """How long a step would take if something were different, as `stepscope whatif` says it.

            trace.what_if(remove="input")    trace.what_if(graphs=True, scale=["aten::mm=0.5"])

        Args:
            options: those of the command, with _ for -; without any, what each cause costs.

        Raises UsageError if an option is wrong, or does not fit the trace.
        """
        import stepscope

        return stepscope.what_if(self, options)  # type: ignore[no-any-return]

    def predict(self, to: str, **options: Any) -> PredictedSteps:
        """The steps on other devices, as `stepscope predict` says it: `trace.predict("H100-SXM", precision="bf16")`.

        Args:
            to: names of devices, separated by commas; `stepscope devices` lists them.
            options: those of the command, with _ for -.

        Raises UsageError if an option is wrong, or nothing recorded takes time.
        """
        import stepscope

        return stepscope.predicted(self, {"to": to, **options})  # type: ignore[no-any-return]

    def memory_use(self, device: str | None = None) -> MemorySummary:
        """What memory was used for, as `stepscope memory` says it.

        Args:
            device: "cpu" or a number; None for the one with the highest peak.

        Raises UsageError if no allocations of it were recorded.
        """
        import stepscope

        return stepscope.memory_use(self, device)  # type: ignore[no-any-return]

    def view(self, height: int = 700) -> Any:
        """The interactive page as a widget of a notebook; it needs `pip install 'stepscope[notebook]'`.

        Args:
            height: in pixels.

        Raises UsageError if anywidget is not installed.
        """
        import stepscope

        return stepscope.page_widget(self, height)


XLA_FORMATS: Final = ("xplane", "xla_json")
"""Formats of XLA's profiler, for JAX, PyTorch/XLA and TensorFlow: operators are events of the runtime, and the host
runs far ahead of the devices.
"""


VERSION: Final = 2
PART_ROWS: Final = 500_000
MANIFEST: Final = "store.json"
CONTENTS: Final = "contents.json"


class Span(msgspec.Struct, array_like=True, frozen=True):
    """What rows of a table are about, so that a reader of a window knows whether it needs them.

    Attributes:
        rows: how many.
        first_ns, last_ns, end_ns: the first and the last start, and the last end; 0 in tables without times.
        correlations: the smallest and the largest correlation number; None if no row has one.
    """

    rows: int
    first_ns: int = 0
    last_ns: int = 0
    end_ns: int = 0
    correlations: tuple[int, int] | None = None

    @classmethod
    def of(cls, frame: pl.DataFrame) -> Span:
        if "start_ns" not in frame.columns or not frame.height:
            return cls(frame.height)
        start = frame["start_ns"]
        ends = (start + frame["duration_ns"]).max() if "duration_ns" in frame.columns else start[-1]
        numbers = frame["correlation"] if "correlation" in frame.columns else pl.Series([], dtype=pl.Int64)
        least, most = numbers.min(), numbers.max()
        known = None if least is None or most is None else (int(least), int(most))  # type: ignore[arg-type]
        return cls(frame.height, start[0], start[-1], int(ends), known)


class Part(NamedTuple):
    """A part of a table; `read` returns these columns of its rows, or all, those it lacks as nulls.

    `read` raises UnreadableTraceError if the part is damaged.
    """

    span: Span
    read: Callable[..., pl.DataFrame]


class Manifest(msgspec.Struct, kw_only=True):
    """The content of store.json; fields added later have defaults, so that older stores can be read."""

    version: int
    metadata: Metadata
    warnings: tuple[TraceWarning, ...] = ()
    parts: dict[str, int] = {}
    spans: dict[str, list[Span]] = {}


class Contents(msgspec.Struct, kw_only=True):
    """The content of contents.json: the key of the store, and the 128-bit XXH3 checksum of each other file."""

    kept_as: str
    checksums: dict[str, str]


class StoreWriter:
    """Writes tables part by part into `directory`, which must exist; the store is complete after `finish`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._spans: dict[str, list[Span]] = {}

    def write_part(self, table: str, frame: pl.DataFrame) -> None:
        """Append rows to a table; they must follow those already written. Columns with only nulls are not written."""
        spans = self._spans.setdefault(table, [])
        _write(frame, self.directory / f"{table}-{len(spans):05}.parquet")
        spans.append(Span.of(frame))

    def scan(self, table: str) -> pl.LazyFrame:
        paths = self._paths(table)
        return scan(table, paths)

    def change(self, table: str, change: Callable[[pl.DataFrame, int], pl.DataFrame]) -> None:
        """Rewrite every part with the result of `change`, which gets the part and the number of its first row."""
        first = 0
        for number, path in enumerate(self._paths(table)):
            part = scan(table, [path]).collect()
            changed = path.with_suffix(".changed")
            rows = change(part, first)
            _write(rows, changed)
            os.replace(changed, path)
            self._spans[table][number] = Span.of(rows)
            first += part.height

    def _paths(self, table: str) -> list[Path]:
        return [self.directory / f"{table}-{number:05}.parquet" for number in range(len(self._spans.get(table, ())))]

    def finish(self, metadata: Metadata, warnings: tuple[TraceWarning, ...]) -> None:
        """Write the manifest, which makes the store valid; invalid UTF-8 in its text is escaped."""
        parts = {table: len(spans) for table, spans in self._spans.items()}
        manifest = Manifest(version=VERSION, metadata=metadata, warnings=warnings, parts=parts, spans=self._spans)
        manifest = msgspec.convert(encodable_values(msgspec.to_builtins(manifest)), Manifest)
        (self.directory / MANIFEST).write_bytes(msgspec.json.encode(manifest))


def encodable_values(value: Any) -> Any:
    """Plain values with lone surrogates escaped, which paths and headers may contain."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {encodable_values(key): encodable_values(each) for key, each in value.items()}
    return [encodable_values(each) for each in value] if isinstance(value, (list, tuple)) else value


def _write(frame: pl.DataFrame, path: Path) -> None:
    """Write a part without its all-null columns, which saves a third of the time."""
    filled = [name for name in frame.columns if frame[name].null_count() < frame.height]
    (frame.select(filled) if filled else frame).write_parquet(path, compression="lz4", row_group_size=PART_ROWS)


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


def save(trace: Trace, directory: str | Path) -> None:
    """Write a trace into a new directory, complete or not at all.

    Raises CacheError if the directory already exists or cannot be written.
    """
    target = Path(directory)
    if target.exists():
        raise CacheError(f"{target} already exists; a trace is saved to a new directory")
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


_opened: Final[set[Path]] = set()
"""Stores opened by this process, whose files are checked again if a table cannot be read later."""


def is_store(directory: Path) -> bool:
    """Whether the directory holds a complete store."""
    return (directory / MANIFEST).is_file()


def open_store(directory: Path) -> Trace:
    """Open the trace in a directory written by `Trace.save`; each table's checksum is verified on first access.

    Raises UnreadableTraceError if there is no store, its manifest is damaged, or its version is newer.
    """
    manifest = _manifest(directory)
    contents = _contents(directory)
    _compare(directory, contents, [MANIFEST])
    _opened.add(directory)
    return _trace(directory, manifest, None, contents)


def open_kept(directory: Path, owner: object, kept_as: str, *, lazily: bool = False) -> Trace:
    """Open the trace in a directory sealed under that name, after verifying every file's checksum.

    Args:
        lazily: verify each table, or each part that is read alone, when it is read.

    Raises UnreadableTraceError if a file was changed, added or removed.
    """
    contents = _contents(directory)
    if contents.kept_as != kept_as:
        raise UnreadableTraceError(f"the stored trace {directory} is damaged: it belongs to another file")
    _compare(directory, contents, [MANIFEST] if lazily else names_in(directory) | contents.checksums.keys())
    _opened.add(directory)
    return _trace(directory, _manifest(directory), owner, contents if lazily else None)


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
        raise UnreadableTraceError(f"{directory} contains no readable trace: {error}") from error
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
            f"the stored trace {directory} is damaged: {CONTENTS} contains no checksums"
        ) from error


def _compare(directory: Path, contents: Contents, names: Iterable[str]) -> None:
    for name in sorted(names):
        place = directory / name
        try:
            same = place.is_file() and contents.checksums.get(name) == checksum(place)
        except OSError:
            same = False
        if not same:
            what = "has changed since it was written" if place.exists() else "is missing"
            raise UnreadableTraceError(f"the stored trace {directory} is damaged: its file {name} {what}")


def _trace(directory: Path, manifest: Manifest, owner: object, unchecked: Contents | None) -> Trace:
    """With `unchecked`, a table's checksums are verified when it is first loaded."""
    checked: set[str] = set()

    def paths_of(table: str) -> list[Path]:
        return [directory / f"{table}-{number:05}.parquet" for number in range(manifest.parts.get(table, 0))]

    def verify(names: set[str]) -> None:
        if unchecked is not None:
            _compare(directory, unchecked, names - checked)
            checked.update(names)

    def load(table: str) -> pl.LazyFrame:
        paths = paths_of(table)
        verify({path.name for path in paths})
        missing = next((path for path in paths if not path.is_file()), None)
        if missing is not None:
            raise UnreadableTraceError(f"the stored trace {directory} is missing its file {missing.name}")
        return scan(table, paths)

    def read(table: str, path: Path, *columns: str) -> pl.DataFrame:
        verify({path.name})
        rows = scan(table, [path])
        return (rows.select(columns) if columns else rows).collect()

    def parts(table: str) -> list[Part]:
        paths, spans = paths_of(table), manifest.spans.get(table, [])
        if len(spans) != len(paths):  # of an older store
            spans = [Span.of(read(table, path)) for path in paths]
        return [Part(span, partial(read, table, path)) for span, path in zip(spans, paths, strict=True)]

    return Trace(manifest.metadata, manifest.warnings, load, {}, owner, _parts=parts)
