"""`stepscope lsp` as an editor uses it: one server process, which a client asks by the protocol."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.commands.assist.process import STEPSCOPE
from stepscope.trace.line_records import LineRecords, Location, packed_sources, write_lines
from tests.e2e.conftest import PER_TOKEN, environment

pytest.importorskip("pygls", reason="the extra editor is not installed")

from lsprotocol import types as lsp
from pygls.lsp.client import LanguageClient

PROGRAM = Path(__file__).parents[2] / "examples" / "gpt2_training.py"
EXTENSION = Path(__file__).parents[2] / "editor" / "vscode"
RECORDED = "examples/gpt2_training.py"  # as the trace names it
PATIENCE_S = 90.0


class Editor:
    """A client with two workspaces, and what the server sent it.

    Attributes:
        first: its folder has a trace of its file, and one that is damaged.
        second: its folder has no trace.
        variables: of the server's environment.
    """

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.client = LanguageClient("tests", "1")
        self.first, self.second = folder / "first", folder / "second"
        self.variables: dict[str, str] = {}
        self.capabilities = lsp.ServerCapabilities()
        self.diagnostics: dict[str, list[lsp.Diagnostic]] = {}
        self.messages: list[str] = []
        self.shown: list[str] = []
        self.titles: list[str] = []
        self.refreshed: set[str] = set()
        self._receive()

    def _receive(self) -> None:
        def published(params: lsp.PublishDiagnosticsParams) -> None:
            self.diagnostics[params.uri] = list(params.diagnostics)

        def said(params: lsp.ShowMessageParams) -> None:
            self.messages.append(params.message)

        def show(params: lsp.ShowDocumentParams) -> lsp.ShowDocumentResult:
            self.shown.append(params.uri)
            return lsp.ShowDocumentResult(success=True)

        def choose(params: lsp.ShowMessageRequestParams) -> lsp.MessageActionItem:
            assert params.actions
            return params.actions[0]

        def create(params: lsp.WorkDoneProgressCreateParams) -> None:
            return None

        def progress(params: lsp.ProgressParams) -> None:
            value: Any = params.value
            self.titles.append(value.get("title", value["kind"]))

        def hints_are_new(params: None) -> None:
            self.refreshed.add("hints")

        def lenses_are_new(params: None) -> None:
            self.refreshed.add("lenses")

        receivers: dict[str, Callable[..., Any]] = {
            lsp.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS: published,
            lsp.WINDOW_SHOW_MESSAGE: said,
            lsp.WINDOW_SHOW_DOCUMENT: show,
            lsp.WINDOW_SHOW_MESSAGE_REQUEST: choose,
            lsp.WINDOW_WORK_DONE_PROGRESS_CREATE: create,
            lsp.PROGRESS: progress,
            lsp.WORKSPACE_INLAY_HINT_REFRESH: hints_are_new,
            lsp.WORKSPACE_CODE_LENS_REFRESH: lenses_are_new,
        }
        for name, receive in receivers.items():
            self.client.feature(name)(receive)

    def do(self, action: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(action, PATIENCE_S))

    def wait(self, condition: Callable[[], object]) -> None:
        async def until() -> None:
            while not condition():
                await asyncio.sleep(0.05)

        self.do(until())

    def start(self) -> None:
        words = [sys.executable, "-m", "stepscope", "lsp", "--stdio", "--timeout", "60s"]
        self.do(self.client.start_io(*words, env=environment(**self.variables)))
        folders = [lsp.WorkspaceFolder(place.as_uri(), place.name) for place in (self.first, self.second)]
        refreshed = lsp.CodeLensWorkspaceClientCapabilities(refresh_support=True)
        hints = lsp.InlayHintWorkspaceClientCapabilities(refresh_support=True)
        window = lsp.WindowClientCapabilities(
            work_done_progress=True, show_document=lsp.ShowDocumentClientCapabilities(support=True)
        )
        workspace = lsp.WorkspaceClientCapabilities(inlay_hint=hints, code_lens=refreshed, workspace_folders=True)
        capabilities = lsp.ClientCapabilities(window=window, workspace=workspace)
        asked = lsp.InitializeParams(capabilities=capabilities, workspace_folders=folders, root_uri=folders[0].uri)
        self.capabilities = self.do(self.client.initialize_async(asked)).capabilities
        self.client.initialized(lsp.InitializedParams())

    def open(self, place: Path) -> str:
        item = lsp.TextDocumentItem(place.as_uri(), "python", 1, place.read_text())
        self.client.text_document_did_open(lsp.DidOpenTextDocumentParams(item))
        return place.as_uri()

    def change(self, uri: str, version: int, text: str) -> None:
        document = lsp.VersionedTextDocumentIdentifier(version=version, uri=uri)
        whole = [lsp.TextDocumentContentChangeWholeDocument(text)]
        self.client.text_document_did_change(lsp.DidChangeTextDocumentParams(document, whole))

    def command(self, name: str, *arguments: Any) -> Any:
        asked = lsp.ExecuteCommandParams(f"stepscope.{name}", list(arguments))
        return self.do(self.client.workspace_execute_command_async(asked))

    def stop(self) -> None:
        self.do(self.client.shutdown_async(None))
        self.client.exit(None)
        stop: Any = self.client.stop
        self.do(stop())
        self.loop.close()


@pytest.fixture(scope="module")
def editor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Editor]:
    folder = tmp_path_factory.mktemp("editor")
    editor = Editor(folder)
    source = editor.first / RECORDED
    source.parent.mkdir(parents=True)
    editor.second.mkdir()
    shutil.copy(PROGRAM, source)
    shutil.copy(PER_TOKEN, editor.first / "trace.json.gz")
    text = packed_sources([str(source)], 2**62)[str(source)]
    keep_lines(editor.first / "trace.json.gz", source, {RECORDED: text})
    (editor.first / "damaged.json").write_text("{")
    (editor.first / "broken.py").write_text("x = 1\n")
    keep_lines(editor.first / "damaged.json", editor.first / "broken.py", {})
    (editor.second / "other.py").write_text("print(1)\n")
    (editor.first / "json.py").write_text("raise SystemExit('a module of the project was imported')\n")
    editor.variables = {"STEPSCOPE_DATA_DIR": str(folder / "data"), "STEPSCOPE_CACHE_DIR": str(folder / "cache")}
    editor.start()
    yield editor
    editor.stop()


def keep_lines(trace: Path, file: Path, sources: dict[str, bytes]) -> None:
    places = [Location(str(file), 1, "<module>")]
    write_lines(
        LineRecords(process=1, start_unix_ns=0, end_unix_ns=1, locations=places, threads=[], sources=sources), trace
    )


@pytest.fixture(scope="module")
def uri(editor: Editor) -> str:
    """The recorded program, open and diagnosed."""
    found = editor.open(editor.first / RECORDED)
    editor.wait(lambda: editor.diagnostics.get(found) and len(editor.refreshed) == 2)
    return found


def the_loop(editor: Editor, uri: str) -> lsp.Diagnostic:
    return next(each for each in editor.diagnostics[uri] if each.code == "loop-in-step")


def line_with(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines()) if part in line)


def document(uri: str) -> lsp.TextDocumentIdentifier:
    return lsp.TextDocumentIdentifier(uri)


def hints_of(editor: Editor, uri: str, last: int = 10_000) -> dict[int, str]:
    whole = lsp.Range(lsp.Position(0, 0), lsp.Position(last, 0))
    found = editor.do(editor.client.text_document_inlay_hint_async(lsp.InlayHintParams(document(uri), whole)))
    return {each.position.line: each.label for each in found}


def actions_at(editor: Editor, uri: str, line: int) -> list[lsp.CodeAction]:
    where = lsp.Range(lsp.Position(line, 0), lsp.Position(line, 0))
    asked = lsp.CodeActionParams(document(uri), where, lsp.CodeActionContext([]))
    found: list[lsp.CodeAction] = editor.do(editor.client.text_document_code_action_async(asked))
    return found


def test_the_extension_of_vs_code_has_the_commands_of_the_server(editor: Editor) -> None:
    offered = editor.capabilities.execute_command_provider
    manifest = json.loads((EXTENSION / "package.json").read_text())
    source = (EXTENSION / "src" / "extension.ts").read_text()

    contributed = {each["command"].removeprefix("stepscope.file.") for each in manifest["contributes"]["commands"]}

    assert offered is not None
    assert {f"stepscope.{name}" for name in (*contributed, "findings")} == set(offered.commands)
    assert all(f'register("{name}"' in source for name in contributed)


def test_findings_stand_at_their_lines(editor: Editor, uri: str) -> None:
    found = the_loop(editor, uri)

    assert found.severity == lsp.DiagnosticSeverity.Warning
    assert found.source == "stepscope"
    text = PROGRAM.read_text().splitlines()
    assert "def per_token_loss" in text[found.range.start.line]
    assert found.range.end.character == len(text[found.range.end.line])


def test_a_line_has_its_time_and_what_to_change(editor: Editor, uri: str) -> None:
    line = the_loop(editor, uri).range.start.line
    hints = hints_of(editor, uri)
    found = editor.do(editor.client.text_document_hover_async(lsp.HoverParams(document(uri), lsp.Position(line, 5))))
    nothing = editor.do(editor.client.text_document_hover_async(lsp.HoverParams(document(uri), lsp.Position(0, 0))))

    assert "%" in hints[line]
    assert "changed" not in hints[line]
    assert all(part in found.contents.value for part in ("backward", "stepscope explain loop-in-step", "```python"))
    assert nothing is None


def test_functions_have_their_share_of_each_phase(editor: Editor, uri: str) -> None:
    found = editor.do(editor.client.text_document_code_lens_async(lsp.CodeLensParams(document(uri))))

    lenses = {each.range.start.line: each.command for each in found}
    command = lenses[line_with(PROGRAM.read_text(), "def per_token_loss")]
    assert command.title.startswith("forward ")
    assert "backward " in command.title


def test_a_change_is_applied_as_an_edit_and_refused_where_the_text_is_another(editor: Editor, uri: str) -> None:
    text = (editor.first / RECORDED).read_text()
    line = the_loop(editor, uri).range.start.line
    action = next(each for each in actions_at(editor, uri, line) if each.kind == lsp.CodeActionKind.QuickFix)

    assert action.edit is not None
    assert action.edit.changes is not None
    lines = text.split("\n")
    for edit in sorted(action.edit.changes[uri], key=lambda each: -each.range.start.line):
        lines[edit.range.start.line : edit.range.end.line] = edit.new_text.split("\n")[:-1]
    changed = "\n".join(lines)
    assert "for position in range(SEQUENCE)" not in changed
    compile(changed, "gpt2_training.py", "exec")

    editor.change(uri, 2, text.replace("for position in range(SEQUENCE):", "for position in range(SEQUENCE - 1):"))
    after = next(each for each in actions_at(editor, uri, line) if each.kind == lsp.CodeActionKind.QuickFix)
    editor.change(uri, 3, text)
    assert after.edit is None
    assert after.disabled is not None


def test_moved_and_rewritten_lines_are_found_again(editor: Editor, uri: str) -> None:
    text = (editor.first / RECORDED).read_text()
    line = the_loop(editor, uri).range.start.line
    before = hints_of(editor, uri)

    editor.change(uri, 4, "# one\n# two\n" + text.replace("def per_token_loss(logits", "def per_token_loss(outputs"))
    editor.wait(lambda: the_loop(editor, uri).range.start.line == line + 2)
    after = hints_of(editor, uri)
    editor.change(uri, 5, text)

    assert after[line + 2] == f"{before[line]} · changed since"
    assert {place - 2: label for place, label in after.items() if place != line + 2} == {
        place: label for place, label in before.items() if place != line
    }


def test_the_tree_has_every_finding_with_its_line_now(editor: Editor, uri: str) -> None:
    found = editor.command("findings", uri)

    loop = next(each for each in found if each["rule"] == "loop-in-step")
    assert loop["where"][0]["line_now"] == loop["where"][0]["line"]
    assert loop["change"]


def test_without_a_run_it_is_silent_and_a_failure_is_one_message(editor: Editor, uri: str) -> None:
    before = list(editor.messages)
    other = editor.open(editor.second / "other.py")
    assert hints_of(editor, other) == {}
    assert editor.command("findings", other) == []
    assert editor.messages == before

    editor.open(editor.first / "broken.py")
    editor.wait(lambda: any("damaged.json" in each for each in editor.messages))
    editor.client.text_document_did_save(lsp.DidSaveTextDocumentParams(document((editor.first / "broken.py").as_uri())))
    editor.command("whatif", other, "loop-in-step")
    editor.command("chooseRun", other, "no-such-run")
    editor.command("whatif", other)
    editor.command("predict", uri, "--json")

    said = [each for each in editor.messages if each not in before]
    assert sum("damaged.json" in each for each in said) == 1
    assert any("no-such-run" in each for each in said)
    assert any("no recorded run names lines of other.py" in each for each in said)


def test_questions_about_the_trace(editor: Editor, uri: str) -> None:
    without = editor.command("whatif", uri, "loop-in-step")
    predicted = editor.command("predict", uri, "H100-SXM")
    chosen = editor.command("chooseRun", uri)
    newest = editor.command("chooseRun", uri, "newest")
    page = editor.command("openPage", uri, the_loop(editor, uri).range.start.line + 1)

    assert "less" in without
    assert predicted.startswith("H100-SXM: ")
    assert (chosen, newest) == ("trace.json.gz", "newest")
    assert page.startswith("http://127.0.0.1:")
    assert "gpt2_training.py" in page
    assert page in editor.shown


def test_recording_says_what_it_does_and_why_it_could_not(editor: Editor) -> None:
    other = (editor.second / "other.py").as_uri()

    assert editor.command("record", other) is None

    assert "stepscope: recording other.py" in editor.titles
    assert any("nothing was recorded" in each for each in editor.messages)


NEOVIM = """
local command = { vim.env.PYTHON, "-c", vim.env.START, "lsp" }
local root = vim.env.FOLDER
vim.cmd("edit " .. vim.env.FILE)
vim.lsp.buf_attach_client(0, vim.lsp.start_client({ name = "stepscope", cmd = command, root_dir = root }))
vim.wait(80000, function() return #vim.diagnostic.get(0) > 0 end, 100)
for _, each in ipairs(vim.diagnostic.get(0)) do io.stdout:write(each.lnum .. " " .. each.message .. "\\n") end
"""
EMACS = """
(require 'eglot)
(setq eglot-server-programs `((python-mode . (,(getenv "PYTHON") "-c" ,(getenv "START") "lsp"))))
(setq project-find-functions (list (lambda (_) (cons 'transient (getenv "FOLDER")))))
(find-file (getenv "FILE"))
(python-mode)
(apply #'eglot--connect (eglot--guess-contact))
(let ((tries 600))
  (while (and (> tries 0) (null (flymake-diagnostics)))
    (flymake-start)
    (accept-process-output nil 0.1)
    (setq tries (1- tries))))
(dolist (each (flymake-diagnostics))
  (princ (format "%d %s\\n" (1- (line-number-at-pos (flymake-diagnostic-beg each))) (flymake-diagnostic-text each))))
(eglot-shutdown-all)
"""


def has_eglot() -> bool:
    words = ["emacs", "--batch", "--eval", '(kill-emacs (if (locate-library "eglot") 0 1))']
    return shutil.which("emacs") is not None and not subprocess.run(words, capture_output=True, check=False).returncode


@pytest.mark.parametrize("program", ["nvim", "emacs"])
def test_editors_show_the_findings(editor: Editor, uri: str, program: str, tmp_path: Path) -> None:
    if not (shutil.which("nvim") if program == "nvim" else has_eglot()):
        pytest.skip(f"{program}{' with eglot' * (program == 'emacs')} is not installed")
    script = tmp_path / "script"
    script.write_text(NEOVIM if program == "nvim" else EMACS)
    neovim = ["--clean", "--headless", "-c", f"luafile {script}", "-c", "qa!"]
    words = [program, *(neovim if program == "nvim" else ["--batch", "-l", str(script)])]
    source = editor.first / RECORDED
    variables = {"PYTHON": sys.executable, "START": STEPSCOPE[-1], "FOLDER": str(editor.first), "FILE": str(source)}

    ended = subprocess.run(
        words,
        capture_output=True,
        env=environment(**editor.variables, **variables, HOME=str(tmp_path)),
        timeout=PATIENCE_S,
        check=False,
    )

    loop = the_loop(editor, uri)
    shown = ended.stdout.decode().splitlines()
    begin, message = f"{loop.range.start.line} ", loop.message.splitlines()[0]
    assert any(line.startswith(begin) and message in line for line in shown), ended.stderr.decode()


def test_a_closed_file_has_no_diagnostics(editor: Editor, uri: str) -> None:
    other = (editor.second / "other.py").as_uri()
    editor.client.text_document_did_close(lsp.DidCloseTextDocumentParams(document(other)))
    editor.wait(lambda: editor.diagnostics.get(other) == [])
