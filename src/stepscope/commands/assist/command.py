"""`stepscope mcp` and `stepscope lsp`: the commands as tools of a coding assistant, and their answers in an editor."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
from pathlib import Path
from typing import Final

from stepscope.commands.shared.options import SECONDS, Command, CommandParser, number
from stepscope.errors import UsageError

_time = number("is not a time: write 90s or 30m", {key: s for key, s in SECONDS.items() if key != "ms"}, least=1)


def _prepare_mcp(parser: CommandParser) -> None:
    parser.add_argument(
        "--folder",
        metavar="DIR",
        action="append",
        default=[],
        help="read traces and sources below this folder, besides the recorded runs; may be repeated (default: here)",
    )
    parser.add_argument(
        "--allow",
        metavar="PROGRAM",
        action="append",
        default=[],
        help="let this command line be run and recorded, such as 'train.py --lr 3e-4'; may be repeated",
    )
    parser.add_argument("--write", action="store_true", help="let the diffs of findings be applied to files")
    _add_times(parser)


def _add_times(parser: CommandParser) -> None:
    parser.add_argument(
        "--timeout", metavar="TIME", type=_time, default=300.0, help="end a command after this time (5m)"
    )
    parser.add_argument(
        "--record-timeout", metavar="TIME", type=_time, default=1800.0, help="end a recorded program after this (30m)"
    )


def _run_mcp(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("mcp") is None:
        raise UsageError("this needs the package mcp: pip install 'stepscope[mcp]'")
    folders = tuple(Path(os.path.realpath(each)) for each in arguments.folder or ["."])
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"--folder {folder} is not a folder")
    for program in arguments.allow:
        try:
            words = shlex.split(program)
        except ValueError as error:
            raise UsageError(f"--allow {program!r} is no command line: {error}") from error
        if not words or words[0].startswith("-"):
            raise UsageError(f"--allow {program!r} names no program")
    from stepscope.commands.assist.mcp_server import Access, server_for

    access = Access(folders, tuple(arguments.allow), arguments.write, arguments.timeout, arguments.record_timeout)
    server_for(access).run("stdio")
    return 0


_EXAMPLES: Final = """\
An assistant starts it itself, once its settings name the command:
  {"mcpServers": {"stepscope": {"command": "stepscope", "args": ["mcp", "--allow", "train.py", "--write"]}}}

examples:
  stepscope mcp                                      read traces below this folder, and the recorded runs
  stepscope mcp --folder ~/traces                    read those below another one
  stepscope mcp --allow 'train.py --lr 3e-4' --write     also run and record this program, and change its files
"""

MCP: Final = Command(
    name="mcp",
    help="Serve the commands as tools of a coding assistant (Model Context Protocol).",
    prepare_parser=_prepare_mcp,
    run=_run_mcp,
    examples=_EXAMPLES,
)


def _prepare_lsp(parser: CommandParser) -> None:
    parser.add_argument("--stdio", action="store_true", help="speak over standard input and output, as it always does")
    _add_times(parser)


def _run_lsp(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("pygls") is None:
        raise UsageError("this needs the package pygls: pip install 'stepscope[editor]'")
    from stepscope.commands.assist.language_server import server_for

    server_for(arguments.timeout, arguments.record_timeout).start_io()
    return 0


LSP: Final = Command(
    name="lsp",
    help="Show the answers in an editor, at the lines of your code (Language Server Protocol).",
    prepare_parser=_prepare_lsp,
    run=_run_lsp,
    examples="""\
An editor starts it itself, once its settings name the command; docs/editor.md has those of VS Code, Neovim, Emacs and
Helix. For an open file it takes the newest run that names its lines.

examples:
  stepscope lsp
  stepscope lsp --timeout 20m                        for traces that take long to read
""",
)
