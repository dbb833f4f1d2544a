"""Which cores a rank should keep to: its share of those near its device, whole physical cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stepscope.capture.environment_devices import accelerators
from stepscope.capture.environment_machine import Machine, cpu_list, cpu_list_text
from stepscope.capture.environment_processor import usable_cores

_VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_VENDORS: Final = ("NVIDIA", "AMD", "Habana", "Intel")
"""Which devices are meant where there are several makers': the first of these; desktops have an Intel one besides."""


@dataclass(frozen=True, slots=True)
class CoreShare:
    """The cores for one rank.

    Attributes:
        cores: logical cores to keep to; None to leave the process where it is.
        threads: threads that one operator should use at most; None for no advice.
        why: what was decided and on what grounds, as the end of a sentence.
        possible: False where something is missing that pinning needs.
    """

    cores: frozenset[int] | None
    threads: int | None
    why: str
    possible: bool = True


def core_share(machine: Machine, rank: int, ranks: int) -> CoreShare:
    """The cores that rank number `rank` of `ranks` on this machine should keep to.

    Hyperthreads of one core stay together. Ranks whose devices hang on the same NUMA node share its cores equally;
    where that is not known, all cores are shared equally, in the order of nodes. A process that its launcher has
    bound to some of the cores stays as it is.
    """
    allowed = machine.affinity
    if allowed is None:
        return CoreShare(None, None, "the system does not say which cores the process may use", possible=False)
    granted = _granted(machine)
    if granted and allowed < granted:
        bound = f"left on cores {cpu_list_text(allowed)}, to which it was bound already"
        return CoreShare(None, _quota_limit(machine, allowed), bound)
    nodes = device_nodes(machine)
    node = nodes[rank] if nodes is not None and rank < len(nodes) else None
    if nodes is None or node is None or len(nodes) < ranks or len(machine.nodes) < 2:
        return _equal_share(machine, allowed, rank, ranks)
    neighbours = [other for other in range(ranks) if nodes[other] == node]
    cores = _physical(machine, allowed & machine.nodes.get(node, frozenset()))
    if len(cores) < len(neighbours):
        few = f"NUMA node {node} has {len(cores)} physical cores for the {len(neighbours)} ranks whose devices it holds"
        return CoreShare(None, None, few, possible=False)
    mine = _part(cores, neighbours.index(rank), len(neighbours))
    threads = _thread_limit(machine, len(mine), ranks)
    return _pinned(mine, threads, f"on NUMA node {node}, where the device of local rank {rank} hangs")


def device_nodes(machine: Machine) -> list[int | None] | None:
    """The NUMA node of each device that the process sees, by the devices' numbers; None where that is not known."""
    found = accelerators(machine) or []
    vendor = next((name for name in _VENDORS if any(device.vendor == name for device in found)), None)
    nodes = [device.node for device in found if device.vendor == vendor]
    visible = next((machine.variable(name) for name in _VISIBLE if name in (machine.environ or {})), None)
    if visible is None:
        return nodes or None
    numbers = [word.strip() for word in visible.split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) < len(nodes) for word in numbers):
        return None  # named by UUID, or by MIG instance
    return [nodes[int(word)] for word in numbers] or None


def _equal_share(machine: Machine, allowed: frozenset[int], rank: int, ranks: int) -> CoreShare:
    """A part of all cores, for ranks whose devices' nodes are not known."""
    cores = _physical(machine, allowed)
    if ranks == 1:
        alone = f"left on all its cores ({cpu_list_text(allowed)}): it is alone, and no node is known to be nearer"
        return CoreShare(None, _quota_limit(machine, allowed), alone)
    if len(cores) < ranks:
        few = f"{len(cores)} physical cores are too few to give each of {ranks} ranks its own"
        return CoreShare(None, None, few, possible=False)
    return _pinned(
        _part(cores, rank, ranks), _thread_limit(machine, len(cores) // ranks, ranks), f"rank {rank} of {ranks}"
    )


def _pinned(cores: list[frozenset[int]], threads: int | None, why: str) -> CoreShare:
    logical = frozenset().union(*cores)
    count = "1 physical core" if len(cores) == 1 else f"{len(cores)} physical cores"
    return CoreShare(logical, threads, f"pinned to cores {cpu_list_text(logical)}: {count}, {why}")


def _quota_limit(machine: Machine, cores: frozenset[int]) -> int | None:
    """Threads for an operator of a process that is left on its cores: only a quota calls for fewer than usual."""
    if usable_cores(machine).quota is None:
        return None
    return _thread_limit(machine, len(_physical(machine, cores)), 1)


def _thread_limit(machine: Machine, physical: int, ranks: int) -> int:
    """Threads for an operator, by the physical cores and the rank's part of the quota."""
    quota = usable_cores(machine).quota
    return max(1, min(physical, int(quota / ranks) if quota is not None else physical))


def _physical(machine: Machine, cores: frozenset[int]) -> list[frozenset[int]]:
    """The cores as physical cores (sets of hyperthreads), in the order of NUMA nodes and numbers."""
    groups = {machine.siblings.get(core, frozenset({core})) & cores for core in cores}
    node_of = {core: node for node, members in machine.nodes.items() for core in members}
    return sorted(groups, key=lambda group: (node_of.get(min(group), 0), min(group)))


def _part(cores: list[frozenset[int]], number: int, parts: int) -> list[frozenset[int]]:
    """Part `number` of `parts`, in one piece, as equal as they can be."""
    return cores[number * len(cores) // parts : (number + 1) * len(cores) // parts]


def _granted(machine: Machine) -> frozenset[int]:
    """The cores that the control group or the machine gives; the process may have been bound to fewer."""
    for group in machine.cgroup_folders("cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
            text = machine.read(f"{group}/{name}")
            if text:
                return cpu_list(text)
    return machine.online or frozenset()
