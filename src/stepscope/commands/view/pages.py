"""What one page shows: the traces that the command line names, opened when they are asked for, and their documents."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from stepscope.commands.read.diagnose import MOST_ROWS
from stepscope.commands.read.documents import MAKERS, OpenTrace, available, number, session_of
from stepscope.commands.read.reports import across, as_job, once_each
from stepscope.commands.shared.processes import FEW, in_processes
from stepscope.commands.shared.reading import kept_as_rank, open_from, side_files, trace_paths, with_evidence
from stepscope.commands.view.choices import CHOICES
from stepscope.commands.view.runs import RunList, Runs
from stepscope.errors import StepscopeError, TraceError, UsageError
from stepscope.record.run_folder import is_run_folder
from stepscope.record.runs import run_at
from stepscope.record.watch_log import WatchLog
from stepscope.view.documents import NoDocument, Options

if TYPE_CHECKING:
    import polars as pl

    from stepscope.diagnosis.finding import Finding
    from stepscope.diagnosis.rank_groups import Exchanges
    from stepscope.diagnosis.rank_summary import RankSummary
    from stepscope.report.diagnosis import TraceReport
    from stepscope.trace import Trace

_Found = TypeVar("_Found")
_KEPT: Final = 2
"""Traces that stay open: the one looked at, and the one before it."""
_KEPT_RUNS: Final = 8
"""Runs whose ranks go on being read; only the one looked at has open traces."""
_SCOPE: Final = ("run", "traces", "rank", "other")
"""Options of an address that choose the trace, the same for every document; a run's number of traces grows."""
_MOST_DIAGNOSED: Final = 64
"""Ranks that are diagnosed for what the job saves; of more, each rank's savings are those by its trace alone."""
_MOST_WATCHED: Final = 1_000
"""Recordings of a watched job that the page draws: a week at one every ten minutes."""
_RANK: Final = re.compile(r"rank[-_.]?0*(\d+)")


