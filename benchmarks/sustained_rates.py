"""What devices reach, from public tables of timings: the measured figures of data/devices.csv that no table states.

    python benchmarks/sustained_rates.py FOLDER

FOLDER holds matmul_fp32.parquet and vector_fp32.parquet (NeuSight, MIT) and gemm_low_precision.parquet (aiconfigurator,
Apache-2.0); times are in milliseconds. Printed are, for each device:

- tera-operations per second of matrix products by number type: of the products that took 5 ms or longer, the 95th
  percentile of 2 x batch x m x n x k / time;
- GB per second: the least-squares slope through time against bytes of additions and multiplications of two FP32 tensors
  that move 100 MB or more (two read, one written). What a launch costs stays out of the slope.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import polars as pl

LONG_MS = 5.0
HIGH = 0.95
MANY_BYTES = 1e8


def product_rates(timings: pl.DataFrame) -> pl.DataFrame:
    """Tera-operations per second by gpu and number_type, from columns gpu, number_type, operations and latency_ms."""
    long = timings.filter(pl.col("latency_ms") >= LONG_MS)
    rate = pl.col("operations") / pl.col("latency_ms") / 1e9
    return long.group_by("gpu", "number_type").agg(rate.quantile(HIGH).alias("tflops"), products=pl.len()).sort("gpu")


def bandwidths(timings: pl.DataFrame) -> dict[str, float]:
    """GB per second by device, from columns op, B, H, gpu and latency_ms of element-wise operators."""
    timings = timings.filter(pl.col("op").is_in(["add", "mul"])).with_columns(moved=12.0 * pl.col("B") * pl.col("H"))
    found = {}
    for (gpu,), rows in timings.filter(pl.col("moved") >= MANY_BYTES).sort("gpu").group_by("gpu", maintain_order=True):
        slope, _ = np.polyfit(rows["moved"].to_numpy(), rows["latency_ms"].to_numpy() / 1e3, 1)
        found[str(gpu)] = 1 / slope / 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    folder = parser.parse_args().folder
    full = pl.read_parquet(folder / "matmul_fp32.parquet").select(
        "gpu",
        "latency_ms",
        number_type=pl.lit("fp32"),
        operations=2.0 * pl.col("B") * pl.col("M") * pl.col("N") * pl.col("K"),
    )
    low = pl.read_parquet(folder / "gemm_low_precision.parquet").select(
        "gpu", "latency_ms", number_type="dtype", operations=2.0 * pl.col("m") * pl.col("n") * pl.col("k")
    )
    for rates in (product_rates(full), product_rates(low)):
        for gpu, number_type, tflops, products in rates.sort("gpu", "number_type").iter_rows():
            print(f"{gpu:<12} {number_type:<10} {tflops:8.2f} TFLOP/s  ({products:,} products)")
    for gpu, gb_per_s in bandwidths(pl.read_parquet(folder / "vector_fp32.parquet")).items():
        print(f"{gpu:<12} {'bandwidth':<10} {gb_per_s:8.1f} GB/s")


if __name__ == "__main__":
    main()
