"""The folder of a run: everything recorded from one start of a program.

    <root>/<name>/run.json                    what ran, where, and how it ended (`stepscope.record.manifest`)
    <root>/<name>/rank<R>/trace-<K>.json.gz   traces of the process of rank R, numbered from 1; .xplane.pb if
                                              XLA's profiler recorded it
    <root>/<name>/rank<R>/recording-<P>.json  how the recording of process P went
    <root>/<name>/rank<R>/telemetry.*         logged and sampled values
    <root>/<name>/compile/*.log               what torch.compile did, in its own words
    <root>/<name>/requests/                   capture requests as files
    <root>/<name>/agents/rank<R>.json         address and token of a process's agent

Imports only the standard library: the processes of the program use it too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any, Final

from stepscope.errors import RunFolderError, UsageError
from stepscope.files import private_file, private_folder, read_kept, readable, say_changed, whole_file, with_checksum
from stepscope.record.manifest import RunManifest, of_recording

MANIFEST: Final = "run.json"
_COMPILE: Final = "compile"
_RANK: Final = re.compile(r"rank(\d{1,9})", re.ASCII)
_TRACE: Final = re.compile(r"trace-(\d{1,9})\.(?:json(?:\.gz)?|xplane\.pb)", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,99}", re.ASCII)
_NAMED: Final = ".named"
_SEEN: Final = "seen"
LEFT: Final = "left"
"""Marker of a process from which stepscope detached after an internal error."""


class RunFolder:
    """A run's folder and all paths below it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(
        cls, root: Path | None, name: str | None, manifest: RunManifest, *, suggestion: str | None = None
    ) -> RunFolder:
        """Make a new run's folder with its `run.json`.

        Args:
            root: the parent folder; None for `default_root()`.
            name: None for one made of the program's name and the time.
            suggestion: replaces the program's name and the time; gets a number if it is taken.

        Raises UsageError if the name is invalid or taken, RunFolderError if the folder cannot be created.
        """
        root = default_root() if root is None else Path(os.path.abspath(root))
        if name is not None:
            check_name(name)
        try:
            private_folder(root, tighten=root == default_root())
            suggestion = suggestion or manifest.suggested_name()
            place = new_folder(root, suggestion) if name is None else root / name
            if name is not None:
                private_folder(place, new=True)
        except FileExistsError:
            raise UsageError(f"there is already a run {name!r} in {root}; choose another name, or remove it") from None
        except OSError as error:
            raise RunFolderError(f"no run folder can be made in {root}: {error.strerror}") from error
        folder = cls(place)
        folder.write_manifest(manifest)
        if name is not None:
            folder.mark_named()
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        if not is_run_folder(path):
            raise UsageError(f"{path} is not a run folder: it has no {MANIFEST}")
        return cls(Path(os.path.abspath(path)))

    @property
    def name(self) -> str:
        return self.path.name

    def mark_named(self) -> None:
        """Note that the user gave the run its name, so that no limit removes it; raises OSError."""
        private_file(self.path / _NAMED)

    @property
    def is_named(self) -> bool:
        """Whether the user gave the run its name."""
        return (self.path / _NAMED).exists()

    @property
    def bytes(self) -> int:
        """Size of all its files."""
        total = 0
        for place, _, names in os.walk(self.path):
            for name in names:
                with contextlib.suppress(OSError):  # a run that records renames its files
                    total += os.lstat(os.path.join(place, name)).st_size
        return total

    @property
    def requests(self) -> Path:
        return self.path / "requests"

    @property
    def compile_logs(self) -> Path:
        """The folder that torch makes for its logs of compilation, if the program compiles."""
        return self.path / _COMPILE

    @property
    def agents(self) -> Path:
        return self.path / "agents"

    def rank_folder(self, rank: int) -> Path:
        return private_folder(self.path / f"rank{rank}")

    def ranks(self) -> list[int]:
        """Return the ranks with any file, ascending."""
        matches = (_RANK.fullmatch(name) for name in _names_in(self.path))
        return sorted(int(match[1]) for match in matches if match)

    def new_trace_path(self, rank: int) -> Path:
        """Reserve a name for the rank's next trace, which no other process gets."""
        folder = self.rank_folder(rank)
        number = max([0, *(int(match[1]) for match in map(_TRACE.fullmatch, _names_in(folder)) if match)])
        while True:
            number += 1
            path = folder / f"trace-{number}.json.gz"
            with contextlib.suppress(FileExistsError):
                (folder / f".trace-{number}.taken").touch(0o600, exist_ok=False)
                if not path.exists():
                    return path

    def traces(self) -> list[Path]:
        """Return every trace file of the run, by rank and number."""
        return [trace for rank in self.ranks() for trace in self.traces_of(rank)]

    def traces_of(self, rank: int) -> list[Path]:
        """Return the trace files of a rank, by number."""
        folder = self.path / f"rank{rank}"
        found = [(int(match[1]), folder / match[0]) for match in map(_TRACE.fullmatch, _names_in(folder)) if match]
        return [path for _, path in sorted(found) if os.path.isfile(path)]  # a named pipe would block forever

    def latest_traces(self) -> list[Path]:
        """Return the last trace file of each rank that has any."""
        return [traces[-1] for rank in self.ranks() if (traces := self.traces_of(rank))]

    def manifest(self) -> RunManifest:
        """Read `run.json`. Raises UsageError if it cannot be read."""
        path = self.path / MANIFEST
        try:
            manifest, whole = RunManifest.from_json(read_kept(path))
        except ValueError as error:
            raise UsageError(f"{path} is damaged: {error}") from error
        if not whole:
            say_changed(path)
        return manifest

    def write_manifest(self, manifest: RunManifest) -> None:
        write_json(self.path / MANIFEST, with_checksum(manifest.to_json()))

    def write_recording(self, rank: int, content: dict[str, Any]) -> None:
        write_json(self.rank_folder(rank) / f"recording-{os.getpid()}.json", with_checksum(content))

    def recordings(self) -> list[dict[str, Any]]:
        """Return the processes' reports from `write_recording`, by rank."""
        found = []
        for rank in self.ranks():
            for path in sorted((self.path / f"rank{rank}").glob("recording-*.json")):
                if content := readable(path):
                    found.append({**of_recording(content), "rank": rank})
        return found

    def sign(self, what: str) -> None:
        """Leave a marker file that an event happened, such as a process importing torch."""
        with contextlib.suppress(OSError):
            private_file(private_folder(self.path / _SEEN) / what)

    def was_seen(self, what: str) -> bool:
        return (self.path / _SEEN / what).exists()


