"""`stepscope history`: the step time of runs over time, and where it changed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.output import CommandParser, suggestion
from stepscope.commands.shared.tables import add_raw_option, whole_number
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.compare.history import History, Source
    from stepscope.record.runs import RunRecord

NAME: Final = "history"
HELP: Final = "The step time of runs of the same program over time, and where it changed."
_EXAMPLES: Final = """\
Runs whose names are the same but for a number, a date or a commit at the end, and that ran in the same folder, make a
series. Without a NAME every run counts.

examples:
  stepscope history                                          every series, the latest first
  stepscope history train                                    train, train-2, train-20260102-120000, ...
  stepscope history 'nightly-*' --html history.html          with a page for the browser
  stepscope history --command train.py --series command      one series for each command line
  stepscope history train --csv -                            every run as a row, for another tool
"""
_DEFAULT_TOP: Final = 20


def prepare_parser(parser: CommandParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("names", metavar="NAME", nargs="*", help="of runs or series; * and ? stand for any letters")
    which = parser.add_argument_group("which runs make a series")
    which.add_argument("--command", metavar="TEXT", help="only runs whose command contains this text")
    which.add_argument(
        "--series",
        choices=("name", "command"),
        default="name",
        help="what the runs of a series share besides their folder: the name but for its number, or the command",
    )
    which.add_argument("--last", metavar="N", type=whole_number, default=0, help="only the latest N runs of a series")
    which.add_argument(
        "--steps",
        choices=("unprofiled", "profiled"),
        help="times without the profiler, or of recorded steps (default: what most runs of a series have)",
    )
    what = parser.add_argument_group("what is written")
    what.add_argument(
        "--top", metavar="N", type=whole_number, default=_DEFAULT_TOP, help="runs in a table, 0 for all (default: 20)"
    )
    for form, meaning in (("html", "a page with the plots"), ("json", "everything"), ("csv", "one row a run")):
        what.add_argument(
            f"--{form}", metavar="FILE", type=output.target, help=f"write {meaning}; - for standard output"
        )
    add_raw_option(what)
    what.add_argument("--redact", action="store_true", help="take out paths, host, user and process names")


def run(arguments: argparse.Namespace) -> int:
    """Print the history, or write what was asked for."""
    from stepscope.record.runs import RunIndex

    records = RunIndex().all()
    outputs = {form: path for form in ("html", "json", "csv") if (path := getattr(arguments, form))}
    if not records and not outputs:
        output.print_text("There are no runs yet; stepscope run train.py records one.\n")
        return 0
    history = _history(_chosen(records, arguments), arguments)
    if list(outputs.values()).count("-") > 1:
        raise UsageError("only one of --html, --json and --csv can go to standard output")
    for form, path in outputs.items():
        output.write_output(path, _written(history, form, raw=arguments.raw))
    if not outputs:
        from stepscope.report.history import history_document
        from stepscope.report.text import text_of

        is_overview = not arguments.names and arguments.command is None
        document = history_document(history, is_overview=is_overview)
        output.print_text(text_of(document, width=output.width(), top=arguments.top))
    return 0


def _chosen(records: Sequence[RunRecord], arguments: argparse.Namespace) -> list[RunRecord]:
    """The runs that the names and the command choose."""
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
    from stepscope.commands.shared.reading import Progress
    from stepscope.compare.history import run_history
    from stepscope.compare.run_times import timed_run

    source: Source | None = arguments.steps
    by_command = arguments.series == "command"
    progress = Progress(f"{len(records)} runs", sys.stderr)
    runs = []
    try:
        for number, record in enumerate(records):
            runs.append(timed_run(record, by_command=by_command))
            if sys.stderr.isatty():
                progress(number + 1, len(records))
    finally:
        progress.clear()
    history = run_history(runs, source, last=arguments.last)
    if arguments.redact:
        from stepscope.commands.shared.reading import redactor_of

        machines = {run.settings.get("machine", "") for run in runs}
        history = redactor_of(arguments, sorted(machines)).redact(history)
    return history


def _written(history: History, form: str, *, raw: bool) -> bytes:
    from stepscope.compare.history import history_table
    from stepscope.report.tables import table_bytes

    if form == "csv":
        return table_bytes(history_table(history), "csv", raw=raw)
    if form == "json":
        from stepscope.report.history import history_json
        from stepscope.report.json import json_bytes

        return json_bytes(history_json(history))
    from stepscope.report.history import history_document
    from stepscope.report.html.page import html_of

    return html_of(history_document(history))
