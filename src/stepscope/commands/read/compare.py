"""`stepscope compare`: whether one program is faster than another, and what makes the difference."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.command import Command, CommandParser
from stepscope.commands.shared.options import (
    add_reading_options,
    add_redact_option,
    add_report_options,
    add_slower_option,
    add_top_option,
    add_user_code_options,
    exit_code_if_slower,
    user_code_from,
)
from stepscope.commands.shared.reading import place_of, readable_traces, redacted, redactor_of
from stepscope.errors import UsageError

if TYPE_CHECKING:
    import polars as pl

    from stepscope.analysis.picture import StepPicture
    from stepscope.compare import Comparison, Side
    from stepscope.diagnosis.diagnosis import Unreadable
    from stepscope.report.comparison import Pictures
    from stepscope.trace import Trace, Window

_ROWS: Final = 5
_HTML_ROWS: Final = 20


def _prepare_parser(parser: CommandParser) -> None:
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
    add_top_option(what, f"rows of each table, 0 for all (default: {_ROWS}, HTML: {_HTML_ROWS}, JSON: all)")
    add_slower_option(what)
    what.add_argument(
        "--all-steps",
        action="store_true",
        help="count a recording's first and last step also where they lie far from the others",
    )
    add_user_code_options(parser)
    add_reading_options(parser)


def _run(arguments: argparse.Namespace) -> int:
    if len(arguments.paths) < 2:
        raise UsageError("name two things to compare: stepscope compare BEFORE AFTER")
    if arguments.paths.count("-") > 1:
        raise UsageError("standard input can be only one side of a comparison")
    comparisons = _compared(arguments)
    if arguments.redact:
        comparisons = _redacted(comparisons, arguments)
    _write_reports(arguments, comparisons)
    return exit_code_if_slower(arguments.fail_if_slower, ((each.after.name, each.samples) for each in comparisons))


def _compared(arguments: argparse.Namespace) -> list[Comparison]:
    from stepscope.compare import compare_sides

    passed_over: dict[str, list[Unreadable]] = {}
    sides = [_side(arguments, path, passed_over.setdefault(path, [])) for path in arguments.paths]
    sides[1:] = [_with_difference(sides[0], side) for side in sides[1:]]
    found = compare_sides(sides[0], sides[1:], user_code=user_code_from(arguments), all_steps=arguments.all_steps)
    notes = tuple(f"Passed over: {each.reason}" for several in passed_over.values() for each in several)
    return [replace(comparison, notes=(*comparison.notes, *notes)) for comparison in found]


def _side(arguments: argparse.Namespace, path: str, passed_over: list[Unreadable]) -> Side:
    """One side of the comparison; for runs also their settings, and the times of the steps without the profiler."""
    from stepscope.compare import Side
    from stepscope.compare.settings import merged_settings
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
        raise UsageError(f"{path!r} names no run between two commas, or at an end")
    return words


def _traces(arguments: argparse.Namespace, path: str, passed_over: list[Unreadable]) -> Iterator[Trace]:
    for trace in readable_traces(arguments, [path], passed_over):
        if trace.metadata.format == "torch_snapshot":
            raise UsageError(f"{trace.metadata.path} is a memory snapshot, which holds no times")
        yield trace


def _redacted(comparisons: Sequence[Comparison], arguments: argparse.Namespace) -> list[Comparison]:
    from stepscope.report.comparison import redacted_comparison

    return [redacted_comparison(each, partial(redactor_of, arguments)) for each in comparisons]


def _write_reports(arguments: argparse.Namespace, comparisons: Sequence[Comparison]) -> None:
    from stepscope.report.comparison import comparison_document, comparison_json
    from stepscope.report.html.page import html_of

    def page() -> bytes:
        document = comparison_document(comparisons, _pictures(comparisons, arguments))
        return html_of(document, top=_HTML_ROWS if arguments.top is None else arguments.top)

    output.write_reports(
        arguments,
        lambda: comparison_document(comparisons),
        top=_ROWS if arguments.top is None else arguments.top,
        page=page,
        json=lambda: comparison_json(comparisons, top=arguments.top or 0),
    )


def _pictures(comparisons: Sequence[Comparison], arguments: argparse.Namespace) -> list[Pictures]:
    """The typical steps of both sides of each comparison; the baseline's is drawn once."""
    sides = [comparisons[0].before, *(comparison.after for comparison in comparisons)]
    hosts = [side.trace.metadata.host for side in sides if side.trace.metadata.host]
    drawn = [redacted(arguments, compared_picture(side.trace), hosts) for side in sides]
    return [(drawn[0], picture) for picture in drawn[1:]]


def compared_picture(trace: Trace) -> StepPicture:
    """The typical step or else the whole trace; without a device, idle causes are those of the main thread."""
    from stepscope.analysis.idle import idle_time
    from stepscope.analysis.picture import step_picture, typical_step
    from stepscope.analysis.steps import step_table

    causes = _main_thread(trace) if trace.device_work.is_empty() else idle_time(trace)
    return step_picture(trace, typical_step(step_table(trace), causes) or _whole(trace), causes)


def _main_thread(trace: Trace) -> pl.DataFrame:
    """The main thread's time by cause in the form of an idle table, without the time it computed."""
    import polars as pl

    from stepscope.analysis.host import host_time

    pieces = host_time(trace).filter(pl.col("cause") != "compute")
    no_device, no_trigger = pl.lit("").alias("device"), pl.lit(None, pl.String).alias("trigger")
    return pieces.select(no_device, "start_ns", "duration_ns", "cause", no_trigger)


def _whole(trace: Trace) -> Window:
    """From the start of the first device work (or operator) to the end of the last one."""
    import polars as pl

    from stepscope.trace import Window

    work = trace.operators if trace.device_work.is_empty() else trace.device_work
    if work.is_empty():
        return Window(0, 1)
    start, end = work.select(
        pl.col("start_ns").min(), (pl.col("start_ns") + pl.col("duration_ns")).max().alias("end")
    ).row(0)
    return Window(start, max(end, start + 1))


COMMAND: Final = Command(
    "compare",
    "Say whether one run is faster than another, and what makes the difference.",
    _prepare_parser,
    _run,
    """\
The first is the baseline; each of the others is held against it. A folder is its traces: of the ranks of one run, or
of several runs; a,b,c is several runs too. How much these differ from each other tells what chance does.

examples:
  stepscope compare before.json.gz after.json.gz
  stepscope compare baseline workers-4 workers-8             runs, by their names
  stepscope compare before/ after/ --html difference.html    both steps drawn on one scale
  stepscope compare base-1,base-2,base-3 head-1,head-2,head-3
  stepscope compare before/ after/ --markdown -              for a pull request
  stepscope compare base head --fail-if-slower 3%            in CI: exit 1 where steps got 3 % slower, and not by chance
  stepscope compare base head --json - | jq '.comparisons[0].verdict'

Exit codes: 0 done, 1 slower than --fail-if-slower allows, 2 a mistake or a file that cannot be used.""",
)
