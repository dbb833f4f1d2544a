"""`stepscope diagnose`: why the steps are slow."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepscope.commands.read.reports import (
    Logged,
    across,
    as_job,
    diagnose_ahead,
    finished,
    is_answered_as_job,
    logs_among,
    minimum_share,
    once_each,
    print_for_assistant,
    report_of,
    reports_from_cluster,
    write_logged,
)
from stepscope.commands.read.tables import parsed_setting, rule_named
from stepscope.commands.shared import output
from stepscope.commands.shared.options import (
    Command,
    CommandParser,
    add_device_option,
    add_evidence_options,
    add_reading_options,
    add_user_code_options,
    file_to_write,
    whole,
)
from stepscope.commands.shared.options import row_count as whole_number
from stepscope.commands.shared.reading import (
    garbage_rarely_collected,
    readable_traces,
    redactor_of,
    side_files,
    trace_paths,
    with_evidence,
)
from stepscope.errors import UsageError
from stepscope.report.brief import TOKENS
from stepscope.report.format import printable, share

if TYPE_CHECKING:
    from stepscope.diagnosis.diffs import Diffs
    from stepscope.diagnosis.finding import Finding, Unreadable
    from stepscope.diagnosis.job import JobSteps
    from stepscope.report.diagnosis import TraceReport

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
    if len(arguments.paths) == 1 and is_answered_as_job(arguments):
        return 0
    logged = logs_among(arguments)
    if logged is not None and not arguments.paths:
        write_logged(arguments, logged)
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
        there = reports_from_cluster(arguments, settings, files, unreadable)
        found = (finished(arguments, report, diffs) for report in there)
    else:
        diagnose_ahead(arguments, settings)
        traces = with_evidence(readable_traces(arguments, arguments.paths, unreadable), files, several=several)
        found = (report_of(arguments, trace, settings, diffs, room) for trace in traces)
    reports = sorted((report.by_device() if by_device else report for report in found), key=lambda each: each.order)
    reports = once_each(reports, unreadable)
    shared = tuple(each for each in across(reports) if arguments.rule is None or each.rule in arguments.rule)
    reports, job = as_job(reports, minimum_share(arguments))
    _write(arguments, reports, shared, _redacted(unreadable, arguments), logged, job)
    if arguments.diff:
        _write_diff(arguments.diff, diffs)
    findings = (finding for report in reports for finding in report.diagnosis.findings)
    return _judged(arguments.fail_on, [*shared, *findings])


def parsed_share(text: str) -> float:
    """Parse a share such as "10%" or "0.1"; 10 alone is refused as ambiguous."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(%?)\s*", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share of a step: write 10% or 0.1")
    return value


def _redacted(unreadable: Sequence[Unreadable], arguments: argparse.Namespace) -> Sequence[Unreadable]:
    if not arguments.redact:
        return unreadable
    redactor = redactor_of(arguments, paths=[each.path for each in unreadable])
    return [redactor.redact(each) for each in unreadable]


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
        print_for_assistant(arguments, document, top)
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
