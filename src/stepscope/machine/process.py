"""Torch settings and performance figures of the process."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from stepscope import guard
from stepscope.machine.checks.processor import usable_cores
from stepscope.machine.observed import Machine

Value = str | int | float | bool | None

_ALLOCATORS: Final = ("jemalloc", "tcmalloc", "mimalloc", "tbbmalloc", "hoard")
_CARD_CLASSES: Final = ("0x0302", "0x1200")
"""PCI classes of 3D controllers and of processing accelerators."""
_LONGEST_MAPS: Final = 4 << 20


def torch_settings() -> dict[str, Value]:
    """Return torch settings that affect its speed; starts no device."""
    import torch

    readings: dict[str, Callable[[], Any]] = {
        "version": lambda: str(torch.__version__),
        "threads": torch.get_num_threads,
        "interop_threads": torch.get_num_interop_threads,
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "matmul_allow_tf32": torch._C._get_cublas_allow_tf32,
        "cudnn_allow_tf32": torch._C._get_cudnn_allow_tf32,
        "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
        "cudnn_deterministic": lambda: torch.backends.cudnn.deterministic,
        "deterministic": torch.are_deterministic_algorithms_enabled,
        "anomaly_detection": torch.is_anomaly_enabled,
        "anomaly_checks_nan": torch.is_anomaly_check_nan_enabled,
        "default_dtype": lambda: str(torch.get_default_dtype()),
        # Not imported for this: the import takes seconds, and a program that compiles has already done it.
        "recompile_limit": lambda: sys.modules["torch._dynamo.config"].recompile_limit,
    }
    return _read(readings)


def process_figures(machine: Machine | None = None) -> dict[str, Value]:
    """Return figures of the process and of its machine."""
    machine = machine or Machine()
    readings: dict[str, Callable[[], Any]] = {
        "processors": os.cpu_count,
        "usable_processors": lambda: usable_cores(machine).usable,
        "processor_quota": lambda: usable_cores(machine).quota,
        "numa_nodes": lambda: len(machine.matching("sys/devices/system/node", "node[0-9]*")) or None,
        "numa_processors": lambda: _numa_processors(machine),
        "device_numa_nodes": lambda: _device_nodes(machine),
        "processor_max_mhz": lambda: _thousandth(
            machine.number("sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
        ),
        "memory_bytes": lambda: memory_bytes(machine),
        "threads": lambda: len(os.listdir(machine.root / f"{machine.proc}/task")),
        "allocator": lambda: _allocator(machine.root / f"{machine.proc}/maps"),
        "collector_enabled": gc.isenabled,
        "collector_thresholds": lambda: ",".join(map(str, gc.get_threshold())),
        "collector_frozen": gc.get_freeze_count,
        "local_world_size": lambda: _whole(os.environ.get("LOCAL_WORLD_SIZE")),
        "python": lambda: sys.version.split()[0],
    }
    return _read(readings)


def memory_bytes(machine: Machine) -> int | None:
    """Return the process's memory limit: the machine's memory, or the tightest limit of its control groups."""
    total = machine.fields("proc/meminfo").get("MemTotal", "").removesuffix("kB").strip()
    limits = [int(total) * 1024] if total.isdecimal() else []
    for group in machine.cgroup_folders("memory"):
        limit = machine.number(f"{group}/memory.max") or machine.number(f"{group}/memory.limit_in_bytes")
        limits += [limit] if limit else []
    return min(limits, default=None)


def _read(readings: dict[str, Callable[[], Any]]) -> dict[str, Value]:
    """Call each reading; leave out those that this torch version or system does not support."""
    found: dict[str, Value] = {}
    for name, reading in readings.items():
        with guard.attempt():
            value = reading()
            if isinstance(value, (str, int, float, bool)):
                found[name] = value
    return found


def _allocator(maps: Path) -> str | None:
    """Return the host's memory allocator, from the libraries that the process has loaded."""
    with maps.open("rb") as file:
        text = file.read(_LONGEST_MAPS).decode("utf-8", "replace")
    preloaded = next((name for name in _ALLOCATORS if f"lib{name}" in text), None)
    if preloaded is not None:
        return preloaded
    return "musl" if "/ld-musl" in text else "glibc" if "libc.so.6" in text or "/libc-2" in text else None


def _numa_processors(machine: Machine) -> str | None:
    """Return the cores of each NUMA node in the kernel's notation, such as "0-15;16-31"; None for a single node."""
    folders = machine.matching("sys/devices/system/node", "node[0-9]*")
    folders.sort(key=lambda folder: int(folder.name.removeprefix("node")))
    lists = [machine.read(str(folder.relative_to(machine.root) / "cpulist")) or "" for folder in folders]
    return ";".join(lists) if len(lists) > 1 else None


def _device_nodes(machine: Machine) -> str | None:
    """Return NUMA nodes of the machine's GPUs and accelerators, such as "0,1"; None if no card reports one."""
    nodes = set()
    for folder in machine.matching("sys/bus/pci/devices", "*"):
        place = folder.relative_to(machine.root)
        if (machine.read(f"{place}/class") or "").startswith(_CARD_CLASSES):
            node = machine.number(f"{place}/numa_node")
            if node is not None and node >= 0:
                nodes.add(node)
    return ",".join(map(str, sorted(nodes))) or None


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None
