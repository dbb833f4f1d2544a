"""Times of operations limited by memory traffic: element-wise, row-wise, copies, embeddings, optimizers.

A kernel's time is a floor plus its traffic over the sustained bandwidth of such devices. Row-wise work moves more where
rows in flight outgrow the last-level cache, and its blocks take extra time. Every constant was fitted to published
timings (`scripts/predictor/memory.py`; docs/prediction-model.md explains the formulas).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stepscope.machine.devices import DevicePeaks
from stepscope.predict.boosted_trees import shipped_arrays
from stepscope.predict.operations import BYTES, WIDEST, Numbers, Operations, OperationTimes, by_type

MEMORY_KINDS: Final = ("elementwise", "reduction", "softmax", "normalisation", "embedding", "optimizer", "copy")
LEARNED_KINDS: Final = ("elementwise", "softmax", "normalisation", "optimizer", "copy")
"""Kinds with timings; copies and optimizers are element-wise to a memory. Other kinds use the band WIDEST."""
KERNEL_NS: Final = 2_000.0
"""Least kernel time where the device's is unknown: the shortest of public V100, A100 and H100 traces take 1 to 4 us. A
longer measured start-to-start time is the host's.
"""
SIZES_NS: Final = (5_000.0, 25_000.0, 100_000.0)
"""Durations at which the band changes; below the second the timings are unreliable, since launches took that long."""
SHORT_BANDS: Final = ((0.45, 4.5), (0.5, 3.0))
"""Factors of the band below the first and second size, which hold nine of ten of 14,000 element-wise kernels in public
V100, A100, H100 and MI300X traces. Cached data is faster, strided data slower.
"""
SHORT_ROWS_LOW: Final = 0.3
"""Lower factor of these for row-wise work: newer PyTorch kernels take half the time of the timed ones."""
USUAL_FACTORS: Final[Mapping[str, float]] = {"reduction": 2.0, "embedding": 2.5, "copy": 1.2}
"""Factors on the traffic time for kinds without timings: medians in V100, A100 and H100 traces."""
NOT_LEARNED: Final = 1.5
"""Factor on the band, either way, for passes, number types and generations without timings; applied again to operations
more than twice as large as anything timed.
"""
KNOWLEDGE: Final = ("sustained", "generation", "other")
"""How a device's bandwidth is known: measured, from its generation, or neither."""
KERNELS: Final = ("flat", "warp softmax", "block softmax", "normalisation")
_BLOCK_THREADS: Final = 128  # threads of PyTorch's layer normalisation: four warps per row
_WARP_COLUMNS: Final = 1024  # widest row that PyTorch's softmax keeps in a warp's registers
_THREADS: Final[Mapping[str, int]] = {"7.5": 1024, "8.6": 1536, "8.9": 1536, "12.0": 1536}
"""Threads per multiprocessor by compute capability (CUDA programming guide); 2048 for the others."""


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Fitted constants.

    Attributes:
        bands: factors that hold nine of ten timings of held-out GPUs, shape (knowledge, kernels, sizes, 2).
        largest: the most bytes and the longest row in the timings of each of KERNELS, shape (kernels, 2); infinity for
            the rows of the first, which has none.
    """

    generations: tuple[str, ...]  # architectures with a known sustained bandwidth
    shares: Numbers  # sustained share of the peak bandwidth, shape (generations,)
    older: float
    newer: float  # older, newer: shares for other architectures, up to Turing and since
    rows: Numbers  # constants of each of KERNELS but the first, shape (3, 8); see `row_ns`
    bands: Numbers
    largest: Numbers

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> MemoryModel:
        *_, older, newer = arrays["shares"].tolist()
        generations = tuple(arrays["generations"].tolist())
        return cls(generations, arrays["shares"][:-2], older, newer, arrays["rows"], arrays["bands"], arrays["largest"])


@lru_cache(maxsize=1)
def shipped_model() -> MemoryModel:
    return MemoryModel.from_arrays(shipped_arrays("memory_times"))


def memory_times(operations: Operations, device: DevicePeaks, model: MemoryModel | None = None) -> OperationTimes:
    """Predict operations of MEMORY_KINDS from their traffic and shape.

    Args:
        operations: other kinds get the time of their traffic, as if they had no arithmetic.
        device: with its sustained bandwidth if measured, else its generation's share is used.
        model: replaces the model that comes with the package.
    """
    model = model or shipped_model()
    known, bandwidth = bandwidth_of(device, model)
    kernels = kernel_of(operations, device)
    ns = kernel_ns(operations, kernels, device, bandwidth, model)
    ns = np.where((operations.bytes >= 0) & np.isfinite(ns), ns, np.nan)
    low, high = _band(model, KNOWLEDGE.index(known), kernels, ns)
    of_kind = np.isin(operations.kind, LEARNED_KINDS)
    timed = device.architecture in model.generations
    like = of_kind & _is_plain(operations) & timed
    wider = np.where(like, 1.0, np.where(of_kind, NOT_LEARNED, WIDEST))
    # More than twice as large as all timings, or rows more than twice as long.
    most_bytes, longest = 2 * model.largest[kernels].T
    wider *= np.where((operations.bytes > most_bytes) | (operations.columns > longest), NOT_LEARNED, 1.0)
    basis = np.where(of_kind & timed, "learned", "roofline")
    return OperationTimes(ns, ns * low / wider, ns * high * wider, np.where(np.isnan(ns), "unknown", basis))


def bandwidth_of(device: DevicePeaks, model: MemoryModel) -> tuple[str, float]:
    """Bytes per second that large copies reach, and which of KNOWLEDGE it is based on."""
    if device.sustained_bandwidth_bytes_s:
        return "sustained", device.sustained_bandwidth_bytes_s
    if device.architecture in model.generations:
        share = float(model.shares[model.generations.index(device.architecture)])
        return "generation", device.bandwidth_bytes_s * share
    return "other", device.bandwidth_bytes_s * (model.older if is_older(device) else model.newer)


def is_older(device: DevicePeaks) -> bool:
    """Whether a device's generation reaches the lower share of its bandwidth."""
    return device.architecture in ("Maxwell", "Pascal", "Turing")


