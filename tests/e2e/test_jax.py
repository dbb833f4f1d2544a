"""Programs of JAX, real ones in processes of their own: attached to through their profiler server, and recorded by run.

They need a Python with JAX and xprof, which is not that of the tests: scripts/test makes one and names it in
STEPSCOPE_JAX_PYTHON.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest

import stepscope
from stepscope.record.run_folder import RunFolder
from tests.e2e.conftest import TIMEOUT_S, environment

PYTHON = os.environ.get("STEPSCOPE_JAX_PYTHON", "")
EXAMPLE = Path(__file__).parents[2] / "examples" / "jax_training.py"

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="STEPSCOPE_JAX_PYTHON names no Python with JAX and xprof; scripts/test sets it"
)


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str


class Jax:
    """Runs stepscope, and programs, in the Python with JAX; runs go to a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = environment(STEPSCOPE_DATA_DIR=str(folder / "data"), JAX_PLATFORMS="cpu")

    def set(self, **variables: str) -> None:
        """Variables of the processes that begin from now on."""
        self._environment.update(variables)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """A process of that Python, with its output in pipes."""
        return subprocess.Popen(
            [PYTHON, *words],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> Ended:
        """A process of that Python, to its end."""
        process = self.start(*words)
        out, err = process.communicate(timeout=TIMEOUT_S)
        return Ended(process.returncode, out, err)

    def stepscope(self, *words: str) -> Ended:
        """A command of stepscope."""
        return self.run("-m", "stepscope", *words)

    def recorded(self, script: str, *options: str, name: str = "it") -> tuple[Ended, RunFolder]:
        """A script under stepscope run."""
        (self.folder / "script.py").write_text(textwrap.dedent(script))
        words = ("run", "--name", name, "--no-telemetry", "--no-diagnose", *options, "script.py")
        return self.stepscope(*words), RunFolder(self.folder / "data" / "runs" / name)

    def runs(self) -> list[RunFolder]:
        """Every run, by name."""
        return [RunFolder(place) for place in sorted((self.folder / "data" / "runs").iterdir())]


@pytest.fixture
def jax(tmp_path: Path) -> Jax:
    return Jax(tmp_path)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def training(jax: Jax) -> Iterator[Callable[[], tuple[subprocess.Popen[str], int]]]:
    """Starts the example with a profiler server; gives the process when it has done a step, and the port."""
    started: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], int]:
        port = free_port()
        process = jax.start(str(EXAMPLE), "--seconds=300", f"--port={port}")
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == f"the profiler server listens on port {port}\n"
        return process, port

    yield start
    for process in started:
        process.kill()
        process.communicate()


def numbers_of_steps(trace: Path) -> list[int]:
    annotations = stepscope.open_trace(trace).annotations
    return annotations.filter(pl.col("step").is_not_null())["step"].unique().sort().to_list()


def test_a_training_is_recorded_twice_while_it_runs_and_diagnosed(
    jax: Jax, training: Callable[[], tuple[subprocess.Popen[str], int]]
) -> None:
    process, port = training()
    gone = free_port()
    hosts = f"localhost:{gone},localhost:{port}"

    ended = jax.stepscope("attach", hosts, "--seconds", "500ms", "--repeat", "2", "--every", "1s")

    assert ended.code == 0, ended.err
    assert "a step takes" in ended.out
    assert f"stepscope: nothing listens at localhost:{gone}" in ended.err
    assert f"stepscope: capture 2 of 2: recorded 0.5 s of localhost:{port}\n" in ended.err
    [run] = jax.runs()
    assert [trace.relative_to(run.path).as_posix() for trace in run.traces()] == [
        "rank1/trace-1.xplane.pb",
        "rank1/trace-2.xplane.pb",
    ]
    profiles = sorted((run.path / "plugins" / "profile").glob(f"*/localhost_{port}.xplane.pb"))
    assert [profile.stat().st_ino for profile in profiles] == [trace.stat().st_ino for trace in run.traces()]
    first, second = map(numbers_of_steps, run.traces())
    assert len(first) >= 2
    assert first == list(range(first[0], first[-1] + 1))
    assert first[-1] < second[0]
    assert process.poll() is None
    shown = jax.stepscope("runs", "show", run.name).out
    assert re.search(rf"^host +localhost:{port}, recorded 2 times for 0.5 s$", shown, re.MULTILINE)


