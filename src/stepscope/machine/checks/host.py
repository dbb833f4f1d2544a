"""Checks of the CPU (clock, cores, threads, quota, other load) and of memory (limits, swap, pages, the allocator)."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from typing import Final

from stepscope.machine.observed import Check, Machine, Observation, cpu_list_text

_CPU: Final = "sys/devices/system/cpu"
_LOAD: Final = Check("cpu-load")
_STOLEN: Final = Check("stolen-time")
_SAMPLE_S: Final = 0.5
_LOAD_CORES: Final = 0.5
"""Load of other processes, in cores, above which it is a problem."""
_NOTICEABLE_SHARE: Final = 0.01


def governor(machine: Machine) -> Observation:
    check, where = Check("cpu-governor"), f"/{_CPU}/cpu*/cpufreq/scaling_governor"
    paths = machine.matching(_CPU, "cpu[0-9]*/cpufreq/scaling_governor")
    found = Counter(filter(None, (machine.read(str(path.relative_to(machine.root))) for path in paths)))
    if not found:
        return check.unknown("The CPU governor cannot be read", f"{where} does not exist; virtual machines hide it")
    read = f"{where}: " + ", ".join(f"{name} on {count}" for name, count in found.most_common())
    driver = machine.read(f"{_CPU}/cpu0/cpufreq/scaling_driver") or ""
    if set(found) == {"performance"}:
        return check.fine("The CPU governor is performance", read)
    name = ", ".join(sorted(set(found) - {"performance"}))
    cores = sum(count for name, count in found.items() if name != "performance")
    scales = driver in ("intel_pstate", "amd-pstate-epp")
    return check.says(
        "note" if scales else "problem",
        f"The CPU governor is {name} on {cores} of {sum(found.values())} cores",
        read + (f"; driver {driver}" if driver else ""),
        "The clock follows the load with a delay: after sleeping, or on a core that was idle, a thread runs slower "
        "at first, so steps limited by the CPU vary."
        + (f" With {driver}, {name} still reaches the full clock, only later." if scales else ""),
        "As root: cpupower frequency-set -g performance. Without root, keep the process on few cores: "
        "stepscope run --quiet-machine, or taskset.",
    )


def turbo(machine: Machine) -> Observation:
    """Check whether the clock may exceed its base frequency."""
    check = Check("cpu-turbo")
    intel, other = machine.number(f"{_CPU}/intel_pstate/no_turbo"), machine.number(f"{_CPU}/cpufreq/boost")
    if intel is None and other is None:
        return check.unknown(
            "Whether the clock is boosted cannot be read",
            f"neither /{_CPU}/intel_pstate/no_turbo nor /{_CPU}/cpufreq/boost exists",
        )
    on = intel == 0 if intel is not None else other == 1
    read = f"/{_CPU}/intel_pstate/no_turbo: {intel}" if intel is not None else f"/{_CPU}/cpufreq/boost: {other}"
    if not on:
        return check.fine("The clock is not boosted, so it is steady", read)
    return check.note(
        "The clock is boosted above its base",
        read,
        "The highest clock depends on the temperature and on how many cores are busy, so timings drift.",
        "Leave it on for training; to measure small differences, warm up first and alternate between the programs.",
    )


def thermal_throttling(machine: Machine) -> Observation:
    check, where = Check("cpu-throttling"), f"/{_CPU}/cpu*/thermal_throttle/core_throttle_count"
    paths = machine.matching(_CPU, "cpu[0-9]*/thermal_throttle/core_throttle_count")
    counts = [machine.number(str(path.relative_to(machine.root))) for path in paths]
    known = [count for count in counts if count is not None]
    if not known:
        return check.unknown("Thermal throttling cannot be read", f"{where} does not exist")
    if not any(known):
        return check.fine("No core has been throttled by heat", f"{where}: 0 on all {len(known)} cores")
    return check.note(
        f"Heat has throttled {sum(count > 0 for count in known)} of {len(known)} cores since the machine started",
        f"{where}: {max(known):,} times on the most affected core",
        "A core that gets too hot lowers its clock, and steps take longer until it has cooled down.",
        "Check whether the count rises during a run; if it does, improve the cooling or lower the load.",
    )


@dataclass(frozen=True, slots=True)
class Cores:
    """The logical cores that a process can use.

    Attributes:
        allowed: the CPU affinity; None if unknown.
        quota: CPU quota of its control groups, in cores; None for no limit.
        throttled: (periods in which the quota ran out, all periods); None if unknown or without a quota.
        read: where that was read.
    """

    allowed: int | None
    quota: float | None
    throttled: tuple[int, int] | None
    read: str

    @property
    def usable(self) -> int | None:
        """The number of whole cores that the process can keep busy; None if unknown."""
        if self.allowed is None:
            return None
        return max(1, min(self.allowed, int(self.quota) if self.quota is not None else self.allowed))


def usable_cores(machine: Machine) -> Cores:
    """Return the cores of the process, from its affinity and the quota of its control groups."""
    quota, folder = None, ""
    for group in machine.cgroup_folders("cpu"):
        granted = _quota(machine, group)
        if granted is not None and (quota is None or granted < quota):
            quota, folder = granted, group
    throttled = None
    if quota is not None:
        counters = machine.fields(f"{folder}/cpu.stat")
        if "nr_periods" in counters:
            throttled = int(counters.get("nr_throttled", 0)), int(counters["nr_periods"])
    allowed = len(machine.affinity) if machine.affinity is not None else None
    read = (
        f"allowed cores {cpu_list_text(machine.affinity)}" if machine.affinity is not None else "allowed cores unknown"
    )
    read += f"; quota of {quota:g} cores in /{folder}" if quota is not None else ""
    return Cores(allowed, quota, throttled, read)


def cpu_quota(machine: Machine) -> Observation:
    """Check whether a container's CPU quota throttles the process."""
    check, cores = Check("cpu-quota"), usable_cores(machine)
    if machine.read(f"{machine.proc}/cgroup") is None:
        return check.unknown("A CPU quota cannot be read", f"/{machine.proc}/cgroup does not exist")
    if cores.quota is None:
        return check.fine("No CPU quota limits the process", "no limit in its control groups")
    why = (
        "A control group that has used up its quota stops all its threads until the next period, up to 100 ms later: "
        "single steps take far longer than the rest."
    )
    change = f"Use no more than {max(1, int(cores.quota))} threads (including loader workers), or raise the quota."
    ran_out, periods = cores.throttled or (0, 0)
    if ran_out > _NOTICEABLE_SHARE * periods:
        title = f"The CPU quota of {cores.quota:g} cores ran out in {ran_out:,} of {periods:,} periods"
        return check.problem(title, cores.read, why, change)
    return check.note(f"A CPU quota of {cores.quota:g} cores is set", cores.read, why, change)


