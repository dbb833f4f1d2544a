"""`stepscope history`: the step time of runs over time, and where it changed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.command import Command, CommandParser, suggestion
from stepscope.commands.shared.options import add_raw_option, add_redact_option, add_report_options, add_top_option
from stepscope.commands.shared.reading import Progress, redacted
from stepscope.commands.shared.values import row_count
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.compare.history import History, Source
    from stepscope.record.runs import RunRecord

_DEFAULT_TOP: Final = 20


def _prepare_parser(parser: CommandParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="of runs or series; * and ? stand for any letters")
    which = parser.add_argument_group("which runs make a series")
    which.add_argument("--command", metavar="TEXT", help="only runs whose command contains this text")
    which.add_argument(
        "--series",
        choices=("name", "command"),
        default="name",
        help="what the runs of a series share besides their folder: the name but for its number, or the command",
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


def _run(arguments: argparse.Namespace) -> int:
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
    from stepscope.report.html.page import html_of

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
    with Progress(f"{len(records)} runs") as progress:
        for number, record in enumerate(records, 1):
            runs.append(timed_run(record, by_command=by_command))
            progress(number, len(records))
    machines = {run.settings.get("machine", "") for run in runs}
    return redacted(arguments, run_history(runs, source, last=arguments.last), sorted(machines))


COMMAND: Final = Command(
    "history",
    "The step time of runs of the same program over time, and where it changed.",
    _prepare_parser,
    _run,
    """\
Runs whose names are the same but for a number, a date or a commit at the end, and that ran in the same folder, make a
series. Without a NAME every run counts.

examples:
  stepscope history                                          every series, the latest first
  stepscope history train                                    train, train-2, train-20260102-120000, ...
  stepscope history 'nightly-*' --html history.html          with a page for the browser
  stepscope history --command train.py --series command      one series for each command line
  stepscope history train --csv -                            every run as a row, for another tool
""",
)
