"""Learn what memory traffic costs, and check it on GPUs that were held out.

A timing is the host's as long as the kernel is short: the latency is the longer of the host's floor and of the kernel
after the part of the floor in which it was launched. Only the kernel's time is a property of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl
from scipy.optimize import least_squares

from scripts.predictor.accuracy import Accuracy, mean_error, middle_ninety
from scripts.predictor.timings import DEVICES, Numbers, VectorTimings, public_device, vector_timings, wave_ratio
from stepscope.machine.devices import DevicePeaks, device_table, is_nvidia
from stepscope.predict.memory_times import (
    KERNEL_NS,
    KERNELS,
    KNOWLEDGE,
    SHORT_BANDS,
    SIZES_NS,
    MemoryModel,
    bandwidth_of,
    is_older,
    kernel_ns,
    kernel_of,
    row_ns,
)

GPUS: Final = tuple(DEVICES)
ELEMENTWISE: Final = ("add", "mul", "div", "pow", "addu", "mulu", "divu", "relu", "tanh", "gelu", "powu")
COPY: Final = "mulu"
"""Reads a tensor and writes one, as a copy does."""
LONG_NS: Final = 50_000.0
"""From this roofline time on an operation is reported as a long one."""
_LARGE_BYTES: Final = 128e6
_PRODUCT_BYTES: Final = 0.6e9
"""From this traffic on the products of a few rows with a large matrix tell the bandwidth."""
_START: Final = (1.1, 7.0, 5.0, 5.0, 0.5, 0.4, -0.5, 0.4)
_LOWEST: Final = (0.9, -3.0, -3.0, -3.0, -2.0, 0.0, -3.0, 0.0)
_HIGHEST: Final = (1.5, 8.3, 6.0, 8.0, 2.0, 1.5, 1.5, 0.5)
"""No block takes longer than the shortest kernels of public traces, which these timings hide behind their host."""


@dataclass(frozen=True, slots=True)
class Host:
    """What the machines of the timings added to kernels.

    Attributes:
        floors: of a GPU's machine, nanoseconds that the timing of an addition takes at least.
        relative: an operator's floor over that of an addition.
        before: share of the floor that passes before a kernel starts.
    """

    floors: dict[str, float]
    relative: dict[str, float]
    before: float

    def latency(self, ns: Numbers, operator: npt.NDArray[np.str_], floor: float) -> Numbers:
        """What would have been timed of kernels of these nanoseconds on a machine with this floor."""
        floors = floor * np.array([self.relative[name] for name in operator.tolist()])
        return np.maximum(floors, self.before * floors + ns)

    def kernel(self, latency: Numbers, operator: npt.NDArray[np.str_], floor: float) -> Numbers:
        """The kernels' nanoseconds; not-a-number where the host hid them."""
        floors = floor * np.array([self.relative[name] for name in operator.tolist()])
        return np.where(latency > 1.3 * floors, latency - self.before * floors, np.nan)


# Learning


def fit(
    timings: VectorTimings, folder: Path, *, every: int = 4, unseen: AbstractSet[str] = frozenset()
) -> tuple[MemoryModel, Host]:
    """Learn from the GPUs in these timings, and of products from those of all but the unseen generations.

    The bands are left empty.
    """
    gpus = [gpu for gpu in GPUS if np.any(timings.gpu == gpu)]
    host = fit_host(timings, gpus)
    shares = {gpu: sustained_share(timings, gpu) for gpu in gpus}
    generations = _by_generation(shares, product_shares(folder, unseen=unseen))
    constants = [_fit_rows(index, timings, shares, host, every) for index in range(1, len(KERNELS))]
    older = [share for gpu, share in shares.items() if is_older(public_device(gpu))]
    newer = [share for name, share in generations.items() if name not in ("Pascal", "Turing")]
    model = MemoryModel(
        generations=tuple(generations),
        shares=np.array(list(generations.values())),
        older=float(np.mean(older or newer)),
        newer=float(np.mean(newer)),
        rows=np.array(constants),
        bands=np.ones((len(KNOWLEDGE), len(KERNELS), len(SIZES_NS) + 1, 2)),
        largest=_largest(timings),
    )
    return model, host


def _largest(timings: VectorTimings) -> Numbers:
    """The most bytes and the longest row of each kernel; infinity where nothing has rows, or nothing was timed."""
    kernels = kernel_of(timings.operations, public_device(GPUS[0]))
    found = np.full((len(KERNELS), 2), np.inf)
    for index in np.unique(kernels).tolist():
        mine = timings.operations.select(kernels == index)
        found[index] = mine.bytes.max(), mine.columns.max() if index else np.inf
    return found


