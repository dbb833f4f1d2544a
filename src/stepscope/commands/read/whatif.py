"""`stepscope whatif`: how long a step would take if something were different, and what would limit it then."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.changes import add_change_options, changes_from
from stepscope.commands.shared.reading import add_reading_options, open_from, redactor_of, trace_paths
from stepscope.commands.shared.tables import whole_number
from stepscope.commands.shared.user_code import add_user_code_options, user_code_from
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.diagnosis.view import View
    from stepscope.whatif import Change
    from stepscope.whatif.answer import Answer
    from stepscope.whatif.experiment import RankProspect

NAME: Final = "whatif"
HELP: Final = "Replay the steps with something different: how long they would take, and what limits them then."
CURVES: Final = ("operators", "lines", "kernels", "modules")
_TOP: Final = 20
_CURVE_TOP: Final = 10
_ALL: Final = 2**31
_EXAMPLES: Final = """\
examples:
  stepscope whatif trace.json                                what the steps wait for, and what each cause costs
  stepscope whatif trace.json --remove input                 if no batch were ever waited for
  stepscope whatif trace.json --remove host-synchronisation --scale 'aten::mm=0.5'
  stepscope whatif trace.json --launch-overhead 2us --sync-every 10
  stepscope whatif trace.json --curve lines                  which line is worth making faster
  stepscope whatif trace.json --critical-path --slack --json answer.json

The steps are replayed: everything begins when what it waited for is there. docs/whatif.md tells how, and when not to
believe it."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "trace", metavar="TRACE", help="a trace file, a folder of ranks, a run's name, or - for standard input"
    )
    add_change_options(parser)
    tables = parser.add_argument_group("tables")
    tables.add_argument(
        "--curve",
        choices=CURVES,
        help="what the steps would gain if each of these were faster, one by one, as causal profilers tell it",
    )
    tables.add_argument("--critical-path", action="store_true", help="what the steps wait for, by name")
    tables.add_argument(
        "--slack", action="store_true", help="how much later each operator could end without a longer step"
    )
    tables.add_argument(
        "--top", metavar="N", type=whole_number, help=f"rows of each table, 0 for all ({_TOP}; curve {_CURVE_TOP})"
    )
    tables.add_argument("--json", metavar="FILE", type=output.target, help="for programs; - for standard output")
    tables.add_argument("--redact", action="store_true", help="take out paths, host, user and process names")
    add_user_code_options(parser)
    add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Replay the trace and print the answer."""
    from stepscope.report.text import text_of
    from stepscope.report.whatif import whatif_document, whatif_json

    answer = _answer(arguments)
    if arguments.redact:
        answer = redactor_of(arguments, paths=[answer.measured.path]).redact(answer)
    if arguments.json:
        from stepscope.report.json import json_bytes

        output.write_output(arguments.json, json_bytes(whatif_json(answer)))
    if arguments.json != "-":
        top = _TOP if arguments.top is None else arguments.top
        output.print_text(text_of(whatif_document(answer), width=output.width(), top=top))
    return 0


def _answer(arguments: argparse.Namespace) -> Answer:
    from stepscope.diagnosis.view import View
    from stepscope.whatif.answer import speed_up_curve, what_if
    from stepscope.whatif.critical_path import critical_path, slack_of_operators

    view = View(open_from(arguments, arguments.trace), user_code=user_code_from(arguments))
    experiment = view.experiment
    changes = changes_from(arguments, view)
    answer, done = what_if(experiment, changes)
    return dataclasses.replace(
        answer,
        ranks=_ranks(arguments, view) if changes else (),
        path=critical_path(experiment, done) if arguments.critical_path else None,
        slack=slack_of_operators(experiment) if arguments.slack else None,
        curve=speed_up_curve(experiment, arguments.curve, top=_curve_rows(arguments.top)) if arguments.curve else None,
    )


def _ranks(arguments: argparse.Namespace, first: View) -> tuple[RankProspect, ...]:
    """What every rank would take, where the word stands for several that meet in collectives."""
    from stepscope.diagnosis.view import View
    from stepscope.whatif.changes import together
    from stepscope.whatif.experiment import MOST_RANKS, Ranks

    paths = trace_paths(arguments.trace) if arguments.trace != "-" else []
    if not 1 < len(paths) <= MOST_RANKS:
        return ()
    views = [first, *(View(open_from(arguments, path), user_code=first.user_code) for path in paths[1:])]
    ranks = Ranks.of([view.experiment for view in views])
    if not ranks.meetings[0].shape[1]:
        return ()
    changes: list[Change | None] = []
    for view in views:
        try:
            changes.append(together(*(each.change for each in changes_from(arguments, view))))
        except UsageError:  # what the rule finds on one rank it need not find on every other
            changes.append(None)
    return ranks.prospects(changes)


def _curve_rows(top: int | None) -> int:
    """How many things are tried: each takes a few replays."""
    return _CURVE_TOP if top is None else top or _ALL
