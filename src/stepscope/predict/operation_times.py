"""Times of operations on a device: from models learned for their kind, else the roofline over its usual share.

The utilization may exceed one: algorithms such as Winograd's need fewer operations than the count says. Which algorithm
cuDNN chooses is unknown beforehand, and that is most of the error (docs/prediction-model.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.operators import arithmetic
from stepscope.machine.devices import DevicePeaks, is_nvidia
from stepscope.machine.occupancy import blocks_by_limit, product_of
from stepscope.predict.boosted_trees import BoostedTrees, shipped_arrays
from stepscope.predict.matrix_laws import rates_of, unit_of
from stepscope.predict.matrix_times import matrix_times
from stepscope.predict.memory_times import MEMORY_KINDS, bandwidth_of, least_ns, memory_times, shipped_model
from stepscope.predict.operations import BYTES, UNMEASURED, Numbers, Operations, OperationTimes, by_type, roofline_times

CONVOLUTION_KINDS: Final = ("convolution",)
NOT_LEARNED: Final = 1.5  # factor on the band for gradients, generations and shapes without timings
MOST_ROWS: Final = 8192.0  # rows of the largest matrix product in the timings; longer ones take proportionally longer
SHORT_TYPES: Final = ("fp16", "bf16", "fp8", "int8")
SHORT_WIDER: Final = 5.0
"""Factor on the band of convolutions in 16 bits or less, which have no timings."""
LAYOUTS: Final = 4
"""Kernels beside the product that bring tensors into the layout that it needs, in public H100 and MI300X traces."""
FEW_CHANNELS: Final = 1.5
FEW_CHANNELS_FACTOR: Final = 6.0
FEW_INNER: Final = 8.0
"""Time over the padded product's if padding to whole 16 bytes adds more than FEW_CHANNELS and there is more
than one point: an image's first layer.
"""
SEARCHED: Final = 0.4
"""Share of the predicted time that cudnn.benchmark's fastest algorithm took in a public V100 trace; the timings have
the choice of cuDNN's heuristics.
"""
LEARNED_GENERATIONS: Final = ("Pascal", "Volta", "Turing")
MOST_UTILIZATION: Final = 2.25
"""Saving of Winograd's algorithm with 2 x 2 tiles for 3 x 3 weights (Lavin and Gray, 2015)."""
_USES: Final = (8.0, 10.0)
"""Range of rows of the product in which each input number is used, for 3 x 3 weights."""
_TILE: Final = (128, 64)  # output points and channels of a typical thread block


@dataclass(frozen=True, slots=True)
class ConvolutionModel:
    trees: BoostedTrees  # logarithm of the measured time over the roofline, from `features`
    lowest: Numbers
    highest: Numbers  # lowest, highest: of each feature in the timings, shape (features,)
    band: Numbers  # factors that hold nine of ten timings of held-out GPUs, shape (2,)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> ConvolutionModel:
        lowest, highest = arrays["range"]
        trees = BoostedTrees.from_arrays(arrays, "trees_")
        return cls(trees, lowest, highest, arrays["band"])


@lru_cache(maxsize=1)
def shipped_convolution_model() -> ConvolutionModel:
    return ConvolutionModel.from_arrays(shipped_arrays("convolution_times"))


def convolution_times(
    operations: Operations, device: DevicePeaks, model: ConvolutionModel | None = None
) -> OperationTimes:
    """Predict convolutions from the dimensions of the equivalent matrix product.

    Convolutions of 3 x 3 weights in FP32 use the fitted model. Others take the time of that product, in a wider band.
    """
    learned = np.zeros(len(operations), np.bool_)
    if unit_of(device, "fp32") is not None:
        given = features(operations, device)
        learned = _is_like_timed(operations) & np.isfinite(given).all(axis=1)
    times = roofline_times(operations, device)
    if not learned.all():
        times = times.replaced(~learned, _product_times(operations.select(~learned), device))
    if learned.any():
        chosen = _learned_times(
            operations.select(learned), given[learned], device, model or shipped_convolution_model()
        )
        times = times.replaced(learned, chosen)
    return times


