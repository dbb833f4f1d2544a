"""The report of each trace, made here, in processes or on a cluster, what the ranks say together, and the reports of a
job's logs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from stepscope.commands.shared import output
from stepscope.commands.shared.options import user_code_from
from stepscope.commands.shared.output import Progress
from stepscope.commands.shared.processes import FEW, in_processes, on_cluster, process_count
from stepscope.commands.shared.reading import (
    encodable,
    kept_as_rank,
    note_secrets,
    noted_secrets,
    open_from,
    redacted,
    redactor_of,
    side_files,
    trace_paths,
    with_evidence,
)
from stepscope.errors import StepscopeError, UsageError
from stepscope.report.brief import as_data, fitted
from stepscope.report.format import printable

if TYPE_CHECKING:
    from stepscope.analysis.desync import Desync
    from stepscope.commands.read.documents import Room
    from stepscope.commands.shared.reading import Secrets, SideFile
    from stepscope.diagnosis.diffs import Diffs
    from stepscope.diagnosis.finding import Finding, Unreadable
    from stepscope.diagnosis.job import JobSteps
    from stepscope.diagnosis.view import View
    from stepscope.readers.collective_logs import CollectiveLogs
    from stepscope.report.diagnosis import TraceReport
    from stepscope.report.document import Document
    from stepscope.report.redaction import Redactor
    from stepscope.trace import Trace

_NOTEWORTHY_SHARE: Final = 0.01
_WORTHWHILE_BYTES: Final = 1 << 20
"""Of traces, from which reading them takes longer than starting processes."""


def _trace_report(arguments: argparse.Namespace, view: View) -> TraceReport:
    """What is found in a trace, of which what the questions about all ranks need is kept."""
    from stepscope.report.diagnosis import trace_report

    trace = view.trace
    with Progress(f"analysing {trace.metadata.path}", in_bytes=False, arguments=arguments) as progress:
        report = trace_report(
            view,
            rules=arguments.rule,
            top=report_rows(arguments),
            minimum_share=minimum_share(arguments),
            progress=progress,
        )
    if report.rank is not None:
        kept_as_rank(arguments, trace.metadata.path, lambda: report.rank)
    return report


def report_of(
    arguments: argparse.Namespace, trace: Trace, settings: dict[str, float], diffs: Diffs, room: Room
) -> TraceReport:
    """One trace's report, either redacted or with diffs of the user's own lines.

    Args:
        room: what the file of --html still has room for.
    """
    from stepscope.commands.read.documents import OpenTrace, page_part
    from stepscope.diagnosis.view import View

    view = View(trace, settings, user_code_from(arguments))
    report = _trace_report(arguments, view)
    redactor = _redactor(arguments, report)
    page = page_part(OpenTrace(arguments, trace, view=view), redactor, room) if arguments.html else None
    return replace(finished(arguments, report, diffs), page=page)


def _redactor(arguments: argparse.Namespace, report: TraceReport) -> Redactor | None:
    from stepscope.report.redaction import secrets_in

    return redactor_of(arguments, *secrets_in(report.diagnosis)) if arguments.redact else None


def finished(arguments: argparse.Namespace, report: TraceReport, diffs: Diffs) -> TraceReport:
    """The report redacted, or with diffs of the user's own lines."""
    from stepscope.report.diagnosis import with_own_commands

    redactor = _redactor(arguments, report)
    if redactor is not None:
        return redactor.redact(report)
    return with_own_commands(replace(report, diagnosis=diffs.filled(report.diagnosis)))


def diagnose_ahead(arguments: argparse.Namespace, settings: dict[str, float]) -> None:
    """Diagnose many ranks in processes, which keep what they found; each is then taken from the cache in its turn."""
    if arguments.no_cache or "-" in arguments.paths:
        return
    from stepscope.readers.source import file_bytes

    with contextlib.suppress(StepscopeError):  # whose turn comes when the traces are opened
        files = [Path(file) for path in arguments.paths for file in trace_paths(path)]
        new = [file for file in files if kept_as_rank(arguments, file, lambda: None) is None]
        size = sum(file_bytes(file) or 0 for file in new)
        if len(new) <= FEW or size < _WORTHWHILE_BYTES or process_count(new) < 2:
            return
        given = (argparse.Namespace(**{**vars(arguments), "quiet": True, "html": None}), settings)
        with Progress(f"reading {len(new)} traces", in_bytes=False, arguments=arguments, things="traces") as progress:
            for done, _ in enumerate(in_processes(_diagnosed, new, begin=_begin_ahead, given=given), 1):
                progress(done, len(new))