def compile_folder_beside(trace: str | Path) -> Path | None:
    """Return the folder with torch's logs of compilation of the run that a trace belongs to; None if there is none."""
    rank = Path(os.path.abspath(trace)).parent
    if not _RANK.fullmatch(rank.name) or not is_run_folder(rank.parent):
        return None
    folder = rank.parent / _COMPILE
    return folder if folder.is_dir() else None


def recording_of(trace: Path) -> dict[str, Any]:
    """Return the report of the process that recorded a trace of a run; empty if the trace belongs to no run."""
    rank = Path(os.path.abspath(trace)).parent
    if not _RANK.fullmatch(rank.name) or not is_run_folder(rank.parent):
        return {}
    reports = (of_recording(readable(path)) for path in sorted(rank.glob("recording-*.json")))
    return next((each for each in reports if each.get("trace") == trace.name), {})


def xplane_name(trace: Path) -> Path:
    """Return the name of an XLA profile for the name of a torch trace."""
    return trace.with_name(trace.name.removesuffix(".gz").removesuffix(".json") + ".xplane.pb")


def is_run_folder(path: str | Path) -> bool:
    return str(path) != "-" and os.path.isfile(os.path.join(path, MANIFEST))


def check_name(name: str) -> None:
    """Check that a run name is valid on every file system. Raises UsageError if it is not."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a run's name: at most 100 letters, digits and . _ - + = @, the first a letter or digit"
        )


def data_folder() -> Path:
    """Return the folder of runs and their index: STEPSCOPE_DATA_DIR, or the user's data folder."""
    chosen = os.environ.get("STEPSCOPE_DATA_DIR")
    if chosen:
        return Path(os.path.abspath(chosen))
    import platformdirs

    return Path(platformdirs.user_data_dir("stepscope", appauthor=False))


def default_root() -> Path:
    return data_folder() / "runs"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically, readable for its owner only from the start.

    Raises RunFolderError if it cannot be written.
    """
    try:
        with whole_file(path, private=True) as file:
            file.write(json.dumps(content, indent=1).encode() + b"\n")
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror}") from error


def new_folder(root: Path, suggestion: str) -> Path:
    """Make a folder for its owner only, of the suggested name or with a number appended."""
    number = 1
    while True:
        place = root / (suggestion if number == 1 else f"{suggestion}-{number}")
        try:
            private_folder(place, new=True)
        except FileExistsError:
            number += 1
        else:
            return place


def _names_in(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []
