"""Utilization, memory, power, temperature, clocks and throttling of NVIDIA devices, from NVML (nvidia-ml-py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ClassVar, TypeAlias

from stepscope.capture.guard import sentence
from stepscope.capture.telemetry.store import Series
from stepscope.capture.telemetry.writer import Writer

Values: TypeAlias = list[tuple[Series, float | None]]
Counter: TypeAlias = Callable[[Any], tuple[float, ...]]


class NvidiaDevices:
    """Asks NVML for the devices that this process can use; several ranks of a machine share them among themselves.

    Raises:
        ImportError: nvidia-ml-py is not installed.
        LookupError: there is no NVIDIA driver or device; the message says so.
    """

    series: ClassVar[Series] = Series("device", "(all)")

    def __init__(self, writer: Writer, nvml: Any = None, environment: Mapping[str, str] = os.environ) -> None:
        self._nvml: Any = nvml or import_module("pynvml")
        self._writer = writer
        try:
            self._nvml.nvmlInit()
            self._devices = self._visible(environment)
        except self._nvml.NVMLError as error:
            raise LookupError(f"no NVIDIA driver answers: {sentence(error)}") from error
        if not self._devices:
            raise LookupError("there is no NVIDIA device, or CUDA_VISIBLE_DEVICES hides it")
        self._absent: set[tuple[str, str]] = set()

    def sample(self, now_ns: int) -> Values:
        """Every counter of every device; None for one that fails, which is asked no more where it can never be had."""
        values: Values = []
        for device, handle in self._devices.items():
            for names, counter in self._counters():
                if (device, names[0][0]) in self._absent:
                    continue
                series = [Series("device", name, device, unit) for name, unit in names]
                values += zip(series, self._asked(series, counter, handle), strict=True)
        return values

    def _asked(self, series: list[Series], counter: Counter, handle: Any) -> tuple[float | None, ...]:
        try:
            return counter(handle)
        except (self._nvml.NVMLError, AttributeError) as error:
            never = (getattr(self._nvml, "NVMLError_NotSupported", ()), AttributeError)
            device = series[0].device
            if isinstance(error, never) and device is not None:
                self._absent.add((device, series[0].name))
            for each in series:
                self._writer.lacks(each, sentence(error))
            return (None,) * len(series)

    def _counters(self) -> list[tuple[list[tuple[str, str]], Counter]]:
        """What to ask, each with the names and units of what it answers."""
        nvml = self._nvml
        return [
            (
                [("utilization_share", "share"), ("memory_utilization_share", "share")],
                lambda handle: _pair(nvml.nvmlDeviceGetUtilizationRates(handle), "gpu", "memory", 0.01),
            ),
            (
                [("memory_used_bytes", "bytes"), ("memory_bytes", "bytes")],
                lambda handle: _pair(nvml.nvmlDeviceGetMemoryInfo(handle), "used", "total", 1),
            ),
            ([("power_w", "W")], lambda handle: (nvml.nvmlDeviceGetPowerUsage(handle) / 1000,)),
            ([("energy_j", "J")], lambda handle: (nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,)),
            (
                [("temperature_c", "°C")],
                lambda handle: (nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),),
            ),
            (
                [("sm_clock_mhz", "MHz")],
                lambda handle: (nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),),
            ),
            (
                [("memory_clock_mhz", "MHz")],
                lambda handle: (nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),),
            ),
            (
                [("throttle_reasons", "bit mask")],
                lambda handle: (float(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),),
            ),
        ]

    def _visible(self, environment: Mapping[str, str]) -> dict[str, Any]:
        """Handles by the number that CUDA gives the device in this process, as traces do."""
        listed = environment.get("CUDA_VISIBLE_DEVICES")
        if listed is None:
            handles = [self._by_index(number) for number in range(self._nvml.nvmlDeviceGetCount())]
        else:
            handles = [self._named(name.strip()) for name in listed.split(",") if name.strip() not in ("", "-1")]
        mine = range(len(handles))
        local, together = (_whole(environment.get(name)) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        if local is not None and together is not None and len(handles) >= together:
            # Each device is asked by one rank only: NVML answers one question at a time.
            mine = mine[local::together]
        return {str(number): handles[number] for number in mine}

    def _by_index(self, number: int) -> Any:
        return self._nvml.nvmlDeviceGetHandleByIndex(number)

    def _named(self, name: str) -> Any:
        return self._by_index(int(name)) if name.isdecimal() else self._nvml.nvmlDeviceGetHandleByUUID(name)


def _pair(answer: Any, first: str, second: str, scale: float) -> tuple[float, float]:
    return getattr(answer, first) * scale, getattr(answer, second) * scale


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