class Job:
    """The traces of one path: one, or one for each rank.

    Args:
        path: a trace, a folder of traces, or a run.
        others: the further paths of the command line, which it can be compared with.
        files: the traces; None for those of the path.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        path: str,
        others: tuple[str, ...] = (),
        files: Sequence[Path] | None = None,
    ) -> None:
        self.arguments = argparse.Namespace(**vars(arguments))
        self.path, self.others = path, others
        self.files = trace_paths(path) if files is None else list(files)
        self.unreadable: list[str] = []
        self.is_stopped = False
        self._lock = threading.Lock()
        self._open: dict[Path, OpenTrace] = {}
        self._opening: dict[Path, threading.Lock] = {}
        self._seen: dict[Path, FileState | None] = {}
        self._ranks: dict[Path, int | None] = {}
        self._others: dict[str, Job] = {}

    @classmethod
    def of(cls, arguments: argparse.Namespace, trace: Trace) -> Job:
        """The page of a trace that is open already."""
        job = cls(arguments, "-")
        job._open[job.files[0]] = OpenTrace(job.arguments, trace)
        return job

    def document(self, name: str, options: Options) -> Any:
        """A document; with the option "other" that of one of the further paths, by its number."""
        if "other" in options:
            further = {key: value for key, value in options.items() if key != "other"}
            return self._other(options["other"]).document(name, further)
        if name == "ranks":
            return self.ranks.document(options)
        if name == "diagnosis" and len(self.files) > 1:
            return self.ranks.diagnosis(self.opened(options), of_job="job" in options)
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
            self.add_unreadable(str(error))
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

    def rest(self) -> None:
        """Keep no trace open until one is asked for again."""
        with self._lock:
            self._open.clear()
        for other in list(self._others.values()):
            other.rest()

    def add_unreadable(self, sentence: str) -> None:
        if sentence not in self.unreadable:
            self.unreadable.append(sentence)

    def know_rank(self, file: Path, rank: int | None) -> None:
        self._ranks[file] = rank

    def summary(self, file: Path) -> RankSummary | str:
        """What is kept of a rank for the questions about all, or why its trace cannot be read."""
        from stepscope.diagnosis.rank_summary import rank_summary

        try:
            found = kept_as_rank(self.arguments, file, lambda: rank_summary(self.read(file).view))
        except StepscopeError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - one rank does not stop the others
            return f"{file}: a bug in stepscope ({type(error).__name__})"
        return found or f"{file} has no summary"

    def report(self, file: Path) -> TraceReport | str:
        """The diagnosis of a rank as its page shows it, or why there is none."""
        try:
            report = self.read(file).report
            findings = tuple(replace(each, change=None) for each in report.diagnosis.findings)  # which hold the trace
            return replace(report, diagnosis=replace(report.diagnosis, findings=findings))
        except StepscopeError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - one rank does not stop the others
            return f"{file}: a bug in stepscope ({type(error).__name__})"

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
    """The ranks of a job beside each other: those whose summaries are kept at once, the others as they are read."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._known: dict[Path, RankSummary] = {}
        self._missing: list[Path] | None = None
        self._compared: tuple[int, _Together] | None = None
        self._reports: dict[str, TraceReport] = {}
        self._across: tuple[Finding, ...] | None = None
        self._is_done = False

    def document(self, options: Options) -> dict[str, Any]:
        from stepscope.diagnosis.rank_summary import recorded_once
        from stepscope.report.diagnosis import finding_json
        from stepscope.view.drawings import ranks_json

        if len(self._job.files) < 2:
            raise NoDocument("there is one trace only")
        self._begin()
        with self._lock:
            ordered = sorted(self._known.values(), key=lambda each: each.order)
            known, left_out = recorded_once(ordered, lambda each: each)
            for _, why in left_out:
                self._job.add_unreadable(why)
            unreadable = list(self._job.unreadable)
        of = len(self._job.files)
        if not known and len(unreadable) == of:
            raise UsageError(f"no trace of {self._job.path} can be read: {unreadable[0]}")
        together = self._together(known)
        steps = [each.steps for each in known]
        step, cause = number(options, "step"), options.get("cause")
        shown = ranks_json(steps, cause, together.late, together.sentences, unreadable, of, together.exchanges, step)
        return {
            **shown,
            "findings": [finding_json(each) for each in (together.findings if self._across is None else self._across)],
            "saves_ns": self._saves([each.path for each in steps]),
            "diagnosing": self._is_diagnosed_too and not self._is_done,
        }

    def diagnosis(self, opened: OpenTrace, *, of_job: bool) -> dict[str, Any]:
        """The diagnosis of a rank by its own trace, or with what the job saves.

        Raises:
            NoDocument: the ranks are not diagnosed yet.
        """
        from stepscope.diagnosis.ranks import without_asked_of_all
        from stepscope.report.diagnosis import json_report

        metadata = opened.trace.metadata
        if of_job:
            if metadata.path not in self._reports:
                raise NoDocument("the ranks are not diagnosed yet")
            return json_report(self._reports[metadata.path])
        report = opened.report
        if len(self._job.files) >= (metadata.world_size or 2):
            report = replace(report, diagnosis=without_asked_of_all(report.diagnosis))
        return json_report(report)

    def _saves(self, paths: Sequence[str]) -> list[int] | None:
        """What the job saves by each rank's best finding; None until the ranks are diagnosed."""
        from stepscope.report.diagnosis import largest_saving

        reports = self._reports
        is_all = bool(paths) and reports.keys() >= set(paths)
        return [largest_saving(reports[path]) for path in paths] if is_all else None

    def _together(self, known: Sequence[RankSummary]) -> _Together:
        """What collectives tell of the ranks that are there, and what is found about them once all are."""
        from stepscope.analysis.matching import matched_collectives
        from stepscope.diagnosis.job import job_of, job_steps
        from stepscope.diagnosis.rank_groups import exchanges
        from stepscope.diagnosis.ranks import across_ranks
        from stepscope.report.ranks import job_sentences

        records = [each.record for each in known]
        if self._compared is None or self._compared[0] != len(records):
            late = matched_collectives([record.collectives for record in records])
            is_all = len(records) + len(self._job.unreadable) == len(self._job.files)
            findings = across_ranks(records, late) if is_all else ()
            job = job_of(known, late) if is_all else None
            sentences = () if job is None else tuple(job_sentences(job_steps(job, known)))
            self._compared = len(records), _Together(late, tuple(findings), sentences, exchanges(records, late))
        return self._compared[1]

    def _begin(self) -> None:
        """Take the summaries that are kept, and have the others made."""
        with self._lock:
            if self._missing is not None:
                return
            self._missing = []
        for file in self._job.files:
            found = kept_as_rank(self._job.arguments, file, lambda: None)
            self._missing.append(file) if found is None else self._take(file, found)
        if self._missing or self._is_diagnosed_too:
            threading.Thread(target=self._read, args=(self._missing,), name="ranks", daemon=True).start()

    @property
    def _is_diagnosed_too(self) -> bool:
        return len(self._job.files) <= _MOST_DIAGNOSED

    def _take(self, file: Path, found: RankSummary | str) -> None:
        with self._lock:
            if isinstance(found, str):
                self._job.add_unreadable(found)
            else:
                self._known[file] = found
                self._job.know_rank(file, found.steps.rank)

    def _read(self, files: list[Path]) -> None:
        for file, found in of_ranks(self._job, files, Job.summary, _summary_in_process):
            self._take(file, found)
        if self._is_diagnosed_too:
            self._diagnose()
        self._is_done = True

    def _diagnose(self) -> None:
        """Diagnose every rank, and promise what the job saves."""
        found = [report for _, report in of_ranks(self._job, list(self._known), Job.report, _report_in_process)]
        if self._job.is_stopped:
            return
        reports = sorted((report for report in found if not isinstance(report, str)), key=lambda each: each.order)
        if len(reports) == len(found):
            reports = once_each(reports, [])
            self._across = across(reports)
            reports, _ = as_job(reports, 0.0)
            self._reports = {report.diagnosis.metadata.path: report for report in reports}


