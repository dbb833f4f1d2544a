"""Run a command of stepscope, or another program, for a server that must go on answering meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_START: Final = """\
import sys
if not sys.path[0]:  # modules of the folder would take the place of others
    del sys.path[0]
from stepscope.commands import main
sys.exit(main())
"""
STEPSCOPE: Final = (sys.executable, "-c", _START)
"""The command, which runs in folders of the user, but imports nothing from there."""
_MOST_ANSWER_BYTES: Final = 8 << 20
_GRACE_S: Final = 10.0
"""For a program that is asked to end."""


@dataclass(frozen=True)
class Ended:
    """A process that ended.

    Attributes:
        code: its exit code, below 0 if a signal ended it.
        output, said: what it wrote to standard output (the beginning) and standard error (the end).
    """

    code: int
    output: str
    said: str

    @property
    def reason(self) -> str:
        """Why it failed: the last line that it said, without the name of the program."""
        lines = self.said.strip().splitlines()
        return lines[-1].removeprefix("stepscope: ") if lines else f"the command ended with exit code {self.code}"


async def run(
    command: Sequence[str],
    folder: Path,
    seconds: float,
    variables: Mapping[str, str],
    *,
    most_bytes: int = _MOST_ANSWER_BYTES,
) -> Ended:
    """Run a command in a folder; with all it started it is ended when the time is over, or nobody waits.

    Raises:
        asyncio.TimeoutError: it took too long.
        OSError: it cannot be started.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as said:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=said,
            cwd=folder,
            env={**os.environ, "NO_COLOR": "1", **variables},
            start_new_session=True,
        )
        try:
            code = await asyncio.wait_for(process.wait(), seconds)
        finally:
            if process.returncode is None:
                await asyncio.shield(end(process))
        return Ended(code, _text(output, 0, most_bytes), _text(said, -most_bytes, most_bytes))


async def end(process: asyncio.subprocess.Process) -> None:
    """End a process that was started in a session of its own, with all it started."""
    for number in (signal.SIGINT, signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM):
        with contextlib.suppress(ProcessLookupError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, number)
            else:
                process.kill()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), _GRACE_S)
            return


def _text(file: Any, begin: int, most_bytes: int) -> str:
    """At most so many bytes from the beginning, or the end, of a file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size + begin, 0) if begin else 0)
    return bytes(file.read(most_bytes)).decode("utf-8", "replace")
