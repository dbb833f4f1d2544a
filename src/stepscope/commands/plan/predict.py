"""`stepscope predict`: how long the recorded steps would take on other hardware."""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.changes import (
    add_scaling_options,
    joined,
    scaled_devices,
    scaling_json_of,
)
from stepscope.commands.shared.reading import add_reading_options, open_from, redactor_of
from stepscope.commands.shared.tables import whole_number
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.machine.own_devices import DevicePeaks
    from stepscope.predict.answer import PredictedSteps
    from stepscope.predict.prediction import StepPredictor
    from stepscope.whatif.experiment import Experiment

NAME: Final = "predict"
HELP: Final = "How long the recorded steps would take on other hardware, how sure that is, and what limits them there."
USUAL: Final = (
    "T4", "L4", "A10", "L40S", "A100-SXM4-40GB", "A100-SXM4-80GB", "H100-PCIe", "H100-SXM", "H200-SXM", "B200-SXM",
    "MI300X",
)  # fmt: skip
"""Devices that are asked for where the user names none."""
_TOP: Final = 20
_MOST_TARGETS: Final = 200
_EXAMPLES: Final = """\
examples:
  stepscope predict trace.json                               on the usual devices
  stepscope predict trace.json --to H100-SXM,L4,MI300X
  stepscope predict trace.json --to all --precision bf16     on every device of the table (stepscope devices)
  stepscope predict trace.json --to H100-SXM --batch 256     with another batch size
  stepscope predict trace.json --to L4 --host-factor 0.8     beside a processor that is a fifth faster
  stepscope predict report.sqlite --from A100-SXM4-80GB      where the trace does not name its device
  stepscope predict trace.json --to H100-SXM --devices 1,2,4,8 --link nvlink4
  stepscope predict trace.json --to H100-SXM --json -

The device's work is predicted, the host's part stays as it was measured. docs/predict.md tells how, and when not to
believe it."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "trace", metavar="TRACE", help="a trace file, a folder of ranks, a run's name, or - for standard input"
    )
    parser.add_argument(
        "--to", metavar="DEVICES", help="devices separated by commas, or all; stepscope devices lists them"
    )
    add_prediction_options(parser)
    add_scaling_options(parser)
    parser.add_argument("--top", metavar="N", type=whole_number, default=_TOP, help=f"devices, 0 for all ({_TOP})")
    parser.add_argument("--json", metavar="FILE", type=output.target, help="for programs; - for standard output")
    parser.add_argument("--redact", action="store_true", help="take out paths, host, user and process names")
    add_reading_options(parser)


def add_prediction_options(parser: argparse._ActionsContainer) -> None:
    """--precision, --batch, --recorded-batch, --from and --host-factor."""
    parser.add_argument(
        "--precision", metavar="TYPE", help="the number type to compute in: fp32, tf32, fp16, bf16, fp8"
    )
    parser.add_argument("--batch", metavar="N", type=batch_size, help="another batch size, of each device")
    parser.add_argument(
        "--recorded-batch", metavar="M", type=batch_size, help="the recorded one, where the trace does not tell it"
    )
    parser.add_argument(
        "--from", metavar="DEVICE", dest="source", help="what it was recorded on, where the trace does not tell it"
    )
    parser.add_argument(
        "--host-factor",
        metavar="FACTOR",
        type=host_factor,
        default=1.0,
        help="how many times as long the host takes there, such as 0.8 for a faster processor (1)",
    )


def batch_size(text: str) -> int:
    """A batch size from the command line."""
    if not re.fullmatch(r"\s*\d{1,9}\s*", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no batch size: write a number from 1 to 999999999, such as 64")
    return int(text)


def host_factor(text: str) -> float:
    """A factor on host time from the command line."""
    number = float(text) if re.fullmatch(r"\s*\d{1,4}(\.\d{1,9})?\s*", text) else 0.0
    if not 0.01 <= number <= 100:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no factor on the host's time: write 0.8, at least 0.01, at most 100"
        )
    return number


def run(arguments: argparse.Namespace) -> int:
    """Predict the steps and print the answer."""
    from stepscope.report.document import Document
    from stepscope.report.predict import predict_document, predict_json, scaling_section
    from stepscope.report.text import text_of
    from stepscope.whatif.experiment import Experiment

    experiment = Experiment(open_from(arguments, arguments.trace))
    answer = _answer(arguments, experiment)
    scaled = scaled_devices(arguments, experiment, answer.device or "", answer.predictions)
    if arguments.redact:
        redactor = redactor_of(arguments, paths=[answer.path])
        parts = {name: redactor.value(name, getattr(answer, name)) for name in ("path", "warnings")}
        answer = dataclasses.replace(answer, **parts)
    if arguments.json:
        from stepscope.report.json import json_bytes

        output.write_output(arguments.json, json_bytes(predict_json(answer) | {"scaling": scaling_json_of(scaled)}))
    if arguments.json != "-":
        sections = [scaling_section(*each) for each in scaled]
        document = Document("prediction", tuple(sections))
        if answer.predictions or not scaled:
            document = predict_document(answer, sections, top=arguments.top)
        output.print_text(text_of(document, width=output.width()))
    return 0


def _answer(arguments: argparse.Namespace, experiment: Experiment) -> PredictedSteps:
    from stepscope.predict.answer import predicted_steps

    chosen = targets(arguments.to) if arguments.to is not None or arguments.devices is None else ()
    return predicted_steps(predictor_of(arguments, experiment), joined(arguments, experiment, chosen))


def predictor_of(arguments: argparse.Namespace, experiment: Experiment) -> StepPredictor:
    """What predicts the steps as the options of `add_prediction_options` say."""
    from stepscope.machine.devices import named_device
    from stepscope.predict.prediction import StepPredictor

    return StepPredictor(
        experiment,
        precision=arguments.precision,
        batch=arguments.batch,
        recorded_batch=arguments.recorded_batch,
        source=None if arguments.source is None else named_device(arguments.source),
        host_factor=arguments.host_factor,
        sampled_memory_bytes=_sampled_memory(experiment),
    )


def _sampled_memory(experiment: Experiment) -> int | None:
    """What the telemetry beside the trace saw in use of its busiest device's memory."""
    from pathlib import Path

    from stepscope.predict.limits import sampled_memory
    from stepscope.trace.telemetry import read_telemetry, telemetry_files

    place = Path(experiment.trace.metadata.path)
    files = [file for file in telemetry_files(place) if file != place]  # Nsight Systems' exports end like telemetry
    try:
        return sampled_memory(read_telemetry(files), experiment.device) if files else None
    except UsageError:
        return None


def targets(text: str | None) -> tuple[DevicePeaks, ...]:
    """The devices of `--to`, each once.

    Raises:
        UsageError: a name that the table does not know, or none.
    """
    from stepscope.machine.devices import device_table, named_device

    if text is None:
        table = {row.name: row for row in device_table()}
        return tuple(table[name] for name in USUAL if name in table)
    if text.strip().lower() == "all":
        return device_table()
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(names) > _MOST_TARGETS:
        problem = "names no device" if not names else f"names {len(names)} devices, more than {_MOST_TARGETS}"
        raise UsageError(f"--to {problem}: write H100-SXM,L4 or all; stepscope devices lists them")
    return tuple({row.name: row for row in map(named_device, names)}.values())