def fit_host(timings: VectorTimings, gpus: Sequence[str]) -> Host:
    """The floors, and how much of them stands before the kernel."""
    operators = sorted(set(timings.operator.tolist()))
    floors = {(gpu, name): _floor(timings, gpu, name) for gpu in gpus for name in operators}
    relative = {name: float(np.median([floors[gpu, name] / floors[gpu, "add"] for gpu in gpus])) for name in operators}
    before = [
        (_line(timings, gpu, name)[0] - KERNEL_NS) / floors[gpu, name]
        for gpu in gpus
        for name in ELEMENTWISE
        if name in operators
    ]
    return Host({gpu: floors[gpu, "add"] for gpu in gpus}, relative, float(np.median(before)))


def sustained_share(timings: VectorTimings, gpu: str) -> float:
    """Of the peak bandwidth, what element-wise operators sustain: the median over operators."""
    slopes = [_line(timings, gpu, name)[1] for name in ELEMENTWISE if name in timings.operator]
    return float(1e9 / np.median(slopes) / public_device(gpu).bandwidth_bytes_s)


def product_shares(folder: Path, *, unseen: AbstractSet[str] = frozenset()) -> dict[str, float]:
    """Of the peak bandwidth, what bf16 products of at most 32 rows with a large matrix reach, by generation.

    The A100 of these timings is another one than that of the FP32 timings, but of its generation: it counts where
    that GPU is held out, not where the generation is.
    """
    names = {"A100-SXM-80": "A100-SXM4-80GB", "L40S": "L40S", "H200-SXM": "H200-SXM", "B200-SXM": "B200-SXM"}
    m, n, k = (pl.col(name).cast(pl.Float64) for name in "mnk")
    table = (
        pl.read_parquet(folder / "gemm_low_precision.parquet")
        .filter((pl.col("dtype") == "bfloat16") & (pl.col("m") <= 32))
        .with_columns(bytes=2 * (m * k + k * n + m * n))
        .filter(pl.col("bytes") >= _PRODUCT_BYTES)
    )
    shares = {}
    for gpu, name in names.items():
        device = public_device(name)
        rate = table.filter(pl.col("gpu") == gpu).select(pl.col("bytes") / pl.col("latency_ms") * 1e3).to_series()
        if len(rate) and device.architecture not in unseen:
            shares[device.architecture] = float(rate.quantile(0.9) or 0.0) / device.bandwidth_bytes_s
    return shares


def _by_generation(shares: dict[str, float], products: dict[str, float]) -> dict[str, float]:
    """Means over the GPUs of a generation, each as much as another."""
    found: dict[str, list[float]] = {name: [share] for name, share in products.items()}
    for gpu, share in shares.items():
        found.setdefault(public_device(gpu).architecture, []).append(share)
    return {name: float(np.mean(values)) for name, values in sorted(found.items())}


def _of(timings: VectorTimings, gpu: str, operator: str) -> VectorTimings:
    return timings.select((timings.gpu == gpu) & (timings.operator == operator))


def _floor(timings: VectorTimings, gpu: str, operator: str) -> float:
    """The median of the tenth with the least traffic."""
    mine = _of(timings, gpu, operator)
    small = mine.operations.bytes <= np.quantile(mine.operations.bytes, 0.1)
    return float(np.median(mine.latency_ns[small]))


def _line(timings: VectorTimings, gpu: str, operator: str) -> tuple[float, float]:
    """Nanoseconds at no traffic, and those per byte, of latencies well above the floor; relative errors count."""
    mine = _of(timings, gpu, operator)
    long = mine.latency_ns > 1.5 * _floor(timings, gpu, operator)
    weight = 1 / mine.latency_ns[long]
    design = np.stack([weight, weight * mine.operations.bytes[long]], axis=1)
    start, slope = np.linalg.lstsq(design, np.ones(len(weight)), rcond=None)[0]
    return float(start), float(slope)


def _fit_rows(kernel: int, timings: VectorTimings, shares: dict[str, float], host: Host, every: int) -> Numbers:
    """Constants of one row-wise kernel, from the GPUs whose shares are given."""
    parts = []
    for gpu, share in shares.items():
        device = public_device(gpu)
        mine = timings.select((timings.gpu == gpu) & np.isin(timings.operator, ("softmax", "ln")))
        mine = mine.select(kernel_of(mine.operations, device) == kernel)
        mine = mine.select(np.arange(0, len(mine.gpu), every))
        parts.append((device, device.bandwidth_bytes_s * share, mine))

    def errors(constants: Numbers) -> Numbers:
        found = []
        for device, bandwidth, mine in parts:
            ns = KERNEL_NS + row_ns(kernel, mine.operations, device, bandwidth, constants)
            latency = host.latency(ns, mine.operator, host.floors[mine.gpu[0]])
            found.append(np.log(latency / mine.latency_ns))
        return np.concatenate(found)

    found = least_squares(errors, _START, bounds=(_LOWEST, _HIGHEST), loss="soft_l1", f_scale=0.1, max_nfev=60)
    return np.asarray(np.round(found.x, 4))