def _product_times(operations: Operations, device: DevicePeaks) -> OperationTimes:
    with np.errstate(invalid="ignore"):
        parts = np.maximum(operations.rows / MOST_ROWS, 1.0)
    rows = operations.rows / parts
    # Kernels unfold the input on the fly, so each number is read as often as it is used, if from the cache.
    numbers = rows * operations.inner + operations.inner * operations.columns + rows * operations.columns
    size = by_type(operations.number_type, BYTES, 4.0)
    products = np.maximum(operations.batch, 1)
    is_short = np.isin(operations.number_type, SHORT_TYPES)
    padded = 2 * products * rows * operations.inner * operations.columns
    part = replace(
        operations,
        flops=np.where(is_short & np.isfinite(padded), padded, operations.flops / parts),
        rows=rows,
        bytes=np.where(np.isnan(numbers), operations.bytes, numbers * size * products),
    )
    alike = matrix_times(part, device)
    parts = np.where(np.isnan(parts), 1.0, parts)
    whole = alike.ns + np.maximum(alike.ns - least_ns(device), 0) * (parts - 1)  # one kernel, which starts once
    ns = np.where(is_short, _short_ns(operations, whole, padded * parts, device), alike.ns * parts)
    wider = np.where(is_short, SHORT_WIDER, np.where(alike.basis == "learned", NOT_LEARNED, 1.0))
    basis = np.where(is_short & (alike.basis == "learned"), "roofline", alike.basis)
    scale = ns / alike.ns
    return OperationTimes(ns, alike.low_ns * scale / wider, alike.high_ns * scale * wider, basis)


def _short_ns(operations: Operations, product: Numbers, padded: Numbers, device: DevicePeaks) -> Numbers:
    """Convolutions in 16 bits or fewer: the product, and the layouts that it needs unless it is a plain one."""
    has_few = (padded > FEW_CHANNELS * operations.flops) & (operations.inner > FEW_INNER) & is_nvidia(device)
    numbers = operations.bytes / by_type(operations.number_type, BYTES, 2.0)
    weights = operations.inner * operations.columns
    with np.errstate(divide="ignore", invalid="ignore"):
        uses = operations.rows * operations.inner / (numbers - weights - operations.rows * operations.columns)
    traffic = 2 * operations.bytes / sustained_bandwidth(device) * 1e9
    layouts = LAYOUTS * least_ns(device) * operations.batch + traffic
    is_plain = (uses < 1.5) & ~has_few & ~operations.is_backward
    return np.asarray(product * np.where(has_few, FEW_CHANNELS_FACTOR, 1.0) + np.where(is_plain, 0.0, layouts))


