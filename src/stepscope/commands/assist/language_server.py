"""The answers of the command line in an editor: requests and commands of the Language Server Protocol."""

from __future__ import annotations

import asyncio
import inspect
import os
import shlex
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from lsprotocol import types as lsp
from pygls import uris

from stepscope.commands.assist.editor_state import OpenFile, StepscopeServer, run_command
from stepscope.commands.assist.file_notes import OPEN_PAGE, WHAT_IF, Answer, saving_words
from stepscope.commands.assist.process import STEPSCOPE, end
from stepscope.commands.shared.reading import trace_paths
from stepscope.errors import StepscopeError, UsageError
from stepscope.record.runs import run_at
from stepscope.report.format import duration, share

_SHOWN_RUNS: Final = 8
_NEWEST: Final = "newest"
_USUAL_DEVICES: Final = ("H100-SXM", "A100-SXM-80GB", "L4", "MI300X")


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
            found = server.files[params.text_document.uri] = OpenFile(params.text_document.uri, Path(path))
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

    def _file(self, uri: str) -> OpenFile:
        found = self._server.files.get(uri)
        if found is None:
            raise UsageError(f"{uri} is not open")
        return found

    def _asked(self, uri: str) -> tuple[OpenFile, Answer]:
        found = self._file(uri)
        if found.answer is None:
            raise UsageError(f"no recorded run names lines of {found.path.name}: record this file, or choose a run")
        return found, found.answer

    async def record(self, uri: str, arguments: str = "") -> str | None:
        """Run the file with these arguments, record some of its steps, and show what they cost."""
        opened, server = self._file(uri), self._server
        name = f"{opened.path.stem[:40]}-{time.strftime('%Y%m%d-%H%M%S')}"
        try:
            given = shlex.split(arguments)
        except ValueError as error:
            raise UsageError(f"{arguments!r} are no arguments: {error}") from error
        folder = server.folder_of(opened.path)
        words = ["run", f"--name={name}", "--no-diagnose", str(opened.path), *given]
        async with server.working(f"recording {opened.path.name}"):
            ended = await run_command(folder, server.record_seconds, *words)
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
        self._asked(uri)
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
        from stepscope.report.whatif import contended_sentence

        _, answer = self._asked(uri)
        found = await self._server.answers.json(answer.folder, "whatif", str(answer.trace), f"--remove={rule}")
        if found["together"] is None:
            raise UsageError(f"the steps cannot be replayed: {found['why_not']}")
        then = found["together"]
        said = (
            f"without {rule} a step would take {duration(then['step_ns'])} instead of "
            f"{duration(found['replayed_step_ns'])}, {share(then['saving_share'])} less"
        )
        busy = contended_sentence(found["contended_share"])
        said = f"{said}. {busy}" if busy else said
        self._server.say(said)
        return said

    async def predict(self, uri: str, device: str = "") -> str | None:
        """Say how long a step would take on another device."""
        _, answer = self._asked(uri)
        device = device or await self._chosen("On which device?", _USUAL_DEVICES) or ""
        if not device:
            return None
        found = await self._server.answers.json(answer.folder, "predict", str(answer.trace), f"--to={device}")
        said = [predicted_words(each) for each in found["predictions"]]
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
        trace = (await asyncio.to_thread(trace_paths, place))[0].absolute()
        await server.answers.of(trace, folder)
        server.chosen[folder] = trace
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


def predicted_words(found: dict[str, Any]) -> str:
    """Say what one of the predictions of `stepscope predict --json` says, or why it gives no time."""
    name = found["device"]
    if found["fits"] is False:
        return f"{name}: the step does not fit into its memory"
    if found["step_ns"] is None:
        return f"{name}: no step time: {found['notes'][-1] if found['notes'] else 'the trace is no base for one'}"
    between = f"{duration(found['low_ns'])} to {duration(found['high_ns'])}"
    return (
        f"{name}: {duration(found['step_ns'])} per step ({between}), limited by {found['limit'] or 'what is unknown'}"
    )
