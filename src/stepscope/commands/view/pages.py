"""What one page shows: the traces that the command line names, opened when they are asked for, and their documents."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import threading
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stepscope.commands.read.diagnose import MOST_ROWS
from stepscope.commands.read.documents import MAKERS, OpenTrace, available, session_of
from stepscope.commands.shared.reading import open_from, side_files, trace_paths, with_evidence
from stepscope.commands.view.choices import CHOICES
from stepscope.errors import TraceError, UsageError
from stepscope.view.documents import NoDocument, Options

if TYPE_CHECKING:
    from stepscope.record.runs import RunIndex
    from stepscope.trace import Trace

_KEPT: Final = 2
"""Traces that stay open: the one looked at, and the one before it."""
_SCOPE: Final = ("run", "traces", "rank", "other")
"""Options of an address that choose the trace, the same for every document; a run's number of traces grows."""
_RANK: Final = re.compile(r"rank[-_.]?0*(\d+)")


class Job:
    """The traces of one path: one, or one for each rank.

    Args:
        path: a trace, a folder of traces, or a run.
        others: the further paths of the command line, which it can be compared with.
    """

    def __init__(self, arguments: argparse.Namespace, path: str, others: tuple[str, ...] = ()) -> None:
        self.arguments = argparse.Namespace(**vars(arguments))
        self.path, self.others = path, others
        self.files = trace_paths(path)
        self.unreadable: list[str] = []
        self._lock = threading.Lock()
        self._open: dict[Path, OpenTrace] = {}
        self._opening: dict[Path, threading.Lock] = {}
        self._seen: dict[Path, FileState | None] = {}
        self._ranks: dict[Path, int | None] = {}
        self._others: dict[str, Job] = {}

    def document(self, name: str, options: Options) -> Any:
        """A document; with the option "other" that of one of the further paths, by its number."""
        if "other" in options:
            further = {key: value for key, value in options.items() if key != "other"}
            return self._other(options["other"]).document(name, further)
        if name == "ranks":
            return self.ranks.document(options)
        if name in CHOICES:
            return CHOICES[name](self, options)
        if name not in MAKERS:
            raise NoDocument(f"the page has no document {name[:50]!r}")
        return MAKERS[name](self.opened(options), options)

    def _other(self, number: str) -> Job:
        if number not in map(str, range(len(self.others))):
            raise NoDocument("that was not named on the command line")
        with self._lock:
            if number not in self._others:
                self._others[number] = Job(self.arguments, self.others[int(number)])
            return self._others[number]

    @property
    def documents(self) -> list[str]:
        """Names of the documents that can be had."""
        trace = self.opened({}).trace
        is_timed = not (trace.operators.is_empty() and trace.device_work.is_empty())  # else there is nothing to replay
        return [
            *available(trace),
            *(name for name in CHOICES if is_timed and (name != "compare" or self.others)),
            *(["ranks"] if len(self.files) > 1 else []),
        ]

    def opened(self, options: Options) -> OpenTrace:
        """The trace of the rank that is asked for; without one, the first that can be read.

        Raises:
            NoDocument: there is no such rank; a trace that tells no rank is named by its path.
        """
        if "rank" not in options:
            return self._first()
        wanted = options["rank"]
        known = [file for file, rank in list(self._ranks.items()) if str(rank) == wanted]
        likely = [file for file in self.files if wanted == str(file) or _RANK.findall(str(file))[-1:] == [wanted]]
        for file in dict.fromkeys([*likely, *known, *self.files]):  # the same whatever was opened before
            opened = self._opened(file)
            if opened is not None and wanted in (str(opened.trace.metadata.rank), str(file)):
                return opened
        raise NoDocument(f"there is no trace of rank {wanted[:20]}")

    @property
    def is_changed(self) -> bool:
        """Whether a trace that was opened is now another file, or the same with other content."""
        if self.path == "-":  # cannot be read again
            return False
        states = ((seen, state_of_file(file)) for file, seen in list(self._seen.items()))
        is_own = any(now is not None and now != seen for seen, now in states)
        return is_own or any(each.is_changed for each in list(self._others.values()))

    def _first(self) -> OpenTrace:
        for file in self.files:
            opened = self._opened(file)
            if opened is not None:
                return opened
        raise UsageError(f"no trace of {self.path} can be read: {self.unreadable[0]}")

    def _opened(self, file: Path) -> OpenTrace | None:
        """The trace of this file, opened once; None for a file of several that cannot be read."""
        with self._lock:
            if file in self._open:
                self._open[file] = self._open.pop(file)
                return self._open[file]
            opening = self._opening.setdefault(file, threading.Lock())
        with opening:
            return self._open.get(file) or self._read(file)

    def _read(self, file: Path) -> OpenTrace | None:
        self._seen.setdefault(file, state_of_file(file))  # before it is read, so that no change is missed
        try:
            opened = self.read(file)
        except TraceError as error:
            if len(self.files) == 1:
                raise
            if str(error) not in self.unreadable:
                self.unreadable.append(str(error))
            return None
        with self._lock:
            self._open[file] = opened
            self._ranks[file] = opened.trace.metadata.rank
            while len(self._open) > _KEPT:
                self._open.pop(next(iter(self._open)))
        return opened

    def read(self, file: Path) -> OpenTrace:
        """Open a trace: what is too large to diagnose at once is diagnosed in its middle, and drawn as a whole."""
        whole = open_from(self.arguments, file)
        is_all = str(file) == "-" or self.arguments.window or self.arguments.steps
        part = whole if is_all else self._middle(whole, file)
        [told] = with_evidence([part], self._side_files, several=len(self.files) > 1)
        return OpenTrace(self.arguments, told, None if part is whole else whole)

    def _middle(self, whole: Trace, file: Path) -> Trace:
        from stepscope.trace.excerpt import middle_of

        if middle_of(whole, MOST_ROWS) is None:
            return whole
        return open_from(argparse.Namespace(**vars(self.arguments), most_rows=MOST_ROWS), file)

    @cached_property
    def _side_files(self) -> list[Any]:
        return side_files(self.arguments)

    @cached_property
    def ranks(self) -> Ranks:
        return Ranks(self)


