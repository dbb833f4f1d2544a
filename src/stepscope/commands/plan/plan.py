"""`stepscope plan`: where a whole training could run, how long it would take there and what it would cost."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from datetime import date
from typing import TYPE_CHECKING, Final

from stepscope.commands.plan.predict import add_prediction_options, predictor_of
from stepscope.commands.plan.prices import of_providers, price_store, provider_names
from stepscope.commands.shared import output
from stepscope.commands.shared.changes import other_ranks
from stepscope.commands.shared.reading import add_reading_options, open_from, redactor_of
from stepscope.commands.shared.tables import whole_number
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.predict.cost.plan import Plan, Request

NAME: Final = "plan"
HELP: Final = "Where a whole training could run, how long it would take there and what it would cost."
_TOP: Final = 20
_MOST_ITERATIONS: Final = 1e15
_LARGEST_BUDGET: Final = 1e12
_LONGEST_H: Final = 24 * 366 * 100
_MOST_COUNTS: Final = 64
_HOURS: Final = {"s": 1 / 3600, "min": 1 / 60, "m": 1 / 60, "h": 1.0, "d": 24.0, "w": 168.0}
_EXAMPLES: Final = """\
An iteration is a step as it was recorded. On several devices each works on a batch as large as the recorded one, so
that fewer steps do for the same samples; how long these take is predicted, not divided.

examples:
  stepscope plan trace.json --iterations 4e6
  stepscope plan trace.json --iterations 4e6 --deadline 12h --budget 500
  stepscope plan trace.json --iterations 4e6 --spot --gpus 1,2 --providers lambda,runpod
  stepscope plan trace.json --iterations 4e6 --precision bf16 --html plan.html

stepscope prices lists the prices and imports others. docs/plan.md has the formulas, and what is not counted."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "trace", metavar="TRACE", help="a trace file, a folder of ranks, a run's name, or - for standard input"
    )
    parser.add_argument(
        "--iterations", metavar="N", type=iterations, required=True, help="steps of the training, such as 4e6"
    )
    wanted = parser.add_argument_group("what is wanted")
    wanted.add_argument("--deadline", metavar="TIME", type=hours, help="what it may take, such as 12h, 90min or 2d")
    wanted.add_argument("--budget", metavar="USD", type=budget, help="what it may cost, such as 500")
    wanted.add_argument("--providers", metavar="A,B", type=provider_names, help="only these providers' machines")
    wanted.add_argument(
        "--gpus", metavar="N,N", type=counts, help="only machines with so many accelerators, such as 1,2,4,8"
    )
    wanted.add_argument("--spot", action="store_true", help="at spot prices: cheaper, but taken back at any time")
    how = parser.add_argument_group("how it would run")
    add_prediction_options(how)
    how.add_argument(
        "--link", metavar="LINK", help="between the devices of a machine, such as nvlink4 or 12GB/s (default: its own)"
    )
    reports = parser.add_argument_group("reports (- writes to standard output)")
    reports.add_argument("--json", metavar="FILE", type=output.target, help="for programs")
    reports.add_argument(
        "--html", metavar="FILE", type=output.target, help="one page that needs nothing else, with a plot"
    )
    reports.add_argument("--top", metavar="N", type=whole_number, default=_TOP, help=f"machines, 0 for all ({_TOP})")
    reports.add_argument("--redact", action="store_true", help="take out paths, host, user and process names")
    add_reading_options(parser)


def iterations(text: str) -> float:
    """A number of iterations from the command line: 4e6, 4000000 or 4,000,000."""
    if not re.fullmatch(r"\d{1,3}(?:,\d{3})+|\d{1,16}(?:\.\d{1,6})?(?:[eE]\+?\d{1,2})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of iterations: write 4e6 or 4000000")
    number = float(text.replace(",", ""))
    if not 1 <= number <= _MOST_ITERATIONS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of iterations: from 1 to {_MOST_ITERATIONS:.0e} can be planned"
        )
    return number


def hours(text: str) -> float:
    """A time from the command line in hours: 12h, 90min, 2d."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,6})?)\s*(s|min|m|h|d|w)\s*", text)
    value = float(match[1]) * _HOURS[match[2]] if match else 0.0
    if not 0 < value <= _LONGEST_H:
        raise argparse.ArgumentTypeError(f"{text!r} is no time that can be planned: write 12h, 90min or 2d")
    return value


def budget(text: str) -> float:
    """US dollars from the command line: 500, $500 or 1,200.50."""
    match = re.fullmatch(r"\s*\$?\s*(\d{1,3}(?:,\d{3})+(?:\.\d{1,2})?|\d{1,12}(?:\.\d{1,6})?)\s*(?:USD|usd)?\s*", text)
    value = float(match[1].replace(",", "")) if match else 0.0
    if not 0 < value <= _LARGEST_BUDGET or not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no budget: write an amount of US dollars, such as 500")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Numbers of accelerators from the command line, separated by commas."""
    words = [word.strip() for word in text.split(",")]
    if len(words) > _MOST_COUNTS or not all(re.fullmatch(r"[0-9]{1,4}", word) and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of accelerators: write 1,2,4,8")
    return tuple(sorted({int(word) for word in words}))


def run(arguments: argparse.Namespace) -> int:
    """Plan, and write the reports."""
    if arguments.json == "-" and arguments.html == "-":
        raise UsageError("only one report can go to standard output")
    plan = _plan(arguments)
    if arguments.redact:
        redactor = redactor_of(arguments, paths=[plan.recorded.path])
        parts = {name: redactor.value(name, getattr(plan.recorded, name)) for name in ("path", "warnings")}
        plan = dataclasses.replace(plan, recorded=dataclasses.replace(plan.recorded, **parts))
    from stepscope.report.plan import plan_document, plan_json

    if arguments.json:
        from stepscope.report.json import json_bytes

        output.write_output(arguments.json, json_bytes(plan_json(plan)))
    if arguments.html:
        from stepscope.report.html.page import html_of

        output.write_output(arguments.html, html_of(plan_document(plan)))
    if "-" not in (arguments.json, arguments.html):
        from stepscope.report.text import text_of

        output.print_text(text_of(plan_document(plan), width=output.width(), top=arguments.top))
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    from stepscope.predict.cost.plan import make_plan
    from stepscope.whatif.experiment import Experiment

    request = _request(arguments)
    prices = of_providers(price_store().known(), arguments.providers)
    if request.counts is not None and not any(price.count in request.counts for price in prices):
        there = ", ".join(map(str, sorted({price.count for price in prices})))
        raise UsageError(f"no machine with --gpus {','.join(map(str, request.counts))} has a price; there are {there}")
    experiment = Experiment(open_from(arguments, arguments.trace))
    predictor = predictor_of(arguments, experiment)
    return make_plan(predictor, prices, request, today=date.today(), others=other_ranks(arguments))


def _request(arguments: argparse.Namespace) -> Request:
    from stepscope.predict.cost.plan import Request
    from stepscope.predict.links import named_link

    return Request(
        iterations=arguments.iterations,
        counts=arguments.gpus,
        spot=arguments.spot,
        deadline_h=arguments.deadline,
        budget_usd=arguments.budget,
        link=None if arguments.link is None else named_link(arguments.link),
    )