_ahead: list[tuple[argparse.Namespace, dict[str, float], list[SideFile]]] = []
"""In a process that diagnoses ranks: the command's arguments, settings and evidence."""


def _begin_ahead(arguments: argparse.Namespace, settings: dict[str, float]) -> None:
    _ahead.append((arguments, settings, side_files(arguments)))


def _diagnosed(file: Path) -> None:
    """Diagnose one rank and keep what was found; what goes wrong is found again, and said, when its turn comes."""
    from stepscope.commands.read.documents import Room
    from stepscope.diagnosis.diffs import Diffs

    arguments, settings, files = _ahead[0]
    with contextlib.suppress(Exception):
        for trace in with_evidence([open_from(arguments, file)], files, several=True):
            report_of(arguments, trace, settings, Diffs(lambda _: None), Room())


def reports_from_cluster(
    arguments: argparse.Namespace,
    settings: dict[str, float],
    evidence: list[SideFile],
    unreadable: list[Unreadable],
) -> Iterator[TraceReport]:
    """Each rank's report from the workers of a cluster, which keep what they found in their cache.

    Args:
        unreadable: collects the files that cannot be read.

    Raises:
        UsageError: the cluster cannot be reached, or no file can be read.
    """
    from stepscope.diagnosis.finding import Unreadable
    from stepscope.readers.remote import url_of
    from stepscope.readers.source import name_of

    if arguments.html:
        raise UsageError("--html draws each trace, and --scheduler leaves them where they are: use only one of them")
    named = [file for path in arguments.paths for file in trace_paths(path)]
    if Path("-") in named:
        raise UsageError("a cluster cannot read standard input")
    files = {file if url_of(file) else file.absolute(): file for file in named}
    options = argparse.Namespace(**{**vars(arguments), "quiet": True, "scheduler": None})
    with Progress(f"reading {len(files)} traces", in_bytes=False, arguments=arguments, things="traces") as progress:
        found = on_cluster(_diagnosed_there, list(files), (options, settings, evidence), arguments.scheduler)
        for done, (place, answer) in enumerate(found, 1):
            progress(done, len(files))
            path = encodable(name_of(files[place]))
            if isinstance(answer, str):
                unreadable.append(Unreadable(path, encodable(answer)))
                continue
            report, secrets = answer
            note_secrets(arguments, secrets)
            yield report.at(path) if url_of(place) is None else report
    if len(unreadable) == len(files):
        raise UsageError(
            f"none of the {len(files)} files in {', '.join(arguments.paths)} can be read: {unreadable[0].reason}"
        )


def _diagnosed_there(
    file: Path, given: tuple[argparse.Namespace, dict[str, float], list[SideFile]]
) -> tuple[TraceReport, Secrets] | str:
    """On a worker of a cluster: a rank's report and what --redact removes, or why its trace cannot be read."""
    from stepscope.diagnosis.view import View

    options, settings, evidence = given
    arguments = argparse.Namespace(**vars(options))
    try:
        trace = open_from(arguments, file)
        about_it = [each for each in evidence if each.is_about(trace, several=True)]
        [trace] = with_evidence([trace], about_it, several=True)
        return _trace_report(arguments, View(trace, settings, user_code_from(arguments))), noted_secrets(arguments)
    except StepscopeError as error:
        return str(error)


def once_each(reports: list[TraceReport], left_out: list[Unreadable]) -> list[TraceReport]:
    """The last report of each rank of a job; the others are named in `left_out`."""
    from stepscope.diagnosis.finding import Unreadable
    from stepscope.diagnosis.rank_summary import recorded_once

    kept, others = recorded_once(reports, lambda report: report.rank)
    left_out += [Unreadable(path, why) for path, why in others]
    return kept


def across(reports: Sequence[TraceReport]) -> tuple[Finding, ...]:
    """The findings about the ranks together, with the remedies that the ranks' own findings have."""
    from stepscope.diagnosis.ranks import across_ranks, with_remedies

    return across_ranks(
        [with_remedies(report.rank.record, report.diagnosis.findings) for report in reports if report.rank is not None]
    )


