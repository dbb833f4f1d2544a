"""`stepscope energy`: what energy a step uses, where it goes, what it emits, and what each finding would save."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.command import Command, CommandParser
from stepscope.commands.shared.options import (
    add_reading_options,
    add_redact_option,
    add_report_options,
    add_top_option,
    add_user_code_options,
    user_code_from,
)
from stepscope.commands.shared.reading import readable_traces, redacted
from stepscope.commands.shared.values import number
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.diagnosis.diagnosis import Unreadable
    from stepscope.diagnosis.view import View
    from stepscope.predict.cost.energy_parts import EnergyAnswer, SampledEnergy, TraceEnergy
    from stepscope.trace import Trace

_TOP: Final = 10
_number_of_steps = number("is no number of iterations: write 250000 or 4e6", least=1, most=1e15)
_watts = number("is no power in watts: write 300 or 72.5", most=1e7)
_pue = number("is no PUE: it is 1 or more, such as 1.2", least=1, most=100)


def _iterations(text: str) -> int:
    steps = _number_of_steps(text)
    if steps != int(steps):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of iterations: write 250000 or 4e6")
    return int(steps)


def _prepare_parser(parser: CommandParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", help="a run's name or folder, a trace file, a folder of ranks, or - for standard input"
    )
    asked = parser.add_argument_group("what is asked")
    asked.add_argument(
        "--iterations", metavar="N", type=_iterations, help="steps to count, such as 4e6 (default: recorded)"
    )
    asked.add_argument(
        "--region", metavar="PLACE", help="whose electricity: FRA, US-CA, SE3, aws:eu-west-3 (default: no CO2 is given)"
    )
    asked.add_argument(
        "--pue",
        metavar="X",
        type=_pue,
        default=1.0,
        help="watts of the building for each watt of its computers (default: 1)",
    )
    powers = parser.add_argument_group("powers that you know better, in watts")
    powers.add_argument("--device-watts", metavar="W", type=_watts, help="a device's power limit")
    powers.add_argument("--idle-watts", metavar="W", type=_watts, help="what a device draws without work")
    powers.add_argument("--cpu-watts", metavar="W", type=_watts, help="what the processors draw together")
    reports = parser.add_argument_group("reports")
    add_top_option(reports, f"rows of each table, 0 for all (default: {_TOP})", _TOP)
    add_report_options(reports, json="for programs; - for standard output")
    add_redact_option(reports)
    add_user_code_options(parser)
    add_reading_options(parser)


def _run(arguments: argparse.Namespace) -> int:
    from stepscope.report.energy import energy_document, energy_json

    answer = _answer(arguments, arguments.path)
    answer = redacted(arguments, answer, paths=[trace.path for trace in answer.traces])
    output.write_reports(
        arguments, lambda: energy_document(answer), top=arguments.top, json=lambda: energy_json(answer)
    )
    return 0


def _answer(arguments: argparse.Namespace, path: str) -> EnergyAnswer:
    """The energy of all traces at the path.

    Raises:
        UsageError: the region is unknown, or no file can be read.
    """
    from stepscope.predict.cost.carbon import grid_of
    from stepscope.predict.cost.energy_parts import EnergyAnswer

    grid = None if arguments.region is None else grid_of(arguments.region)
    unreadable: list[Unreadable] = []
    traces = [_energy(arguments, trace) for trace in readable_traces(arguments, [path], unreadable)]
    traces.sort(key=lambda each: (math.inf if each.rank is None else each.rank, each.path))
    return EnergyAnswer(tuple(traces), arguments.iterations, arguments.pue, grid)


def _energy(arguments: argparse.Namespace, trace: Trace) -> TraceEnergy:
    from stepscope.diagnosis import diagnose_view
    from stepscope.diagnosis.view import View
    from stepscope.predict.cost.energy import energy_of_trace
    from stepscope.predict.cost.energy_parts import PowerSettings
    from stepscope.trace.energy_records import record_beside

    if trace.metadata.format == "torch_snapshot":
        raise UsageError(f"{trace.metadata.path} is a memory snapshot, which holds no times")
    view = View(trace, None, user_code_from(arguments))
    powers = PowerSettings(arguments.device_watts, arguments.idle_watts, arguments.cpu_watts)
    record = record_beside(trace.metadata.path)
    return energy_of_trace(view, diagnose_view(view).findings, powers, record=record, sampled=_sampled(view))


def _sampled(view: View) -> tuple[SampledEnergy, ...]:
    from stepscope.predict.cost.energy import sampled_energy
    from stepscope.trace.telemetry import read_telemetry, telemetry_files

    place = Path(view.trace.metadata.path)
    files = [file for file in telemetry_files(place) if file != place]
    if not files:
        return ()
    try:
        telemetry = read_telemetry(files)
    except UsageError:
        return ()
    return tuple(sampled_energy(telemetry, view.trace.metadata.origin_unix_ns, view.span, view.step_count))


COMMAND: Final = Command(
    "energy",
    "What energy a step uses, where it goes, what it emits, and what each finding would save.",
    _prepare_parser,
    _run,
    """\
Measured where `stepscope run --energy` recorded the run, else from sampled power, else an estimate between bounds,
with its formula. docs/energy.md explains how, and what is not counted.

examples:
  stepscope energy RUN --region FRA                          of a run, and the CO2 of it in France
  stepscope energy trace.json --iterations 4e6               of a whole training
  stepscope energy trace.json --idle-watts 55 --cpu-watts 120 --pue 1.2
  stepscope energy trace.json --json - | jq .total.joules
""",
)
