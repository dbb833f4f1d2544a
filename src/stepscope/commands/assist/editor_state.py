"""What a language server knows: the open files, the traces that name their lines, and what the commands say of them.

The commands run in processes of their own, so that no trace, however large or damaged, stops the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lsprotocol import types as lsp
from pygls import uris
from pygls.exceptions import JsonRpcException
from pygls.lsp.server import LanguageServer

from stepscope import __version__
from stepscope.commands.assist.file_notes import Answer, FileNotes
from stepscope.commands.assist.process import STEPSCOPE, Ended, end, run
from stepscope.commands.shared.reading import recorded_file
from stepscope.errors import StepscopeError, UnreadableTraceError, UsageError
from stepscope.record.run_folder import RunFolder, data_folder
from stepscope.record.runs import RunIndex
from stepscope.trace.line_records import SUFFIX, kept_source, read_lines, split_lines

_MOST_TRACES: Final = 100
"""The newest, which are asked for the lines of a file."""
_LARGEST_ANSWER: Final = 64 << 20
_MOST_ANSWERS: Final = 16
_AT_ONCE: Final = 2
_SETTLE_S: Final = 0.3
"""After a change of a text, before its diagnostics are published again."""
_LOOK_S: Final = 3.0
"""Between looks for new runs."""
_REPLY_S: Final = 5.0
"""For an editor that is asked for a progress bar."""


@dataclass
class OpenFile:
    """A file that is open in the editor.

    Attributes:
        trace: of `answer`, or the one that is asked.
        recorded, kept: how the trace names the file, if it does, and the text that was recorded, if it was kept.
        notes: of the text with `version`.
    """

    uri: str
    path: Path
    trace: Path | None = None
    answer: Answer | None = None
    recorded: str | None = None
    kept: str | None = None
    notes: FileNotes | None = None
    version: int | None = None
    publishing: asyncio.Task[None] | None = None


class Answers:
    """Traces that name a file, and what the commands say of them; asked for once."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._names: dict[tuple[Path, int], frozenset[str]] = {}
        self._known: dict[tuple[Path, int, Path], asyncio.Task[Answer]] = {}
        self._turns = asyncio.Semaphore(_AT_ONCE)

    def newest(self, file: Path, folder: Path) -> Path | None:
        """The newest trace whose recorded lines are of this file: of a run, or in the workspace's folder."""
        real = os.path.realpath(file)
        return next((trace for _, trace in self.traces(folder) if real in self._files_of(trace)), None)

    def traces(self, folder: Path) -> list[tuple[str, Path]]:
        """Names and traces with recorded lines, the newest first."""
        found: list[tuple[float, str, Path]] = []
        with contextlib.suppress(StepscopeError, OSError):
            for record in RunIndex().all()[:_MOST_TRACES]:
                if not record.is_gone:
                    traces = RunFolder.open(record.path).latest_traces()
                    found += [(record.started_unix_s, record.name, trace) for trace in traces]
        with contextlib.suppress(OSError):
            for place in list(folder.glob(f"*{SUFFIX}"))[:_MOST_TRACES]:
                trace = place.with_name(place.name.removesuffix(SUFFIX))
                if trace.is_file():
                    found.append((place.stat().st_mtime, trace.name, trace))
        found.sort(key=lambda each: -each[0])
        return [(name, trace) for _, name, trace in found]

    def names(self, trace: Path, file: Path) -> bool:
        """Whether the trace's recorded lines are of this file."""
        return os.path.realpath(file) in self._files_of(trace)

    def _files_of(self, trace: Path) -> frozenset[str]:
        place = trace.with_name(trace.name + SUFFIX)
        try:
            key = (place, place.stat().st_mtime_ns)
            if key not in self._names:
                files = {each.file for each in read_lines(place).locations}
                self._names[key] = frozenset(os.path.realpath(file) for file in files if os.path.isabs(file))
            return self._names[key]
        except (OSError, ValueError, UnreadableTraceError):
            return frozenset()

    async def of(self, trace: Path, folder: Path, *, anew: bool = False) -> Answer:
        """What the commands say of a trace; what failed is tried again if it is asked anew, or the trace has changed.

        Raises:
            UsageError: a command failed; the message says why.
        """
        try:
            key = (trace, trace.stat().st_mtime_ns, folder)
        except OSError as error:
            raise UsageError(f"{trace} cannot be read: {error.strerror}") from error
        if anew or key not in self._known:
            self._known[key] = asyncio.create_task(self._asked(trace, folder, anew=anew))
            for old in list(self._known)[:-_MOST_ANSWERS]:
                del self._known[old]
        return await asyncio.shield(self._known[key])

    async def _asked(self, trace: Path, folder: Path, *, anew: bool) -> Answer:
        more = ["--no-cache"] if anew else []
        lines = await self.json(folder, "lines", str(trace), *more)  # the others find the trace parsed, or do not begin
        rest = (self.json(folder, name, str(trace), *more) for name in ("diagnose", "modules"))
        diagnosis, modules = await asyncio.gather(*rest)
        if "findings" not in diagnosis or "lines" not in lines or "modules" not in modules:
            raise UsageError("it is no trace of steps")
        return Answer(trace, folder, diagnosis, lines, modules)

    async def json(self, folder: Path, *words: str) -> dict[str, Any]:
        """The document that a command prints with --json.

        Raises:
            UsageError: it failed.
        """
        async with self._turns:
            ended = await run_command(folder, self.seconds, *words, "--json", "-")
        if ended.code not in (0, 1):
            raise UsageError(ended.reason)
        try:
            found = json.loads(ended.output)
        except ValueError as error:
            raise UsageError(f"stepscope {words[0]} printed something else than a document") from error
        return found if isinstance(found, dict) else {}


