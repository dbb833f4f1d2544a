"""Values on a device: copied and read later, with nothing that waits; on an imitated device, and on a real one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import nn

from stepscope.record.telemetry.log import Telemetry
from stepscope.trace.telemetry import read_telemetry, telemetry_files

WAITS = {"aten._local_scalar_dense.default", "aten.item.default", "aten.nonzero.default", "aten.is_nonzero.default"}


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on a CUDA device; every operator that reaches it is noted, and done in host memory."""

    operators: list[str] = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), dtype=inner.dtype, device="cuda:0", requires_grad=inner.requires_grad
        )
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.operators.append(str(func))
        kwargs = {name: _inner(value) for name, value in (kwargs or {}).items() if name != "device"}
        result = func(*_inner(args), **kwargs)
        return args[0] if func is torch.ops.aten.copy_.default else _outer(result)


def _inner(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_inner(each) for each in value)
    return value.inner if isinstance(value, DeviceTensor) else value


def _outer(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_outer(each) for each in value)
    return DeviceTensor(value) if isinstance(value, torch.Tensor) else value


class Event:
    """Passes when it is told to."""

    passed = False
    asked = 0

    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        Event.asked += 1
        return Event.passed


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    monkeypatch.setattr(
        "stepscope.record.telemetry.values.pinned_bytes", lambda size: torch.empty(size, dtype=torch.uint8)
    )
    DeviceTensor.operators, Event.passed, Event.asked = [], False, 0
    yield
    Event.passed = True


@pytest.fixture
def run(tmp_path: Path, device: None) -> Iterator[Telemetry]:
    with Telemetry(tmp_path, interval_s=None) as made:
        yield made
        Event.passed = True


def kept(run: Telemetry) -> list[tuple[str, int | None, float | None]]:
    files = telemetry_files(run.folder)
    return read_telemetry(files).samples.select("name", "step", "value").rows() if files else []


def test_a_value_on_a_device_is_read_when_its_event_has_passed(run: Telemetry) -> None:
    # Given
    loss = DeviceTensor(torch.tensor(2.0))

    # When it is logged, nothing waits, and nothing is there yet
    run.log({"loss": loss, "rate": 0.5}, step=0)
    loss.inner.add_(1)
    run.flush()
    assert kept(run) == [("rate", 0, 0.5)]
    assert WAITS.isdisjoint(DeviceTensor.operators)

    # Then, once the device has come to it, the next call reads it: as it was when it was logged
    Event.passed = True
    run.log({"rate": 0.25}, step=1)
    run.flush()
    assert kept(run) == [("rate", 0, 0.5), ("loss", 0, 2.0), ("rate", 1, 0.25)]
    assert WAITS.isdisjoint(DeviceTensor.operators)


def test_several_values_are_copied_at_once_and_exactly(run: Telemetry) -> None:
    # Given
    values = {
        "float": torch.tensor(0.1),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "nan": torch.tensor(math.nan),
        "inf": torch.tensor([-math.inf]),
    }

    # When
    run.log({name: DeviceTensor(value) for name, value in values.items()}, step=3)
    copies = DeviceTensor.operators.count("aten.copy_.default")
    run.log({"count": DeviceTensor(torch.tensor(2**53 - 1))}, step=3)
    Event.passed = True
    run.close()

    # Then
    assert copies == 1
    found = {name: value for name, _, value in kept(run)}
    assert found["float"] == torch.tensor(0.1).item()
    assert (found["half"], found["inf"], found["count"]) == (0.5, -math.inf, 2.0**53 - 1)
    assert math.isnan(found["nan"] or 0)