def _is_like_timed(operations: Operations) -> npt.NDArray[np.bool_]:
    """Whether weights are 3 x 3 with stride one, as in the timings: other shapes have fewer algorithms to choose from.

    Each number of the input is then used in nine rows of the product; gradients are recognised by the sum's length.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        read = operations.bytes - 4 * operations.columns * (operations.rows + operations.inner)
        uses = 4 * operations.rows * operations.inner / read
        fits = operations.is_backward | ((uses > _USES[0]) & (uses < _USES[1]))
        fits &= (operations.inner % 9 == 0) & (operations.flops > 0)
    return np.asarray(fits & (operations.number_type == "fp32"))


def _learned_times(
    operations: Operations, given: Numbers, device: DevicePeaks, model: ConvolutionModel
) -> OperationTimes:
    inside = np.clip(given, model.lowest, model.highest)
    ns = base_ns(operations, device) * np.maximum(np.exp(model.trees.predict(inside)), 1 / MOST_UTILIZATION)
    outside = (np.abs(inside - given) > 1e-9).any(axis=1) | (device.architecture not in LEARNED_GENERATIONS)
    wider = np.where(outside | operations.is_backward, NOT_LEARNED, 1.0)
    basis = np.full(len(operations), "learned")
    low = min(float(model.band[0]), SEARCHED)
    return OperationTimes(ns, ns * low / wider, ns * model.band[1] * wider, basis)


def features(operations: Operations, device: DevicePeaks) -> Numbers:
    """Compute the trees' features, shape (n, 9); not-a-number where the device or shape is unknown.

    Logarithms of output points, channels and the sum's length; of blocks per multiprocessor, and how full the last wave
    is; of arithmetic over traffic time and of traffic over the cache; how full the last block of channels is; and the
    logarithm of the nanoseconds of one product's arithmetic.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        blocks = np.ceil(operations.rows / _TILE[0]) * np.ceil(operations.columns / _TILE[1])
        waves = blocks / (device.multiprocessors or np.nan)
        products = np.maximum(operations.batch, 1)
        arithmetic = _arithmetic_ns(operations.flops / products, device)
        traffic = _traffic_ns(operations.bytes / products, device)
        given = [
            np.log2(operations.rows),
            np.log2(operations.columns),
            np.log2(operations.inner),
            np.log2(waves),
            np.where(waves < 32, waves / np.ceil(waves), 1.0),
            np.log(arithmetic / traffic),
            np.log2(operations.bytes / products / (device.cache_bytes or np.nan)),
            operations.columns / (np.ceil(operations.columns / _TILE[1]) * _TILE[1]),
            np.log2(arithmetic),
        ]
    return np.stack(given, axis=1)


def base_ns(operations: Operations, device: DevicePeaks) -> Numbers:
    """Roofline nanoseconds at the rate that the device's power sustains over a convolution's length."""
    return np.asarray(np.maximum(_arithmetic_ns(operations.flops, device), _traffic_ns(operations.bytes, device)))


def _arithmetic_ns(flops: Numbers, device: DevicePeaks) -> Numbers:
    return rates_of(device, "fp32").arithmetic_s(flops) * 1e9


def _traffic_ns(moved: Numbers, device: DevicePeaks) -> Numbers:
    return moved / device.bandwidth_bytes_s * 1e9


_QUERIES: Final = 128
_KEYS: Final = 64
"""Queries and keys of a block of fused attention; it computes whole ones, and masks what a causal one does not need."""
FUSED_SHARES: Final[Mapping[str, float]] = {"Hopper": 0.35, "CDNA 3": 0.24}
FUSED_SHARE: Final = 0.6
"""Share of the peak that fused attention reaches over long sequences: of Ampere and Hopper that of FlashAttention-2,
as its authors say (Dao, 2023; Shah and others, 2024); of CDNA 3 that of ROCm's in public MI300X traces.
"""
BLOCK_CLOCKS: Final[Mapping[str, float]] = {"NVIDIA": 12_000.0, "AMD": 90_000.0}
"""Clocks of a multiprocessor that each block takes besides, in public H100 and MI300X traces."""
ENGINE_SHARE: Final = 0.54
ENGINE_CLOCKS: Final = 6_900.0
ENGINE_START_NS: Final = 10_000.0
"""The same of vLLM's and SGLang's kernels on NVIDIA's devices, and their least time, which is that of decoding too.

Fitted to public timings on the A100, H100, H200, L40S, B200 and RTX PRO 6000 (`scripts/predictor/serving_kernels.py`).
"""
ENGINE_BANDS: Final = ((0.94, 1.74), (0.64, 1.61))
"""Factors that hold nine of ten of these on generations that were left out: of decoding, and of prompts."""


