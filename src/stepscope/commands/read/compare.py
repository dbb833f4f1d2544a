"""`stepscope compare`: which program is faster, and why; `stepscope history`: the step time of runs over time."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.options import (
    Command,
    CommandParser,
    add_raw_option,
    add_reading_options,
    add_redact_option,
    add_report_options,
    add_slower_option,
    add_top_option,
    add_user_code_options,
    exit_code_if_slower,
    row_count,
    suggestion,
    user_code_from,
)
from stepscope.commands.shared.output import Progress
from stepscope.commands.shared.reading import place_of, readable_traces, redacted, redactor_of
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.compare import Comparison, Side
    from stepscope.compare.history import History, Source
    from stepscope.diagnosis.finding import Unreadable
    from stepscope.record.runs import RunRecord
    from stepscope.trace import Trace

_ROWS: Final = 5


def _prepare_compare_parser(parser: CommandParser) -> None:
    parser.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        help="a trace, a run's name or folder, a folder of traces; or several, as a,b",
    )
    reports = parser.add_argument_group("reports, besides the text on the terminal (- writes it there instead)")
    add_report_options(
        reports,
        json="for programs",
        markdown="for a pull request",
        html="one page that needs nothing else, with both steps drawn",
    )
    add_redact_option(reports)
    what = parser.add_argument_group("what is shown")
    add_top_option(what, f"rows of each table, 0 for all (default: {_ROWS}, JSON and HTML: all)")
    add_slower_option(what)
    what.add_argument(
        "--all-steps",
        action="store_true",
        help="count a recording's first and last step even if they are far from the others",
    )
    add_user_code_options(parser)
    add_reading_options(parser)


def _run_compare(arguments: argparse.Namespace) -> int:
    if len(arguments.paths) < 2:
        raise UsageError("name two things to compare: stepscope compare BEFORE AFTER")
    if arguments.paths.count("-") > 1:
        raise UsageError("standard input can be only one side of a comparison")
    comparisons = compared(arguments)
    if arguments.redact:
        comparisons = _redacted(comparisons, arguments)
    _write_reports(arguments, comparisons)
    return exit_code_if_slower(arguments.fail_if_slower, ((each.after.name, each.samples) for each in comparisons))


def compared(arguments: argparse.Namespace) -> list[Comparison]:
    """The first path's program beside each of the others."""
    from stepscope.compare import compare_sides

    passed_over: dict[str, list[Unreadable]] = {}
    sides = [_side(arguments, path, passed_over.setdefault(path, [])) for path in arguments.paths]
    sides[1:] = [_with_difference(sides[0], side) for side in sides[1:]]
    found = compare_sides(sides[0], sides[1:], user_code=user_code_from(arguments), all_steps=arguments.all_steps)
    notes = tuple(f"Skipped: {each.reason}" for several in passed_over.values() for each in several)
    return [replace(comparison, notes=(*comparison.notes, *notes)) for comparison in found]


def _side(arguments: argparse.Namespace, path: str, passed_over: list[Unreadable]) -> Side:
    """One side of the comparison; for runs also their settings, and the times of the steps without the profiler."""
    from stepscope.compare import Side
    from stepscope.compare.trace_record import merged_settings
    from stepscope.record.run_folder import RunFolder, is_run_folder

    words = _runs_in(path)
    folders = [RunFolder.open(place) for place in map(place_of, words) if is_run_folder(place)]
    traces = (trace for word in words for trace in _traces(arguments, word, passed_over))
    if len(folders) < len(words):
        return Side(path, traces)
    from stepscope.compare.run_times import settings_of_run, unprofiled_steps
    from stepscope.trace.energy_records import step_energies

    settings = merged_settings(settings_of_run(folder.manifest()) for folder in folders)
    steps = [unprofiled_steps(folder) for folder in folders]
    unprofiled = [run for runs in steps for run in runs] if all(steps) else []
    return Side(path, traces, settings, unprofiled, step_energies([folder.recordings() for folder in folders]))