def threads(machine: Machine) -> Observation:
    """Compare the threads of one operator with the available cores."""
    check, cores = Check("threads"), usable_cores(machine)
    count, source = _threads(machine)
    ranks = max(1, _whole(machine.variable("LOCAL_WORLD_SIZE")) or 1)
    if count is None or cores.usable is None:
        missing = machine.runtime.torch_why_not or "neither PyTorch nor OMP_NUM_THREADS says how many threads are used"
        missing = missing if count is None else cores.read
        return check.unknown("The number of threads is not known", missing)
    read = f"{source}; {cores.read}" + (f"; {ranks} ranks on this machine" if ranks > 1 else "")
    fit = max(1, cores.usable // ranks)
    if count * ranks > cores.usable:
        what = f"{ranks} ranks with {count} threads each" if ranks > 1 else f"{count} threads"
        return check.problem(
            f"{what} compute on {cores.usable} usable cores",
            read,
            "Threads that share a core wait for each other: an operator on the CPU ends when its last thread has run.",
            f"Set OMP_NUM_THREADS={fit} (or torch.set_num_threads({fit})) in each process.",
        )
    if count == 1 and fit > 1:
        return check.note(
            f"Operators on the CPU use 1 of {fit} cores",
            read,
            "torchrun sets OMP_NUM_THREADS=1 by default, so work on the CPU, such as a model or an optimizer "
            "kept there, runs on one core.",
            f"If the CPU computes, set OMP_NUM_THREADS up to {fit}.",
        )
    return check.fine(f"{count} threads for {cores.usable} usable cores", read)


def other_load(machine: Machine) -> list[Observation]:
    """Check the load of other processes and the time taken by the hypervisor, from two readings half a second apart."""
    missing, before = "/proc/stat does not exist", _Sample.read(machine)
    if before is not None:
        machine.sleep(_SAMPLE_S)
        after = _Sample.read(machine)
        if after is not None and after.total > before.total:
            return [_load(before, after, machine), _stolen(before, after)]
        missing = "the counters in /proc/stat do not change"
    return [
        _LOAD.unknown("The CPU load of other processes cannot be read", missing),
        _STOLEN.unknown("The time that a hypervisor takes cannot be read", missing),
    ]


@dataclass(frozen=True, slots=True)
class _Sample:
    """Counters of the whole machine and its processes, in clock ticks."""

    total: int
    busy: int
    stolen: int
    cores: int
    processes: dict[int, tuple[str, int]]

    @classmethod
    def read(cls, machine: Machine) -> _Sample | None:
        lines = (machine.read("proc/stat") or "").splitlines()
        if not lines or not lines[0].startswith("cpu "):
            return None
        ticks = [int(word) for word in lines[0].split()[1:9]]
        cores = sum(line.startswith("cpu") for line in lines) - 1
        user, nice, system, _, _, irq, soft, stolen = ticks + [0] * (8 - len(ticks))
        return cls(sum(ticks), user + nice + system + irq + soft, stolen, max(cores, 1), _processes(machine))


def _load(before: _Sample, after: _Sample, machine: Machine) -> Observation:
    elapsed = (after.total - before.total) / after.cores
    used = {
        pid: (name, (ticks - before.processes.get(pid, (name, ticks))[1]) / elapsed)
        for pid, (name, ticks) in after.processes.items()
    }
    own = {os.getpid(), machine.process}
    own_cores = sum(cores for pid, (_, cores) in used.items() if pid in own)
    others = max(0.0, (after.busy - before.busy) / elapsed - own_cores)
    busiest = sorted((item for item in used.items() if item[0] not in own), key=lambda item: -item[1][1])[:3]
    names = ", ".join(f"{name} (process {pid}) {cores:.1f}" for pid, (name, cores) in busiest if cores >= 0.05)
    read = f"/proc/stat over {_SAMPLE_S:g} s: others used {others:.1f} of {after.cores} cores"
    read += f"; {names}" if names else ""
    title = f"Other processes keep {others:.1f} of {after.cores} cores busy"
    if others < _LOAD_CORES:
        return _LOAD.fine(title, read)
    return _LOAD.problem(
        title,
        read,
        "They take cores, caches and memory bandwidth from the step, a different share each time.",
        "Stop them, or measure after they have ended. Processes of other containers may not be listed.",
    )


def _stolen(before: _Sample, after: _Sample) -> Observation:
    stolen = (after.stolen - before.stolen) / (after.total - before.total)
    read = f"/proc/stat, steal over {_SAMPLE_S:g} s: {stolen:.1%}"
    if stolen < _NOTICEABLE_SHARE:
        return _STOLEN.fine("No hypervisor takes time from the cores", read)
    return _STOLEN.problem(
        f"The hypervisor takes {stolen:.1%} of the cores' time",
        read,
        "The cores are shared with other virtual machines; this one is paused meanwhile, and cannot see when.",
        "Use a machine with dedicated cores for measuring.",
    )


def _processes(machine: Machine) -> dict[int, tuple[str, int]]:
    found = {}
    for path in machine.matching("proc", "[0-9]*/stat"):
        text = machine.read(str(path.relative_to(machine.root))) or ""  # a process may have ended in the meantime
        before, _, after = text.rpartition(")")
        number, _, name = before.partition(" (")
        words = after.split()
        if number.isdecimal() and len(words) > 12:
            found[int(number)] = name, int(words[11]) + int(words[12])
    return found


def _quota(machine: Machine, group: str) -> float | None:
    """Return the CPU quota of one control group in cores; None for no limit."""
    words = (machine.read(f"{group}/cpu.max") or "").split()
    if not words:
        words = [machine.read(f"{group}/cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]) > 0:
        return int(words[0]) / int(words[1])
    return None


def _threads(machine: Machine) -> tuple[int | None, str]:
    if machine.runtime.torch_threads is not None:
        return machine.runtime.torch_threads, f"torch.get_num_threads(): {machine.runtime.torch_threads}"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        count = _whole(machine.variable(name).split(",")[0])
        if count:
            return count, f"{name}={count}"
    return None, ""


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


_NEARLY_FULL: Final = 0.9
_SMALL_SHARED_BYTES: Final = 1 << 30
_UNLIMITED_BYTES: Final = 1 << 60
"""Control groups of version 1 report a number near 2**63 for no limit."""
_ALLOCATORS: Final = ("jemalloc", "tcmalloc", "mimalloc")


def memory_limit(machine: Machine) -> Observation:
    """Check how close the process's control groups are to their memory limit."""
    check = Check("memory-limit")
    if machine.read(f"{machine.proc}/cgroup") is None:
        return check.unknown("A memory limit cannot be read", f"/{machine.proc}/cgroup does not exist")
    tightest: tuple[int, int, str] | None = None
    for group in machine.cgroup_folders("memory"):
        limit = machine.number(f"{group}/memory.max") or machine.number(f"{group}/memory.limit_in_bytes")
        used = machine.number(f"{group}/memory.current") or machine.number(f"{group}/memory.usage_in_bytes")
        if not limit or used is None or limit >= _UNLIMITED_BYTES:
            continue
        if tightest is None or limit - used < tightest[0] - tightest[1]:
            tightest = limit, used, group
    if tightest is None:
        return check.fine("No control group limits memory", "no limit in its control groups")
    limit, used, group = tightest
    title, read = f"{gib(used)} of the {gib(limit)} memory limit is in use", f"/{group}"
    if used < _NEARLY_FULL * limit:
        return check.fine(title, read)
    return check.problem(
        title,
        read,
        "Near its limit a control group drops cached files and waits for memory; beyond it, processes are killed.",
        "Raise the limit, or use fewer loader workers and smaller caches.",
    )


def shared_memory(machine: Machine) -> Observation:
    """Check the shared memory through which loader workers pass batches."""
    check, path = Check("shared-memory"), machine.root / "dev/shm"
    try:
        total, free = machine.free_bytes(path)
    except OSError:
        return check.unknown("Shared memory cannot be read", "/dev/shm does not exist")
    title, read = f"{gib(free)} of shared memory is free", f"/dev/shm: {gib(free)} free of {gib(total)}"
    if free >= _SMALL_SHARED_BYTES:
        return check.fine(title, read)
    return check.problem(
        f"Only {gib(free)} of shared memory is free",
        read,
        "DataLoader workers pass batches through shared memory (num_workers x prefetch_factor at a time), and die with "
        "a bus error when it is full. Containers have 64 MiB by default.",
        "docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir of medium Memory mounted at /dev/shm.",
    )


def swap(machine: Machine) -> Observation:
    """Check whether memory has been swapped to disk."""
    check, total = Check("swap"), _kib(machine.fields("proc/meminfo").get("SwapTotal"))
    if total is None:
        return check.unknown("Swap cannot be read", "/proc/meminfo does not exist")
    if total == 0:
        return check.fine("There is no swap", "/proc/meminfo: SwapTotal 0")
    used = total - (_kib(machine.fields("proc/meminfo").get("SwapFree")) or 0)
    swapped = _kib(machine.fields(f"{machine.proc}/status").get("VmSwap")) or 0
    read = f"/proc/meminfo: {gib(used)} of {gib(total)} used; {gib(swapped)} of this process"
    if used == 0:
        return check.fine("No swap is in use", read)
    return check.says(
        "problem" if swapped and machine.process is not None else "note",
        f"{gib(swapped)} of the process is in swap" if swapped else f"{gib(used)} of swap is in use",
        read,
        "Memory that was swapped out is read from disk when it is touched again: milliseconds instead of nanoseconds.",
        "Find what takes the memory and stop it; then swapoff -a && swapon -a (as root) brings everything back.",
    )


def memory_pressure(machine: Machine) -> Observation:
    """Check whether processes have recently waited for memory."""
    check, text = Check("memory-pressure"), machine.read("proc/pressure/memory") or ""
    found = re.search(r"^some avg10=([\d.]+)", text, re.MULTILINE)
    if found is None:
        return check.unknown(
            "The time that processes wait for memory cannot be read", "/proc/pressure/memory does not exist"
        )
    waited = float(found[1])
    read = f"/proc/pressure/memory: some process waited {waited:g} % of the last 10 s"
    if waited < 1:
        return check.fine("No process waits for memory", read)
    return check.problem(
        f"Processes waited for memory {waited:g} % of the last 10 seconds",
        read,
        "They are paused while the kernel searches for free pages.",
        "Use less memory: fewer loader workers, smaller caches, or fewer other programs.",
    )


def huge_pages(machine: Machine) -> Observation:
    """Check whether large allocations get huge pages, and at what cost."""
    check, folder = Check("huge-pages"), "sys/kernel/mm/transparent_hugepage"
    enabled, defrag = _chosen(machine.read(f"{folder}/enabled")), _chosen(machine.read(f"{folder}/defrag"))
    if not enabled:
        return check.unknown("Huge pages cannot be read", f"/{folder}/enabled does not exist")
    read = f"/{folder}/enabled: {enabled}" + (f"; defrag: {defrag}" if defrag else "")
    if enabled == "never":
        return check.note(
            "Transparent huge pages are off",
            read,
            "Large tensors on the CPU then need a TLB entry for every 4 KiB.",
            "If the CPU computes, as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled.",
        )
    if enabled == "always" and defrag == "always":
        return check.note(
            "Memory is compacted for huge pages while programs wait",
            read,
            "An allocation may stop the program for milliseconds until a huge page has been made.",
            "As root: echo madvise > /sys/kernel/mm/transparent_hugepage/defrag.",
        )
    return check.fine(f"Transparent huge pages: {enabled}", read)


def allocator(machine: Machine) -> list[Observation]:
    return [_host_allocator(machine), _device_allocator(machine)]


def gib(byte_count: float) -> str:
    """Format a size: "1.5 GiB", "64 MiB"."""
    return f"{byte_count / (1 << 30):.1f} GiB" if byte_count >= 1 << 30 else f"{byte_count / (1 << 20):.0f} MiB"


def _host_allocator(machine: Machine) -> Observation:
    check, maps = Check("host-allocator"), machine.read(f"{machine.proc}/maps")
    preload = machine.variable("LD_PRELOAD")
    if machine.environ is None or maps is None:
        return check.unknown("The host's allocator cannot be read", f"/{machine.proc}/maps cannot be read")
    used = next((name for name in _ALLOCATORS if name in maps or name in preload), "the C library's malloc")
    read = f"LD_PRELOAD={preload or '(not set)'} and /{machine.proc}/maps"
    if machine.variable("PYTHONMALLOC") in ("debug", "malloc_debug", "pymalloc_debug", "malloc"):
        return check.problem(
            "PYTHONMALLOC turns Python's fast allocator off",
            f"PYTHONMALLOC={machine.variable('PYTHONMALLOC')}",
            "Every Python object is then allocated by the C library, with checks if the value contains debug.",
            "unset PYTHONMALLOC",
        )
    if machine.variable("MALLOC_ARENA_MAX") == "1" and used == "the C library's malloc":
        return check.note(
            "All threads allocate from one arena",
            "MALLOC_ARENA_MAX=1",
            "Threads that allocate at the same time wait for each other.",
            "unset MALLOC_ARENA_MAX, unless memory is short",
        )
    return check.fine(f"Host memory comes from {used}", read)


def _device_allocator(machine: Machine) -> Observation:
    check = Check("device-allocator")
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if machine.environ is None:
        return check.unknown("The device's allocator cannot be read", f"/{machine.proc}/environ cannot be read")
    read = "; ".join(f"{name}={machine.variable(name)}" for name in names if machine.variable(name))
    threshold = re.search(r"garbage_collection_threshold:\s*([\d.]+)", read)
    split = re.search(r"max_split_size_mb:\s*(\d+)", read)
    if split and int(split[1]) < 128:
        return check.note(
            f"Device memory blocks above {split[1]} MB are never split",
            read,
            "Small limits make the allocator ask the driver for memory more often, which waits for the device.",
            "If it is meant to prevent fragmentation, expandable_segments:True is the newer setting.",
        )
    if threshold and float(threshold[1]) < 0.6:
        return check.note(
            f"Device memory is released once {float(threshold[1]):.0%} of it is in use",
            read,
            "Releasing memory and allocating it again takes driver calls that wait for the device.",
            "Raise garbage_collection_threshold, to 0.8 for example, or leave it out.",
        )
    return check.fine(
        "PyTorch's device allocator has its default settings" if not read else "The device's allocator is set", read
    )


def _chosen(text: str | None) -> str:
    """Return the word in brackets of "always [madvise] never"."""
    found = re.search(r"\[([\w+]+)\]", text or "")
    return found[1] if found else ""


def _kib(text: str | None) -> int | None:
    """Convert a value such as "1024 kB" to bytes."""
    words = (text or "").split()
    return int(words[0]) * 1024 if words and words[0].isdecimal() else None