@dataclass(frozen=True, slots=True)
class _Together:
    """What the ranks tell together: findings and sentences only once all are there."""

    late: pl.DataFrame
    findings: tuple[Finding, ...]
    sentences: tuple[str, ...]
    exchanges: Exchanges


def of_ranks(
    job: Job,
    files: Sequence[Path],
    here: Callable[[Job, Path], _Found | str],
    in_process: Callable[[Path], _Found | str],
) -> Iterator[tuple[Path, _Found | str]]:
    """What is found of each rank, or why its trace cannot be read, in any order; of many ranks, in processes."""
    if len(files) <= FEW:
        for file in files:
            if not job.is_stopped:
                yield file, here(job, file)
        return
    given = argparse.Namespace(**{**vars(job.arguments), "quiet": True}), job.path, job.files
    for file, found in in_processes(in_process, files, begin=_prepare, given=given, spared=1):
        if job.is_stopped:
            return
        yield file, found or f"{file} cannot be read: the process that read it ended, perhaps for lack of memory"


_jobs: list[Job] = []


def _prepare(arguments: argparse.Namespace, path: str, files: Sequence[Path]) -> None:
    _jobs.append(Job(arguments, path, files=files))


def _summary_in_process(file: Path) -> RankSummary | str:
    return _jobs[0].summary(file)


def _report_in_process(file: Path) -> TraceReport | str:
    return _jobs[0].report(file)


def options_of(name: str) -> tuple[str, ...]:
    """Options that a document of one trace heeds."""
    made = CHOICES.get(name) or MAKERS.get(name)
    return () if made is None else made.options


