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

from stepscope.machine.devices import DevicePeaks, is_nvidia
from stepscope.predict.boosted_trees import shipped_arrays
from stepscope.predict.operations import BYTES, WIDEST, Numbers, Operations, OperationTimes, by_type

MEMORY_KINDS: Final = ("elementwise", "reduction", "softmax", "normalisation", "embedding", "optimizer", "copy")
LEARNED_KINDS: Final = ("elementwise", "softmax", "normalisation", "optimizer", "copy")
"""Kinds with timings; copies and optimizers are element-wise to a memory. Other kinds use the band WIDEST."""
KERNEL_NS: Final = 2_000.0
"""Least kernel time where the device's is unknown: the shortest of public V100, A100 and H100 traces take 1 to 4 us. A
longer measured start-to-start time is the host's.
"""
OTHERS_SHARE: Final = 0.82  # of the peak bandwidth, of other makers: the mean of the MI100's and MI210's in the table
OTHERS_KERNEL_NS: Final = 4_000.0  # the same of AMD's devices: the shortest of public MI300X traces take 2 to 6 us
_LAYER_NORM_BACKWARD: Final = 2.0
"""Time of both kernels of layer normalisation's backward pass over that of its forward pass."""
SIZES_NS: Final = (5_000.0, 25_000.0, 100_000.0)
"""Durations at which the band changes; below the second the timings are unreliable, since launches took that long."""
SHORT_BANDS: Final = ((0.45, 4.5), (0.5, 3.0))
"""Factors of the band below the first and second size, which hold nine of ten of 14,000 element-wise kernels in public
V100, A100, H100 and MI300X traces. Cached data is faster, strided data slower.
"""
SHORT_ROWS_LOW: Final = 0.3
"""Lower factor of these for row-wise work: newer PyTorch kernels take half the time of the timed ones."""
USUAL_FACTORS: Final[Mapping[str, float]] = {"reduction": 1.2, "embedding": 2.5, "copy": 1.1}
"""Factors on the traffic time for kinds without timings: medians in V100, A100 and H100 traces."""
POOL_FACTOR: Final = 2.2  # the same of pooling, which reads windows that overlap
GATHERING_NS: Final = 4_000.0
"""What reductions' blocks wait for each other, and embeddings' for indices, the same median."""
ONE_AT_A_TIME: Final = 1.0
"""Numbers per clock and multiprocessor of kernels that cannot read 16 bytes at once: permuting copies, operands that
are broadcast, and in 16 bits softmax of short rows. Public A100, H100 and MI300X traces show 0.6 to 1.6; older devices'
memory is slower than that.
"""
UNALIGNED_TURN: Final = 6_000.0
"""Clocks in which a multiprocessor full of threads takes one turn of softmax in 16 bits of rows that are no multiple of
16 bytes: 16 bytes a thread, then one number a thread for the rest. From a public H100 trace.
"""
_BLOCK_PASS: Final = (512.0, 1_150.0)
"""Numbers and clocks of one turn of the loop in which a block of PyTorch's own batch normalisation passes a channel."""
NOT_LEARNED: Final = 1.5
"""Factor on the band, either way, for passes, number types and makers without timings; applied again to operations more
than twice as large as anything timed.
"""
KNOWLEDGE: Final = ("sustained", "generation", "other")
"""How a device's bandwidth is known: measured, from its generation, or neither."""
KERNELS: Final = ("flat", "warp softmax", "block softmax", "normalisation")
_BLOCK_THREADS: Final = 128  # threads of PyTorch's layer normalisation: four warps per row
_SHORT_COLUMNS: Final = 128  # widest row of which PyTorch's softmax gives each warp two
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
    like = of_kind & _is_plain(operations) & is_nvidia(device)  # the band of KNOWLEDGE allows for a new generation
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
    share = model.older if is_older(device) else model.newer
    return "other", device.bandwidth_bytes_s * (share if is_nvidia(device) else OTHERS_SHARE)


def is_older(device: DevicePeaks) -> bool:
    """Whether a device's generation reaches the lower share of its bandwidth."""
    return device.architecture in ("Maxwell", "Pascal", "Turing")


def kernel_of(operations: Operations, device: DevicePeaks) -> npt.NDArray[np.int64]:
    """Index in KERNELS for each operation's kernel; "flat" where its rows or the device's units are unknown."""
    count = np.zeros(len(operations), np.int64)
    if not device.multiprocessors or not device.clock_mhz:
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
    factors[["pool" in name for name in operations.name.tolist()]] = POOL_FACTOR
    least = least_ns(device)
    ns = operations.bytes * _passes(operations) * factors / bandwidth * 1e9
    ns += np.where(np.isin(operations.kind, ("reduction", "embedding")), GATHERING_NS, 0.0)
    for index in set(kernels[kernels > 0].tolist()):
        chosen = kernels == index
        ns[chosen] = row_ns(index, operations.select(chosen), device, bandwidth, model.rows[index - 1])
    ns *= np.where(_is_layer_norm_backward(operations), _LAYER_NORM_BACKWARD, 1.0)
    return np.asarray(least + np.fmax(ns, _narrow_ns(operations, kernels, device)))


