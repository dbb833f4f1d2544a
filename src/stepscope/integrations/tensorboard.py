"""A plugin of TensorBoard: the page of `stepscope view`, of the traces below the log folder.

TensorBoard imports this module when it starts; what the page needs is imported by the first request for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import parse_qsl

from tensorboard.plugins.base_plugin import FrontendMetadata, TBContext, TBPlugin

from stepscope.threads import cached_property

if TYPE_CHECKING:
    from stepscope.commands.view.pages import Page
    from stepscope.view.documents import Documents

Environ: TypeAlias = dict[str, Any]
Start: TypeAlias = Callable[[str, list[tuple[str, str]]], object]
App: TypeAlias = Callable[[Environ, Start], list[bytes]]

_MODULE: Final = b'export const render = () => location.replace(new URL("page.html", document.baseURI));\n'
"""What TensorBoard imports in the plugin's frame; its base is the plugin's routes."""
_KINETO: Final = re.compile(r"(?:.*?(\d*)\.pt\.trace|trace-(\d+))\.json(?:\.gz)?", re.ASCII | re.DOTALL)
"""Names by torch's handler, with a time, and by `stepscope.profile` of a folder, with a number."""
_XPLANE: Final = ".xplane.pb"
_RANK: Final = re.compile(
    rb'"distributedInfo":\s*\{.{0,300}?"rank":\s*(\d{1,9}),\s*"world_size":\s*(\d{1,9})\b', re.DOTALL
)
_HEAD_BYTES: Final = 1 << 16
_MOST_FOLDERS: Final = 20_000
_PATIENCE_S: Final = 0.5


@dataclass(frozen=True)
class LoggedRun:
    """Traces of one run, one for each rank.

    Attributes:
        path: its folder; of an earlier one of several in a folder, its first file.
        written_unix_s: when the last of it was written.
    """

    path: Path
    files: list[Path] = field(repr=False)
    written_unix_s: float


class LogFolder:
    """The runs below a folder, the latest first; nothing that a symbolic link has outside of it."""

    def __init__(self, root: str) -> None:
        self.root = Path(os.path.realpath(root))
        self._lock = threading.Lock()
        self._listed: dict[str, LoggedRun] = {}
        self._is_cut = False
        self._ranks: dict[tuple[Path, int], tuple[int, int] | None] = {}

    def runs(self, anew: bool = False) -> dict[str, LoggedRun]:
        """By their paths below the folder, as they were found last: "latest" means one run while a page is open."""
        with self._lock:
            if anew or not self._listed:
                found = sorted(self._found(), key=lambda run: -run.written_unix_s)
                self._listed = {self.name_of(run.path): run for run in found}
            return self._listed

    def exist(self) -> bool:
        return True

    def meant(self, name: str) -> Path:
        return self._run_of(name).path

    def _run_of(self, name: str) -> LoggedRun:
        from stepscope.view.documents import NoDocument

        runs = self.runs()
        if not runs:
            looked = f" in the first {_MOST_FOLDERS:,} folders, by name," if self._is_cut else ""
            raise NoDocument(f"there is no trace{looked} below {self.root}")
        if name == "latest":
            return next(iter(runs.values()))
        if name not in runs:
            raise NoDocument(f"there is no run {name[:100]!r} below {self.root}")
        return runs[name]

    def name_of(self, run: Path) -> str:
        return run.relative_to(self.root).as_posix().encode("utf-8", "backslashreplace").decode()

    def traces(self, run: Path) -> list[Path]:
        """The traces of a run.

        Raises:
            NoDocument: it is no longer listed.
            UnreadableTraceError: something beside them, which would be read with them, is a link that leads elsewhere.
        """
        from stepscope.errors import UnreadableTraceError

        files = self._run_of(self.name_of(run)).files
        for file in _read_with(files):
            if not self._holds(file):
                raise UnreadableTraceError(f"{file} leads out of the log folder {self.root}")
        return files

    def table(self) -> list[dict[str, Any]]:
        return [self._row(name, run) for name, run in self.runs().items()]

    def _row(self, name: str, run: LoggedRun) -> dict[str, Any]:
        from stepscope.errors import UsageError
        from stepscope.record.run_folder import RunFolder, is_run_folder

        row: dict[str, Any] = {
            "name": name,
            "path": str(run.path),
            "command": "",
            "started_unix_s": run.written_unix_s,
            "ended_unix_s": None,
            "state": "XLA" if run.files[0].name.endswith(_XPLANE) else "PyTorch",
            "traces": len(run.files),
            "bytes": sum(map(_size, run.files)),
            "quiet_s": None,
        }
        with contextlib.suppress(UsageError):
            if is_run_folder(run.path):
                told = RunFolder(run.path).manifest()
                row |= {"command": told.command_line, "started_unix_s": told.started_unix_s}
                row |= {"ended_unix_s": told.ended_unix_s, "state": "stepscope"}
        return row

    def _found(self) -> Iterator[LoggedRun]:
        from stepscope.record.run_folder import RunFolder, is_run_folder

        for number, (place, folders, names) in enumerate(os.walk(self.root)):
            self._is_cut = number == _MOST_FOLDERS
            if self._is_cut:
                return
            folder = Path(place)
            if is_run_folder(folder) and self._holds(folder / "run.json"):
                folders.clear()
                yield from self._run(folder, RunFolder(folder).latest_traces())
                continue
            folders.sort()
            yield from self._run(folder, [folder / name for name in sorted(names) if name.endswith(_XPLANE)])
            yield from self._written_by_kineto(folder, [name for name in names if _KINETO.fullmatch(name)])

    def _run(self, path: Path, files: Iterable[Path]) -> Iterator[LoggedRun]:
        inside = [file for file in files if os.path.isfile(file) and self._holds(file)]
        if inside:
            yield LoggedRun(path, inside, max(map(_written, inside)))

    def _written_by_kineto(self, folder: Path, names: list[str]) -> Iterator[LoggedRun]:
        """The runs of one folder, into which each process writes a file for each cycle of its schedule.

        The last has the folder's name, earlier ones that of their first file. Files are of one job if they tell ranks
        of the same number of ranks; one that tells none is a run of its own.
        """
        found = map(folder.joinpath, sorted(names, key=_order))
        files = [file for file in found if os.path.isfile(file) and self._holds(file)]
        jobs = list(_jobs_of({file: self._rank_of(file) if len(files) > 1 else None for file in files}))
        jobs.sort(key=lambda job: max(_order(file.name) for file in job))
        for job in jobs:
            yield from self._run(folder if job is jobs[-1] else job[0], job)

    def _rank_of(self, file: Path) -> tuple[int, int] | None:
        """The rank and how many there are, as the head of the file tells."""
        key = file, _size(file)
        if key not in self._ranks:
            head = b""
            with contextlib.suppress(OSError, zlib.error), file.open("rb") as opened:
                head = opened.read(_HEAD_BYTES)
                if file.name.endswith(".gz"):
                    head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
            told = _RANK.search(head)
            self._ranks[key] = (int(told[1]), int(told[2])) if told else None
        return self._ranks[key]

    def _holds(self, place: Path) -> bool:
        return Path(os.path.realpath(place)).is_relative_to(self.root)


def _jobs_of(ranks: Mapping[Path, tuple[int, int] | None]) -> Iterator[list[Path]]:
    """Files of one cycle of one job, from files in the order of time with their rank and how many ranks there are."""
    jobs: dict[int, dict[int, list[Path]]] = {}
    for file, rank in ranks.items():
        if rank is None:
            yield [file]
        else:
            jobs.setdefault(rank[1], {}).setdefault(rank[0], []).append(file)
    for job in jobs.values():
        for back in range(max(map(len, job.values()))):
            yield [files[-1 - back] for _, files in sorted(job.items()) if len(files) > back]


def _order(name: str) -> tuple[int, str]:
    told = _KINETO.fullmatch(name)
    return int(told[1] or told[2] or 0) if told else 0, name


def _is_trace(name: str) -> bool:
    return name.endswith(_XPLANE) or _KINETO.fullmatch(name) is not None


def _read_with(files: Iterable[Path]) -> Iterator[Path]:
    """The files, and what readers may look for beside them."""
    from stepscope.record.run_folder import MANIFEST, is_run_folder

    yield from files
    for folder in {file.parent for file in files}:
        yield from (each for each in folder.glob("*") if not os.path.isdir(each) and not _is_trace(each.name))
        yield from folder.glob("telemetry/*")
        if is_run_folder(folder.parent):
            yield folder.parent / MANIFEST
            yield from folder.parent.glob("compile/*")


