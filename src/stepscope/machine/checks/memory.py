"""Checks of memory: limits, shared memory, swap, pages, the allocator."""

from __future__ import annotations

import re
from typing import Final

from stepscope.machine.observed import Check, Machine, Observation

_NEARLY_FULL: Final = 0.9
_SMALL_SHARED_BYTES: Final = 1 << 30
_UNLIMITED_BYTES: Final = 1 << 60
"""Control groups of version 1 report a number near 2**63 for no limit."""
_ALLOCATORS: Final = ("jemalloc", "tcmalloc", "mimalloc")


def memory_limit(machine: Machine) -> Observation:
    """Check how close the process's control groups are to their memory limit."""
    check = Check("memory-limit")
    if machine.read(f"{machine.proc}/cgroup") is None:
        return check.unknown("A memory limit cannot be read", f"/{machine.proc}/cgroup is not there")
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
    title, read = f"{gib(used)} of the memory limit of {gib(limit)} are used", f"/{group}"
    if used < _NEARLY_FULL * limit:
        return check.fine(title, read)
    return check.problem(
        title,
        read,
        "Near its limit a control group throws out cached files and waits for memory; beyond it processes are killed.",
        "Raise the limit, or use fewer loader workers and smaller caches.",
    )


def shared_memory(machine: Machine) -> Observation:
    """Check the shared memory through which loader workers pass batches."""
    check, path = Check("shared-memory"), machine.root / "dev/shm"
    try:
        total, free = machine.free_bytes(path)
    except OSError:
        return check.unknown("Shared memory cannot be read", "/dev/shm is not there")
    title, read = f"{gib(free)} of shared memory are free", f"/dev/shm: {gib(free)} free of {gib(total)}"
    if free >= _SMALL_SHARED_BYTES:
        return check.fine(title, read)
    return check.problem(
        f"Only {gib(free)} of shared memory are free",
        read,
        "DataLoader workers hand batches over through shared memory (num_workers x prefetch_factor at a time); when it "
        "is full they end with a bus error, so many people then train without workers and wait for data. Containers "
        "have 64 MiB unless told otherwise.",
        "docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir of medium Memory mounted at /dev/shm.",
    )


def swap(machine: Machine) -> Observation:
    """Check whether memory has been swapped to disk."""
    check, total = Check("swap"), _kib(machine.fields("proc/meminfo").get("SwapTotal"))
    if total is None:
        return check.unknown("Swap cannot be read", "/proc/meminfo is not there")
    if total == 0:
        return check.fine("There is no swap", "/proc/meminfo: SwapTotal 0")
    used = total - (_kib(machine.fields("proc/meminfo").get("SwapFree")) or 0)
    swapped = _kib(machine.fields(f"{machine.proc}/status").get("VmSwap")) or 0
    read = f"/proc/meminfo: {gib(used)} of {gib(total)} used; {gib(swapped)} of this process"
    if used == 0:
        return check.fine("No swap is in use", read)
    return check.says(
        "problem" if swapped and machine.process is not None else "note",
        f"{gib(swapped)} of the process are in swap" if swapped else f"{gib(used)} of swap are in use",
        read,
        "Memory that was swapped out is read from disk when it is touched again: milliseconds instead of nanoseconds.",
        "Find what takes the memory; after it has ended, swapoff -a && swapon -a (as root) brings everything back.",
    )


def memory_pressure(machine: Machine) -> Observation:
    """Check whether processes have recently waited for memory."""
    check, text = Check("memory-pressure"), machine.read("proc/pressure/memory") or ""
    found = re.search(r"^some avg10=([\d.]+)", text, re.MULTILINE)
    if found is None:
        return check.unknown("Waiting for memory cannot be read", "/proc/pressure/memory is not there")
    waited = float(found[1])
    read = f"/proc/pressure/memory: some process waited {waited:g} % of the last 10 s"
    if waited < 1:
        return check.fine("No process waits for memory", read)
    return check.problem(
        f"Processes waited for memory {waited:g} % of the last 10 seconds",
        read,
        "The kernel searches for free pages while they stand still.",
        "Use less memory: fewer loader workers, smaller caches, or fewer other programs.",
    )


def huge_pages(machine: Machine) -> Observation:
    """Check whether large allocations get huge pages, and at what cost."""
    check, folder = Check("huge-pages"), "sys/kernel/mm/transparent_hugepage"
    enabled, defrag = _chosen(machine.read(f"{folder}/enabled")), _chosen(machine.read(f"{folder}/defrag"))
    if not enabled:
        return check.unknown("Huge pages cannot be read", f"/{folder}/enabled is not there")
    read = f"/{folder}/enabled: {enabled}" + (f"; defrag: {defrag}" if defrag else "")
    if enabled == "never":
        return check.note(
            "Transparent huge pages are off",
            read,
            "Large tensors on the CPU then take one entry of the address cache for each 4 KiB.",
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
    """Check the memory allocators of the host and of the device."""
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
            "PYTHONMALLOC takes Python's fast allocator away",
            f"PYTHONMALLOC={machine.variable('PYTHONMALLOC')}",
            "Every Python object is then allocated through the C library, with checks where it says debug.",
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
            "If it is there against fragmentation, expandable_segments:True is the newer way.",
        )
    if threshold and float(threshold[1]) < 0.6:
        return check.note(
            f"Device memory is given back from {float(threshold[1]):.0%} of it in use",
            read,
            "Memory that is given back and asked for again costs calls of the driver that wait for the device.",
            "Raise garbage_collection_threshold, to 0.8 for example, or leave it out.",
        )
    return check.fine(
        "PyTorch's device allocator is as it comes" if not read else "The device's allocator is set", read
    )


def _chosen(text: str | None) -> str:
    """Return the word in brackets of "always [madvise] never"."""
    found = re.search(r"\[([\w+]+)\]", text or "")
    return found[1] if found else ""


def _kib(text: str | None) -> int | None:
    """Convert a value such as "1024 kB" to bytes."""
    words = (text or "").split()
    return int(words[0]) * 1024 if words and words[0].isdecimal() else None
