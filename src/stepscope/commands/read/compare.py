"""`stepscope compare`: whether one program is faster than another, and what makes the difference."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.applying import add_slower_option, judged
from stepscope.commands.shared.reading import add_reading_options, place_of, readable_traces, redactor_of
from stepscope.commands.shared.tables import whole_number
from stepscope.commands.shared.user_code import add_user_code_options, user_code_from
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.compare import Comparison, Side
    from stepscope.diagnosis.diagnosis import Unreadable
    from stepscope.report.comparison import Pictures
    from stepscope.trace import Trace

NAME: Final = "compare"
HELP: Final = "Say whether one run is faster than another, and what makes the difference."
_EXAMPLES: Final = """\
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

Exit codes: 0 done, 1 slower than --fail-if-slower allows, 2 a mistake or a file that cannot be used."""
_ROWS: Final = 5
_HTML_ROWS: Final = 20


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        help="a trace, a run's name or folder, a folder of traces; or several, as a,b",
    )
    reports = parser.add_argument_group("reports, besides the text on the terminal (- writes it there instead)")
    reports.add_argument("--json", metavar="FILE", type=output.target, help="for programs")
    reports.add_argument("--markdown", metavar="FILE", type=output.target, help="for a pull request")
    reports.add_argument(
        "--html", metavar="FILE", type=output.target, help="one page that needs nothing else, with both steps drawn"
    )
    reports.add_argument("--redact", action="store_true", help="take out paths, host, user and process names")
    what = parser.add_argument_group("what is shown")
    what.add_argument(
        "--top",
        metavar="N",
        type=whole_number,
        help=f"rows of each table, 0 for all (default: {_ROWS}, HTML: {_HTML_ROWS}, JSON: all)",
    )
    add_slower_option(what)
    what.add_argument(
        "--all-steps",
        action="store_true",
        help="count a recording's first and last step also where they lie far from the others",
    )
    add_user_code_options(parser)
    add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compare every path with the first, write the reports, and judge by --fail-if-slower."""
    if len(arguments.paths) < 2:
        raise UsageError("name two things to compare: stepscope compare BEFORE AFTER")
    if [arguments.json, arguments.markdown, arguments.html].count("-") > 1:
        raise UsageError("only one report can go to standard output")
    if arguments.paths.count("-") > 1:
        raise UsageError("standard input can be only one side of a comparison")
    comparisons = _compared(arguments)
    shown = _redacted(comparisons, arguments) if arguments.redact else comparisons
    _write_reports(arguments, shown)
    return judged(arguments.fail_if_slower, ((each.after.name, each.samples) for each in shown))


def _compared(arguments: argparse.Namespace) -> list[Comparison]:
    from dataclasses import replace

    from stepscope.compare import compare_sides

    passed_over: dict[str, list[Unreadable]] = {}
    sides = [_side(arguments, path, passed_over.setdefault(path, [])) for path in arguments.paths]
    sides[1:] = [_with_difference(sides[0], side) for side in sides[1:]]
    found = compare_sides(sides[0], sides[1:], user_code=user_code_from(arguments), all_steps=arguments.all_steps)
    notes = tuple(f"Passed over: {each.reason}" for several in passed_over.values() for each in several)
    return [replace(comparison, notes=(*comparison.notes, *notes)) for comparison in found]


def _side(arguments: argparse.Namespace, path: str, passed_over: list[Unreadable]) -> Side:
    """What a word stands for; of runs their settings too, and the times of the steps around the recording."""
    from stepscope.compare import Side
    from stepscope.compare.notes import merged_settings
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
    """With how much the commits of two runs differ, where the repository here knows both."""
    from dataclasses import replace
    from pathlib import Path

    from stepscope.record.manifest import git_difference

    commits = [side.settings.get("git commit", "").removesuffix(" with changes") for side in (before, after)]
    stat = git_difference(Path(), *commits) if commits[0] != commits[1] else None
    return after if stat is None else replace(after, settings={**after.settings, "git diff": stat})


def _runs_in(path: str) -> list[str]:
    """The words of "a,b", several runs of one program; a path that exists is one, whatever its name."""
    if "," not in path or os.path.exists(path):
        return [path]
    words = path.split(",")
    if not all(words):
        raise UsageError(f"{path!r} names no run between two commas, or at an end")
    return words


def _traces(arguments: argparse.Namespace, path: str, passed_over: list[Unreadable]) -> Iterator[Trace]:
    for trace in readable_traces(arguments, [path], passed_over):
        if trace.metadata.format == "torch_snapshot":
            raise UsageError(f"{trace.metadata.path} is a memory snapshot, which tells nothing of time")
        yield trace


def _redacted(comparisons: Sequence[Comparison], arguments: argparse.Namespace) -> list[Comparison]:
    from stepscope.report.comparison import redacted_comparison

    return [redacted_comparison(each, partial(redactor_of, arguments)) for each in comparisons]


def _write_reports(arguments: argparse.Namespace, comparisons: Sequence[Comparison]) -> None:
    from stepscope.report.comparison import comparison_document, comparison_json

    top = _ROWS if arguments.top is None else arguments.top
    if arguments.json:
        from stepscope.report.json import json_bytes

        output.write_output(arguments.json, json_bytes(comparison_json(comparisons, top=arguments.top or 0)))
    if arguments.markdown:
        from stepscope.report.markdown import markdown_of

        output.write_output(arguments.markdown, markdown_of(comparison_document(comparisons), top=top).encode())
    if arguments.html:
        from stepscope.report.html.page import html_of

        page = comparison_document(comparisons, _pictures(comparisons, arguments))
        output.write_output(arguments.html, html_of(page, top=_HTML_ROWS if arguments.top is None else arguments.top))
    if "-" not in (arguments.json, arguments.markdown, arguments.html):
        from stepscope.report.text import text_of

        output.print_text(text_of(comparison_document(comparisons), width=output.width(), top=top))


def _pictures(comparisons: Sequence[Comparison], arguments: argparse.Namespace) -> list[Pictures]:
    """Of each comparison both sides' typical steps; the baseline's is drawn once."""
    from stepscope.commands.shared.tables import compared_picture

    sides = [comparisons[0].before, *(comparison.after for comparison in comparisons)]
    drawn = [compared_picture(side.trace) for side in sides]
    if arguments.redact:
        hosts = [side.trace.metadata.host for side in sides if side.trace.metadata.host]
        redactor = redactor_of(arguments, hosts)
        drawn = [redactor.redact(picture) for picture in drawn]
    return [(drawn[0], picture) for picture in drawn[1:]]
