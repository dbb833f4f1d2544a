"""The timings of matrix products by GPU and number type, and what a measurement of each GPU would have told."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from scripts.predictor import tiles
from scripts.predictor.memory import product_shares, sustained_share
from scripts.predictor.timings import products, public_device
from scripts.predictor.timings import vector_timings as elementwise_timings
from stepscope.machine.devices import DevicePeaks
from stepscope.predict.matrix_times import START_NS
from stepscope.predict.operations import Names, Numbers, Operations

VECTOR_GPUS: Final = ("A100-40", "P100", "P4", "T4", "V100")
TENSOR_GPUS: Final = {"A100-SXM-80": "A100-SXM4-80GB", "L40S": "L40S", "H200-SXM": "H200-SXM", "B200-SXM": "B200-SXM"}
NUMBER_TYPES: Final = {"bfloat16": "bf16", "fp8": "fp8"}
"""Those of the timings that are PyTorch's; scaling by blocks and nvfp4 are not."""
_TINY_FLOPS: Final = 4e6
_FEW_COLUMNS: Final = 128
"""Most columns of the FP8 products that tell what the quantisation before them takes."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Products of one GPU and number type; arrays of shape (n,).

    Attributes:
        gpu: as in the timings.
        unit: one of UNITS.
        device: what its maker says, and no more.
        latency_ns: as it was timed.
        host_ns: the least that the host took for each, however short its kernel.
        tile, splits: of the kernel in FP32 that ran, as `tiles.Kernels` has them.
    """

    gpu: str
    unit: str
    kind: str
    device: DevicePeaks
    operations: Operations
    latency_ns: Numbers
    host_ns: Numbers
    operator: Names
    tile: npt.NDArray[np.int64]
    splits: Numbers

    def select(self, which: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> Timings:
        return replace(
            self,
            operations=self.operations.select(which),
            latency_ns=self.latency_ns[which],
            host_ns=self.host_ns[which],
            operator=self.operator[which],
            tile=self.tile[which],
            splits=self.splits[which],
        )


@lru_cache(maxsize=2)
def vector_timings(folder: Path) -> tuple[Timings, ...]:
    """matmul_fp32.parquet by GPU. In it N is the inner dimension and K the columns: the kernels' grids tell."""
    table = pl.read_parquet(folder / "matmul_fp32.parquet").sort("gpu", "op", "B", "M", "N", "K")
    found = []
    for gpu in VECTOR_GPUS:
        parts = [
            _vector_part(table.filter((pl.col("gpu") == gpu) & (pl.col("op") == op)), op) for op in ("bmm", "linear")
        ]
        operations, latency, host, tile, splits = zip(*parts, strict=True)
        found.append(
            Timings(
                gpu, "vector", "fp32", public_device(gpu), Operations.joined(operations), np.concatenate(latency),
                np.concatenate(host), np.repeat(["bmm", "linear"], [len(part) for part in latency]),
                np.concatenate(tile), np.concatenate(splits),
            )
        )  # fmt: skip
    return tuple(found)


def _vector_part(
    table: pl.DataFrame, operator: str
) -> tuple[Operations, Numbers, Numbers, npt.NDArray[np.int64], Numbers]:
    batch, rows, inner, columns = (table[name].to_numpy().astype(np.float64) for name in "BMNK")
    operations = products(batch, rows, inner, columns, "fp32", operator == "linear")
    latency = table["latency_ms"].to_numpy() * 1e6
    tiny = (operations.flops < _TINY_FLOPS) & (columns < 200)
    splits = table["grid_z"].to_numpy() if operator == "linear" else np.ones(len(table))
    host = np.full(len(latency), float(np.median(latency[tiny])))
    return operations, latency, host, tiles.places(table["kernel"]), splits.astype(np.float64)


@lru_cache(maxsize=2)
def tensor_timings(folder: Path) -> tuple[Timings, ...]:
    """gemm_low_precision.parquet by GPU and number type; its kernels were timed without the host."""
    table = pl.read_parquet(folder / "gemm_low_precision.parquet")
    table = table.with_columns(ns=pl.col("latency_ms") * 1e6).sort("gpu", "dtype", "m", "n", "k")
    found = []
    for gpu, name in TENSOR_GPUS.items():
        mine, device = table.filter(pl.col("gpu") == gpu), public_device(name)
        for dtype, kind in NUMBER_TYPES.items():
            part = mine.filter(pl.col("dtype") == dtype)
            if not len(part) or kind not in device.flops_s:
                continue
            if kind == "fp8":
                part = _without_quantisation(part, mine.filter(pl.col("dtype") == "bfloat16"))
            rows, columns, inner = (part[axis].to_numpy().astype(np.float64) for axis in "mnk")
            zero = np.zeros(len(part))
            found.append(
                Timings(
                    gpu, "tensor", kind, device, products(zero + 1, rows, inner, columns, kind, True),
                    part["ns"].to_numpy(), zero, np.full(len(part), "linear"), zero.astype(np.int64) - 1, zero + 1,
                )
            )  # fmt: skip
    return tuple(found)


def _without_quantisation(fp8: pl.DataFrame, bf16: pl.DataFrame) -> pl.DataFrame:
    """The products that took more than half of what was timed.

    What was timed is a layer that gets its input in bf16 and quantises it: the largest number of all, then the
    quotients. This depends on rows and inner dimension alone, and products of few columns take hardly more; they read
    half as much in FP8 as in bf16.
    """
    few = fp8.filter(pl.col("n") <= _FEW_COLUMNS).join(bf16.select("m", "n", "k", other="ns"), on=["m", "n", "k"])
    before = pl.col("ns") - START_NS - (pl.col("other") - START_NS) / 2
    quantised = few.group_by("m", "k").agg(before=before.median())
    alone = fp8.join(quantised, on=["m", "k"], maintain_order="left")
    return alone.filter(pl.col("ns") > 2 * pl.col("before")).with_columns(ns=pl.col("ns") - pl.col("before"))


def thinned(timings: Timings, rows: int) -> Timings:
    """At most so many rows, always the same."""
    if len(timings.latency_ns) <= rows:
        return timings
    chosen = np.random.default_rng(0).permutation(len(timings.latency_ns))[:rows]
    return timings.select(np.sort(chosen))


def measured_device(timings: Timings, folder: Path) -> DevicePeaks:
    """The device as if `stepscope devices measure` had run on it: what its largest products and copies reached."""
    flops = timings.operations.flops
    arithmetic = flops / timings.device.flops_s[timings.kind]
    traffic = timings.operations.bytes / timings.device.bandwidth_bytes_s
    # Measured is the product of two matrices as they stand, as in bmm; a linear layer's weight is turned.
    plain = (arithmetic > 2 * traffic) & (timings.operator == timings.operator[0])
    large = plain & (arithmetic > np.quantile(arithmetic[plain], 0.9))
    rate = float(np.quantile(flops[large] / timings.latency_ns[large] * 1e9, 0.9))
    bandwidth = _bandwidth_shares(folder)[timings.gpu] * timings.device.bandwidth_bytes_s
    return replace(timings.device, sustained_flops_s={timings.kind: rate}, sustained_bandwidth_bytes_s=bandwidth)


@lru_cache(maxsize=2)
def _bandwidth_shares(folder: Path) -> dict[str, float]:
    """Of the peak bandwidth, what element-wise operators sustain, else products with a large matrix of few rows."""
    elementwise = elementwise_timings(folder, every=8)
    shares = {gpu: sustained_share(elementwise, gpu) for gpu in VECTOR_GPUS}
    by_generation = product_shares(folder)
    return shares | {gpu: by_generation[public_device(name).architecture] for gpu, name in TENSOR_GPUS.items()}