async def run_command(folder: Path, seconds: float, *words: str) -> Ended:
    """Run a command of stepscope. Raises UsageError if it cannot be started or takes too long."""
    try:
        return await run([*STEPSCOPE, *words], folder, seconds, {}, most_bytes=_LARGEST_ANSWER)
    except asyncio.TimeoutError as error:
        raise UsageError(f"stepscope {words[0]} took longer than {seconds:g} s and was ended") from error
    except OSError as error:
        raise UsageError(f"stepscope {words[0]} cannot be started: {error.strerror}") from error


class StepscopeServer(LanguageServer):
    """The server's state: open files, answers, chosen traces and pages.

    Args:
        seconds: that a command may take.
        record_seconds: that a recorded program may take.
    """

    def __init__(self, seconds: float, record_seconds: float) -> None:
        super().__init__("stepscope", __version__)
        self.answers = Answers(seconds)
        self.record_seconds = record_seconds
        self.files: dict[str, OpenFile] = {}
        self.chosen: dict[Path, Path] = {}
        self.pages: dict[Path, tuple[asyncio.subprocess.Process, str]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._said: set[str] = set()
        self._runs_state: tuple[int, ...] = ()

    def start(self, action: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Do something meanwhile; what it raises ends nothing else."""
        task = asyncio.get_running_loop().create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.window_log_message(lsp.LogMessageParams(lsp.MessageType.Error, f"stepscope: {task.exception()!r}"))

    def say(self, text: str, kind: lsp.MessageType = lsp.MessageType.Info) -> None:
        self.window_show_message(lsp.ShowMessageParams(kind, f"stepscope: {text}"))

    def say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text, lsp.MessageType.Warning)

    def folder_of(self, path: Path) -> Path:
        """The innermost workspace folder of a file, or else the file's own folder."""
        places = [uris.to_fs_path(each) for each in self.workspace.folders]
        places += [] if self.workspace.root_path is None else [self.workspace.root_path]
        around = [Path(place) for place in places if place and path.is_relative_to(place)]
        return max(around, key=lambda place: len(place.parts), default=path.parent)

    def units(self, text: str) -> int:
        return len(text) if text.isascii() else self.workspace.position_codec.client_num_units(text)

    def notes_of(self, uri: str) -> FileNotes | None:
        """What is known of an open file, at the lines of its present text."""
        opened = self.files.get(uri)
        if opened is None or opened.answer is None:
            return None
        document = self.workspace.get_text_document(uri)
        if opened.notes is None or opened.version != document.version or opened.notes.answer is not opened.answer:
            opened.notes = self._new_notes(opened, opened.answer, document.source)
            opened.version = document.version
        return opened.notes

    def _new_notes(self, opened: OpenFile, answer: Answer, text: str) -> FileNotes | None:
        if opened.recorded is None:
            return None
        has_changed = opened.kept is None and _is_newer(opened.path, answer.trace, text)
        return FileNotes(
            answer, opened.recorded, text, opened.kept, self.units, may_have_moved=has_changed, before=opened.notes
        )

    async def look(self, opened: OpenFile, *, anew: bool = False) -> None:
        """Find the trace of an open file, ask the commands, and publish; silent where there is no trace."""
        folder = self.folder_of(opened.path)
        chosen = self.chosen.get(folder)
        trace = chosen or await asyncio.to_thread(self.answers.newest, opened.path, folder)
        if trace is None:
            return
        opened.trace = trace
        try:
            answer = await self.answers.of(trace, folder, anew=anew)
        except UsageError as error:
            self.say_once(f"{trace}: {error}")
            return
        recorded = kept = None
        with contextlib.suppress(UsageError):
            recorded = recorded_file(str(opened.path), answer.files())
            kept = await asyncio.to_thread(kept_source, trace, recorded)
        if self.files.get(opened.uri) is opened and opened.trace == trace and answer is not opened.answer:
            opened.answer, opened.recorded, opened.kept = answer, recorded, kept
            self.publish(opened)
            self._refresh()

    async def look_at_all(self) -> None:
        await asyncio.gather(*(self.look(each) for each in list(self.files.values())))

    def publish(self, opened: OpenFile) -> None:
        notes = self.notes_of(opened.uri)
        found = [] if notes is None else notes.diagnostics()
        self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(opened.uri, found, version=opened.version))

    def _refresh(self) -> None:
        workspace = self.client_capabilities.workspace
        if workspace is not None and workspace.inlay_hint is not None and workspace.inlay_hint.refresh_support:
            self.workspace_inlay_hint_refresh(None)
        if workspace is not None and workspace.code_lens is not None and workspace.code_lens.refresh_support:
            self.workspace_code_lens_refresh(None)

    async def publish_soon(self, opened: OpenFile) -> None:
        await asyncio.sleep(_SETTLE_S)
        if self.files.get(opened.uri) is opened:
            self.publish(opened)

    async def watch_runs(self) -> None:
        """Look again when a run was recorded, by whomever."""
        while True:
            state = await asyncio.to_thread(_runs_state)
            if self._runs_state and state != self._runs_state:
                self.start(self.look_at_all())
            self._runs_state = state
            await asyncio.sleep(_LOOK_S)

    @contextlib.asynccontextmanager
    async def working(self, title: str) -> AsyncIterator[None]:
        """Say that something runs, and show it as progress where the client can."""
        self.say(f"{title} …")
        window = self.client_capabilities.window
        token = None
        if window is not None and window.work_done_progress:
            with contextlib.suppress(asyncio.TimeoutError, JsonRpcException):
                created = f"stepscope-{time.monotonic_ns()}"
                await asyncio.wait_for(self.work_done_progress.create_async(created), _REPLY_S)
                self.work_done_progress.begin(created, lsp.WorkDoneProgressBegin(title=f"stepscope: {title}"))
                token = created
        try:
            yield
        finally:
            if token is not None:
                self.work_done_progress.end(token, lsp.WorkDoneProgressEnd())

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*(end(process) for process, _ in self.pages.values()))
        self.pages.clear()

    def shutdown(self) -> None:
        """End the pages also where the editor went without a word."""
        for process, _ in self.pages.values():
            if process.returncode is None:
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGTERM)
        super().shutdown()  # type: ignore[no-untyped-call]


def _is_newer(file: Path, trace: Path, text: str) -> bool:
    """Whether a text, or the file that it is in the editor, is newer than the trace, as far as times tell."""
    with contextlib.suppress(OSError):
        if file.stat().st_mtime <= trace.stat().st_mtime:
            return split_lines(file.read_bytes().decode("utf-8", "replace")) != split_lines(text)
    return True


def _runs_state() -> tuple[int, ...]:
    found = [1]
    for name in ("runs.sqlite", "runs.sqlite-wal"):
        with contextlib.suppress(OSError):
            found.append((data_folder() / name).stat().st_mtime_ns)
    return tuple(found)
