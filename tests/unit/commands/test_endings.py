"""How a command ends when something goes wrong: an error of ours, a signal, a query without end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.commands import main
from stepscope.commands.read.tables import add_table_options
from stepscope.commands.shared.options import Command
from tests.unit.small_traces import complete


def _put_in_place_of_rules(run: Callable[[object], int], monkeypatch: pytest.MonkeyPatch) -> None:
    command = Command("rules", "A command for tests.", add_table_options, run)
    monkeypatch.setattr("stepscope.commands.COMMANDS", (command,))


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A command that fails by a fault of ours; the folder its reports go to."""

    def fail(_: object) -> int:
        raise ZeroDivisionError("secret of the trace")

    _put_in_place_of_rules(fail, monkeypatch)
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path))
    return tmp_path / "faults"


def test_an_error_of_ours_is_one_line_code_70_and_a_report(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules"]) == 70
    said = capsys.readouterr().err
    (report,) = broken.iterdir()
    assert said.count("\n") == 1
    assert str(report) in said
    text = report.read_text()
    assert "ZeroDivisionError" in text
    assert "secret" not in said + text
    assert report.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("how", ["option", "variable"])
def test_debug_prints_the_traceback(
    how: str, broken: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if how == "variable":
        monkeypatch.setenv("STEPSCOPE_DEBUG", "1")
    assert main(["rules", *(["--debug"] if how == "option" else [])]) == 70
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_there_goes_to_the_temporary_folder(
    broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken.write_text("no folder")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["rules"]) == 70
    assert len(list(tmp_path.glob("stepscope-fault-*.txt"))) == 1


def test_memory_that_runs_out_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise MemoryError

    _put_in_place_of_rules(fail, monkeypatch)
    assert main(["rules"]) == 2
    assert "not enough memory" in capsys.readouterr().err


def _as_from_a_terminal() -> None:
    """Take back what a shell's background job or nohup ignores."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _reading(folder: Path, *left: Path) -> subprocess.Popen[bytes]:
    """A process that reads an endless trace and has begun its temporary store, beside what was `left` there."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "stepscope", "diagnose", "--no-cache", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(temporary)},
        preexec_fn=_as_from_a_terminal,
    )
    assert process.stdin is not None
    process.stdin.write(b'{"traceEvents": [')
    process.stdin.flush()
    deadline = time.monotonic() + 60
    while not set(temporary.glob("stepscope-store-*")) - {*left}:
        assert process.poll() is None
        assert time.monotonic() < deadline, "no store was begun"
        time.sleep(0.02)
    return process


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_leaves_no_temporary_store(name: str, tmp_path: Path) -> None:
    process = _reading(tmp_path)
    process.send_signal(getattr(signal, name))
    assert process.stdin is not None
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(3)  # an end of the input beside the signal would be a race between the two
    process.stdin.close()  # Polars' own handler of SIGINT lets a blocked read go on; what it waits for must come
    assert process.wait(60) == 128 + getattr(signal, name)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_what_a_killed_process_left_is_swept_by_the_next_and_the_living_keep_theirs(tmp_path: Path) -> None:
    killed = _reading(tmp_path)
    killed.kill()
    killed.wait(60)
    (left,) = (tmp_path / "temporary").iterdir()
    os.utime(left, (0, 0))  # a store is swept once it has lain untouched for a while
    living = _reading(tmp_path, left)
    assert not left.exists()
    third = subprocess.run(
        [sys.executable, "-m", "stepscope", "steps", "--no-cache", _trace(tmp_path)],
        env=os.environ | {"TMPDIR": str(tmp_path / "temporary")},
        capture_output=True,
        check=False,
    )
    assert third.returncode == 0, third.stderr
    assert len(list((tmp_path / "temporary").iterdir())) == 1
    living.terminate()
    living.wait(60)


def _trace(folder: Path) -> str:
    path = folder / "trace.json"
    events = [complete(f"op{number}", "cpu_op", number * 10, 5) for number in range(3000)]
    path.write_text(json.dumps({"traceEvents": events}))
    return str(path)


ENDLESS = "select count(distinct sin(a.row * 3001.0 + b.row)) as n from operators a cross join operators b"


def test_a_query_that_takes_too_long_is_stopped_with_the_option_to_allow_more(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", "query", _trace(tmp_path), ENDLESS, "--no-cache", "--timeout", "0.000001"],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert b"--timeout" in done.stderr


def test_a_query_without_a_limit_ends_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = ["query", _trace(tmp_path), "select count(*) as n from operators", "--no-cache", "--timeout", "0"]
    assert main([*query, "--format", "csv"]) == 0
    assert capsys.readouterr().out.split() == ["n", "3000"]


def test_a_table_on_screen_is_cut_and_a_file_has_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = ["query", _trace(tmp_path), "select name from operators", "--no-cache"]
    assert main(query) == 0
    assert "20 of 3,000" in capsys.readouterr().out
    assert main([*query, "--output", str(tmp_path / "rows.csv")]) == 0
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 3001
