"""`stepscope telemetry`: what a run logged and sampled, as a table, as plots or for other tools."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.command import Command, CommandParser
from stepscope.commands.shared.reading import place_of, redacted
from stepscope.commands.shared.tables import add_table_options, write_table
from stepscope.errors import UsageError
from stepscope.report.format import printable

if TYPE_CHECKING:
    from stepscope.trace.telemetry import Telemetry

_EXPORTS: Final = ("wandb", "tensorboard", "csv")


def _prepare_parser(parser: CommandParser) -> None:
    parser.add_argument(
        "path", metavar="RUN", help="a run by name or folder, a rank's folder in it, or a telemetry file"
    )
    what = parser.add_argument_group("what is written")
    what.add_argument("--samples", action="store_true", help="every value instead of a line for each series")
    what.add_argument("--html", metavar="FILE", help="plots instead, on one page for a browser; - for standard output")
    what.add_argument("--export", choices=_EXPORTS, help="write for another tool instead, into the folder of --output")
    add_table_options(parser)


def _run(arguments: argparse.Namespace) -> int:
    telemetry = _opened(arguments.path)
    for warning in telemetry.warnings:
        output.say(warning.detail)
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
    import polars as pl

    from stepscope.analysis.telemetry import telemetry_picture
    from stepscope.report.diagnosis import telemetry_document
    from stepscope.report.html.page import html_of

    pictures = []
    for rank in telemetry.samples["rank"].unique().sort():
        picture = telemetry_picture(telemetry.only(pl.col("rank").eq_missing(rank)))
        if picture is not None:
            pictures.append(("Telemetry" if rank is None else f"Rank {rank}", redacted(arguments, picture)))
    if not pictures:
        raise UsageError(f"{arguments.path} holds no samples to draw")
    title = "a run" if arguments.redact else Path(arguments.path).resolve().name
    return html_of(telemetry_document(title, pictures))


def _export(telemetry: Telemetry, arguments: argparse.Namespace) -> None:
    if arguments.output == "-":
        raise UsageError("an export is written into a folder; name it with --output")
    if arguments.format or arguments.redact:
        raise UsageError(f"--{'format' if arguments.format else 'redact'} does not go with --export")
    from stepscope.record.telemetry import export

    folder = Path(arguments.output)
    exporters: dict[str, Callable[[Telemetry, Path], list[Path]]] = {
        "csv": partial(export.export_csv, raw=arguments.raw),
        "tensorboard": export.export_tensorboard,
        "wandb": export.export_wandb,
    }
    try:
        made = exporters[arguments.export](telemetry, folder)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}") from error
    output.print_text("".join(f"{printable(str(path))}\n" for path in made))


COMMAND: Final = Command(
    "telemetry",
    "What a run logged and sampled, as a table, as plots or for another tool.",
    _prepare_parser,
    _run,
    """\
examples:
  stepscope telemetry RUN                                    each series in a line
  stepscope telemetry RUN --samples --format csv             every value
  stepscope telemetry RUN --html plots.html                  plots, on one page that needs nothing else
  stepscope telemetry RUN --export tensorboard --output events
  stepscope telemetry RUN --export wandb --output offline    then, if you like: wandb sync offline/wandb/offline-*
""",
)
