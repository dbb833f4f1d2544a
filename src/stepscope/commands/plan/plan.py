"""`stepscope plan`: where a whole training could run, how long it would take there and what it would cost."""

from __future__ import annotations

import argparse
import dataclasses
from datetime import date
from typing import TYPE_CHECKING, Final

from stepscope.commands.plan.predict import add_prediction_options, link_of, other_ranks, predictor_of
from stepscope.commands.plan.prices import of_providers, price_store, provider_names
from stepscope.commands.shared import output
from stepscope.commands.shared.command import Command, CommandParser
from stepscope.commands.shared.options import (
    RANKS,
    add_reading_options,
    add_redact_option,
    add_report_options,
    add_top_option,
    add_trace,
)
from stepscope.commands.shared.reading import open_from, redactor_of
from stepscope.commands.shared.values import HOURS, number, whole_list
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.predict.cost.plan import Plan, Request

_TOP: Final = 20
_LONGEST_H: Final = 24.0 * 366 * 100
iterations = number("is no number of iterations: write 4e6 or 4000000, at most 1e15", least=1, most=1e15)
hours = number("is no time that can be planned: write 12h, 90min or 2d", HOURS, above=0, most=_LONGEST_H)
counts = whole_list("numbers of accelerators", most=9999, longest=64)
_dollars = number(
    "is no budget: write an amount of US dollars, such as 500", {"": 1, "USD": 1, "usd": 1}, above=0, most=1e12
)


def budget(text: str) -> float:
    """Parse US dollars: 500, $500 or 1,200.50."""
    return _dollars(text.strip().removeprefix("$"))


def _prepare_parser(parser: CommandParser) -> None:
    add_trace(parser, RANKS)
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
    add_report_options(reports, json="for programs", html="one page that needs nothing else, with a plot")
    add_top_option(reports, f"machines, 0 for all ({_TOP})", _TOP)
    add_redact_option(reports)
    add_reading_options(parser)


def _run(arguments: argparse.Namespace) -> int:
    from stepscope.report.plan import plan_document, plan_json

    plan = _plan(arguments)
    if arguments.redact:
        redactor = redactor_of(arguments, paths=[plan.recorded.path])
        parts = {name: redactor.value(name, getattr(plan.recorded, name)) for name in ("path", "warnings")}
        plan = dataclasses.replace(plan, recorded=dataclasses.replace(plan.recorded, **parts))

    output.write_reports(arguments, lambda: plan_document(plan), top=arguments.top, json=lambda: plan_json(plan))
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

    return Request(
        iterations=arguments.iterations,
        counts=None if arguments.gpus is None else tuple(sorted(set(arguments.gpus))),
        spot=arguments.spot,
        deadline_h=arguments.deadline,
        budget_usd=arguments.budget,
        link=link_of(arguments),
    )


COMMAND: Final = Command(
    "plan",
    "Where a whole training could run, how long it would take there and what it would cost.",
    _prepare_parser,
    _run,
    """\
An iteration is a step as it was recorded. On several devices each works on a batch as large as the recorded one, so
that fewer steps do for the same samples; how long these take is predicted, not divided.

examples:
  stepscope plan trace.json --iterations 4e6
  stepscope plan trace.json --iterations 4e6 --deadline 12h --budget 500
  stepscope plan trace.json --iterations 4e6 --spot --gpus 1,2 --providers lambda,runpod
  stepscope plan trace.json --iterations 4e6 --precision bf16 --html plan.html

stepscope prices lists the prices and imports others. docs/plan.md has the formulas, and what is not counted.""",
)
