"""Fit the laws of serving engines' attention and sums to public timings, and judge them on generations left out.

    OMP_NUM_THREADS=1 python -m scripts.predictor.serving_kernels FOLDER

FOLDER is `systems/data` of the package `aiconfigurator-core` (0.12; Apache-2.0), unpacked: a folder for each GPU, with
`attention/`, `comm/` and `moe/`, in each of these a folder for each engine and version. Prints the
constants of `predict/operation_times.py` and `predict/serving.py`, and the table of docs/prediction-model.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl
from scipy.optimize import least_squares

from scripts.predictor.accuracy import middle_ninety
from stepscope.machine.devices import DevicePeaks, named_device
from stepscope.predict.limits import link_of
from stepscope.predict.operation_times import operation_times, sustained_bandwidth, whole_blocks
from stepscope.predict.operations import USUAL_SHARE, Numbers, Operations, roofline_ns

DEVICES: Final = {
    "a100_sxm": "A100-SXM4-80GB",
    "h100_sxm": "H100-SXM",
    "h200_sxm": "H200-SXM",
    "l40s": "L40S",
    "b200_sxm": "B200-SXM",
    "rtx_pro_6000_server": "RTX PRO 6000 Server",
}
GENERATIONS: Final = {"a100_sxm": "A100", "h100_sxm": "H100, H200", "h200_sxm": "H100, H200", "l40s": "L40S"}
"""Of the others each is alone."""
CACHE_BYTES: Final = 128 << 20  # of devices whose cache the table does not have
DECODING_NS: Final = 10_000.0
Law = Callable[[Numbers, Numbers], Numbers]


def main(folder: Path) -> None:
    prompts: dict[str, list[Numbers]] = {}
    decoding: dict[str, list[Numbers]] = {}
    sums: dict[str, list[Numbers]] = {}
    for name, device_name in DEVICES.items():
        device, generation = named_device(device_name), GENERATIONS.get(name, device_name)
        prompts.setdefault(generation, []).append(_prompts(folder / name, device))
        decoding.setdefault(generation, []).append(_decoding(folder / name, device))
        if device.peer_link_bytes_s and (link := link_of(device)) and link.hardware == "nvlink":
            sums.setdefault(generation, []).append(_sums(folder / name, device))
    _judge("prompts (start ns, share, clocks)", prompts, _prompt_ns, (10e3, 0.6, 2e3))
    _judge("decoding", decoding, lambda _, given: DECODING_NS + given[0], ())
    _judge("sums (one shot ns, two shots ns, share)", sums, _sum_ns, (5e3, 8e3, 0.8))
    print("experts of one token: median ns beside the products and what lies between them")
    for name, device_name in DEVICES.items():
        print(f"  {device_name:22}{_beside_experts(folder / name, named_device(device_name)):8.0f}")


def _timings(folder: Path, kind: str) -> pl.DataFrame:
    """Attention alone: TensorRT-LLM's timings have other kernels in them, and Triton's are no engine's first choice."""
    files = [
        path
        for path in sorted(folder.glob(f"attention/*/*/{kind}_attention_perf.parquet"))
        if "trtllm" not in path.parts
    ]
    rows = pl.concat([pl.read_parquet(path) for path in files], how="diagonal_relaxed")
    for name in ("window_size", "step"):
        if name not in rows.columns:
            rows = rows.with_columns(pl.lit(0).alias(name))
    keys = (
        pl.when(pl.col("num_key_value_heads") == 0).then(pl.col("num_heads")).otherwise(pl.col("num_key_value_heads"))
    )
    return rows.with_columns(pl.col("window_size", "step").fill_null(0), keys=keys).filter(
        pl.col("window_size") <= 0,
        pl.col("head_dim").is_in([64, 128]),
        pl.col("num_heads").is_between(4, 64),
        pl.col("batch_size") <= 256,
        pl.col("attn_dtype") == "bfloat16",
        pl.col("kv_cache_dtype") != "fp8",
        pl.col("latency") > 0,
        ~pl.col("kernel_source").str.contains("triton"),
    )


def _operations(rows: pl.DataFrame, new: Numbers, context: Numbers) -> Operations:
    batch, heads, size, keys = (
        rows[name].to_numpy().astype(float) for name in ("batch_size", "num_heads", "head_dim", "keys")
    )
    moved = 2 * batch * size * (2 * keys * (context + new) + 2 * heads * new)
    flops = 4 * batch * heads * size * new * (context + (new + 1) / 2)
    names = np.full(rows.height, "attention")
    return Operations(
        names,
        names,
        np.full(rows.height, "bf16"),
        flops,
        moved,
        batch * heads,
        new,
        context + new,
        size,
        np.zeros(rows.height, np.bool_),
    )


def _prompts(folder: Path, device: DevicePeaks) -> Numbers:
    """Columns: arithmetic at the peak, traffic, clocks of all blocks, roofline, and what was timed; nanoseconds."""
    rows = _timings(folder, "context").filter(pl.col("step") == 0, pl.col("isl") >= 64)
    of = _operations(rows, rows["isl"].to_numpy().astype(float), np.zeros(rows.height))
    blocks, arithmetic = whole_blocks(of, device)
    clocks = of.batch * blocks / ((device.multiprocessors or np.nan) * (device.clock_mhz or np.nan)) * 1e3
    traffic = of.bytes / sustained_bandwidth(device) * 1e9
    return np.stack(
        [arithmetic, traffic, clocks, roofline_ns(of, device) / USUAL_SHARE, rows["latency"].to_numpy() * 1e6]
    )


