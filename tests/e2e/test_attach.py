"""Training processes that run, recorded from a second one: by process, run, address, tunnel and files."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import stepscope
from tests.e2e.conftest import TIMEOUT_S, environment, run_here

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

TRAINING = """\
import os, sys, time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
if "--serve-itself" in sys.argv:
    import stepscope
    stepscope.start_server(token="a-token-for-the-test")
ranks = "RANK" in os.environ
model = torch.nn.Linear(16, 16)
if ranks:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
stop = sys.argv[1]
forgotten = time.monotonic() + 300  # a test that was killed leaves nothing running
def asked_to_end():
    return os.path.exists(stop) or time.monotonic() > forgotten
step = 0
while not asked_to_end() or ranks:
    optimizer.zero_grad()
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    step += 1
    if step == 2:
        os.write(1, f"ready {os.getpid()}\\n".encode())  # at once: ranks share one pipe
    if ranks:  # end together
        ended = torch.tensor(int(asked_to_end()))
        dist.all_reduce(ended)
        if ended:
            break
    time.sleep(0.03)
    while os.path.exists(stop + ".pause") and not asked_to_end():
        time.sleep(0.01)
os.write(1, b"done\\n")
"""


class Training:
    """A training process, or a launcher of several."""

    def __init__(self, process: subprocess.Popen[str], stop: Path, count: int) -> None:
        self._process = process
        self._stop = stop
        self.said: list[str] = []
        self._reader = threading.Thread(target=lambda: self.said.extend(process.stdout or ()))
        self._reader.start()
        self._wait_for(lambda: len(self.pids) == count)

    @property
    def pids(self) -> list[str]:
        return re.findall(r"ready (\d+)", "".join(self.said))

    def end(self) -> int:
        """Let it end by itself; its exit code."""
        self._stop.touch()
        code = self._process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return code

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No step ends meanwhile."""
        pause = Path(f"{self._stop}.pause")
        pause.touch()
        time.sleep(0.3)
        yield
        pause.unlink()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self._process.poll() is None, "".join(self.said)
            assert time.monotonic() < until, "".join(self.said)
            time.sleep(0.02)

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(TIMEOUT_S)


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("STEPSCOPE_TOKEN", raising=False)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Starts the training with words before and after its script."""
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    started: list[Training] = []

    def training(*before: str, after: tuple[str, ...] = (), count: int = 1) -> Training:
        stop = tmp_path / f"stop-{len(started)}"
        process = subprocess.Popen(
            [sys.executable, *before, str(script), str(stop), *after],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        started.append(Training.__new__(Training))
        started[-1].__init__(process, stop, count)  # type: ignore[misc]
        return started[-1]

    yield training
    for each in started:
        each.kill()


def recorded_steps(trace: Path) -> list[int]:
    """The numbers of the steps in a trace, from the first to the last."""
    return stepscope.diagnose(stepscope.open_trace(trace)).steps["index"].to_list()


@contextlib.contextmanager
def tunnel(port: int) -> Iterator[int]:
    """A local port whose connections are carried to another one, as `ssh -L` does it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def carry(near: socket.socket) -> None:
            with near, socket.create_connection(("127.0.0.1", port)) as far:
                while True:
                    for source in select.select([near, far], [], [])[0]:
                        data = source.recv(1 << 16)
                        if not data:
                            return
                        (far if source is near else near).sendall(data)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=carry, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_a_script_that_starts_the_agent(start: Callable[..., Training], tmp_path: Path) -> None:
    training = start(after=("--serve-itself",))
    pid = training.pids[0]

    trace = tmp_path / "trace.json.gz"
    attached = run_here("attach", pid, "--steps", "3", "--output", trace)
    assert (attached.code, "a step takes" in attached.out) == (0, True), attached
    assert f"of process {pid}\n" in attached.err
    steps = recorded_steps(trace)
    assert steps == list(range(steps[0], steps[0] + 3))

    agent = json.loads(next((tmp_path / "data" / "agents").glob(f"*-{pid}.json")).read_text())
    with tunnel(int(agent["address"].rpartition(":")[2])) as port:
        refused = run_here("attach", f"localhost:{port}").mistake()
        assert "the token is missing or wrong" in refused
        through = run_here(
            *("attach", f"localhost:{port}", "--seconds", "0.2", "--no-diagnose", "--stacks"),
            folder=tmp_path,
            STEPSCOPE_TOKEN="a-token-for-the-test",
        )
        assert (through.code, through.out) == (0, ""), through
        fetched = re.search(r"the trace is (trace-\S+\.json\.gz)\n", through.err)
        assert fetched, through
        assert len(recorded_steps(tmp_path / fetched[1])) >= 2

    with training.paused():
        nothing = run_here("attach", pid, "--timeout", "0.5")
        assert nothing.code == 2
        assert f"stepscope: process {pid}: no step ended within 0.5 s: " in nothing.err

    assert training.end() == 0
    assert training.said[-1] == "done\n"
    assert f"process {pid} has no agent of yours" in run_here("attach", pid).mistake()


