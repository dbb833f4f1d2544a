"""Make a process quiet: pinned to its cores, no garbage collection while steps are recorded, fixed seeds on request.

Nothing outside the process is changed, and everything but the seeds is undone.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from stepscope import guard
from stepscope.machine.checks.devices import accelerators
from stepscope.machine.checks.host import usable_cores
from stepscope.machine.environment import program_settings
from stepscope.machine.observed import Machine, Runtime, cpu_list, cpu_list_text
from stepscope.threads import Lock

__all__ = ["QuietReport", "QuietSteps", "prepare_quiet", "quiet_steps"]


_VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_VENDORS: Final = ("NVIDIA", "AMD", "Habana", "Intel")
"""Vendors in order of preference on machines with several; desktops often have an Intel GPU as well."""


@dataclass(frozen=True, slots=True)
class CoreShare:
    """The cores for one rank.

    Attributes:
        cores: logical cores to pin to; None to leave the process where it is.
        threads: maximum threads of one operator; None for no advice.
        why: the decision and its reasons, as the end of a sentence.
        possible: False if something that pinning needs is missing.
    """

    cores: frozenset[int] | None
    threads: int | None
    why: str
    possible: bool = True


def core_share(machine: Machine, rank: int, ranks: int) -> CoreShare:
    """Choose the cores for rank number `rank` of `ranks` on this machine.

    Hyperthreads of one core stay together. Ranks whose devices are on the same NUMA node share its cores equally; if
    the nodes are unknown, all cores are shared equally, in the order of nodes. A process that its launcher has already
    pinned stays as it is.
    """
    allowed = machine.affinity
    if allowed is None:
        return CoreShare(None, None, "the system does not say which cores the process may use", possible=False)
    granted = _available_cores(machine)
    if granted and allowed < granted:
        bound = f"left on cores {cpu_list_text(allowed)}, to which it was already bound"
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
    share = _part(cores, neighbours.index(rank), len(neighbours))
    threads = _thread_limit(machine, len(share), ranks)
    return _pinned(share, threads, f"on NUMA node {node}, which the device of local rank {rank} is attached to")


def device_nodes(machine: Machine) -> list[int | None] | None:
    """Return the NUMA node of each visible device, in the order of the devices' numbers; None if unknown."""
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
    """Divide all cores among ranks whose devices' nodes are unknown."""
    cores = _physical(machine, allowed)
    if ranks == 1:
        alone = f"left on all its cores ({cpu_list_text(allowed)}): it is alone, and no NUMA node is known to be closer"
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
    """Return the thread limit of a process that is not pinned; only a CPU quota requires one."""
    if usable_cores(machine).quota is None:
        return None
    return _thread_limit(machine, len(_physical(machine, cores)), 1)


def _thread_limit(machine: Machine, physical: int, ranks: int) -> int:
    """Return the thread limit of an operator, from the physical cores and the rank's part of the quota."""
    quota = usable_cores(machine).quota
    return max(1, min(physical, int(quota / ranks) if quota is not None else physical))


def _physical(machine: Machine, cores: frozenset[int]) -> list[frozenset[int]]:
    """Group the cores by physical core (sets of hyperthreads), in the order of NUMA nodes and numbers."""
    groups = {machine.siblings.get(core, frozenset({core})) & cores for core in cores}
    node_of = {core: node for node, members in machine.nodes.items() for core in members}
    return sorted(groups, key=lambda group: (node_of.get(min(group), 0), min(group)))


