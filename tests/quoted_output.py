"""Output of commands that pages of the guide quote, so that it can be written and checked."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Final
from unittest import mock

from stepscope.commands import main

REPOSITORY: Final = Path(__file__).resolve().parents[1]
PAGES: Final = tuple(
    REPOSITORY / "docs" / name
    for name in (
        "reading-a-diagnosis.md",
        "whatif.md",
        "predict.md",
        "serving.md",
        "how-to/is-it-worth-another-gpu.md",
        "how-to/slower-since-last-week.md",
        "how-to/trace-from-a-colleague.md",
    )
)
_QUOTED: Final = re.compile(r"(<!-- output of: stepscope (.+?) -->\n```\n)(.*?)(```\n)", re.DOTALL)


def with_output(page: str) -> str:
    """The page with the output of every command it names, as a terminal of 120 columns shows it.

    Of one that ends in `| head -n N`, its first N lines.
    """
    return _QUOTED.sub(lambda match: match[1] + _output(match[2]) + match[4], page)


def _output(command: str) -> str:
    command, _, lines = command.partition(" | head -n ")
    output = _whole_output(command)
    return "".join(output.splitlines(keepends=True)[: int(lines)]) if lines else output


def _whole_output(command: str) -> str:
    written, before = io.StringIO(), Path.cwd()
    os.chdir(REPOSITORY)
    try:
        with mock.patch.dict(os.environ, {"COLUMNS": "120"}), contextlib.redirect_stdout(written):
            main([*command.split(), *([] if command.startswith("serving ") else ["--no-cache"])])  # reads no trace
    finally:
        os.chdir(before)
    return written.getvalue()
