"""What several tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def traces_folder() -> Path:
    """The folder of real traces, which is no part of the project; tests that ask for it are skipped without it."""
    named = os.environ.get("STEPSCOPE_TRACES")
    if not named:
        pytest.skip("STEPSCOPE_TRACES names no folder of real traces")
    folder = Path(named)
    if not (folder / "facts.json").is_file():
        pytest.fail(f"STEPSCOPE_TRACES is {named}, but there is no facts.json in it")
    return folder
