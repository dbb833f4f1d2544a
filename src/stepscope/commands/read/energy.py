"""`stepscope energy`: what energy a step uses, where it goes, what it emits, and what each finding would save."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.reading import add_reading_options, readable_traces, redactor_of
from stepscope.commands.shared.tables import whole_number
from stepscope.commands.shared.user_code import add_user_code_options, user_code_from
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.diagnosis.diagnosis import Unreadable
    from stepscope.diagnosis.view import View
    from stepscope.predict.cost.energy_parts import EnergyAnswer, PowerSettings, SampledEnergy, TraceEnergy
    from stepscope.trace import Trace

NAME: Final = "energy"
HELP: Final = "What energy a step uses, where it goes, what it emits, and what each finding would save."
_TOP: Final = 10
_EXAMPLES: Final = """\
Measured where `stepscope run --energy` recorded the run, else from sampled power, else an estimate between bounds,
with its formula. docs/energy.md tells how, and what is not counted.

examples:
  stepscope energy RUN --region FRA                          of a run, and the CO2 of it in France
  stepscope energy trace.json --iterations 4e6               of a whole training
  stepscope energy trace.json --idle-watts 55 --cpu-watts 120 --pue 1.2
  stepscope energy trace.json --json - | jq .total.joules
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "path", metavar="PATH", help="a run's name or folder, a trace file, a folder of ranks, or - for standard input"
    )
    asked = parser.add_argument_group("what is asked")
    asked.add_argument(
        "--iterations", metavar="N", type=iterations, help="steps to count, such as 4e6 (default: recorded)"
    )
    asked.add_argument(
        "--region", metavar="PLACE", help="whose electricity: FRA, US-CA, SE3, aws:eu-west-3 (default: no CO2 is told)"
    )
    asked.add_argument(
        "--pue",
        metavar="X",
        type=factor,
        default=1.0,
        help="watts of the building for each of its computers (default: 1)",
    )
    powers = parser.add_argument_group("powers that you know better, in watts")
    powers.add_argument("--device-watts", metavar="W", type=watts, help="a device's power limit")
    powers.add_argument("--idle-watts", metavar="W", type=watts, help="what a device draws without work")
    powers.add_argument("--cpu-watts", metavar="W", type=watts, help="what the processors draw together")
    reports = parser.add_argument_group("reports")
    reports.add_argument(
        "--top", metavar="N", type=whole_number, default=_TOP, help=f"rows of each table, 0 for all (default: {_TOP})"
    )
    reports.add_argument("--json", metavar="FILE", type=output.target, help="for programs; - for standard output")
    reports.add_argument("--redact", action="store_true", help="take out paths, host, user and process names")
    add_user_code_options(parser)
    add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the answer."""
    from stepscope.report.energy import energy_document, energy_json
    from stepscope.report.text import text_of

    answer = answered(arguments, arguments.path)
    if arguments.redact:
        answer = redactor_of(arguments, paths=[trace.path for trace in answer.traces]).redact(answer)
    if arguments.json:
        from stepscope.report.json import json_bytes

        output.write_output(arguments.json, json_bytes(energy_json(answer)))
    if arguments.json != "-":
        output.print_text(text_of(energy_document(answer), width=output.width(), top=arguments.top))
    return 0


def answered(arguments: argparse.Namespace, path: str) -> EnergyAnswer:
    """The energy of everything that the path stands for.

    Raises:
        UsageError: the place is none, or no file can be read.
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
    from stepscope.trace.energy_records import record_beside

    if trace.metadata.format == "torch_snapshot":
        raise UsageError(f"{trace.metadata.path} is a memory snapshot, which tells nothing of time")
    view = View(trace, None, user_code_from(arguments))
    diagnosis = diagnose_view(view)
    record = record_beside(trace.metadata.path)
    return energy_of_trace(view, diagnosis.findings, _settings(arguments), record=record, sampled=tuple(_sampled(view)))


def _settings(arguments: argparse.Namespace) -> PowerSettings:
    from stepscope.predict.cost.energy_parts import PowerSettings

    return PowerSettings(arguments.device_watts, arguments.idle_watts, arguments.cpu_watts)


def _sampled(view: View) -> Iterator[SampledEnergy]:
    """What the telemetry beside the trace tells of the devices' energy."""
    from pathlib import Path

    from stepscope.predict.cost.energy import sampled_energy
    from stepscope.trace.telemetry import read_telemetry, telemetry_files

    place = Path(view.trace.metadata.path)
    files = [file for file in telemetry_files(place) if file != place]
    if files:
        try:
            telemetry = read_telemetry(files)
        except UsageError:
            return
        yield from sampled_energy(telemetry, view.trace.metadata.origin_unix_ns, view.span, view.step_count)


def iterations(text: str) -> int:
    """A number of iterations from the command line, such as 4e6."""
    number = _number(text)
    if number is None or number != int(number) or not 1 <= number <= 1e15:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of iterations: write 250000 or 4e6")
    return int(number)


def watts(text: str) -> float:
    """A power from the command line."""
    number = _number(text)
    if number is None or not 0 <= number <= 1e7:
        raise argparse.ArgumentTypeError(f"{text!r} is no power in watts: write 300 or 72.5")
    return number


def factor(text: str) -> float:
    """A data centre's PUE from the command line, which is never below 1."""
    number = _number(text)
    if number is None or not 1 <= number <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no PUE: it is 1 or more, such as 1.2")
    return number


def _number(text: str) -> float | None:
    return (
        float(text) if re.fullmatch(r"[0-9]{1,15}(?:\.[0-9]{1,9})?(?:e[0-9]{1,2})?", text.strip(), re.ASCII) else None
    )