def _prompt_ns(constants: Numbers, given: Numbers) -> Numbers:
    start, share, clocks = constants
    return np.asarray(start + np.maximum(given[0] / share, given[1]) + clocks * given[2])


def _decoding(folder: Path, device: DevicePeaks) -> Numbers:
    """Columns: traffic, roofline, what was timed; of caches that the device's does not hold."""
    rows = _timings(folder, "generation").filter(pl.col("step").is_between(100, 33_000))
    of = _operations(rows, np.ones(rows.height), rows["step"].to_numpy().astype(float))
    found = np.stack(
        [
            of.bytes / sustained_bandwidth(device) * 1e9,
            roofline_ns(of, device) / USUAL_SHARE,
            rows["latency"].to_numpy() * 1e6,
        ]
    )
    return np.asarray(found[:, of.bytes > 2 * (device.cache_bytes or CACHE_BYTES)])


def _sums(folder: Path, device: DevicePeaks) -> Numbers:
    """Columns: what one shot and two carry at the link's bandwidth, the library's time, what was timed."""
    link = link_of(device)
    assert link is not None
    found = []
    for path in sorted(folder.glob("comm/*/*/custom_allreduce_perf.parquet")):
        rows = pl.read_parquet(path).group_by("num_gpus", "message_size").agg(pl.col("latency").min())
        for devices, numbers, ms in rows.iter_rows():
            size = 2.0 * numbers
            if 2_048 <= size <= 64e6:
                each = size / link.bandwidth_bytes_s * 1e9
                library = link.transfer_ns("all_reduce", size, devices)
                found.append(((devices - 1) * each, 2 * (devices - 1) / devices * each, library, ms * 1e6))
    return np.asarray(np.array(found).T, np.float64)


def _beside_experts(folder: Path, device: DevicePeaks) -> float:
    rows = pl.concat(
        [pl.read_parquet(path) for path in sorted(folder.glob("moe/*/*/moe_perf.parquet"))], how="diagonal_relaxed"
    ).filter(
        pl.col("moe_dtype") == "bfloat16",
        pl.col("moe_ep_size") == 1,
        pl.col("moe_tp_size") <= 8,
        pl.col("num_experts") <= 256,
        pl.col("num_tokens") == 1,
    )
    names = ("topk", "hidden_size", "inter_size", "moe_tp_size")
    used, hidden, inner, devices = (rows[name].to_numpy().astype(float) for name in names)
    inside, none, ones = inner / devices, np.zeros(rows.height, np.bool_), np.ones(rows.height)
    bf16 = np.full(rows.height, "bf16")

    def product(columns: Numbers, length: Numbers) -> Numbers:
        moved = 2 * used * (length + length * columns + columns)
        kind = np.full(rows.height, "matrix")
        of = Operations(kind, kind, bf16, 2 * used * columns * length, moved, used, ones, columns, length, none)
        return operation_times(of, device).ns

    kind = np.full(rows.height, "elementwise")
    moved = 6 * used * inside
    between = Operations(kind, kind, bf16, np.zeros(rows.height), moved, ones, ones, moved / 4, ones, none)
    products = product(2 * inside, hidden) + product(hidden, inside) + operation_times(between, device).ns
    return float(np.median(rows["latency"].to_numpy() * 1e6 - products))


def _sum_ns(constants: Numbers, given: Numbers) -> Numbers:
    one, two, share = constants
    return np.asarray(np.minimum(one + given[0] / share, two + given[1] / share))


def _judge(what: str, groups: dict[str, list[Numbers]], law: Law, begin: tuple[float, ...]) -> None:
    """Print the constants fitted to all, and the errors and the band on each generation that none was fitted to."""
    data = {name: np.concatenate(parts, axis=1) for name, parts in groups.items()}
    print(what, sum(each.shape[1] for each in data.values()), "timings;", _fitted(data.values(), law, begin).round(3))
    measured_over_predicted = []
    for name, left in data.items():
        fitted = _fitted([each for other, each in data.items() if other != name], law, begin)
        ratio, before = law(fitted, left) / left[-1], left[-2] / left[-1]
        measured_over_predicted.append(1 / ratio)
        off = (f"{100 * abs(each - 1).mean():5.1f} {100 * (each - 1).mean():+6.1f}" for each in (ratio, before))
        print(f"  {name:22}", *off)
    print("  band", np.round(middle_ninety(measured_over_predicted), 2))


def _fitted(data: Iterable[Numbers], law: Law, begin: tuple[float, ...]) -> Numbers:
    """Constants of the least soft error of the logarithm, where each generation counts alike."""
    parts = list(data)
    if not begin:
        return np.array([])

    def residuals(logs: Numbers) -> Numbers:
        return np.concatenate(
            [np.log(law(np.exp(logs), each) / each[-1]) * 100 / each.shape[1] ** 0.5 for each in parts]
        )

    return np.asarray(np.exp(least_squares(residuals, np.log(begin), loss="soft_l1", f_scale=0.3).x))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
