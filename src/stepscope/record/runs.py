"""The index of runs: a SQLite file that finds run folders by name.

It holds nothing that the run folders do not, and is rebuilt from them if it is lost or a row's checksum is wrong. Any
number of processes may use it at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from stepscope.errors import StepscopeError, UsageError
from stepscope.files import keep_limit, kept_limit, private_file, private_folder
from stepscope.record.run_folder import RunFolder, check_name, data_folder, default_root, is_run_folder

_PATIENCE_S: Final = 15.0
_TABLE: Final = """
create table if not exists runs (
    path text primary key,
    name text not null,
    command text not null,
    started_unix_s real not null,
    ended_unix_s real,
    exit_code integer,
    traces integer not null,
    checksum integer
) without rowid
"""
_Result = TypeVar("_Result")
_log = logging.getLogger("stepscope.kept")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run in the index.

    Attributes:
        command: the program and its arguments, quoted for a shell.
        started_unix_s, ended_unix_s: wall-clock times; no end while the program runs, or if it was killed.
        traces: number of traces.
    """

    path: Path
    name: str
    command: str
    started_unix_s: float
    ended_unix_s: float | None
    exit_code: int | None
    traces: int

    @property
    def is_gone(self) -> bool:
        """Whether the folder was removed or moved without the index."""
        return not is_run_folder(self.path)