def _with_difference(before: Side, after: Side) -> Side:
    """Add the size of the diff between two runs' commits, if the repository here knows both."""
    from dataclasses import replace

    from stepscope.record.manifest import git_difference

    commits = [side.settings.get("git commit", "").removesuffix(" with changes") for side in (before, after)]
    stat = git_difference(Path(), *commits) if commits[0] != commits[1] else None
    return after if stat is None else replace(after, settings={**after.settings, "git diff": stat})


def _runs_in(path: str) -> list[str]:
    """Split "a,b" into several runs of one program; an existing path is never split."""
    if "," not in path or os.path.exists(path):
        return [path]
    words = path.split(",")
    if not all(words):
        raise UsageError(f"{path!r} has an empty name between commas or at an end")
    return words


def _traces(arguments: argparse.Namespace, path: str, passed_over: list[Unreadable]) -> Iterator[Trace]:
    for trace in readable_traces(arguments, [path], passed_over):
        if trace.metadata.format == "torch_snapshot":
            raise UsageError(f"{trace.metadata.path} is a memory snapshot, which has no times")
        yield trace


def _redacted(comparisons: Sequence[Comparison], arguments: argparse.Namespace) -> list[Comparison]:
    from stepscope.report.comparison import redacted_comparison

    return [redacted_comparison(each, partial(redactor_of, arguments)) for each in comparisons]


def _write_reports(arguments: argparse.Namespace, comparisons: Sequence[Comparison]) -> None:
    from stepscope.report.comparison import comparison_document, comparison_json

    output.write_reports(
        arguments,
        lambda: comparison_document(comparisons),
        top=_ROWS if arguments.top is None else arguments.top,
        page=lambda: _page(arguments, comparisons),
        json=lambda: comparison_json(comparisons, top=arguments.top or 0),
    )


def _page(arguments: argparse.Namespace, comparisons: Sequence[Comparison]) -> bytes:
    from stepscope.commands.read.documents import comparison_file

    sides = [comparisons[0].before, *(comparison.after for comparison in comparisons)]
    hosts = [side.trace.metadata.host for side in sides if side.trace.metadata.host]
    redactor = redactor_of(arguments, hosts) if arguments.redact else None
    return comparison_file(arguments, comparisons, redactor)


COMPARE: Final = Command(
    "compare",
    "Say whether one run is faster than another, and what makes the difference.",
    _prepare_compare_parser,
    _run_compare,
    """\
The first is the baseline, with which each of the others is compared. A folder means its traces, of one run's ranks or
of several runs; a,b,c means several runs too. Differences between these show the effect of chance.

examples:
  stepscope compare before.json.gz after.json.gz
  stepscope compare baseline workers-4 workers-8             runs, by their names
  stepscope compare before/ after/ --html difference.html    both steps drawn on one scale
  stepscope compare base-1,base-2,base-3 head-1,head-2,head-3
  stepscope compare before/ after/ --markdown -              for a pull request
  stepscope compare base head --fail-if-slower 3%            in CI: exit 1 if steps got 3 % slower, beyond chance
  stepscope compare base head --json - | jq '.comparisons[0].verdict'

Exit codes: 0 done, 1 slower than --fail-if-slower allows, 2 a mistake or a file that cannot be used.""",
    only_reads=True,
)


_DEFAULT_TOP: Final = 20