def test_a_program_that_ends_while_it_is_recorded_ends_in_a_sentence(
    jax: Jax, training: Callable[[], tuple[subprocess.Popen[str], int]]
) -> None:
    process, port = training()
    mistakes = [
        jax.stepscope("attach", f"localhost:{port}", "--steps", "3"),
        jax.stepscope("session", "start", f"localhost:{port}"),
    ]
    attached = jax.start("-m", "stepscope", "attach", f"localhost:{port}", "--seconds", "60")
    log = "profiler-client.log"
    while not any("Waiting for completion" in each.read_text() for each in jax.folder.glob(f"data/runs/*/.*/0/{log}")):
        assert attached.poll() is None
        time.sleep(0.05)

    process.kill()

    assert attached.communicate(timeout=TIMEOUT_S) == (
        "",
        f"stepscope: localhost:{port}: the connection was lost: the program has ended\n"
        f"stepscope: nothing was recorded from localhost:{port}\n",
    )
    assert attached.returncode == 2
    assert [each.code for each in mistakes] == [2, 2]
    assert all(each.err.startswith("stepscope: ") and each.err.count("\n") == 1 for each in mistakes)
    assert "--seconds 2" in mistakes[0].err
    assert f"stepscope attach localhost:{port} --seconds 2\n" in mistakes[1].err


def test_a_program_that_marks_its_steps_is_recorded_and_diagnosed(jax: Jax) -> None:
    ended = jax.stepscope("run", "--name", "it", "--no-telemetry", str(EXAMPLE), "--steps=30")

    assert (ended.code, ended.out.count("\n")) == (0, 1)
    assert ended.out.startswith("30 steps of ")
    assert "stepscope: run it: recorded 5 steps, marked by the program; " in ended.err
    assert "a step takes" in ended.err
    [run] = jax.runs()
    [trace] = run.traces()
    assert trace.name == "trace-1.xplane.pb"
    assert numbers_of_steps(trace) == [10, 11, 12, 13, 14]
    manifest = run.manifest()
    assert {"jax", "jaxlib", "python"} <= set(manifest.versions)
    assert manifest.recordings[0]["step_times"][-1]["recorded"] is False


PLAIN = """
    import functools, importlib.util, inspect
    importlib.util.find_spec("jax")  # as libraries do to see whether it is there
    import jax, jax.numpy as jnp
    from jax import jit

    class Model:
        @functools.partial(jit, static_argnums=0)
        def scaled(self, x):
            return x * 2

    @jax.jit
    def update(weights, *, rate=1.0):
        "One step."
        return inner(weights) * rate

    late = jax.jit if jax.__version_info__ >= (0, 8) else functools.partial(functools.partial, jax.jit)

    @late(static_argnames="power")
    def inner(weights, power=2):
        return jnp.tanh(weights @ weights) ** power

    weights = jnp.ones((64, 64))
    for _ in range(30):
        update(weights).block_until_ready()
    print(update.__doc__, update.__name__, inspect.signature(update), Model().scaled(3))
    print(update.lower(weights).as_text()[:20], jax.jit(update)(weights).shape, update._cache_size())
    print(jax.grad(lambda x: update(x).sum())(weights).shape, jax.vmap(inner)(jnp.ones((3, 8, 8))).shape)
    print(update == update, len({update, update}), isinstance(update, type(jax._src.api.jit(abs))))
    print(jax.eval_shape(update, weights), jax.make_jaxpr(inner)(weights).out_avals)
"""


def test_calls_of_a_jitted_function_are_steps_and_the_function_is_as_it_was(jax: Jax) -> None:
    ended, run = jax.recorded(PLAIN)
    plain = jax.run("script.py")

    assert plain.code == 0, plain.err
    assert (ended.code, ended.out) == (0, plain.out)
    assert "recorded 5 steps (10 to 14), seen by calls of a jitted function" in ended.err
    assert numbers_of_steps(run.traces()[0]) == [10, 11, 12, 13, 14]


OWN = """
    import jax, jax.numpy as jnp, stepscope, sys
    function = jax.jit(lambda weights: jnp.tanh(weights @ weights))
    weights = jnp.ones((64, 64))
    for number in range(60):
        with stepscope.step(number=100 + number), stepscope.annotate("forward"):
            weights = function(weights).block_until_ready()
        if number == 13:
            jax.profiler.start_trace("own")
        if number == 30:
            jax.profiler.stop_trace()
"""


