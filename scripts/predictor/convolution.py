"""Learn what convolutions cost in FP32, and check it on GPUs that were held out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from scripts.predictor.accuracy import Accuracy, mean_error
from scripts.predictor.boosting import fit_trees
from scripts.predictor.memory import MEASURED, PUBLIC
from scripts.predictor.timings import Numbers, public_device, wave_ratio
from stepscope.machine.devices import DevicePeaks
from stepscope.predict.operation_times import ConvolutionModel, base_ns, convolution_times, features
from stepscope.predict.operations import Operations, roofline_ns

GPUS: Final = ("P4", "P100", "V100", "T4")
KIND: Final = "convolution, fp32"


_LARGE_FLOPS: Final = 1e10


def timings(folder: Path, *, every: int = 1) -> dict[str, tuple[Operations, Numbers]]:
    """Of each GPU, the convolutions of conv2d_fp32.parquet and their nanoseconds."""
    table = pl.read_parquet(folder / "conv2d_fp32.parquet")
    found = {}
    for gpu in GPUS:
        mine = table.filter(pl.col("gpu") == gpu).gather_every(every)
        found[gpu] = (_operations(mine), mine["latency_ms"].to_numpy() * 1e6)
    return found


def _operations(table: pl.DataFrame) -> Operations:
    names = ("B", "Input_Channel", "Output_Channel", "Kernel_Szie", "Input_Size", "Stride", "Padding")
    batch, read, written, kernel, size, stride, padding = (table[name].to_numpy().astype(np.float64) for name in names)
    output = (size + 2 * padding - kernel) // stride + 1
    rows, inner, one = batch * output**2, read * kernel**2, np.ones(len(table))
    return Operations(
        name=np.full(len(table), "cudnn_convolution"),
        kind=np.full(len(table), "convolution"),
        number_type=np.full(len(table), "fp32"),
        flops=2 * rows * written * inner,
        bytes=4 * (batch * read * size**2 + written * inner + rows * written),
        batch=one,
        rows=rows,
        columns=written,
        inner=inner,
        is_backward=np.zeros(len(table), np.bool_),
    )


def measured_device(folder: Path, gpu: str) -> DevicePeaks:
    """The GPU as `stepscope devices measure` would know it: from the large matrix product that it was fastest at."""
    b, m, n, k = (pl.col(name).cast(pl.Float64) for name in "BMNK")
    table = pl.read_parquet(folder / "matmul_fp32.parquet").filter(pl.col("gpu") == gpu)
    rates = table.filter(2 * b * m * n * k >= _LARGE_FLOPS).select(2 * b * m * n * k / pl.col("latency_ms") * 1e3)
    # The best of a noisy few would be luck: the rate that one in twenty large products exceeds.
    return replace(public_device(gpu), sustained_flops_s={"fp32": float(rates.to_series().quantile(0.95) or 0.0)})


def fit(data: dict[str, tuple[Operations, Numbers]], devices: dict[str, DevicePeaks]) -> ConvolutionModel:
    """Learn from these GPUs; the band is left empty."""
    given = np.concatenate([features(of_gpu, devices[gpu]) for gpu, (of_gpu, _) in data.items()])
    wanted = np.concatenate([np.log(ns / base_ns(of_gpu, devices[gpu])) for gpu, (of_gpu, ns) in data.items()])
    trees = fit_trees(given, wanted, trees=200, leaves=16, rate=0.08, loss="absolute_error")
    return ConvolutionModel(trees, given.min(axis=0), given.max(axis=0), np.array([1.0, 1.0]))


def validate(folder: Path, *, quick: bool = False) -> list[Accuracy]:
    """Errors of every method on each GPU, and each generation, that was held out."""
    return [row for row, _ in _held_out(folder, every=6 if quick else 1)]


def _held_out(folder: Path, *, every: int) -> list[tuple[Accuracy, Numbers]]:
    """Each error with the ratios of measured to predicted."""
    data = timings(folder, every=every)
    devices = {gpu: measured_device(folder, gpu) for gpu in GPUS}
    models: dict[tuple[str, ...], ConvolutionModel] = {}
    found = []
    for gpu in GPUS:
        operations, measured = data[gpu]
        for split in ("gpu", "family"):
            others = tuple(one for one in GPUS if one != gpu and (split == "gpu" or not _same_family(one, gpu)))
            if others not in models:
                models[others] = fit({one: data[one] for one in others}, devices)
            for method, device in ((PUBLIC, public_device(gpu)), (MEASURED, devices[gpu])):
                predicted = convolution_times(operations, device, models[others]).ns
                found.append(_judged(split, gpu, method, predicted, measured))
        found.append(_judged("gpu", gpu, "roofline", roofline_ns(operations, public_device(gpu)), measured))
        found += _from_donors(data, gpu)
    return found


def _judged(split: str, gpu: str, method: str, predicted: Numbers, measured: Numbers) -> tuple[Accuracy, Numbers]:
    error = mean_error(predicted, measured)
    return Accuracy(KIND, split, gpu, method, len(measured), error), measured / predicted


def _same_family(one: str, other: str) -> bool:
    return public_device(one).architecture == public_device(other).architecture


def _from_donors(data: dict[str, tuple[Operations, Numbers]], gpu: str) -> list[tuple[Accuracy, Numbers]]:
    """What other GPUs' timings of the same shapes give, all together."""
    operations, measured = data[gpu]
    target, place = public_device(gpu), {shape: index for index, shape in enumerate(_shapes(operations))}
    pairs = {"wave scaling": list[Numbers](), "ratio of peaks": list[Numbers]()}
    for donor in (one for one in GPUS if one != gpu):
        theirs, timed = data[donor]
        both = [(index, place[shape]) for index, shape in enumerate(_shapes(theirs)) if shape in place]
        there, here = np.array(both).T
        source = public_device(donor)
        ratios = {
            "wave scaling": wave_ratio(theirs.select(there), source, target),
            "ratio of peaks": np.full(len(there), source.flops_s["fp32"] / target.flops_s["fp32"]),
        }
        for method, ratio in ratios.items():
            pairs[method].append(np.stack([timed[there] * ratio, measured[here]]))
    return [_judged("gpu", gpu, method, *np.concatenate(parts, axis=1)) for method, parts in pairs.items()]


def _shapes(operations: Operations) -> list[tuple[float, ...]]:
    columns = (operations.rows, operations.columns, operations.inner, operations.bytes)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def train(folder: Path) -> ConvolutionModel:
    """The model that is shipped, its band from the held-out GPUs by their public figures."""
    ratios = [ratio for row, ratio in _held_out(folder, every=1) if row.split == "gpu" and row.method == PUBLIC]
    data = timings(folder)
    model = fit(data, {gpu: measured_device(folder, gpu) for gpu in GPUS})
    return replace(model, band=np.round(np.quantile(np.concatenate(ratios), [0.05, 0.95]), 3))