# Bands and validation


def measured_device(timings: VectorTimings, gpu: str, host: Host) -> DevicePeaks:
    """The GPU as `stepscope devices measure` would know it: from one large copy, here its largest one in the timings.

    Copies measured one after another hide the host; here its part before the kernel is taken from one tiny launch.
    """
    mine = _of(timings, gpu, COPY)
    largest = int(np.argmax(mine.operations.bytes))
    before = host.before * host.relative[COPY] * smallest_launch_ns(timings, gpu)
    rate = mine.operations.bytes[largest] / (mine.latency_ns[largest] - before - KERNEL_NS) * 1e9
    return replace(public_device(gpu), sustained_bandwidth_bytes_s=float(rate))


def smallest_launch_ns(timings: VectorTimings, gpu: str) -> float:
    """What one tiny launch takes on the GPU's machine: the addition with the least traffic."""
    mine = _of(timings, gpu, "add")
    return float(mine.latency_ns[int(np.argmin(mine.operations.bytes))])


def with_bands(model: MemoryModel, timings: VectorTimings, folder: Path) -> MemoryModel:
    """The model with the factors that hold nine of ten timings of held-out GPUs, for each knowledge of the device.

    What moves along lines is as fast as the memory: devices whose bandwidth others measured count as much as GPUs.
    """
    found: dict[tuple[int, int, int], list[Numbers]] = {}
    for device in measured_by_others():
        for known, name in ((1, device.architecture), (2, "")):
            one = replace(device, sustained_bandwidth_bytes_s=None, architecture=name)
            ratio = np.array([bandwidth_of(one, model)[1] / (device.sustained_bandwidth_bytes_s or np.nan)])
            for place in range(len(SHORT_BANDS), len(SIZES_NS) + 1):
                found.setdefault((known, 0, place), []).append(ratio)
    for gpu in GPUS:
        mine = timings.select(timings.gpu == gpu)
        others, host = fit(timings.select(timings.gpu != gpu), folder)
        floor = _floor(timings, gpu, "add")
        kernel = host.kernel(mine.latency_ns, mine.operator, floor)
        for known, device in enumerate(_known(timings, gpu, host)):
            predicted, kernels = _kernels(mine, device, others)
            size = np.searchsorted(SIZES_NS, predicted, side="right")
            for index in range(len(KERNELS)):
                for place in range(len(SHORT_BANDS), len(SIZES_NS) + 1):
                    which = (kernels == index) & (size == place) & np.isfinite(kernel)
                    found.setdefault((known, index, place), []).append(kernel[which] / predicted[which])
    bands = np.empty_like(model.bands)
    bands[:, :, : len(SHORT_BANDS)] = SHORT_BANDS
    for (known, index, place), ratios in found.items():
        bands[known, index, place] = _ends(ratios)
    return replace(model, bands=bands)


def _ends(ratios: list[Numbers]) -> Numbers:
    """The 5 % and 95 % quantiles, each GPU counting as much as another; at least 3 % either way."""
    low, high = middle_ninety(ratios)
    return np.round([min(low, 0.97), max(high, 1.03)], 3)


def _known(timings: VectorTimings, gpu: str, host: Host) -> tuple[DevicePeaks, ...]:
    """The GPU in each of KNOWLEDGE: measured, of its generation, of a generation that nobody knows."""
    public = public_device(gpu)
    return measured_device(timings, gpu, host), public, replace(public, architecture="")


def _kernels(mine: VectorTimings, device: DevicePeaks, model: MemoryModel) -> tuple[Numbers, npt.NDArray[np.int64]]:
    kernels = kernel_of(mine.operations, device)
    return kernel_ns(mine.operations, kernels, device, bandwidth_of(device, model)[1], model), kernels


PUBLIC: Final = "learned, public peaks"
MEASURED: Final = "learned, with the target's own sustained rates"
RATIO: Final = "learned ratio from another GPU"


def validate(folder: Path, *, quick: bool = False) -> list[Accuracy]:
    """Errors of every method on each GPU, and each generation, that was held out."""
    timings = vector_timings(folder, every=8 if quick else 1)
    found = []
    for gpu in GPUS:
        held = {other for other in GPUS if other == gpu}
        found += _held_out(timings, folder, gpu, held, "gpu")
    for gpu in GPUS:
        family = public_device(gpu).architecture
        held = {other for other in GPUS if public_device(other).architecture == family}
        found += _held_out(timings, folder, gpu, held, "family")
    return [*found, *_bandwidths(fit(timings, folder, every=8)[0])]


