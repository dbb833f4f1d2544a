"""The published timings that the predictor learns from, and the devices they were taken on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.machine.devices import DevicePeaks, named_device
from stepscope.predict.operations import Operations

Numbers = npt.NDArray[np.float64]

DEVICES: Final = {
    "P4": "P4",
    "P100": "P100-PCIe-16GB",
    "V100": "V100-PCIe-32GB",
    "T4": "T4",
    "A100-40": "A100-PCIe-40GB",
}
"""The device table's name of each GPU of the timings in FP32."""


def public_device(gpu: str) -> DevicePeaks:
    """The GPU as its maker describes it: what these same timings told of it is taken away."""
    device = named_device(DEVICES.get(gpu, gpu))
    return replace(device, sustained_flops_s={}, sustained_bandwidth_bytes_s=None, launch_ns=None, measured_source="")


@dataclass(frozen=True, slots=True)
class VectorTimings:
    """Element-wise and row-wise operators as they were timed; arrays of shape (n,).

    Attributes:
        gpu: as in the timings.
        operator: "add" for two tensors, "addu" for a tensor and a number, and so on.
        latency_ns: from one event to the next on the device, with the host's work in between.
        operations: what they are.
    """

    gpu: npt.NDArray[np.str_]
    operator: npt.NDArray[np.str_]
    latency_ns: Numbers
    operations: Operations

    def select(self, which: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> VectorTimings:
        """Those of this mask or these indices."""
        return VectorTimings(
            self.gpu[which], self.operator[which], self.latency_ns[which], self.operations.select(which)
        )


def vector_timings(folder: Path, *, every: int = 1) -> VectorTimings:
    """vector_fp32.parquet of a folder, each `every`th row of a GPU and operator, the same shapes of all GPUs."""
    table = pl.read_parquet(folder / "vector_fp32.parquet").sort("gpu", "op", "B", "H")
    if every > 1:
        table = table.filter(pl.int_range(pl.len()).over("gpu", "op") % every == 0)
    operator = table["op"].to_numpy().astype(np.str_)
    rows, columns = table["B"].to_numpy().astype(np.float64), table["H"].to_numpy().astype(np.float64)
    operations = vector_operations(operator, rows, columns)
    return VectorTimings(
        table["gpu"].to_numpy().astype(np.str_), operator, table["latency_ms"].to_numpy() * 1e6, operations
    )


def vector_operations(operator: npt.NDArray[np.str_], rows: Numbers, columns: Numbers) -> Operations:
    """FP32 operators by their name in the timings: a trailing "u" is a tensor and a number, the rest two tensors."""
    kind = np.where(operator == "softmax", "softmax", np.where(operator == "ln", "normalisation", "elementwise"))
    tensors = np.where(np.isin(operator, ("add", "sub", "mul", "div", "pow")), 3.0, 2.0)
    by_row = kind != "elementwise"
    count = len(operator)
    return Operations(
        name=np.where(operator == "ln", "native_layer_norm", operator),
        kind=kind,
        number_type=np.full(count, "fp32"),
        flops=np.zeros(count),
        bytes=4 * tensors * rows * columns,
        batch=np.ones(count),
        rows=np.where(by_row, rows, 1.0),
        columns=np.where(by_row, columns, rows * columns),
        inner=np.ones(count),
        is_backward=np.zeros(count, np.bool_),
    )


def wave_ratio(operations: Operations, source: DevicePeaks, target: DevicePeaks, number_type: str = "fp32") -> Numbers:
    """Target's time over the source's as Habitat scales the waves of one kernel on both (Yu and others, 2021).

    What has no arithmetic of its own counts one operation for each number written.
    """
    written = np.where(operations.flops > 0, operations.flops, operations.rows * operations.columns)
    intensity = written / operations.bytes
    ridge = target.flops_s[number_type] / target.bandwidth_bytes_s
    memory = np.where(intensity <= ridge, 1 - 0.5 * intensity / ridge, 0.5 * ridge / intensity)
    bandwidth = source.bandwidth_bytes_s / target.bandwidth_bytes_s
    clocks = [float((one.clock_mhz or 0) * (one.multiprocessors or 0)) for one in (source, target)]
    return np.asarray(bandwidth**memory * (clocks[0] / clocks[1]) ** (1 - memory))


def products(batch: Numbers, rows: Numbers, inner: Numbers, columns: Numbers, kind: str, shared: bool) -> Operations:
    """Products of these dimensions; with `shared` the second matrix is the same for the whole batch."""
    size = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp8": 1.0}[kind]
    result = 2.0 if kind == "fp8" else size
    count = len(batch)
    weight = inner * columns * (1.0 if shared else batch)
    return Operations(
        name=np.full(count, "linear" if shared else "bmm"),
        kind=np.full(count, "matrix"),
        number_type=np.full(count, kind),
        flops=2 * batch * rows * inner * columns,
        bytes=size * (batch * rows * inner + weight) + result * batch * rows * columns,
        batch=batch,
        rows=rows,
        columns=columns,
        inner=inner,
        is_backward=np.zeros(count, np.bool_),
    )
