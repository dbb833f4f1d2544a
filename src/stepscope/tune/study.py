"""Open Optuna's study in a database that many processes write to, and detect which of them are alive.

A place is a file, which becomes an SQLite database, or a URL of any database that Optuna's RDBStorage supports, such as
`postgresql://...`. Here SQLite begins every transaction as a writer: a transaction that reads first and then writes is
refused at once if another process wrote in between, whatever its timeout, and two processes could take the same
trial. On local file systems readers do not wait for writers (a write-ahead log, which does not work over a network).

A process that takes a trial stores its name there and, every half minute, the time. If the process is gone (known at
once on this machine, after some minutes of silence on another one), its work is repeated.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sqlite3
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from stepscope.errors import UsageError
from stepscope.files import private_file, private_folder

if TYPE_CHECKING:
    import optuna


try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_LOOK_S: Final = 0.1
OWNER: Final = "owner"
BEAT: Final = "beat"
BEAT_S: Final = 30.0
SILENT_S: Final = 300.0
"""A process of another machine is dead after this silence; clocks may differ by a part of it."""


@contextlib.contextmanager
def held(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock on the file at `path`, which is created if missing and not removed.

    On a system without such locks, nothing is held.

    Args:
        waiting: called once if another process holds it.

    Raises:
        UsageError: the file cannot be created.
    """
    try:
        private_folder(path.parent, tighten=False)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    except OSError as error:
        raise UsageError(f"{path} cannot be locked: {error.strerror}") from error
    try:
        if not _take(handle):
            waiting()
            while not _take(handle):
                time.sleep(_LOOK_S)
        yield
    finally:
        os.close(handle)  # which releases the lock


def _take(handle: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


_SQLITE: Final = "sqlite:///"
_WAIT_S: Final = 120.0
"""How long a process waits for other writers."""
_LOCAL: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "apfs"})
"""File systems on which a write-ahead log works."""


def import_optuna() -> Any:
    """Import optuna, which takes long, with only its warnings shown."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_study(
    place: str | Path,
    name: str,
    *,
    direction: Literal["minimize", "maximize"] = "minimize",
    sampler: optuna.samplers.BaseSampler | None = None,
    pruner: optuna.pruners.BasePruner | None = None,
    create: bool = True,
) -> optuna.Study:
    """Open the study of that name; create it if missing.

    Args:
        place: a file, or the URL of a database.
        create: False if it must already exist.

    Raises:
        UsageError: Optuna is missing, the database cannot be opened or holds something else, or there is no such study.
    """
    package = import_optuna()
    storage = open_storage(place)
    make = package.load_study
    if create:
        make = partial(package.create_study, direction=direction, load_if_exists=True)
    with _explained(place):
        try:
            study = make(study_name=name, storage=storage, sampler=sampler, pruner=pruner)
        except KeyError:
            known = ", ".join(sorted(package.get_all_study_names(storage))[:10])
            has = f"it has {known}" if known else "it has none"
            raise UsageError(f"{_shown(place)} has no study {name!r}; {has}") from None
        try:  # Optuna decodes stored values on access, and raises whatever that gives
            _ = study.user_attrs, study.get_trials(deepcopy=False)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
            raise UsageError(f"the study {name} in {_shown(place)} is damaged: {error}") from error
        return study  # type: ignore[no-any-return]


def open_storage(place: str | Path) -> optuna.storages.RDBStorage:
    """Open the storage at that place; create it if missing.

    Raises UsageError if Optuna is missing, or the database cannot be opened or holds something else.
    """
    package = import_optuna()
    file = _file_of(place)
    if file is None:
        with _explained(place):
            return package.storages.RDBStorage(str(place))  # type: ignore[no-any-return]
    with held(file.with_name(file.name + ".lock")), _explained(place):  # two processes cannot create the tables at once
        _check(file)
        private_file(file)
        storage = package.storages.RDBStorage(f"{_SQLITE}{file}", engine_kwargs={"connect_args": {"timeout": _WAIT_S}})
        _write_in_turn(storage.engine, with_log=_is_local(file))
    return storage  # type: ignore[no-any-return]


def _file_of(place: str | Path) -> Path | None:
    text = str(place)
    if text.startswith(_SQLITE):
        return Path(os.path.abspath(text.removeprefix(_SQLITE)))
    return None if "://" in text else Path(os.path.abspath(text))


def _check(file: Path) -> None:
    """Refuse a file that is not a study, before Optuna writes its tables into it."""
    if not file.exists() or (file.is_file() and file.stat().st_size == 0):
        return
    if not file.is_file():
        raise UsageError(f"{file} is not a file; name the SQLite database of a study")
    with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=_WAIT_S)) as database:
        if database.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise UsageError(f"the study in {file} is damaged: its pages contradict each other")
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and not {"studies", "trials"} <= tables:
        raise UsageError(
            f"{file} is an SQLite database, but not Optuna's: it has the tables {', '.join(sorted(tables)[:5])}"
        )


def _write_in_turn(engine: Any, *, with_log: bool) -> None:
    """Make every transaction of the engine begin as a writer, including reads."""
    from sqlalchemy import event

    def connected(connection: sqlite3.Connection, record: object) -> None:
        connection.isolation_level = None  # Python's sqlite3 begins no transaction of its own
        if with_log:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")

    def begins(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    engine.dispose()  # the connections that created the tables
    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begins)


def _is_local(file: Path) -> bool:
    """Whether the file's folder is on a local file system; False if the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        device = os.stat(file.parent).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2] == number:
                return after.split()[0] in _LOCAL
    return False


