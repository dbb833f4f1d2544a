"""The recorder, the clock of `bench` and the counters beside the plain way, on whatever device there is."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
import torch
from torch import nn

import stepscope
from stepscope.record.bench_steps import DeviceMarks
from stepscope.record.energy import EnergyMeter
from stepscope.record.recorder import Recorder, profiler_is_active
from stepscope.record.schedule import RecordOptions
from stepscope.record.telemetry.log import Telemetry
from stepscope.trace import Trace
from stepscope.trace.telemetry import read_telemetry, telemetry_files
from tests.devices import needs_gpu, on_devices
from tests.zoo.timing import Ends

pytestmark = pytest.mark.slow
STEPS = 3


def training(device: str) -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = torch.randn(32, 64, device=device)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return torch.as_tensor(loss.detach())

    return step


def recorded(step: Callable[[], object], options: RecordOptions, path: Path) -> Trace:
    """Steps under the recorder, after one that prepares it."""
    recorder = Recorder(options)
    recorder.prepare()
    step()
    recorder.start()
    for number in range(STEPS):
        step()
        if number < STEPS - 1:
            recorder.step()
    recorder.stop()
    trace = stepscope.open_trace(recorder.save(path))
    assert recorder.problem is None
    assert not profiler_is_active()
    return trace


@on_devices
@pytest.mark.parametrize(
    "options",
    [
        RecordOptions(shapes=False, memory=False, lines=False),
        RecordOptions(),
        RecordOptions(stacks=True, flops=True, modules=True),
    ],
    ids=["plain", "default", "everything"],
)
def test_a_recording_shows_what_ran_and_changes_nothing(device: str, options: RecordOptions, tmp_path: Path) -> None:
    plain, observed = training(device), training(device)
    expected = [float(plain()) for _ in range(STEPS + 2)]

    trace = recorded(observed, options, tmp_path / "trace.json.gz")

    trace.check()
    assert float(observed()) == pytest.approx(expected[-1], rel=1e-5)
    products = trace.operators.filter(pl.col("name") == "aten::addmm")
    assert products.height == 2 * STEPS
    if device == "cuda":
        kernels = trace.device_work.filter(pl.col("kind") == "compute")
        assert kernels["launch"].null_count() == 0
        assert kernels.height >= 10 * STEPS
        assert trace.metadata.devices
    if options.memory:
        assert trace.memory.height > 0


@on_devices
def test_the_recorder_and_torchs_profiler_see_the_same(device: str, tmp_path: Path) -> None:
    step = training(device)
    trace = recorded(step, RecordOptions(), tmp_path / "ours.json.gz")
    with torch.profiler.profile(record_shapes=True, profile_memory=True) as profiler:
        for _ in range(STEPS):
            step()
    profiler.export_chrome_trace(str(tmp_path / "theirs.json"))
    theirs = stepscope.open_trace(tmp_path / "theirs.json")

    for table, column in (("operators", "name"), ("device_work", "name")):
        mine, other = (
            one.scan(table).filter(~pl.col(column).str.contains("Profiler|stepscope|Mem")).collect()[column]
            for one in (trace, theirs)
        )
        assert mine.value_counts().sort(column).rows() == other.value_counts().sort(column).rows()


@on_devices
def test_the_clock_of_steps_agrees_with_the_hosts(device: str) -> None:
    step = training(device)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        step()
    ends = Ends(torch.device(device))
    wait()
    ends.mark()
    began = time.perf_counter_ns()
    for _ in range(20):
        step()
    ends.mark()
    wait()
    passed = time.perf_counter_ns() - began

    assert len(found := ends.steps_ns()) == 1
    assert found[0] == pytest.approx(passed, rel=0.2)


@pytest.mark.gpu
@needs_gpu
def test_the_clock_of_bench_agrees_with_plain_events() -> None:
    step, marks, ends = training("cuda"), DeviceMarks(torch.cuda), Ends(torch.device("cuda"))
    for _ in range(30):
        step()
        assert marks.mark()
        ends.mark()

    gaps = [end - begin for begin, end in pairwise(marks.ends_ns())]

    assert sum(gaps) == pytest.approx(sum(ends.steps_ns()), rel=0.02)


@pytest.mark.gpu
@needs_gpu
def test_kernels_of_a_captured_graph_belong_to_its_launch(tmp_path: Path) -> None:
    from stepscope.remedies import capture_step

    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]).cuda().requires_grad_(False)
    inputs = torch.randn(8, 64, device="cuda")
    step = capture_step(lambda x: model(x))
    for _ in range(6):
        step(inputs)

    trace = recorded(lambda: step(inputs), RecordOptions(), tmp_path / "trace.json.gz")

    graphs = trace.launches.filter(pl.col("name").str.contains("GraphLaunch"))
    assert graphs.height == STEPS
    assert trace.device_work.filter(pl.col("kind") == "compute").height >= 8 * STEPS


@pytest.mark.gpu
@needs_gpu
def test_counters_of_the_device_beside_nvmls_own(tmp_path: Path) -> None:
    nvml = pytest.importorskip("pynvml")
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    torch.zeros(1, device="cuda")
    with Telemetry(tmp_path, interval_s=0.1):
        time.sleep(1.5)
        used = nvml.nvmlDeviceGetMemoryInfo(handle).used
    samples = read_telemetry(telemetry_files(tmp_path)).samples
    found = {
        name: samples.filter((pl.col("source") == "device") & (pl.col("name") == name))["value"].drop_nulls().to_list()
        for name in ("power_w", "energy_j", "temperature_c", "sm_clock_mhz", "memory_used_bytes", "utilization_share")
    }
    assert all(len(values) >= 5 for values in found.values()), found
    assert found["memory_used_bytes"][-1] == pytest.approx(used, rel=0.2)
    assert found["energy_j"] == sorted(found["energy_j"])
    assert 1 < found["power_w"][-1] < 2000


@pytest.mark.gpu
@needs_gpu
def test_energy_agrees_with_the_drivers_counter() -> None:
    pytest.importorskip("zeus")
    nvml = pytest.importorskip("pynvml")
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    matrix = torch.randn(4096, 4096, device="cuda")
    meter = EnergyMeter()
    before = nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
    for number in range(400):
        meter.begins(number)
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize()
        meter.ended()
    meter.finish()
    passed = nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000 - before

    joules = sum(window.joules["gpu 0"] for window in meter.record.windows)
    assert 0 < joules <= passed * 1.05


@pytest.mark.gpu
@needs_gpu
def test_a_memory_snapshot_holds_what_the_allocator_says(tmp_path: Path) -> None:
    torch.cuda.memory._record_memory_history()
    try:
        kept = [torch.zeros(1 << 20, device="cuda") for _ in range(4)]
        torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))  # type: ignore[no-untyped-call]
        allocated = torch.cuda.memory_allocated()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)

    trace = stepscope.open_trace(tmp_path / "snapshot.pickle")

    assert trace.metadata.format == "torch_snapshot"
    assert kept[0].nbytes <= max(trace.memory["bytes"].drop_nulls().to_list())
    with (tmp_path / "snapshot.pickle").open("rb") as file:
        blocks = [block for segment in pickle.load(file)["segments"] for block in segment["blocks"]]
    active = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    assert active == pytest.approx(allocated, rel=0.01)


@pytest.mark.gpu
@needs_gpu
def test_the_environment_knows_the_device() -> None:
    from stepscope.machine.environment import Machine, inspect_environment, observations_json

    said = json.dumps(observations_json(inspect_environment(Machine())))
    assert torch.cuda.get_device_name(0).split()[-1] in said or "device-" in said
