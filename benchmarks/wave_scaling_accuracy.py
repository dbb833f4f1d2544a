"""Error of scaling measured times from one GPU to another, on calls that were measured on both.

    python benchmarks/wave_scaling_accuracy.py FOLDER

FOLDER holds vector_fp32.parquet, matmul_fp32.parquet and conv2d_fp32.parquet: rows of one operator's call each with
its latency, kernel, grid and block on five GPUs (sitar-lab/NeuSight, MIT). Their latencies hold a launch of some 25 to
30 us, the least of each GPU, which is taken off. Printed is the mean absolute logarithm of predicted over measured
time over all ordered pairs of GPUs: first of wave scaling, ours, Habitat's and plain ratios, with the share of calls
whose time lies in our band; then of predicted times times (measured / predicted on the source) ^ c, for several c. The
shipped models were fitted on these GPUs among others, so the second table tells how errors go together, not how large
they are on others.
"""

from __future__ import annotations

import sys
from itertools import permutations
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from stepscope.machine.devices import DevicePeaks, named_device
from stepscope.predict.operation_times import (
    operation_times,
    product_of,
    resident_blocks,
    scaled_ns,
    wave_factors,
)
from stepscope.predict.operations import Operations

DEVICES: Final = {
    "A100-40": "A100-PCIe-40GB", "P100": "P100-PCIe-16GB", "V100": "V100-PCIe-32GB", "T4": "T4", "P4": "P4",
}  # fmt: skip
TABLES: Final = {
    "vector_fp32": ("op", "B", "H"),
    "matmul_fp32": ("op", "B", "M", "N", "K"),
    "conv2d_fp32": ("B", "Input_Channel", "Output_Channel", "Kernel_Szie", "Input_Size", "Stride", "Padding"),
}
SIZES_MS: Final = ((0.005, 0.03), (0.03, 0.1), (0.1, 1e9))
"""On the source, without the launch."""
SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
_START_MS: Final = 0.002
_LAUNCH_QUANTILE: Final = 0.005


def main(folder: Path) -> None:
    print(f"{'table':<12} {'ms':>12} {'pairs':>7}  bandwidth     peak  Habitat     ours  in band")
    for table, keys in TABLES.items():
        calls = _calls(folder / f"{table}.parquet", keys)
        for least, most in SIZES_MS:
            errors: dict[str, list[np.ndarray]] = {}
            for source, target in permutations(DEVICES, 2):
                pair = _pair(calls, source, target, keys).filter(pl.col("net_ms").is_between(least, most))
                if pair.height:
                    _add(errors, pair, named_device(DEVICES[source]), named_device(DEVICES[target]))
            if errors:
                _print(table, least, most, errors)


def carried(folder: Path) -> None:
    """The second table."""
    print(f"\n{'table':<12} {'ms':>12}" + "".join(f"{f'c = {share:g}':>10}" for share in SHARES))
    for table, keys in TABLES.items():
        if table == "conv2d_fp32":
            continue
        calls = _calls(folder / f"{table}.parquet", keys)
        for least, most in SIZES_MS:
            errors: list[np.ndarray] = []
            for source, target in permutations(DEVICES, 2):
                pair = _pair(calls, source, target, keys).filter(pl.col("net_ms").is_between(least, most))
                if pair.height:
                    errors.append(_errors_by_share(pair, named_device(DEVICES[source]), named_device(DEVICES[target])))
            means = np.abs(np.concatenate(errors, axis=1)).mean(1)
            size = f"{least:g}-{most:g}" if most < 1e6 else f">{least:g}"
            print(f"{table:<12} {size:>12}" + "".join(f"{mean:>10.3f}" for mean in means))


def _errors_by_share(pair: pl.DataFrame, source: DevicePeaks, target: DevicePeaks) -> np.ndarray:
    operations = _operations(pair)
    before, after = (operation_times(operations, device).ns for device in (source, target))
    deviation = np.log(pair["net_ms"].to_numpy() * 1e6 / before)
    error = np.log(after / (pair["target_ms"].to_numpy() * 1e6))
    return np.stack([error + share * deviation for share in SHARES])


def _operations(pair: pl.DataFrame) -> Operations:
    """The calls as predictions take them."""
    names, ones = pair["op"].to_numpy().astype(np.str_), np.ones(pair.height)
    if "K" in pair.columns:
        batch, rows, columns, inner = _numbers(pair, "B", "M", "N", "K")
        kind, flops = np.full(pair.height, "matrix"), 2 * batch * rows * columns * inner
        moved = 4 * batch * (rows * inner + inner * columns + rows * columns)
    else:
        kind = np.where(names == "ln", "normalisation", np.where(names == "softmax", "softmax", "elementwise"))
        count, width = _numbers(pair, "B", "H")
        by_row = kind != "elementwise"
        moved = 4 * count * width * np.where(np.isin(names, ("add", "mul", "div", "pow")), 3, 2)
        batch, rows, columns, inner = ones, np.where(by_row, count, 1), np.where(by_row, width, count * width), ones
        flops = 0 * ones
    types = np.full(pair.height, "fp32")
    return Operations(names, kind, types, flops, moved, batch, rows, columns, inner, ones < 0)


