"""The sampler: what it says of real processes, and of devices, present, partly silent and absent."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from stepscope.errors import UsageError
from stepscope.record.telemetry import sampler as sampler_module
from stepscope.record.telemetry.log import Telemetry
from stepscope.record.telemetry.sampler import NvidiaDevices, ProcessTree, Sampler
from stepscope.record.telemetry.store import Series, Writer
from stepscope.trace.telemetry import Telemetry as Read
from stepscope.trace.telemetry import read_telemetry, telemetry_files


class NVMLError(Exception):
    pass


class NotSupported(NVMLError):
    pass


class Nvml:
    """NVML as nvidia-ml-py shows it, with two devices; the second keeps its power and its clocks to itself."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NotSupported
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    def __init__(self) -> None:
        self.asked: list[str] = []

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return {"GPU-a": 0, "GPU-b": 1}[uuid]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=90 + handle, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=3 << 30, total=80 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self.asked.append(f"power {handle}")
        if handle:
            raise NotSupported("Not Supported")
        return 350_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        return 1_000_000

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 60 + handle

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        self.asked.append(f"clock {handle}")
        if handle:
            raise NVMLError("GPU is lost")
        return {1: 1980, 2: 2619}[kind]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x24


def sampled(writer: Writer) -> Read:
    writer.close()
    return read_telemetry(telemetry_files(writer.folder))


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "rank0" / "telemetry", {"rank": "0"})


def test_devices_say_what_they_have_and_name_what_they_have_not(writer: Writer) -> None:
    # Given
    nvml = Nvml()
    devices = NvidiaDevices(writer, nvml, {})

    # When
    first = {(series.device, series.name): value for series, value in devices.sample(0)}
    second = {(series.device, series.name): value for series, value in devices.sample(1)}

    # Then
    assert {name: value for (device, name), value in first.items() if device == "0"} == {
        "utilization_share": pytest.approx(0.9),
        "memory_utilization_share": pytest.approx(0.4),
        "memory_used_bytes": 3 << 30,
        "memory_bytes": 80 << 30,
        "power_w": 350.0,
        "energy_j": 1000.0,
        "temperature_c": 60,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 2619,
        "throttle_reasons": 36.0,
    }
    assert (first["1", "power_w"], first["1", "sm_clock_mhz"]) == (None, None)
    # What can never be had is asked once; what failed now may be there the next time.
    assert ("1", "power_w") not in second
    assert second["1", "sm_clock_mhz"] is None
    assert nvml.asked.count("power 1") == 1
    assert sorted(sampled(writer).missing.select("name", "device", "reason", "count").rows()) == [
        ("memory_clock_mhz", "1", "GPU is lost", 2),
        ("power_w", "1", "Not Supported", 1),
        ("sm_clock_mhz", "1", "GPU is lost", 2),
    ]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {"0": 60, "1": 61}),
        ({"CUDA_VISIBLE_DEVICES": "1"}, {"0": 61}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b, GPU-a"}, {"0": 61, "1": 60}),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, {"1": 61}),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "1"}, {"0": 61}),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, {"0": 60, "1": 61}),
    ],
    ids=["all", "one", "by name", "a rank's share", "a rank's own", "one rank"],
)
def test_devices_have_the_numbers_that_cuda_gives_them(
    writer: Writer, environment: dict[str, str], expected: dict[str, int]
) -> None:
    values = NvidiaDevices(writer, Nvml(), environment).sample(0)

    assert {series.device: value for series, value in values if series.name == "temperature_c"} == expected


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_devices_are_not_asked(writer: Writer, hidden: str) -> None:
    with pytest.raises(LookupError, match="CUDA_VISIBLE_DEVICES hides it"):
        NvidiaDevices(writer, Nvml(), {"CUDA_VISIBLE_DEVICES": hidden})


def test_a_machine_without_a_driver_says_so(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Nvml) -> None:
        raise NVMLError("NVML Shared Library Not Found")

    monkeypatch.setattr(Nvml, "nvmlInit", fail)
    with pytest.raises(LookupError, match="no NVIDIA driver answers: NVML Shared Library Not Found"):
        NvidiaDevices(writer, Nvml(), {})


