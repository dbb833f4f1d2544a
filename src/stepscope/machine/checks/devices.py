"""Checks of accelerators: their NUMA node, other processes that use them, and what lowers their clocks."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from stepscope.machine.checks.host import gib
from stepscope.machine.observed import Check, Machine, Observation, cpu_list_text

_VENDORS: Final = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel", "0x1da3": "Habana"}
_CLASSES: Final = ("0x0300", "0x0302", "0x0380", "0x1200")
"""PCI classes of display controllers, 3D controllers and processing accelerators."""
_NONE_FOUND: Final = f"/sys/bus/pci/devices: none of {', '.join(_VENDORS.values())}"
_LOAD: Final = Check("device-load")
_CLOCKS: Final = Check("device-clocks")
_PERSISTENCE: Final = Check("device-persistence")
_POWER: Final = Check("device-power")
_BUSY_SHARE: Final = 0.05
_SLOWDOWNS: Final = {
    0x8: "a hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "the external power brake",
    0x4: "the power limit",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons (NVIDIA's NVML reference) that mean a lower clock under load."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device on the PCI bus.

    Attributes:
        address: such as "0000:17:00.0".
        node: its NUMA node; None if the machine does not report it.
    """

    address: str
    vendor: str
    node: int | None


@dataclass(frozen=True, slots=True)
class DeviceState:
    """The current state of a device as its driver reports it; None for unknown values.

    Attributes:
        utilization: busy share of the driver's last sample period, 0 to 1.
        others: processes other than ours that use it: (process, bytes or None).
        slowdowns: why its clock is lowered, in words.
        persistence: whether the driver keeps it initialised between processes.
        power_limit_w, default_power_limit_w: in watts.
    """

    index: int
    name: str
    utilization: float | None = None
    others: tuple[tuple[int, int | None], ...] | None = None
    slowdowns: tuple[str, ...] | None = None
    persistence: bool | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None


def accelerators(machine: Machine) -> list[Accelerator] | None:
    """Return the accelerators on the PCI bus, by address; None if the bus cannot be read."""
    if not (machine.root / "sys/bus/pci/devices").is_dir():
        return None
    found = []
    for path in machine.matching("sys/bus/pci/devices", "*"):
        folder = f"sys/bus/pci/devices/{path.name}"
        kind, vendor = machine.read(f"{folder}/class") or "", machine.read(f"{folder}/vendor") or ""
        if kind[:6] in _CLASSES and vendor in _VENDORS:
            node = machine.number(f"{folder}/numa_node")
            found.append(Accelerator(path.name, _VENDORS[vendor], node if node is not None and node >= 0 else None))
    return found


def numa_affinity(machine: Machine) -> Observation:
    """Check whether the process may run on another NUMA node than its device."""
    check, found = Check("device-affinity"), accelerators(machine)
    if found is None or not machine.nodes or machine.affinity is None:
        missing = (
            "/sys/bus/pci/devices"
            if found is None
            else "/sys/devices/system/node"
            if not machine.nodes
            else "allowed cores"
        )
        return check.unknown("The device's NUMA node cannot be read", f"{missing} cannot be read")
    if not found:
        return check.fine("No device has a NUMA node that cores could be far from", _NONE_FOUND)
    if len(machine.nodes) == 1:
        return check.fine("All cores are on one NUMA node", "/sys/devices/system/node")
    read = "; ".join(
        f"{device.vendor} {device.address}: node {'unknown' if device.node is None else device.node}"
        for device in found
    )
    near = {device.node for device in found}
    if None in near:
        return check.unknown("The device's NUMA node is not known", read)
    own_nodes = {node for node, cores in machine.nodes.items() if cores & machine.affinity}
    read += f"; allowed cores {cpu_list_text(machine.affinity)} on nodes {', '.join(map(str, sorted(own_nodes)))}"
    if len(own_nodes) == 1 and own_nodes <= near:
        return check.fine("The process runs on its device's NUMA node", read)
    cores = machine.nodes.get(found[0].node if found[0].node is not None else -1, frozenset())
    return check.says(
        "problem" if not own_nodes & near else "note",
        "The process runs on another NUMA node than its device"
        if not own_nodes & near
        else f"The process may run on any of {len(own_nodes)} NUMA nodes",
        read,
        "Launches and copies from another node cross the link between the processors: later, slower and less steady.",
        "stepscope run --quiet-machine pins each rank; by hand, for the first device: "
        f"taskset -c {cpu_list_text(cores)}.",
    )


def numa_balancing(machine: Machine) -> Observation:
    """Check whether the kernel moves memory between NUMA nodes while programs run."""
    check, path = Check("numa-balancing"), "proc/sys/kernel/numa_balancing"
    value = machine.number(path)
    if len(machine.nodes) == 1:
        return check.fine("There is one NUMA node, nothing to balance", "/sys/devices/system/node")
    if value is None:
        return check.unknown("NUMA balancing cannot be read", f"/{path} does not exist")
    if value == 0:
        return check.fine("The kernel does not move memory between NUMA nodes", f"/{path}: 0")
    return check.note(
        "The kernel moves memory between NUMA nodes",
        f"/{path}: {value}",
        "It unmaps pages now and then to see who uses them; touching one again costs a page fault.",
        "For processes that are pinned anyway, as root: sysctl kernel.numa_balancing=0.",
    )