def attention_times(operations: Operations, device: DevicePeaks) -> OperationTimes:
    """Fused attention: whole blocks at the share of the peak that it reaches, or traffic, and their own cost.

    PyTorch's kernels are those whose name contains "_attention"; other names are the kernels of serving engines. Few
    queries over many keys are shared out by keys: what engines' kernels then need is the traffic.
    """
    times = roofline_times(operations, device)
    is_fused = np.array(["_attention" in name for name in operations.name.tolist()], np.bool_)
    is_prompt = operations.rows >= _KEYS
    by_nvidia = is_nvidia(device)
    clocks = np.where(is_fused | ~by_nvidia, BLOCK_CLOCKS.get(device.vendor, BLOCK_CLOCKS["NVIDIA"]), ENGINE_CLOCKS)
    share = np.where(is_fused, FUSED_SHARES.get(device.architecture, FUSED_SHARE), ENGINE_SHARE)
    start = np.where(is_fused, least_ns(device), ENGINE_START_NS)
    traffic = operations.bytes / sustained_bandwidth(device) * 1e9
    blocks, arithmetic = whole_blocks(operations, device)
    each = clocks / ((device.multiprocessors or np.nan) * (device.clock_mhz or np.nan)) * 1e3
    prompt = start + np.maximum(arithmetic / share, traffic) + operations.batch * blocks * each
    known = (is_fused | by_nvidia) & is_prompt
    is_decoding = ~is_fused & (operations.rows < _KEYS)
    own = np.where(known, prompt, np.where(is_decoding, start + traffic, np.nan))
    ns = np.where(np.isfinite(own), own, times.ns)
    scale = ns / times.ns
    low, high, basis = times.low_ns * scale, times.high_ns * scale, times.basis
    if by_nvidia:
        learned = np.isfinite(own) & ~is_fused
        band = np.where(is_prompt[:, np.newaxis], ENGINE_BANDS[1], ENGINE_BANDS[0])
        low, high = (np.where(learned, ns * band[:, end], one) for end, one in enumerate((low, high)))
        basis = np.where(learned, "learned", basis)
    return OperationTimes(ns, low, high, basis)


def whole_blocks(operations: Operations, device: DevicePeaks) -> tuple[Numbers, Numbers]:
    """Blocks of queries of each head, and nanoseconds of all blocks' arithmetic at the peak."""
    shape = operations.rows * operations.columns
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = np.minimum(operations.flops / (4 * operations.batch * shape * operations.inner), 1.0)
        blocks = np.ceil(operations.rows / _QUERIES)
        whole = blocks * _QUERIES * np.ceil(operations.columns / _KEYS) * _KEYS / shape
        whole += np.where(kept < 1, blocks * _QUERIES**2 / 2 / shape / kept, 0.0)
        return blocks, operations.flops * whole / by_type(operations.number_type, device.flops_s) * 1e9


_LEARNED: Final = (
    (MEMORY_KINDS, memory_times),
    (("matrix",), matrix_times),
    (CONVOLUTION_KINDS, convolution_times),
    (("attention",), attention_times),
)
"""Kinds of operations with learned models, and the function that predicts them."""


def operation_times(operations: Operations, device: DevicePeaks) -> OperationTimes:
    """Predict each operation's time on a device.

    The time is unknown where traffic or arithmetic is not-a-number and where the device has no peak for the number
    type; operations on empty inputs take the least kernel time.
    """
    times = roofline_times(operations, device)
    for kinds, learned in _LEARNED:
        chosen = np.isin(operations.kind, kinds)
        if chosen.any():
            times = times.replaced(chosen, learned(operations.select(chosen), device))
    return times


LONG_LOSS: Final = 0.08
LONG_NS: Final = 8e9
"""How much longer steps take than their operations one by one: a share that half of is reached at this length. Clocks
fall as a device warms; learned from iterations of five GPUs and their operators (scripts/predictor/nested.py).
"""


def sustained_ns(step_ns: float, loss: float = LONG_LOSS) -> float:
    """Nanoseconds of a step that is repeated and keeps the device busy, from the sum of its operations' times."""
    return step_ns * (1 + loss * step_ns / (step_ns + LONG_NS))


def guessed_band(ns: Numbers, low: Numbers, high: Numbers, device: DevicePeaks) -> tuple[Numbers, Numbers]:
    """The band of times from the datasheet alone: as wide as such guesses were off where public traces tell it."""
    if is_nvidia(device):
        return low, high
    if device.vendor in UNMEASURED:
        least, most = UNMEASURED[device.vendor]
        return ns * least, ns * most
    least, most = UNMEASURED[""]
    return np.fmin(low, ns * least), np.fmax(high, ns * most)


