"""The answers of the command line in an editor, by the Language Server Protocol.

The commands run in processes of their own, so that no trace, however large or damaged, stops the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shlex
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from lsprotocol import types as lsp
from pygls import uris
from pygls.lsp.server import LanguageServer

from stepscope import __version__
from stepscope.commands.assist.file_notes import OPEN_PAGE, WHAT_IF, Answer, FileNotes, saving_words
from stepscope.commands.assist.process import STEPSCOPE, end, run
from stepscope.commands.shared.reading import recorded_file, trace_paths
from stepscope.errors import StepscopeError, UnreadableTraceError, UsageError
from stepscope.record.run_folder import RunFolder, data_folder
from stepscope.record.runs import RunIndex, run_at
from stepscope.report.format import duration, share
from stepscope.trace.program_facts import SUFFIX, read_lines
from stepscope.trace.source_text import kept_source, split_lines

_MOST_TRACES: Final = 100
"""The newest, which are asked for the lines of a file."""
_LARGEST_ANSWER: Final = 64 << 20
_AT_ONCE: Final = 2
_SETTLE_S: Final = 0.3
"""After a change of a text, before its diagnostics are published again."""
_LOOK_S: Final = 3.0
"""Between looks for new runs."""
_SHOWN_RUNS: Final = 8
_NEWEST: Final = "newest"
_USUAL_DEVICES: Final = ("H100-SXM", "A100-SXM-80GB", "L4", "MI300X")


@dataclass
class _Open:
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
        """What the commands say of a trace.

        Raises:
            UsageError: a command failed; the message says why.
        """
        try:
            key = (trace, trace.stat().st_mtime_ns, folder)
        except OSError as error:
            raise UsageError(f"{trace} cannot be read: {error.strerror}") from error
        if anew or key not in self._known:
            self._known[key] = asyncio.create_task(self._asked(trace, folder, anew=anew))
        try:
            return await asyncio.shield(self._known[key])
        except UsageError:
            self._known.pop(key, None)
            raise

    async def _asked(self, trace: Path, folder: Path, *, anew: bool) -> Answer:
        more = ["--no-cache"] if anew else []
        lines = await self.json(folder, "lines", str(trace), *more)  # the others find the trace parsed, or do not begin
        rest = (self.json(folder, name, str(trace), *more) for name in ("diagnose", "modules"))
        diagnosis, modules = await asyncio.gather(*rest)
        return Answer(trace, folder, diagnosis, lines, modules)

    async def json(self, folder: Path, *words: str) -> dict[str, Any]:
        """The document that a command prints with --json.

        Raises:
            UsageError: it failed.
        """
        output = await self.command(folder, *words, "--json", "-")
        try:
            found = json.loads(output)
        except ValueError as error:
            raise UsageError(f"stepscope {words[0]} printed something else than a document") from error
        return found if isinstance(found, dict) else {}

    async def command(self, folder: Path, *words: str, seconds: float | None = None) -> str:
        """What a command prints. Raises UsageError if it failed."""
        limit = self.seconds if seconds is None else seconds
        async with self._turns:
            try:
                ended = await run([*STEPSCOPE, *words], folder, limit, {}, most_bytes=_LARGEST_ANSWER)
            except asyncio.TimeoutError as error:
                raise UsageError(f"stepscope {words[0]} took longer than {limit:g} s and was ended") from error
            except OSError as error:
                raise UsageError(f"stepscope {words[0]} cannot be started: {error.strerror}") from error
        if ended.code not in (0, 1):
            raise UsageError(ended.reason)
        return ended.output


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
        self.files: dict[str, _Open] = {}
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

    def _new_notes(self, opened: _Open, answer: Answer, text: str) -> FileNotes | None:
        if opened.recorded is None:
            return None
        has_changed = opened.kept is None and _is_newer(opened.path, answer.trace, text)
        return FileNotes(
            answer, opened.recorded, text, opened.kept, self.units, may_have_moved=has_changed, before=opened.notes
        )

    async def look(self, opened: _Open, *, anew: bool = False) -> None:
        """Find the trace of an open file, ask the commands, and publish; silent where there is no trace."""
        folder = self.folder_of(opened.path)
        chosen = self.chosen.get(folder)
        trace = chosen or await asyncio.to_thread(self.answers.newest, opened.path, folder)
        if trace is None or (trace == opened.trace and opened.answer is not None and not anew):
            return
        opened.trace = trace
        try:
            answer = await self.answers.of(trace, folder, anew=anew)
        except UsageError as error:
            self.say_once(f"{trace}: {error}")
            return
        if self.files.get(opened.uri) is opened and opened.trace == trace:
            opened.answer, opened.recorded, opened.kept = answer, None, None
            with contextlib.suppress(UsageError):
                opened.recorded = recorded_file(str(opened.path), answer.files())
                opened.kept = await asyncio.to_thread(kept_source, trace, opened.recorded)
            self.publish(opened)
            self._refresh()

    async def look_at_all(self) -> None:
        await asyncio.gather(*(self.look(each) for each in list(self.files.values())))

    def publish(self, opened: _Open) -> None:
        notes = self.notes_of(opened.uri)
        found = [] if notes is None else notes.diagnostics()
        self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(opened.uri, found, version=opened.version))

    def _refresh(self) -> None:
        workspace = self.client_capabilities.workspace
        if workspace is not None and workspace.inlay_hint is not None and workspace.inlay_hint.refresh_support:
            self.workspace_inlay_hint_refresh(None)
        if workspace is not None and workspace.code_lens is not None and workspace.code_lens.refresh_support:
            self.workspace_code_lens_refresh(None)

    async def publish_soon(self, opened: _Open) -> None:
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
            with contextlib.suppress(Exception):
                token = f"stepscope-{time.monotonic_ns()}"
                await asyncio.wait_for(self.work_done_progress.create_async(token), 5)
                self.work_done_progress.begin(token, lsp.WorkDoneProgressBegin(title=f"stepscope: {title}"))
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


def server_for(seconds: float, record_seconds: float) -> StepscopeServer:
    """The server with its requests and commands."""
    server = StepscopeServer(seconds, record_seconds)
    _add_documents(server)
    _add_requests(server)
    _add_commands(server)
    return server


def _add_documents(server: StepscopeServer) -> None:
    @server.feature(lsp.INITIALIZED)
    async def initialized(params: lsp.InitializedParams) -> None:
        server.start(server.watch_runs())

    @server.feature(lsp.TEXT_DOCUMENT_DID_OPEN)
    async def opened(params: lsp.DidOpenTextDocumentParams) -> None:
        path = uris.to_fs_path(params.text_document.uri)
        if path is not None:
            found = server.files[params.text_document.uri] = _Open(params.text_document.uri, Path(path))
            server.start(server.look(found))

    @server.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)
    async def changed(params: lsp.DidChangeTextDocumentParams) -> None:
        found = server.files.get(params.text_document.uri)
        if found is not None:
            if found.publishing is not None:
                found.publishing.cancel()
            found.publishing = server.start(server.publish_soon(found))

    @server.feature(lsp.TEXT_DOCUMENT_DID_SAVE)
    async def saved(params: lsp.DidSaveTextDocumentParams) -> None:
        found = server.files.get(params.text_document.uri)
        if found is not None:
            server.start(server.look(found))

    @server.feature(lsp.TEXT_DOCUMENT_DID_CLOSE)
    async def closed(params: lsp.DidCloseTextDocumentParams) -> None:
        if server.files.pop(params.text_document.uri, None) is not None:
            server.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(params.text_document.uri, []))

    @server.feature(lsp.SHUTDOWN)
    async def shut_down(params: Any) -> None:
        await server.close()


def _add_requests(server: StepscopeServer) -> None:
    @server.feature(lsp.TEXT_DOCUMENT_HOVER)
    def hover(params: lsp.HoverParams) -> lsp.Hover | None:
        notes = server.notes_of(params.text_document.uri)
        return None if notes is None else notes.hover(params.position.line)

    @server.feature(lsp.TEXT_DOCUMENT_INLAY_HINT)
    def hints(params: lsp.InlayHintParams) -> list[lsp.InlayHint]:
        notes = server.notes_of(params.text_document.uri)
        return [] if notes is None else notes.hints(params.range.start.line, params.range.end.line)

    @server.feature(lsp.TEXT_DOCUMENT_CODE_LENS)
    def lenses(params: lsp.CodeLensParams) -> list[lsp.CodeLens]:
        notes = server.notes_of(params.text_document.uri)
        return [] if notes is None else notes.lenses(params.text_document.uri)

    options = lsp.CodeActionOptions(code_action_kinds=[lsp.CodeActionKind.QuickFix, lsp.CodeActionKind.Empty])

    @server.feature(lsp.TEXT_DOCUMENT_CODE_ACTION, options)
    def actions(params: lsp.CodeActionParams) -> list[lsp.CodeAction]:
        uri = params.text_document.uri
        notes = server.notes_of(uri)
        if notes is None:
            return []
        found = notes.actions(uri, params.range.start.line, params.range.end.line, server.files[uri].path)
        return [each for each in found if _is_wanted(each, params.context.only)]


def _is_wanted(action: lsp.CodeAction, only: Sequence[str] | None) -> bool:
    return only is None or any(kind == action.kind or f"{action.kind}".startswith(f"{kind}.") for kind in only)


def _add_commands(server: StepscopeServer) -> None:
    commands = Commands(server)
    for name, command in commands.named().items():
        server.command(name)(_guarded(server, command))


def _guarded(server: StepscopeServer, command: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """A command whose failure is one message."""

    async def guarded(*given: str) -> Any:
        try:
            inspect.signature(command).bind(*given)
        except TypeError as error:
            server.say(f"the editor gave a command other arguments than it takes: {error}", lsp.MessageType.Warning)
            return None
        try:
            return await command(*given)
        except StepscopeError as error:
            server.say(str(error), lsp.MessageType.Warning)
            return None

    return guarded


class Commands:
    """What the editor can have done; the first argument of each is the address of an open file."""

    def __init__(self, server: StepscopeServer) -> None:
        self._server = server

    def named(self) -> dict[str, Callable[..., Coroutine[Any, Any, Any]]]:
        """The commands by the names that editors use."""
        return {
            "stepscope.record": self.record,
            "stepscope.diagnose": self.diagnose,
            "stepscope.findings": self.findings,
            "stepscope.chooseRun": self.choose_run,
            "stepscope.predict": self.predict,
            WHAT_IF: self.what_if,
            OPEN_PAGE: self.open_page,
        }

    def _file(self, uri: str) -> _Open:
        found = self._server.files.get(uri)
        if found is None:
            raise UsageError(f"{uri} is not open")
        return found

    def _asked(self, uri: str) -> tuple[_Open, Answer]:
        found = self._file(uri)
        if found.answer is None:
            raise UsageError(f"no recorded run names lines of {found.path.name}: record this file, or choose a run")
        return found, found.answer

    async def record(self, uri: str, arguments: str = "") -> str | None:
        """Run the file with these arguments, record some of its steps, and show what they cost."""
        opened, server = self._file(uri), self._server
        name = f"{opened.path.stem[:40]}-{time.strftime('%Y%m%d-%H%M%S')}"
        words = ["run", f"--name={name}", "--no-diagnose", str(opened.path), *shlex.split(arguments)]
        folder = server.folder_of(opened.path)
        async with server.working(f"recording {opened.path.name}"):
            ended = await run([*STEPSCOPE, *words], folder, server.record_seconds, {})
        recorded = await asyncio.to_thread(run_at, name)
        if recorded is None or not recorded.traces():
            raise UsageError(f"nothing was recorded; exit code {ended.code}: {ended.reason}")
        server.chosen.pop(folder, None)
        await server.look_at_all()
        server.say(f"recorded as the run {name}")
        return name

    async def diagnose(self, uri: str) -> list[dict[str, Any]]:
        """Ask the commands anew, without what they kept."""
        opened = self._file(uri)
        async with self._server.working(f"diagnosing {opened.path.name}"):
            await self._server.look(opened, anew=True)
        return await self.findings(uri)

    async def findings(self, uri: str) -> list[dict[str, Any]]:
        """All findings of the file's trace, the largest saving first: for a tree beside the text."""
        opened = self._file(uri)
        if opened.answer is None:
            return []
        notes = self._server.notes_of(uri)
        now = {} if notes is None else {old: line for line, note in notes.by_line.items() for old in note.recorded}
        recorded = None if notes is None else notes.recorded
        return [
            {
                "rule": each["rule"],
                "title": each["title"],
                "saves": saving_words(each),
                "change": each["remedy"]["text"],
                "where": [
                    {**place, "line_now": now.get(place["line"]) if place["file"] == recorded else None}
                    for place in each["where"]
                ],
            }
            for each in opened.answer.findings
        ]

    async def what_if(self, uri: str, rule: str) -> str:
        """Say how long a step would take with everything fixed that a rule finds."""
        _, answer = self._asked(uri)
        found = await self._server.answers.json(answer.folder, "whatif", str(answer.trace), f"--remove={rule}")
        if found["together"] is None:
            raise UsageError(f"the steps cannot be replayed: {found['why_not']}")
        then = found["together"]
        said = (
            f"without {rule} a step would take {duration(then['step_ns'])} instead of "
            f"{duration(found['replayed_step_ns'])}, {share(then['saving_share'])} less"
        )
        self._server.say(said)
        return said

    async def predict(self, uri: str, device: str = "") -> str | None:
        """Say how long a step would take on another device."""
        _, answer = self._asked(uri)
        device = device or await self._chosen("On which device?", _USUAL_DEVICES) or ""
        if not device:
            return None
        found = await self._server.answers.json(answer.folder, "predict", str(answer.trace), f"--to={device}")
        said = [
            f"{each['device']}: {duration(each['step_ns'])} per step "
            f"({duration(each['low_ns'])} to {duration(each['high_ns'])}), limited by {each['limit']}"
            for each in found["predictions"]
        ]
        if not said:
            raise UsageError(f"no prediction: {found['why_not'] or 'no device of this name'}")
        self._server.say("; ".join(said))
        return "; ".join(said)

    async def choose_run(self, uri: str, name: str = "") -> str | None:
        """Show a run or trace by its name or path, or the newest again; without one, ask which that names the file."""
        opened, server = self._file(uri), self._server
        folder = server.folder_of(opened.path)
        if not name:
            known = await asyncio.to_thread(server.answers.traces, folder)
            names = [each for each, trace in known if await asyncio.to_thread(server.answers.names, trace, opened.path)]
            if not names:
                raise UsageError(f"no recorded run names lines of {opened.path.name}")
            name = await self._chosen("Which run?", [*list(dict.fromkeys(names))[:_SHOWN_RUNS], _NEWEST]) or ""
        if not name:
            return None
        if name == _NEWEST:
            server.chosen.pop(folder, None)
            await server.look_at_all()
            return name
        place = name if os.path.isabs(name) or not (folder / name).exists() else str(folder / name)
        server.chosen[folder] = (await asyncio.to_thread(trace_paths, place))[0].absolute()
        await server.look_at_all()
        if opened.answer is not None and server.notes_of(uri) is None:
            server.say(f"{name} names no lines of {opened.path.name}", lsp.MessageType.Warning)
        return name

    async def _chosen(self, question: str, answers: Sequence[str]) -> str | None:
        actions = [lsp.MessageActionItem(title=each) for each in answers]
        asked = lsp.ShowMessageRequestParams(lsp.MessageType.Info, f"stepscope: {question}", actions)
        chosen = await self._server.window_show_message_request_async(asked)
        return None if chosen is None else chosen.title

    async def open_page(self, uri: str, line: int = 0) -> str:
        """Open the page of the file's trace at a line, from 1; return its address."""
        opened, answer = self._asked(uri)
        server = self._server
        process, address = server.pages.get(answer.trace, (None, ""))
        if process is None or process.returncode is not None:
            process, address = await self._serve(answer)
            server.pages[answer.trace] = process, address
        notes = server.notes_of(uri)
        recorded = None if notes is None else notes.recorded_line(line)
        if notes is not None and recorded is not None:
            address += "#" + urlencode({"view": "lines", "choose": f"line:{notes.recorded}:{recorded}"})
        window = server.client_capabilities.window
        if window is not None and window.show_document is not None and window.show_document.support:
            server.window_show_document(lsp.ShowDocumentParams(address, external=True))
        else:
            server.say(f"the page of {opened.path.name}: {address}")
        return address

    async def _serve(self, answer: Answer) -> tuple[asyncio.subprocess.Process, str]:
        words = ("view", str(answer.trace), "--no-browser", "--idle-after=1h")
        process = await asyncio.create_subprocess_exec(
            *STEPSCOPE,
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            cwd=answer.folder,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), self._server.answers.seconds)
        except (asyncio.TimeoutError, ValueError):
            line = b""
        address = line.decode("utf-8", "replace").strip()
        if not address.startswith("http"):
            await end(process)
            raise UsageError("the page could not be served: stepscope view says why")
        return process, address