def least_ns(device: DevicePeaks) -> float:
    """Least time of a kernel on a device."""
    usual = KERNEL_NS if is_nvidia(device) else OTHERS_KERNEL_NS
    return min(device.launch_ns or usual, usual)


def _narrow_ns(operations: Operations, kernels: npt.NDArray[np.int64], device: DevicePeaks) -> Numbers:
    """Nanoseconds of what reads one number at a time, or has few blocks; not-a-number for all else."""
    ns = np.full(len(operations), np.nan)
    if not device.multiprocessors or not device.clock_mhz:
        return ns
    clocks_ns = device.clock_mhz / 1e3
    number = by_type(operations.number_type, BYTES, 4.0)
    is_flat = np.isin(operations.kind, ("elementwise", "copy")) & (operations.rows > 1) & (operations.columns == 1)
    is_short_row = (number < 4) & (kernels == 1)
    numbers = operations.rows * operations.columns
    one_by_one = numbers / (ONE_AT_A_TIME * device.multiprocessors * clocks_ns)
    ns[is_flat | is_short_row] = one_by_one[is_flat | is_short_row]
    is_unaligned = (number < 4) & (kernels == 2) & (operations.columns % (16 / number) != 0)
    threads = _block(2, operations.columns, number)[0]
    whole = np.floor(operations.columns / (threads * 16 / number))
    turns = whole + np.ceil(operations.columns / threads - whole * 16 / number)
    at_once = device.multiprocessors * _threads(device) / threads
    ns[is_unaligned] = (operations.rows / at_once * turns * UNALIGNED_TURN / clocks_ns)[is_unaligned]
    own = np.array(["native_batch_norm" in name for name in operations.name.tolist()], np.bool_)
    turns = operations.columns / _BLOCK_PASS[0] * np.ceil(operations.rows / device.multiprocessors)
    passes = np.where(operations.is_backward, 3.0, 2.0)  # over the input, and over the gradients
    ns[own] = (turns * passes * _BLOCK_PASS[1] / clocks_ns)[own]
    return ns


def _is_layer_norm_backward(operations: Operations) -> npt.NDArray[np.bool_]:
    names = operations.name.tolist()
    return np.array([name in ("native_layer_norm_backward", "_fused_rms_norm_backward") for name in names], np.bool_)


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
    threads, rows_a_block, turns = _block(kernel, operations.columns, number)
    blocks_at_once = np.maximum(_threads(device) / threads, 1)
    in_flight = np.minimum(operations.rows, device.multiprocessors * blocks_at_once * rows_a_block)
    left = _left_cache(in_flight * operations.columns * number, device, border)
    traffic = operations.bytes * (over + again * left) / bandwidth * 1e9
    cycles = np.exp(itself) + np.exp(warp) * threads / 32 + np.exp(turn) * turns
    block = cycles / device.clock_mhz * 1e3
    rounds = operations.rows / (device.multiprocessors * blocks_at_once * rows_a_block)
    q = 1 + np.exp(power)
    larger = np.maximum(np.maximum(traffic, rounds * block), 1e-9)
    together = larger * ((traffic / larger) ** q + (rounds * block / larger) ** q) ** (1 / q)
    return np.asarray(together + first * block)


def _threads(device: DevicePeaks) -> int:
    """Threads of a multiprocessor."""
    return _THREADS.get(device.capability or "", 2048)


def _block(kernel: int, columns: Numbers, number: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Threads of a block, its rows, and turns of its loop, as PyTorch launches them.

    A turn is as many numbers as 16 bytes hold of 32 bits: shorter numbers come more at a time, and take as long each.
    """
    ones = np.ones(len(columns))
    vector = 16 / number
    if kernel == 1:  # a warp, or for short rows a part of one, has one row or two; each thread one number at a time
        padded = 2.0 ** np.ceil(np.log2(np.maximum(columns, 1)))
        threads_a_row = np.minimum(padded, 32)
        rows_a_thread = np.where(padded <= _SHORT_COLUMNS, 2.0, 1.0)
        return 128 * ones, 128 / threads_a_row * rows_a_thread, padded / threads_a_row * rows_a_thread
    if kernel == 3:
        threads = _BLOCK_THREADS * ones
    else:
        half = np.floor(np.floor(columns / vector) / 2)
        threads = np.clip(2.0 ** np.ceil(np.log2(np.maximum(half, 1))), 32, 1024)
    return threads, ones, np.ceil(columns / (threads * vector)) * vector / 4


def _left_cache(in_flight: Numbers, device: DevicePeaks, border: float) -> Numbers:
    """Share of rows evicted from the last-level cache before they are read again, 0 to 1; 0 for an unknown cache."""
    if not device.cache_bytes:
        return np.zeros(len(in_flight))
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