def _print(table: str, least: float, most: float, errors: dict[str, list[np.ndarray]]) -> None:
    found = {name: np.concatenate(parts) for name, parts in errors.items()}
    size = f"{least:g}-{most:g}" if most < 1e6 else f">{least:g}"
    figures = "".join(f"{np.abs(found[name]).mean():>9.3f}" for name in ("bandwidth", "peak", "Habitat", "ours"))
    print(f"{table:<12} {size:>12} {len(found['ours']):>7} {figures} {found['in band'].mean():>8.2f}")


def _calls(path: Path, keys: tuple[str, ...]) -> pl.DataFrame:
    """Each call once a GPU, with the columns that `wave_factors` takes; launches' sizes alone are recorded."""
    table = pl.read_parquet(path).unique(["gpu", *keys], keep="first", maintain_order=True)
    launch = pl.col("latency_ms").quantile(_LAUNCH_QUANTILE).over("gpu")
    return table.select(
        "gpu",
        *keys,
        net_ms=pl.col("latency_ms") - launch + _START_MS,
        name="kernel",
        grid=pl.concat_str("grid_x", "grid_y", "grid_z", separator=","),
        block=pl.concat_str("block_x", "block_y", "block_z", separator=","),
        registers=pl.lit(None, pl.Int32),
        shared_memory_bytes=pl.lit(None, pl.Int64),
    ).filter(pl.col("net_ms") > 2 * _START_MS)


def _pair(calls: pl.DataFrame, source: str, target: str, keys: tuple[str, ...]) -> pl.DataFrame:
    there = calls.filter(pl.col("gpu") == target).select(*keys, target_ms="net_ms")
    return calls.filter(pl.col("gpu") == source).join(there, on=keys, maintain_order="left")


def _add(errors: dict[str, list[np.ndarray]], pair: pl.DataFrame, source: DevicePeaks, target: DevicePeaks) -> None:
    before, after = pair["net_ms"].to_numpy() * 1e6, pair["target_ms"].to_numpy() * 1e6
    factors = wave_factors(pair, source, target)
    low, high = (scaled_ns(before, factor) for factor in (factors.low, factors.high))
    ours = scaled_ns(before, factors.factor)
    ones = np.ones(pair.height)
    plain = {
        "bandwidth": ones * source.bandwidth_bytes_s / target.bandwidth_bytes_s,
        "peak": ones * source.flops_s["fp32"] / target.flops_s["fp32"],
        "Habitat": _habitat(pair, source, target),
    }
    for name, factor in plain.items():
        errors.setdefault(name, []).append(np.log(before * factor / after))
    errors.setdefault("ours", []).append(np.log(ours / after))
    errors.setdefault("in band", []).append(((after >= low) & (after <= high)).astype(np.float64))


def _habitat(pair: pl.DataFrame, source: DevicePeaks, target: DevicePeaks) -> np.ndarray:
    """Equation 1 of the paper, whole waves, with its g of the intensity where shapes tell it, else of memory."""
    blocks = np.array([product_of(text) for text in pair["grid"].to_list()])
    held = [resident_blocks(pair, device) * (device.multiprocessors or 0) for device in (source, target)]
    waves = [np.ceil(blocks / each) for each in held]
    share = _share(pair, target)
    clocks = (source.clock_mhz or 0) / (target.clock_mhz or 1)
    per_wave = source.bandwidth_bytes_s / target.bandwidth_bytes_s * held[1] / held[0]
    return np.asarray(waves[1] / waves[0] * per_wave**share * clocks ** (1 - share))


def _share(pair: pl.DataFrame, target: DevicePeaks) -> np.ndarray:
    """Habitat's g: of products and convolutions by their intensity, else 1."""
    if "K" in pair.columns:
        batch, rows, columns, inner = _numbers(pair, "B", "M", "N", "K")
    elif "Stride" in pair.columns:
        images, given, columns, kernel, size, stride, padding = _numbers(pair, *TABLES["conv2d_fp32"])
        batch, rows = np.ones(pair.height), images * ((size + 2 * padding - kernel) // stride + 1) ** 2
        inner = given * kernel**2
    else:
        return np.ones(pair.height)
    moved = 4 * batch * (rows * inner + inner * columns + rows * columns)
    intensity, ridge = 2 * batch * rows * columns * inner / moved, target.flops_s["fp32"] / target.bandwidth_bytes_s
    return np.asarray(np.where(intensity <= ridge, 1 - 0.5 * intensity / ridge, 0.5 * ridge / intensity))


def _numbers(pair: pl.DataFrame, *names: str) -> list[np.ndarray]:
    return [pair[name].to_numpy().astype(np.float64) for name in names]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    carried(Path(sys.argv[1]))
