"""`stepscope export`: the trace, or what it says, in the formats of other tools."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from stepscope.commands.shared import output
from stepscope.commands.shared.reading import add_reading_options, open_from, redactor_of
from stepscope.commands.shared.tables import add_raw_option
from stepscope.commands.shared.user_code import add_user_code_options, user_code_from
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.report.redaction import Redactor
    from stepscope.trace import Trace

_T = TypeVar("_T")

NAME: Final = "export"
HELP: Final = "Write the trace for Perfetto, TensorBoard, speedscope or Prometheus, or as tables."
FORMATS: Final = (
    "timeline",
    "chrome",
    "perfetto",
    "speedscope",
    "folded",
    "tensorboard",
    "csv",
    "parquet",
    "openmetrics",
)
_TABLES: Final = ("csv", "parquet")
_NEEDS_SLICES: Final = ("timeline", "speedscope", "folded", "tensorboard")
_EXAMPLES: Final = """\
examples:
  stepscope export trace.json annotated.json                 then open it at https://ui.perfetto.dev
  stepscope export trace.json one.json --steps 5             only one step
  stepscope export trace.json flame.speedscope.json --format speedscope     then open it at https://speedscope.app
  stepscope export trace.json - --format folded | flamegraph.pl --countname ns > flame.svg
  stepscope export profile.sqlite kineto.json --format chrome               for tools that read PyTorch's traces
  stepscope export trace.json logs --format tensorboard      then: tensorboard --logdir logs (with xprof installed)
  stepscope export trace.json tables --format parquet        a file a table
  stepscope export trace.json step.prom --format openmetrics
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("trace", metavar="TRACE", help="a trace file, or - for standard input")
    parser.add_argument(
        "output",
        metavar="OUT",
        type=output.target,
        help="the file to write, or - for standard output; a folder for tensorboard, csv and parquet",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default=FORMATS[0],
        help="timeline: everything with idle time by cause and the critical path, for the Perfetto UI (the default); "
        "chrome, perfetto: the trace itself, as PyTorch's profiler or Perfetto writes it; speedscope: flame graphs of "
        "the device's time by your lines and of each thread; folded: the device's time as folded stacks; tensorboard: "
        "a log folder for TensorBoard with xprof; csv, parquet: a file a table; openmetrics: figures for Prometheus",
    )
    add_raw_option(parser)
    parser.add_argument("--redact", action="store_true", help="take out paths, host, user and process names")
    add_user_code_options(parser)
    add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the trace in the format that was asked for."""
    if arguments.output == "-" and arguments.format in (*_TABLES, "tensorboard"):
        raise UsageError(f"--format {arguments.format} writes a folder, which cannot go to standard output")
    trace = open_from(arguments, arguments.trace)
    if arguments.format in _NEEDS_SLICES and not _has_slices(trace):
        raise UsageError(
            f"{trace.metadata.path} has nothing to draw: no operator, call, frame, annotation or work of a device"
        )
    redactor = redactor_of(arguments) if arguments.redact else None
    shown = trace if redactor is None else redactor.redact(trace)
    if arguments.format in _TABLES:
        from stepscope.report.exports.tables import write_tables

        output.write_folder(
            arguments.output, lambda folder: write_tables(shown, folder, arguments.format, raw=arguments.raw)
        )
    elif arguments.format == "tensorboard":
        _write_log_folder(shown, arguments.output)
    else:
        output.write_output(arguments.output, _pieces(trace, arguments, redactor))
    return 0


def _has_slices(trace: Trace) -> bool:
    from stepscope.trace.tables import SLICE_TABLES

    return any(not trace.scan(table).head(1).collect().is_empty() for table in SLICE_TABLES)


def _pieces(trace: Trace, arguments: argparse.Namespace, redactor: Redactor | None) -> Iterator[bytes]:
    """What goes into the one file; what is computed is computed of the trace as it is, by whose paths code is told."""

    def shown(thing: _T) -> _T:
        return thing if redactor is None else redactor.redact(thing)

    user_code = user_code_from(arguments)
    if arguments.format == "timeline":
        from stepscope.analysis.idle import idle_time
        from stepscope.report.exports.timeline import timeline
        from stepscope.whatif import Experiment
        from stepscope.whatif.critical_path import critical_path

        path = critical_path(Experiment(trace, user_code=user_code))
        return timeline(shown(trace), idle=shown(idle_time(trace)), path=shown(path))
    if arguments.format == "chrome":
        from stepscope.report.exports.chrome import chrome

        return chrome(shown(trace))
    if arguments.format == "perfetto":
        from stepscope.report.exports.perfetto import perfetto

        return perfetto(shown(trace))
    if arguments.format == "openmetrics":
        from stepscope.diagnosis import diagnose
        from stepscope.report.exports.tables import openmetrics

        return iter((openmetrics(shown(diagnose(trace, user_code=user_code))),))
    from stepscope.analysis.attribution import attribute
    from stepscope.analysis.flame import folded, speedscope

    attribution = shown(attribute(trace, user_code=user_code))
    return (speedscope if arguments.format == "speedscope" else folded)(attribution.trace, attribution)


def _write_log_folder(trace: Trace, target: str) -> None:
    """Write the run into a log folder of TensorBoard's, which may have other runs."""
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
    """A name for a file on any system."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text).strip("_")[:100]
