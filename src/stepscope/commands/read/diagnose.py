"""`stepscope diagnose`: why the steps are slow; `rules` and `explain`: what it looks for, and what a finding means."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from stepscope.commands.read.tables import add_table_options, write_table
from stepscope.commands.shared import output
from stepscope.commands.shared.options import (
    Command,
    CommandParser,
    add_device_option,
    add_evidence_options,
    add_reading_options,
    add_user_code_options,
    file_to_write,
    suggestion,
    user_code_from,
    whole,
)
from stepscope.commands.shared.options import row_count as whole_number
from stepscope.commands.shared.processes import FEW, in_processes, on_cluster, process_count
from stepscope.commands.shared.progress import Progress
from stepscope.commands.shared.reading import (
    encodable,
    garbage_rarely_collected,
    kept_as_rank,
    note_secrets,
    noted_secrets,
    open_from,
    readable_traces,
    redacted,
    redactor_of,
    side_files,
    trace_paths,
    with_evidence,
)
from stepscope.errors import StepscopeError, UsageError
from stepscope.report.brief import TOKENS, as_data, fitted
from stepscope.report.format import printable, share

if TYPE_CHECKING:
    from stepscope.analysis.desync import Desync
    from stepscope.commands.read.documents import Room
    from stepscope.commands.shared.reading import Secrets, SideFile
    from stepscope.diagnosis.diagnosis import Unreadable
    from stepscope.diagnosis.diffs import Diffs
    from stepscope.diagnosis.finding import Finding
    from stepscope.diagnosis.job import JobSteps
    from stepscope.diagnosis.rule import Rule
    from stepscope.diagnosis.view import View
    from stepscope.readers.collective_logs import CollectiveLogs
    from stepscope.report.diagnosis import TraceReport
    from stepscope.report.document import Document
    from stepscope.report.redaction import Redactor
    from stepscope.trace import Trace

Logged: TypeAlias = "tuple[str, CollectiveLogs, Desync]"
"""Where logs of collectives are, what they hold, and what it shows."""
MOST_ROWS: Final = 1_500_000
"""Rows of a trace that are diagnosed unless asked otherwise: about 600 MB of JSON, 12 s and 1.4 GiB."""
NAME: Final = "diagnose"
HELP: Final = "Explain why the steps in a trace are slow, and what to change."
_EXAMPLES: Final = """\
examples:
  stepscope diagnose trace.json.gz
  stepscope diagnose traces/                                 every rank's trace in a folder
  stepscope diagnose dumps/                                  why a job hangs: the flight recorder's dumps of its ranks
  stepscope diagnose trace.json --html report.html           a report to share; --redact hides who and where
  stepscope diagnose trace.json --diff - | git apply         the safe changes of your own lines
  stepscope diagnose trace.json --steps 10:20                only these steps
  stepscope diagnose trace.json --for-assistant              for a coding assistant: about 2,000 tokens
  stepscope diagnose trace.json --fail-on 10%                in CI: exit 1 if a finding would save 10 % or more
  stepscope diagnose trace.json --json - | jq .findings      for programs
  stepscope diagnose trace.json --set input-bound.share=10%
  stepscope diagnose host.xplane.pb --xla-metrics report.txt     with other files of the run
