"""The running summary of watched jobs: a SQLite file with one row for each recording of `stepscope watch`.

Its size is bounded: beyond `MOST_ROWS` recordings the oldest of all jobs are forgotten.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from stepscope.record.run_folder import data_folder
from stepscope.record.runs import KeptDatabase, checksum_of

MOST_ROWS: Final = 20_000
"""Of all jobs together, of about 1 KB each: 138 days of one job at one recording every ten minutes."""
_TABLE: Final = """
create table if not exists recordings (
    job text not null,
    unix_s real not null,
    content text not null,
    checksum integer not null,
    primary key (job, unix_s)
) without rowid
"""
_COLUMNS: Final = ["job", "unix_s", "content", "checksum"]
_log = logging.getLogger("stepscope.kept")


class AlertEvent(msgspec.Struct, frozen=True):
    """An alert that began or ended with a recording.

    Attributes:
        alert: as the user wrote it.
        value: of the alert's metric, in the metric's unit; of a change, the level since.
        limit: the threshold that was passed; None for a change.
        before: the level before a change; None for a threshold.
        growth: the cause that most of a step's growth is, where one is.
    """

    alert: str
    state: Literal["firing", "recovered"]
    value: float
    limit: float | None = None
    sentence: str = ""
    before: float | None = None
    growth: str | None = None


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """One recording of a job, and what was counted since the one before it. None is unknown.

    Attributes:
        unix_s: when the recording was asked for, wall-clock time.
        problem: why there is no recording; None if there is one.
        first_step: the number of the first recorded step.
        steps: complete steps in each rank's recording.
        ranks: processes that were recorded.
        step_ns: mean of the steps since the recording before, which no profiler slowed down.
        recorded_step_ns: mean of the recorded steps of all ranks.
        basis: whether `causes` are those of the device's idle time or of the main thread's time.
        causes: nanoseconds per step by cause, mean of the ranks.
        communication_ns: per step in which a rank only communicates, mean of the ranks.
        late_rank: the rank that made the others wait longest.
        wait_ns: mean wait of a rank for the last one, per step.
        memory_bytes: of the largest process.
        device_bytes: allocated by the process that has most on its devices.
        cost_s: time that the recording took from the job.
        interval_s: planned time from this recording to the next.
        finding: title of the first finding.
        traces: files that are still kept.
    """

    job: str
    unix_s: float
    problem: str | None = None
    first_step: int | None = None
    steps: int = 0
    ranks: int = 0
    step_ns: float | None = None
    recorded_step_ns: float | None = None
    basis: Literal["device", "host"] = "device"
    causes: dict[str, float] = {}
    communication_ns: float | None = None
    late_rank: str | None = None
    wait_ns: float | None = None
    memory_bytes: int | None = None
    device_bytes: int | None = None
    cost_s: float | None = None
    interval_s: float | None = None
    finding: str | None = None
    events: tuple[AlertEvent, ...] = ()
    traces: tuple[str, ...] = ()


class WatchLog(KeptDatabase):
    """Recordings of watched jobs, by default those in `watch.sqlite` in `data_folder()`."""

    what = "the log of watched jobs"
    follows = "a new one is begun"

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path or data_folder() / "watch.sqlite")

    def put(self, *recordings: Watched) -> None:
        """Add recordings, or replace those of the same job and time. Raises UsageError if they cannot be written."""
        rows = [(each.job, each.unix_s, msgspec.json.encode(each).decode()) for each in recordings]

        def write(database: sqlite3.Connection) -> None:
            database.executemany(
                "insert or replace into recordings values (?, ?, ?, ?)", [(*row, checksum_of(row)) for row in rows]
            )
            database.execute(
                "delete from recordings where (job, unix_s) in "
                "(select job, unix_s from recordings order by unix_s desc limit -1 offset ?)",
                (MOST_ROWS,),
            )

        self._using(write)

    def jobs(self) -> dict[str, float]:
        """Names of the watched jobs and when each was recorded last, the latest first; none without a file."""
        if not self.path.exists():
            return {}
        query = "select job, max(unix_s) from recordings where typeof(unix_s) = 'real' group by job order by 2 desc"
        return {
            str(job): float(unix_s) for job, unix_s in self._using(lambda database: database.execute(query).fetchall())
        }

    def of(self, job: str, *, last: int) -> list[Watched]:
        """The last recordings of a job, the earliest first. Damaged rows are left out with a message."""
        query = "select * from recordings where job = ? order by unix_s desc limit ?"
        rows = self._using(lambda database: database.execute(query, (job, last)).fetchall())
        found = [each for each in map(_whole, rows) if each is not None]
        if len(found) < len(rows):
            _log.warning(
                "%s, %s, was damaged in %d of %d rows", self.what, self.path, len(rows) - len(found), len(rows)
            )
        return found[::-1]

    def _create(self, database: sqlite3.Connection) -> None:
        database.execute(_TABLE)
        if [row[1] for row in database.execute("pragma table_info(recordings)")] != _COLUMNS:
            raise sqlite3.DatabaseError("this is not a log of watched jobs")


def _whole(row: Sequence[object]) -> Watched | None:
    *values, checksum = row
    if checksum != checksum_of(values):
        return None
    try:
        return msgspec.json.decode(str(values[-1]), type=Watched)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
