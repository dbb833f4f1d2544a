"""Logging: every kind of value, norms against those computed by hand, and nothing that waits for a device."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn

import stepscope
from stepscope.errors import UsageError
from stepscope.record.telemetry import log as log_module
from stepscope.record.telemetry.log import Telemetry, telemetry
from stepscope.trace.telemetry import Telemetry as Read
from stepscope.trace.telemetry import read_telemetry, telemetry_files

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(stepscope.__file__).parents[1])}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Telemetry]:
    with Telemetry(tmp_path, interval_s=None) as made:
        yield made


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("STEPSCOPE_RUN", "RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    log_module._close_all()


def read(run: Telemetry) -> Read:
    run.close()
    return read_telemetry(telemetry_files(run.folder))


def values(found: Read, name: str) -> list[tuple[int | None, float | None]]:
    return found.samples.filter(pl.col("name") == name).select("step", "value").rows()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3.0),
        (True, 1.0),
        (2.5, 2.5),
        (math.nan, math.nan),
        (-math.inf, -math.inf),
        (np.float32(0.5), 0.5),
        (np.array(7), 7.0),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([2], dtype=torch.int64), 2.0),
        (torch.tensor([[1.5]], dtype=torch.bfloat16), 1.5),
        (torch.tensor(2.0, requires_grad=True), 2.0),
        (torch.tensor(math.inf), math.inf),
        (nn.Parameter(torch.tensor(4.0)), 4.0),
        (None, None),
    ],
    ids=str,
)
def test_a_value_is_kept_as_it_is(run: Telemetry, value: object, expected: float | None) -> None:
    run.log({"x": value}, step=5)

    found = read(run)
    assert str(values(found, "x")) == str([(5, expected)])
    assert found.missing.is_empty()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.ones(2, 3), "a tensor of shape [2, 3] is not one number"),
        ("high", "a value of type str is not a number"),
        (object(), "a value of type object is not a number"),
        (torch.tensor(1j), "real number, not 'complex'"),
        (torch.ones((), device="meta"), "a value on the device meta cannot be copied without waiting"),
    ],
    ids=["vector", "text", "object", "complex", "meta"],
)
def test_what_is_no_number_is_null_and_named(run: Telemetry, value: object, reason: str) -> None:
    run.log({"x": value, "y": 1.0}, step=0)

    found = read(run)
    assert (values(found, "x"), values(found, "y")) == ([(0, None)], [(0, 1.0)])
    assert found.missing["name"].to_list() == ["x"]
    assert reason in found.missing["reason"][0]


def test_a_value_is_kept_as_it_was_when_it_was_logged(run: Telemetry) -> None:
    loss = torch.tensor(1.0)
    run.log({"loss": loss}, step=0)
    loss += 1
    run.log({"loss": loss}, step=1)

    assert values(read(run), "loss") == [(0, 1.0), (1, 2.0)]


def test_no_step_is_null(run: Telemetry) -> None:
    run.log({"loss": 1.0})

    assert values(read(run), "loss") == [(None, 1.0)]


@pytest.mark.parametrize("wrong", [3, [("loss", 1)], "loss"])
def test_values_need_names(run: Telemetry, wrong: Any) -> None:
    with pytest.raises(UsageError, match="log takes values by name"):
        run.log(wrong)


def test_a_step_is_a_whole_number(run: Telemetry) -> None:
    with pytest.raises(UsageError, match=r"a step is a whole number, not 1\.5"):
        run.log({"loss": 1}, step=1.5)  # type: ignore[arg-type]


def test_logging_after_the_end_is_said_once_and_harmless(run: Telemetry, capsys: pytest.CaptureFixture[str]) -> None:
    log_module._warned.clear()
    run.close()
    run.log({"loss": 1})
    run.log({"loss": 2})

    assert capsys.readouterr().err.count("after the telemetry was closed") == 1


def test_many_threads_log_at_once(run: Telemetry) -> None:
    threads = [
        threading.Thread(target=lambda name=name: [run.log({name: step}, step=step) for step in range(200)])
        for name in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    found = read(run)
    assert [values(found, name) for name in "abcd"] == [[(step, float(step)) for step in range(200)]] * 4


def test_gradient_norms_are_those_before_the_optimizers_step(run: Telemetry) -> None:
    # Given
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run.watch(net, every=2)
    run.watch(net, every=1, modules=["0", "2"], name="net")
    whole, first = [], []

    # When
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(5, 4)).sum().backward()
        whole.append(math.sqrt(sum(float(p.grad.square().sum()) for p in net.parameters())))
        first.append(math.sqrt(sum(float(p.grad.square().sum()) for p in net[0].parameters())))  # type: ignore[index]
        optimizer.step()

    # Then
    found = read(run)
    assert values(found, "gradient_norm") == [(0, pytest.approx(whole[0])), (2, pytest.approx(whole[2]))]
    assert values(found, "gradient_norm/net.0") == [(step, pytest.approx(norm)) for step, norm in enumerate(first)]
    assert len(values(found, "gradient_norm/net.2")) == 3


def test_half_precision_gradients_have_full_norms(run: Telemetry) -> None:
    # Given: a norm that half precision could not hold
    layer = nn.Linear(100, 100, bias=False, dtype=torch.float16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    run.watch(layer)

    # When
    layer.weight.grad = torch.full((100, 100), 6e4, dtype=torch.float16)
    optimizer.step()

    # Then
    assert values(read(run), "gradient_norm") == [(0, pytest.approx(6e6, rel=1e-3))]


def test_a_scale_that_a_fused_optimizer_takes_away_is_taken_away_here(run: Telemetry) -> None:
    layer = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, fused=True)
    run.watch(layer)

    layer.weight.grad = torch.tensor([[12.0]])
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)  # type: ignore[attr-defined]
    optimizer.step()

    assert values(read(run), "gradient_norm") == [(0, 3.0)]


def test_modules_without_gradients_are_named(run: Telemetry) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run.watch(net, modules=["0", "1"])
    net(torch.randn(5, 4)).sum().backward()
    optimizer.step()

    found = read(run)
    assert len(values(found, "gradient_norm/0")) == 1
    assert found.missing.select("name", "reason").rows() == [
        ("gradient_norm/1", "no parameter of the module had a dense gradient")
    ]


def test_an_optimizer_of_another_model_counts_no_step(run: Telemetry) -> None:
    net, other = model(), model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run.watch(net, every=1)
    other(torch.randn(5, 4)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    net(torch.randn(5, 4)).sum().backward()
    optimizer.step()

    assert [step for step, _ in values(read(run), "gradient_norm")] == [0]


def test_activation_norms(run: Telemetry) -> None:
    # Given
    net = model().eval()
    run.watch(net, gradients=False, activations=True, every=2, modules=["0", "2"])
    inputs = torch.randn(5, 4)

    # When
    with torch.inference_mode():
        outputs = [net(inputs) for _ in range(3)]

    # Then
    found = read(run)
    expected = pytest.approx(float(outputs[0].norm()))
    assert values(found, "activation_norm/2") == [(0, expected), (2, expected)]
    assert values(found, "activation_norm/0")[0][1] == pytest.approx(float(net[0](inputs).detach().norm()))  # type: ignore[index]


def test_recomputed_activations_are_not_counted_twice(run: Telemetry) -> None:
    # Given
    from torch.utils.checkpoint import checkpoint

    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    net = Recomputing()
    run.watch(net, gradients=False, activations=True, every=1, modules=["inner"])

    # When
    net(torch.randn(2, 4, requires_grad=True)).sum().backward()

    # Then
    assert len(values(read(run), "activation_norm/inner")) == 1


def test_outputs_without_numbers_are_named(run: Telemetry) -> None:
    class Choice(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"best": x.argmax()}

    net = nn.Sequential(nn.Linear(2, 2), Choice())
    run.watch(net, gradients=False, activations=True, every=1, modules=["1"])
    net(torch.ones(1, 2))

    found = read(run)
    assert values(found, "activation_norm/1") == []
    assert found.missing["name"].to_list() == ["activation_norm/1"]


def test_hooks_can_be_taken_away(run: Telemetry) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    watches = [run.watch(net, activations=True, every=1), run.watch_optimizer(optimizer)]
    for watch in watches:
        watch.remove()
    net(torch.randn(5, 4)).sum().backward()
    optimizer.step()

    assert read(run).samples.is_empty()


def test_learning_rates_are_those_the_step_uses(run: Telemetry) -> None:
    # Given
    net = model()
    groups = [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[2].parameters()}]  # type: ignore[index]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    run.watch_optimizer(optimizer)

    # When
    for _ in range(2):
        optimizer.step()
        schedule.step()

    # Then
    found = read(run)
    assert values(found, "learning_rate/0") == [(0, 0.5), (1, 0.25)]
    assert values(found, "learning_rate/1") == [(0, 1.0), (1, 0.5)]


def test_throughput_is_a_rate_over_the_hosts_clock(run: Telemetry, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a clock that goes on half a second at each call
    ticks = iter(range(0, 10**12, 500_000_000))
    monkeypatch.setattr("stepscope.record.telemetry.log.time.perf_counter_ns", lambda: next(ticks))

    # When
    for step in range(5):
        run.throughput(samples=32, tokens=64, step=step)

    # Then
    found = read(run)
    assert values(found, "samples_per_s") == [(2, 64.0), (4, 64.0)]
    assert found.samples.filter(pl.col("name") == "tokens_per_s")["unit"].unique().to_list() == ["tokens/s"]


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda run: run.watch("model"), "watch takes a torch.nn.Module, not a str"),
        (lambda run: run.watch(model(), modules=["*.attn"]), r"no module of the model has a name like '\*\.attn'"),
        (lambda run: run.watch(model(), every=0), "every must be 1 or more, not 0"),
        (lambda run: run.watch_optimizer(model()), "watch_optimizer takes a torch.optim.Optimizer, not a Sequential"),
    ],
    ids=["model", "modules", "every", "optimizer"],
)
def test_mistakes_are_one_sentence(run: Telemetry, call: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        call(run)


def test_the_public_names_lead_here(tmp_path: Path) -> None:
    run = stepscope.telemetry(tmp_path, rank=2, interval_s=None)
    stepscope.log({"loss": 1.0}, step=0)

    assert stepscope.telemetry() is run
    assert run.folder == tmp_path / "rank2" / "telemetry"
    assert values(read(run), "loss") == [(0, 1.0)]


def test_the_first_log_begins_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stepscope.log({"loss": 1.0}, step=0)
    log_module._close_all()

    files = list(tmp_path.glob("stepscope-runs/*/rank0/telemetry/*.sqlite"))
    assert "stepscope: telemetry is written into stepscope-runs" in capsys.readouterr().err
    assert values(read_telemetry(files), "loss") == [(0, 1.0)]


def test_a_run_says_where_and_the_launcher_which_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_RUN", str(tmp_path / "a run"))
    monkeypatch.setenv("RANK", "5")

    assert telemetry(interval_s=None).folder == tmp_path / "a run" / "rank5" / "telemetry"


def test_a_run_that_is_started_takes_the_scripts_own_values(tmp_path: Path) -> None:
    started = telemetry(tmp_path, rank=1)
    stepscope.log({"loss": 1.0})
    started.close()

    found = read_telemetry(telemetry_files(tmp_path))
    assert values(found, "loss") == [(None, 1.0)]
    assert {"process", "machine"} <= set(found.samples["source"])


def test_a_folder_that_cannot_be_made_stops_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("STEPSCOPE_RUN", str(tmp_path / "file"))
    log_module._warned.clear()

    stepscope.log({"loss": 1.0})
    stepscope.log({"loss": 1.0})

    assert capsys.readouterr().err.count("nothing is logged: telemetry cannot be written into") == 1


FORKING = """
    import multiprocessing, os, sys
    from pathlib import Path
    from stepscope.record.telemetry.log import telemetry

    def child(number):
        run.log({"child": number}, step=number)

    run = telemetry(Path(sys.argv[1]), interval_s=None)
    run.log({"parent": 1.0})
    run.flush()
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=child, args=(number,)) for number in range(3)]
    for each in children: each.start()
    for each in children: each.join()
    run.log({"parent": 2.0})
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_forked_processes_write_files_of_their_own(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(FORKING), str(tmp_path)], check=True, env=ENVIRONMENT)

    found = read_telemetry(telemetry_files(tmp_path))
    assert [value for _, value in values(found, "parent")] == [1.0, 2.0]
    assert sorted(values(found, "child")) == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert found.samples["process"].n_unique() == 4


def test_logging_imports_nothing_heavy(tmp_path: Path) -> None:
    heavy = "[name for name in ('torch', 'polars', 'numpy') if name in sys.modules]"
    program = f"import sys, stepscope; stepscope.log({{'x': 1}}); print({heavy})"
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=ENVIRONMENT)

    assert found.stdout == "[]\n"
