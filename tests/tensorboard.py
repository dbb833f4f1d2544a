"""A real TensorBoard with the plugin, for tests and pictures of it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.browser import Browser
from tests.e2e.conftest import environment
from tests.page import Page

PREFIX: Final = "/behind/a/proxy"
_START_S: Final = 60.0
_PLUGIN: Final = "[tensorboard_plugins]\nstepscope = stepscope.integrations.tensorboard:StepscopePlugin\n"


@contextlib.contextmanager
def tensorboard(logs: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """The address of a TensorBoard of this log folder, and the file with what it says, while it runs.

    Args:
        folder: an empty folder; it gets the entry point, as the installed stepscope may be another.
    """
    installed = folder / "stepscope-99.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: stepscope\nVersion: 99\n")
    (installed / "entry_points.txt").write_text(_PLUGIN)
    said = folder / "said"
    variables = environment()
    variables["PYTHONPATH"] = os.pathsep.join([str(folder), variables["PYTHONPATH"]])
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logs), "--port", "0", "--path_prefix", PREFIX]
    command += ["--load_fast", "false"]
    with said.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=variables, cwd=folder)
    try:
        yield _address(process, said), said
    finally:
        process.terminate()
        process.wait(20)


class BoardPage(Page):
    """The page in the plugin's frame."""

    def __init__(self, browser: Browser, address: str) -> None:
        super().__init__(browser, f"{address}#stepscope")

    def script(self, expression: str) -> Any:
        """The value of an expression about the frame's document; one without content as long as there is no frame."""
        framed = "document.querySelector('iframe')?.contentDocument ?? new Document()"
        return super().script(f"(document => ({expression}))({framed})")


def _address(process: subprocess.Popen[bytes], said: Path) -> str:
    deadline = time.monotonic() + _START_S
    while (found := re.search(r"http://localhost:(\d+)/", said.read_text())) is None:
        assert process.poll() is None, said.read_text()
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.05)
    return f"http://127.0.0.1:{found[1]}{PREFIX}/"