@contextlib.contextmanager
def _explained(place: str | Path) -> Iterator[None]:
    """Turn a failure to open the database into one sentence."""
    from sqlalchemy.exc import SQLAlchemyError

    package = import_optuna()
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, ImportError, RuntimeError, package.exceptions.OptunaError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"the study in {_shown(place)} cannot be opened: {_reason(error)}") from error


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress Optuna's notes about experimental features, and its error that a trial has ended.

    A trial has ended if this process was silent for so long that another one assumed it dead: that one's repeat counts.

    Raises:
        UsageError: the database does not answer.
    """
    package = import_optuna()
    from sqlalchemy.exc import SQLAlchemyError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except package.exceptions.UpdateFinishedTrialError:
            pass
        except (package.exceptions.StorageInternalError, SQLAlchemyError) as error:
            raise UsageError(f"the study cannot be written: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    lines = str(getattr(error, "orig", None) or error.__cause__ or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _shown(place: str | Path) -> str:
    text = str(place)
    if "://" not in text:
        return text
    kind, rest = text.split("://", 1)
    return f"{kind}://{rest.rsplit('@', 1)[-1]}"


class SharedStudy:
    """A study whose trials are taken by several processes."""

    def __init__(self, study: optuna.Study) -> None:
        self.study = study
        self.owner = process_name()

    def take(self, trial: optuna.Trial) -> None:
        self.note(trial, OWNER, self.owner)
        self.beat(trial)

    def beat(self, trial: optuna.Trial) -> None:
        """Record that this process is alive."""
        self.note(trial, BEAT, time.time())

    def note(self, trial: optuna.Trial, key: str, value: Any) -> None:
        with quietly():
            trial.set_user_attr(key, value)

    def end(self, trial: optuna.Trial, state: str) -> None:
        """End the trial without a value: "FAIL" or "PRUNED"."""
        with quietly():
            self.study.tell(trial, state=import_optuna().trial.TrialState[state], skip_if_finished=True)

    def is_lost(self, trial: optuna.trial.FrozenTrial) -> bool:
        """Whether the process that took the trial is gone; False if no process is recorded."""
        owner, beat = trial.user_attrs.get(OWNER), trial.user_attrs.get(BEAT)
        if not isinstance(owner, dict):
            return False
        if owner.get("machine") == self.owner["machine"]:
            return not is_alive(owner)
        return not isinstance(beat, (int, float)) or time.time() - beat > SILENT_S


def process_name() -> dict[str, Any]:
    """Identify this process among all processes of all machines."""
    parts = [platform.node()]
    with contextlib.suppress(OSError, ValueError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))  # in a container, its PID namespace
    return {"machine": " ".join(parts), "process": os.getpid(), "started": _started(os.getpid())}


def is_alive(owner: Mapping[str, Any]) -> bool:
    process = owner.get("process")
    if type(process) is not int or process <= 0:
        return False
    if os.path.isdir("/proc/self"):
        return _started(process) == owner.get("started") is not None
    if sys.platform == "win32":  # there signal 0 is Ctrl+C
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it exists and belongs to another user
        return True
    return True


def _started(process: int) -> str | None:
    """Start time in the system's own units; None if the process is gone or the system does not say."""
    with contextlib.suppress(OSError, IndexError):
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        words = text.rpartition(")")[2].split()
        return None if words[0] in ("Z", "X") else words[19]  # a zombie: ended, but not yet waited for
    return None
