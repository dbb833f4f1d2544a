"""`stepscope export`: write the trace, or results derived from it, in the formats of other tools."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.command import Command, CommandParser
from stepscope.commands.shared.options import (
    add_raw_option,
    add_reading_options,
    add_redact_option,
    add_trace,
    add_user_code_options,
    user_code_from,
)
from stepscope.commands.shared.reading import open_from, redacted
from stepscope.commands.shared.values import file_to_write
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.trace import Trace

FORMATS: Final = {
    "timeline": "everything with idle time by cause and the critical path, for the Perfetto UI (the default)",
    "chrome": "the trace itself, as PyTorch's profiler writes it",
    "perfetto": "the trace itself, as Perfetto writes it",
    "speedscope": "flame graphs of the device's time by your lines and of each thread",
    "folded": "the device's time as folded stacks",
    "tensorboard": "a log folder for TensorBoard with xprof",
    "csv": "a file a table",
    "parquet": "a file a table",
    "openmetrics": "figures for Prometheus",
}
_TABLES: Final = ("csv", "parquet")
_NEEDS_SLICES: Final = ("timeline", "speedscope", "folded", "tensorboard")


def _prepare_parser(parser: CommandParser) -> None:
    add_trace(parser)
    parser.add_argument(
        "output",
        metavar="OUT",
        type=file_to_write,
        help="the file to write, or - for standard output; a folder for tensorboard, csv and parquet",
    )
    formats = "; ".join(f"{name}: {what}" for name, what in FORMATS.items())
    parser.add_argument("--format", choices=tuple(FORMATS), default="timeline", help=formats)
    add_raw_option(parser)
    add_redact_option(parser)
    add_user_code_options(parser)
    add_reading_options(parser)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.output == "-" and arguments.format in (*_TABLES, "tensorboard"):
        raise UsageError(f"--format {arguments.format} writes a folder, which cannot go to standard output")
    trace = open_from(arguments, arguments.trace)
    if arguments.format in _NEEDS_SLICES and not _has_slices(trace):
        raise UsageError(
            f"{trace.metadata.path} has nothing to draw: no operator, call, frame, annotation or work of a device"
        )
    if arguments.format in _TABLES:
        from stepscope.report.exports.tables import write_tables

        shown = redacted(arguments, trace)
        output.write_folder(
            arguments.output, lambda folder: write_tables(shown, folder, arguments.format, raw=arguments.raw)
        )
    elif arguments.format == "tensorboard":
        _write_log_folder(redacted(arguments, trace), arguments.output)
    else:
        output.write_output(arguments.output, _pieces(trace, arguments))
    return 0


def _has_slices(trace: Trace) -> bool:
    from stepscope.trace.tables import SLICE_TABLES

    return any(not trace.scan(table).head(1).collect().is_empty() for table in SLICE_TABLES)


def _pieces(trace: Trace, arguments: argparse.Namespace) -> Iterator[bytes]:
    """The pieces of a one-file format, analysed before redaction, since paths decide which code is the user's."""
    shown = partial(redacted, arguments)
    user_code = user_code_from(arguments)
    match arguments.format:
        case "timeline":
            from stepscope.analysis.idle import idle_time
            from stepscope.analysis.step_view import StepView
            from stepscope.report.exports.timeline import timeline
            from stepscope.whatif import Experiment
            from stepscope.whatif.critical_path import critical_path

            path = critical_path(Experiment(StepView(trace, user_code=user_code)))
            return timeline(shown(trace), idle=shown(idle_time(trace)), path=shown(path))
        case "chrome":
            from stepscope.report.exports.chrome import chrome

            return chrome(shown(trace))
        case "perfetto":
            from stepscope.report.exports.perfetto import perfetto

            return perfetto(shown(trace))
        case "openmetrics":
            from stepscope.diagnosis import diagnose
            from stepscope.report.exports.tables import openmetrics

            return iter((openmetrics(shown(diagnose(trace, user_code=user_code))),))
        case _:
            from stepscope.analysis.attribution import attribute
            from stepscope.analysis.flame import folded, speedscope

            attribution = shown(attribute(trace, user_code=user_code))
            return (speedscope if arguments.format == "speedscope" else folded)(attribution.trace, attribution)


def _write_log_folder(trace: Trace, target: str) -> None:
    """Write the run into a TensorBoard log folder, which may hold other runs."""
    from stepscope.report.exports.xspace import xspace

    run = _plain_name(re.sub(r"(\.[A-Za-z]\w{0,8}){1,3}$", "", Path(trace.metadata.path).name)) or "trace"
    host = _plain_name(trace.metadata.host or "") or "localhost"

    def fill(folder: Path) -> None:
        with (folder / f"{host}.xplane.pb").open("wb") as file:
            file.writelines(xspace(trace))

    place = Path(target) / "plugins" / "profile" / run
    if not os.path.isdir(target):

        def fill_all(folder: Path) -> None:
            inside = folder / place.relative_to(target)
            inside.mkdir(parents=True)
            fill(inside)

        output.write_folder(target, fill_all)
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error
    output.write_folder(str(place), fill)


def _plain_name(text: str) -> str:
    """A file name that is valid on every system."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text).strip("_")[:100]


COMMAND: Final = Command(
    "export",
    "Write the trace for Perfetto, TensorBoard, speedscope or Prometheus, or as tables.",
    _prepare_parser,
    _run,
    """\
examples:
  stepscope export trace.json annotated.json                 then open it at https://ui.perfetto.dev
  stepscope export trace.json one.json --steps 5             only one step
  stepscope export trace.json flame.speedscope.json --format speedscope     then open it at https://speedscope.app
  stepscope export trace.json - --format folded | flamegraph.pl --countname ns > flame.svg
  stepscope export profile.sqlite kineto.json --format chrome               for tools that read PyTorch's traces
  stepscope export trace.json logs --format tensorboard      then: tensorboard --logdir logs (with xprof installed)
  stepscope export trace.json tables --format parquet        a file a table
  stepscope export trace.json step.prom --format openmetrics
""",
)