def _prepare_history_parser(parser: CommandParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="names of runs or series; * and ? match any letters")
    which = parser.add_argument_group("which runs make a series")
    which.add_argument("--command", metavar="TEXT", help="only runs whose command contains this text")
    which.add_argument(
        "--series",
        choices=("name", "command"),
        default="name",
        help="what a series' runs share besides their folder: the name without its number, or the command",
    )
    which.add_argument("--last", metavar="N", type=row_count, default=0, help="only the latest N runs of a series")
    which.add_argument(
        "--steps",
        choices=("unprofiled", "profiled"),
        help="times without the profiler, or of recorded steps (default: what most runs of a series have)",
    )
    what = parser.add_argument_group("what is written")
    add_top_option(what, f"runs in a table, 0 for all (default: {_DEFAULT_TOP})", _DEFAULT_TOP)
    forms = {"html": "a page with the plots", "json": "everything", "csv": "one row a run"}
    add_report_options(what, **{form: f"write {meaning}; - for standard output" for form, meaning in forms.items()})
    add_raw_option(what)
    add_redact_option(what)


def _run_history(arguments: argparse.Namespace) -> int:
    from stepscope.record.runs import RunIndex

    records = RunIndex().all()
    is_written = arguments.html or arguments.json or arguments.csv
    if not records and not is_written:
        output.print_text("There are no runs yet; stepscope run train.py records one.\n")
        return 0
    history = _history(_chosen(records, arguments), arguments)
    _write(history, arguments, only_files=bool(is_written))
    return 0


def _write(history: History, arguments: argparse.Namespace, *, only_files: bool) -> None:
    from stepscope.report.history import history_document, history_json
    from stepscope.report.html import html_of

    is_overview = not (arguments.names or arguments.command is not None)

    def csv() -> bytes:
        from stepscope.compare.history import history_table
        from stepscope.report.tables import table_bytes

        return table_bytes(history_table(history), "csv", raw=arguments.raw)

    output.write_reports(
        arguments,
        lambda: history_document(history, is_overview=is_overview),
        top=arguments.top,
        page=lambda: html_of(history_document(history)),
        is_printed=not only_files,
        json=lambda: history_json(history),
        csv=csv,
    )


def _chosen(records: Sequence[RunRecord], arguments: argparse.Namespace) -> list[RunRecord]:
    from stepscope.compare.run_times import series_of

    patterns = arguments.names
    for pattern in patterns:
        if not any(_fits(record.name, series_of(record.name), pattern) for record in records):
            known = dict.fromkeys(name for record in records for name in (series_of(record.name), record.name))
            hint = suggestion(pattern, list(known)) or "; stepscope runs lists them"
            raise UsageError(f"there is no run or series {pattern!r}{hint}")
    chosen = [
        record
        for record in records
        if not patterns or any(_fits(record.name, series_of(record.name), pattern) for pattern in patterns)
    ]
    if arguments.command is not None:
        chosen = [record for record in chosen if arguments.command in record.command]
        if not chosen:
            raise UsageError(f"no run's command contains {arguments.command!r}; stepscope runs lists them")
    return chosen


def _fits(name: str, series: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(series, pattern)


def _history(records: Sequence[RunRecord], arguments: argparse.Namespace) -> History:
    from stepscope.compare.history import run_history
    from stepscope.compare.run_times import timed_run

    source: Source | None = arguments.steps
    by_command = arguments.series == "command"
    runs = []
    with Progress(f"reading {len(records)} runs", in_bytes=False, arguments=arguments) as progress:
        for number, record in enumerate(records, 1):
            runs.append(timed_run(record, by_command=by_command))
            progress(number, len(records))
    machines = {run.settings.get("machine", "") for run in runs}
    return redacted(arguments, run_history(runs, source, last=arguments.last), sorted(machines))


HISTORY: Final = Command(
    "history",
    "The step time of runs of the same program over time, and where it changed.",
    _prepare_history_parser,
    _run_history,
    """\
Runs in the same folder whose names differ only in a number, a date or a commit at the end make a series. Without a NAME
every run counts.

examples:
  stepscope history                                          every series, the latest first
  stepscope history train                                    train, train-2, train-20260102-120000, ...
  stepscope history 'nightly-*' --html history.html          with a page for the browser
  stepscope history --command train.py --series command      one series for each command line
  stepscope history train --csv -                            every run as a row, for another tool
""",
)