def _size(file: Path) -> int:
    with contextlib.suppress(OSError):
        return file.stat().st_size
    return 0


def _written(file: Path) -> float:
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return 0.0


class StepscopePlugin(TBPlugin):  # type: ignore[misc]
    """The plugin: it answers what the page asks for, about the runs below the log folder."""

    plugin_name = "stepscope"

    def __init__(self, context: TBContext) -> None:
        path = context.logdir or ""
        self._logs = LogFolder(os.path.expanduser(path)) if path and "://" not in path else None
        self._is_active = False
        self._looking: threading.Thread | None = None

    def is_active(self) -> bool:
        """Whether there is a run, as far as a short look tells; a longer one goes on meanwhile."""
        if self._logs is not None and not self._is_active and (self._looking is None or not self._looking.is_alive()):
            self._looking = threading.Thread(target=self._look, name="stepscope", daemon=True)
            self._looking.start()
            self._looking.join(_PATIENCE_S)
        return self._is_active

    def _look(self) -> None:
        assert self._logs is not None
        self._is_active = bool(self._logs.runs())

    def frontend_metadata(self) -> FrontendMetadata:
        return FrontendMetadata(es_module_path="/index.js", tab_name="Stepscope", disable_reload=True)

    def get_plugin_apps(self) -> dict[str, App]:
        if self._logs is None:
            return {}
        return {
            "/index.js": lambda _, start: _answer(start, _MODULE, "text/javascript"),
            "/page.html": _own(self._page_file),
            "/page.js": lambda _, start: _answer(start, _bundled("page.js"), "text/javascript"),
            "/page.css": lambda _, start: _answer(start, _bundled("page.css"), "text/css"),
            "/api/*": _own(self._document),
        }

    @cached_property
    def _shown(self) -> tuple[Page, Documents]:
        from stepscope.commands.shared.reading import SOURCES_VARIABLE
        from stepscope.commands.view.command import COMMAND, report_bug
        from stepscope.commands.view.pages import Page
        from stepscope.view.documents import Documents

        assert self._logs is not None
        os.environ.setdefault(SOURCES_VARIABLE, str(self._logs.root))  # also for the processes that read many ranks
        page = Page(COMMAND.parsed(["--quiet"]), self._logs)
        return page, Documents(page.document, report_bug, page.options)

    def _page_file(self, _: Environ, start: Start) -> list[bytes]:
        from stepscope.view.documents import PAGE

        assert self._logs is not None
        page, documents = self._shown
        page.renew()
        self._logs.runs(anew=True)
        documents.forget()
        return _answer(start, PAGE.encode(), "text/html; charset=utf-8")

    def _document(self, environ: Environ, start: Start) -> list[bytes]:
        from stepscope.view.documents import ACTIONS, CHANGED, LONGEST_QUERY, Answer

        name = environ.get("PATH_INFO", "").rpartition("/")[2]
        query = environ.get("QUERY_STRING", "")
        if len(query) > LONGEST_QUERY or environ["REQUEST_METHOD"] != "GET" or name in ACTIONS:
            answer = Answer.error(405, "TensorBoard shows runs only")
            return _answer(start, answer.body, "application/json", answer.status)
        page, documents = self._shown
        answer = documents.ask(name, dict(parse_qsl(query, keep_blank_values=True))).result()
        more = [(CHANGED, "1")] if page.is_changed() else []
        return _answer(start, answer.body, "application/json", answer.status, more)


def _own(app: App) -> App:
    """Answer no page of another site, which could not read it but have the work done again and again."""

    def asked(environ: Environ, start: Start) -> list[bytes]:
        if environ.get("HTTP_SEC_FETCH_SITE", "none") in ("same-origin", "none"):
            return app(environ, start)
        return _answer(start, b'{"error":"another site\'s page may not ask"}', "application/json", 403)

    return asked


def _bundled(name: str) -> bytes:
    from stepscope.view.documents import bundled

    return bundled(name)


def _answer(
    start: Start, body: bytes, kind: str, status: int = 200, more: Iterable[tuple[str, str]] = ()
) -> list[bytes]:
    from stepscope.view.documents import HEADERS

    known = [*HEADERS.items(), ("Content-Type", kind), ("Content-Length", str(len(body)))]
    start(f"{status} {HTTPStatus(status).phrase}", [*known, *more])
    return [body]