"""
_TEXT_ROWS: Final = 5
_REPORT_ROWS: Final = 20
_ASSISTANT_WIDTH: Final = 160
_NOTEWORTHY_SHARE: Final = 0.01
_WORTHWHILE_BYTES: Final = 1 << 20
"""Of traces, from which reading them takes longer than starting processes."""
_SCALES: Final = {"%": 0.01, "ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


DEVICE_WINDOW: Final = "device"
"""Value of --window that shows each device from its first to its last work, as other profilers do."""


def prepare_parser(parser: CommandParser) -> None:
    parser.add_argument(
        "paths",
        metavar="PATH",
        nargs="*",
        default=["latest"],
        help="a trace file, a folder of them, a run's name, or - for standard input (default: the latest run)",
    )
    reports = parser.add_argument_group("reports, besides the text on the terminal (- writes it there instead)")
    reports.add_argument("--json", metavar="FILE", type=file_to_write, help="for programs")
    reports.add_argument("--markdown", metavar="FILE", type=file_to_write, help="for an issue or a pull request")
    reports.add_argument(
        "--html", metavar="FILE", type=file_to_write, help="one page that needs nothing else, with a picture of a step"
    )
    reports.add_argument(
        "--diff", metavar="FILE", type=file_to_write, help="changes of your own files, for git apply or patch -p1"
    )
    reports.add_argument(
        "--for-assistant",
        action="store_true",
        help="print the most important parts, marked as data, for a coding assistant",
    )
    reports.add_argument(
        "--tokens",
        metavar="N",
        type=whole(200),
        default=TOKENS,
        help=f"with --for-assistant: at most about N ({TOKENS})",
    )
    reports.add_argument("--redact", action="store_true", help="remove paths, host, user and process names")
    what = parser.add_argument_group("what is shown")
    what.add_argument(
        "--top", metavar="N", type=whole_number, help=f"operators and kernels, 0 for all (text: {_TEXT_ROWS})"
    )
    what.add_argument("--all", action="store_true", help="also show findings that save less than 1 %% of the step")
    rules = parser.add_argument_group("rules")
    rules.add_argument("--rule", metavar="ID", action="append", help="only this rule; may be repeated")
    rules.add_argument(
        "--set", metavar="RULE.THRESHOLD=VALUE", action="append", default=[], help="change a threshold; may be repeated"
    )
    rules.add_argument(
        "--fail-on", metavar="SHARE", type=parsed_share, help="exit 1 where a finding saves this much: 10%%"
    )
    add_evidence_options(parser)
    add_device_option(parser)
    add_user_code_options(parser)
    add_reading_options(parser, or_device=True)
    parser.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        help="diagnose the ranks on the workers of this Dask scheduler, such as tcp://host:8786",
    )


@garbage_rarely_collected()
def run(arguments: argparse.Namespace) -> int:
    """Diagnose every trace, write the reports, and return the exit code under --fail-on."""
    targets = [each for each in (arguments.json, arguments.markdown, arguments.html, arguments.diff) if each == "-"]
    if len(targets) + arguments.for_assistant > 1:
        raise UsageError("only one report can go to standard output")
    if arguments.diff and arguments.redact:
        raise UsageError("a diff shows your own files, which --redact removes: use only one of them")
    for name in arguments.rule or []:
        rule_named(name)
    if len(arguments.paths) == 1 and _is_answered_as_job(arguments):
        return 0
    logged = _collective_logs(arguments)
    if logged is not None and not arguments.paths:
        _write_logged(arguments, logged)
        return 0
    from stepscope.commands.read.documents import Room
    from stepscope.commands.shared.reading import UserSources
    from stepscope.diagnosis.diffs import Diffs
    from stepscope.readers.remote import url_of

    by_device = arguments.window == DEVICE_WINDOW
    if by_device:
        arguments.window = None
    arguments.most_rows = MOST_ROWS
    settings = dict(parsed_setting(text) for text in arguments.set)
    unreadable: list[Unreadable] = []
    files = side_files(arguments)
    first = arguments.paths[0]
    is_folder = os.path.isdir(first) if url_of(first) is None else len(trace_paths(first)) > 1
    several = is_folder or len(arguments.paths) > 1
    diffs = Diffs(UserSources(Path.cwd()).read)
    room = Room()
    if arguments.scheduler:
        there = _on_cluster(arguments, settings, files, unreadable)
        found = (_finished(arguments, report, diffs) for report in there)
    else:
        _diagnose_ahead(arguments, settings)
        traces = with_evidence(readable_traces(arguments, arguments.paths, unreadable), files, several=several)
        found = (_report(arguments, trace, settings, diffs, room) for trace in traces)
    reports = sorted((report.by_device() if by_device else report for report in found), key=lambda each: each.order)
    shared = tuple(each for each in across(reports) if arguments.rule is None or each.rule in arguments.rule)
    reports, job = as_job(reports, _minimum_share(arguments))
    _write(arguments, reports, shared, _redacted(unreadable, arguments), logged, job)
    if arguments.diff:
        _write_diff(arguments.diff, diffs)
    findings = (finding for report in reports for finding in report.diagnosis.findings)
    return _judged(arguments.fail_on, [*shared, *findings])


def _diagnose_ahead(arguments: argparse.Namespace, settings: dict[str, float]) -> None:
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
            _report(arguments, trace, settings, Diffs(lambda _: None), Room())


def _on_cluster(
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
    from stepscope.diagnosis.diagnosis import Unreadable
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


def _is_answered_as_job(arguments: argparse.Namespace) -> bool:
    """Whether the file is a log of all ranks' operations, which has a report of its own."""
    from stepscope.readers.operation_log import operation_log

    path = arguments.paths[0]
    log = operation_log(path) if os.path.isfile(path) else None
    if log is None:
        return False
    from stepscope.analysis.stragglers import stragglers
    from stepscope.report.stragglers import stragglers_document, stragglers_json

    found = stragglers(log)
    top = arguments.top if arguments.top is not None else _REPORT_ROWS
    _write_document(
        arguments, lambda: stragglers_document(path, found), top=top, json=lambda: stragglers_json(path, found)
    )
    return True


def _write_document(
    arguments: argparse.Namespace, document: Callable[[], Document], *, top: int, json: output.Report
) -> None:
    """Write the reports of what is no trace, and print it as the arguments want it."""
    output.write_reports(arguments, document, top=top, is_printed=not arguments.for_assistant, json=json)
    if arguments.for_assistant:
        _print_for_assistant(arguments, document(), top)


def _print_for_assistant(arguments: argparse.Namespace, document: Document, top: int) -> None:
    from stepscope.report.text import text_of

    text = text_of(document, width=_ASSISTANT_WIDTH, top=top)
    output.print_text(as_data(fitted(text, arguments.tokens, "A larger --tokens shows it.")))


def _collective_logs(arguments: argparse.Namespace) -> Logged | None:
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


def _write_logged(arguments: argparse.Namespace, logged: Logged) -> None:
    from stepscope.report.desync import desync_document, desync_json

    top = arguments.top if arguments.top is not None else _REPORT_ROWS
    _write_document(arguments, lambda: desync_document(*logged), top=top, json=lambda: desync_json(*logged))


def parsed_share(text: str) -> float:
    """Parse a share such as "10%" or "0.1"; 10 alone is refused as ambiguous."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(%?)\s*", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share of a step: write 10% or 0.1")
    return value


def parsed_setting(text: str) -> tuple[str, float]:
    """Parse "rule.threshold=5%" into ("rule.threshold", value); units: %, ns, us, ms, s, KiB, MiB, GiB.

    Raises:
        UsageError: no such rule or threshold, or no number.
    """
    match = re.fullmatch(r"\s*([\w-]+)\.(\w+)\s*=\s*(-?\d{1,15}(?:\.\d{1,9})?(?:e-?\d{1,2})?)\s*([A-Za-z%]*)\s*", text)
    if match is None or (match[4] and match[4] not in _SCALES):
        raise UsageError(f"{text!r} sets no threshold: write RULE.THRESHOLD=VALUE, such as input-bound.share=10%")
    thresholds = rule_named(match[1]).thresholds
    if match[2] not in thresholds:
        guess = suggestion(match[2], thresholds) or f"; it has {', '.join(thresholds) or 'none'}"
        raise UsageError(f"the rule {match[1]} has no threshold {match[2]!r}{guess}")
    return f"{match[1]}.{match[2]}", float(match[3]) * _SCALES.get(match[4], 1)


def _report(
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
    return replace(_finished(arguments, report, diffs), page=page)


def _redactor(arguments: argparse.Namespace, report: TraceReport) -> Redactor | None:
    from stepscope.report.redaction import secrets_in

    return redactor_of(arguments, *secrets_in(report.diagnosis)) if arguments.redact else None


def _finished(arguments: argparse.Namespace, report: TraceReport, diffs: Diffs) -> TraceReport:
    """The report redacted, or with diffs of the user's own lines."""
    from stepscope.report.diagnosis import with_own_commands

    redactor = _redactor(arguments, report)
    if redactor is not None:
        return redactor.redact(report)
    return with_own_commands(replace(report, diagnosis=diffs.filled(report.diagnosis)))


def _trace_report(arguments: argparse.Namespace, view: View) -> TraceReport:
    """What is found in a trace, of which what the questions about all ranks need is kept."""
    from stepscope.report.diagnosis import trace_report

    trace = view.trace
    with Progress(f"analysing {trace.metadata.path}", in_bytes=False, arguments=arguments) as progress:
        report = trace_report(
            view,
            rules=arguments.rule,
            top=arguments.top if arguments.top is not None else _REPORT_ROWS,
            minimum_share=_minimum_share(arguments),
            progress=progress,
        )
    if report.rank is not None:
        kept_as_rank(arguments, trace.metadata.path, lambda: report.rank)
    return report


def _redacted(unreadable: Sequence[Unreadable], arguments: argparse.Namespace) -> Sequence[Unreadable]:
    if not arguments.redact:
        return unreadable
    redactor = redactor_of(arguments, paths=[each.path for each in unreadable])
    return [redactor.redact(each) for each in unreadable]


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


def _minimum_share(arguments: argparse.Namespace) -> float:
    """The step share from which findings are shown, at most the limit of --fail-on."""
    if arguments.all:
        return 0.0
    return _NOTEWORTHY_SHARE if arguments.fail_on is None else min(_NOTEWORTHY_SHARE, arguments.fail_on)


def _write(
    arguments: argparse.Namespace,
    reports: Sequence[TraceReport],
    across: Sequence[Finding],
    unreadable: Sequence[Unreadable],
    logged: Logged | None,
    job: JobSteps | None,
) -> None:
    from stepscope.commands.read.documents import report_file
    from stepscope.report.desync import desync_blocks, desync_record
    from stepscope.report.diagnosis import diagnosis_document, json_reports

    blocks = [] if logged is None else [*desync_blocks(*logged[1:], headed=True)]

    targets = (arguments.json, arguments.markdown, arguments.html, arguments.diff)
    top = arguments.top if arguments.top is not None else _TEXT_ROWS
    output.write_reports(
        arguments,
        lambda: diagnosis_document(reports, across, unreadable, blocks, job=job),
        top=top,
        page=lambda: report_file(reports, across, unreadable, job),
        is_printed=False,
        json=lambda: json_reports(reports, across, unreadable, logged and desync_record(*logged), job),
    )
    if arguments.for_assistant:
        document = diagnosis_document(reports, across, unreadable, blocks, job=job, every=False)
        _print_for_assistant(arguments, document, top)
        return
    if "-" not in targets:
        document = diagnosis_document(reports, across, unreadable, blocks, job=job, every=arguments.verbose)
        output.print_document(document, top=top)
        return
    for each in unreadable:
        print(f"stepscope: skipped: {printable(each.reason)}", file=sys.stderr)


def _write_diff(target: str, diffs: Diffs) -> None:
    """Write all changes as one patch (empty without changes), and say what it leaves out."""
    patch = diffs.patch()
    for path in diffs.outside():
        why = "it is not below this folder: call stepscope diagnose in a folder above it"
        print(f"stepscope: /{printable(path)} is not in the patch: {why}", file=sys.stderr)
    if not patch and not diffs.outside():
        print("stepscope: no finding has a safe change of your files", file=sys.stderr)
    output.write_output(target, patch)


def _judged(limit: float | None, findings: Sequence[Finding]) -> int:
    """The exit code under --fail-on; findings above the limit are printed on standard error."""
    if limit is None:
        return 0
    above = [finding for finding in findings if finding.saving_ns_per_step > 0 and finding.saving_share >= limit]
    for finding in above:
        saving = share(finding.saving_share)
        print(f"stepscope: {printable(finding.rule)} would save {saving}, --fail-on {share(limit)}", file=sys.stderr)
    return 1 if above else 0


COMMAND: Final = Command(NAME, HELP, prepare_parser, run, _EXAMPLES, only_reads=True)


def rule_named(name: str) -> Rule:
    """The rule with this id.

    Raises:
        UsageError: no rule has it.
    """
    from stepscope.diagnosis.rules import RULES

    rules = {rule.id: rule for rule in RULES}
    if name not in rules:
        raise UsageError(f"there is no rule {name!r}{suggestion(name, rules)} (stepscope rules lists them)")
    return rules[name]


def _list(arguments: argparse.Namespace) -> int:
    import polars as pl

    from stepscope.diagnosis.rules import RULES

    rows = [(rule.id, rule.title) for rule in RULES]
    frame = pl.DataFrame(rows, schema={"rule": pl.String, "title": pl.String}, orient="row")
    write_table(frame, arguments, "rules", rows=0)
    return 0


def _prepare_explain(parser: CommandParser) -> None:
    parser.add_argument("rule", metavar="RULE", help="a rule, as findings and `stepscope rules` name them")


def _explain(arguments: argparse.Namespace) -> int:
    from stepscope.diagnosis.rule import rule_page

    output.print_text(rule_page(rule_named(arguments.rule)))
    return 0


RULES: Final = Command(
    "rules",
    "A list of everything stepscope looks for.",
    add_table_options,
    _list,
    """\
examples:
  stepscope rules
  stepscope explain input-bound                              what one of them means
  stepscope diagnose trace.json --rule input-bound           only that one
""",
)
EXPLAIN: Final = Command(
    "explain",
    "What a finding means, how it is measured, when it is wrong and what to do.",
    _prepare_explain,
    _explain,
    """\
examples:
  stepscope rules                                            all of them
  stepscope explain input-bound
""",
)
