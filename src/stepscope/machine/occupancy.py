"""How many blocks of a kernel one multiprocessor of an NVIDIA device holds at a time, and what limits that.

The rules and limits are those of the CUDA C++ programming guide (technical specifications by compute capability).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from stepscope.machine.devices import DevicePeaks, is_nvidia

Numbers = npt.NDArray[np.float64]

WARP: Final = 32
REGISTERS: Final = 65_536
_REGISTER_UNIT: Final = 256  # registers are allocated to warps in units of this size
_PARTITIONS: Final = 4  # partitions of a multiprocessor, each with its own registers
SHARED_UNIT: Final = 128
_LARGEST: Final = 2**31  # most blocks that a launch can have in one dimension


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Limits of one multiprocessor."""

    threads: int
    blocks: int
    shared_memory_bytes: int
    shared_memory_reserved: int  # reserved bytes per block, in addition to its own


_MULTIPROCESSORS: Final = {
    "6.0": Multiprocessor(2048, 32, 64 * 1024, 0),
    "6.1": Multiprocessor(2048, 32, 96 * 1024, 0),
    "7.0": Multiprocessor(2048, 32, 96 * 1024, 0),
    "7.5": Multiprocessor(1024, 16, 64 * 1024, 0),
    "8.0": Multiprocessor(2048, 32, 164 * 1024, 1024),
    "8.6": Multiprocessor(1536, 16, 100 * 1024, 1024),
    "8.9": Multiprocessor(1536, 24, 100 * 1024, 1024),
    "9.0": Multiprocessor(2048, 32, 228 * 1024, 1024),
    "10.0": Multiprocessor(2048, 32, 228 * 1024, 1024),
    "10.3": Multiprocessor(2048, 32, 228 * 1024, 1024),
    "12.0": Multiprocessor(1536, 24, 100 * 1024, 1024),
}


def multiprocessor_of(device: DevicePeaks) -> Multiprocessor | None:
    """Return the limits of a device's multiprocessors; None if it is not NVIDIA's or not known."""
    return _MULTIPROCESSORS.get(device.capability or "") if is_nvidia(device) else None


def blocks_by_limit(
    threads: Numbers, registers: Numbers, shared_memory_bytes: Numbers, device: DevicePeaks
) -> dict[str, Numbers] | None:
    """Blocks that each resource of one multiprocessor allows; None if its limits are unknown.

    Args:
        threads: of a block; not-a-number where unknown.
        registers: of a thread.
        shared_memory_bytes: of a block.

    Returns:
        "threads", "blocks", "registers" and "shared memory", each with an array of the arguments' shape.
    """
    limits = multiprocessor_of(device)
    if limits is None:
        return None
    warps = np.ceil(threads / WARP)
    each = np.ceil(registers * WARP / _REGISTER_UNIT) * _REGISTER_UNIT
    warps_by_registers = _PARTITIONS * np.floor(REGISTERS / _PARTITIONS / np.maximum(each, 1))
    used = np.ceil((shared_memory_bytes + limits.shared_memory_reserved) / SHARED_UNIT) * SHARED_UNIT
    return {
        "threads": np.floor(limits.threads / WARP / warps),
        "blocks": np.full(len(threads), float(limits.blocks)),
        "registers": np.where(registers > 0, np.floor(warps_by_registers / warps), np.inf),
        "shared memory": np.where(used > 0, np.floor(limits.shared_memory_bytes / np.maximum(used, 1)), np.inf),
    }


@lru_cache(maxsize=65536)
def product_of(text: str | None) -> float:
    """Number of blocks or threads in "x,y,z"; not-a-number where unrecorded or impossible."""
    sizes = [float(number) for number in re.findall(r"\d{1,12}", text or "")[:3]]
    if not sizes or any(not 1 <= size <= _LARGEST for size in sizes):
        return np.nan
    return float(np.prod(sizes))