def _part(cores: list[frozenset[int]], number: int, parts: int) -> list[frozenset[int]]:
    """Return part `number` of `parts`: contiguous and nearly equal in size."""
    return cores[number * len(cores) // parts : (number + 1) * len(cores) // parts]


def _available_cores(machine: Machine) -> frozenset[int]:
    """Return the cores of the control group or the machine; the process's own affinity may be narrower."""
    for group in machine.cgroup_folders("cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
            text = machine.read(f"{group}/{name}")
            if text:
                return cpu_list(text)
    return machine.online or frozenset()


_SEEDERS: Final[dict[str, Callable[[Any, int], object]]] = {
    "numpy": lambda numpy, seed: numpy.random.seed(seed % 2**32),
    "torch": lambda torch, seed: torch.manual_seed(seed),
}


class FixedSeeds:
    """Seeds the random generators of Python, NumPy and PyTorch; the latter two not before they are imported.

    `stop()` drops those that were never imported. Numbers that were already drawn are unaffected.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.done = f"seeds of Python's, NumPy's and PyTorch's random numbers fixed to {seed}, the same on every rank"
        self.missing = (
            "the order of sets of strings still differs from run to run: set PYTHONHASHSEED before Python begins"
            if os.environ.get("PYTHONHASHSEED", "random") == "random"
            else ""
        )
        random.seed(seed)
        pending = {}
        for name, seeder in _SEEDERS.items():
            module = sys.modules.get(name)
            if module is None:
                pending[name] = seeder
            else:
                seeder(module, seed)
        self._finder = _SeedWhenImported(pending, seed)
        sys.meta_path.insert(0, self._finder)

    def stop(self) -> None:
        """Remove the import hook."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)


class _SeedWhenImported(MetaPathFinder):
    """Calls a package's seeder right after the package is first imported."""

    def __init__(self, pending: dict[str, Callable[[Any, int], object]], seed: int) -> None:
        self._pending = pending
        self._seed = seed
        self._searching = threading.local()

    @guard.entry
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the package's spec with a loader that seeds it; None for every other module."""
        if fullname not in self._pending or getattr(self._searching, "now", False):
            return None
        self._searching.now = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.now = False
        if spec is not None and spec.loader is not None:
            self._wrap(fullname, spec.loader)
        return spec

    def _wrap(self, name: str, loader: Any) -> None:
        original = loader.exec_module
        loader.exec_module = guard.around(original, after=functools.partial(self._imported, name, loader, original))

    @guard.entry
    def _imported(self, name: str, loader: Any, original: Any, _: None, __: None, module: ModuleType) -> None:
        loader.exec_module = original
        seeder = self._pending.pop(name, None)
        if seeder is not None:
            seeder(module, self._seed)


_THREADS_VARIABLE: Final = "OMP_NUM_THREADS"


@dataclass
class QuietReport:
    """What `prepare_quiet` did to this process.

    Attributes:
        cores: the logical cores it was pinned to; empty if it was not pinned.
        done: what was done, a phrase each.
        refused: what could not be done and why, a phrase each.
    """

    cores: tuple[int, ...] = ()
    done: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    _undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False, compare=False)

    def sentences(self) -> list[str]:
        return [f"Quiet machine: {phrase}." for phrase in self.done] + [
            f"Quiet machine, not done: {phrase}." for phrase in self.refused
        ]

    def undo(self) -> None:
        """Restore the process's cores and threads; may be called again."""
        self._undo.close()


@dataclass
class QuietSteps:
    """What `quiet_steps` did, a phrase each; `noise` lists debugging aids of the program that disturb its timings."""

    done: list[str] = field(default_factory=list)
    noise: list[str] = field(default_factory=list)


def prepare_quiet(
    rank: int, local_world_size: int, *, seed: int | None = None, machine: Machine | None = None
) -> QuietReport:
    """Pin the process to its share of the cores and fix seeds, before the program begins; never raises OSError.

    Args:
        rank: local or global rank of the process; ranks are assumed to be numbered machine by machine.
        local_world_size: processes of the run on this machine.
        seed: for the random generators of Python, NumPy and PyTorch; None leaves them alone.
        machine: where to read the cores and devices from; this machine by default.
    """
    report = QuietReport()
    ranks = max(1, local_world_size)
    share = core_share(machine or Machine(), rank % ranks, ranks)
    if not share.possible:
        report.refused.append(f"the process is not pinned: {share.why}")
    elif share.cores is None:
        report.done.append(share.why)
    else:
        _pin(report, share)
    if share.possible and share.threads is not None:
        _limit_threads(report, share.threads)
    if seed is not None:
        seeds = FixedSeeds(seed)
        report.done.append(seeds.done)
        report.refused.extend([seeds.missing] if seeds.missing else [])
        report._undo.callback(seeds.stop)
    return report


@contextlib.contextmanager
def quiet_steps() -> Iterator[QuietSteps]:
    """Hold garbage collection off inside the block and restore the collector exactly as it was.

    All garbage is collected once and the live objects are frozen, so that the collection after the block has little to
    scan. Blocks may be nested and may overlap in several threads: the last one to end restores.
    """
    report = QuietSteps(noise=_debugging_aids())
    report.done.append(_COLLECTOR.hold())
    try:
        yield report
    finally:
        _COLLECTOR.release()


class _HeldCollector:
    """The garbage collector of the process, held off while at least one user needs it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._holders = 0
        self._was_on = False
        self._froze = False

    def hold(self) -> str:
        gc.collect()  # runs the program's finalizers, so not under the lock
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._was_on = gc.isenabled()
                # Objects that the program froze cannot be distinguished from ours: unfreezing would
                # free them too.
                self._froze = gc.get_freeze_count() == 0
                if self._froze:
                    gc.freeze()
                gc.disable()
            frozen = f"{gc.get_freeze_count():,} objects frozen" if self._froze else "the program's frozen objects kept"
            return f"garbage collection held off during the recorded steps, {frozen}"

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            if self._froze:
                gc.unfreeze()
            if self._was_on:
                gc.enable()
            else:
                gc.disable()

    @guard.entry
    def forget(self) -> None:
        """Restore it in a forked child, which does not have the threads that held it."""
        if self._holders:
            self._holders = 1
            self.release()


_COLLECTOR: Final = _HeldCollector()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_COLLECTOR.forget)


def _pin(report: QuietReport, share: CoreShare) -> None:
    """Pin every thread of the process to the share's cores."""
    if not hasattr(os, "sched_setaffinity"):
        report.refused.append(f"the process is not pinned: {sys.platform} does not support it")
        return
    assert share.cores is not None
    own = os.sched_getaffinity(0)
    before: dict[int, set[int]] = {}
    try:
        for thread in _threads():
            with contextlib.suppress(ProcessLookupError):
                before[thread] = os.sched_getaffinity(thread)
                os.sched_setaffinity(thread, share.cores)
    except OSError as error:
        _restore(before, own)
        report.refused.append(f"the process is not pinned: the system refuses ({error.strerror})")
        return
    report.cores = tuple(sorted(share.cores))
    report.done.append(f"{share.why}; threads and processes that it starts stay there too")
    report._undo.callback(_restore, before, own)


def _restore(before: dict[int, set[int]], own: set[int]) -> None:
    """Restore each thread's cores; threads begun since get the main thread's."""
    for thread in _threads():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, before.get(thread, own))


def _threads() -> list[int]:
    try:
        return [int(path.name) for path in Path("/proc/self/task").iterdir()]
    except OSError:
        return [0]


def _limit_threads(report: QuietReport, limit: int) -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        before = torch.get_num_threads()
        if before > limit:
            torch.set_num_threads(limit)
            report.done.append(f"PyTorch uses {limit} thread{'s' if limit > 1 else ''} instead of {before}")
            report._undo.callback(torch.set_num_threads, before)
    elif _THREADS_VARIABLE not in os.environ:
        os.environ[_THREADS_VARIABLE] = str(limit)
        report.done.append(f"{_THREADS_VARIABLE}={limit} is set, to match its cores")
        report._undo.callback(os.environ.pop, _THREADS_VARIABLE, None)


def _debugging_aids() -> list[str]:
    """Return the debugging aids that the running program has switched on."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "is_anomaly_enabled"):
        return []
    from dataclasses import replace

    # A recording itself may trace Python calls.
    runtime = replace(Runtime.of_this_process(torch=torch), tracer="")
    return [found.title for found in program_settings(Machine(runtime=runtime)) if found.verdict == "problem"]
