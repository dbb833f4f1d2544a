"""What only a GPU runs is right about devices, shapes and types: it runs on a device that computes nothing."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import polars as pl
import pytest

torch = pytest.importorskip("torch")

from benchmarks.gpu_campaign import environment, prediction, sweep, workloads  # noqa: E402
from benchmarks.gpu_campaign.plan import WORKLOADS, ZOO, At  # noqa: E402
from benchmarks.gpu_campaign.sweep import Sweep  # noqa: E402
from benchmarks.gpu_campaign.workloads import Size  # noqa: E402
from stepscope.diagnosis.rules import RULES  # noqa: E402
from tests.fake_cuda import fake_cuda, has_guard  # noqa: E402
from tests.zoo.gpu.__main__ import built  # noqa: E402
from tests.zoo.gpu.registry import FAULTS, Fault  # noqa: E402
from tests.zoo.gpu.setting import Setting  # noqa: E402
from tests.zoo.timing import Ends  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_guard(), reason="no C++ compiler makes the guard of a device"),
]
SAMPLES = pl.DataFrame(
    {"name": ["power_w", "power_w", "throttle_reasons", "throttle_reasons"], "value": [90.0, 100.0, 4.0, 0.0]}
)
FEW = 2
"""Steps: fewer than a graph's capture waits for, which stand-ins cannot make."""


@pytest.fixture(autouse=True)
def _settings_of_torch() -> Iterator[None]:
    """The programs raise and lower limits, as a user's would: for themselves only."""
    import torch._dynamo

    limit = torch._dynamo.config.recompile_limit
    yield
    torch._dynamo.config.recompile_limit = limit


def triton(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A stand-in for Triton: the launches with grid, arguments and constants."""
    import torch._dynamo  # noqa: F401  # looks for the real one, once

    launches: list[tuple[Any, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **constants: launches.append((grid, arguments, constants))

    language = ModuleType("triton.language")
    language.constexpr = int  # type: ignore[attr-defined]
    package = ModuleType("triton")
    package.jit, package.language = lambda _: Kernel(), language  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", package)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    return launches


@pytest.mark.parametrize("is_fault", [True, False], ids=["fault", "clean"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_program_keeps_its_tensors_on_the_device(
    fault: Fault, is_fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = triton(monkeypatch) if "triton" in fault.needs else []
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    group = SimpleNamespace(
        is_initialized=lambda: True, ReduceOp=torch.distributed.ReduceOp, all_reduce=lambda *_: None
    )
    monkeypatch.setattr("tests.zoo.gpu.host.distributed", group)
    before = torch.get_float32_matmul_precision()
    with fake_cuda() as device:
        step = built(fault.name, Setting(is_fault, device))
        for _ in range(FEW):
            answer = step()
        assert not isinstance(answer, torch.Tensor) or answer.device == device
    torch.set_float32_matmul_precision(before)
    sys.modules.pop("tests.zoo.gpu.triton_kernel", None)  # it has the stand-in
    assert len(launches) == (FEW if "triton" in fault.needs else 0)


def test_faults_expect_rules_that_there_are_and_mark_lines() -> None:
    known = {rule.id for rule in RULES}

    assert len(FAULTS) >= 20
    for fault in FAULTS:
        assert set(fault.rules) <= known
        assert bool(fault.lines) or not fault.has_place, fault.name


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_a_workload_keeps_its_tensors_on_the_device(name: str) -> None:
    with fake_cuda() as device:
        step = workloads.built(name, Size(device, is_tiny=True))
        for _ in range(FEW):
            step()


@pytest.mark.parametrize("name", [each for each in WORKLOADS if each != "dlrm"])
def test_a_workload_has_shapes_that_fit_in_full_size(name: str) -> None:
    with fake_cuda() as device:
        workloads.built(name, Size(device, is_tiny=False))()


@pytest.mark.parametrize("kind", sweep._KINDS)
def test_every_kind_of_the_sweep_is_timed(kind: str, tmp_path: Path) -> None:
    draw = random.Random(1)
    with fake_cuda() as device, torch.no_grad():
        found = Sweep(device, 1 << 26, tmp_path / "sweep.parquet")
        for _ in range(40):
            found._one(draw, kind)
    assert not found.failures
    assert len(found.rows) >= 10
    assert all(len(row[3]) == len(sweep.SIZES[kind]) for row in found.rows)
    found.save()


def test_the_device_is_described_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(name="NVIDIA X", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(prediction, "_sampled", lambda *said: (said[3] or (lambda: None))() or SAMPLES)
    at = At("cuda:0", True, tmp_path, 60.0)
    with fake_cuda():
        assert environment.machine(at, "")["nccl"] == "2.27.3"
        phases = prediction.power(at, "")["phases"]
        assert sweep.swept(at, "")["failures"] == {}

    assert phases["products"]["power_w"] == {"low": 90.0, "median": 95.0, "high": 100.0}
    assert phases["idle"]["throttle_reasons"] == {"seen": [0, 4]}


def test_steps_are_timed_by_the_devices_events() -> None:
    with fake_cuda() as device:
        ends = Ends(device)
        for _ in range(4):
            ends.mark()
        assert ends.steps_ns() == [1_000_000] * 3


@pytest.mark.parametrize("name", ZOO)
def test_a_program_of_the_zoo_keeps_its_tensors_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import import_module

    program = import_module(f"tests.zoo.{name}")
    for twin in ("--fault", "--clean"):
        monkeypatch.setattr(sys, "argv", [name, twin, "--steps", "1", "--device", "cuda:0"])
        try:
            with fake_cuda():
                program.main()
        finally:
            torch.set_default_device(None)
