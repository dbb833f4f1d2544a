"""`stepscope runs`: what was recorded, and where it is; `stepscope telemetry`: what a run logged and sampled."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepscope.commands.read import diagnose
from stepscope.commands.read.tables import add_table_options, write_table
from stepscope.commands.shared import output
from stepscope.commands.shared.options import Command, CommandParser, parsed_size, suggestion
from stepscope.commands.shared.reading import place_of, redacted
from stepscope.errors import UsageError
from stepscope.report.format import printable, size

if TYPE_CHECKING:
    from stepscope.record.manifest import RunManifest
    from stepscope.record.run_folder import RunFolder
    from stepscope.record.runs import RunIndex, RunRecord
    from stepscope.trace.telemetry import Telemetry

_ACTIONS: Final = ("list", "show", "open", "rename", "remove", "rm", "add", "limit", "names")
_NO_LIMIT: Final = "none"


def _prepare_runs_parser(parser: CommandParser) -> None:
    parser.add_argument("action", nargs="?", choices=_ACTIONS, default="list", help="default: list")
    help = "names of runs, or their folders; with add: folders; with limit: the size that all may take, or none"
    parser.add_argument("names", metavar="NAME", nargs="*", help=help)


def _run_runs(arguments: argparse.Namespace) -> int:
    from stepscope.record.runs import RunIndex

    index = RunIndex()
    if arguments.action == "list":
        if arguments.names:
            raise UsageError(f"stepscope runs list takes no name; stepscope runs show {arguments.names[0]} shows one")
        _list(index)
        return 0
    if arguments.action == "names":  # for the shell's completion
        output.print_text("".join(f"{printable(each.name)}\n" for each in index.all() if not each.is_gone))
        return 0
    if arguments.action == "limit":
        _limit(index, arguments.names)
        return 0
    if not arguments.names:
        raise UsageError(f"name a run: stepscope runs {arguments.action} NAME")
    if arguments.action == "add":
        for name in arguments.names:
            _add(index, Path(name).absolute())
        return 0
    if arguments.action == "rename":
        if len(arguments.names) != 2:
            raise UsageError("give a run's name and the new one: stepscope runs rename NAME NEW")
        old, new = arguments.names
        output.print_text(f"{old} is now {index.rename(_record(index, old), new).name}.\n")
        return 0
    removes = arguments.action in ("remove", "rm")
    for record in [_record(index, name, exactly=removes) for name in arguments.names]:
        match arguments.action:
            case "remove" | "rm":
                index.remove(record)
                output.print_text(f"Removed {printable(record.name)}.\n")
            case "show":
                output.print_text("".join(f"{printable(line)}\n" for line in _shown(_folder(record))))
            case _:
                _open(_folder(record))
    return 0


def _limit(index: RunIndex, words: list[str]) -> None:
    if len(words) > 1:
        raise UsageError("give one size, such as stepscope runs limit 20GiB, or none")
    if words:
        index.set_limit(None if words[0] == _NO_LIMIT else parsed_size(words[0]))
    limit = index.limit()
    kept = "All runs are kept" if limit is None else f"All runs together may take {size(limit)}"
    output.print_text(f"{kept}.\n")
    removed = removed_beyond_limit(index) if words else ""
    if removed:
        output.print_text(f"{removed[:1].upper()}{removed[1:]}.\n")


def _record(index: RunIndex, name: str, *, exactly: bool = True) -> RunRecord:
    from stepscope.record.run_folder import RunFolder, is_run_folder

    if is_run_folder(name):
        return index.add(RunFolder.open(name))
    record = index.find(name) if exactly else index.meant(name)
    if record is None:
        known = [each.name for each in index.all()]
        raise UsageError(f"there is no run {name!r}{suggestion(name, known) or '; stepscope runs lists them'}")
    return record


def _folder(record: RunRecord) -> RunFolder:
    from stepscope.record.run_folder import RunFolder

    if record.is_gone:
        raise UsageError(f"the folder of the run {record.name}, {record.path}, is gone")
    return RunFolder.open(record.path)


def _add(index: RunIndex, place: Path) -> None:
    records = index.add_all(place)
    if not records:
        raise UsageError(f"there is no run folder at or in {place}")
    output.print_text(f"Added {output.counted(len(records), 'run')} from {place}.\n")


def _list(index: RunIndex) -> None:
    import polars as pl

    from stepscope.record.run_folder import RunFolder

    records = index.all()
    if not records:
        output.print_text("There are no runs yet; stepscope run train.py records one.\n")
        return
    columns = ("name", "started", "state", "traces", "size", "command")
    bytes_of = [0 if each.is_gone else RunFolder.open(each.path).bytes for each in records]
    rows = [
        (each.name, output.local_minute(each.started_unix_s), state_of(each), each.traces, size(kept), each.command)
        for each, kept in zip(records, bytes_of, strict=True)
    ]
    output.print_table(pl.DataFrame(rows, schema=columns, orient="row"))
    limit = index.limit()
    most = "" if limit is None else f" of at most {size(limit)}"
    output.print_text(f"{output.counted(len(records), 'run')}, {size(sum(bytes_of))}{most}\n")


def removed_beyond_limit(index: RunIndex) -> str:
    """Remove the runs that the limit does not allow, and say which; "" if there are none."""
    found = index.beyond_limit()
    for record, _ in found:
        index.remove(record)
    if not found:
        return ""
    names = ", ".join(printable(record.name) for record, _ in found)
    freed, most = size(sum(taken for _, taken in found)), size(index.limit() or 0)
    return f"removed {names}, {freed}, since all runs may take {most} together (stepscope runs limit)"


def state_of(record: RunRecord) -> str:
    """How a run ended, in a word or two."""
    if record.is_gone:
        return "gone"
    return {None: "not ended", 0: "done"}.get(record.exit_code, f"exit {record.exit_code}")


def _shown(folder: RunFolder) -> Iterator[str]:
    manifest = folder.manifest()
    yield f"run      {folder.name}"
    yield f"folder   {folder.path}"
    yield f"command  {manifest.command_line}"
    yield f"started  {output.local_minute(manifest.started_unix_s)}{_end(manifest)}"
    if manifest.git:
        yield f"git      {manifest.git.get('commit')}{', with changes' if manifest.git.get('dirty') else ''}"
    yield f"versions {', '.join(f'{name} {version}' for name, version in manifest.versions.items())}"
    for device in manifest.devices:
        yield f"device   {device}"
    for name, value in manifest.environment.items():
        yield f"variable {name}={value}"
    for one in manifest.applied:
        yield f"applied  {one.get('flag')}{':' if one.get('applied') else ', not applied:'} {one.get('sentence')}"
    for one in manifest.recordings:
        if one.get("host") is not None:  # what the profiler server sent
            times = "once" if one.get("captures") == 1 else f"{one.get('captures')} times"
            yield f"host     {one['host']}, recorded {times} for {one.get('seconds')} s{_problem(one)}"
            continue
        yield f"rank {one.get('rank')}   {one.get('steps')} steps from step {one.get('first_step')}{_problem(one)}"
    for trace in folder.traces():
        yield f"trace    {trace}"


def _problem(recording: dict[str, object]) -> str:
    return f": {recording['problem']}" if recording.get("problem") else ""


def _end(manifest: RunManifest) -> str:
    if manifest.ended_unix_s is None:
        return ", not ended"
    return f", took {manifest.ended_unix_s - manifest.started_unix_s:.1f} s, exit code {manifest.exit_code}"


def _open(folder: RunFolder) -> None:
    page = folder.path / "report.html"
    diagnose.COMMAND.run_with([str(folder.path), "--html", str(page)])
    import webbrowser

    if not webbrowser.open(page.as_uri()):
        output.print_text(f"No browser could be opened; the report is {page}.\n")


RUNS: Final = Command(
    "runs",
    "List, show, open or remove the runs that were recorded.",
    _prepare_runs_parser,
    _run_runs,
    """\
