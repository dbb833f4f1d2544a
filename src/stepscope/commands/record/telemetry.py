"""`stepscope telemetry`: what a run logged and sampled, as a table, as plots or for other tools."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.reading import place_of, redactor_of
from stepscope.commands.shared.tables import add_table_options, write_table
from stepscope.errors import UsageError
from stepscope.report.format import printable

if TYPE_CHECKING:
    from stepscope.trace.telemetry import Telemetry

NAME: Final = "telemetry"
HELP: Final = "What a run logged and sampled, as a table, as plots or for another tool."
_EXAMPLES: Final = """\
examples:
  stepscope telemetry RUN                                    each series in a line
  stepscope telemetry RUN --samples --format csv             every value
  stepscope telemetry RUN --html plots.html                  plots, on one page that needs nothing else
  stepscope telemetry RUN --export tensorboard --output events
  stepscope telemetry RUN --export wandb --output offline    then, if you like: wandb sync offline/wandb/offline-*
"""
_EXPORTS: Final = ("wandb", "tensorboard", "csv")


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "path", metavar="RUN", help="a run by name or folder, a rank's folder in it, or a telemetry file"
    )
    what = parser.add_argument_group("what is written")
    what.add_argument("--samples", action="store_true", help="every value instead of a line for each series")
    what.add_argument("--html", metavar="FILE", help="plots instead, on one page for a browser; - for standard output")
    what.add_argument("--export", choices=_EXPORTS, help="write for another tool instead, into the folder of --output")
    add_table_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or write what was asked for."""
    telemetry = _opened(arguments.path)
    for warning in telemetry.warnings:
        print(f"stepscope: {printable(warning.detail)}", file=sys.stderr)
    if arguments.export:
        _export(telemetry, arguments)
        return 0
    if arguments.html:
        output.write_output(arguments.html, _page(telemetry, arguments))
        return 0
    from stepscope.analysis.telemetry import summary_table

    write_table(telemetry.samples if arguments.samples else summary_table(telemetry), arguments, "series")
    return 0


def _opened(path: str) -> Telemetry:
    from stepscope.trace.telemetry import read_telemetry, telemetry_files

    place = place_of(path)
    files = telemetry_files(place)
    if not files:
        what = "holds no telemetry" if place.exists() else "is no file, folder or run"
        raise UsageError(f"{path} {what}; name a run's folder, in which rank0/telemetry/ or the like holds it")
    return read_telemetry(files)


def _page(telemetry: Telemetry, arguments: argparse.Namespace) -> bytes:
    """The plots of every rank."""
    import polars as pl

    from stepscope.analysis.telemetry import telemetry_picture
    from stepscope.report.diagnosis import telemetry_document
    from stepscope.report.html.page import html_of

    pictures = []
    for rank in telemetry.samples["rank"].unique().sort():
        of_rank = pl.col("rank").eq_missing(rank)
        picture = telemetry_picture(telemetry.only(of_rank))
        if picture is not None:
            pictures.append(("Telemetry" if rank is None else f"Rank {rank}", picture))
    if not pictures:
        raise UsageError(f"{arguments.path} holds no samples to draw")
    title = Path(arguments.path).resolve().name
    if arguments.redact:
        redactor = redactor_of(arguments)
        pictures = [(name, redactor.redact(picture)) for name, picture in pictures]
        title = "a run"
    return html_of(telemetry_document(title, pictures))


def _export(telemetry: Telemetry, arguments: argparse.Namespace) -> None:
    if arguments.output == "-":
        raise UsageError("an export is written into a folder; name it with --output")
    if arguments.format or arguments.redact:
        raise UsageError(f"--{'format' if arguments.format else 'redact'} does not go with --export")
    folder = Path(arguments.output)
    try:
        raw = {"raw": arguments.raw} if arguments.export == "csv" else {}
        made = _exporter(arguments.export).export(telemetry, folder, **raw)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}") from error
    output.print_text("".join(f"{printable(str(path))}\n" for path in made))


def _exporter(name: str) -> ModuleType:
    from stepscope.record.telemetry.export import csv, tensorboard, wandb

    return {each.NAME: each for each in (wandb, tensorboard, csv)}[name]