def kernel_of(operations: Operations, device: DevicePeaks) -> npt.NDArray[np.int64]:
    """Index in KERNELS for each operation's kernel; "flat" where its rows or the device's units are unknown."""
    count = np.zeros(len(operations), np.int64)
    if not device.multiprocessors or not device.clock_mhz or not device.cache_bytes:
        return count
    shaped = np.isfinite(operations.rows) & np.isfinite(operations.columns) & (operations.columns > 0)
    softmax = (operations.kind == "softmax") & shaped
    # Batch normalisation has kernels of its own: channels are far longer than rows.
    by_row = (operations.kind == "normalisation") & shaped & (operations.columns <= 1 << 16)
    by_row &= np.array(["batch_norm" not in name for name in operations.name.tolist()], np.bool_)
    count[softmax] = np.where(operations.columns[softmax] <= _WARP_COLUMNS, 1, 2)
    count[by_row] = 3
    return count


def kernel_ns(
    operations: Operations, kernels: npt.NDArray[np.int64], device: DevicePeaks, bandwidth: float, model: MemoryModel
) -> Numbers:
    factors = np.array([USUAL_FACTORS.get(kind, 1.0) for kind in operations.kind.tolist()])
    least = min(device.launch_ns or KERNEL_NS, KERNEL_NS)
    ns = (least + operations.bytes * _passes(operations) / bandwidth * 1e9) * factors
    for index in set(kernels[kernels > 0].tolist()):
        chosen = kernels == index
        ns[chosen] = least + row_ns(index, operations.select(chosen), device, bandwidth, model.rows[index - 1])
    return np.asarray(ns)


