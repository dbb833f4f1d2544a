"""Find what makes timings slow or noisy on this machine, and what to do about it; the settings of the process."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from stepscope import guard
from stepscope.files import shipped
from stepscope.machine.checks import devices, host
from stepscope.machine.checks.host import usable_cores
from stepscope.machine.observed import Check, Machine, Observation, Runtime

__all__ = ["CHECKS", "Machine", "Observation", "Runtime", "inspect_environment", "observations_json"]

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


_OFF: Final = ("", "0", "false", "off", "no", "n")


@dataclass(frozen=True, slots=True)
class Setting:
    """An environment variable that costs speed.

    Attributes:
        why: its effect on timings.
        values: values (lower case) with that effect; empty for any value that does not mean "off".
        problem: whether it makes steps slow; otherwise it is only worth knowing.
    """

    name: str
    why: str
    values: tuple[str, ...] = ()
    problem: bool = True

    def is_on(self, value: str) -> bool:
        """Whether this value of the variable has the effect."""
        value = value.strip().lower()
        return value in self.values if self.values else value not in _OFF


SETTINGS: Final[tuple[Setting, ...]] = (
    Setting("CUDA_LAUNCH_BLOCKING", "every kernel launch waits until the kernel has ended"),
    Setting("HIP_LAUNCH_BLOCKING", "every kernel launch waits until the kernel has ended"),
    Setting("AMD_SERIALIZE_KERNEL", "kernels run one after the other, with waits between them"),
    Setting("AMD_SERIALIZE_COPY", "copies run one after the other, with waits between them"),
    Setting("TORCH_USE_CUDA_DSA", "kernels check assertions on the device, in builds that have them"),
    Setting("PYTORCH_NO_CUDA_MEMORY_CACHING", "every tensor is allocated and freed by the driver, which waits"),
    Setting("TORCH_DISTRIBUTED_DEBUG", "collectives are checked or logged in every step", ("info", "detail")),
    Setting("NCCL_DEBUG", "NCCL logs; TRACE logs every call", ("trace", "info"), problem=False),
    Setting("TORCH_NCCL_BLOCKING_WAIT", "the host waits for every collective", ()),
    Setting("NCCL_BLOCKING_WAIT", "the host waits for every collective", ()),
    Setting("TORCH_COMPILE_DEBUG", "torch.compile writes every intermediate form to disk"),
    Setting("TORCH_COMPILE_DISABLE", "torch.compile does nothing, the model runs eagerly"),
    Setting("TORCHDYNAMO_DISABLE", "torch.compile does nothing, the model runs eagerly"),
    Setting("TORCH_LOGS", "PyTorch logs what this names", problem=False),
    Setting("TORCH_SHOW_CPP_STACKTRACES", "every error collects a C++ stack", problem=False),
    Setting("PYTORCH_ENABLE_MPS_FALLBACK", "operators that Metal lacks silently run on the CPU", problem=False),
    Setting("NVIDIA_TF32_OVERRIDE", "TF32 is off whatever the program says", ("0",)),
    Setting("CUDA_INJECTION64_PATH", "another tool is loaded into every CUDA process"),
    Setting("CUDA_DEVICE_MAX_CONNECTIONS", "all queues of the device share one connection", ("1",), problem=False),
    Setting("CUBLAS_WORKSPACE_CONFIG", "cuBLAS may be restricted to slower, deterministic kernels", problem=False),
    Setting("PYTHONDEVMODE", "Python checks memory and arguments at every call"),
    Setting("PYTHONTRACEMALLOC", "Python keeps a traceback for every allocation"),
)
"""Debugging aids and limits, by variable, as documented by PyTorch, NVIDIA, AMD and Python."""


@dataclass(frozen=True, slots=True)
class SlowVersions:
    """A version range of a package that is known to be slow.

    Attributes:
        package: its name on PyPI, or "python".
        first: the first version of the range, as numbers.
        end: the first version after the range.
        what: what is slow.
        change: what to do.
        source: address of the source.
    """

    package: str
    first: tuple[int, ...]
    end: tuple[int, ...]
    what: str
    change: str
    source: str


def slow_versions() -> list[SlowVersions]:
    return shipped("slow_versions.toml", dict[str, list[SlowVersions]])["versions"]


def debug_settings(machine: Machine) -> list[Observation]:
    """Check the environment for debugging aids."""
    check = Check("debug-settings")
    if machine.environ is None:
        where = f"/{machine.proc}/environ cannot be read"
        return [check.unknown("The process's environment variables cannot be read", where)]
    found = [
        check.says(
            "problem" if setting.problem else "note",
            f"{setting.name} is set: {setting.why}",
            f"{setting.name}={machine.variable(setting.name)}",
            "It is meant for debugging, or left over from another experiment.",
            f"unset {setting.name}",
        )
        for setting in SETTINGS
        if setting.name in machine.environ and setting.is_on(machine.variable(setting.name))
    ]
    fine = check.fine("No debugging aid is set in the environment", f"{len(SETTINGS)} environment variables")
    return found or [fine]


def program_settings(machine: Machine) -> list[Observation]:
    """Check for debugging aids that the program itself switched on; only visible from inside the process."""
    check, runtime = Check("program-settings"), machine.runtime
    if runtime.anomaly_mode is None:
        return [
            check.unknown(
                "Whether the program sets anomaly mode, sync debug mode or deterministic algorithms is not known",
                "they are set inside the program: look for set_detect_anomaly, set_sync_debug_mode and "
                "use_deterministic_algorithms; stepscope run --quiet-machine reads them while it runs",
            )
        ]
    aids = (
        (runtime.anomaly_mode, "Anomaly mode is on", "each operator keeps a traceback and is searched for NaN"),
        (bool(runtime.sync_debug_mode), "Sync debug mode is on", "each synchronisation is checked and reported"),
        (bool(runtime.deterministic), "Only deterministic algorithms are used", "they are slower, and some wait"),
        (bool(runtime.tracer), f"{runtime.tracer or 'Nothing'} traces every Python call", "Python runs much slower"),
    )
    found = [
        check.problem(f"{title}: {why}", "read in the process", "It slows every step down.", "Turn it off.")
        for is_on, title, why in aids
        if is_on
    ]
    return found or [check.fine("The program has switched on no debugging aid", "read in the process")]


def garbage_collector(machine: Machine) -> Observation:
    """Check whether Python's garbage collector may run within a step."""
    check, runtime = Check("garbage-collector"), machine.runtime
    if runtime.collector is None:
        return check.unknown("The state of the garbage collector is not known", "only the process itself can tell")
    read = f"gc.isenabled(): {runtime.collector}; thresholds {runtime.collector_thresholds}"
    if not runtime.collector:
        return check.fine("The garbage collector is off", read)
    return check.note(
        "The garbage collector runs whenever enough objects were made",
        read,
        "A full collection stops the launching thread in an arbitrary step, longer the more objects there are; "
        "in a distributed run all ranks wait for the one that collects.",
        "stepscope run --quiet-machine holds it off while steps are recorded; in your code: gc.freeze() after "
        "building the model, or gc.disable() and gc.collect() every hundred steps.",
    )