Runs are in the user's data folder, or in STEPSCOPE_DATA_DIR. Every command that takes a trace also takes a run's name.

examples:
  stepscope runs                                             every run, the latest first
  stepscope runs show NAME                                   what ran, with what, and how it ended
  stepscope runs open NAME                                   its report, in the browser
  stepscope runs remove NAME                                 the run and its folder
  stepscope runs add DIR                                     add the run folders in DIR
  stepscope runs limit 20GiB                                 remove the oldest now and after each run; none: keep all

The limit never removes the latest run, one that has not ended, or one that you named or renamed.
""",
)


_EXPORTS: Final = ("wandb", "tensorboard", "csv")


def _prepare_telemetry_parser(parser: CommandParser) -> None:
    parser.add_argument(
        "path", metavar="RUN", help="a run by name or folder, a rank's folder in it, or a telemetry file"
    )
    what = parser.add_argument_group("what is written")
    what.add_argument("--samples", action="store_true", help="every value instead of a line for each series")
    what.add_argument("--html", metavar="FILE", help="plots instead, on one page for a browser; - for standard output")
    what.add_argument("--export", choices=_EXPORTS, help="write for another tool instead, into the folder of --output")
    add_table_options(parser)


def _run_telemetry(arguments: argparse.Namespace) -> int:
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
        what = "has no telemetry" if place.exists() else "is not a file, folder or run"
        raise UsageError(f"{path} {what}; name a run's folder, such as one with rank0/telemetry/")
    return read_telemetry(files)


def _page(telemetry: Telemetry, arguments: argparse.Namespace) -> bytes:
    import polars as pl

    from stepscope.analysis.telemetry import telemetry_picture
    from stepscope.commands.read.documents import telemetry_file

    pictures = []
    for rank in telemetry.samples["rank"].unique().sort():
        picture = telemetry_picture(telemetry.only(pl.col("rank").eq_missing(rank)))
        if picture is not None:
            pictures.append((rank, redacted(arguments, picture)))
    if not pictures:
        raise UsageError(f"{arguments.path} has no samples to draw")
    title = "a run" if arguments.redact else Path(arguments.path).resolve().name
    return telemetry_file(title, pictures)


def _export(telemetry: Telemetry, arguments: argparse.Namespace) -> None:
    if arguments.output == "-":
        raise UsageError("an export is written into a folder; name it with --output")
    if arguments.format or arguments.redact:
        raise UsageError(f"--{'format' if arguments.format else 'redact'} does not work with --export")
    from stepscope.trace.telemetry import export_csv, export_tensorboard, export_wandb

    folder = Path(arguments.output)
    exporters: dict[str, Callable[[Telemetry, Path], list[Path]]] = {
        "csv": partial(export_csv, raw=arguments.raw),
        "tensorboard": export_tensorboard,
        "wandb": export_wandb,
    }
    try:
        made = exporters[arguments.export](telemetry, folder)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}") from error
    output.print_text("".join(f"{printable(str(path))}\n" for path in made))


TELEMETRY: Final = Command(
    "telemetry",
    "What a run logged and sampled, as a table, as plots or for another tool.",
    _prepare_telemetry_parser,
    _run_telemetry,
    """\
examples:
  stepscope telemetry RUN                                    one line per series
  stepscope telemetry RUN --samples --format csv             every value
  stepscope telemetry RUN --html plots.html                  plots, on one page that needs nothing else
  stepscope telemetry RUN --export tensorboard --output events
  stepscope telemetry RUN --export wandb --output offline    then, if you like: wandb sync offline/wandb/offline-*
""",
)