def row_ns(kernel: int, operations: Operations, device: DevicePeaks, bandwidth: float, constants: Numbers) -> Numbers:
    """Nanoseconds of row-wise work, without the floor: (traffic^q + blocks^q)^(1/q) + the first block.

    The constants are: traffic over the least; logarithms of a block's cycles for itself, for each of its warps and for
    each turn of its loop; q above 1 as a logarithm; share of the input read again after eviction from the cache;
    logarithm of rows in flight over the cache where half is evicted; blocks' worth of time that the first one takes.
    """
    assert device.multiprocessors is not None
    assert device.clock_mhz is not None
    over, itself, warp, turn, power, again, border, first = constants.tolist()
    number = by_type(operations.number_type, BYTES, 4.0)
    threads, columns_a_turn = _block(kernel, operations.columns, number)
    blocks_at_once = np.maximum(_THREADS.get(device.capability or "", 2048) / threads, 1)
    rows_a_block = 4 if kernel == 1 else 1
    in_flight = np.minimum(operations.rows, device.multiprocessors * blocks_at_once * rows_a_block)
    left = _left_cache(in_flight * operations.columns * number, device, border)
    traffic = operations.bytes * (over + again * left) / bandwidth * 1e9
    turns = np.ceil(operations.columns / columns_a_turn)
    cycles = np.exp(itself) + np.exp(warp) * threads / 32 + np.exp(turn) * turns
    block = cycles / device.clock_mhz * 1e3
    rounds = operations.rows / (device.multiprocessors * blocks_at_once * rows_a_block)
    q = 1 + np.exp(power)
    larger = np.maximum(np.maximum(traffic, rounds * block), 1e-9)
    together = larger * ((traffic / larger) ** q + (rounds * block / larger) ** q) ** (1 / q)
    return np.asarray(together + first * block)


def _block(kernel: int, columns: Numbers, number: Numbers) -> tuple[Numbers, Numbers]:
    """Threads of a block, and columns per iteration of its loop, as PyTorch launches them."""
    vector = 16 / number
    if kernel == 1:  # each of four warps has a row, each thread one element at a time
        return np.full(len(columns), 128.0), np.full(len(columns), 32.0)
    if kernel == 3:
        return np.full(len(columns), float(_BLOCK_THREADS)), _BLOCK_THREADS * vector
    half = np.floor(np.floor(columns / vector) / 2)
    threads = np.clip(2.0 ** np.ceil(np.log2(np.maximum(half, 1))), 32, 1024)
    return threads, threads * vector


def _left_cache(in_flight: Numbers, device: DevicePeaks, border: float) -> Numbers:
    """Share of rows evicted from the last-level cache before they are read again, 0 to 1."""
    assert device.cache_bytes is not None
    filled = np.maximum(in_flight, 1) / device.cache_bytes
    return np.asarray(1 / (1 + (np.exp(border) / filled) ** 3))


def _passes(operations: Operations) -> Numbers:
    """Traffic over the least possible: batch statistics read the input once more."""
    names = operations.name.tolist()
    batch = np.array(["batch_norm" in name or "group_norm" in name for name in names], np.bool_)
    return np.where(batch, np.where(operations.is_backward, 5 / 3, 3 / 2), 1.0)


def _is_plain(operations: Operations) -> npt.NDArray[np.bool_]:
    """Whether the timings cover it: a forward pass in FP32 over contiguous numbers."""
    plain = ~operations.is_backward & (_passes(operations) == 1) & (operations.kind != "copy")
    return np.asarray(plain & np.isin(operations.number_type, ("fp32", "tf32", "")))


def _band(model: MemoryModel, known: int, kernels: npt.NDArray[np.int64], ns: Numbers) -> tuple[Numbers, Numbers]:
    size = np.searchsorted(SIZES_NS, np.nan_to_num(ns), side="right")
    low, high = np.moveaxis(model.bands[known][kernels, size], -1, 0)
    return np.asarray(np.where((kernels > 0) & (size < len(SHORT_BANDS)), SHORT_ROWS_LOW, low)), high
