"""Processes that servers start: killed, slow, and told where they run."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from stepscope.commands.assist.process import STEPSCOPE, Ended, run


def ended(program: str, folder: Path, seconds: float = 60.0) -> Ended:
    return asyncio.run(run([sys.executable, "-c", program], folder, seconds, {"GIVEN": "yes"}))


def test_output_and_reason_of_a_failure(tmp_path: Path) -> None:
    program = "import os, sys; print(os.getcwd(), os.environ['GIVEN']); sys.exit('stepscope: no')"

    found = ended(program, tmp_path)

    assert (found.code, found.output, found.reason) == (1, f"{tmp_path.resolve()} yes\n", "no")


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
def test_a_killed_process_has_a_reason(tmp_path: Path) -> None:
    found = ended("import os; os.kill(os.getpid(), 9)", tmp_path)

    assert found.code == -9
    assert "-9" in found.reason


def test_a_slow_process_is_ended(tmp_path: Path) -> None:
    with pytest.raises(asyncio.TimeoutError):
        ended("import time; time.sleep(60)", tmp_path, 0.3)


def test_modules_of_the_folder_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(3)\n")

    found = asyncio.run(run([*STEPSCOPE, "explain", "input-bound"], tmp_path, 60.0, {}))

    assert found.code == 0
    assert "input-bound" in found.output