def measured_by_others(*, is_nvidias: bool = True) -> list[DevicePeaks]:
    """Devices of the table that are in no timings, but whose bandwidth others measured."""
    timed = {public_device(gpu).name for gpu in GPUS}
    known = [one for one in device_table() if one.sustained_bandwidth_bytes_s and one.name not in timed]
    return [one for one in known if is_nvidia(one) or not is_nvidias]


def _bandwidths(model: MemoryModel) -> list[Accuracy]:
    """Of devices that are in no timings, the bandwidth that others measured, against what their makers' peaks tell."""
    found = []
    for device in measured_by_others(is_nvidias=False):
        measured = device.sustained_bandwidth_bytes_s or np.nan
        _, learned = bandwidth_of(replace(device, sustained_bandwidth_bytes_s=None), model)
        for method, rate in ((PUBLIC, learned), ("roofline", float(device.bandwidth_bytes_s))):
            # An operation's time is off by as much as one over the bandwidth.
            found.append(
                Accuracy("bandwidth that others measured", "gpu", device.name, method, 1, abs(measured / rate - 1))
            )
    return found


def _held_out(timings: VectorTimings, folder: Path, gpu: str, held: set[str], split: str) -> list[Accuracy]:
    learned_from = [other for other in GPUS if other not in held]
    unseen = {public_device(other).architecture for other in held} if split == "family" else set[str]()
    model, host = fit(timings.select(np.isin(timings.gpu, learned_from)), folder, unseen=unseen)
    mine = timings.select(timings.gpu == gpu)
    floor = float(np.median([host.floors[other] for other in learned_from]))
    launch = smallest_launch_ns(timings, gpu)
    public, measured = public_device(gpu), measured_device(timings, gpu, host)
    roof = mine.operations.bytes / public.bandwidth_bytes_s * 1e9
    predictions = {
        PUBLIC: host.latency(_kernels(mine, public, model)[0], mine.operator, floor),
        MEASURED: host.latency(_kernels(mine, measured, model)[0], mine.operator, launch),
        "roofline": roof,
    }
    found = []
    for kind, which in _kinds(mine, roof).items():
        for method, ns in predictions.items():
            error = mean_error(ns[which], mine.latency_ns[which])
            found.append(Accuracy(kind, split, gpu, method, int(which.sum()), error))
        if split == "gpu":
            found += _from_donors(timings, mine, which, kind, gpu, (model, host, launch))
    return found


def _kinds(mine: VectorTimings, roof: Numbers) -> dict[str, npt.NDArray[np.bool_]]:
    flat = np.isin(mine.operator, ELEMENTWISE)
    long = roof >= LONG_NS
    return {
        "element-wise, fp32": flat,
        "element-wise, fp32, above 50 us": flat & long,
        "softmax, fp32": mine.operator == "softmax",
        "softmax, fp32, above 50 us": (mine.operator == "softmax") & long,
        "layer normalisation, fp32": mine.operator == "ln",
        "layer normalisation, fp32, above 50 us": (mine.operator == "ln") & long,
    }


def _from_donors(
    timings: VectorTimings,
    mine: VectorTimings,
    which: npt.NDArray[np.bool_],
    kind: str,
    gpu: str,
    learned: tuple[MemoryModel, Host, float],
) -> list[Accuracy]:
    """What another GPU's timing of the same shape gives, all other GPUs together."""
    model, host, launch = learned
    target, errors = (
        public_device(gpu),
        {name: list[float]() for name in ("wave scaling", "ratio of bandwidths", RATIO)},
    )
    goal = mine.latency_ns[which]
    chosen = mine.select(which)
    goal_kernel, _ = _kernels(chosen, measured_device(timings, gpu, host), model)
    for donor in (other for other in GPUS if other != gpu):
        theirs = timings.select(timings.gpu == donor).select(which)
        source = public_device(donor)
        ratio = source.bandwidth_bytes_s / target.bandwidth_bytes_s
        errors["ratio of bandwidths"].append(mean_error(theirs.latency_ns * ratio, goal))
        errors["wave scaling"].append(
            mean_error(theirs.latency_ns * wave_ratio(chosen.operations, source, target), goal)
        )
        start, _ = _kernels(theirs, measured_device(timings, donor, host), model)
        kernel = host.kernel(theirs.latency_ns, theirs.operator, host.floors[donor])
        kernel = np.where(np.isfinite(kernel), kernel, start) * goal_kernel / start
        errors[RATIO].append(mean_error(host.latency(kernel, theirs.operator, launch), goal))
    count = int(which.sum()) * (len(GPUS) - 1)
    return [Accuracy(kind, "gpu", gpu, name, count, float(np.mean(values))) for name, values in errors.items()]


def train(folder: Path) -> MemoryModel:
    """The model that is shipped."""
    timings = vector_timings(folder)
    model, _ = fit(timings, folder, every=2)
    return with_bands(model, timings, folder)
