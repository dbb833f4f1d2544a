"""Finding jemalloc and tcmalloc, and the environment that loads them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.commands import main
from stepscope.remedies import allocators
from stepscope.remedies.allocators import (
    ALLOCATORS,
    allocator_environment,
    find_allocator,
    how_to_install,
    loaded_allocator,
    loading_problem,
    preload_obstacle,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")

NOTHING_SET = {"PATH": "/usr/bin"}


def header(machine: bytes | None = None) -> bytes:
    """The first bytes of a library for this processor, or for another."""
    own = Path(sys.executable).read_bytes()[:64]
    return own if machine is None else own[:18] + machine + own[20:]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the loader looks first, on a system that has nothing else."""
    monkeypatch.setattr(allocators, "_folders", lambda: iter([tmp_path]))
    monkeypatch.setattr(allocators, "_known_to_system", lambda name, files: iter(()))
    return tmp_path


def test_nothing_is_found_in_an_empty_folder(folder: Path) -> None:
    assert [find_allocator(name) for name in ALLOCATORS] == [None, None]


def test_the_first_of_the_known_files_is_taken(folder: Path) -> None:
    for name in ("libjemalloc.so", "libjemalloc.so.2", "libtcmalloc.so.4", "libtcmalloc_minimal.so.4"):
        (folder / name).write_bytes(header())

    assert find_allocator("jemalloc") == folder / "libjemalloc.so.2"
    assert find_allocator("tcmalloc") == folder / "libtcmalloc_minimal.so.4"


@pytest.mark.parametrize(
    "content",
    [b"", b"\x7fELF", b"GROUP ( /lib/libjemalloc.so.2 )", header(b"\xfe\xca")],
    ids=["empty", "cut off", "a linker script", "another processor"],
)
def test_what_this_python_cannot_load_is_not_found(folder: Path, content: bytes) -> None:
    (folder / "libjemalloc.so.2").write_bytes(content)

    assert find_allocator("jemalloc") is None


def test_a_path_that_the_variable_cannot_hold_is_not_found(tmp_path: Path) -> None:
    spaced = tmp_path / "my libraries"
    spaced.mkdir()
    (spaced / "libjemalloc.so.2").write_bytes(header())

    assert find_allocator("jemalloc", [spaced]) is None


def test_the_system_is_asked_where_its_loader_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libtcmalloc.so.4"
    library.write_bytes(header())
    program = tmp_path / "ldconfig"
    program.write_text(f"#!/bin/sh\necho '2 libs found'\necho '\tlibtcmalloc.so.4 (libc6,x86-64) => {library}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(allocators, "_folders", lambda: iter(()))

    assert find_allocator("tcmalloc") == library


def test_another_allocator_is_replaced_and_the_rest_stays(folder: Path) -> None:
    (folder / "libjemalloc.so.2").write_bytes(header())
    before = {"LD_PRELOAD": "/lib/libtcmalloc.so.4:/lib/libasan.so.8 /opt/libmimalloc.so"}

    assert allocator_environment("jemalloc", before) == {
        "LD_PRELOAD": f"{folder}/libjemalloc.so.2:/lib/libasan.so.8",
        "MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1",
    }


def test_settings_of_the_user_stay(folder: Path) -> None:
    (folder / "libjemalloc.so.2").write_bytes(header())

    assert allocator_environment("jemalloc", {"MALLOC_CONF": "narenas:1"}) == {
        "LD_PRELOAD": f"{folder}/libjemalloc.so.2"
    }


def test_the_message_tells_how_to_install_what_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)

    assert how_to_install("tcmalloc") == (
        "install it, with apt install libtcmalloc-minimal4 or dnf install gperftools-libs or "
        "conda install -c conda-forge gperftools or brew install gperftools"
    )
    with pytest.raises(RuntimeError, match="jemalloc was not found on this system; install it, with apt install"):
        allocator_environment("jemalloc", NOTHING_SET)


def test_the_package_managers_that_are_there_come_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: "/usr/bin/dnf" if name == "dnf" else None)

    assert how_to_install("jemalloc") == "install it, with dnf install jemalloc"


@pytest.mark.parametrize("call", [find_allocator, how_to_install, lambda name: allocator_environment(name, {})])
def test_an_unknown_allocator(call: object) -> None:
    with pytest.raises(ValueError, match="'hoard' is not a known allocator; choose jemalloc or tcmalloc"):
        call("hoard")  # type: ignore[operator]


def test_a_library_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    library = tmp_path / "libjemalloc.so.2"
    library.write_bytes(header())

    problem = loading_problem("jemalloc", {"LD_PRELOAD": str(library)})

    assert problem is not None
    assert problem.startswith("this Python does not load jemalloc: ")
    assert str(library) in problem


def test_a_preload_that_another_user_would_not_get(tmp_path: Path) -> None:
    program = tmp_path / "program"
    shutil.copy(sys.executable, program)
    assert preload_obstacle(program) is None

    program.chmod(0o4755)

    assert preload_obstacle(program) == (
        f"{program} runs with another user's rights (setuid), and the system then preloads no library"
    )


def test_a_statically_linked_program(tmp_path: Path) -> None:
    program = tmp_path / "program"
    head = bytearray(64 + 56)
    head[:6] = b"\x7fELF\x02\x01"
    head[16:18] = (2).to_bytes(2, "little")
    head[32:40] = (64).to_bytes(8, "little")
    head[54:58] = (56).to_bytes(2, "little") + (1).to_bytes(2, "little")
    head[64] = 1  # one loadable segment, and none that names a loader
    program.write_bytes(head)

    assert preload_obstacle(program) == f"{program} is linked statically, and loads no library at all"

    head[64] = 3
    program.write_bytes(head)

    assert preload_obstacle(program) is None


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF" + bytes(80)])
def test_nothing_is_said_of_a_program_that_cannot_be_judged(tmp_path: Path, content: bytes) -> None:
    program = tmp_path / "program"
    program.write_bytes(content)

    assert preload_obstacle(program) is None
    assert preload_obstacle(tmp_path / "missing") is None


@pytest.mark.parametrize("name", ALLOCATORS)
def test_a_real_process_gets_its_memory_from_it(name: str) -> None:
    if find_allocator(name) is None:
        pytest.skip(f"{name} is not on this system")
    variables = allocator_environment(name, os.environ)
    assert loading_problem(name, variables) is None
    code = "from stepscope.remedies.allocators import loaded_allocator; print(loaded_allocator())"
    sources = str(Path(allocators.__file__).parents[2])

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables, "PYTHONPATH": sources},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == f"{name}\n"
    assert loaded_allocator() != name or name in os.environ.get("LD_PRELOAD", "")


def test_nothing_of_it_needs_torch() -> None:
    code = (
        "import sys\n"
        "from stepscope.remedies import find_allocator\n"
        "find_allocator('jemalloc')\n"
        "print('torch' in sys.modules)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(allocators.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == "False\n"


def test_the_command_says_how_to_install_what_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--allocator", "jemalloc", sys.executable]) == 2

    said = capsys.readouterr().err
    assert said.startswith("stepscope: jemalloc was not found on this system; install it, with ")
    assert said.count("\n") == 1


def test_the_command_refuses_a_library_that_does_not_load(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "libjemalloc.so.2").write_bytes(header())

    assert main(["run", "--allocator", "jemalloc", sys.executable]) == 2

    assert capsys.readouterr().err.startswith("stepscope: this Python does not load jemalloc: ")