START_NS: Final = 2_000.0
"""Most time counted as a kernel's start and end: about the length of the shortest kernels on every device."""
MATRIX_SHARE: Final = 0.25  # g (memory-limited share) of a matrix product without shapes: arithmetic limits most
UNKNOWN_SHARE: Final = 0.5  # g of a kernel whose limit is unknown: the middle of the band
MEMORY_SPREAD: Final = 1.5
"""Factor either way that holds nine of ten memory-limited kernels longer than 0.1 ms, among five GPUs."""
OTHER_SPREAD: Final = 2.2  # the same for matrix products
LAUNCH_COLUMNS: Final = ("name", "grid", "block", "registers", "shared_memory_bytes")


_CASTABLE: Final = ("fp32", "tf32", "fp16", "bf16")
_CAST_TO: Final = {"fp8": "bf16"}
"""Number types that recipes for 8-bit numbers cast to. Kernel names do not show them, so products without shapes count
as 16-bit.
"""
_MEMORY_LIMITED: Final = re.compile(
    r"elementwise|multi_tensor_apply|reduce_?kernel|copy|memcpy|memset|fill|cat_?array|gather|scatter|index|embedding"
    r"|softmax|soft_?max|norm|bn_(?:fw|bw)|dropout|permute|transpose|triton_(?:poi|red|per)|pool|(?:loop|input)_[a-z_]{0,100}fusion"
    r"|broadcast|convert|cumsum|scan",
    re.IGNORECASE,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors on the time of each kernel; arrays of shape (n,), not-a-number where unknown."""

    factor: Numbers
    low: Numbers
    high: Numbers


def wave_factors(
    kernels: pl.DataFrame,
    source: DevicePeaks,
    target: DevicePeaks,
    *,
    precision: str | None = None,
    traffic: tuple[float, float] = (1.0, 1.0),
) -> Factors:
    """Time of each kernel on the target over its time on the source.

    Args:
        kernels: columns LAUNCH_COLUMNS of device_work.
        precision: the number type to compute in; None for that of the recording.
        traffic: the least and the most traffic in that number type, over the recorded traffic.
    """
    names = kernels["name"].fill_null("").to_list()
    share = np.array([_memory_share(name) for name in names], np.float64)
    fill = _fill_ratio(kernels, source, target)
    by_memory = fill * sustained_bandwidth(source) / sustained_bandwidth(target)
    by_compute = fill * np.array([_compute_ratio(name, source, target, precision) for name in names], np.float64)
    # Without comparable arithmetic only purely memory-limited kernels have a factor.
    factor = np.where(share >= 1, by_memory, by_memory**share * by_compute ** (1 - share))
    spread = np.where(share >= 1, MEMORY_SPREAD, OTHER_SPREAD)
    # The name says that memory limits the kernel; arithmetic may still limit part of it.
    limits = np.fmin(by_memory, by_compute), np.fmax(by_memory, by_compute)
    low, high = (np.where(share >= 1, by_memory, one) for one in limits)
    low, high = low * traffic[0], high * traffic[1]
    return Factors(factor, *(np.where(np.isfinite(factor), one, np.nan) for one in (low / spread, high * spread)))


def scaled_ns(measured_ns: Numbers, factor: Numbers, starts: tuple[float, float] = (START_NS, START_NS)) -> Numbers:
    """Scale the measured times by the factor, except for start and end, which are those of each maker's devices.

    Args:
        starts: nanoseconds of them on the source and on the target.
    """
    start = np.minimum(measured_ns, starts[0])
    return start * (starts[1] / starts[0]) + (measured_ns - start) * factor


def resident_blocks(kernels: pl.DataFrame, device: DevicePeaks) -> Numbers:
    """Blocks of each kernel that one multiprocessor of an NVIDIA device holds; shape (n,).

    Not-a-number where the launch's size was not recorded, the device is not NVIDIA's or the kernel does not fit it.
    """
    threads = np.array([product_of(text) for text in kernels["block"].to_list()], np.float64)
    limits = blocks_by_limit(threads, _column(kernels, "registers"), _column(kernels, "shared_memory_bytes"), device)
    if limits is None:
        return np.full(kernels.height, np.nan)
    blocks = np.min(list(limits.values()), axis=0)
    return np.where(blocks >= 1, blocks, np.nan)


def sustained_bandwidth(device: DevicePeaks) -> float:
    """Bytes per second that large copies reach: measured, or its generation's usual share of the peak."""
    return bandwidth_of(device, shipped_model())[1]


def _fill_ratio(kernels: pl.DataFrame, source: DevicePeaks, target: DevicePeaks) -> Numbers:
    """Ratio of the numbers of waves on both devices; 1 where it is unknown how many blocks run at a time."""
    blocks = np.array([product_of(text) for text in kernels["grid"].to_list()], np.float64)
    is_matrix = np.array([arithmetic(name or "").is_matrix for name in kernels["name"].to_list()], np.bool_)
    before, after = (np.maximum(_at_once(kernels, device, is_matrix) / blocks, 1.0) for device in (source, target))
    ratio = after / before
    return np.where(np.isfinite(ratio), ratio, 1.0)


def _at_once(kernels: pl.DataFrame, device: DevicePeaks, is_matrix: npt.NDArray[np.bool_]) -> Numbers:
    multiprocessors = np.nan if device.multiprocessors is None else float(device.multiprocessors)
    return multiprocessors * np.where(is_matrix & is_nvidia(device), 1.0, resident_blocks(kernels, device))


def _compute_ratio(name: str, source: DevicePeaks, target: DevicePeaks, precision: str | None) -> float:
    told = arithmetic(name)
    if told.is_matrix:
        if precision is not None and told.precision in _CASTABLE:
            return _cast_ratio(told.precision, _CAST_TO.get(precision, precision), source, target)
        if told.precision == "tf32":  # a device without TF32 uses 32 bits instead
            return _cast_ratio("tf32", "tf32", source, target)
        return _peak_ratio((told.precision,) if told.precision else ("bf16", "fp16", "fp32"), source, target)
    before, after = _cycles(source), _cycles(target)
    if before and after:
        return before / after
    return _peak_ratio(("fp32", "bf16", "fp16"), source, target)


def _peak_ratio(kinds: Sequence[str], source: DevicePeaks, target: DevicePeaks) -> float:
    """Ratio of the rates of large products, in the first number type with a peak on both devices."""
    for kind in kinds:
        if source.flops_s.get(kind) and target.flops_s.get(kind):
            return source.sustained(kind) / target.sustained(kind)
    return np.nan


def _cast_ratio(before: str, after: str, source: DevicePeaks, target: DevicePeaks) -> float:
    """Ratio of the rates of products in one number type on the source and in another on the target."""
    if after == "tf32" and before not in ("fp32", "tf32"):
        after = before  # TF32 applies to 32-bit numbers only
    if after == "tf32" and "tf32" not in target.flops_s:
        after = "fp32"
    if before == "tf32" and "tf32" not in source.flops_s:
        before = "fp32"
    if before not in source.flops_s or after not in target.flops_s:
        return np.nan
    return source.sustained(before) / target.sustained(after)


def _cycles(device: DevicePeaks) -> float | None:
    if device.multiprocessors is None or device.clock_mhz is None:
        return None
    return float(device.multiprocessors * device.clock_mhz)


@lru_cache(maxsize=65536)
def _memory_share(name: str) -> float:
    if arithmetic(name).is_matrix:
        return MATRIX_SHARE
    return 1.0 if _MEMORY_LIMITED.search(name) else UNKNOWN_SHARE


def _column(kernels: pl.DataFrame, name: str) -> Numbers:
    values: Numbers = kernels[name].cast(pl.Float64).fill_null(0.0).clip(0.0).to_numpy()
    return values