def as_job(reports: list[TraceReport], minimum_share: float) -> tuple[list[TraceReport], JobSteps | None]:
    """The reports with what the ranks together answer or know better, and what the job's steps wait for.

    Args:
        minimum_share: of the step, from which a saving is shown.
    """
    if len(reports) < 2:
        return reports, None
    from stepscope.diagnosis.job import job_of, job_steps, promised
    from stepscope.diagnosis.ranks import without_alone, without_answered

    diagnoses = without_answered([report.diagnosis for report in reports])
    reports = [replace(report, diagnosis=diagnosis) for report, diagnosis in zip(reports, diagnoses, strict=True)]
    summaries = [report.rank for report in reports if report.rank is not None]
    job = job_of(summaries) if len(summaries) == len(reports) else None
    if job is None:
        return reports, None
    steps = job_steps(job, summaries)
    saved = [report.saved for report in reports]
    diagnoses = promised(diagnoses, saved, job, steps, minimum_share=minimum_share)
    if not steps.missing:
        diagnoses = [without_alone(diagnosis) for diagnosis in diagnoses]
    return [replace(report, diagnosis=each) for report, each in zip(reports, diagnoses, strict=True)], steps


def minimum_share(arguments: argparse.Namespace) -> float:
    """The step share from which findings are shown, at most the limit of --fail-on."""
    if arguments.all:
        return 0.0
    return _NOTEWORTHY_SHARE if arguments.fail_on is None else min(_NOTEWORTHY_SHARE, arguments.fail_on)


Logged: TypeAlias = "tuple[str, CollectiveLogs, Desync]"
"""Where logs of collectives are, what they hold, and what it shows."""
_REPORT_ROWS: Final = 20
_ASSISTANT_WIDTH: Final = 160


def report_rows(arguments: argparse.Namespace) -> int:
    """Rows of tables in reports, 0 for all."""
    return arguments.top if arguments.top is not None else _REPORT_ROWS


def is_answered_as_job(arguments: argparse.Namespace) -> bool:
    """Whether the file is a log of all ranks' operations, which has a report of its own."""
    from stepscope.readers.operation_log import operation_log

    path = arguments.paths[0]
    log = operation_log(path) if os.path.isfile(path) else None
    if log is None:
        return False
    from stepscope.analysis.stragglers import stragglers
    from stepscope.report.stragglers import stragglers_document, stragglers_json

    found = stragglers(log)
    top = report_rows(arguments)
    _write_document(
        arguments, lambda: stragglers_document(path, found), top=top, json=lambda: stragglers_json(path, found)
    )
    return True


def logs_among(arguments: argparse.Namespace) -> Logged | None:
    """What the logs of collectives among the paths show, if any; arguments keep the paths that have traces too."""
    from stepscope.readers.collective_logs import collective_logs, log_files

    by_path = {path: log_files(path) for path in arguments.paths if path != "-"}
    files = [file for found in by_path.values() for file in found]
    if not files:
        return None
    from stepscope.analysis.desync import desync

    def has_traces(path: str) -> bool:
        try:
            return not by_path.get(path) or (os.path.isdir(path) and bool(trace_paths(path)))
        except StepscopeError:
            return False

    path = arguments.paths[0] if len(by_path) == 1 else f"{len(files)} logs"
    arguments.paths = [path for path in arguments.paths if has_traces(path)]
    try:
        logs = collective_logs(files)
    except StepscopeError as error:
        if not arguments.paths:
            raise
        print(f"stepscope: skipped: {printable(str(error))}", file=sys.stderr)
        return None
    names = {
        name
        for process in logs.processes
        for name in (process.host, process.name)
        if process.rank is None or name == process.host
    }
    found = redacted(arguments, (logs, desync(logs)), sorted(names - {""}), [str(file) for file in files])
    return (redacted(arguments, path), *found)


def write_logged(arguments: argparse.Namespace, logged: Logged) -> None:
    from stepscope.report.desync import desync_document, desync_json

    top = report_rows(arguments)
    _write_document(arguments, lambda: desync_document(*logged), top=top, json=lambda: desync_json(*logged))


def _write_document(
    arguments: argparse.Namespace, document: Callable[[], Document], *, top: int, json: output.Report
) -> None:
    """Write the reports of what is no trace, and print it as the arguments want it."""
    output.write_reports(arguments, document, top=top, is_printed=not arguments.for_assistant, json=json)
    if arguments.for_assistant:
        print_for_assistant(arguments, document(), top)


def print_for_assistant(arguments: argparse.Namespace, document: Document, top: int) -> None:
    from stepscope.report.text import text_of

    text = text_of(document, width=_ASSISTANT_WIDTH, top=top)
    output.print_text(as_data(fitted(text, arguments.tokens, "A larger --tokens shows it.")))