def test_the_programs_own_profile_goes_first(jax: Jax) -> None:
    ended, run = jax.recorded(OWN)

    assert ended.code == 0, ended.err
    assert "stepscope: the program started jax.profiler itself, so the recording was ended\n" in ended.err
    [recording] = run.recordings()
    assert (recording["source"], recording["own_profiler"], recording["trace"]) == (
        "explicit",
        True,
        "trace-1.xplane.pb",
    )
    trace = stepscope.open_trace(run.traces()[0])
    marked = trace.annotations.filter(pl.col("step").is_not_null())["step"].to_list()
    assert 0 < recording["steps"] == len(marked) < 5
    assert "forward" in trace.annotations["name"].to_list() + trace.operators["name"].to_list()
    [own] = (jax.folder / "own").rglob("*.xplane.pb")
    assert own.stat().st_size > 0


SERVED = """
    import jax, jax.numpy as jnp, time
    function = jax.jit(lambda weights: jnp.tanh(weights @ weights))
    weights = jnp.ones((64, 64))
    end = time.monotonic() + 300
    while time.monotonic() < end and not __import__("os").path.exists("stop"):
        weights = function(weights).block_until_ready()
        time.sleep(0.005)
"""


def test_an_agent_records_a_program_of_jax_too(jax: Jax) -> None:
    (jax.folder / "script.py").write_text(textwrap.dedent(SERVED))
    program = jax.start(
        "-m", "stepscope", "run", "--name", "it", "--serve", "--no-telemetry", "--no-diagnose", "script.py"
    )
    agents = jax.folder / "data" / "runs" / "it" / "agents"
    while not list(agents.glob("rank0.json")):
        assert program.poll() is None
        time.sleep(0.05)

    ended = jax.stepscope("attach", "it", "--steps", "3", "--no-diagnose", "--output", "traces")
    (jax.folder / "stop").touch()
    program.communicate(timeout=TIMEOUT_S)

    assert ended.code == 0, ended.err
    [trace] = (jax.folder / "traces").iterdir()
    assert trace.name.endswith("-rank0.xplane.pb")
    assert len(numbers_of_steps(trace)) == 3
    assert program.returncode == 0


def test_without_steps_the_reason_is_told(jax: Jax) -> None:
    ended, _ = jax.recorded("import jax.numpy as jnp; print(float(jnp.ones(3).sum()))")

    assert (ended.code, ended.out) == (0, "3.0\n")
    assert ended.err == (
        "stepscope: run it: nothing was recorded: jax was imported, but no step was seen, neither a "
        "StepTraceAnnotation nor a repeated call of a jitted function; mark the steps with stepscope.step()\n"
    )


def test_an_environment_without_the_client_is_told_its_remedy(jax: Jax) -> None:
    code = "import sys; sys.modules['xprof'] = None; from stepscope.commands import main; sys.exit(main())"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = jax.start("-c", code, "attach", f"127.0.0.1:{listener.getsockname()[1]}")
        connection, _ = listener.accept()
        connection.sendall(b"\0\0\0\4\0\0\0\0\0")
        out, err = process.communicate(timeout=TIMEOUT_S)
        connection.close()

    assert (process.returncode, out) == (2, "")
    assert err.startswith("stepscope: recording through a profiler server needs the xprof package: pip install ")
    assert json.dumps(err).count("\\n") == 1


FAILING = """
    import json, os, sys

    if os.environ.get("STEPSCOPE_RUN"):  # the entry that is to fail, and how often it was come to
        from stepscope import guard

        def probe(name):
            if name == os.environ["FAILS"]:
                raise RuntimeError("planted")

        guard.probe = probe

    import jax
    import jax.numpy as jnp

    @jax.jit
    def step(value):
        return value * 0.5 + 1

    value = jnp.ones(4)
    for number in range(20):
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            value = step(value)
    print(value.tolist())
    sys.exit(3)
"""


@pytest.mark.parametrize(
    "entry",
    [
        "record.hooks.XlaHooks._seen",
        "record.hooks._Calls._begins",
        "record.hooks._jitted",
    ],
)
def test_an_error_in_an_entry_changes_nothing(entry: str, jax: Jax) -> None:
    """As tests/e2e/test_guest.py has it of torch."""
    (jax.folder / "plain.py").write_text(textwrap.dedent(FAILING))
    plain = jax.run("plain.py")
    jax.set(FAILS=entry)

    done, _ = jax.recorded(FAILING, "--warmup", "2", "--steps", "2")

    assert (done.code, done.out) == (plain.code, plain.out)
    assert plain.code == 3
    assert done.err.count("stepscope leaves this process") == 1, done.err
    assert "Traceback" not in done.err