FileState: TypeAlias = tuple[int, int, int]


def state_of_file(file: Path) -> FileState | None:
    """What differs when a file is written again; None where there is no file."""
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


class Ranks:
    """The ranks of a job beside each other. One rank after another is read, and only its sums are kept."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def document(self, options: Options) -> dict[str, Any]:
        from stepscope.analysis.communication import matched_collectives
        from stepscope.view.drawings import ranks_json

        if len(self._job.files) < 2:
            raise NoDocument("there is one trace only")
        steps, records = self._read
        late = matched_collectives([record.collectives for record in records])
        content = ranks_json(steps, options.get("cause", ""), late, [finding.title for finding in self._across])
        return {**content, "unreadable": self._job.unreadable}

    @cached_property
    def _read(self) -> tuple[list[Any], list[Any]]:
        from stepscope.diagnosis.ranks import rank_record
        from stepscope.view.drawings import rank_steps

        found = []
        for opened in self._each():
            found.append((rank_steps(opened.view), rank_record(opened.trace, opened.view)))
        found.sort(key=lambda each: (each[0].rank is None, each[0].rank, each[0].path))
        if not found:
            raise UsageError(f"no trace of {self._job.path} can be read")
        return [steps for steps, _ in found], [record for _, record in found]

    def _each(self) -> Iterator[OpenTrace]:
        for file in self._job.files:
            try:
                yield self._job.read(file)
            except TraceError as error:
                if str(error) not in self._job.unreadable:
                    self._job.unreadable.append(str(error))

    @cached_property
    def _across(self) -> tuple[Any, ...]:
        from stepscope.diagnosis.ranks import across_ranks

        return across_ranks(self._read[1])


class Page:
    """The page of what the command line names: one job, or without a path the runs, one of which is open at a time."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._lock = threading.Lock()
        first, *others = arguments.paths or [None]
        self._named = None if first is None else Job(arguments, first, tuple(others))
        self._run: tuple[str, Job] | None = None

    def document(self, name: str, options: Options) -> Any:
        """The document of this name; in a page of runs, of the run that is asked for.

        Raises:
            NoDocument: there is none.
            UsageError: it needs something that the trace lacks, or the address is wrong.
        """
        if name == "session":
            return self._session(options)
        if name == "runs":
            return _runs(self._index)
        return self.job(options).document(name, options)

    def options(self, name: str) -> tuple[str, ...]:
        """Options of an address that the document of this name heeds."""
        if name == "ranks":
            return (*_SCOPE, "cause")
        made = CHOICES.get(name) or MAKERS.get(name)
        return _SCOPE if made is None else (*_SCOPE, *made.options)

    def job(self, options: Options) -> Job:
        if self._named is not None:
            return self._named
        name = options.get("run", "latest")
        record = self._index.meant(name)
        if record is None:
            raise NoDocument(f"there is no run {name[:100]!r}" if name != "latest" else "nothing was recorded yet")
        with self._lock:
            if self._run is None or self._run[0] != record.name or not self._run[1].files:
                self._run = (record.name, Job(self._arguments, str(record.path)))
            return self._run[1]

    def is_changed(self) -> bool:
        job = self._named or (self._run and self._run[1])
        return job is not None and job.is_changed

    def renew(self) -> bool:
        """Have changed traces read again; whether there are any."""
        if not self.is_changed():
            return False
        with self._lock, contextlib.suppress(UsageError):  # a folder may have no trace at the moment
            self._run = None
            if self._named is not None:
                self._named = Job(self._arguments, self._named.path, self._named.others)
        return True

    @cached_property
    def _index(self) -> RunIndex:
        from stepscope.record.runs import RunIndex

        return RunIndex()

    def _session(self, options: Options) -> dict[str, Any]:
        kind, title, documents, others = "runs", "runs", ["runs"], []
        try:
            job = self.job(options)
            title = _title(job)
            documents = [*(documents if self._named is None else ()), *job.documents]
            others = [os.path.basename(each) or each for each in job.others]
            if self._named is not None:
                kind = "ranks" if len(job.files) > 1 else "trace"
        except (UsageError, NoDocument, TraceError):
            if self._named is not None:
                raise
        return session_of(title, kind, documents, others)


def _title(job: Job) -> str:
    """The name of the run or the folder of ranks, else of the trace."""
    from stepscope.record.run_folder import is_run_folder

    run = job.files[0].parent.parent
    if is_run_folder(run):
        return run.name
    return Path(job.path).name if len(job.files) > 1 else job.files[0].name


def _runs(index: RunIndex) -> list[dict[str, Any]]:
    """The runs, the latest first."""
    from stepscope.commands.record.runs import bytes_in, state_of

    return [
        {
            "name": each.name,
            "path": str(each.path),
            "command": each.command,
            "started_unix_s": each.started_unix_s,
            "ended_unix_s": each.ended_unix_s,
            "state": state_of(each),
            "traces": each.traces,
            "bytes": bytes_in(each.path),
        }
        for each in index.all()
    ]
