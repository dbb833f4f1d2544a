"""`stepscope runs`: what `stepscope run` recorded, and where it is."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepscope.commands.read import diagnose
from stepscope.commands.shared import output
from stepscope.commands.shared.command import Command, CommandParser, suggestion
from stepscope.errors import UsageError
from stepscope.report.format import printable

if TYPE_CHECKING:
    from stepscope.record.manifest import RunManifest
    from stepscope.record.run_folder import RunFolder
    from stepscope.record.runs import RunIndex, RunRecord

_ACTIONS: Final = ("list", "show", "open", "remove", "add")


def _prepare_parser(parser: CommandParser) -> None:
    parser.add_argument("action", nargs="?", choices=_ACTIONS, default="list", help="default: list")
    parser.add_argument("names", metavar="NAME", nargs="*", help="of runs, or their folders; with add: folders")


def _run(arguments: argparse.Namespace) -> int:
    from stepscope.record.runs import RunIndex

    index = RunIndex()
    if arguments.action == "list":
        if arguments.names:
            raise UsageError(f"stepscope runs list takes no name; stepscope runs show {arguments.names[0]} shows one")
        _list(index)
        return 0
    if not arguments.names:
        raise UsageError(f"say which: stepscope runs {arguments.action} NAME")
    if arguments.action == "add":
        for name in arguments.names:
            _add(index, Path(name).absolute())
        return 0
    for record in [_record(index, name) for name in arguments.names]:
        match arguments.action:
            case "remove":
                index.remove(record)
                output.print_text(f"Removed {printable(record.name)}.\n")
            case "show":
                output.print_text("".join(f"{printable(line)}\n" for line in _shown(_folder(record))))
            case _:
                _open(_folder(record))
    return 0


def _record(index: RunIndex, name: str) -> RunRecord:
    from stepscope.record.run_folder import RunFolder, is_run_folder

    if is_run_folder(name):
        return index.add(RunFolder.open(name))
    record = index.find(name)
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
    output.print_text(f"Took up {output.counted(len(records), 'run')} of {place}.\n")


def _list(index: RunIndex) -> None:
    import polars as pl

    records = index.all()
    if not records:
        output.print_text("There are no runs yet; stepscope run train.py records one.\n")
        return
    columns = ("name", "started", "state", "traces", "command")
    rows = [(each.name, _date(each.started_unix_s), _state(each), each.traces, each.command) for each in records]
    output.print_table(pl.DataFrame(rows, schema=columns, orient="row"))


def _state(record: RunRecord) -> str:
    if record.is_gone:
        return "gone"
    return {None: "not ended", 0: "done"}.get(record.exit_code, f"exit {record.exit_code}")


def _shown(folder: RunFolder) -> Iterator[str]:
    manifest = folder.manifest()
    yield f"run      {folder.name}"
    yield f"folder   {folder.path}"
    yield f"command  {manifest.command_line}"
    yield f"started  {_date(manifest.started_unix_s)}{_end(manifest)}"
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


def _date(unix_s: float) -> str:
    from datetime import datetime

    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M")


COMMAND: Final = Command(
    "runs",
    "List, show, open or remove the runs that were recorded.",
    _prepare_parser,
    _run,
    """\
Runs lie in the user's data folder, or where STEPSCOPE_DATA_DIR says. Wherever a trace is
taken, a run's name is too.

examples:
  stepscope runs                                             every run, the latest first
  stepscope runs show NAME                                   what ran, with what, and how it ended
  stepscope runs open NAME                                   its report, in the browser
  stepscope runs remove NAME                                 the run and its folder
  stepscope runs add DIR                                     take up the run folders in DIR
""",
)
