"""Commands as they are written, and programs that are started and ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.compare.bench import BenchCommand, end_leftovers, last_lines, run_logged
from stepscope.errors import UsageError
from stepscope.machine.observed import LoadMeter, Machine


def test_a_command_is_split_as_a_shell_splits_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    command = BenchCommand.parse("B", "A=1 B='two words' train.py --name 'a b' C=3")
    assert command.words == (sys.executable, "train.py", "--name", "a b", "C=3")
    assert command.variables == {"A": "1", "B": "two words"}
    assert command.shown == "A=1 B='two words' train.py --name 'a b' C=3"


def test_modules_and_interpreters_are_taken_as_run_takes_them() -> None:
    assert BenchCommand.parse("A", "-m package.train -x").words == (sys.executable, "-m", "package.train", "-x")
    assert BenchCommand.parse("A", f"{sys.executable} -c pass").words == (sys.executable, "-c", "pass")


def test_secrets_are_not_shown() -> None:
    command = BenchCommand.parse("A", f"{sys.executable} -c pass --api-key abc")
    assert command.shown == f"{sys.executable} -c pass --api-key ***"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "command B is empty: give each command as one quoted argument, 'python train.py'"),
        ("X=1", "command B is empty: give each command as one quoted argument, 'python train.py'"),
        ("a 'b", "command B, a 'b: no closing quotation"),
        ("nowhere.py -x", "command B, nowhere.py -x: there is no script nowhere.py"),
        (
            "no-such-program",
            "command B, no-such-program: there is no program no-such-program; a Python script's name ends in .py",
        ),
        ("-m", "command B, -m: -m needs the name of a module: stepscope run -m package.train"),
    ],
)
def test_commands_that_cannot_be_started(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        BenchCommand.parse("B", text)
    assert str(error.value) == said


Start = Callable[..., tuple[int, bool]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Runs a Python program as the bench does; gives its exit code and whether it had to be ended."""

    def started(script: str, *, limit_s: float = 60.0, is_done: Callable[[], bool] = lambda: False) -> tuple[int, bool]:
        environment = {**os.environ, "STEPSCOPE_RUN": str(tmp_path)}
        words = (sys.executable, "-c", script)
        end = run_logged(words, environment, tmp_path / "log", limit_s=limit_s, is_done=is_done)
        return end.exit_code, end.was_ended

    return started


def test_the_output_is_kept_and_the_exit_code_told(start: Start, tmp_path: Path) -> None:
    script = "import sys; print('out'); print(sys.stdin.read() == '', file=sys.stderr); sys.exit(3)"
    assert start(script) == (3, False)
    assert sorted(last_lines(tmp_path / "log")) == ["True", "out"]


def test_a_program_that_a_signal_ends(start: Start) -> None:
    assert start("import os, signal; os.kill(os.getpid(), signal.SIGKILL)") == (128 + 9, False)


def test_a_program_that_takes_too_long_is_ended(start: Start) -> None:
    assert start("import time; time.sleep(1000)", limit_s=0.3)[1]


CHILD = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(1000)"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the system does not show environments")
def test_what_a_program_leaves_behind_is_ended_too(start: Start, tmp_path: Path) -> None:
    """A child in a session of its own, as a launcher's workers are, that passes Ctrl-C over."""
    leaving = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid)
"""
    assert start(leaving) == (0, False)
    [process] = last_lines(tmp_path / "log")
    left = b""
    with contextlib.suppress(OSError):  # it is gone; what only waits to be noticed has no memory left
        left = Path(f"/proc/{process}/environ").read_bytes()
    assert left == b""


def test_other_processes_are_left_alone(start: Start) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        assert start("pass") == (0, False)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="the system does not show environments")
def test_what_a_killed_search_left_is_ended_and_nothing_else(tmp_path: Path) -> None:
    def program(run: Path) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"]
        started = subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "STEPSCOPE_RUN": str(run)})
        assert started.stdout is not None
        started.stdout.readline()
        return started

    left, others = program(tmp_path / "mine" / "A-1"), [program(tmp_path / "mine-too" / "A-1"), program(tmp_path)]
    try:
        end_leftovers(tmp_path / "mine")
        assert left.wait() == -9
        assert [each.poll() for each in others] == [None, None]
    finally:
        for each in (left, *others):
            each.kill()
            each.communicate()


def test_a_program_that_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere cannot be started: No such file or directory"):
        run_logged(
            ("nowhere",),
            {"STEPSCOPE_RUN": str(tmp_path), "PATH": ""},
            tmp_path / "log",
            limit_s=1,
            is_done=lambda: False,
        )


def test_the_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log) == []
    log.write_bytes(b"".join(b"line %d\n\n" % number for number in range(50)) + b"\xff" + b"x" * 300)
    lines = last_lines(log, 3)
    assert lines == ["line 48", "line 49", "�" + "x" * 199]


def test_what_others_use_is_what_the_machine_does_without_us(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    ticks = os.sysconf("SC_CLK_TCK")
    (tmp_path / "proc" / "stat").write_text("cpu  100 0 0 5000 0 0 0 0\n")
    outer = time.monotonic()
    meter = LoadMeter(Machine(root=tmp_path))
    inner = time.monotonic()
    time.sleep(0.05)
    inner_s = time.monotonic() - inner
    (tmp_path / "proc" / "stat").write_text(f"cpu  {100 + 1000 * ticks} 0 0 5000 0 0 0 0\n")
    cores = meter.other_cores()

    assert cores is not None
    assert cores * inner_s <= 1000
    assert cores * (time.monotonic() - outer) >= 1000 - 60  # less what this process used meanwhile


def test_a_system_that_does_not_count_the_machines_time(tmp_path: Path) -> None:
    assert LoadMeter(Machine(root=tmp_path)).other_cores() is None


def test_only_the_cores_count_that_this_process_may_use(tmp_path: Path) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "status").write_text("Cpus_allowed_list:\t1\n")
    ticks = os.sysconf("SC_CLK_TCK")

    def write(elsewhere: int, here: int) -> None:
        rows = [("cpu ", elsewhere + here), ("cpu0", elsewhere), ("cpu1", here)]
        lines = [f"{name} {busy} 0 0 5000 0 0 0 0\n" for name, busy in rows]
        (tmp_path / "proc" / "stat").write_text("".join(lines))

    write(0, 0)
    meter = LoadMeter(Machine(root=tmp_path))
    time.sleep(0.05)
    write(10_000 * ticks, 0)
    assert meter.other_cores() in (None, 0.0)  # less than this process used itself
    write(10_000 * ticks, 100 * ticks)
    assert (meter.other_cores() or 0.0) > 1.0
