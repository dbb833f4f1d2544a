"""What several tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.capture import guard


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's cache and devices out of the tests, and the tests' traces out of it; processes inherit both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("STEPSCOPE_CONFIG_DIR", str(tmp_path_factory.mktemp("config")))
        patch.delenv("STEPSCOPE_DEVICES", raising=False)
        yield


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


@pytest.fixture(autouse=True)
def the_guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """No entry of the guard's fails in a test that is not about that; the next test begins with a whole guard."""
    guard._failed_in = None
    guard._held.clear()
    yield
    failed, guard._failed_in, guard.probe = guard._failed_in, None, None
    if failed is not None and request.node.get_closest_marker("fails") is None:
        pytest.fail(f"the entry {failed} failed, as said on standard error")