class KeptDatabase:
    """A SQLite file for its owner only, which any number of processes use at once; a damaged one is set aside.

    Attributes:
        what: the file's name in messages.
        follows: what becomes of a damaged one's content, for the message about it.
    """

    what: ClassVar[str]
    follows: ClassVar[str]

    def __init__(self, path: Path) -> None:
        self.path = path

    def _create(self, database: sqlite3.Connection) -> None:
        """Make the tables of a new file. Raises sqlite3.DatabaseError if it has others."""
        raise NotImplementedError

    def _using(self, action: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """Run an action on the database in a transaction; a missing or damaged file is made anew before.

        Raises UsageError if it cannot be read or written.
        """
        try:
            private_folder(self.path.parent, tighten="STEPSCOPE_DATA_DIR" not in os.environ)
            try:
                return self._tried(action)
            except sqlite3.OperationalError:
                raise  # locked, no space, no permission: the file itself is intact
            except sqlite3.DatabaseError as error:
                self._set_aside(error)
                return self._tried(action)
        except (sqlite3.Error, OSError) as error:
            raise UsageError(f"{self.what}, {self.path}, cannot be used: {error}") from error

    def _tried(self, action: Callable[[sqlite3.Connection], _Result]) -> _Result:
        database = self._prepared()
        try:
            with database:
                return action(database)
        finally:
            database.close()

    def _prepared(self) -> sqlite3.Connection:
        database = sqlite3.connect(private_file(self.path), timeout=_PATIENCE_S)
        database.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
        with contextlib.ExitStack() as unless_usable:
            unless_usable.callback(database.close)
            database.execute("pragma journal_mode = wal")
            if database.execute("pragma quick_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("its pages contradict each other")
            self._create(database)
            unless_usable.pop_all()
        return database

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        """Rename a damaged file."""
        os.replace(self.path, self.path.with_name(f"{self.path.name}.damaged"))
        _log.warning("%s, %s, is damaged (%s) and %s", self.what, self.path, error, self.follows)
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)


class RunIndex(KeptDatabase):
    """The runs this user has recorded, by default those in `runs.sqlite` in `data_folder()`."""

    what = "the index of runs"
    follows = "is rebuilt from the run folders"

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path or data_folder() / "runs.sqlite")
        self._root = default_root() if path is None else path.parent / "runs"

    def add(self, folder: RunFolder) -> RunRecord:
        record = _record(folder)
        self._using(lambda database: _put(database, [record]))
        return record

    def add_all(self, root: Path) -> list[RunRecord]:
        """Add a run folder, or every run folder directly below it; unreadable ones are skipped."""
        places = [root] if is_run_folder(root) else sorted(root.iterdir()) if root.is_dir() else []
        records = list(_records(places))
        self._using(lambda database: _put(database, records))
        return records

    def all(self) -> list[RunRecord]:
        """Return all runs, the latest first."""
        records = self._using(self._whole_rows)
        return sorted(records, key=lambda record: (-record.started_unix_s, record.path))

    def find(self, name: str) -> RunRecord | None:
        """Return the latest run of that name, preferring one whose folder still exists."""
        named = [record for record in self.all() if record.name == name]
        return next((record for record in named if not record.is_gone), named[0] if named else None)

    def meant(self, name: str) -> RunRecord | None:
        """Return the run that a name means: its own name, "latest", "@2" for the one before, or its beginning.

        Of several names with that beginning it is the latest; only an exact name finds a run whose folder is gone.
        """
        if (exact := self.find(name)) is not None:
            return exact
        there = [record for record in self.all() if not record.is_gone]
        place = 1 if name == "latest" else int(name[1:]) if re.fullmatch(r"@[1-9]\d{0,5}", name) else 0
        if place:
            return there[place - 1] if place <= len(there) else None
        return next((record for record in there if len(name) > 1 and record.name.startswith(name)), None)

    def rename(self, record: RunRecord, name: str) -> RunRecord:
        """Rename a run and its folder.

        Raises UsageError if the name is invalid or taken, or the folder is gone or cannot be renamed.
        """
        check_name(name)
        place = record.path.with_name(name)
        if os.path.lexists(place):
            raise UsageError(f"there is already a run {name!r} in {place.parent}; choose another name, or remove it")
        try:
            os.rename(record.path, place)
        except OSError as error:
            raise UsageError(f"{record.path} cannot be renamed: {error.strerror}") from error
        self._forget(record)
        renamed = RunFolder.open(place)
        with contextlib.suppress(OSError):
            renamed.mark_named()
        return self.add(renamed)

    def limit(self) -> int | None:
        """The bytes that all runs together may take; None without a limit, or if it cannot be read."""
        try:
            return kept_limit(self._root)
        except (OSError, ValueError) as error:
            _log.warning("the limit of the runs in %s cannot be read, so that none is removed: %s", self._root, error)
            return None

    def set_limit(self, limit_bytes: int | None) -> None:
        """Set the limit, or remove it with None; no run is removed yet. Raises UsageError if it cannot be saved."""
        try:
            if limit_bytes is None:
                (self._root / "limit.json").unlink(missing_ok=True)
            else:
                private_folder(self._root, tighten=self._root == default_root())
                keep_limit(self._root, limit_bytes)
        except OSError as error:
            raise UsageError(f"the limit cannot be saved in {self._root}: {error.strerror}") from error

    def beyond_limit(self) -> list[tuple[RunRecord, int]]:
        """The runs that the limit removes, the oldest first, each with its size in bytes.

        A run stays if it is the latest, has not ended, was named by the user, or lies in another folder than the
        user's own for runs; only sizes of runs in there count.
        """
        limit = self.limit()
        if limit is None:
            return []
        here = [record for record in self.all() if record.path.parent == self._root and not record.is_gone]
        sizes = [RunFolder.open(record.path).bytes for record in here]
        excess, found = sum(sizes) - limit, []
        for record, taken in list(zip(here, sizes, strict=True))[:0:-1]:
            if excess <= 0:
                break
            if record.ended_unix_s is not None and not RunFolder.open(record.path).is_named:
                found.append((record, taken))
                excess -= taken
        return found

    def remove(self, record: RunRecord) -> None:
        """Delete a run's folder with all its content, and remove the run from the index.

        Raises UsageError if the folder cannot be removed.
        """
        if not record.is_gone:
            try:
                if record.path.is_symlink():
                    record.path.unlink()
                else:
                    shutil.rmtree(record.path)
            except OSError as error:
                raise UsageError(f"{record.path} cannot be removed: {error.strerror}") from error
        self._forget(record)

    def _forget(self, record: RunRecord) -> None:
        self._using(lambda database: database.execute("delete from runs where path = ?", (os.fspath(record.path),)))

    def _whole_rows(self, database: sqlite3.Connection) -> list[RunRecord]:
        """Return the runs; if rows are damaged, read the folders instead."""
        rows = database.execute(f"select {', '.join(_COLUMNS)}, checksum from runs").fetchall()
        whole = [RunRecord(Path(row[0]), *row[1:-1]) for row in rows if _is_whole(row)]
        if len(whole) == len(rows):
            return whole
        database.execute("delete from runs")
        _put(database, [*whole, *self._found()])
        damaged = "the index of runs, %s, was damaged in %d of %d rows and is rebuilt from the run folders"
        _log.warning(damaged, self.path, len(rows) - len(whole), len(rows))
        return self._whole_rows(database)

    def _found(self) -> Iterator[RunRecord]:
        return _records(sorted(self._root.iterdir())) if self._root.is_dir() else iter(())

    def _create(self, database: sqlite3.Connection) -> None:
        is_new = not database.execute("pragma table_info(runs)").fetchall()
        database.execute(_TABLE)
        columns = [row[1] for row in database.execute("pragma table_info(runs)")]
        if columns == _COLUMNS:  # a row of the first version
            database.execute("alter table runs add column checksum integer")
        elif columns != [*_COLUMNS, "checksum"]:
            raise sqlite3.DatabaseError("this is not an index of runs")
        if is_new:
            with database:
                _put(database, self._found())