def test_a_busy_child_counts(writer: Writer) -> None:
    # Given a child that does nothing but work
    tree = ProcessTree(writer)
    before = {series.name: value for series, value in tree.sample(time.monotonic_ns())}
    child = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()

    # When
    try:
        time.sleep(0.5)
        tree._list_next_ns = 0
        values = dict(tree.sample(time.monotonic_ns()))
    finally:
        child.kill()
        child.wait()
        child.stdout.close()

    # Then
    found = {series.name: value for series, value in values.items() if series.source == "process"}
    assert found["processes"] == (before["processes"] or 0) + 1
    assert 0.05 < (found["cpu_cores"] or 0) < 2.5
    assert (found["memory_bytes"] or 0) > 1 << 20
    machine = {series.name: value for series, value in values.items() if series.source == "machine"}
    assert 0 < (machine["cpu_share"] or 0) <= 1
    assert 0 < (machine["memory_used_bytes"] or 0) < (machine["memory_bytes"] or 0)


def test_counters_that_the_machine_hides_are_null_once_and_named(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given
    tree = ProcessTree(writer)
    monkeypatch.setattr(tree._psutil, "disk_io_counters", lambda: None)

    # When
    samples = [dict(tree.sample(time.monotonic_ns())) for _ in range(2)]

    # Then
    hidden = Series("machine", "disk_read_bytes_per_s", None, "bytes/s")
    assert samples[0][hidden] is None
    assert hidden not in samples[1]
    missing = sampled(writer).missing
    reasons = missing.filter((pl.col("source") == "machine") & (pl.col("name") == hidden.name))["reason"].to_list()
    assert reasons == ["this system has no such counters"]


class Failing:
    series = Series("machine", "(all)")

    def sample(self, now_ns: int) -> list[tuple[Series, float | None]]:
        raise OSError("the counters are gone")


class Counting:
    series = Series("machine", "count")

    def __init__(self) -> None:
        self.count = 0

    def sample(self, now_ns: int) -> list[tuple[Series, float | None]]:
        self.count += 1
        return [(self.series, self.count)]


def test_a_source_that_fails_does_not_stop_the_others(writer: Writer) -> None:
    # Given
    counting = Counting()
    sampler = Sampler(writer, 0.01, [Failing(), counting])

    # When
    sampler.start()
    while counting.count < 3:
        time.sleep(0.01)
    sampler.close()

    # Then
    found = sampled(writer)
    assert found.samples["value"].to_list()[:3] == [1.0, 2.0, 3.0]
    assert found.missing.select("name", "reason").rows() == [("(all)", "the counters are gone")]


def test_the_last_sample_is_taken_at_the_end(writer: Writer) -> None:
    counting = Counting()
    sampler = Sampler(writer, 3600, [counting])
    sampler.start()
    while not counting.count:
        time.sleep(0.01)
    sampler.close()

    assert counting.count == 2


@pytest.mark.parametrize(
    ("driver", "complaint"),
    [
        (False, "processor, memory, disk and network are not sampled without psutil"),
        (True, "processor, memory, disk and network are not sampled without psutil and nvidia-ml-py"),
    ],
)
def test_missing_packages_are_one_sentence_and_training_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    driver: bool,
    complaint: str,
) -> None:
    # Given
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(sampler_module, "_has_nvidia_driver", lambda: driver)

    # When
    with Telemetry(tmp_path, interval_s=0.01) as run:
        run.log({"loss": 1.0})

    # Then
    packages = complaint.partition("sampled without ")[2].replace(" and ", " ")
    assert capsys.readouterr().err == f"stepscope: {complaint}: pip install {packages}\n"
    found = read_telemetry(telemetry_files(tmp_path))
    assert found.samples["value"].to_list() == [1.0]
    assert found.missing.select("source", "name").rows() == [("process", "(all)"), ("device", "(all)")]


@pytest.mark.parametrize("interval", [0, -1.0, float("nan")])
def test_an_interval_is_above_zero(tmp_path: Path, interval: float) -> None:
    with pytest.raises(UsageError, match="the interval between samples must be above zero"):
        Telemetry(tmp_path, interval_s=interval)