def device_state(machine: Machine) -> list[Observation]:
    """Check who else uses the devices, and what lowers their clocks."""
    try:
        return [observation for state in nvidia_states(machine.process) for observation in judged(state)]
    except (ImportError, OSError) as error:
        why = str(error)
    found, title = accelerators(machine), "The load on the devices cannot be read"
    if found is None:
        return [_LOAD.unknown(title, f"{why}; /sys/bus/pci/devices does not exist")]
    if not found:
        return [_LOAD.fine("There is no accelerator", _NONE_FOUND)]
    vendors = ", ".join(sorted({device.vendor for device in found}))
    return [_LOAD.unknown(title, f"devices of {vendors}; {why}")]


def judged(state: DeviceState) -> list[Observation]:
    name = f"device {state.index} ({state.name})"
    return [_load(state, name), _clocks(state, name), *_settings(state, name)]


def nvidia_states(process: int | None = None) -> list[DeviceState]:
    """Return the state of every NVIDIA device, through nvidia-ml-py.

    Raises ImportError if nvidia-ml-py is not installed, OSError if there is no working driver.
    """
    try:
        pynvml: Any = import_module("pynvml")
    except ImportError as error:
        raise ImportError("nvidia-ml-py is not installed: pip install nvidia-ml-py") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise OSError(f"the NVIDIA driver does not answer: {error}") from error
    try:
        return [_nvidia_state(pynvml, index, process) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _nvidia_state(nvml: Any, index: int, process: int | None) -> DeviceState:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def asked(question: str) -> Any:
        """Query NVML; None if the device does not support the query."""
        try:
            return getattr(nvml, question)(handle)
        except nvml.NVMLError:
            return None

    name = asked("nvmlDeviceGetName")
    rates, running = asked("nvmlDeviceGetUtilizationRates"), asked("nvmlDeviceGetComputeRunningProcesses")
    reasons, persistence = asked("nvmlDeviceGetCurrentClocksThrottleReasons"), asked("nvmlDeviceGetPersistenceMode")
    limit, default = asked("nvmlDeviceGetPowerManagementLimit"), asked("nvmlDeviceGetPowerManagementDefaultLimit")
    return DeviceState(
        index,
        name.decode() if isinstance(name, bytes) else str(name),
        utilization=None if rates is None else rates.gpu / 100,
        others=None
        if running is None
        else tuple((entry.pid, entry.usedGpuMemory) for entry in running if entry.pid != process),
        slowdowns=None if reasons is None else tuple(why for bit, why in _SLOWDOWNS.items() if reasons & bit),
        persistence=None if persistence is None else bool(persistence),
        power_limit_w=None if limit is None else limit / 1000,
        default_power_limit_w=None if default is None else default / 1000,
    )


def _load(state: DeviceState, name: str) -> Observation:
    if state.utilization is None and state.others is None:
        return _LOAD.unknown(f"The load on {name} cannot be read", "NVML does not say")
    used = "unknown" if state.utilization is None else f"{state.utilization:.0%}"
    processes = ", ".join(
        f"process {process}" + ("" if used_bytes is None else f" ({gib(used_bytes)})")
        for process, used_bytes in state.others or ()
    )
    read = f"NVML: utilization {used}; " + (processes or "no other process")
    if not state.others and (state.utilization or 0) <= _BUSY_SHARE:
        return _LOAD.fine(f"No other process uses {name}", read)
    return _LOAD.problem(
        f"Other processes use {name}: {used} busy",
        read,
        "Kernels of several processes take turns on the device, and its memory and clocks are shared.",
        "Stop the other processes or choose another device with CUDA_VISIBLE_DEVICES.",
    )


def _clocks(state: DeviceState, name: str) -> Observation:
    if state.slowdowns is None:
        return _CLOCKS.unknown(f"Whether the clock of {name} is lowered cannot be read", "NVML does not say")
    if not state.slowdowns:
        return _CLOCKS.fine(f"Nothing lowers the clock of {name}", "NVML: no reason")
    return _CLOCKS.problem(
        f"The clock of {name} is lowered by {' and '.join(state.slowdowns)}",
        "NVML: current reasons",
        "A lower clock makes every kernel slower, and it changes with temperature and load.",
        "Improve cooling or raise the power limit; to compare runs, lock the clocks: nvidia-smi --lock-gpu-clocks.",
    )


def _settings(state: DeviceState, name: str) -> list[Observation]:
    found = []
    if state.persistence is False:
        found.append(
            _PERSISTENCE.note(
                f"The driver does not keep {name} initialised between processes",
                "NVML: persistence mode off",
                "Each process then waits a second or more for the device to be initialised; steps are not affected.",
                "As root: nvidia-smi --persistence-mode=1.",
            )
        )
    if state.power_limit_w and state.default_power_limit_w and state.power_limit_w < state.default_power_limit_w:
        found.append(
            _POWER.note(
                f"The power limit of {name} is {state.power_limit_w:.0f} W; the default is "
                f"{state.default_power_limit_w:.0f} W",
                "NVML: power management limit",
                "Under full load the clock is lowered to stay below it.",
                "As root: nvidia-smi --power-limit, if the cooling allows it.",
            )
        )
    return found