def run_named(name: str) -> RunFolder | None:
    """Return the folder of the run that a name means, see `RunIndex.meant`; None if there is none.

    Raises UsageError if the run is known, but its folder is gone.
    """
    index = RunIndex()
    if not index.path.exists() and not default_root().is_dir():
        return None
    record = index.meant(name)
    if record is None:
        return None
    if record.is_gone:
        raise UsageError(f"the folder of the run {name}, {record.path}, is gone")
    return RunFolder.open(record.path)


def run_at(path: str | Path) -> RunFolder | None:
    """Return the run of a path: its folder, or what `run_named` finds where there is no such path; else None."""
    if is_run_folder(path):
        return RunFolder.open(path)
    text = str(path)
    return None if text == "-" or os.path.exists(path) or os.sep in text else run_named(text)


@dataclass(frozen=True, slots=True)
class OwnNames:
    """How the user would name what was recorded in a command; "" if unknown.

    Attributes:
        trace: the run's name if that finds it, with the rank if there are several; else the trace's path.
        program: the script and its arguments, as for `stepscope run`.
        command: the same after its interpreter.
    """

    trace: str = ""
    program: str = ""
    command: str = ""


def own_names(trace: str) -> OwnNames:
    """The names for a trace's file. A run's folder that is damaged gives only the path."""
    if trace in ("", "-"):
        return OwnNames()
    path = Path(trace)
    folder = path.parent.parent
    if not is_run_folder(folder):
        return OwnNames(shlex.quote(trace))
    run = RunFolder.open(folder)
    name = run.name if folder.absolute() == default_root().absolute() / run.name else str(folder)
    name = f"{name}/{path.parent.name}" if len(run.ranks()) > 1 else name
    try:
        words = list(run.manifest().command)
    except UsageError:
        return OwnNames(shlex.quote(name))
    if not words:
        return OwnNames(shlex.quote(name))
    interpreter = os.path.basename(words[0])
    is_python = interpreter.startswith("python")
    command = " ".join(word if "***" in word else shlex.quote(word) for word in [interpreter, *words[1:]])
    is_script = is_python and len(words) > 1 and words[1].endswith(".py")
    return OwnNames(shlex.quote(name), command.partition(" ")[2] if is_script else command, command)


def _records(places: Iterable[Path]) -> Iterator[RunRecord]:
    for place in places:
        if is_run_folder(place):
            try:
                yield _record(RunFolder.open(place))
            except StepscopeError as error:
                _log.warning("skipped: %s", error)


def _record(folder: RunFolder) -> RunRecord:
    manifest = folder.manifest()
    return RunRecord(
        folder.path,
        folder.name,
        manifest.command_line,
        float(manifest.started_unix_s),
        None if manifest.ended_unix_s is None else float(manifest.ended_unix_s),
        manifest.exit_code,
        traces=len(folder.traces()),
    )


def _put(database: sqlite3.Connection, records: Iterable[RunRecord]) -> None:
    rows = [(os.fspath(record.path), *(getattr(record, name) for name in _COLUMNS[1:])) for record in records]
    database.executemany(
        f"insert or replace into runs ({', '.join(_COLUMNS)}, checksum) values (?, ?, ?, ?, ?, ?, ?, ?)",
        [(*row, checksum_of(row)) for row in rows],
    )


def _is_whole(row: tuple[object, ...]) -> bool:
    """Whether a row matches its checksum or, in the first version without checksums, has the right types."""
    *values, checksum = row
    fits = all(isinstance(value, kind) for value, kind in zip(values, _TYPES, strict=True))
    return fits and checksum in (None, checksum_of(values))


def checksum_of(values: Iterable[object]) -> int:
    return zlib.crc32(repr(list(values)).encode())


_COLUMNS: Final = list(RunRecord.__dataclass_fields__)
_TYPES: Final[tuple[Any, ...]] = (str, str, str, float, (float, type(None)), (int, type(None)), int)