def test_a_session(start: Callable[..., Training], tmp_path: Path) -> None:
    training = start(after=("--serve-itself",))
    pid = training.pids[0]
    assert "no recording is in progress" in run_here("session", "stop", pid).mistake()
    assert session("start", pid) == f"process {pid}: recording (c1)\n"
    assert "the capture c1 is under way" in run_here("session", "start", pid).mistake()
    trace = tmp_path / "session.json.gz"
    stopped = run_here("session", "stop", pid, "--output", trace, "--no-diagnose")
    assert (stopped.code, stopped.out) == (0, ""), stopped
    assert len(recorded_steps(trace)) >= 1
    session("start", pid, "--stacks")
    assert session("cancel", pid) == f"process {pid}: c2 cancelled\n"
    session("start", pid, "--timeout", "1.5")  # a busy machine may hold up a step for half a second
    with training.paused():
        time.sleep(1.5)
        listed = session("list", pid)
    assert re.findall(r"\b(c\d) +(\w+)", listed) == [("c1", "done"), ("c2", "cancelled"), ("c3", "failed")]
    assert "no step ended for 1.5 s" in listed
    assert session("shutdown", pid) == f"process {pid}: the agent has ended, the program continues\n"
    until = time.monotonic() + TIMEOUT_S
    while list((tmp_path / "data" / "agents").iterdir()):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert training.end() == 0


def session(*words: str) -> str:
    outcome = run_here("session", *words)
    assert outcome.code == 0, outcome
    return outcome.out


def test_two_ranks_of_a_run(start: Callable[..., Training], tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    run = ("-m", "stepscope", "run", "--serve", "--no-diagnose", "--name", "two", "--steps", "1", "--warmup", "1")
    training = start(*run, sys.executable, *launcher, count=2)
    folder = tmp_path / "data" / "runs" / "two"

    attached = run_here("attach", "two", "--steps", "3", "--no-diagnose")
    assert attached.code == 0, attached
    traces = [Path(path) for path in re.findall(r"the trace is (\S+)", attached.err)]
    assert [trace.parent for trace in traces] == [folder / "rank0", folder / "rank1"]
    steps = [recorded_steps(trace) for trace in traces]
    assert steps[0] == steps[1] == list(range(steps[0][0], steps[0][0] + 3))

    output = tmp_path / "output"
    through = run_here("attach", folder, "--seconds", "0.1", "--through-files", "--output", output, "--json", "-")
    assert "there is no option --json" in through.mistake()
    through = run_here("attach", folder, "--seconds", "0.1", "--through-files", "--output", output)
    assert (through.code, "2 ranks" in through.out) == (0, True), through
    steps = [recorded_steps(trace) for trace in sorted(output.glob("*.json.gz"))]
    assert len(steps) == 2
    assert steps[0] == steps[1] != []

    assert training.end() == 0
    assert "done" in "".join(training.said)  # the ranks write without buffers, into each other's lines
    assert not list((folder / "agents").iterdir())
    assert "the run two has no agent: it has ended" in run_here("attach", "two").mistake()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