class Page:
    """The page of what the command line names, or without a path of the runs; of several runs one is open at a time.

    Args:
        runs: None for those of this user, whose running programs can then be watched and recorded.
    """

    def __init__(self, arguments: argparse.Namespace, runs: RunList | None = None) -> None:
        self._arguments = arguments
        self._lock = threading.Lock()
        own = Runs()
        self._runs: RunList = own if runs is None else runs
        self._programs = own if runs is None else None
        paths: list[str] = arguments.paths
        self._path, self._others = (paths[0] if paths else None), tuple(paths[1:])
        self._folder = None if self._path is None else run_at(self._path)
        self._jobs: dict[tuple[Path, ...], Job] = {}
        is_trace = self._path is not None and self._folder is None
        self._named = Job(arguments, paths[0], self._others) if is_trace else None

    def open(self) -> None:
        """Open what the command line names, unless it is a run that may still get a trace.

        Raises:
            TraceError, UsageError: it cannot be read.
        """
        if self._folder is not None and not self._folder.traces() and self._folder.manifest().ended_unix_s is None:
            return
        if self._path is not None:
            self.job({}).opened({})

    @property
    def first_documents(self) -> tuple[str, ...]:
        """Names of what the first screen shows."""
        with contextlib.suppress(StepscopeError):
            if len(self.job({}).files) > 1 and self._path is not None:
                return "session", "ranks"
        return "session", "diagnosis", "timeline"

    def document(self, name: str, options: Options) -> Any:
        """The document of this name; of the run that is asked for, else of what the command line names.

        Raises:
            NoDocument: there is none.
            UsageError: it needs something that the trace lacks, or the address is wrong.
        """
        match name:
            case "session":
                return self._session(options)
            case "runs":
                return self._runs.table()
            case "watch" if self._programs:
                return _watched(options.get("job"))
            case "progress" if self._programs:
                return self._programs.progress(self._run(options))
            case "capture" if self._programs:
                return self._programs.capture(self._run(options))
        return self.job(options).document(name, options)

    def options(self, name: str) -> tuple[str, ...]:
        """Options of an address that the document of this name heeds."""
        if name == "ranks":
            return (*_SCOPE, "cause", "step")
        if name == "diagnosis":
            return (*_SCOPE, "job")
        if name == "watch":
            return ("job",)
        return (*_SCOPE, *options_of(name))

    def job(self, options: Options) -> Job:
        if "run" not in options and self._named is not None:
            return self._named
        path = self._run(options)
        others = self._others if "run" not in options else ()
        with self._lock:
            files = self._runs.traces(path)
            key = (path, *files)  # a run that goes on gets further traces
            found = self._jobs.pop(key, None) or Job(self._arguments, str(path), others, files or None)
            for job in self._jobs.values():
                job.rest()
            old = [known for known in self._jobs if known[0] == path]
            self._drop(old or list(self._jobs)[: 1 - _KEPT_RUNS])
            self._jobs[key] = found
            return found

    def _drop(self, keys: Iterable[tuple[Path, ...]]) -> None:
        for key in keys:
            self._jobs.pop(key).is_stopped = True

    def _run(self, options: Options) -> Path:
        """The run that is asked for, else the one that the command line names, else the latest."""
        if "run" not in options and self._folder is not None:
            return self._folder.path
        return self._runs.meant(options.get("run", "latest"))

    def is_changed(self) -> bool:
        jobs = (self._named, *list(self._jobs.values())[-1:])
        return any(job is not None and job.is_changed for job in jobs)

    def renew(self) -> bool:
        """Have changed traces read again; whether there are any."""
        changed = [key for key, job in list(self._jobs.items()) if job.is_changed]
        is_named_changed = self._named is not None and self._named.is_changed
        if not changed and not is_named_changed:
            return False
        with self._lock, contextlib.suppress(UsageError):  # a folder may have no trace at the moment
            self._drop(key for key in changed if key in self._jobs)
            if self._named is not None and is_named_changed:
                self._named.is_stopped = True
                self._named = Job(self._arguments, self._named.path, self._named.others)
        return True

    def _session(self, options: Options) -> dict[str, Any]:
        kind, title, others, problems = "runs", "runs", [], []
        documents = ["runs"] if self._path is None or self._folder is not None or self._runs.exist() else []
        documents += ["watch"] if self._programs and WatchLog().jobs() else []
        is_named = self._path is not None and "run" not in options
        try:
            job = self.job(options)
            title = _title(job) if is_named else self._runs.name_of(self._run(options))
            documents += job.documents
            others = [os.path.basename(each) or each for each in job.others]
            if is_named:
                kind = "ranks" if len(job.files) > 1 else "trace"
        except (UsageError, NoDocument, TraceError) as error:
            if is_named and self._folder is None:
                raise
            problems = [str(error)] if isinstance(error, TraceError) else []
            if self._folder is not None:
                title = self._folder.name
        found = session_of(title, kind, documents, others, problems)
        return found | ({"path": job.path} if kind == "ranks" else {})


def _watched(job: str | None) -> dict[str, Any]:
    """The last recordings of the watched job that is asked for, else of the one recorded last.

    Raises NoDocument if there is none.
    """
    from stepscope.report.watch import page_json

    log = WatchLog()
    jobs = log.jobs()
    shown = next(iter(jobs), "") if job is None else job
    if shown not in jobs:
        raise NoDocument(f"no job {shown[:100]!r} is watched" if shown else "no job is watched")
    return page_json(jobs, shown, log.of(shown, last=_MOST_WATCHED))


def _title(job: Job) -> str:
    """The name of the run or the folder of ranks, else of the trace."""
    run = job.files[0].parent.parent
    if is_run_folder(run):
        return run.name
    return Path(job.path).name if len(job.files) > 1 else job.files[0].name