def test_pinned_memory_is_used_again(run: Telemetry, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given
    made: list[int] = []

    def counted(size: int) -> torch.Tensor:
        made.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(run._scalars._pages, "_allocate", counted)
    Event.passed = True

    # When
    for step in range(1000):
        run.log({"loss": DeviceTensor(torch.tensor(float(step)))}, step=step)
    run.close()

    # Then
    assert len(made) == 1
    assert [value for _, _, value in kept(run)] == [float(step) for step in range(1000)]


def test_a_thousand_values_that_have_not_arrived_keep_their_own_memory(run: Telemetry) -> None:
    for step in range(1000):
        run.log({"loss": DeviceTensor(torch.tensor(float(step)))}, step=step)
    Event.passed = True
    run.close()

    assert [value for _, _, value in kept(run)] == [float(step) for step in range(1000)]


def test_a_device_that_hangs_is_not_waited_for(run: Telemetry) -> None:
    run.log({"loss": DeviceTensor(torch.tensor(1.0))}, step=0)
    run._scalars.drain(timeout_s=0.01)
    run.close()

    read = read_telemetry(telemetry_files(run.folder))
    assert read.samples.select("name", "value").rows() == [("loss", None)]
    assert read.missing["reason"].to_list() == ["the device had not computed it when the run ended"]


def test_a_device_that_fails_is_named_and_raises_nothing(run: Telemetry, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given
    def fail(self: Event) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    run.log({"loss": DeviceTensor(torch.tensor(1.0))}, step=0)
    monkeypatch.setattr(Event, "query", fail)

    # When
    run.log({"loss": 2.0}, step=1)
    run.close()

    # Then
    read = read_telemetry(telemetry_files(run.folder))
    assert read.samples["value"].to_list() == [None, 2.0]
    assert "illegal memory access" in read.missing["reason"][0]


def test_nothing_is_asked_or_copied_while_a_graph_is_captured(run: Telemetry, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given
    run.log({"loss": DeviceTensor(torch.tensor(1.0))}, step=0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    Event.asked, DeviceTensor.operators = 0, []

    # When
    run.log({"loss": DeviceTensor(torch.tensor(2.0))}, step=1)
    assert (Event.asked, "aten.copy_.default" in DeviceTensor.operators) == (0, False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    Event.passed = True
    run.close()

    # Then
    read = read_telemetry(telemetry_files(run.folder))
    assert sorted(read.samples.select("step", "value").rows()) == [(0, 1.0), (1, None)]
    assert read.missing["reason"].to_list() == ["it was logged while a CUDA graph was captured"]


def test_norms_are_computed_on_the_device(run: Telemetry) -> None:
    # Given
    layer = nn.Linear(3, 2)
    for name, parameter in list(layer.named_parameters()):
        moved = nn.Parameter(DeviceTensor(parameter.detach()))
        moved.grad = DeviceTensor(torch.full(parameter.shape, 2.0))
        setattr(layer, name, moved)
    run.watch(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=torch.tensor(0.1), foreach=False)
    run.watch_optimizer(optimizer)
    hooks = optimizer._optimizer_step_pre_hooks.values()
    DeviceTensor.operators = []

    # When: only the hooks run, not the step
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    for hook in [*_global_optimizer_pre_hooks.values(), *hooks]:
        hook(optimizer, (), {})
    asked = set(DeviceTensor.operators)
    Event.passed = True
    run.close()

    # Then
    assert asked & WAITS == set()
    assert "aten._foreach_norm.Scalar" in asked
    found = {name: value for name, _, value in kept(run)}
    assert found["gradient_norm"] == pytest.approx(math.sqrt(8 * 4.0))
    assert found["learning_rate"] == pytest.approx(0.1)


def slices(profiler: Any, path: Path) -> pl.DataFrame:
    """Names and categories of everything in a trace."""
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return pl.DataFrame([(each["name"], each.get("cat", "")) for each in events if each.get("ph") == "X"], orient="row")


def test_logging_host_values_leaves_no_wait_in_a_trace(tmp_path: Path) -> None:
    # Given
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with Telemetry(tmp_path, interval_s=None) as run:
        run.watch(layer, activations=True, every=1)
        run.watch_optimizer(optimizer)

        # When
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for step in range(3):
                loss = layer(torch.ones(2, 4)).square().mean()
                loss.backward()
                optimizer.step()
                run.log({"loss": loss, "lr": 0.1}, step=step)

    # Then
    names = set(slices(profiler, tmp_path / "trace.json").to_series(0))
    assert "aten::_foreach_norm" in names
    assert names.isdisjoint({"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_synchronises_on_a_gpu(tmp_path: Path) -> None:
    # Given
    layer = nn.Linear(256, 256).cuda()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    batch = torch.randn(64, 256, device="cuda")
    run = Telemetry(tmp_path, interval_s=None)
    run.watch(layer, activations=True, every=1)
    run.watch_optimizer(optimizer)

    def step(number: int) -> torch.Tensor:
        loss = layer(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log({"loss": loss, "count": torch.ones((), dtype=torch.int64, device="cuda")}, step=number)
        return loss

    for number in range(3):  # makes the pinned memory, which may stop the device
        step(number)
    torch.cuda.synchronize()

    # When
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile() as profiler:
            losses = [step(number) for number in range(3, 13)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run.close()

    # Then: no wait between the profiler's own at its end, and the values are right
    found = slices(profiler, tmp_path / "trace.json")
    launches = found.filter(found.to_series(1).is_in(["cuda_runtime", "cuda_driver"])).to_series(0)
    assert launches.filter(launches.str.contains("StreamSynchronize|EventSynchronize")).is_empty()
    assert launches.filter(launches.str.contains("DeviceSynchronize")).len() <= 1
    assert "aten::_local_scalar_dense" not in set(found.to_series(0))
    samples = read_telemetry(telemetry_files(run.folder)).samples
    logged = samples.filter((pl.col("name") == "loss") & (pl.col("step") >= 3))["value"].to_list()
    assert logged == [loss.item() for loss in losses]
    assert samples.filter(pl.col("name") == "gradient_norm").height == 13
