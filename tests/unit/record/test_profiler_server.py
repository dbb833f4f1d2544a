"""What becomes of the client of xprof when it fails: a package of that name that does what it is told stands in for it.

The real one, against a real program of JAX, is in tests/e2e/test_jax.py.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.commands.record.attach import positive_seconds
from stepscope.errors import AgentError
from stepscope.record.profiler_server import LOG, ProfilerOrder, capture_hosts, check_client

CLIENT = """
import os, pathlib, sys, time
def trace(address, folder, workers, dataset_ops, milliseconds, attempts, options):
    os.write(1, b"noise of C++\\n")
    match address.partition(":")[0]:
        case "good":
            place = pathlib.Path(folder, "plugins", "profile", "2026_01_01")
            place.mkdir(parents=True)
            (place / "host.xplane.pb").write_bytes(repr((milliseconds, sorted(options.items()))).encode())
        case "crash":
            os.abort()
        case "hang":
            time.sleep(600)
        case "busy":
            os.write(2, b"ALREADY_EXISTS: Another profiling session active.\\n")
            raise RuntimeError("UNAVAILABLE: No trace event was collected")
        case "localhost":
            raise RuntimeError("UNAVAILABLE: No trace event was collected")
        case "odd":
            raise RuntimeError("INTERNAL:\\n something   else")
"""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a package named xprof before all others."""

    def put(content: str) -> None:
        package = tmp_path / "packages" / "xprof" / "convert"
        package.mkdir(parents=True)
        for folder in (package.parent, package):
            (folder / "__init__.py").touch()
        (package / "_pywrap_profiler_plugin.py").write_text(content)
        monkeypatch.setattr(sys, "path", [str(tmp_path / "packages"), *sys.path])

    return put


@pytest.mark.slow
def test_each_host_gives_a_profile_or_a_sentence(client: Callable[[str], None], tmp_path: Path) -> None:
    client(CLIENT)
    order = ProfilerOrder(seconds=0.25, host_level=1, python_frames=True, timeout_s=2.0)

    hosts = ["crash:1", "good:1", "hang:1", "busy:1", "odd:1", "silent:1"]
    profiles = capture_hosts(hosts, order, tmp_path / "run")

    good = profiles[1]
    assert good.path is not None
    assert good.path.relative_to(tmp_path / "run").parts[:2] == ("plugins", "profile")
    assert good.path.name == "good_1.xplane.pb"
    options = [("device_tracer_level", 1), ("host_tracer_level", 1), ("python_tracer_level", 1)]
    assert good.path.read_text() == repr((250, options))
    assert [profile.problem for profile in profiles] == [
        "crash:1: the client of xprof ended without an answer (signal SIGABRT); see profiler-client.log",
        None,
        "hang:1: it has not answered within 2 s",
        "busy:1: another profile of the program is being recorded; only one can be at a time",
        "odd:1: INTERNAL: something else",
        "silent:1: the server sent no profile",
    ]
    assert (tmp_path / "run" / LOG).read_bytes().count(b"noise of C++\n") == 6
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == ["plugins", LOG]


def test_a_server_that_sends_nothing_is_told_from_one_that_is_gone(
    client: Callable[[str], None], tmp_path: Path
) -> None:
    client(CLIENT)
    with socket.create_server(("localhost", 0)) as listening, socket.create_server(("localhost", 0)) as ending:
        ports = [listening.getsockname()[1], ending.getsockname()[1]]
        ending.close()
        silent, gone = capture_hosts([f"localhost:{port}" for port in ports], ProfilerOrder(seconds=0.001), tmp_path)

    assert silent.problem == f"localhost:{ports[0]}: it sent no profile"
    assert gone.problem == f"localhost:{ports[1]}: the connection was lost: the program has ended"


def test_a_package_that_cannot_be_imported_is_told(client: Callable[[str], None], tmp_path: Path) -> None:
    client("raise ImportError('no such library')")
    [profile] = capture_hosts(["host:1"], ProfilerOrder(), tmp_path)
    assert profile.problem == "host:1: the xprof package cannot be used: ImportError: no such library"


def test_captures_of_one_second_get_places_of_their_own(client: Callable[[str], None], tmp_path: Path) -> None:
    client(CLIENT)
    order = ProfilerOrder(seconds=0.001)
    paths = {capture_hosts(["good:1"], order, tmp_path)[0].path for _ in range(3)}
    assert len(paths) == 3
    assert all(path is not None and path.is_file() for path in paths)


def test_a_folder_that_cannot_be_written_ends_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AgentError, match=r"no profile can be written to .*file"):
        capture_hosts(["host:1"], ProfilerOrder(), tmp_path / "file")


def test_the_missing_package_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(AgentError, match=r"pip install 'stepscope\[xla\]'"):
        check_client()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2", 2.0), ("0.5", 0.5), ("500ms", 0.5), ("30s", 30.0), ("2 s", 2.0), ("5m", 300.0), ("1e-3s", 0.001)],
)
def test_times_may_have_a_unit(text: str, seconds: float) -> None:
    assert positive_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "0s", "-1s", "2h", "1..2", "nan", "inf", "9e9m"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number of seconds"):
        positive_seconds(text)
