"""What the repository promises beside its code: its scripts, its licence, its version and its discretion."""

import contextlib
import gzip
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import stepscope
from stepscope.readers.kineto import scanned

REPOSITORY = Path(__file__).resolve().parents[2]
NOT_OURS = {".git", ".hypothesis", ".venv", ".venv-jax", "build", "dist", "node_modules", "site", "__pycache__"}
# People who exist only in examples; a path in their home tells nothing.
INVENTED_USERS = {"alice", "bob", "user"}
HOME_PATH = re.compile(r"(?<![\w.\-/])/(?:(?:home|Users)/(?P<user>[A-Za-z][\w.-]*)|root)/")


def repository_files() -> Iterator[Path]:
    for folder, folders, names in os.walk(REPOSITORY):
        folders[:] = [name for name in folders if name not in NOT_OURS and not name.endswith(("_cache", ".egg-info"))]
        yield from (Path(folder, name) for name in names)


def text_of(path: Path) -> str:
    content = path.read_bytes()
    if path.suffix == ".gz":
        with contextlib.suppress(OSError, EOFError):  # some of tests/fuzz/regressions are damaged on purpose
            content = gzip.decompress(content)
    return content.decode("utf-8", errors="ignore")


def real_home_paths(text: str) -> list[str]:
    return [match[0] for match in HOME_PATH.finditer(text) if match["user"] not in INVENTED_USERS]


@pytest.mark.parametrize("script", ["scripts/demo", "scripts/test", "scripts/record_samples.py", ".ci/run"])
def test_script_is_executable(script: str) -> None:
    assert os.access(REPOSITORY / script, os.X_OK)


def test_licence_is_apache_2() -> None:
    text = " ".join((REPOSITORY / "LICENSE").read_text().split())

    assert text.startswith("Apache License Version 2.0, January 2004")
    assert "END OF TERMS AND CONDITIONS" in text


def test_version_is_the_same_in_the_metadata_and_the_package() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()

    assert re.findall(r'^version = "(.+)"$', project, flags=re.MULTILINE) == [stepscope.__version__]


def test_the_demos_sample_is_small() -> None:
    sample = REPOSITORY / "examples/gpt2_per_token_loss_cpu.json.gz"

    assert 0 < sample.stat().st_size < 600_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("a fraction 1/root/2, https://example.org/home/someone/x and examples/home/someone/x", []),
        ("File /home/alice/train.py", []),
        ("File /" + "home/someone/train.py", ["/" + "home/someone/"]),
        ('"/' + 'root/train.py"', ["/" + "root/"]),
        ("in /" + "Users/someone/train.py", ["/" + "Users/someone/"]),
    ],
)
def test_home_paths_are_recognised(text: str, expected: list[str]) -> None:
    assert real_home_paths(text) == expected


def test_no_file_names_a_home_directory_or_this_folder() -> None:
    here = f"{REPOSITORY}{os.sep}"
    found = {
        str(path.relative_to(REPOSITORY)): real_home_paths(text) or [here]
        for path in repository_files()
        if real_home_paths(text := text_of(path)) or here in text
    }

    assert found == {}


@pytest.fixture
def build_hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """hatch_build.py, for which hatchling need not be installed."""
    interface = ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    for name in ("hatchling", "hatchling.builders", "hatchling.builders.hooks", "hatchling.builders.hooks.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", REPOSITORY / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_scanner_is_built_where_there_is_a_compiler(build_hook: ModuleType, tmp_path: Path) -> None:
    target = tmp_path / f"_scanner{build_hook.SUFFIX}"
    if not build_hook.compiled(REPOSITORY / build_hook.SOURCE, target):
        pytest.skip("there is no compiler, or Python has no headers")

    program = "import _scanner; print(_scanner.scan(b'{}', False, (((), ()),), b'i')[0], _scanner.INTERFACE)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"1 {scanned.INTERFACE}\n"


@pytest.mark.parametrize("broken", ["PATH", "CXX", "STEPSCOPE_BUILD_SCANNER"])
def test_the_package_is_built_without_the_scanner_where_it_cannot_be(
    broken: str, build_hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "PATH": str(tmp_path),
        "CXX": f"{sys.executable} -c 'raise SystemExit(1)'",
        "STEPSCOPE_BUILD_SCANNER": "0",
    }
    monkeypatch.setenv(broken, values[broken])

    assert not build_hook.compiled(REPOSITORY / build_hook.SOURCE, tmp_path / "_scanner.so")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_wheel_with_the_scanner_is_for_its_platform_and_one_without_for_all(
    has_compiler: bool, build_hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler here is a program that leaves a second file beside its output, as Microsoft's does."""
    package = tmp_path / build_hook.PACKAGE
    package.mkdir(parents=True)
    scanner = package / f"_scanner{build_hook.SUFFIX}"
    scanner.write_text("from an older source")
    program = (
        "import pathlib, sys; out = pathlib.Path(sys.argv[1]); [p.touch() for p in (out, out.with_suffix('.obj'))]"
    )
    command = [sys.executable, "-c", program if has_compiler else "raise SystemExit(1)"]
    monkeypatch.setattr(build_hook, "commands", lambda source, target: [[*command, str(target)]])
    monkeypatch.setattr(build_hook, "HAS_LIMITED_API", True)
    monkeypatch.delenv("STEPSCOPE_BUILD_SCANNER", raising=False)
    hook = build_hook.ScannerHook()
    hook.root, hook.target_name = str(tmp_path), "wheel"
    built: dict[str, Any] = {"artifacts": [], "pure_python": True}
    hook.initialize("standard", built)

    assert list(package.iterdir()) == ([scanner] if has_compiler else [])
    assert built["pure_python"] is not has_compiler
    assert built["artifacts"] == ([f"{build_hook.PACKAGE}/{scanner.name}"] if has_compiler else [])
    assert built.get("tag", "").startswith("cp310-abi3-" if has_compiler else "")
    assert not scanner.exists() or not scanner.read_bytes()
