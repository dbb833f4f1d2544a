"""What several tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final

import platformdirs
import pytest
from hypothesis import settings

from stepscope import guard
from stepscope.diagnosis.finding import Finding
from stepscope.diagnosis.rule import Found, Limits, Rule
from stepscope.diagnosis.view import View
from tests.claims import unsupported
from tests.tries import tries

# A busy machine is no fault of the code. In CI the inputs are the same each time; everyone else tries new ones.
settings.register_profile("here", deadline=None, derandomize=bool(os.environ.get("CI")), max_examples=tries(100))
settings.load_profile("here")

_SLOW_FOLDERS: Final = ("e2e", "fuzz", "golden", "guest", "property", "zoo")
"""Whose tests start programs, read large files or try many inputs: `--all` runs them, as does naming one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one process, in their order, so that what a file's tests share is made once."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among what is collected, where there is none: a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    folder = {item: item.path.relative_to(tests).parts[0] for item in items}
    for item in items:
        if folder[item] in _SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: folder[item] not in _SLOW_FOLDERS)  # long files last would leave a process alone
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    if config.getoption("--all") or named or config.getoption("-m"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item.get_closest_marker("slow") is None]


@pytest.fixture(scope="session", autouse=True)
def _folders_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the tests of this process, and the processes they start, a home of their own; fail where one leaves it."""
    users = _users_folders()
    before = _files_in(users)
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [*os.environ]:
            if name.startswith("STEPSCOPE_") and name not in _OF_THE_TESTS:
                patch.delenv(name)
        for name, folder in _FOLDERS.items():
            (home / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
            patch.setenv(name, str(home / folder))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [_WITHOUT_COMPILER, os.environ.get("PYTHONPATH")])))
        yield
    changed = sorted({path for path, _ in before ^ _files_in(users)})
    if changed:
        pytest.fail(f"tests wrote into the user's own folders, or stepscope ran meanwhile: {', '.join(changed[:10])}")


_WITHOUT_COMPILER: Final = str(Path(__file__).with_name("without_compiler"))
"""Where programs that tests start find a `sitecustomize`, which see."""
_FOLDERS: Final = {
    "HOME": ".",
    "USERPROFILE": ".",
    "XDG_CACHE_HOME": ".cache",
    "XDG_CONFIG_HOME": ".config",
    "XDG_DATA_HOME": ".local/share",
    "XDG_STATE_HOME": ".local/state",
    "XDG_RUNTIME_DIR": "runtime",
    "STEPSCOPE_CACHE_DIR": "stepscope/cache",
    "STEPSCOPE_CONFIG_DIR": "stepscope/config",
    "STEPSCOPE_DATA_DIR": "stepscope/data",
}
"""By variable: where below the tests' home it leads."""
_OF_THE_TESTS: Final = ("STEPSCOPE_TRACES", "STEPSCOPE_JAX_PYTHON", "STEPSCOPE_ZOO")


def _users_folders() -> list[Path]:
    """Where stepscope keeps anything of whoever runs the tests."""
    kinds = (
        platformdirs.user_cache_dir,
        platformdirs.user_config_dir,
        platformdirs.user_data_dir,
        platformdirs.user_state_dir,
    )
    named = [os.environ.get(name) for name in _FOLDERS if name.startswith("STEPSCOPE_")]
    return [*(Path(kind("stepscope", appauthor=False)) for kind in kinds), *map(Path, filter(None, named))]


def _files_in(folders: list[Path]) -> set[tuple[str, int]]:
    """Every file below the folders, with the time of its last change."""
    files = [path for folder in folders for path in folder.rglob("*") if not path.is_dir()]
    return {(str(path), path.lstat().st_mtime_ns) for path in files}


@pytest.fixture(scope="module", autouse=True)
def _what_stands_already_is_not_collected() -> None:
    """Keep what was imported and collected from the collector: going through it takes longer than most tests."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture(autouse=True)
def _findings_say_what_they_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test diagnoses, no rule says a number or makes a claim that its evidence does not bear out."""
    make = Rule._finding

    def checked(rule: Rule, found: Found, view: View, limits: Limits) -> Finding:
        finding = make(rule, found, view, limits)
        assert unsupported(finding, rule, view) == []
        return finding

    monkeypatch.setattr(Rule, "_finding", checked)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rules that this process asked."""
    found: list[str] = []
    ask = Rule.ask

    def noted(rule: Rule, view: View) -> Any:
        found.append(rule.id)
        return ask(rule, view)

    monkeypatch.setattr(Rule, "ask", noted)
    return found