def versions(machine: Machine) -> list[Observation]:
    """Check for versions that are known to be slow."""
    check, runtime = Check("versions"), machine.runtime
    if runtime.python is None or runtime.versions is None:
        return [check.unknown("The process's versions are not known", "it may use another Python")]
    installed = {"python": runtime.python, **runtime.versions}
    read = ", ".join(f"{name} {version}" for name, version in installed.items())
    found = [
        check.note(f"{row.package} {installed[row.package]}: {row.what}", read, f"Source: {row.source}", row.change)
        for row in slow_versions()
        if row.package in installed and row.first <= release(installed[row.package]) < row.end
    ]
    return found or [check.fine("No version is known to be slow", read)]


def power_supply(machine: Machine) -> Observation:
    """Check whether a laptop runs on its battery."""
    check, folder = Check("power-supply"), "sys/class/power_supply"
    if not (machine.root / folder).is_dir():
        return check.unknown("The power supply cannot be read", f"/{folder} does not exist")
    supplies = [f"{folder}/{path.name}" for path in machine.matching(folder, "*")]
    mains = [path for path in supplies if machine.read(f"{path}/type") == "Mains"]
    if not mains:
        return check.fine("No battery is known to power the machine", f"/{folder}: no mains adapter listed")
    if any(machine.number(f"{path}/online") == 1 for path in mains):
        return check.fine("The machine runs on mains power", f"/{folder}")
    return check.problem(
        "The machine runs on its battery",
        f"/{folder}: mains adapter not connected",
        "Processor and device lower their clocks to save energy.",
        "Connect the power supply.",
    )


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: "2.9.0+cu128" is (2, 9, 0)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


_Check: TypeAlias = Callable[[Machine], Observation | list[Observation]]

CHECKS: Final[tuple[_Check, ...]] = (
    host.threads,
    host.cpu_quota,
    host.other_load,
    host.governor,
    host.turbo,
    host.thermal_throttling,
    devices.device_state,
    devices.numa_affinity,
    devices.numa_balancing,
    host.shared_memory,
    host.memory_limit,
    host.memory_pressure,
    host.swap,
    host.huge_pages,
    host.allocator,
    debug_settings,
    program_settings,
    garbage_collector,
    versions,
    power_supply,
)
"""All checks, in the order of the report."""

_ORDER: Final = ("problem", "note", "fine", "unknown")


def inspect_environment(machine: Machine, others: Sequence[Observation] = ()) -> list[Observation]:
    """Run every check on the machine and the process; problems come first, then notes, fine and unknown.

    Args:
        others: observations of other parts of stepscope, put in order with the checks'.
    """
    found = [*others]
    for check in CHECKS:
        said = check(machine)
        found.extend(said if isinstance(said, list) else [said])
    return sorted(found, key=lambda observation: _ORDER.index(observation.verdict))


def observations_json(observations: Sequence[Observation]) -> list[dict[str, Any]]:
    """Convert observations to JSON values with keys check, verdict, title, read, why, change."""
    return [asdict(observation) for observation in observations]
